// The playground: one request of the gateway's API, its result, its job, and its source code.

import { ask, headers, hasKey, keepKey } from "./asking.js";
import { PATHS, SOURCES, bodyOf, readEvents } from "./requests.js";
import { cell, element, seconds, set } from "./rows.js";
import { isActive, showFacts, showState, showTimeline, whole } from "./tables.js";
import { themeButton } from "./theme.js";

const POLL_MS = 500;
const SCHEMA = {
  type: "object",
  properties: { sentiment: { enum: ["positive", "negative"] }, reason: { type: "string", maxLength: 80 } },
  required: ["sentiment", "reason"],
  additionalProperties: false,
};
const byId = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
let running = null; // of the request: its AbortController

function report(text) {
  set(byId("notice"), text);
  byId("notice").hidden = !text;
}

function complain(error) {
  if (error.status === 401) {
    byId("login").hidden = false;
    byId("request").hidden = byId("code").hidden = true;
    if (!hasKey()) return report("");
    keepKey("");
  }
  report(error.status === undefined && error instanceof TypeError ? "The gateway does not answer." : `${error.message}.`);
}

async function failure(answer) {
  const body = await answer.json().catch(() => null);
  return Object.assign(new Error(body?.error?.message || `the gateway answers ${answer.status}`), { status: answer.status });
}

async function open() {
  const answer = await fetch("v1/models", { headers: headers(), credentials: "omit", cache: "no-store" });
  if (!answer.ok) throw await failure(answer);
  const { data } = await answer.json();
  byId("model").replaceChildren(...data.map(({ id }) => Object.assign(element("option", "", id), { value: id })));
  report(data.length ? "" : "No worker serves a model; start one: pagemill worker --model smollm2");
  byId("login").hidden = true;
  byId("leave").hidden = !hasKey();
  byId("request").hidden = byId("code").hidden = false;
  showMode();
}

function fields() {
  return {
    mode: chosen("mode"), model: byId("model").value, system: byId("system").value, prompt: byId("prompt").value,
    labels: byId("labels").value, schema: byId("schema").value,
    maxTokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value),
  };
}

function showMode() {
  const mode = chosen("mode");
  for (const node of document.querySelectorAll("[data-modes]")) node.hidden = !node.dataset.modes.split(" ").includes(mode);
  showSource();
}

function showSource() {
  let text;
  try { text = SOURCES[chosen("language")](location.origin, PATHS[chosen("mode")], bodyOf(fields())); } catch (error) { text = error.message; }
  set(byId("source"), text);
}

function showBars(probabilities) {
  byId("bars").hidden = false;
  byId("bars").tBodies[0].replaceChildren(...Object.entries(probabilities).map(([label, probability]) => {
    const row = element("tr"), meter = element("div", "meter"), bar = element("i"), wide = cell("wide");
    bar.style.width = `${100 * probability}%`;
    meter.append(bar);
    wide.append(meter);
    const name = cell(), share = cell("num");
    set(name, label);
    set(share, `${(100 * probability).toFixed(1)} %`);
    row.append(name, wide, share);
    return row;
  }));
}

function clear() {
  report("");
  for (const id of ["output", "reasoning", "figures"]) set(byId(id), "");
  byId("reasoning").hidden = byId("bars").hidden = byId("job").hidden = true;
  byId("result").hidden = false;
}

/** Shows what is new in a chunk of a stream, or a whole answer. Returns whether there was text. */
function show(found) {
  const [choice] = found.choices || [];
  const part = choice?.delta || choice?.message || {};
  const text = part.content || choice?.text || "", reasoning = part.reasoning || "";
  byId("output").append(text);
  byId("reasoning").append(reasoning);
  byId("reasoning").hidden = !byId("reasoning").textContent;
  if (choice?.label_probs) showBars(choice.label_probs);
  return text !== "" || reasoning !== "";
}

async function run() {
  const { mode, ...values } = fields(), body = bodyOf({ mode, ...values }), began = performance.now();
  clear();
  let id = "", first = null, usage = null;
  const take = (found) => {
    const isText = show(found);
    if (isText && first === null) first = (performance.now() - began) / 1000;
    usage = found.usage || usage;
    const job = found.id.replace(/^(chatcmpl|cmpl)-/, "");
    if (job !== id) follow(id = job, running);
  };
  if (body.stream) body.stream_options = { include_usage: true };
  const answer = await fetch(PATHS[mode], {
    method: "POST", headers: { ...headers(), "content-type": "application/json" }, body: JSON.stringify(body),
    credentials: "omit", cache: "no-store", signal: running.signal,
  });
  if (!answer.ok) throw await failure(answer);
  if (body.stream) await readEvents(answer, take);
  else take(await answer.json());
  set(byId("figures"), [
    usage ? `${whole(usage.prompt_tokens)} prompt tokens, ${whole(usage.completion_tokens)} generated` : "",
    first === null ? "" : `first text after ${seconds(first)}`, `all after ${seconds((performance.now() - began) / 1000)}`,
  ].filter(Boolean).join(" · "));
}

/** Shows the request's job until it has ended, or another request begins. */
async function follow(id, own) {
  byId("job").hidden = false;
  set(byId("job-id"), id);
  byId("job-id").href = `jobs#job/${encodeURIComponent(id)}`;
  while (own === running || running === null) {
    let found;
    try { found = await ask(`job/${encodeURIComponent(id)}`); } catch { return; } // this key may not see jobs
    if (byId("job-id").textContent !== id) return;
    const { job, timeline } = found, { progress } = job;
    showState(byId("job-state"), job.state);
    showFacts(byId("job-facts"), [
      ["model", job.model], ["queue", `${job.queue}, tenant ${job.tenant}, priority ${job.priority}`],
      ["prompt", progress.updated_at && isActive(job.state) ? `${whole(progress.prompt_tokens_done)} of ${whole(progress.prompt_tokens)} tokens` : ""],
      ["generated", progress.updated_at ? `${whole(progress.generated_tokens)} of ${whole(progress.max_tokens)} tokens` : ""],
      ["KV blocks", progress.kv_blocks && isActive(job.state) ? whole(progress.kv_blocks) : ""],
      ["error", job.error ? `${job.error.code}: ${job.error.message}` : ""],
    ]);
    showTimeline(byId("timeline"), job, timeline);
    if (!isActive(job.state)) return;
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
}

async function submit() {
  if (running) return;
  running = new AbortController();
  byId("run").disabled = true;
  byId("stop").hidden = false;
  try { await run(); } catch (error) {
    if (error.name === "AbortError") report("Stopped; the job is cancelled.");
    else complain(error);
  } finally {
    running = null;
    byId("run").disabled = false;
    byId("stop").hidden = true;
  }
}

byId("schema").value = JSON.stringify(SCHEMA, null, 2);
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(byId("key").value);
  byId("key").value = "";
  open().catch(complain);
});
byId("leave").addEventListener("click", () => { keepKey(""); location.reload(); });
byId("request").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
byId("stop").addEventListener("click", () => running?.abort());
byId("request").addEventListener("input", showSource);
byId("copy").addEventListener("click", () => navigator.clipboard?.writeText(byId("source").textContent).then(() => report("Copied."), () => {}));
for (const node of document.querySelectorAll("input[name=mode]")) node.addEventListener("change", showMode);
for (const node of document.querySelectorAll("input[name=language]")) node.addEventListener("change", showSource);
themeButton(byId("theme"));
open().catch(complain);
