// A client of Pagemill for Node, on the npm package `redis`. The protocol: docs/protocol.md.
import { createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createClient } from "redis";

const CLASSES = { high: 0, normal: 1, low: 2 };
const QUEUE_LIMIT = "1000000"; // jobs that may wait, unless the queue has a limit of its own
const POLL_MS = 50;
const ENTRIES_PER_READ = "256";
const JOBS_PER_PAGE = "500";
const BYTES_PER_PAGE = String(8 * 2 ** 20);
const CHARACTERS_PER_TOKEN = 3;
const DEFAULT_MAX_TOKENS = 16;
const TIMES = ["delay", "ttl", "run_at", "deadline"]; // seconds in a job, milliseconds in its header
const ACTIVE = new Set(["queued", "delayed", "running"]);

/** `code` is conflict, full, too_large, not_found, timeout, cancelled, expired, dead, or failed; `detail` a job's error. */
export class PagemillError extends Error {
  constructor(code, message, detail) {
    super(message);
    this.code = code;
    this.detail = detail;
  }
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Pagemill {
  /** `scripts`: the folder producer/wire/lua of the Python package. Ends its connection with `close`. */
  static async connect({ url = "redis://127.0.0.1:6379", queue = "default", scripts }) {
    const redis = createClient({ url });
    await redis.connect();
    return new Pagemill(redis, queue, scripts);
  }

  constructor(redis, queue, scripts) {
    this.redis = redis;
    this.prefix = `pagemill:{${queue}}:`;
    this.scripts = scripts;
    this.sources = new Map();
  }

  close() {
    return this.redis.close();
  }

  /** Runs one script. Every script may be sent twice, so a call whose reply was lost may be repeated. */
  async call(script, ...args) {
    const source = this.#source(script);
    const options = { keys: [this.prefix], arguments: args.map(String) };
    try {
      return await this.redis.evalSha(createHash("sha1").update(source).digest("hex"), options);
    } catch (error) {
      if (!String(error.message).startsWith("NOSCRIPT")) throw error;
      return await this.redis.eval(source, options);
    }
  }

  /** Submits a job, such as {prompt, model, max_tokens}; returns its id, or that of the idempotency key's job. */
  async submit(job, id = randomBytes(12).toString("hex")) {
    const [word] = await this.#submit("", [[id, job]]);
    if (word.startsWith("same:")) return word.slice("same:".length);
    if (word.startsWith("conflict:"))
      throw new PagemillError("conflict", `the idempotency key belongs to job ${word.slice("conflict:".length)}`);
    if (word !== "created" && word !== "exists") throw new PagemillError(word, `job ${id} was not stored: ${word}`);
    return id;
  }

  /** Submits jobs as one batch. Repeating it with the same keys adds only what is missing. */
  async submitBatch(jobs, batch = randomBytes(12).toString("hex")) {
    const name = (job, i) => createHash("sha256").update(`${batch} ${job.key ?? i}`).digest("hex").slice(0, 24);
    const words = await this.#submit(batch, jobs.map((job, i) => [name(job, i), job]));
    const refused = words.find((word) => word !== "created" && word !== "exists");
    if (refused) throw new PagemillError(refused, `batch ${batch} is stored in part: ${refused}`);
    return batch;
  }

  async status(id) {
    const [fields] = await this.call("status", id);
    if (fields.length === 0) throw new PagemillError("not_found", `no job ${id}`);
    return { state: fields[0] };
  }

  /** Waits for a job's result. */
  async result(id, { timeoutMs = 600_000 } = {}) {
    for (const giveUp = Date.now() + timeoutMs; ; await sleep(POLL_MS)) {
      const end = record(await this.call("outcome", id));
      if (end.state === "") throw new PagemillError("not_found", `no job ${id}`);
      if (!ACTIVE.has(end.state)) return resultOf(end);
      if (Date.now() > giveUp) throw new PagemillError("timeout", `job ${id} is ${end.state}; it goes on`);
    }
  }

  /** Yields {index, text} as a job writes, {restart} when it begins again, and {state} at its end. */
  async *stream(id) {
    let [epoch, position, seen] = [0, 0, new Map()];
    for (;;) {
      const [state, now, , entries, end] = await this.call("feed", id, epoch, position, ENTRIES_PER_READ);
      if (!state) throw new PagemillError("not_found", `no job ${id}`);
      if (Number(now) !== epoch) {
        if (seen.size > 0) yield { restart: true };
        [epoch, position, seen] = [Number(now), 0, new Map()];
      }
      const deltas = entries.map((entry) => JSON.parse(entry));
      const hasEnded = !ACTIVE.has(state);
      for (const output of state === "succeeded" && end ? JSON.parse(end).outputs : []) {
        // The feed is gone once the result is stored: the rest of each sample comes from there.
        const written = deltas.filter((delta) => (delta.index ?? 0) === output.index).map((delta) => delta.text);
        const known = (seen.get(output.index) ?? "") + written.join("");
        deltas.push({ index: output.index, text: output.text.slice(known.length) });
      }
      for (const { index = 0, text = "" } of deltas) {
        seen.set(index, (seen.get(index) ?? "") + text);
        if (text) yield { index, text };
      }
      position += entries.length;
      if (hasEnded && entries.length === 0) return yield { state };
      if (entries.length === 0) await sleep(POLL_MS);
    }
  }

  /** True: the job has ended by this, or will. False: it had ended. */
  async cancel(id) {
    const [word] = await this.call("cancel", id);
    if (word === "missing") throw new PagemillError("not_found", `no job ${id}`);
    return word !== "done";
  }

  async batchCounts(batch) {
    const flat = await this.call("batch_counts", batch);
    if (flat.length === 0) throw new PagemillError("not_found", `no batch ${batch}`);
    const counts = {};
    for (let i = 0; i < flat.length; i += 2) counts[flat[i]] = Number(flat[i + 1]);
    return counts;
  }

  /** Yields {key, state, result or error} of every job of a batch, in the order of the submit, as they end. */
  async *batchResults(batch) {
    const { total } = await this.batchCounts(batch);
    for (let position = 0; position < total; ) {
      const [next, page] = await this.call("batch_ordered", batch, position, JOBS_PER_PAGE, BYTES_PER_PAGE);
      for (const [, end] of page) {
        const { key, state, body } = record(end);
        yield { key, state, [state === "succeeded" ? "result" : "error"]: body ? JSON.parse(body) : undefined };
      }
      if (Number(next) === position) await sleep(POLL_MS);
      position = Number(next);
    }
  }

  async #submit(batch, jobs) {
    const args = jobs.flatMap(([id, job]) => [header(id, job, batch), JSON.stringify({ v: 1, ...withSeed(job) })]);
    return (await this.call("submit", batch, QUEUE_LIMIT, ...args)).split(" ");
  }

