// Questions to the engine in workers of this page. Each has a lane; a later question in the same lane replaces it.
// It is the twin of `src/serve/page/server.js`, for a page without a server.
const most = Math.max(2, Math.min(4, navigator.hardwareConcurrency || 2));
const open = new Map();
const waiting = [];
const idle = [];
let working = 0;
let configuration = 0;

const compiled = async () => {
  const response = await fetch("foretell.wasm");
  if (!response.ok) throw new Error(`foretell.wasm: ${response.status}`);
  const isNamed = response.headers.get("Content-Type") === "application/wasm";
  return isNamed ? WebAssembly.compileStreaming(response) : WebAssembly.compile(await response.arrayBuffer());
};
// A browser without 64-bit memories refuses the module.
const engine = await compiled().catch((error) => {
  find("state").textContent = "There is no answer.";
  find("problem").hidden = false;
  find("problem").append(make("p", {}, make("strong", {}, "The engine cannot be started in this browser.")),
    make("p", {}, `Hint: use Chrome or Edge 133, Firefox 134 or a later one, or \`foretell serve\`. (${error.message})`));
  throw error;
});

const worker = () => {
  const started = new Worker("worker.js");
  started.postMessage(engine);
  return started;
};

// Has a worker begin with each question for which there is one.
const next = () => {
  while (working < most && waiting.length) {
    const job = waiting.shift();
    working += 1;
    job.worker = idle.pop() || worker();
    job.worker.onmessage = ({ data }) => {
      if (data.progress) { job.moment = data.progress; return; }
      idle.push(job.worker);
      job.end(() => job.settle(data.answer));
    };
    job.worker.onerror = (event) => {
      job.worker.terminate();
      job.end(() => job.fail(new Refused({ code: "undone", message: event.message || "the engine stopped" })));
    };
    job.worker.postMessage(job.question);
  }
};

// Returns the text of the answer. A question that is replaced is refused with the code "cancelled".
const textOf = (name, question) => {
  open.get(name)?.cancel();
  return new Promise((settle, fail) => {
    const job = { question, settle, fail, worker: null, moment: null };
    job.end = (how) => {
      if (job.worker) working -= 1;
      else waiting.splice(waiting.indexOf(job), 1);
      if (open.get(name) === job) open.delete(name);
      how();
      next();
    };
    job.cancel = () => {
      if (job.worker) {
        job.worker.terminate();
        idle.push(worker());
      }
      job.end(() => fail(new Refused({ code: "cancelled", message: "replaced" })));
    };
    open.set(name, job);
    waiting.push(job);
    next();
  });
};

// Asks, and returns {status, answer, message, notes, line, seconds, report, files}. It throws `Refused`, also for an
// answer that is an error.
const ask = async (name, command, options, more = {}) => {
  const answer = JSON.parse(await textOf(name, JSON.stringify({ command, options, ...more })));
  const error = answer.error || (answer.answer && !Array.isArray(answer.answer) && answer.answer.error);
  if (error) throw new Refused(error);
  return answer;
};

// Cancels every question of this page, those that wait first, and counts a new configuration.
const newConfiguration = () => {
  for (const job of [...open.values()].reverse()) job.cancel();
  configuration += 1;
  return configuration;
};

const progress = async (name) => {
  const moment = open.get(name)?.moment;
  return moment ? JSON.parse(moment) : null;
};

// Shows the report of an answer in a frame, and has a link save it. The frame has a policy of its own, under which the
// report's scripts run and reach nothing.
const showReport = (answer, frame, link) => {
  frame.onload = () => { frame.onload = null; frame.contentWindow.postMessage(answer.report, "*"); };
  frame.src = "report.html";
  URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([answer.report], { type: "text/html" }));
  link.download = "foretell-report.html";
};

find("known").textContent = await textOf("known", null);
