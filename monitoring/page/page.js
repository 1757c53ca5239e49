// Puts what the worker sends once a second onto the page. Events: `history` once, then `state`.

import { BlockMap, STATES, count, unpack } from "./blocks.js";
import { Chart } from "./charts.js";
import { endRows, errorRows, jobRows, linkJobs, seconds, webAddress, workerRows } from "./rows.js";
import { themeButton } from "./theme.js";

const STALE_MS = 5000;
const STATE_TONES = { ready: "good", loading: "warn", draining: "warn", paused: "warn", drained: "warn", unhealthy: "bad" };
const BLOCKED = {
  kv: "KV cache full", rows: "batch full", results: "results held", engine: "long step", paused: "queue paused",
};
const byId = (id) => document.getElementById(id);
const say = (id, text) => { const node = byId(id); if (node.textContent !== text) node.textContent = text; };
const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;

const map = new BlockMap(byId("blocks"), byId("block-tip"), byId("map-note"));
const charts = [
  new Chart(byId("chart-kv"), byId("kv-key"), [
    { name: "occupied", label: "with cached", color: "cached", fill: true },
    { name: "active", label: "in use", color: "active", fill: true },
  ], { top: 1, format: percent }),
  new Chart(byId("chart-rate"), byId("rate-key"), [
    { name: "computed", label: "computed", color: "cached", fill: true },
    { name: "generated", label: "generated", color: "active", fill: true },
  ], { format: whole }),
  new Chart(byId("chart-seq"), byId("seq-key"), [
    { name: "running", label: "running", color: "active", fill: true },
    { name: "waiting", label: "waiting", color: "shared", fill: false },
  ], { format: whole }),
  new Chart(byId("chart-depth"), byId("depth-key"), [
    { name: "queued", label: "waiting", color: "active", fill: true },
  ], { format: whole }),
];
const showJobs = jobRows(byId("jobs"));
const showEnds = endRows(byId("ends"));
const showErrors = errorRows(byId("errors"));
const showWorkers = workerRows(byId("workers"), ({ id }) => (id === byId("worker").textContent ? " (this one)" : ""));
const legend = STATES.map(([letter, name, meaning]) => {
  const item = document.createElement("li");
  item.title = meaning;
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.dataset.state = name;
  const value = document.createElement("b");
  item.append(swatch, `${name} `, value);
  byId("legend").append(item);
  return [letter, value];
});

let history = null;
let heardAt = 0;

function showWorker({ worker, engine }) {
  say("model", engine ? engine.model : "Pagemill");
  say("state", worker.state);
  byId("state").dataset.tone = STATE_TONES[worker.state] || "quiet";
  byId("redis").hidden = worker.redis_up;
  byId("blocked").hidden = !(worker.blocked in BLOCKED);
  say("blocked", BLOCKED[worker.blocked] || "");
  say("queue", worker.queue);
  say("worker", worker.id);
  say("device", engine ? [engine.device, engine.tier].filter(Boolean).join(" · ") : "loading");
  say("uptime", seconds(worker.uptime_s));
  say("version", `pagemill ${worker.version}`);
  document.title = engine ? `${engine.model} · ${worker.state}` : `Pagemill · ${worker.state}`;
}

function showTiles({ engine, kv, queue, totals }) {
  if (kv) {
    say("kv-use", percent(kv.utilization));
    say("kv-sub", `${whole(kv.active)} of ${whole(kv.capacity)} · peak ${percent(kv.peak)}`);
    const asked = kv.prefix_queried_tokens;
    say("hits", asked ? percent(kv.prefix_hit_tokens / asked) : "–");
    say("hits-sub", `of ${whole(asked)} prompt tokens`);
  }
  if (engine) {
    say("running", whole(engine.running));
    say("rows", `of ${whole(engine.max_num_seqs)}`);
    say("running-sub", `${whole(engine.waiting)} waiting · ${whole(engine.preemptions)} preempted`);
  }
  if (history) {
    const mean = (values) => values.slice(-5).reduce((sum, value) => sum + (value || 0), 0) / Math.min(5, values.length);
    say("rate", whole(mean(history.generated)));
    say("rate-sub", `${whole(mean(history.computed))} tok/s through the model`);
  }
  say("depth", queue ? whole(queue.queued) : "–");
  const parts = queue ? [
    queue.queued ? `oldest ${seconds(queue.oldest_s)}` : "nothing waits",
    `${whole(queue.running)} running`,
    ...(queue.delayed ? [`${whole(queue.delayed)} delayed`] : []),
    ...(queue.dead ? [`${whole(queue.dead)} dead`] : []),
  ] : ["Redis does not answer"];
  say("depth-sub", parts.join(" · "));
  say("done", whole(totals.succeeded));
  const others = ["failed", "dead", "cancelled", "expired", "retried"].filter((name) => totals[name]);
  say("done-sub", others.map((name) => `${whole(totals[name])} ${name}`).join(" · ") || "none failed");
}

