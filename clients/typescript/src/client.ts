// A client of Pagemill on the npm package `redis`. The protocol: docs/protocol.md.
import { createHash, randomBytes } from "node:crypto";
import { createClient, type RedisClientType } from "redis";
import { fileURLToPath } from "node:url";
import { sourceOf } from "./scripts.js";
import { UNSUPPORTED, type ErrorInfo, type Job, type Result } from "./types.js";

export type { Job, Result } from "./types.js";
export type State = "queued" | "delayed" | "running" | "succeeded" | "failed" | "cancelled" | "expired" | "dead";
/** What a stream yields: text of a sample, the notice that all samples begin again, or the end. */
export type StreamEvent = { index?: number; text?: string; restart?: true; state?: State };
export type BatchItem = { key: string; state: State; result?: Result; error?: ErrorInfo };

const CLASSES: Record<string, number> = { high: 0, normal: 1, low: 2 };
const QUEUE_LIMIT = "1000000"; // jobs that may wait, unless the queue has a limit of its own
const POLL_MS = 50;
const ENTRIES_PER_READ = "256";
const JOBS_PER_PAGE = "500";
const BYTES_PER_PAGE = String(8 * 2 ** 20);
const CHARACTERS_PER_TOKEN = 3;
const DEFAULT_MAX_TOKENS = 16;
const TIMES: (keyof Job)[] = ["delay", "ttl", "run_at", "deadline"]; // seconds in a job, milliseconds in its header
const SCRIPTS = fileURLToPath(new URL("lua", import.meta.url));
const ACTIVE = new Set(["queued", "delayed", "running"]);

/** `code` is conflict, full, too_large, not_found, timeout, cancelled, expired, dead, or failed; `detail` a job's error. */
export class PagemillError extends Error {
  constructor(readonly code: string, message: string, readonly detail?: ErrorInfo) {
    super(message);
  }
}

const sleep = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

export class Pagemill {
  private readonly prefix: string;
  private readonly sources = new Map<string, string>();

  /** `scripts`: the folder of the queue's Lua scripts, by default those built into this package. */
  static async connect(
    { url = "redis://127.0.0.1:6379", queue = "default", scripts = SCRIPTS }: { url?: string; queue?: string; scripts?: string } = {},
  ): Promise<Pagemill> {
    const redis: RedisClientType = createClient({ url });
    await redis.connect();
    return new this(redis, queue, scripts);
  }

  constructor(readonly redis: RedisClientType, queue: string, private readonly scripts: string = SCRIPTS) {
    this.prefix = `pagemill:{${queue}}:`;
  }

  close(): void {
    this.redis.close();
  }

  /** Runs one script. Every script may be sent twice, so a call whose reply was lost may be repeated. */
  async call(script: string, ...args: (string | number)[]): Promise<any> {
    const source = this.#source(script);
    const options = { keys: [this.prefix], arguments: args.map(String) };
    try {
      return await this.redis.evalSha(createHash("sha1").update(source).digest("hex"), options);
    } catch (error) {
      if (!String((error as Error).message).startsWith("NOSCRIPT")) throw error;
      // Not EVAL: the Redis users of docs/security.md can only run EVALSHA and SCRIPT LOAD.
      return await this.redis.evalSha(await this.redis.scriptLoad(source), options);
    }
  }

  /** Submits a job, such as {prompt, model, max_tokens}; returns its id, or that of the idempotency key's job. */
  async submit(job: Job, id = randomBytes(12).toString("hex")): Promise<string> {
    const [word = ""] = await this.#submit("", [[id, job]]);
    if (word.startsWith("same:")) return word.slice("same:".length);
    if (word.startsWith("conflict:"))
      throw new PagemillError("conflict", `the idempotency key belongs to job ${word.slice("conflict:".length)}`);
    if (word !== "created" && word !== "exists") throw new PagemillError(word, `job ${id} was not stored: ${word}`);
    return id;
  }

  /** Submits jobs as one batch. Repeating it with the same keys adds only what is missing. */
  async submitBatch(jobs: Job[], batch = randomBytes(12).toString("hex")): Promise<string> {
    const name = (job: Job, i: number) => createHash("sha256").update(`${batch} ${job.key ?? i}`).digest("hex").slice(0, 24);
    const words = await this.#submit(batch, jobs.map((job, i): [string, Job] => [name(job, i), job]));
    const refused = words.find((word) => word !== "created" && word !== "exists");
    if (refused) throw new PagemillError(refused, `batch ${batch} is stored in part: ${refused}`);
    return batch;
  }

  async status(id: string): Promise<{ state: State }> {
    const { state } = map((await this.call("status", id))[0]);
    if (!state) throw new PagemillError("not_found", `no job ${id}`);
    return { state };
  }

  /** Waits for a job's result. */
  async result(id: string, { timeoutMs = 600_000 } = {}): Promise<Result> {
    for (const giveUp = Date.now() + timeoutMs; ; await sleep(POLL_MS)) {
      const end = map(await this.call("outcome", id));
      if (!end.state) throw new PagemillError("not_found", `no job ${id}`);
      if (!ACTIVE.has(end.state)) return resultOf(end);
      if (Date.now() > giveUp) throw new PagemillError("timeout", `job ${id} is ${end.state}; it goes on`);
    }
  }

