"""A real step on this machine's processors, with what it calls: for `measure` and `train`.

Requests and answers are those of `foretell calibrate --stack` and `foretell execute` (src/framework.rs).
"""

import collections
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import losses, matrix, models
from .recorder import describe, is_view

# How predictions name what optimizers call.
OF_OPTIMIZER = {"aten._fused_adamw_": "AdamW", "aten._fused_sgd_": "SGD", "aten._foreach_norm": "gradients' norm",
                "aten._foreach_mul_": "gradients' clipping"}

# Sequences of a sample, by the method of training on preferences.
SEQUENCES = {"dpo": 2, "orpo": 2, "reward": 2, "kto": 1}

# Positions of a chunk of a loss in parts, as `OperatorTable::values` derives it.
CHUNK = 1024

INTO_BUCKETS, OUT_OF_BUCKETS = "copy into buckets", "copy out of buckets"


def words(tensor):
    """A tensor of a call, as `TracedOperator::call` writes it."""
    sizes = ",".join(("^" if once else "") + str(n) for n, once in zip(tensor.shape, tensor.broadcast))
    return f"{tensor.dtype}[{sizes}]"


class Timer(TorchDispatchMode):
    """While active, times each operator as PyTorch dispatches it: `calls[call]` and `bytes[call]`."""

    def __init__(self, has_buckets=False):
        super().__init__()
        self.calls, self.bytes, self.has_buckets = collections.defaultdict(list), {}, has_buckets

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_view(func):
            return func(*args, **kwargs)
        inputs = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        read = [describe(t) for t in inputs.values()]
        began = time.perf_counter()
        out = func(*args, **kwargs)
        took = time.perf_counter() - began
        # DDP's reducer divides gradients into its buckets.
        into_bucket = func is torch.ops.aten.mul.out and self.has_buckets
        name = INTO_BUCKETS if into_bucket else func._schema.name.replace("::", ".")
        call = " ".join([name, *map(words, read)])
        if call not in self.bytes:
            written = [describe(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            self.bytes[call] = sum(t.bytes for t in (*read, *written))
        self.calls[call].append(took)
        return out

    def by_name(self, steps):
        """Seconds of each operator in a step."""
        sums = collections.Counter()
        for call, times in self.calls.items():
            name = INTO_BUCKETS if call.startswith(INTO_BUCKETS) else call.split(" ")[0]
            sums[OF_OPTIMIZER.get(name, name)] += sum(times) / steps
        return dict(sums)


class Memory(TorchDispatchMode):
    """While active, counts the bytes of tensors that live, and their peak."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = {}

    def see(self, t):
        storage = t.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if not size or (key in self._known and self._known[key]() is storage):
            return
        def gone(reference, key=key, size=size):
            if self._known.get(key) is reference:
                del self._known[key]
            self.live -= size
        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def hold(self, model, optimizer, reference=None):
        """Counts what lives before the step, the scales of quantised weights included."""
        for one in (model, reference) if reference is not None else (model,):
            for t in (*one.parameters(), *one.buffers(), *scales(one)):
                self.see(t)
                if t.grad is not None:
                    self.see(t.grad)
        for state in optimizer.state.values():
            for t in state.values():
                if isinstance(t, torch.Tensor):
                    self.see(t)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.see(t)
        return out


def scales(model):
    """The tensors beside bitsandbytes' weights, which are no buffers of the model."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        four, eight = getattr(weight, "quant_state", None), getattr(getattr(module, "state", None), "SCB", None)
        if four is not None:
            yield from (four.absmax, four.state2.absmax) if four.nested else (four.absmax,)
        if eight is not None or getattr(weight, "SCB", None) is not None:
            yield eight if eight is not None else weight.SCB


def sample(times):
    """The median and its spread, without the outliers beyond three scaled median absolute deviations."""
    middle = statistics.median(times)
    deviation = 1.4826 * statistics.median(abs(t - middle) for t in times)
    kept = sorted(t for t in times if abs(t - middle) <= 3 * deviation) or sorted(times)
    at = lambda share: seconds(kept[round(share * (len(kept) - 1))])
    return {"median": seconds(statistics.median(kept)), "p10": at(0.1), "p90": at(0.9), "count": len(kept)}


def seconds(time):
    """A duration as profiles write it."""
    return f"{time * 1e6:.4f}us"


class Job:
    """What is asked: sizes, layers, the table's key, and the recipe."""

    preference, precomputed, checkpoint, seed, recipe, scratch = None, False, None, 0, {}, None

    def __init__(self, request):
        self.__dict__.update(request)
        self.request = request
        self.key = matrix.complete(self.key)
        self.architecture = models.find(self.key)
        full = {name: int(size) for name, size in self.sizes.items()}
        self.z = collections.defaultdict(int, full)
        # Learned positions, where a model has no number of its own.
        self.z.setdefault("p", full.get("s", 0))
        self.z |= {"alpha": self.recipe.get("alpha", 0), "seed": self.seed}
        if self.key["loss"] == "chunked":
            self.z["q"] = min(CHUNK, self.z["b"] * (self.z["s"] - 1))
        self.refuse()

    def refuse(self):
        """Ends the program with the reason where a job cannot be run on processors."""
        if self.key["kernels"] != "hf":
            raise SystemExit(f"the kernels `{self.key['kernels']}` are Triton's, which do not run on processors")
        if self.key["attention"] == "flash":
            raise SystemExit("`flash_attn` does not run on processors: use `attention: sdpa`")
        if self.key["loss"] in losses.FUSED and self.z["v"] > losses.FUSED_TILE:
            raise SystemExit(f"TRL's head takes {losses.FUSED_TILE} words at a time: {self.z['v']} are not traced on processors")
        if self.preference not in (None, *SEQUENCES):
            raise SystemExit(f"`{self.preference}` is not trained here: {', '.join(SEQUENCES)} are")
        if self.preference and self.key["adapter"].startswith("int8lora"):
            raise SystemExit("frozen weights of 8 bits are run for texts alone: TRL narrows adapters beside them, which was not traced")
        if self.preference == "kto" and self.z["b"] < 2:
            raise SystemExit("TRL's KTO trainer needs micro-batches of two samples or more: it pairs each with another's answer")

    def model(self, layers, plain=False, keep=None):
        """The model with its adapters; a `plain` one is without them, for trainers that add them."""
        torch.manual_seed(self.seed)
        return models.build(self.key["architecture"], self.z, layers, self.key, plain=plain, keep=keep)

    def reference(self, layers):
        """The frozen copy that preferences are compared with, or none."""
        torch.manual_seed(self.seed)
        return models.reference(self.key["architecture"], self.z, layers, self.key)

    def prepared(self, layers):
        """-> (the model as Accelerate has it run, its reference)."""
        from . import step
        reference = self.reference(layers)
        if reference is not None:
            step.train_forward(reference, self.key)
        model = self.model(layers)
        return (model if self.architecture.loss else step.train_forward(model, self.key)), reference

    def momentum(self):
        """SGD's momentum."""
        return self.recipe.get("momentum", 0.9)

    def is_half(self):
        """Whether Accelerate has products in `bf16` (autocast)."""
        return self.key["precision"] in ("autocast", "mixed")

    def distinct_samples(self):
        """How many samples there are: those of a step of all ranks."""
        return self.z["b"] // SEQUENCES.get(self.preference, 1) * self.micro_batches * self.ranks

    def sample(self, number, sequences=1):
        """Sample `number`, whatever ranks and micro-batches there are."""
        generator = torch.Generator().manual_seed((self.seed << 32) + number + 1)
        return self.inputs(generator, {**self.z, "b": sequences})

    def inputs(self, generator, sizes=None):
        """One micro-batch of random samples, of which every token counts."""
        made = models.inputs(self.architecture, sizes or self.z, self.key)
        for name, t in made.items():
            if name.endswith("mask"):
                continue
            if t.is_floating_point():
                t.normal_(generator=generator)
            else:
                classes = self.z["v"] if self.architecture.inputs != "image" else 1000
                t.random_(0, classes, generator=generator)
        return made

    def loss(self, model, inputs, reference=None):
        from . import step
        options = {**self.key, "chunk": self.z.get("q"), "reference": reference}
        return (self.architecture.loss or step.compute_loss)(model, inputs, options)

    def optimizer_of(self, model):
        trained = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=1e-3, momentum=self.momentum())
        return torch.optim.AdamW(trained, lr=1e-5, fused=True)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def join(rank, job, port):
    """Makes this process a rank."""
    torch.set_num_threads(job.threads)
    if job.ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_WORLD_SIZE=str(job.ranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.distributed.init_process_group("gloo", rank=rank, world_size=job.ranks)


def _rank(rank, function, request, port, answers):
    job = Job(request)
    if len(os.sched_getaffinity(0)) >= job.ranks * job.threads:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, set(cores[rank * job.threads:(rank + 1) * job.threads]))
    join(rank, job, port)
    answers[rank] = json.dumps(function(rank, job))


def run(function):
    """`python -m MODULE REQUEST ANSWER`: calls `function(rank, job)` in each rank, and writes what rank 0 and the others say."""
    question, answer = sys.argv[1:3]
    with open(question, encoding="utf-8") as file:
        request = json.load(file)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    Job(request)                                                # refuses what cannot be run
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager, tempfile.TemporaryDirectory() as scratch:
        request["scratch"] = scratch
        answers = manager.dict()
        torch.multiprocessing.spawn(_rank, (function, request, free_port(), answers), nprocs=request["ranks"])
        told = [json.loads(answers[rank]) for rank in range(request["ranks"])]
    return request, told, answer


def write(path, document):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)