/** Blocks in use by the window of their layers, if any of the model's layers has one. */
function showWindows(kv) {
  const windows = kv ? kv.windows : [];
  byId("windows").hidden = !windows.some(({ window }) => window);
  const parts = windows.map(({ window, active }) => `${window ? `window ${whole(window)}` : "no window"}: ${whole(active)}`);
  if (kv) say("windows", `${parts.join(" · ")} · ${whole(kv.window_frees)} freed behind windows`);
}

function showBlocks(blocks) {
  if (!blocks) return;
  const states = unpack(blocks.runs);
  const counts = count(states);
  for (const [letter, value] of legend) value.textContent = counts[letter].toLocaleString("en");
  byId("blocks").setAttribute("aria-label", `KV blocks: ${STATES.map(([letter, name]) => `${counts[letter]} ${name}`).join(", ")}`);
  map.show(states);
}

function showTables({ jobs, ends, errors }) {
  showJobs(jobs.shown);
  byId("jobs-empty").hidden = jobs.total > 0;
  say("jobs-note", jobs.total > jobs.shown.length ? `${jobs.shown.length} of ${jobs.total}` : `${jobs.total}`);
  showEnds(ends);
  byId("ends-empty").hidden = ends.length > 0;
  showErrors(errors);
  byId("errors-empty").hidden = errors.length > 0;
}

const HERE = ["127.0.0.1", "localhost", "[::1]"];

/** The other workers, and the page of jobs: where one is for its own machine only, and we are not there, no link. */
function showAround({ workers, jobs_url }) {
  byId("workers-card").hidden = workers.length < 2;
  showWorkers(workers);
  const address = webAddress(jobs_url);
  const isReached = address && (HERE.includes(location.hostname) || !HERE.includes(new URL(address).hostname));
  byId("jobs-link").hidden = !isReached;
  if (isReached) byId("jobs-link").href = address;
  linkJobs(isReached ? address : "");
}

function append(point) {
  if (!history || !point || point.time <= history.time[history.time.length - 1]) return;
  for (const [name, values] of Object.entries(history)) {
    values.push(point[name]);
    if (values.length > 600) values.shift();
  }
}

function show(state) {
  heardAt = Date.now();
  byId("notice").hidden = true;
  append(state.point);
  showWorker(state);
  showAround(state);
  showTiles(state);
  showWindows(state.kv);
  showBlocks(state.blocks);
  showTables(state);
  for (const chart of charts) chart.show(history);
}

let source = null;

function connect() {
  if (source || document.hidden) return;
  source = new EventSource("live/events");
  source.addEventListener("history", (event) => { history = JSON.parse(event.data); });
  source.addEventListener("state", (event) => show(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    // The browser tries again by itself unless the answer was a refusal.
    if (source && source.readyState === EventSource.CLOSED) { disconnect(); setTimeout(connect, 2000); }
  });
}

function disconnect() {
  if (source) source.close();
  source = null;
}

function redraw() {
  map.draw();
  for (const chart of charts) chart.draw();
}

themeButton(byId("theme"), redraw);
new ResizeObserver(redraw).observe(document.querySelector("main"));

// A tab that nobody looks at costs the worker nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
setInterval(() => {
  const silent = Date.now() - heardAt;
  if (document.hidden || silent < STALE_MS) return;
  byId("notice").hidden = false;
  say("notice", heardAt ? `No news from the worker for ${seconds(silent / 1000)}; trying to reach it.` : "Waiting for the worker.");
}, 1000);
connect();
