// Questions to the server. Each has a lane; a later question in the same lane replaces it.
const token = new URLSearchParams(location.search).get("token") || "";
const tab = Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(16).padStart(2, "0")).join("");
const open = new Map();
// Questions about one configuration have its number in their lane, so that they can be cancelled together.
let configuration = 0;
const lane = (name) => `${tab}.${configuration}.${name}`;

const address = (path, parameters) => `${path}?${new URLSearchParams({ token, ...parameters })}`;

// Asks, and returns {status, answer, message, notes, line, seconds, report, files}. It throws `Refused`, also for an
// answer that is an error; one that was replaced has the code "cancelled".
const ask = async (name, command, options, more = {}) => {
  open.get(name)?.abort();
  const control = new AbortController();
  open.set(name, control);
  let response;
  try {
    response = await fetch(address("/ask", { lane: lane(name) }), {
      method: "POST", headers: { "Content-Type": "application/json" }, signal: control.signal, body: JSON.stringify({ command, options, ...more }),
    });
    const answer = await response.json().catch(() => ({ error: { code: "undone", message: `the server says ${response.status}` } }));
    const error = answer.error || (answer.answer && !Array.isArray(answer.answer) && answer.answer.error);
    if (error) throw new Refused(error);
    return answer;
  } catch (error) {
    if (control.signal.aborted) throw new Refused({ code: "cancelled", message: "replaced" });
    if (error instanceof Refused) throw error;
    throw new Refused({ code: "gone", message: "the server does not answer", hint: "start `foretell serve` again, and open the address that it prints" });
  } finally {
    if (open.get(name) === control) open.delete(name);
  }
};

// Cancels every question of this page, here and at the server, and counts a new configuration.
const newConfiguration = () => {
  for (const control of open.values()) control.abort();
  const before = lane("");
  if (open.size) fetch(address("/cancel", { lane: before }), { method: "POST", keepalive: true }).catch(() => null);
  open.clear();
  configuration += 1;
  return configuration;
};
addEventListener("pagehide", () => { if (open.size) navigator.sendBeacon(address("/cancel", { lane: `${tab}.` })); });

const progress = async (name) => {
  const response = await fetch(address("/progress", { lane: lane(name) })).catch(() => null);
  return response && response.ok ? response.json().catch(() => null) : null;
};

// Shows the report of an answer in a frame, and has a link save it.
const showReport = (answer, frame, link) => {
  const number = String(answer.report);
  frame.src = address("/report", { number });
  link.href = address("/report", { number, save: "1" });
};
