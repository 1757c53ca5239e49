// The requests of the playground, and the same requests as source code.

export const PATHS = { prompt: "v1/completions", chat: "v1/chat/completions", labels: "v1/chat/completions", json: "v1/chat/completions" };
const EXTRA = ["structured_outputs", "label_probs"]; // not in the types of OpenAI's clients

/** The body of a request. Throws an Error if the schema or the labels are invalid. */
export function bodyOf({ mode, model, system, prompt, labels, schema, maxTokens, temperature }) {
  const common = { model, max_tokens: maxTokens, temperature };
  if (mode === "prompt") return { ...common, prompt, stream: true };
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: prompt }];
  if (mode === "labels") {
    const choice = [...new Set(labels.split(",").map((label) => label.trim()).filter(Boolean))];
    if (choice.length < 2) throw new Error("labels: at least two are needed, separated by commas");
    return { ...common, messages, structured_outputs: { choice }, label_probs: "product" };
  }
  if (mode === "json") return { ...common, messages, response_format: formatOf(schema), stream: true };
  return { ...common, messages, stream: true };
}

function formatOf(text) {
  let schema;
  try { schema = JSON.parse(text); } catch (error) { throw new Error(`JSON schema: ${error.message}`); }
  return { type: "json_schema", json_schema: { name: "result", schema } };
}

/** A JSON value as a literal of Python. */
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const [items, open, close] = Array.isArray(value)
    ? [value.map((item) => literal(item, deeper)), "[", "]"]
    : [Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, deeper)}`), "{", "}"];
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length + indent.length < 90 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${deeper}${item},\n`).join("")}${indent}${close}`;
}

function curl(origin, path, body) {
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl --no-buffer ${origin}/${path} \\`,
    '  -H "authorization: Bearer $PAGEMILL_API_KEY" -H "content-type: application/json" \\',
    `  -d '${text}'`,
  ].join("\n");
}

const method = (path) => (path === PATHS.prompt ? "completions" : "chat.completions");
const delta = (path) => (path === PATHS.prompt ? "choices[0].text" : "choices[0].delta.content");

function python(origin, path, body) {
  const own = Object.entries(body).filter(([name]) => !EXTRA.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => EXTRA.includes(name)));
  const fields = own.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`);
  if (Object.keys(extra).length) fields.push(`    extra_body=${literal(extra, "    ")},\n`);
  const head = [
    "import os\n", "from openai import OpenAI\n",
    `client = OpenAI(base_url="${origin}/v1", api_key=os.environ.get("PAGEMILL_API_KEY", "none"))`,
  ].join("\n");
  const call = `client.${method(path)}.create(\n${fields.join("")})`;
  if (!body.stream) return `${head}\nanswer = ${call}\nprint(answer.choices[0].model_dump()["label_probs"])`;
  return `${head}\nfor chunk in ${call}:\n    if chunk.choices:\n        print(chunk.${delta(path)} or "", end="", flush=True)`;
}

function typescript(origin, path, body) {
  const extra = EXTRA.some((name) => name in body);
  const text = JSON.stringify(body, null, 2) + (extra ? " as OpenAI.ChatCompletionCreateParamsNonStreaming" : "");
  const head = [
    'import OpenAI from "openai";\n',
    `const client = new OpenAI({ baseURL: "${origin}/v1", apiKey: process.env.PAGEMILL_API_KEY ?? "none" });`,
  ].join("\n");
  const call = `await client.${method(path)}.create(${text})`;
  if (!body.stream) return `${head}\nconst answer: any = ${call};\nconsole.log(answer.choices[0].label_probs);`;
  return `${head}\nfor await (const chunk of ${call}) {\n  process.stdout.write(chunk.${delta(path).replace("[0].", "[0]?.")} ?? "");\n}`;
}

export const SOURCES = { curl, python, typescript };

/** Calls `onEvent` with each event of a stream of server-sent events. Throws the Error that an event reports. */
export async function readEvents(answer, onEvent) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = answer.body.getReader(); ;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      onEvent(found);
    }
    if (done) return;
  }
}
