// The tables. Every cell is set as text, never as markup: ids and messages come from strangers.

export const TONES = { succeeded: "good", retried: "warn", lost: "warn", failed: "bad", dead: "bad", expired: "warn" };

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 100) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${Math.round(value / 86400)} d`;
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function cell(className, label) {
  const made = element("td", className);
  if (label) made.dataset.label = label;
  return made;
}

/** Keeps one row per key, in order; `fill(row, item)` writes an item into the row that `make()` built. */
export class Rows {
  constructor(body, make, fill) {
    Object.assign(this, { body, make, fill, rows: new Map() });
  }

  show(items, key) {
    const kept = new Map();
    for (const item of items) {
      const name = key(item);
      const row = this.rows.get(name) || this.make();
      this.fill(row, item);
      kept.set(name, row);
    }
    this.rows = kept;
    const wanted = [...kept.values()];
    const standing = [...this.body.children];
    const same = wanted.length === standing.length && wanted.every((row, index) => row === standing[index]);
    if (!same) this.body.replaceChildren(...wanted);
  }
}

export function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

let jobsPage = "";

/** The address of the page of jobs, "" for none: ids are links to it then. */
export function linkJobs(address) {
  jobsPage = address;
}

/** The address, or "" where it is none of the web: nothing else is made a link. */
export function webAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:"].includes(url.protocol) ? url.href : "";
  } catch { return ""; }
}

export function link(text, href) {
  const made = element("a", "", text);
  made.href = href;
  return made;
}

function setId(node, id) {
  const href = jobsPage && `${jobsPage}#job/${encodeURIComponent(id)}`;
  if (node.textContent === id && (node.firstChild.href || "") === href) return;
  node.replaceChildren(href ? link(id, href) : id);
}

function makeJob() {
  const row = element("tr");
  const id = cell("mono"), phase = cell(), progress = cell("wide");
  const tokens = cell("num", "tokens"), age = cell("num", "for"), attempt = cell("num", "try");
  const meter = element("div", "meter"), bar = element("i"), prompt = element("div", "prompt");
  meter.append(bar);
  progress.append(meter, prompt);
  row.append(id, phase, progress, tokens, age, attempt);
  row.parts = { id, phase, meter, bar, prompt, tokens, age, attempt };
  return row;
}

function fillJob(row, job) {
  const { id, phase, meter, bar, prompt, tokens, age, attempt } = row.parts;
  const isDecoding = job.phase === "decode";
  const done = isDecoding ? job.generated_tokens : job.prompt_tokens_done;
  const all = isDecoding ? job.max_tokens : job.prompt_tokens;
  setId(id, job.id);
  set(phase, job.phase);
  meter.dataset.phase = job.phase;
  bar.style.width = `${all ? Math.min(100, (100 * done) / all) : 0}%`;
  prompt.hidden = job.prompt === null;
  set(prompt, job.prompt ?? "");
  set(tokens, `${done.toLocaleString("en")} / ${all.toLocaleString("en")}`);
  set(age, seconds(job.age_s));
  set(attempt, job.crashes ? `${job.attempt} +${job.crashes}` : `${job.attempt}`);
}

function makeEnd() {
  const row = element("tr");
  const id = cell("mono"), outcome = cell();
  const tokens = cell("num", "tokens"), took = cell("num", "took"), ago = cell("num", "ago");
  const pill = element("span", "pill");
  outcome.append(pill);
  row.append(id, outcome, tokens, took, ago);
  row.parts = { id, pill, tokens, took, ago };
  return row;
}

function fillEnd(row, end) {
  const { id, pill, tokens, took, ago } = row.parts;
  setId(id, end.id);
  set(pill, end.outcome);
  pill.dataset.tone = TONES[end.outcome] || "quiet";
  set(tokens, end.tokens.toLocaleString("en"));
  set(took, seconds(end.took_s));
  set(ago, seconds(end.ago_s));
}

function makeError() {
  const row = element("tr");
  const id = cell("mono"), outcome = cell(), reason = cell("most"), ago = cell("num", "ago");
  const pill = element("span", "pill"), code = element("b"), message = element("span", "sub");
  outcome.append(pill);
  reason.append(code, " ", message);
  row.append(id, outcome, reason, ago);
  row.parts = { id, pill, code, message, ago };
  return row;
}

function fillError(row, end) {
  const { id, pill, code, message, ago } = row.parts;
  setId(id, end.id);
  set(pill, end.outcome);
  pill.dataset.tone = TONES[end.outcome] || "quiet";
  set(code, end.code);
  set(message, end.message);
  set(ago, seconds(end.ago_s));
}

/** Rows of workers; `mark(worker)` is written beside an id. */
export function workerRows(table, mark = () => "") {
  return (workers) => table.tBodies[0].replaceChildren(...workers.map((worker) => {
    const row = element("tr");
    const id = cell("mono"), state = cell(), models = cell("most"), jobs = cell("num", "jobs");
    const address = webAddress(worker.url), pill = element("span", "pill", worker.state);
    id.append(address ? link(worker.id, address) : worker.id, mark(worker));
    pill.dataset.tone = { ready: "good", unhealthy: "bad" }[worker.state] || "warn";
    state.append(pill);
    set(models, worker.models.join(", "));
    set(jobs, worker.running.toLocaleString("en"));
    row.append(id, state, models, jobs);
    return row;
  }));
}

export function jobRows(table) {
  const rows = new Rows(table.tBodies[0], makeJob, fillJob);
  return (jobs) => rows.show(jobs, (job) => `${job.id}#${job.token}`);
}

export function endRows(table) {
  const rows = new Rows(table.tBodies[0], makeEnd, fillEnd);
  return (ends) => rows.show(ends, (end) => end.number);
}

export function errorRows(table) {
  const rows = new Rows(table.tBodies[0], makeError, fillError);
  return (ends) => rows.show(ends, (end) => end.number);
}
