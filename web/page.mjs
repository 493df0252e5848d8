// Opens the static page in a headless Chromium and uses it: a first answer, the simulated step, the certificate, other
// fields, and the report. Usage: node web/page.mjs [SITE] [CHROMIUM], with Node 22 or later.
import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { extname, join } from "node:path";

const [site = "site", program = "chromium"] = process.argv.slice(2);
const types = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".wasm": "application/wasm" };
const asked = [];
const server = createServer((request, response) => {
  const path = request.url === "/" ? "/index.html" : request.url.split("?")[0];
  asked.push(path);
  try {
    const file = readFileSync(join(site, path));
    response.writeHead(200, { "Content-Type": types[extname(path)] || "text/plain" }).end(file);
  } catch {
    response.writeHead(404).end();
  }
}).listen(0, "127.0.0.1");
await new Promise((done) => server.once("listening", done));

const profile = mkdtempSync(join(tmpdir(), "foretell-page-"));
const chromium = spawn(program, ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", `--user-data-dir=${profile}`, "about:blank"], { stdio: ["ignore", "ignore", "pipe"] });
const address = await new Promise((done, fail) => {
  let text = "";
  chromium.stderr.on("data", (part) => {
    text += part;
    const found = /DevTools listening on (\S+)/.exec(text);
    if (found) done(found[1]);
  });
  chromium.once("exit", () => fail(new Error(text)));
});
const targets = await (await fetch(`http://${new URL(address).host}/json`)).json();
const socket = new WebSocket(targets.find((target) => target.type === "page").webSocketDebuggerUrl);
await new Promise((done) => socket.addEventListener("open", done));
let number = 0;
const calls = new Map();
const problems = [];
// The session of the report's frame, which is a process of its own.
let frame;
socket.addEventListener("message", ({ data }) => {
  const message = JSON.parse(data);
  if (message.id) { calls.get(message.id)(message.result); return; }
  if (message.method === "Target.attachedToTarget" && message.params.targetInfo.type === "iframe") frame = message.params.sessionId;
  if (message.method === "Runtime.exceptionThrown") problems.push(message.params.exceptionDetails.exception?.description);
  if (message.method === "Log.entryAdded" && message.params.entry.level === "error") problems.push(`${message.params.entry.text} ${message.params.entry.url || ""}`);
});
const call = (method, params = {}, sessionId = undefined) => new Promise((done) => {
  number += 1;
  calls.set(number, done);
  socket.send(JSON.stringify({ id: number, method, params, sessionId }));
});
const evaluate = async (expression, session) => (await call("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true }, session)).result.value;
const until = async (expression, what, session = undefined) => {
  const started = performance.now();
  while (performance.now() - started < 60_000) {
    const value = await evaluate(expression, session);
    if (value) return value;
    await new Promise((done) => setTimeout(done, 20));
  }
  throw new Error(`${what} does not come: ${await evaluate("document.getElementById('state').textContent + document.getElementById('problem').textContent")} ${problems}`);
};
const marks = () => evaluate(`Object.fromEntries(["change", "first", "simulation", "certificate", "failure"].map((name) => [name, performance.getEntriesByName(name).at(-1)?.startTime]))`);
const answered = async (what) => {
  await until(`["first", "simulation", "certificate"].every((name) => performance.getEntriesByName(name).at(-1)?.startTime > performance.getEntriesByName("change").at(-1).startTime) || performance.getEntriesByName("failure").length > 0`, what);
  const { change, ...others } = await marks();
  const after = Object.entries(others).filter(([, at]) => at).map(([name, at]) => `${name} ${(at - change).toFixed(0)} ms`);
  console.log(`${what}: ${after.join(", ")}; ${await evaluate("document.getElementById('state').textContent")}`);
};
const fill = (fields) => evaluate(`performance.clearMarks(); for (const [name, value] of Object.entries(${JSON.stringify(fields)})) { const field = document.getElementById(name); field.value = value; field.dispatchEvent(new Event("input", { bubbles: true })); }`);

try {
  await call("Runtime.enable");
  await call("Log.enable");
  await call("Page.enable");
  await call("Target.setAutoAttach", { autoAttach: true, waitForDebuggerOnStart: false, flatten: true });
  await call("Page.navigate", { url: `http://127.0.0.1:${server.address().port}/` });
  await until("performance.getEntriesByName('change').length > 0", "the start of the engine");
  console.log(`the page asks after ${(await marks()).change.toFixed(0)} ms`);
  await answered("llama3-8b on 8xh100");
  for (const fields of [{ model: "gpt2-xl" }, { topology: "dgx-a100-80g" }, { method: "lora", model: "llama3-8b" },
    { adapter: "rank=8", optimizer: "adamw-8bit", fix: "micro_batch=1" }, { adapter: "", optimizer: "", fix: "" }, { lengths: "mean=512,p95=1536" }, { lengths: "", method: "pretrain", model: "gpt2-xl", topology: "8xh100" }]) {
    await fill(fields);
    await answered(Object.values(fields).join(", "));
  }
  await evaluate("document.getElementById('report-show').click()");
  await until("!document.getElementById('report').hidden && document.getElementById('report-save').href.startsWith('blob:')", "the report");
  console.log(`the report draws: ${await until("document.querySelector('canvas, svg') && document.title", "the drawn report", frame)}`);
  await evaluate("document.getElementById('export-ask').click()");
  await until("document.querySelectorAll('#export details').length > 1", "the files");
  const shot = (await call("Page.captureScreenshot", { captureBeyondViewport: true })).data;
  if (process.env.SHOT) (await import("node:fs")).writeFileSync(process.env.SHOT, Buffer.from(shot, "base64"));
  const foreign = asked.filter((path) => !["/index.html", "/page.js", "/worker.js", "/style.css", "/foretell.wasm", "/report.html", "/favicon.ico"].includes(path));
  if (foreign.length) problems.push(`asked for ${foreign}`);
} finally {
  chromium.kill();
  await new Promise((done) => chromium.once("exit", done));
  server.close();
  rmSync(profile, { recursive: true, force: true });
}
const errors = problems.filter((problem) => !/favicon/.test(problem));
if (errors.length) console.log(errors.join("\n"));
console.log(errors.length ? "the page has errors" : "the page works");
process.exit(errors.length ? 1 : 0);
