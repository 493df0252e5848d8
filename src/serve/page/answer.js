// What the page shows of a plan and of its simulated step. It draws documents as they come.
const stages = { parameters: "parameters", gradients: "gradients", optimizer_state: "optimizer", activations: "activations",
  workspace: "workspace", unused: "unused", context: "driver and libraries" };
const times = { compute: "compute", exposed_communication: "exposed communication", bubble: "bubble", data: "data", optimizer: "optimizer" };

const devicesOf = ({ layout }) => ["data", "tensor", "pipeline", "context", "expert"].reduce((product, axis) => product * (layout[axis] || 1), 1);
const fullest = (predicted) => predicted.peak_memory_bytes.reduce((most, held, index, all) => (held > all[most] ? index : most), 0);
const rate = (predicted) => (predicted.tokens_per_second === null ? [predicted.samples_per_second, "samples/s"] : [predicted.tokens_per_second, "tokens/s"]);
// The rate over samples of different lengths, if there are such.
const meanRate = (predicted, lengths) => (lengths ? [lengths.batching[0].tokens_per_second, "tokens/s"] : rate(predicted));
// A chance of running out from which on the page says so, and one from which on it probably does.
const risky = 0.1;
const fitOf = (predicted) => {
  const chance = predicted.chance_of_running_out ?? 0;
  if (!predicted.fits || chance > 0.5) return ["It probably does not fit", "bad"];
  return chance > risky ? ["It fits, but may run out", "risky"] : ["It fits", "good"];
};
const isTraced = (predicted) => predicted.chance_of_running_out !== undefined && predicted.chance_of_running_out !== null;

// The memory of the cluster's smallest device, in bytes; null if its file does not say.
const leastMemory = (topology) => {
  const sizes = Object.values((topology && topology.devices) || {}).map((device) => parsedSize(device.memory)).filter((size) => size > 0);
  return sizes.length ? Math.min(...sizes) : null;
};

const fact = (name, value, note, look) => make("div", { class: look }, make("dt", {}, name), make("dd", {}, make("strong", {}, value), make("span", {}, note)));

// The figures of a prediction. `cost` is of its simulation, `limit` the memory of a device, `lengths` what samples of
// different lengths make of the step.
const factsOf = (predicted, plan, cost, limit, lengths) => {
  const held = predicted.peak_memory_bytes[fullest(predicted)];
  const [all, unit] = meanRate(predicted, lengths);
  const step = lengths ? lengths.batching[0] : predicted;
  const full = lengths ? " in the longest batch" : "";
  const chance = isTraced(predicted) ? `; chance of running out ${predicted.chance_of_running_out < 0.005 ? "under 1 %" : percent(predicted.chance_of_running_out)}` : "";
  const facts = [
    fact("Does it fit?", fitOf(predicted)[0], `${bytes(held)}${limit ? ` of ${bytes(limit)}` : ""} on the fullest device${full}${chance}`, fitOf(predicted)[1]),
    fact(lengths ? "Mean step" : "Step", time(step.step_seconds), `${time(step.step_seconds_p10)} to ${time(step.step_seconds_p90)} in 8 of 10 ${lengths ? "steps" : "cases"}`),
    fact("Throughput", `${count(all)} ${unit}`, `${count(all / devicesOf(plan))} on each device`),
    fact("MFU", percent(predicted.mfu), `${figures(predicted.model_flops_per_device_per_second / 1e12)} TFLOP/s on each device${full}`),
  ];
  const run = cost && cost.run;
  if (run && run.seconds) {
    const money = run.price === null ? "no price is given" : `${count(run.price)} ${cost.currency || "(the price's currency is not stated)"}`;
    const energy = run.energy_joules === null ? "" : `, ${count(run.energy_joules / 3.6e6)} kWh`;
    const [early, late] = [step.step_seconds_p10, step.step_seconds_p90].map((end) => time(run.seconds * end / step.step_seconds));
    facts.push(fact("The run", time(run.seconds), `${early} to ${late} in 8 of 10 cases; ${count(run.steps)} steps; ${money}${energy}`));
  } else {
    facts.push(fact("The run", cost ? "–" : "…", cost ? "state its tokens: a number, such as 100M" : "after the simulation"));
  }
  return facts;
};

const memoryBar = (predicted, limit) => {
  const stage = fullest(predicted);
  const parts = predicted.memory_by_component[stage];
  if (!parts) return make("p", { class: "help" }, predicted.memory_peak ? `At the peak: ${predicted.memory_peak}` : "");
  const held = predicted.peak_memory_bytes[stage];
  const title = predicted.peak_memory_bytes.length > 1 ? `Memory of the fullest device, in stage ${stage} of ${predicted.peak_memory_bytes.length}` : "Memory of a device";
  const words = limit ? `${title}: ${bytes(held)} of ${bytes(limit)}` : `${title}: ${bytes(held)}`;
  return partsBar(words, Object.entries(stages).map(([name, shown]) => [shown, parts[name]]), Math.max(held, limit || 0), bytes, limit);
};

