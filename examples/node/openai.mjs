// OpenAI's client for Node on the gateway: npm install openai, then node openai.mjs
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.GATEWAY_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.PAGEMILL_API_KEY ?? "none",
});
const model = process.env.PAGEMILL_MODEL ?? "smollm2";

// A stream. Leaving the loop early cancels the job.
const stream = await client.chat.completions.create({
  model, messages: [{ role: "user", content: "Name three colors." }], max_tokens: 60, stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta.content ?? "");
console.log();

// A job in the background: it survives this process, the gateway and the worker. Keep its id.
let response = await client.responses.create({ model, input: "Name a river.", max_output_tokens: 30, background: true });
while (response.status === "queued" || response.status === "in_progress") {
  await new Promise((done) => setTimeout(done, 200));
  response = await client.responses.retrieve(response.id);
}
console.log(response.status, response.output_text);
