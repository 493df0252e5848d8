// Wires fields and panels, and asks when a field changes: a first answer, the simulated step, then
// the search's certificate.
const status = (text) => { find("state").textContent = text; };
const isOld = (old) => ["facts", "memory", "time", "layouts"].forEach((id) => find(id).classList.toggle("old", old));

const showProblem = (error) => {
  find("problem").hidden = !error;
  find("problem").replaceChildren();
  if (!error) return;
  find("problem").append(make("p", {}, make("strong", {}, error.message)));
  if (error.hint) find("problem").append(make("p", {}, `Hint: ${error.hint}`));
};

const show = () => {
  const best = chosen();
  if (!best) return;
  const limit = leastMemory(now.topology);
  const predicted = now.step || best.predicted;
  find("facts").replaceChildren(...factsOf(predicted, best.plan, now.step && now.step.cost, limit));
  find("memory").replaceChildren(memoryBar(best.predicted, limit));
  find("time").replaceChildren(timeBar(predicted));
  find("layouts").replaceChildren(layoutsTable(now.candidates, now.chosen, choose));
  find("line").textContent = now.line;
  const notes = [...new Set([...now.notes, ...((now.step && now.step.remarks) || [])])];
  find("advice").replaceChildren(...notes.map((note) => make("li", {}, note)));
  showBeside();
};

const choose = (index) => {
  now.chosen = index;
  now.step = null;
  find("report").hidden = true;
  find("report-save").hidden = true;
  show();
  find("layouts").querySelectorAll("button")[index].focus();
  askStep();
};

// Simulates the chosen layout. With `report` it makes the report too.
const askStep = async (report = false) => {
  const best = chosen();
  const mine = configuration;
  find("tokens").setAttribute("aria-invalid", String(!(number(now.state.tokens) >= 1) && now.state.tokens.trim() !== ""));
  try {
    const answer = await ask("step", "simulate", stepOptions(best, now.state), { report });
    if (mine !== configuration || best !== chosen()) return null;
    now.step = answer.answer;
    performance.mark("simulation");
    show();
    if (asked(factors)) askWhatIf();
    return answer;
  } catch (error) {
    if (!wasReplaced(error)) status(`The step could not be simulated: ${inWords(error)}`);
    return null;
  }
};

const took = (answer, mine) => {
  if (mine !== configuration) return false;
  const document = answer.answer;
  const before = chosen() && JSON.stringify(chosen().plan);
  now.owner = mine;
  now.candidates = [{ plan: document.plan, predicted: document.predicted }, ...document.alternatives];
  now.chosen = 0;
  now.search = document.search;
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

const answerAgain = async () => {
  const mine = newConfiguration();
  writeAddress();
  isOld(true);
  find("report").hidden = true;
  find("report-save").hidden = true;
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
    const first = await ask("search", "plan", { ...options, top: 5, "time-limit": "50ms" });
    now.line = first.line.replace(" --top 5", "").replace(/ --time-limit \S+/, "");
    performance.mark("first");
    if (!took(first, mine)) return;
    status(`First answer after ${figures(first.seconds)} s: ${certainty(now.search)}.`);
    askStep();
    if (!now.search.is_cut_off) { status(`The search is over: ${certainty(now.search)}.`); performance.mark("certificate"); return; }
  } catch (error) {
    if (wasReplaced(error) || mine !== configuration) return;
    // A search that found nothing in so short a time may find something yet.
    if (error.code === "input" || error.code === "gone") { fail(error); return; }
    showProblem(error);
    performance.mark("first");
    status("No answer in the first moment. The search goes on.");
  }
  await cluster;
  try {
    const search = ask("search", "plan", { ...options, top: 5, "time-limit": "60s" }, { progress: true });
    follow(mine);
    const answer = await search;
    now.line = answer.line.replace(" --top 5", "").replace(/ --time-limit \S+/, "");
    if (!took(answer, mine)) return;
    performance.mark("certificate");
    status(`The search is over: ${certainty(now.search)}.`);
    if (!now.step) askStep();
  } catch (error) {
    if (!wasReplaced(error) && mine === configuration) fail(error);
  }
};
const fail = (error) => {
  performance.mark("failure");
  showProblem(error);
  status(now.candidates.length ? "The figures below are of the configuration before." : "There is no answer.");
};