const timeBar = (predicted, lengths) =>
  partsBar(`Where the ${lengths ? "longest " : ""}step's ${time(predicted.step_seconds)} go`, Object.entries(times).map(([name, shown]) => [shown, predicted.breakdown_seconds[name]]),
    predicted.step_seconds, time);

// How samples of different lengths can share batches, the chosen way first.
const lengthsTable = ({ mean_tokens: mean, p95_tokens: high, longest_tokens: longest, cut_share: cut, batching, interval, assumptions }) => {
  const rows = batching.map((way) => [way.name, time(way.step_seconds), `${time(way.step_seconds_p10)} to ${time(way.step_seconds_p90)}`,
    count(way.samples_per_second), count(way.tokens_per_second), percent(way.padding_share), `${bytes(way.memory_bytes)}${way.fits ? "" : ", too much"}`]);
  return make("div", { class: "parts" },
    make("div", { class: "help" }, `Samples have ${whole(mean)} tokens in the mean, 95 % of them at most ${whole(high)}, the longest ${whole(longest)}${cut > 0 ? `; ${percent(cut)} are cut there` : ""}.`),
    table("Samples of different lengths", ["batching", "mean step", "8 of 10 steps", "samples/s", "tokens/s", "padding", "memory"], rows, [1, 2, 3, 4, 5, 6]),
    make("div", { class: "help" }, `Each time may be ${figures(interval[0])} to ${figures(interval[1])} times as long (80 % interval); ${assumptions.join("; ")}.`));
};

// A value of a plan in words: `{"full_layers": 4}` is "full layers 4".
const words = (value) => {
  if (Array.isArray(value)) return value.map(words).join(" ");
  if (value === null || typeof value !== "object") return String(value);
  return Object.entries(value).map(([name, one]) => `${name.replaceAll("_", " ")} ${words(one)}`).join(", ");
};

// The fields of layouts that are not the same in all, as texts.
const differing = (plans) => {
  const flat = plans.map((plan) => {
    const { layout, global_batch: _, ...others } = plan;
    const fields = { ...layout, precision: others.precision, mode: others.mode };
    return Object.fromEntries(Object.entries(fields).map(([name, value]) => [name, words(value)]));
  });
  const names = [...new Set(flat.flatMap(Object.keys))];
  const shown = names.filter((name) => new Set(flat.map((fields) => fields[name])).size > 1);
  for (const name of ["data", "tensor", "pipeline", "zero", "micro_batch"].reverse()) if (!shown.includes(name)) shown.unshift(name);
  return { names: shown, flat };
};
const short = (text) => (text === undefined ? "–" : text.length > 28 ? `${text.slice(0, 27)}…` : text);

// The table of layouts. `choose` is called with the index of the row that is wanted. With `lengths` the rows are in the order
// of their mean steps over the samples.
const layoutsTable = (candidates, chosen, choose, lengths) => {
  const { names, flat } = differing(candidates.map((one) => one.plan));
  const best = candidates[0].predicted.step_seconds;
  const rows = candidates.map(({ predicted }, index) => {
    const [all, unit] = rate(predicted);
    const slower = predicted.step_seconds / best - 1;
    const button = make("button", { type: "button", "aria-pressed": String(index === chosen), "aria-label": `Show layout ${index + 1}`, onclick: () => choose(index) }, String(index + 1));
    const gain = index ? `${slower < 0 ? "" : "+"}${percent(slower)}` : "";
    const numbers = [time(predicted.step_seconds), ...(lengths ? [] : [gain]), `${count(all)} ${unit}`, bytes(predicted.peak_memory_bytes[fullest(predicted)])];
    const cells = [make("td", {}, button), ...numbers.map((one) => make("td", { class: "number" }, one)), ...names.map((name) => make("td", {}, short(flat[index][name])))];
    return make("tr", { "aria-selected": String(index === chosen) }, ...cells);
  });
  const columns = lengths ? ["longest step", "rate", "memory"] : ["step", "slower", "rate", "memory"];
  const order = lengths ? make("p", { class: "help" }, "The first has the shortest mean step over the samples.") : null;
  const layouts = table("Best layouts", ["", ...columns, ...names.map((name) => name.replaceAll("_", " "))], rows, columns.map((_, index) => index + 1));
  return make("div", {}, layouts, order);
};

// How sure the search is of its answer, in a sentence.
const certainty = (search) => {
  if (search.is_cut_off) return `best of ${count(search.simulated)} simulated layouts so far`;
  const gap = search.gap > 0 ? `more than ${percent(search.gap)} faster` : "faster";
  return `proven: no layout of the space is ${gap} (${count(search.layouts)} layouts, ${figures(search.wall_seconds)} s)`;
};
