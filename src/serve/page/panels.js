// The panels below the answer, each with a lane of its own. After a change they are pale until they are asked again.
// `now` is what the page shows. `owner` is the configuration whose candidates they are, `lengths` what the first layout's
// samples of different lengths make of its step.
const now = { state: { ...usual }, candidates: [], chosen: 0, search: null, step: null, topology: null, lengths: null, line: "", stepLine: "", notes: [], owner: 0 };
const chosen = () => now.candidates[now.chosen];
const lengthsOfChosen = () => (now.step ? now.step.lengths : now.chosen === 0 && now.lengths) || null;

// Shows the answer to a panel's question about the configuration on the page.
const showPanel = (id, ...children) => {
  find(id).replaceChildren(...children);
  find(id).classList.remove("old");
};
const outdatePanels = () => {
  for (const [id, state] of [["if-curve", "if-state"], ["scale-curve", "scale-state"], ["fits-table", "fits-state"], ["export", "export-state"]]) {
    if (!find(id).hasChildNodes()) continue;
    find(id).classList.add("old");
    find(state).textContent = "Of the configuration before.";
  }
};

// Shows what a question says while it goes, and its failure. Returns the answer, or null.
const panel = async (status, saying, question) => {
  status.textContent = saying;
  try {
    const answer = await question();
    status.textContent = "";
    return answer;
  } catch (error) {
    if (!wasReplaced(error)) status.textContent = inWords(error);
    return null;
  }
};

// --- Other hardware -------------------------------------------------------------------------------
const quantities = [["peak", "Device speed"], ["memory_bandwidth", "Memory bandwidth"], ["intra_node.bandwidth", "Links inside a node"],
  ["inter_node.bandwidth", "Links between nodes"]];
const factors = new Map(quantities.map(([name]) => [name, 0]));
let moved = "peak";
let ifTimer = 0;

const asked = (powers) => [...powers].filter(([, power]) => power !== 0).map(([name, power]) => `${name}*${2 ** power}`).join(",");
const askWhatIf = async () => {
  const best = chosen();
  if (!best) return;
  const powers = [...new Set([-2, -1, 0, 1, 2, factors.get(moved)])].sort((one, other) => one - other);
  const questions = powers.map((power) => asked(new Map([...factors, [moved, power]])));
  const texts = [...new Set(questions.filter((text) => text))];
  const answer = await panel(find("if-state"), "Simulating.", () => ask("if", "simulate", { plan: best.plan, "what-if": texts }));
  if (!answer || best !== chosen()) return;
  const steps = new Map([["", answer.answer.step_seconds], ...texts.map((text, index) => [text, answer.answer.what_if[index].step_seconds])]);
  const mine = steps.get(asked(factors));
  const change = mine / answer.answer.step_seconds - 1;
  const step = lengthsOfChosen() ? "Step of the longest batch" : "Step";
  find("if-state").textContent = asked(factors) ? `${step} ${time(mine)}: ${change > 0 ? "+" : ""}${percent(change)} (as it is: ${time(answer.answer.step_seconds)})`
    : `${step} as it is: ${time(mine)}. Move a slider.`;
  const points = powers.map((power, index) => ({ x: 2 ** power, y: steps.get(questions[index]), label: `×${figures(2 ** power)}`, now: power === factors.get(moved) }));
  showPanel("if-curve", curve(`Step by ${quantities.find(([name]) => name === moved)[1].toLowerCase()}`, points, time));
};
const showFactor = (slider, output) => {
  output.textContent = `×${figures(2 ** Number(slider.value))}`;
  slider.setAttribute("aria-valuetext", output.textContent);
};
// Sets the sliders to the factors of an address: `peak*2,inter_node.bandwidth*0.5`.
const showHardware = (text) => {
  const given = new Map(text.split(",").map((one) => one.split("*")));
  for (const [name] of quantities) {
    const power = Math.log2(Number(given.get(name)));
    const slider = find(`if-${name.replace(".", "-")}`);
    slider.value = String(Number.isFinite(power) ? power : 0);
    factors.set(name, Number(slider.value));
    if (factors.get(name)) moved = name;
    showFactor(slider, slider.parentElement.querySelector("output"));
  }
  now.state.hardware = asked(factors);
};
const setUpWhatIf = () => {
  for (const [name, shown] of quantities) {
    const output = make("output", {}, "×1");
    const slider = make("input", { type: "range", min: "-3", max: "3", step: "0.5", value: "0", id: `if-${name.replace(".", "-")}`, oninput: () => {
      factors.set(name, Number(slider.value));
      moved = name;
      now.state.hardware = asked(factors);
      writeAddress();
      showFactor(slider, output);
      clearTimeout(ifTimer);
      ifTimer = setTimeout(askWhatIf, 60);
    } });
    find("if-sliders").append(make("div", {}, make("label", { for: slider.id }, `${shown} `, output), slider));
  }
};

