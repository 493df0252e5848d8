// Asks when a field changes: a first answer, the simulated step, then the search's certificate. It shows what comes.
const status = (text) => { find("state").textContent = text; };
// What belongs to the answer: pale while another is asked for, and out of use where there is none.
const parts = ["facts", "memory", "time", "lengths-table", "layouts", "beside", "line", "step-line", "advice"];
const uses = ["report-show", "scale-ask", "export-ask", "beside-keep", "line-copy", "plan-save"];
const isOld = (old) => {
  parts.forEach((id) => find(id).classList.toggle("old", old));
  uses.forEach((id) => { find(id).disabled = old; });
  find("layouts").querySelectorAll("button").forEach((button) => { button.disabled = old; });
};

const showProblem = (error) => {
  find("problem").hidden = !error;
  find("problem").replaceChildren();
  showAtFields(error);
  if (!error) return;
  find("problem").append(make("p", {}, make("strong", {}, error.message)));
  if (error.hint) find("problem").append(make("p", {}, `Hint: ${error.hint}`));
};

const show = () => {
  const best = chosen();
  if (!best) return;
  const limit = leastMemory(now.topology);
  const predicted = now.step || best.predicted;
  const lengths = lengthsOfChosen();
  find("facts").replaceChildren(...factsOf(predicted, best.plan, now.step && now.step.cost, limit, lengths));
  find("memory").replaceChildren(memoryBar(best.predicted, limit));
  find("time").replaceChildren(timeBar(predicted, lengths));
  find("lengths-table").replaceChildren(...(lengths ? [lengthsTable(lengths)] : []));
  find("layouts").replaceChildren(layoutsTable(now.candidates, now.chosen, choose, now.lengths));
  find("line").textContent = now.line;
  find("step-line").textContent = now.stepLine;
  showSizes();
  offerFormat(best.plan);
  const notes = [...new Set([...now.notes, ...((now.step && now.step.remarks) || [])])];
  find("advice").replaceChildren(...notes.map((note) => make("li", {}, note)));
  showBeside();
};

const hideReport = () => ["report", "report-save"].forEach((id) => { find(id).hidden = true; });
const choose = (index) => {
  now.chosen = index;
  now.step = null;
  outdatePanels();
  hideReport();
  show();
  find("layouts").querySelectorAll("button")[index].focus();
  askStep();
};

// Simulates the chosen layout. With `report` it makes the report too.
const askStep = async (report = false) => {
  const best = chosen();
  const mine = configuration;
  try {
    const answer = await ask("step", "simulate", stepOptions(best, now.state), { report });
    if (mine !== configuration || best !== chosen()) return null;
    now.step = answer.answer;
    now.stepLine = answer.line;
    if (now.search && !open.has("search")) status(`The search is over: ${certainty(now.search)}.`);
    performance.mark("simulation");
    show();
    followUp();
    return answer;
  } catch (error) {
    if (!wasReplaced(error)) status(`The run could not be simulated: ${inWords(error)}`);
    return null;
  }
};

// Redraws the curves once the search is over and the step is simulated, so that neither waits for them.
const followUp = () => {
  if (open.has("search") || open.has("step") || !chosen() || !now.step) return;
  askWhatIf();
  if (find("scale-curve").classList.contains("old")) askScaling();
};

const took = (answer, mine) => {
  if (mine !== configuration) return false;
  const document = answer.answer;
  const before = chosen() && JSON.stringify(chosen().plan);
  now.owner = mine;
  now.candidates = [{ plan: document.plan, predicted: document.predicted }, ...document.alternatives];
  now.chosen = 0;
  now.search = document.search;
  now.lengths = document.lengths || null;
  now.notes = answer.notes;
  showProblem(null);
  isOld(false);
  if (JSON.stringify(chosen().plan) !== before) now.step = null;
  show();
  return true;
};

// Follows the search's progress until it ends.
const follow = async (mine) => {
  while (mine === configuration && open.has("search")) {
    const moment = await progress("search");
    const at = moment && (moment.progress || moment.ended);
    if (at && mine === configuration && open.has("search")) {
      const gap = at.bound > 0 && at.best > 0 ? `, at most ${percent(at.best / at.bound - 1)} above the best` : "";
      status(`Searching: ${count(at.simulated)} layouts simulated${gap}.`);
    }
    await new Promise((done) => setTimeout(done, 250));
  }
};

// The command without what only the page needs.
const typed = (line) => line.replace(/ --top \d/, "").replace(/ --time-limit \S+/, "");