// --- Fields ---------------------------------------------------------------------------------------
const writeAddress = () => {
  const fragment = toFragment(now.state);
  const beside = kept ? `${fragment ? "&" : ""}kept=${encodeURIComponent(toFragment(kept.state))}` : "";
  history.replaceState(null, "", `${location.pathname}${location.search}#${fragment}${beside}`);
};
let timer = 0;
const later = (wait) => { clearTimeout(timer); timer = setTimeout(answerAgain, wait); };
const fields = ["model", "topology", "method", "stack", "precision", "nodes", "sequence", "batch", "tokens", "device", "nic"];
const sliders = ["nodes", "sequence", "batch"];

const showState = () => {
  for (const name of fields) find(name).value = now.state[name];
  for (const name of sliders) {
    const value = number(now.state[name]);
    if (Number.isFinite(value) && value > 0) find(`${name}-slider`).value = String(Math.log2(value));
  }
  for (const name of ["model", "topology"]) {
    const file = now.state[`${name}File`];
    find(`${name}-clear`).hidden = !file;
    find(name).disabled = Boolean(file);
    if (file) find(name).value = `${file.name} (a file)`;
  }
};

const formOf = (text) => {
  if (/^\s*GPU0\b/m.test(text) && /\bGPU0\b/.test(text) && /\b(NV\d+|PIX|PXB|PHB|SYS|NODE)\b/.test(text)) return "nvidia-smi-topo";
  if (/^NodeName=/m.test(text)) return "slurm-nodes";
  if (/^\s*(<\?xml[^>]*>\s*)?<system\b/.test(text)) return "nccl-xml";
  return null;
};
let listing = null;
const importListing = async () => {
  const options = { form: listing.form, files: { name: "listing.txt", text: listing.text } };
  if (listing.form === "nvidia-smi-topo" && now.state.device) options.device = now.state.device;
  if (now.state.nic) options["nic-bandwidth"] = now.state.nic;
  const { answer } = await ask("import", "import", options);
  now.state.topologyFile = { name: "imported.yaml", text: answer.topology };
};
const takeFile = async (name, file) => {
  try {
    if (file.size > 2 << 20) throw new Refused({ code: "input", message: "the file has more than 2 MiB", hint: "check that it is the file that you mean" });
    const text = await file.text();
    const safe = file.name.replaceAll(/[^A-Za-z0-9._-]/g, "_").replace(/^[.-]+/, "").slice(-60) || "file.yaml";
    if (name === "model") {
      const isConfig = /"(model_type|architectures)"/.test(text);
      const model = isConfig ? (await ask("import", "import", { form: "hf-config", files: { name: "config.json", text } })).answer.model : text;
      now.state.modelFile = { name: isConfig ? safe.replace(/\.json$/, ".yaml") : safe, text: model };
    } else {
      listing = formOf(text) ? { form: formOf(text), text } : null;
      ["device-field", "nic-field"].forEach((id) => { find(id).hidden = !listing; });
      if (listing) await importListing();
      else now.state.topologyFile = { name: safe, text };
    }
    showState();
    answerAgain();
  } catch (error) {
    if (!wasReplaced(error)) fail(error instanceof Refused ? error : new Refused({ code: "input", message: String(error) }));
  }
};

const choices = (select, values, first) => {
  select.replaceChildren(...(first ? [make("option", { value: "" }, first)] : []), ...values.map((value) => make("option", { value }, value)));
};

