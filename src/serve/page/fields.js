// Fields and sliders of the configuration: what they show, and what a change does.
const fields = ["model", "topology", "method", "stack", "precision", "nodes", "sequence", "batch", "lengths", "batching", "tokens", "price", "device", "nic",
  ...Object.keys(moreChoices)];
// A change of these changes no layout, only the figures of its run.
const ofRun = ["tokens", "price"];
const sliders = ["nodes", "sequence", "batch"];

const writeAddress = () => {
  const fragment = toFragment(now.state);
  const beside = kept ? `${fragment ? "&" : ""}kept=${encodeURIComponent(toFragment(kept.state))}` : "";
  history.replaceState(null, "", `${location.pathname}${location.search}#${fragment}${beside}`);
};

// A key asks after a moment, in which the next one may come.
const MOMENT = 40;
let timer = 0;
let runTimer = 0;
const later = (wait) => { clearTimeout(timer); timer = setTimeout(answerAgain, wait); };

const showSlider = (name, value) => {
  if (!(value > 0)) return;
  find(`${name}-slider`).value = String(Math.log2(value));
  find(`${name}-slider`).setAttribute("aria-valuetext", whole(value));
};

// Puts the sliders of empty fields where the answer is.
const showSizes = () => sliders.forEach((name) => {
  if (now.state[name].trim()) return;
  const size = sizeOf[name]();
  if (size > 0) find(name).placeholder = `${whole(size)}, as answered`;
  showSlider(name, size);
});

// Writes the configuration into the fields.
const showState = () => {
  for (const name of fields) find(name).value = now.state[name];
  for (const name of sliders) showSlider(name, number(now.state[name]));
  for (const name of filed) {
    const file = now.state[`${name}File`];
    find(`${name}-clear`).hidden = !file;
    find(name).disabled = Boolean(file);
    if (file) find(name).value = `${file.name} (a file)`;
  }
  showOffered();
};

const inList = (names) => names.map((name) => `${moreChoices[name].title} ${now.state[name].trim()}`).join("; ");
// Shows the fields that the configuration has, and names the choices that it leaves out.
const showOffered = () => {
  const { state } = now;
  find("batching-field").hidden = !lengthOptions(state).lengths;
  for (const name of ["adapter", "bits", "reference"]) find(`${name}-field`).hidden = !moreChoices[name].isOffered(state);
  find("adapter").placeholder = adapted.includes(state.method) ? "rank=16,targets=all-linear" : "none; or rank=16,targets=attention";
  find("more-stated").textContent = inList(sentChoices(state)) || `optimizer, kernels, headroom, layout${adaptable.includes(state.method) ? ", adapters" : ""}`;
  const unused = leftOutChoices(state);
  const wantAdapters = adaptable.includes(state.method) && !hasAdapters(state) && unused.every((name) => name === "bits");
  const where = wantAdapters ? "without adapters" : `with ${state.method}`;
  find("left-out").textContent = unused.length ? `Left out ${where}: ${inList(unused)}.` : "";
};

// Shows a mistake at the stated choices that it is about, and clears it at the others. Only the
// hint of wrong input is about what is stated: other hints name choices that would help.
const showAtFields = (error) => {
  const text = error ? error.message + (error.code === "input" ? ` ${error.hint || ""}` : "") : "";
  const wrong = sentChoices(now.state).filter((name) => moreChoices[name].inMessage.test(text));
  for (const name of Object.keys(moreChoices)) {
    find(name).setAttribute("aria-invalid", String(wrong.includes(name)));
    find(`${name}-wrong`).textContent = wrong.includes(name) ? inWords(error) : "";
  }
  if (wrong.length) find("more").open = true;
};

const changed = (name) => {
  now.state[name] = find(name).value;
  if (ofRun.includes(name)) {
    const text = now.state[name].trim();
    const isSound = name === "tokens" ? number(text) >= 1 || text === "" : /^([$\u20ac\u00a3\u00a5]?\s*[\d.]+\s*([A-Za-z]{3}|[$\u20ac\u00a3\u00a5])?)?$/.test(text);
    find(name).setAttribute("aria-invalid", String(!isSound));
    writeAddress();
    clearTimeout(runTimer);
    // A price is typed in several keys.
    if (!isSound) status(name === "tokens" ? "Tokens are a number, such as 100M or 1e9." : "A price is a number with its currency, such as 2.50 USD.");
    else if (chosen() && now.owner === configuration) runTimer = setTimeout(askStep, 150);
  } else if (name === "device" || name === "nic") {
    importAgain();
  } else {
    if (sliders.includes(name)) showSlider(name, number(now.state[name]));
    showOffered();
    later(find(name).tagName === "SELECT" ? 0 : MOMENT);
  }
};

const choices = (select, values, first) => {
  select.replaceChildren(...(first ? [make("option", { value: "" }, first)] : []), ...values.map((value) => make("option", { value }, value)));
};

const setUpFields = () => {
  const { plan, export: exported } = known.commands;
  find("models").append(...known.models.map((value) => make("option", { value })));
  find("topologies").append(...known.topologies.map((value) => make("option", { value })));
  choices(find("method"), plan.method.enum);
  choices(find("stack"), known.stacks, "the usual one");
  choices(find("precision"), plan.precision.items.enum, "the usual one");
  choices(find("batching"), plan.batching.enum);
  choices(find("optimizer"), plan.optimizer.enum, "the usual one");
  choices(find("loss"), plan.loss.enum, "the usual one");
  choices(find("attention"), plan.attention.enum, "the framework's");
  choices(find("bits"), ["4", "8"], "the precision's");
  choices(find("reference"), plan.reference.enum, "the usual one");
  choices(find("export-to"), exported.to.enum);
  const axes = ["context", "method", "batch", "nodes", "gpus", "model", "loss"];
  choices(find("fits-rows"), axes);
  choices(find("fits-columns"), axes);
  find("fits-columns").value = "method";

  for (const name of fields) find(name).addEventListener("input", () => changed(name));
  for (const name of sliders) {
    find(`${name}-slider`).addEventListener("input", () => {
      now.state[name] = String(2 ** Number(find(`${name}-slider`).value));
      find(name).value = now.state[name];
      showSlider(name, number(now.state[name]));
      later(MOMENT);
    });
  }
};
