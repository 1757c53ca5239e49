// The page of jobs. The part of the address after # says what is shown: #list?state=dead, #job/<id>. A browser does
// not send that part to any server.

import { ask, hasKey, keepKey, query } from "./asking.js";
import { seconds, set, workerRows } from "./rows.js";
import {
  actButton, batchTable, isActive, jobLink, jobTable, laneTable, listLink, showFacts, showParts, showState, showTimeline, whole,
} from "./tables.js";
import { themeButton } from "./theme.js";

const REFRESH_MS = 5000;
const byId = (id) => document.getElementById(id);
const say = (id, text) => set(byId(id), text);
const FIELDS = ["state", "key", "tenant", "model", "batch"];
const CHEAP = ["queued", "delayed", "running", "dead"]; // read from a list of their own, the others by a search

const act = (word, path, then) => actButton(word, async () => then(await ask(path, "POST")), complain);
const showJobs = jobTable(byId("jobs"), jobActions);
const showBatches = batchTable(byId("batches"), (id) => [
  act("cancel", `batches/${encodeURIComponent(id)}/cancel`, ({ stopped }) => { tell(`${whole(stopped)} jobs are cancelled.`); refresh(); }),
]);
const showLanes = laneTable(byId("lanes"));
const showWorkers = workerRows(byId("workers"));

let view = { name: "list", fields: {} };
let listed = { jobs: [], after: "", looked: 0, pages: 0 };
let batches = { batches: [], after: "", pages: 0 };
let isBusy = false;

function jobActions({ id, state }) {
  const path = `job/${encodeURIComponent(id)}`;
  if (isActive(state)) {
    return [act("cancel", `${path}/cancel`, ({ outcome }) => {
      tell(outcome === "requested" ? "Its worker will end it." : outcome === "done" ? "It had ended." : "It is cancelled.");
      refresh();
    })];
  }
  if (state === "dead") return [act("replay", `${path}/replay`, ({ job }) => { location.hash = jobLink(job); })];
  return [];
}

function tell(text) {
  say("notice", text);
  byId("notice").hidden = !text;
}

function complain(error) {
  const needsKey = error.status === 401;
  if (needsKey) {
    byId("login").hidden = false;
    for (const id of ["tiles", "job", "list", "batches-card", "queue-cards"]) byId(id).hidden = true;
  }
  if (needsKey && hasKey()) keepKey("");
  else if (needsKey) return tell("");
  tell(error.status === undefined ? "The gateway does not answer; trying again." : `${error.message}.`);
}

function read() {
  const [name, rest = ""] = location.hash.slice(1).split(/[/?](.*)/s);
  if (name === "job" && rest) {
    let id = rest;
    try { id = decodeURIComponent(rest); } catch { /* not one of our links: as it is */ }
    return { name: "job", id };
  }
  const asked = new URLSearchParams(name === "list" ? rest : "state=running");
  return { name: "list", fields: Object.fromEntries(FIELDS.map((field) => [field, asked.get(field) || ""])) };
}

async function showQueue() {
  const found = await ask("queue");
  byId("login").hidden = true;
  byId("leave").hidden = !hasKey();
  byId("paused").hidden = !found.paused;
  say("queue", found.queue);
  say("tenant", found.tenant || "all");
  byId("f-tenant-label").hidden = found.tenant !== "";
  showTiles(found);
  showLanes(found.waiting);
  byId("lanes-empty").hidden = found.lanes > 0;
  say("lanes-note", found.lanes > found.waiting.length ? `the longest ${found.waiting.length} of ${whole(found.lanes)} lanes` : "");
  byId("workers-card").hidden = !found.workers;
  showWorkers(found.workers || []);
  byId("workers-empty").hidden = !found.workers || found.workers.length > 0;
  byId("queue-cards").hidden = false;
}

function showTiles({ waiting, counts, followers, dead }) {
  const sum = waiting.reduce((total, lane) => total + lane.jobs, 0);
  const oldest = Math.max(0, ...waiting.map((lane) => lane.oldest_s));
  const waits = ["waiting", counts ? (counts.queued || 0) - followers : sum, sum ? `oldest ${seconds(oldest)}` : "nothing waits", "queued"];
  const tiles = counts ? [
    waits,
    ["running", counts.running || 0, "", "running"],
    ["delayed", counts.delayed || 0, "retries too", "delayed"],
    ["dead", dead, `${whole(counts.dead || 0)} ever`, "dead"],
    ["failed", counts.failed || 0, `${whole(counts.expired || 0)} expired`, "failed"],
    ["succeeded", counts.succeeded || 0, `${whole(counts.cancelled || 0)} cancelled`, "succeeded"],
  ] : [waits];
  byId("tiles").replaceChildren(...tiles.map(([name, value, note, state]) => {
    const tile = document.createElement("div"), link = document.createElement("a");
    const title = document.createElement("h2"), big = document.createElement("p"), sub = document.createElement("p");
    [tile.className, big.className, sub.className] = ["tile", "big", "sub"];
    [title.textContent, big.textContent, sub.textContent] = [name, whole(value), note];
    link.href = listLink({ state });
    link.append(title, big, sub);
    tile.append(link);
    return tile;
  }));
  byId("tiles").hidden = false;
}