// --- Larger and smaller ---------------------------------------------------------------------------
// The sizes of the best layout, for fields that leave them to the model and the cluster.
const sizeOf = { nodes: () => now.topology && (now.topology.nodes || []).reduce((sum, node) => sum + (node.count || 1), 0),
  batch: () => chosen().plan.global_batch,
  sequence: () => Math.round(chosen().predicted.tokens_per_second / chosen().predicted.samples_per_second) };
const askScaling = async () => {
  if (!chosen()) return;
  const [axis, state, mine] = [find("scale-axis").value, { ...now.state }, configuration];
  const written = number(state[axis]);
  const middle = Number.isFinite(written) ? written : sizeOf[axis]();
  if (!middle) { find("scale-state").textContent = `Give the ${axis === "batch" ? "global batch" : axis} first.`; return; }
  const from = axis === "nodes" ? [1, 2, 4, 8, 16] : [0.25, 0.5, 1, 2, 4];
  const points = from.map((factor) => ({ x: Math.max(1, Math.round(middle * factor)), y: null, now: factor === 1 }));
  for (const point of points) point.label = count(point.x);
  const unit = meanRate(chosen().predicted, lengthsOfChosen())[1];
  const draw = () => showPanel("scale-curve", curve(`${unit} by ${axis === "batch" ? "global batch" : axis}; a cross does not fit`, points, count));
  for (const point of points) {
    draw();
    find("scale-state").textContent = `Planning ${axis === "batch" ? "global batch" : axis} ${point.label}.`;
    try {
      const answer = await ask("scale", "plan", { ...planOptions({ ...state, [axis]: String(point.x) }), top: 1, "time-limit": "2s" });
      point.y = meanRate(answer.answer.predicted, answer.answer.lengths)[0];
    } catch (error) {
      if (wasReplaced(error) || mine !== configuration) return;
      point.note = inWords(error);
    }
  }
  draw();
  const failed = points.filter((point) => point.note);
  find("scale-state").textContent = failed.length ? `${failed[0].label}: ${failed[0].note}` : "";
};

// --- What fits ------------------------------------------------------------------------------------
const fitsCell = (cell) => {
  if (cell.fits) {
    const isRisky = cell.chance_of_running_out > risky;
    return make("td", { class: isRisky ? "number risky" : "number", title: cell.layout }, bytes(cell.memory_bytes), make("small", {}, `${count(cell.rate)}/s${isRisky ? ", may run out" : ""}`));
  }
  return make("td", { class: "number no", title: cell.layout }, cell.memory_bytes === null ? "not planned" : "does not fit",
    make("small", {}, cell.memory_bytes === null ? "" : `needs ${bytes(cell.memory_bytes)}`));
};
const askFits = async () => {
  const axes = [find("fits-rows").value, find("fits-columns").value];
  const options = fullOptions(now.state);
  // Of a table's methods `full` has no frozen weights, and `qlora` has those of 4 bits.
  const hasOwnBits = axes.includes("method") && "base-bits" in options;
  if (hasOwnBits) delete options["base-bits"];
  const answer = await panel(find("fits-state"), "Planning every cell.", () => ask("fits", "plan", { ...options, table: axes.join(","), "time-limit": "1s" }));
  if (!answer) return;
  const { cells } = answer.answer;
  const columns = [...new Set(cells.map((cell) => cell.column))];
  const rows = [...new Set(cells.map((cell) => cell.row))];
  const body = rows.map((row) => make("tr", {}, make("th", { scope: "row" }, row), ...cells.filter((cell) => cell.row === row).map(fitsCell)));
  showPanel("fits-table", table(`What fits: ${axes.join(" by ")}`, [axes.join(" \\ "), ...columns], body, columns.map((_, index) => index + 1)));
  const samples = Object.keys(lengthOptions(now.state)).length ? " Every sample is full here." : "";
  const bits = hasOwnBits ? " Frozen weights have the bits that each method has by default." : "";
  find("fits-state").textContent = `Memory of the fullest device, and tokens or samples a second. Cells that do not fit say the least that any layout needs.${samples}${bits}`;
};

