// The AI SDK on the gateway: npm install ai @ai-sdk/openai-compatible, then node ai-sdk.mjs
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, streamText } from "ai";

const pagemill = createOpenAICompatible({
  name: "pagemill",
  baseURL: process.env.GATEWAY_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.PAGEMILL_API_KEY ?? "none",
  supportsStructuredOutputs: true,
});
const model = pagemill(process.env.PAGEMILL_MODEL ?? "smollm2");

const { textStream } = streamText({ model, prompt: "Name three colors.", maxOutputTokens: 60 });
for await (const text of textStream) process.stdout.write(text);
console.log();

// The output follows the schema: the worker excludes all other tokens.
const schema = jsonSchema({
  type: "object",
  properties: { sentiment: { enum: ["positive", "negative"] } },
  required: ["sentiment"],
  additionalProperties: false,
});
const { output } = await generateText({ model, prompt: "I would buy it again.", output: Output.object({ schema }) });
console.log(output);
