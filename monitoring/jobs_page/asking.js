// Questions to the gateway. The API key goes in a header: never in an address, and in no cookie, so that no other
// site's page can act with it. It is kept for this tab alone.

const PLACE = "pagemill-key";
let held = "";
try { held = sessionStorage.getItem(PLACE) || ""; } catch { /* kept in this variable then */ }

export const hasKey = () => held !== "";

export function keepKey(key) {
  held = key.trim();
  try {
    if (held) sessionStorage.setItem(PLACE, held);
    else sessionStorage.removeItem(PLACE);
  } catch { /* as above */ }
}

/** The key, as a request has it. */
export const headers = () => (held ? { authorization: `Bearer ${held}` } : {});

/** The answer's JSON. Throws an Error with the gateway's message, and its `status` where there was an answer. */
export async function ask(path, method = "GET") {
  const answer = await fetch(`jobs/api/${path}`, { method, headers: headers(), credentials: "omit", cache: "no-store" });
  const body = await answer.json().catch(() => null);
  if (answer.ok && body) return body;
  throw Object.assign(new Error(body?.error?.message || `the gateway answers ${answer.status}`), { status: answer.status });
}

/** "list?state=dead&key=x": only what is not empty. */
export function query(path, fields) {
  const named = Object.entries(fields).filter(([, value]) => value);
  return named.length ? `${path}?${new URLSearchParams(named)}` : path;
}