  /** Yields {index, text} as a job writes, {restart} when it begins again, and {state} at its end. */
  async *stream(id: string): AsyncGenerator<StreamEvent, void> {
    let [epoch, position, seen] = [0, 0, new Map<number, string>()];
    for (;;) {
      const [reply] = await this.call("feed", 4, id, epoch, position, ENTRIES_PER_READ);
      const { state, epoch: now, entries, outcome: end } = map(reply);
      if (!state) throw new PagemillError("not_found", `no job ${id}`);
      if (Number(now) !== epoch) {
        if (seen.size > 0) yield { restart: true };
        [epoch, position, seen] = [Number(now), 0, new Map<number, string>()];
      }
      const deltas: { index?: number; text?: string }[] = entries.map((entry: string) => JSON.parse(entry));
      const hasEnded = !ACTIVE.has(state);
      const result: Result | undefined = state === "succeeded" && end ? JSON.parse(end) : undefined;
      for (const output of result?.outputs ?? []) {
        // The feed is deleted when the result is stored: the rest of each sample is read from the result.
        const written = deltas.filter((delta) => (delta.index ?? 0) === output.index).map((delta) => delta.text);
        const known = (seen.get(output.index) ?? "") + written.join("");
        deltas.push({ index: output.index, text: (output.text ?? "").slice(known.length) });
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
  async cancel(id: string): Promise<boolean> {
    const [word] = await this.call("cancel", id);
    if (word === "missing") throw new PagemillError("not_found", `no job ${id}`);
    return word !== "done";
  }

  async batchCounts(batch: string): Promise<Record<string, number>> {
    const counts = Object.entries(map(await this.call("batch_counts", batch)));
    if (counts.length === 0) throw new PagemillError("not_found", `no batch ${batch}`);
    return Object.fromEntries(counts.map(([name, count]) => [name, Number(count)]));
  }

  /** Yields {key, state, result or error} of every job of a batch, in the order of the submit, as they end. */
  async *batchResults(batch: string): AsyncGenerator<BatchItem, void> {
    const { total = 0 } = await this.batchCounts(batch);
    for (let position = 0; position < total; ) {
      const [next, page] = await this.call("batch_ordered", batch, position, JOBS_PER_PAGE, BYTES_PER_PAGE);
      for (const [, end] of page) {
        const { key = "", state, outcome } = map(end);
        yield { key, state, [state === "succeeded" ? "result" : "error"]: outcome ? JSON.parse(outcome) : undefined };
      }
      if (Number(next) === position) await sleep(POLL_MS);
      position = Number(next);
    }
  }

  async #submit(batch: string, jobs: [string, Job][]): Promise<string[]> {
    const args = jobs.flatMap(([id, job]) => [header(id, job, batch), JSON.stringify({ v: 1, ...withSeed(job) })]);
    return (await this.call("submit", batch, QUEUE_LIMIT, ...args)).split(" ");
  }

  #source(script: string): string {
    if (!this.sources.has(script)) this.sources.set(script, sourceOf(this.scripts, script));
    return this.sources.get(script) as string;
  }
}

// All executions must draw the same noise, so a job without a seed gets one here.
const withSeed = (job: Job): Job => ("seed" in job ? job : { seed: randomBytes(6).readUIntBE(0, 6), ...job });

function header(id: string, job: Job, batch: string): string {
  const wrong = UNSUPPORTED.find((name) => name in job);
  if (wrong) throw new PagemillError("unsupported", `${wrong}: this client does not support the field; use the gateway or Python`);
  const { tenant = "default", priority = "normal", n = 1 } = job;
  const most = job.max_tokens ?? DEFAULT_MAX_TOKENS;
  const prompt = job.prompt ?? JSON.stringify(job.messages ?? job.prompt_token_ids ?? "");
  const tokens = Math.ceil(prompt.length / CHARACTERS_PER_TOKEN);
  const fields: Record<string, unknown> = { id, lane: `1:${CLASSES[priority]}:${tenant}:${job.model}`, cost: tokens + most * n };
  for (const name of ["max_attempts", "webhook"] as const) if (job[name] != null) fields[name] = job[name];
  for (const name of TIMES) if (job[name] != null) fields[name] = Math.round(Number(job[name]) * 1000);
  if (n !== 1) fields.n = n;
  if (job.stream) fields.stream = 1;
  if (job.keep_input) fields.keep = 1;
  if (job.metadata) fields.metadata = JSON.stringify(job.metadata);
  if (batch && job.key != null) fields.key = job.key;
  if (job.idempotency_key != null) {
    fields.idem = `${tenant}:${job.idempotency_key}`;
    fields.digest = createHash("sha256").update(JSON.stringify({ ...job, metadata: 0 })).digest("hex").slice(0, 24);
  }
  return JSON.stringify(fields);
}

// A reply of alternating names and values. Later releases can add names.
const map = (flat: any[]): Record<string, any> =>
  Object.fromEntries(flat.flatMap((name, i) => (i % 2 === 0 ? [[name, flat[i + 1]]] : [])));

function resultOf({ id, state, outcome }: Record<string, any>): Result {
  const content = outcome ? JSON.parse(outcome) : undefined;
  if (state === "succeeded") return content;
  throw new PagemillError(state, `job ${id} ${state}: ${content?.message ?? "no more is known"}`, content);
}