const setUp = () => {
  const { plan, export: exported } = known.commands;
  find("models").append(...known.models.map((value) => make("option", { value })));
  find("topologies").append(...known.topologies.map((value) => make("option", { value })));
  choices(find("method"), plan.method.enum);
  choices(find("stack"), known.stacks, "the usual one");
  choices(find("precision"), plan.precision.items.enum, "the usual one");
  choices(find("export-to"), exported.to.enum);
  const axes = ["context", "method", "batch", "nodes", "loss"];
  choices(find("fits-rows"), axes);
  choices(find("fits-columns"), axes);
  find("fits-columns").value = "method";
  find("version").textContent = known.version;
  setUpWhatIf();

  for (const name of fields) {
    find(name).addEventListener("input", () => {
      now.state[name] = find(name).value;
      if (name === "tokens") { writeAddress(); if (chosen()) askStep(); return; }
      if (name === "device" || name === "nic") { if (listing) importListing().then(answerAgain, fail); return; }
      later(find(name).tagName === "SELECT" ? 0 : 40);
    });
  }
  for (const name of sliders) {
    find(`${name}-slider`).addEventListener("input", () => {
      now.state[name] = String(2 ** Number(find(`${name}-slider`).value));
      find(name).value = now.state[name];
      later(40);
    });
  }
  for (const name of ["model", "topology"]) {
    const field = find(name).closest(".field");
    find(`${name}-file`).addEventListener("change", (event) => { if (event.target.files[0]) takeFile(name, event.target.files[0]); event.target.value = ""; });
    find(`${name}-clear`).addEventListener("click", () => {
      now.state[`${name}File`] = null;
      if (name === "topology") { listing = null; ["device-field", "nic-field"].forEach((id) => { find(id).hidden = true; }); }
      showState();
      find(name).focus();
      answerAgain();
    });
    field.addEventListener("dragover", (event) => { event.preventDefault(); field.classList.add("dropping"); });
    field.addEventListener("dragleave", () => field.classList.remove("dropping"));
    field.addEventListener("drop", (event) => {
      event.preventDefault();
      field.classList.remove("dropping");
      if (event.dataTransfer.files[0]) takeFile(name, event.dataTransfer.files[0]);
    });
  }
  find("job").addEventListener("submit", (event) => { event.preventDefault(); answerAgain(); });

  find("report-show").addEventListener("click", async () => {
    if (!chosen()) return;
    find("report-state").textContent = "Simulating and drawing the step.";
    const answer = await askStep(true);
    find("report-state").textContent = "";
    if (!answer || answer.report === null) return;
    showReport(answer, find("report"), find("report-save"));
    find("report").hidden = false;
    find("report-save").hidden = false;
  });
  find("scale-ask").addEventListener("click", askScaling);
  find("fits-ask").addEventListener("click", askFits);
  find("export-ask").addEventListener("click", askExport);
  find("beside-keep").addEventListener("click", () => {
    if (!chosen()) return;
    kept = { state: { ...now.state }, candidates: now.candidates, chosen: now.chosen, step: now.step };
    find("beside-state").textContent = "Kept. Change a field, and both stand side by side.";
    writeAddress();
    showBeside();
  });
  find("beside-drop").addEventListener("click", () => { kept = null; find("beside-state").textContent = ""; writeAddress(); showBeside(); find("beside-keep").focus(); });
  const copy = (button, text) => navigator.clipboard.writeText(text).then(
    () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = button.dataset.text; }, 1500); }, () => { button.textContent = "The browser does not allow it"; });
  for (const id of ["line-copy", "link-copy"]) find(id).dataset.text = find(id).textContent;
  find("line-copy").addEventListener("click", () => copy(find("line-copy"), now.line));
  find("link-copy").addEventListener("click", () => copy(find("link-copy"), location.href));
  find("plan-save").addEventListener("click", () => { if (chosen()) save("plan.json", JSON.stringify(chosen().plan, null, 2), "application/json"); });

  const read = () => {
    now.state = fromFragment(location.hash.slice(1));
    const other = new URLSearchParams(location.hash.slice(1)).get("kept");
    kept = null;
    showState();
    return other;
  };
  const start = () => {
    const other = read();
    if (other !== null) kept = { state: fromFragment(other), candidates: [], chosen: 0, step: null };
    answerAgain().then(() => { if (other !== null) askKept(fromFragment(other)); });
  };
  addEventListener("hashchange", start);
  start();
};
setUp();
