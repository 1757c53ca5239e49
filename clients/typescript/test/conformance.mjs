// Runs a case of docs/conformance with the built client: node conformance.mjs <redis url> <queue> <case.json>
// Prints `worker` when a case needs a worker on the queue, and continues after a line on standard input.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline/promises";
import { ErrorReply } from "redis";
import { Pagemill, PagemillError } from "../dist/client.js";

const AT_WILL = new Set(["ends", "sweep", "stats", "workers"]);

/** Whether a value is what a case expects; docs/conformance/README.md has the forms. */
function fits(pattern, value) {
  if (Array.isArray(pattern)) {
    if (!Array.isArray(value)) return false;
    const rest = pattern.at(-1) === "...";
    const first = rest ? pattern.slice(0, -1) : pattern;
    if (rest ? value.length < first.length : value.length !== first.length) return false;
    return first.every((one, i) => fits(one, value[i]));
  }
  if (pattern === null || typeof pattern !== "object") return pattern === value;
  if ("json" in pattern) {
    const read = JSON.parse(value);
    const optional = Object.entries(pattern.optional ?? {}).filter(([name]) => name in read);
    const whole = { ...pattern.json, ...Object.fromEntries(optional) };
    return fits(whole, read) && Object.keys(read).every((name) => name in whole);
  }
  if ("match" in pattern) return new RegExp(`^(?:${pattern.match})$`, "s").test(String(value));
  if ("any" in pattern) return typeof value === pattern.any;
  return value !== null && typeof value === "object" && Object.keys(pattern).every((name) => fits(pattern[name], value[name]));
}

/** Keeps the calls of a client and their replies, the last one of repeated calls. */
class Recorder extends Pagemill {
  calls = [];

  async call(script, ...args) {
    const reply = await super.call(script, ...args);
    const sent = [script, ...args.map(String)];
    if (JSON.stringify(this.calls.at(-1)?.sent) === JSON.stringify(sent)) this.calls.pop();
    if (!AT_WILL.has(script)) this.calls.push({ sent, reply });
    return reply;
  }
}

async function collect(items) {
  const all = [];
  for await (const item of items) all.push(item);
  return all;
}

const operations = {
  call: (client, args) => client.call(...args),
  submit: (client, { job, id }) => client.submit(job, id),
  submit_batch: (client, { jobs, id }) => client.submitBatch(jobs, id),
  status: (client, { id }) => client.status(id),
  cancel: (client, { id }) => client.cancel(id),
  batch_counts: (client, { id }) => client.batchCounts(id),
  async result(client, { id }) {
    const { outputs } = await client.result(id, { timeoutMs: 120_000 });
    const [first] = outputs;
    return { text: first.text, texts: outputs.length, finish_reason: first.finish_reason, tokens: first.token_ids.length };
  },
  async stream(client, { id }) {
    const events = await collect(client.stream(id));
    const last = events.findLastIndex((event) => event.restart);
    return { text: events.slice(last + 1).map((event) => event.text ?? "").join(""), state: events.at(-1).state };
  },
  async batch_results(client, { id }) {
    const items = await collect(client.batchResults(id));
    return items.map(({ key, state, result }) => ({ key, state, text: result?.outputs[0].text ?? null }));
  },
};

async function given(client, step) {
  try {
    return await operations[step.do](client, step.with);
  } catch (error) {
    if (error instanceof PagemillError) return { error: error.code, code: error.detail?.code };
    if (!(error instanceof ErrorReply)) throw error;
    return { error: error.message };
  }
}

const [url, queue, path] = process.argv.slice(2);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const { redis } = await Pagemill.connect({ url, queue });
const client = new Recorder(redis, queue);
const { title, steps } = JSON.parse(readFileSync(path, "utf8"));
for (const [number, step] of steps.entries()) {
  client.calls = [];
  if (step.do === "worker") {
    console.log("worker");
    await lines.next();
    continue;
  }
  const value = await given(client, step);
  const parts = { gives: value, sends: client.calls.map((call) => call.sent), replies: client.calls.map((call) => call.reply) };
  for (const [name, part] of Object.entries(parts)) {
    if (!(name in step) || fits(step[name], part)) continue;
    console.error(`${title}, step ${number}: ${step.do} ${name} ${JSON.stringify(part)}, not ${JSON.stringify(step[name])}`);
    process.exit(1);
  }
}
console.log("passed");
process.exit(0);