let searchClock = 0;
const answerAgain = async () => {
  clearInterval(searchClock);
  const mine = newConfiguration();
  writeAddress();
  isOld(true);
  outdatePanels();
  hideReport();
  status("Asking for a first answer.");
  performance.mark("change");
  const options = planOptions(now.state);
  // The cluster says how much memory a device has; a stale one must not mark the limit.
  const cluster = ask("cluster", "topologies show", { name: options.topology }).then((answer) => {
    if (mine !== configuration) return;
    now.topology = answer.answer;
    if (now.owner === mine) show();
  }, () => { if (mine === configuration) now.topology = null; });
  try {
    // Steps over samples of different lengths take longer than the first moment, so only one layout has them.
    const first = await ask("search", "plan", { ...options, top: options.lengths ? 1 : 5, "time-limit": "50ms" });
    now.line = typed(first.line);
    performance.mark("first");
    if (!took(first, mine)) return;
    status(`First answer after ${figures(first.seconds)} s: ${certainty(now.search)}.`);
    askStep();
    if (!now.search.is_cut_off && !options.lengths) {
      status(`The search is over: ${certainty(now.search)}.`);
      performance.mark("certificate");
      return;
    }
  } catch (error) {
    if (wasReplaced(error) || mine !== configuration) return;
    // A search that found nothing in so short a time may find something yet.
    if (error.code === "input" || error.code === "gone") { fail(error); return; }
    showProblem(null);
    performance.mark("first");
    const began = performance.now();
    status("No layout fits so far. The search goes on.");
    searchClock = setInterval(() => {
      if (mine !== configuration || !open.has("search")) return clearInterval(searchClock);
      status(`No layout fits so far. The search goes on: ${figures((performance.now() - began) / 1000)} s.`);
    }, 1000);
  }
  await cluster;
  try {
    const search = ask("search", "plan", { ...options, top: 5, "time-limit": "60s" }, { progress: true });
    search.finally(() => clearInterval(searchClock)).catch(() => null);
    follow(mine);
    const answer = await search;
    now.line = typed(answer.line);
    if (!took(answer, mine)) return;
    performance.mark("certificate");
    status(`The search is over: ${certainty(now.search)}.`);
    if (!now.step) askStep();
    else followUp();
  } catch (error) {
    if (!wasReplaced(error) && mine === configuration) fail(error);
  }
};
const fail = (error) => {
  performance.mark("failure");
  showProblem(error);
  if (/no layout/.test(error.message)) {
    const limit = leastMemory(now.topology);
    const into = limit ? `no layout fits into ${bytes(limit)} of a device` : "no layout fits";
    // Sizes that do not divide the devices are no matter of memory.
    const isTooLarge = /no layout fits/.test(error.message);
    find("facts").replaceChildren(fact("Does it fit?", isTooLarge ? "It does not fit" : "No such layout", isTooLarge ? into : "nothing was searched", "bad"));
    find("facts").classList.remove("old");
    ["memory", "time", "lengths-table", "layouts", "advice"].forEach((id) => find(id).replaceChildren());
    find("line").textContent = "";
    find("step-line").textContent = "";
    now.candidates = [];
  }
  status(now.candidates.length ? "The figures below are of the configuration before." : "There is no answer.");
};

const showReportOf = async () => {
  if (!chosen()) return;
  find("report-state").textContent = "Simulating and drawing the step.";
  const answer = await askStep(true);
  find("report-state").textContent = "";
  if (!answer || answer.report === null) return;
  showReport(answer, find("report"), find("report-save"));
  find("report").hidden = false;
  find("report-save").hidden = false;
};

const keepBeside = () => {
  if (!chosen()) return;
  if (now.owner !== configuration) return;
  kept = { state: { ...now.state }, candidates: now.candidates, chosen: now.chosen, step: now.step, lengths: now.lengths };
  find("beside-state").textContent = "Kept. Change a field, and both stand side by side.";
  writeAddress();
  showBeside();
};
const dropBeside = () => {
  kept = null;
  find("beside-state").textContent = "";
  writeAddress();
  showBeside();
  find("beside-keep").focus();
};

const setUp = () => {
  find("version").textContent = known.version;
  setUpWhatIf();
  setUpFields();
  setUpFiles();
  const buttons = { "report-show": showReportOf, "scale-ask": askScaling, "fits-ask": askFits, "export-ask": askExport,
    "beside-keep": keepBeside, "beside-drop": dropBeside,
    "line-copy": () => copy(find("line-copy"), [now.line, now.stepLine].filter((line) => line).join("\n")),
    "link-copy": () => copy(find("link-copy"), location.href),
    "plan-save": () => { if (chosen()) save("plan.json", JSON.stringify(chosen().plan, null, 2), "application/json"); } };
  for (const [id, action] of Object.entries(buttons)) find(id).addEventListener("click", action);
  find("export-to").addEventListener("input", () => { formatIsChosen = true; });
  find("job").addEventListener("submit", (event) => { event.preventDefault(); answerAgain(); });

  const start = () => {
    const fragment = location.hash.slice(1);
    now.state = fromFragment(fragment);
    const other = new URLSearchParams(fragment).get("kept");
    kept = other === null ? null : { state: fromFragment(other), candidates: [], chosen: 0, step: null, lengths: null };
    showState();
    showHardware(now.state.hardware);
    answerAgain().then(() => { if (other !== null) askKept(fromFragment(other)); });
  };
  addEventListener("hashchange", start);
  start();
};
setUp();
