// Answers one question after another, each in a new instance of the module.
let compiled;

const answerOf = (question) => {
  let instance;
  let panic = null;
  const read = (at, length) => new TextDecoder().decode(new Uint8Array(instance.exports.memory.buffer, Number(at), Number(length)));
  const page = {
    now: () => performance.now(),
    progress: (at, length) => postMessage({ progress: read(at, length) }),
    panicked: (at, length) => { panic = read(at, length); },
  };
  try {
    instance = new WebAssembly.Instance(compiled, { page });
    const engine = instance.exports;
    let length;
    if (question === null) {
      length = engine.known();
    } else {
      const bytes = new TextEncoder().encode(question);
      const at = engine.question(BigInt(bytes.length));
      new Uint8Array(engine.memory.buffer, Number(at), bytes.length).set(bytes);
      length = engine.answer();
    }
    return read(engine.text(), length);
  } catch (error) {
    const isMemory = error instanceof RangeError || /memory allocation/.test(panic);
    return JSON.stringify({ error: isMemory
      ? { code: "memory", message: "the answer took more memory than the browser gives", hint: "ask about fewer devices, or use `foretell` on the command line" }
      : { code: "undone", message: panic || `the engine stopped: ${error.message}` } });
  }
};

// The first message is the module, each later one a question; null asks what the page knows from the start.
addEventListener("message", ({ data }) => {
  if (compiled) postMessage({ answer: answerOf(data) });
  else compiled = data;
});
