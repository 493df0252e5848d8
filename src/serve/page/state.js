// The configuration on the page: fields, the address that holds them, and the question that they ask.
const known = JSON.parse(find("known").textContent);

const usual = { model: "llama3-8b", topology: "8xh100", method: "pretrain", stack: "", precision: "", nodes: "", sequence: "", batch: "",
  lengths: "", batching: "pad", tokens: "1e9", price: "", device: "h100-sxm-80g", nic: "400Gbit/s", hardware: "",
  optimizer: "", loss: "", attention: "", adapter: "", bits: "", reference: "", fix: "", headroom: "",
  modelFile: null, topologyFile: null, lengthsFile: null };
// Fields that take a file too.
const filed = ["model", "topology", "lengths"];
const texts = Object.keys(usual).filter((name) => !name.endsWith("File"));

// Methods that always train adapters, and those that train some if the user describes them.
const adapted = ["lora", "qlora"];
const adaptable = [...adapted, "dpo", "orpo", "kto", "reward", "grpo", "ppo"];
// Methods that compare with a model that is not trained.
const referenced = ["dpo", "kto"];
const hasAdapters = ({ method, adapter }) => adapted.includes(method) || (adaptable.includes(method) && adapter.trim() !== "");
// Fields of the group of more choices. An empty field leaves its option to the program. `isOffered`
// tells whether a configuration's method has the choice; `inMessage` matches messages about it.
const moreChoices = {
  optimizer: { option: "optimizer", title: "optimizer", isOffered: () => true, inMessage: /--optimizer\b/ },
  loss: { option: "loss", title: "loss kernel", isOffered: () => true, inMessage: /--loss\b/ },
  attention: { option: "attention", title: "attention kernel", isOffered: () => true, inMessage: /--attention\b/ },
  headroom: { option: "headroom", title: "headroom", isOffered: () => true, inMessage: /--headroom\b/ },
  fix: { option: "fix", title: "fixed layout", isOffered: () => true, inMessage: /--fix\b|\bfixed\b/ },
  adapter: { option: "adapter", title: "adapters", isOffered: ({ method }) => adaptable.includes(method), inMessage: /--adapter\b|training\.lora/ },
  // The frozen weights of QLoRA always have 4 bits.
  bits: { option: "base-bits", title: "bits of frozen weights", isOffered: (state) => hasAdapters(state) && state.method !== "qlora", inMessage: /--base-bits\b/ },
  reference: { option: "reference", title: "reference model", isOffered: ({ method }) => referenced.includes(method), inMessage: /--reference\b/ },
};
// The stated choices that the method has, and those that it does not have.
const statedChoices = (state) => Object.keys(moreChoices).filter((name) => state[name].trim() !== "");
const sentChoices = (state) => statedChoices(state).filter((name) => moreChoices[name].isOffered(state));
const leftOutChoices = (state) => statedChoices(state).filter((name) => !moreChoices[name].isOffered(state));

// The configuration of an address's fragment. Names that it does not have are left out.
const fromFragment = (fragment) => {
  const state = { ...usual };
  for (const [name, value] of new URLSearchParams(fragment)) {
    if (texts.includes(name)) state[name] = value;
    if (filed.some((field) => name === `${field}File`)) {
      try {
        const { name: file, text } = JSON.parse(value);
        if (typeof file === "string" && typeof text === "string") state[name] = { name: file, text };
      } catch { /* Another page's address: the field stays as usual. */ }
    }
  }
  return state;
};
const toFragment = (state) => {
  const parameters = new URLSearchParams();
  for (const name of texts) if (state[name] !== usual[name]) parameters.set(name, state[name]);
  for (const name of filed.map((field) => `${field}File`)) if (state[name]) parameters.set(name, JSON.stringify(state[name]));
  return parameters.toString();
};

// A number as a person writes it: 1e9, 4_096, 4k.
const number = (text) => {
  const found = /^([\d.]+(?:e\d+)?)([kKMGT]?)$/.exec(String(text).replaceAll(/[_,\s]/g, ""));
  return found ? Number(found[1]) * { "": 1, k: 1e3, K: 1e3, M: 1e6, G: 1e9, T: 1e12 }[found[2]] : NaN;
};

// The options that say how long the data set's samples are; none if all are full.
const lengthOptions = (state) => {
  const lengths = state.lengthsFile || state.lengths.trim();
  return lengths ? { lengths, batching: state.batching } : {};
};

// The options of `foretell plan` for a configuration whose samples are all full.
const fullOptions = (state) => {
  const options = { model: state.modelFile || state.model.trim(), topology: state.topologyFile || state.topology.trim() };
  const set = (name, value) => { if (value !== "") options[name] = value; };
  set("method", state.method);
  set("stack", state.stack);
  if (state.precision) options.precision = [state.precision];
  for (const [name, option] of [["nodes", "nodes"], ["sequence", "sequence"], ["batch", "global-batch"]]) {
    if (state[name].trim() !== "") options[option] = Number.isFinite(number(state[name])) ? number(state[name]) : state[name].trim();
  }
  for (const name of sentChoices(state)) set(moreChoices[name].option, state[name].trim());
  return options;
};
// The options of `foretell plan` for a configuration.
const planOptions = (state) => ({ ...fullOptions(state), ...lengthOptions(state) });

// The options of `foretell simulate` for a layout of a configuration and the run's length.
const stepOptions = ({ plan, predicted }, state) => {
  const length = number(state.tokens);
  const options = { plan, ...lengthOptions(state) };
  if (length >= 1) options[predicted.tokens_per_second === null ? "samples" : "tokens"] = length;
  if (state.price.trim() !== "") options["device-price"] = state.price.trim();
  return options;
};