  /** The script's text, with each included file once. */
  #source(script) {
    if (!this.sources.has(script)) this.sources.set(script, this.#expand(script, new Set()));
    return this.sources.get(script);
  }

  #expand(name, seen) {
    if (seen.has(name)) return "";
    seen.add(name);
    const text = readFileSync(join(this.scripts, `${name}.lua`), "utf8");
    return text.replace(/^-- @include (\w+)\n/gm, (_, included) => this.#expand(included, seen));
  }
}

// Every execution must draw the same noise, so a job without a seed gets one here.
const withSeed = (job) => ("seed" in job ? job : { seed: randomBytes(6).readUIntBE(0, 6), ...job });

function header(id, job, batch) {
  const { tenant = "default", priority = "normal", n = 1, max_tokens: most = DEFAULT_MAX_TOKENS } = job;
  const prompt = job.prompt ?? JSON.stringify(job.messages ?? job.prompt_token_ids ?? "");
  const tokens = Math.ceil(prompt.length / CHARACTERS_PER_TOKEN);
  const fields = { id, lane: `1:${CLASSES[priority]}:${tenant}:${job.model}`, cost: tokens + most * n };
  for (const name of ["max_attempts", "webhook"]) if (job[name] != null) fields[name] = job[name];
  for (const name of TIMES) if (job[name] != null) fields[name] = Math.round(job[name] * 1000);
  if (n !== 1) fields.n = n;
  if (job.stream) fields.stream = 1;
  if (job.metadata) fields.metadata = JSON.stringify(job.metadata);
  if (batch && job.key != null) fields.key = job.key;
  if (job.idempotency_key != null) {
    fields.idem = `${tenant}:${job.idempotency_key}`;
    fields.digest = createHash("sha256").update(JSON.stringify({ ...job, metadata: 0 })).digest("hex").slice(0, 24);
  }
  return JSON.stringify(fields);
}

const record = ([id, state, key, , body]) => ({ id, state, key, body });

function resultOf({ id, state, body }) {
  const content = body ? JSON.parse(body) : undefined;
  if (state === "succeeded") return content;
  throw new PagemillError(state, `job ${id} ${state}: ${content?.message ?? "no more is known"}`, content);
}
