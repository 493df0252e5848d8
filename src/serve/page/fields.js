// Fields and sliders of the configuration: what they show, and what a change does.
const fields = ["model", "topology", "method", "stack", "precision", "nodes", "sequence", "batch", "lengths", "batching", "tokens", "price", "device", "nic"];
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
const later = (wait) => { clearTimeout(timer); timer = setTimeout(answerAgain, wait); };

const showSlider = (name, value) => {
  if (!(value > 0)) return;
  find(`${name}-slider`).value = String(Math.log2(value));
  find(`${name}-slider`).setAttribute("aria-valuetext", count(value));
};

// Puts the sliders of empty fields where the answer is.
const showSizes = () => sliders.forEach((name) => { if (!now.state[name].trim()) showSlider(name, sizeOf[name]()); });

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
  showBatching();
};
const showBatching = () => { find("batching-field").hidden = !lengthOptions(now.state).lengths; };

const changed = (name) => {
  now.state[name] = find(name).value;
  if (ofRun.includes(name)) {
    const isNumber = name !== "tokens" || number(now.state.tokens) >= 1 || now.state.tokens.trim() === "";
    find(name).setAttribute("aria-invalid", String(!isNumber));
    writeAddress();
    if (chosen()) askStep();
  } else if (name === "device" || name === "nic") {
    importAgain();
  } else {
    showBatching();
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
  choices(find("export-to"), exported.to.enum);
  const axes = ["context", "method", "batch", "nodes", "loss"];
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
