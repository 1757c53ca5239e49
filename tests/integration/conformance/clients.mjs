// Clients from npm on the gateway of GATEWAY_URL, which echoes prompts. Prints the name of each check that passes.

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { ChatOpenAI } from "@langchain/openai";
import { generateText, jsonSchema, streamText, tool } from "ai";
import OpenAI, { NotFoundError } from "openai";

const baseURL = process.env.GATEWAY_URL;
const call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>';
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "weather", parameters } };
const cities = ["Rome", "Oslo"];
const fromAsync = async (items, map = (item) => item) => {
  const found = [];
  for await (const item of items) found.push(map(item));
  return found;
};
const png = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==";
const user = (content) => [{ role: "user", content }];

const openai = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const provider = createOpenAICompatible({ name: "pagemill", baseURL, apiKey: "none", includeUsage: true });
const model = provider("echo");
const langchain = new ChatOpenAI({
  model: "echo", apiKey: "none", maxRetries: 0, temperature: 0, configuration: { baseURL },
});
const format = { type: "json_schema", json_schema: { name: "weather", strict: true, schema: parameters } };

const checks = {
  async "openai: a chat"() {
    const answer = await openai.chat.completions.create({ model: "echo", messages: user("one two"), max_tokens: 7 });
    assert.equal(answer.choices[0].message.content, "one two");
    assert.equal(answer.usage.completion_tokens, 7);
  },
  async "openai: a stream"() {
    const stream = openai.chat.completions.stream({ model: "echo", messages: user(call), tools: [weather] });
    const [made] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(made.function.arguments), { city: "Rome" });
  },
  async "openai: structured output"() {
    const answer = await openai.chat.completions.parse({ model: "echo", messages: user("x"), response_format: format });
    assert.ok(cities.includes(answer.choices[0].message.parsed.city));
  },
  async "openai: responses"() {
    const answer = await openai.responses.create({ model: "echo", input: "one two" });
    assert.ok(answer.output_text.startsWith("one two"));
    let text = "";
    for await (const event of await openai.responses.create({ model: "echo", input: "one two", stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, answer.output_text);
  },
  async "openai: an image"() {
    const chat = [{ type: "text", text: "What?" }, { type: "image_url", image_url: { url: png } }];
    const answer = await openai.chat.completions.create({ model: "echo", messages: user(chat) });
    assert.equal(answer.choices[0].message.content, "What?[image]\n");
    const input = user([{ type: "input_image", image_url: png, detail: "auto" }]);
    assert.equal((await openai.responses.create({ model: "echo", input })).output_text, "[image]\n");
  },
  async "openai: an error"() {
    await assert.rejects(openai.chat.completions.create({ model: "other", messages: user("x") }), NotFoundError);
  },
  async "ai: a text"() {
    const { text, usage } = await generateText({ model, prompt: "one two", maxOutputTokens: 7 });
    assert.equal(text, "one two");
    assert.equal(usage.outputTokens, 7);
  },
  async "ai: a stream"() {
    const { textStream, usage } = streamText({ model, prompt: "one two", maxOutputTokens: 7 });
    assert.equal((await fromAsync(textStream)).join(""), "one two");
    assert.equal((await usage).outputTokens, 7);
  },
  async "ai: an image"() {
    const messages = user([{ type: "text", text: "What?" }, { type: "image", image: png }]);
    assert.equal((await generateText({ model, messages })).text, "What?[image]\n");
  },
  async "ai: a tool"() {
    const tools = { weather: tool({ inputSchema: jsonSchema(parameters) }) };
    for (const toolChoice of ["auto", "required"]) {
      const { toolCalls } = await generateText({ model, prompt: call, tools, toolChoice });
      assert.ok(cities.includes(toolCalls[0].input.city));
    }
  },
  async "langchain: a chat"() {
    assert.match((await langchain.invoke("one two")).content, /^one two/);
    const parts = await fromAsync(await langchain.stream("one two"), (chunk) => chunk.content);
    assert.match(parts.join(""), /^one two/);
  },
  async "langchain: a tool"() {
    for (const tool_choice of ["auto", "required"]) {
      const { tool_calls } = await langchain.bindTools([weather], { tool_choice }).invoke(call);
      assert.ok(cities.includes(tool_calls[0].args.city));
    }
  },
  async "langchain: structured output"() {
    for (const method of ["jsonSchema", "functionCalling"]) {
      const found = await langchain.withStructuredOutput(parameters, { name: "weather", method }).invoke("x");
      assert.ok(cities.includes(found.city));
    }
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(name);
  } catch (error) {
    console.error(name, error);
    process.exitCode = 1;
  }
}