// --- Two configurations ---------------------------------------------------------------------------
let kept = null;
const asUsual = "as usual";
const rowsOf = ({ state, candidates, chosen: index, step, lengths: best }) => {
  const { plan, predicted } = candidates[index];
  const lengths = (step ? step.lengths : index === 0 && best) || null;
  const [all, unit] = meanRate(predicted, lengths);
  const run = step && step.cost.run;
  const { layout } = plan;
  const stated = sentChoices(state);
  return [
    ["model", state.modelFile ? state.modelFile.name : state.model], ["cluster", state.topologyFile ? state.topologyFile.name : state.topology],
    ["method", state.method], ["samples", lengths ? `${state.lengthsFile ? state.lengthsFile.name : state.lengths}, ${state.batching}` : "all full"], ["framework", String(plan.stack)],
    ...Object.keys(moreChoices).map((name) => [moreChoices[name].title, stated.includes(name) ? state[name].trim() : asUsual]), ["global batch", String(plan.global_batch)],
    ["layout", ["data", "tensor", "pipeline", "context", "expert"].filter((axis) => layout[axis] > 1).map((axis) => `${axis} ${layout[axis]}`).join(", ") || "one device"],
    ["fits", fitOf(predicted)[0]], ["memory", predicted.peak_memory_bytes[fullest(predicted)], bytes], ["step", (lengths ? lengths.batching[0] : predicted).step_seconds, time],
    [unit, all, count], ["on each device", all / devicesOf(plan), count], ["MFU", predicted.mfu, percent],
    ["the run", (run && run.seconds) || null, time], ["its price", (run && run.price) || null, count],
  ];
};
const showBeside = () => {
  find("beside-drop").hidden = !kept;
  if (!kept || !kept.candidates.length || !now.candidates.length) { find("beside").replaceChildren(); return; }
  const [left, right] = [rowsOf(kept), rowsOf(now)];
  const written = ([, value, write]) => (value === null ? "–" : write ? write(value) : value);
  // Choices that both leave to the program need no row.
  const pairs = left.map((row, index) => [row, right[index]]).filter((pair) => pair.some(([, value]) => value !== asUsual));
  const rows = pairs.map(([row, other]) => {
    const change = row[2] && row[1] && other[1] ? other[1] / row[1] - 1 : null;
    return [row[0], written(row), written(other), change === null ? (written(row) === written(other) ? "same" : "") : `${change > 0 ? "+" : ""}${percent(change)}`];
  });
  find("beside").replaceChildren(table("Two configurations", ["", "kept", "on the page", "change"], rows, [1, 2, 3]));
};
// Asks again for a kept configuration that an address names.
const askKept = async (state) => {
  const found = await panel(find("beside-state"), "Planning the kept configuration.", () => ask("kept", "plan", { ...planOptions(state), top: 1, "time-limit": "5s" }));
  if (!found) return;
  kept = { state, candidates: [found.answer], chosen: 0, step: null, lengths: found.answer.lengths };
  showBeside();
  const simulated = await panel(find("beside-state"), "Simulating the kept configuration.", () => ask("kept", "simulate", stepOptions(found.answer, state)));
  if (simulated && kept && kept.state === state) kept.step = simulated.answer;
  showBeside();
};

// --- Files of a framework -------------------------------------------------------------------------
const fileOf = ([name, text]) => make("details", {}, make("summary", {}, name), make("pre", { tabindex: "0" }, text), make("div", { class: "bar" },
  make("button", { type: "button", onclick: () => save(name, text) }, `Save ${name}`),
  make("button", { type: "button", onclick: ({ target }) => copy(target, text) }, `Copy ${name}`)));
// Offers the files of the framework that the answer is for, until the user chooses others.
let formatIsChosen = false;
const offerFormat = ({ stack }) => {
  const formats = [...find("export-to").options].map((option) => option.value);
  const own = formats.find((format) => String(stack).includes(format)) || (/^hf-/.test(stack) ? "accelerate" : null);
  if (own && !formatIsChosen) find("export-to").value = own;
};
const askExport = async () => {
  const best = chosen();
  if (!best) return;
  const answer = await panel(find("export-state"), "Writing the files.", () => ask("export", "export", { plan: best.plan, to: find("export-to").value }));
  if (!answer) { find("export").replaceChildren(); return; }
  const { version, command, differences } = answer.answer;
  const files = Object.entries(answer.files);
  showPanel("export", make("p", {}, `For ${version}. Run it with:`), make("pre", { tabindex: "0" }, command),
    make("div", { class: "bar" }, make("button", { type: "button", onclick: () => files.forEach(([name, text]) => save(name, text)) }, "Save all files")),
    ...files.map(fileOf), make("ul", { class: "advice" }, ...differences.map((one) => make("li", {}, `Not the plan that was asked for: ${one}`))));
};
