// The page's tables and facts. Every cell is set as text, never as markup: ids, keys, metadata and errors come from
// strangers.

import { Rows, TONES, cell, element, link, seconds, set } from "./rows.js";

const ACTIVE = ["queued", "delayed", "running"];
export const isActive = (state) => ACTIVE.includes(state);
export const whole = (value) => Math.round(value).toLocaleString("en");
const now = () => Date.now() / 1000;
export const jobLink = (id) => `#job/${encodeURIComponent(id)}`;
export const listLink = (fields) => `#list?${new URLSearchParams(fields)}`;

export function showState(pill, state) {
  set(pill, state);
  pill.dataset.tone = TONES[state] || "quiet";
}

/** A button that is to be pressed twice: `act()` is awaited, and what it throws is told by `complain`. */
export function actButton(word, act, complain) {
  const made = element("button", "plain", word);
  made.type = "button";
  const calm = () => { delete made.dataset.sure; set(made, word); };
  made.addEventListener("blur", calm);
  made.addEventListener("click", async () => {
    if (!("sure" in made.dataset)) {
      made.dataset.sure = "";
      set(made, `really ${word}?`);
      return;
    }
    made.disabled = true;
    try { await act(); } catch (error) { complain(error); } finally { made.disabled = false; calm(); }
  });
  return made;
}

function tokens({ progress }) {
  return progress.updated_at ? `${whole(progress.generated_tokens)} / ${whole(progress.max_tokens)}` : "";
}

function took(job) {
  if (!job.started_at) return "";
  return seconds(Math.max(0, (job.finished_at || now()) - job.started_at));
}

/** `actions(job)` gives the buttons of a row. */
export function jobTable(table, actions) {
  const make = () => {
    const row = element("tr");
    const pill = element("span", "pill"), state = cell();
    state.append(pill);
    const id = cell("mono"), tenant = cell(), model = cell(), key = cell("most key");
    const count = cell("num", "tokens"), at = cell("num", "submitted"), time = cell("num", "took"), act = cell("num");
    row.append(id, state, tenant, model, key, count, at, time, act);
    row.parts = { id, pill, tenant, model, key, count, at, time, act };
    return row;
  };
  const rows = new Rows(table.tBodies[0], make, (row, job) => {
    const { id, pill, tenant, model, key, count, at, time, act } = row.parts;
    if (!id.firstChild) id.append(link(job.id, jobLink(job.id)));
    if (pill.textContent !== job.state) act.replaceChildren(...actions(job));
    showState(pill, job.state);
    set(tenant, job.tenant);
    set(model, job.model);
    set(key, job.key || "");
    set(count, tokens(job));
    set(at, `${seconds(Math.max(0, now() - job.created_at))} ago`);
    set(time, took(job));
  });
  return (jobs) => rows.show(jobs, (job) => job.id);
}

export function batchTable(table, actions) {
  const make = () => {
    const row = element("tr");
    const id = cell("mono"), tenant = cell(), progress = cell("wide");
    const ended = cell("num", "ended"), wrong = cell("num", "wrong"), at = cell("num", "submitted"), act = cell("num");
    const meter = element("div", "meter"), bar = element("i");
    meter.append(bar);
    progress.append(meter);
    row.append(id, tenant, progress, ended, wrong, at, act);
    row.parts = { id, tenant, bar, ended, wrong, at, act };
    return row;
  };
  const rows = new Rows(table.tBodies[0], make, (row, { id: name, tenant: whose, created_at, counts, ended: over }) => {
    const { id, tenant, bar, ended, wrong, at, act } = row.parts;
    const left = counts.total - over;
    if (!id.firstChild) id.append(link(name, listLink({ batch: name })));
    if (Boolean(act.firstChild) !== left > 0) act.replaceChildren(...(left > 0 ? actions(name) : []));
    set(tenant, whose || "");
    bar.style.width = `${counts.total ? (100 * over) / counts.total : 0}%`;
    set(ended, `${whole(over)} of ${whole(counts.total)}`);
    set(wrong, whole(counts.failed + counts.dead + counts.expired));
    set(at, `${seconds(Math.max(0, now() - created_at))} ago`);
  });
  return (batches) => rows.show(batches, (batch) => batch.id);
}

export function laneTable(table) {
  return (lanes) => table.tBodies[0].replaceChildren(...lanes.map((lane) => {
    const row = element("tr");
    const tenant = cell(), model = cell(), priority = cell(), jobs = cell("num", "jobs"), oldest = cell("num", "oldest");
    tenant.append(link(lane.tenant, listLink({ state: "queued", tenant: lane.tenant })));
    set(model, lane.model);
    set(priority, lane.priority);
    set(jobs, whole(lane.jobs));
    set(oldest, seconds(lane.oldest_s));
    row.append(tenant, model, priority, jobs, oldest);
    return row;
  }));
}

export function showFacts(list, facts) {
  list.replaceChildren(...facts.filter(([, value]) => value !== "" && value !== null).flatMap(([name, value, href]) => {
    const fact = element("dd");
    fact.append(href ? link(value, href) : String(value));
    return [element("dt", "", name), fact];
  }));
}

const COLORS = { prompt: "cached", decode: "active", running: "active", repeated: "shared", preempted: "shared", displaced: "shared", opening: "free", commit: "free" };

/** Causes that sum to a job's lifetime, as one bar; what was a wait is gray. */
export function showParts(bar, list, parts) {
  const total = parts.reduce((sum, part) => sum + part.seconds, 0);
  const swatch = ({ cause }) => {
    const made = element("i", "swatch");
    made.dataset.state = COLORS[cause] || "reserved";
    return made;
  };
  bar.replaceChildren(...parts.map((part) => {
    const made = swatch(part);
    made.style.width = `${(100 * part.seconds) / total}%`;
    made.title = `${part.cause}: ${part.meaning}`;
    return made;
  }));
  list.replaceChildren(...parts.map((part) => {
    const item = element("li");
    item.title = part.meaning;
    item.append(swatch(part), element("span", "", part.cause.replaceAll("_", " ")), element("b", "", seconds(part.seconds)));
    return item;
  }));
}

export function showTimeline(table, job, events) {
  table.tBodies[0].replaceChildren(...events.map(({ at, event, worker, reason }) => {
    const row = element("tr");
    const time = cell("num"), after = cell("num", "after"), what = cell(), where = cell("mono"), why = cell("most");
    const pill = element("span", "pill");
    set(time, at === null ? "" : new Date(1000 * at).toLocaleString());
    set(after, at === null ? "" : `${at >= job.created_at ? "+" : ""}${(at - job.created_at).toFixed(3)} s`);
    showState(pill, event);
    what.append(pill);
    set(where, worker);
    set(why, reason);
    row.append(time, after, what, where, why);
    return row;
  }));
}
