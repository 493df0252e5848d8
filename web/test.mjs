// Compares the engine of the static page with the program, over many jobs: both must print the same document, but for
// how long it took. Usage: node web/test.mjs [SITE] [PROGRAM], with Node 24 or later, for 64-bit memories.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

const [site, program] = [process.argv[2] || "site", resolve(process.argv[3] || "target/release/foretell")];
const started = performance.now();
const engine = new WebAssembly.Module(readFileSync(join(site, "foretell.wasm")));
console.log(`the module compiles in ${(performance.now() - started).toFixed(0)} ms`);

// The page's own worker, whose messages are calls here.
let listener;
let reply;
new Function("addEventListener", "postMessage", readFileSync(join(site, "worker.js"), "utf8"))(
  (_, own) => { listener = own; }, (message) => { if ("answer" in message) reply = message.answer; });
listener({ data: engine });
const ask = (question) => {
  listener({ data: question && JSON.stringify(question) });
  return reply;
};

const plan = (options) => ({ command: "plan", options: { top: 3, ...options } });
const jobs = [];
for (const model of ["gpt2", "gpt2-xl", "qwen3-0.6b", "resnet50", "vit_b_16", "bert-large-uncased"]) {
  for (const topology of ["8xh100", "dgx-a100-80g", "2x8xa100-80g@200Gbit/s"]) jobs.push(plan({ model, topology }));
}
for (const model of ["llama3-8b", "qwen3-8b"]) {
  for (const method of ["full", "lora", "qlora"]) {
    for (const topology of ["1xh100", "4xrtx-4090"]) jobs.push(plan({ model, method, topology, sequence: 2048 }));
  }
}
jobs.push(plan({ model: "llama3-8b", topology: "8xh100" }));
jobs.push(plan({ model: "gpt2", topology: "8xh100", front: true }), plan({ model: "gpt2", topology: "8xh100", scaling: "1..8" }));
jobs.push(plan({ model: "gpt2", topology: "8xh100", precision: ["bf16", "fp8"] }));
jobs.push(plan({ model: "llama3-8b", method: "lora", topology: "4xh100", lengths: "mean=512,p95=1536", batching: "group" }));
jobs.push(plan({ model: "no-such-model", topology: "8xh100" }), plan({ model: "gpt2", topology: "8xh100", nodes: 0 }));
jobs.push(plan({ model: "llama3-70b", topology: "1xrtx-4090" }), plan({ model: "gpt2", topology: "8xh100", headroom: "x" }));
jobs.push(plan({ model: "llama3-8b", topology: "4xh100", method: "lora", adapter: "rank=8,targets=attention", optimizer: "adamw-8bit", headroom: "10%", fix: "recompute=full,micro_batch=1" }));
// The program also lists the machine among the topologies.
jobs.push({ command: "models", options: {} });
jobs.push({ command: "models show", options: { name: "llama3-8b" } }, { command: "topologies show", options: { name: "dgx-h100" } });

const folder = mkdtempSync(join(tmpdir(), "foretell-web-"));
// What a command prints, also if it fails. One thread, as the engine has.
const printed = (line) => {
  const options = { cwd: folder, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"], maxBuffer: 1 << 28, env: { ...process.env, RAYON_NUM_THREADS: "1" } };
  try {
    return execFileSync("sh", ["-c", `exec "$0" ${line.replace(/^foretell /, "")} --json`, program], options);
  } catch (error) {
    return error.stdout;
  }
};
const undated = (text) => text.trim().replaceAll(/("wall_seconds": )[^,\n]*/g, "$1_");

let different = 0;
let rounded = 0;
let done = 0;
const times = [];
const compare = (question, files = {}) => {
  for (const [name, text] of Object.entries(files)) writeFileSync(join(folder, name), text);
  const before = performance.now();
  const text = ask(question);
  const between = performance.now();
  const answer = JSON.parse(text);
  const document = text.slice(text.indexOf(', "answer": ') + 12, -1);
  const theirs = printed(answer.line);
  const own = performance.now() - between;
  done += 1;
  times.push([between - before, own]);
  const is_same = undated(document) === undated(theirs);
  // The system's library may round a power or a logarithm otherwise.
  const numbers = (text) => text.replaceAll(/\d+\.\d{12,}(e-?\d+)?/g, (number) => Number(number).toPrecision(15));
  if (!is_same && numbers(undated(document)) === numbers(undated(theirs))) rounded += 1;
  else if (!is_same) different += 1;
  if (!is_same) {
    const [one, other] = [undated(document), undated(theirs)].map((document) => document.split("\n"));
    const place = one.findIndex((line, index) => line !== other[index]);
    console.log(`DIFFERENT ${answer.line}\n  engine:  ${one[place]}\n  program: ${other[place]}`);
  }
  console.log(`${is_same ? "same" : "DIFFERENT"} ${(between - before).toFixed(0)} ms, program ${own.toFixed(0)} ms: ${answer.line}`);
  return answer;
};

for (const job of jobs) {
  const { answer } = compare(job);
  if (job.command !== "plan" || !answer.plan) continue;
  const text = JSON.stringify(answer.plan);
  const options = { plan: { name: "plan.json", text }, tokens: 1e9, "device-price": "$2.50", "what-if": ["inter_node.bandwidth*2", "device.peak*0.5"] };
  if (job.options.method) delete options["what-if"];
  compare({ command: "simulate", options }, { "plan.json": text });
}
// Lengths in a file.
const lengths = { name: "lengths.txt", text: "100\n250\n900\n" };
compare(plan({ model: "gpt2", topology: "8xh100", lengths, batching: "pack" }), { "lengths.txt": lengths.text });
rmSync(folder, { recursive: true });

const known = JSON.parse(ask(null));
console.log(`the page knows ${known.models.length} models and ${known.topologies.length} topologies`);
const half = (list) => list.sort((one, other) => one - other)[Math.floor(list.length / 2)];
console.log(`${done} jobs, ${different} different, ${rounded} in a last digit; median ${half(times.map(([one]) => one)).toFixed(0)} ms, program ${half(times.map(([, own]) => own)).toFixed(0)} ms`);
process.exit(different || done < 50 ? 1 : 0);