async function showList(isMore = false) {
  // What was asked for further is not taken away again, also by an answer that was on its way.
  const asked = view, isKept = () => view !== asked || (!isMore && listed.pages > 1);
  if (isKept()) return;
  const found = await ask(query("list", { ...view.fields, after: isMore ? listed.after : "" }));
  if (isKept()) return;
  const before = isMore ? listed : { jobs: [], looked: 0, pages: 0 };
  const jobs = [...new Map([...before.jobs, ...found.jobs].map((job) => [job.id, job])).values()];
  listed = { jobs, after: found.after, looked: before.looked + found.looked, pages: before.pages + 1 };
  showJobs(jobs);
  byId("jobs-empty").hidden = jobs.length > 0 || found.after !== "";
  byId("more").hidden = !found.after;
  say("more", jobs.length ? "more" : "search on");
  say("list-note", `${whole(jobs.length)} of ${whole(listed.looked)} looked at${found.after ? " so far" : ""}`);
}

async function showBatchList(isMore = false) {
  const isKept = () => !isMore && batches.pages > 1;
  if (isKept()) return;
  const found = await ask(query("batches", { after: isMore ? batches.after : "" }));
  if (isKept()) return;
  const before = isMore ? batches : { batches: [], pages: 0 };
  const shown = [...new Map([...before.batches, ...found.batches].map((batch) => [batch.id, batch])).values()];
  batches = { batches: shown, after: found.after, pages: before.pages + 1 };
  showBatches(shown);
  byId("batches-empty").hidden = shown.length > 0;
  byId("more-batches").hidden = !found.after;
}

async function showJob() {
  const { job, timeline, parts, metadata, position, note } = await ask(`job/${encodeURIComponent(view.id)}`);
  const wasState = byId("job-state").textContent;
  say("job-title", job.id);
  if (wasState !== job.state || byId("job-actions").dataset.job !== job.id) {
    byId("job-actions").replaceChildren(...jobActions(job));
    byId("job-actions").dataset.job = job.id;
  }
  showState(byId("job-state"), job.state);
  const { progress } = job;
  showFacts(byId("job-facts"), [
    ["model", job.model],
    ["live workers", job.live_workers],
    ["queue", `${job.queue}, tenant ${job.tenant}, priority ${job.priority}`],
    ["batch", job.batch, listLink({ batch: job.batch || "" })],
    ["key", job.key],
    ["waiting before it", position],
    ["why", note],
    ["to be", job.stop_asked],
    ["shares the end of", job.leader, jobLink(job.leader || "")],
    ["replay of", job.replay_of, jobLink(job.replay_of || "")],
    ["after", job.after.join(" ")],
    ["waits for the end of", job.waits_for.join(" ")],
    ["replayed as", job.replayed_as, jobLink(job.replayed_as || "")],
    ["failed attempts", job.attempts_failed || ""],
    ["crashes", job.crashes || ""],
    ["progress", progress.updated_at
      ? `${whole(progress.prompt_tokens_done)} of ${whole(progress.prompt_tokens)} prompt tokens, ${whole(progress.generated_tokens)} of ${whole(progress.max_tokens)} generated`
      : ""],
    ["error", job.error ? `${job.error.code}: ${job.error.message}` : ""],
  ]);
  showParts(byId("parts-bar"), byId("parts"), parts);
  showTimeline(byId("timeline"), job, timeline);
  byId("metadata-title").hidden = byId("metadata").hidden = metadata === null;
  say("metadata", JSON.stringify(metadata, null, 2));
  byId("job").hidden = false;
}

/** Everything that is in sight, anew. `isForced`: the lists that need a search too. */
async function refresh(isForced = false) {
  if (isBusy) return;
  isBusy = true;
  try {
    await showQueue();
    if (view.name === "job") await showJob();
    else if (isForced || CHEAP.includes(view.fields.state) || view.fields.batch) await showList();
    if (view.name === "list") await showBatchList();
    byId("list").hidden = byId("batches-card").hidden = view.name !== "list";
    if (byId("notice").textContent.startsWith("The gateway")) tell("");
  } catch (error) {
    complain(error);
  } finally {
    isBusy = false;
  }
}

async function go() {
  view = read();
  listed = { jobs: [], after: "", looked: 0, pages: 0 };
  tell("");
  byId("job").hidden = true;
  byId("list").hidden = byId("batches-card").hidden = view.name !== "list" || byId("tiles").hidden;
  if (view.name === "list") {
    for (const field of FIELDS) byId(`f-${field}`).value = view.fields[field];
    showJobs([]);
  }
  document.title = view.name === "job" ? `${view.id} · Pagemill` : "Jobs · Pagemill";
  while (isBusy) await new Promise((done) => setTimeout(done, 20));
  await refresh(true);
}

/** What was typed may be a job's id: that is shown at once. Otherwise it is a key to look for. */
async function find() {
  const fields = Object.fromEntries(FIELDS.map((field) => [field, byId(`f-${field}`).value.trim()]));
  if (/^[\w.-]{1,64}$/.test(fields.key)) {
    try {
      await ask(`job/${encodeURIComponent(fields.key)}`);
      location.hash = jobLink(fields.key);
      return;
    } catch (error) {
      if (error.status !== 404) { complain(error); return; }
    }
  }
  const asked = listLink(Object.fromEntries(Object.entries(fields).filter(([, value]) => value)));
  if (location.hash === asked) go();
  else location.hash = asked;
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(byId("key").value);
  byId("key").value = "";
  go();
});
byId("leave").addEventListener("click", () => { keepKey(""); location.hash = ""; location.reload(); });
byId("filter").addEventListener("submit", (event) => { event.preventDefault(); find(); });
byId("more").addEventListener("click", () => showList(true).catch(complain));
byId("more-batches").addEventListener("click", () => showBatchList(true).catch(complain));
themeButton(byId("theme"));
addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
setInterval(() => { if (!document.hidden && byId("login").hidden) refresh(); }, REFRESH_MS);
go();
