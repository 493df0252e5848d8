// Files in place of names: chosen, or dropped onto a field. Listings of other tools are imported first.
const LONGEST_FILE = 2 << 20;

const formOf = (text) => {
  if (/^\s*GPU0\b/m.test(text) && /\b(NV\d+|PIX|PXB|PHB|SYS|NODE)\b/.test(text)) return "nvidia-smi-topo";
  if (/^NodeName=/m.test(text)) return "slurm-nodes";
  if (/^\s*(<\?xml[^>]*>\s*)?<system\b/.test(text)) return "nccl-xml";
  return null;
};

// The listing that the cluster comes from, if it does.
let listing = null;
const showListing = (found) => {
  listing = found;
  ["device-field", "nic-field"].forEach((id) => { find(id).hidden = !listing; });
};
const importListing = async () => {
  const options = { form: listing.form, files: { name: "listing.txt", text: listing.text } };
  if (listing.form === "nvidia-smi-topo" && now.state.device) options.device = now.state.device;
  if (now.state.nic) options["nic-bandwidth"] = now.state.nic;
  const { answer } = await ask("import", "import", options);
  now.state.topologyFile = { name: "imported.yaml", text: answer.topology };
};
const importAgain = () => {
  if (listing) importListing().then(answerAgain, (error) => { if (!wasReplaced(error)) fail(error); });
};

// How each field reads a file's text.
const readers = {
  model: async (name, text) => {
    const isConfig = /"(model_type|architectures)"/.test(text);
    if (!isConfig) return { name, text };
    const { answer } = await ask("import", "import", { form: "hf-config", files: { name: "config.json", text } });
    return { name: name.replace(/\.json$/, ".yaml"), text: answer.model };
  },
  topology: async (name, text) => {
    showListing(formOf(text) ? { form: formOf(text), text } : null);
    if (!listing) return { name, text };
    await importListing();
    return now.state.topologyFile;
  },
  lengths: async (name, text) => ({ name, text }),
};

const takeFile = async (field, file) => {
  try {
    if (file.size > LONGEST_FILE) throw new Refused({ code: "input", message: "the file has more than 2 MiB", hint: "check that it is the file that you mean" });
    const name = file.name.replaceAll(/[^A-Za-z0-9._-]/g, "_").replace(/^[.-]+/, "").slice(-60) || "file.yaml";
    now.state[`${field}File`] = await readers[field](name, await file.text());
    showState();
    answerAgain();
  } catch (error) {
    if (!wasReplaced(error)) fail(error instanceof Refused ? error : new Refused({ code: "input", message: String(error) }));
  }
};

const removeFile = (name) => {
  now.state[`${name}File`] = null;
  if (name === "topology") showListing(null);
  showState();
  find(name).focus();
  answerAgain();
};

const setUpFiles = () => {
  for (const name of filed) {
    const field = find(name).closest(".field");
    find(`${name}-file`).addEventListener("change", (event) => { if (event.target.files[0]) takeFile(name, event.target.files[0]); event.target.value = ""; });
    find(`${name}-clear`).addEventListener("click", () => removeFile(name));
    field.addEventListener("dragover", (event) => { event.preventDefault(); field.classList.add("dropping"); });
    field.addEventListener("dragleave", () => field.classList.remove("dropping"));
    field.addEventListener("drop", (event) => {
      event.preventDefault();
      field.classList.remove("dropping");
      if (event.dataTransfer.files[0]) takeFile(name, event.dataTransfer.files[0]);
    });
  }
};
