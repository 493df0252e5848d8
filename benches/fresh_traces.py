#!/usr/bin/env python3
"""Compares predicted memory with fresh traces of the frameworks' own steps, at random configurations.

A configuration is drawn from a seed: architecture, sizes, method, wrapper, attention, checkpoints, optimizer, loss. The
framework's own code then runs three whole steps on tensors without data (`foretell.trace`), with DDP, FSDP1 or FSDP2 as
Accelerate sets it up over a process group that sends nothing, clipping and the optimizer. The program predicts the same
job (`foretell simulate`) from the `config.json` of the same model. Allocated and reserved bytes are laid side by side.

Usage: PYTHONPATH=python benches/fresh_traces.py --foretell target/release/foretell --count 200 --seed 1 --rows rows.jsonl
       PYTHONPATH=python benches/fresh_traces.py --report rows.jsonl

Needs torch, transformers, peft, accelerate, trl, liger-kernel and bitsandbytes; no GPU. A configuration takes 3 to 20 s.
"""
import argparse
import bisect
import collections
import contextlib
import gc
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
import weakref

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.distributed as dist

from foretell.trace import cuda, losses, matrix, models, qlora, step, table
from foretell.trace.recorder import Allocation, Boundary, Kernel, Recorder, Release, Workspace, in_place_sums, log_triton

STEPS = 3                 # as many as the program replays
DEVICE = "gb300-nvl72"    # has memory for all that is drawn
WORKSPACE = 64 << 20      # cuBLAS's on that device, which no trace has


# ------------------------------------------------------------------------------
# the whole step

class WholeStep(Recorder):
    """A recorder that also sees parameters, storages that are resized (FSDP frees and fills them so), and streams."""

    def __init__(self, expert_rows=None):
        super().__init__(expert_rows)
        self.streams, self.paused = {}, False

    def see(self, t):
        while type(t).__name__ in ("DTensor", "AsyncCollectiveTensor"):
            t = t._local_tensor if type(t).__name__ == "DTensor" else t.elem
        storage = t.untyped_storage()
        if storage.nbytes() and not self._is_known(storage):
            self._take(storage)

    def _is_known(self, storage):
        entry = self._ids.get(id(storage))
        return entry is not None and entry[1]() is storage

    def _take(self, storage):
        self._next += 1
        key, number = id(storage), self._next
        def gone(_):
            if self._ids.get(key, (None,))[0] == number:
                del self._ids[key]
                self.events.append(Release(number))
        self._ids[key] = (number, weakref.ref(storage, gone))
        self.streams[number] = id(torch.cpu.current_stream())
        self.events.append(Allocation(number, storage.nbytes(), None))

    def resized(self, storage):
        if self._is_known(storage):
            self.events.append(Release(self._ids.pop(id(storage))[0]))
        if storage.nbytes():
            self._take(storage)

    def __enter__(self):
        plain = self._resize = torch.UntypedStorage.resize_
        def resize(storage, size):
            out = plain(storage, size)
            self.resized(storage)
            return out
        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ in ("DTensor", "AsyncCollectiveTensor") for t in types):
            return NotImplemented                               # these unwrap themselves
        if self.paused:
            return func(*args, **(kwargs or {}))
        if "wait_tensor" in func._schema.name:                  # in place on a device
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def leave_sharding_rules_out(recorder):
    """DTensor finds the shapes of results by running operators on whole tensors, which is no part of a step."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    plain = ShardingPropagator._propagate_tensor_meta_non_cached
    def quiet(*args, **kwargs):
        before, recorder.paused = recorder.paused, True
        try:
            return plain(*args, **kwargs)
        finally:
            recorder.paused = before
    ShardingPropagator._propagate_tensor_meta_non_cached = quiet


class CachingAllocator:
    """CUDA's: blocks by stream, the best fit, split and merged. -> what segments hold."""

    MIB = 1 << 20

    def __init__(self):
        self.free, self.reserved, self.peak, self.held, self.numbers = collections.defaultdict(list), 0, 0, {}, itertools.count()

    def allocate(self, number, size, stream):
        pool = (stream, size <= self.MIB)
        blocks = self.free[pool]
        at = bisect.bisect_left(blocks, (size,))
        if at < len(blocks):
            block = blocks.pop(at)[2]
        else:
            small, large = size <= self.MIB, size >= 10 * self.MIB
            segment = 2 * self.MIB if small else -(-size // (2 * self.MIB)) * 2 * self.MIB if large else 20 * self.MIB
            self.reserved += segment
            self.peak = max(self.peak, self.reserved)
            block = dict(size=segment, pool=pool, before=None, after=None, free=False, order=next(self.numbers))
        rest = block["size"] - size
        if rest >= 512 if pool[1] else rest > self.MIB:
            tail = dict(size=rest, pool=pool, before=block, after=block["after"], free=True, order=next(self.numbers))
            if tail["after"]:
                tail["after"]["before"] = tail
            block["size"], block["after"] = size, tail
            bisect.insort(blocks, (rest, tail["order"], tail))
        block["free"] = False
        self.held[number] = block

    def release(self, number):
        block = self.held.pop(number)
        blocks = self.free[block["pool"]]
        for first, second in ((block, block["after"]), (block["before"], block)):
            if first is None or second is None or not (first if second is block else second)["free"]:
                continue
            other = first if second is block else second
            blocks.pop(bisect.bisect_left(blocks, (other["size"], other["order"])))
            first["size"], first["after"] = first["size"] + second["size"], second["after"]
            if first["after"]:
                first["after"]["before"] = first
            block = first
        block["free"] = True
        bisect.insort(blocks, (block["size"], block["order"], block))


def measured(events, streams):
    """-> peaks of what is allocated and reserved, by phase, and the operator at the peak."""
    allocator, live, phases, phase, operator = CachingAllocator(), {}, collections.Counter(), "idle", ""
    now = peak = 0
    at = ("idle", "")
    for event in events:
        if isinstance(event, Boundary):
            phase = event.part.split(".")[0]
        elif isinstance(event, Kernel):
            operator = event.name
        elif isinstance(event, Allocation):
            size = max(512, -(-event.bytes // 512) * 512)
            live[event.id] = size
            allocator.allocate(event.id, size, streams[event.id])
            now += size
        elif isinstance(event, Release):
            now -= live.pop(event.id)
            allocator.release(event.id)
        elif isinstance(event, Workspace) and event.bytes:
            size = max(512, -(-event.bytes // 512) * 512)
            allocator.allocate("workspace", size, streams.get("compute"))
            allocator.release("workspace")
            phases[phase] = max(phases[phase], now + size)
            if now + size > peak:
                peak, at = now + size, (phase, operator)
        phases[phase] = max(phases[phase], now)
        if now > peak:
            peak, at = now, (phase, operator)
    return {"allocated": peak, "reserved": allocator.peak, "phase": at[0], "operator": at[1], "phases": dict(phases)}


# ------------------------------------------------------------------------------
# wrappers

def sharded(model, job, inner, mesh):
    """The model as Accelerate 1.15 prepares it for several ranks. `inner` is the module that has the layers."""
    wrapper, mixed = job["wrapper"], job["precision"] == "bf16" and not job["narrow"]
    if wrapper == "none":
        return model
    if wrapper == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
        model.register_comm_hook(None, _reduced)                # the group that sends nothing answers with nothing
        model.reducer = _Reducer(model.reducer)
        return model
    kinds = {type(layer) for layer in layers_of(inner)}
    if wrapper == "fsdp1":
        from functools import partial
        from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
        if job["adapter"] != "none":                            # `peft.utils.other.fsdp_auto_wrap_policy`
            is_adapter = lambda m: not list(m.named_children()) and getattr(m, "weight", None) is not None and m.weight.requires_grad
            policy = partial(_or_policy, policies=[partial(lambda_auto_wrap_policy, lambda_fn=is_adapter), policy])
        half = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16) if mixed else None
        prefetch = BackwardPrefetch.BACKWARD_PRE if job["prefetch"] else None
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, mixed_precision=half, device_id=torch.device("cpu"),
                                        use_orig_params=True, backward_prefetch=prefetch, limit_all_gathers=True)
    from accelerate.utils.fsdp_utils import _find_final_norm     # the units of `fsdp2_prepare_model`
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16) if mixed else MixedPrecisionPolicy()
    options = dict(mesh=mesh, mp_policy=half)
    for layer in layers_of(inner):
        fully_shard(layer, **options)
    first, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and first.weight is head.weight
    if not tied:
        fully_shard(first, **options)
    tail = [m for m in (_find_final_norm(model), *((first,) if tied else ()), head) if m is not None]
    if tail:
        fully_shard(tail, reshard_after_forward=False, **options)
    fully_shard(model, **options)
    return model


class _Reducer:
    """DDP's reducer, which keeps its first buckets: the order of others is read from the device."""

    def __init__(self, reducer):
        self.reducer = reducer

    def __getattr__(self, name):
        return getattr(self.reducer, name)

    def _rebuild_buckets(self):
        return False


def _reduced(_, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _store():
    from torch.testing._internal.distributed.fake_pg import FakeStore
    return FakeStore()


def layers_of(model):
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) and list(m[0].parameters())]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def optimizer_of(model, job):
    """As `Trainer.create_optimizer`: norms and biases are a group of their own."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    bare = [p for n, p in named if n.endswith("bias") or "norm" in n.lower() or ".ln" in n]
    rest = [p for n, p in named if all(p is not b for b in bare)]
    groups = [{"params": g, "weight_decay": d} for g, d in ((rest, 0.1), (bare, 0.0)) if g]
    name = job["optimizer"]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=1e-5, fused=True)
    if name == "sgd":
        for group in groups if not job.get("decay") else ():
            group["weight_decay"] = 0.0
        return torch.optim.SGD(groups, lr=1e-5, momentum=0.9, foreach=True)
    if name == "adafactor":
        from transformers.optimization import Adafactor
        return Adafactor(groups, lr=1e-5, scale_parameter=False, relative_step=False)
    if name == "muon":
        return MuonAndAdamW(model, groups)
    raise ValueError(name)


class MuonAndAdamW:
    """Muon for the layers' matrices and AdamW for the rest, as `torch.optim.Muon` says to use it."""

    def __init__(self, model, groups):
        inside = {id(p) for p in layers_of(model).parameters() if p.ndim == 2}
        kept = [dict(g, params=[p for p in g["params"] if id(p) not in inside]) for g in groups]
        self.all = [torch.optim.Muon([p for g in groups for p in g["params"] if id(p) in inside], lr=1e-5)]
        self.all += [torch.optim.AdamW(kept, lr=1e-5, fused=True)] * any(g["params"] for g in kept)

    def step(self):
        for each in self.all:
            each.step()

    def zero_grad(self, set_to_none):
        for each in self.all:
            each.zero_grad(set_to_none=set_to_none)


def trace(job):
    """Three steps of a job -> `measured`. Once per process."""
    key, z = matrix.complete(job["key"]), collections.defaultdict(int, job["sizes"])
    cuda.install()
    torch.autograd.set_multithreading_enabled(False)
    architecture = models.find(key)
    rows = z["b"] * z["s"] * z["t"] // z["E"] if architecture.experts else None
    recorder = WholeStep(rows)
    recorder.streams["compute"] = id(torch.cpu.current_stream())
    log_triton(recorder)
    mesh = None
    if job["ranks"] > 1:
        dist.init_process_group("fake", store=_store(), rank=0, world_size=job["ranks"])
        mesh = dist.init_device_mesh("cpu", (job["ranks"],))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model = models.build(key["architecture"], z, job["layers"], key, recorder)
        reference = models.reference(key["architecture"], z, job["layers"], key, recorder)
        inner = model
        if not architecture.loss and job["wrapper"] != "fsdp2" and not job["narrow"] and job["precision"] == "bf16":
            for each in [model] + [reference] * (reference is not None):
                step.train_forward(each, {"precision": "autocast"})
        if job["wrapper"] == "fsdp2":
            leave_sharding_rules_out(recorder)
        if job["wrapper"] != "ddp":
            model = sharded(model, job, inner, mesh)
        loss_of = architecture.loss or step.compute_loss
        options = {**key, "chunk": z.get("q"), "recorder": recorder, "reference": reference}
        gc.collect()
        with recorder:
            recorder.phase = "idle"
            recorder.enter("start")
            for each in [model] + [reference] * (reference is not None):
                for t in (*each.parameters(), *each.buffers()):
                    recorder.see(t)
            if job["wrapper"] == "ddp":                         # its buckets are there from the start
                model = sharded(model, job, inner, mesh)
            optimizer = optimizer_of(model, job)
            for number in range(STEPS):
                gc.collect()
                gc.disable()
                for last in [False] * (job["micro_batches"] - 1) + [True]:
                    with synchronised(model, last):
                        one_pass(recorder, model, architecture, z, {**key, **options}, loss_of, job["micro_batches"])
                recorder.phase = "optimizer"
                recorder.enter("start")
                trained = [p for p in model.parameters() if p.requires_grad]
                model.clip_grad_norm_(1.0) if job["wrapper"] == "fsdp1" else torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                gc.enable()
        events = in_place_sums(list(recorder.events))
    return measured(events, recorder.streams) | {"reserved_states_first": measured(states_first(events), recorder.streams)["reserved"]}


def synchronised(model, last):
    """`Accelerator.no_sync` for all micro-batches but the last."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if hasattr(model, "no_sync") and not last else contextlib.nullcontext()


def states_first(events):
    """The same with the optimizer's states allocated before the first step, not in it."""
    released = {e.id for e in events if isinstance(e, Release)}
    phase, first, rest, moved = "", None, [], []
    for event in events:
        if isinstance(event, Boundary):
            phase = event.part
            if phase.startswith("forward") and first is None:
                first = len(rest)
        is_state = isinstance(event, Allocation) and phase.startswith("optimizer") and event.id not in released
        (moved if is_state else rest).append(event)
    return rest[:first] + moved + rest[first:]


def one_pass(recorder, model, architecture, z, key, loss_of, micro_batches):
    """`Trainer.training_step`."""
    recorder.phase = "forward"
    recorder.enter("start")
    inputs = models.inputs(architecture, z, key)
    for t in inputs.values():
        recorder.see(t)
    loss, kept = loss_of(model, inputs, key)
    del kept
    if micro_batches > 1:
        loss = loss / micro_batches
    recorder.phase = "backward"
    recorder.enter("start")
    loss.backward()


# ------------------------------------------------------------------------------
# drawing

DECODERS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "gpt_neox", "phi"]
UNREACHED = ["gemma", "starcoder2", "opt"]        # have tables, which no plan has: `--only` asks for them
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]
OTHERS = ["gpt2", "bert", "vit"]
WEIGHTS = {"llama": 4, "mistral": 3, "qwen2": 4, "qwen3": 4, "gpt2": 3}


def draw(rng, only="", wrapper="", loss="", tied=False, optimizer=""):
    """One configuration, with a wrapper, a loss, shared weights or an optimizer if these are asked for."""
    while True:
        names = [only] if only in models.ARCHITECTURES else [*DECODERS, *MIXTURES, *OTHERS]
        name = rng.choices(names, [WEIGHTS.get(n, 1.5) for n in names])[0]
        job = one(rng, name)
        if job is None or wrapper not in ("", job["wrapper"]) or loss not in ("", job["loss"]) or tied > job["tied"]:
            continue
        if optimizer and (job["wrapper"].startswith("fsdp") or job["optimizer"] != "adamw"):
            continue                                            # it needs whole matrices, as Adafactor does
        job["optimizer"] = optimizer or job["optimizer"]
        return job


def of_pairs(rng, name):
    """A configuration of a model with an encoder and a decoder, whose tables no plan has yet."""
    n, d = rng.choice([6, 8, 12, 16]), 64
    z = dict(b=rng.choice([2, 4, 8, 16]), h=n * d, n=n, d=d, f=4 * n * d, v=32128 if name == "t5" else 51865)
    z |= dict(s=rng.choice([256, 512, 1024]), u=rng.choice([64, 128, 256])) if name == "t5" else dict(u=rng.choice([64, 128, 448]), p=448)
    precision, narrow = rng.choice([("bf16", False), ("bf16", False), ("bf16", True)])
    wrapper = rng.choice(["none", "ddp"])
    key = dict(architecture=name, attention="sdpa", checkpoint=rng.choice(["none", "full"]), precision="bf16" if narrow else "autocast",
               dropout="some" if name == "t5" else "none")
    return dict(name=name, sizes=z, layers=rng.randint(4, 8), method="full", wrapper=wrapper, precision=precision, narrow=narrow, attention="sdpa",
                loss="plain", adapter="none", checkpoint=key["checkpoint"], optimizer="adamw", ranks=1 if wrapper == "none" else 4,
                micro_batches=1, prefetch=True, tied=False, key=key, by_profile=True)


def on_preferences(rng, loss):
    """A configuration of TRL's DPO, or of the training step of GRPO: pairs are two sequences of the batch."""
    while True:
        job = one(rng, rng.choice(["llama", "qwen2", "qwen3"]))
        if job is None or job["attention"] == "eager" or job["wrapper"].startswith("fsdp") or job["precision"] == "fp32" or job["method"] == "qlora":
            continue
        if job["narrow"] or job["loss"] != "plain":
            continue
        z = job["sizes"]
        z["b"] = 2 * min(z["b"], 4)
        job["loss"] = job["key"]["loss"] = loss
        rows = z["b"] * (z["s"] - 1)
        z |= {"q": min(4096, rows), "c": -(-rows // 4096)}
        return job


def one(rng, name):
    if name in ("t5", "whisper"):
        return of_pairs(rng, name)
    architecture = models.ARCHITECTURES[name]
    is_mixture, is_image = name in MIXTURES, name == "vit"
    d = rng.choice([64, 80, 96, 128] if name in ("llama", "gpt2", "phi3", "gpt_neox") else [64, 128])
    k = rng.choice([2, 4, 8])
    n = k * (rng.choice([1, 2, 3, 4]) if architecture.grouped and "k" in architecture.symbols else 1)
    if "k" not in architecture.symbols:
        n = rng.choice([8, 12, 16, 20])
    if name == "gpt_oss":
        d = 64
    h = n * d if architecture.tied_width else n * 8 * rng.randint(-(-768 // (8 * n)), 4096 // (8 * n))
    z = dict(b=rng.choice([1, 1, 2, 3, 4, 6, 8]), s=rng.choice([512, 768, 1000, 1024, 1536, 2048, 3072, 4096]), h=h, n=n, k=k, d=d,
             f=64 * rng.randint(h // 64, 4 * h // 64), v=rng.choice([32000, 49152, 50257, 64000, 100352, 128256, 151936]), r=rng.choice([8, 16, 32, 64]))
    layers = rng.randint(2, 6)
    if is_mixture:
        z |= dict(E=rng.choice([4, 8]), t=2, m=64 * rng.randint(8, 24), e=64 * rng.randint(8, 48))
        z["f"] = 64 * rng.randint(16, 64)
        z["s"] = rng.choice([512, 1024, 2048])
    if name in ("gpt2", "bert", "opt"):
        z["s"] = rng.choice([256, 512, 1024])
        z["p"] = rng.choice([z["s"], 1024])
    if name == "bert":
        z["s"], z["p"] = min(z["s"], 512), 512
    if is_image:
        z["b"] = rng.choice([8, 16, 32, 64])
    method = rng.choices(["full", "lora", "qlora"], [3, 2, 1])[0] if name not in ("bert", "vit", *MIXTURES) else "full"
    wrapper = rng.choices(["none", "ddp", "fsdp1", "fsdp2"], [4, 2, 2, 2])[0]
    if method == "qlora" and wrapper.startswith("fsdp"):
        wrapper = "none"
    precision = "fp32" if method == "full" and rng.random() < 0.1 else "bf16"
    narrow = precision == "bf16" and method == "full" and rng.random() < 0.2
    if name == "bert" and wrapper == "fsdp2":                   # Accelerate's units have its tied bias twice, and PyTorch refuses that
        wrapper = "fsdp1"
    attention = rng.choices(["sdpa", "flash", "eager" if name in ("llama", "mistral") else "flash"], [3, 3, 1])[0]
    if precision == "fp32" or name in OTHERS:
        attention = "sdpa"
    if name == "gemma2":                                        # has no SDPA: it caps scores
        attention, precision = "flash", "bf16"
    if name == "gpt_oss":
        attention, precision = "eager", "bf16"
    if attention == "eager":
        z["s"], z["b"] = min(z["s"], 1024), min(z["b"], 2)
    loss = "plain"
    if not is_image and name != "bert" and precision == "bf16":
        loss = rng.choices(["plain", "chunked", "liger"], [6, 1, 1])[0]
        if loss == "chunked" and name not in ("llama", "qwen2", "qwen3"):
            loss = "plain"
        if loss == "liger" and (name not in ("llama", "mistral", "qwen2", "qwen3", "mixtral") or (wrapper == "fsdp2" and method != "full")):
            loss = "plain"                                      # Liger's head finds a sharded weight below peft
    adapter = "none" if method == "full" else f"{method}-{rng.choice(['all', 'attention'])}"
    checkpoint = rng.choice(["none", "full"])
    job = dict(name=name, sizes=z, layers=layers, method=method, wrapper=wrapper, precision=precision, narrow=narrow, attention=attention,
               loss=loss, adapter=adapter, checkpoint=checkpoint, optimizer=rng.choices(["adamw", "sgd", "adafactor"], [6, 1, 1])[0],
               ranks=1 if wrapper == "none" else rng.choice([2, 4, 8]), micro_batches=rng.choices([1, 2], [3, 1])[0], prefetch=True,
               tied=name in ("llama", "qwen2", "qwen3") and rng.random() < 0.3)
    if wrapper.startswith("fsdp") and job["optimizer"] == "adafactor":
        job["optimizer"] = "adamw"                              # it needs whole matrices
    # Parameters are stored as the method says; FSDP and autocast cast them.
    stored = "fp32" if precision == "fp32" else "bf16" if narrow else "mixed" if method != "full" else "autocast"
    positions = z["b"] * z["s"]
    if loss == "chunked":
        z |= {"q": 1024, "c": -(-z["b"] * (z["s"] - 1) // 1024)}
    job["key"] = dict(architecture=name, attention=attention,
                      checkpoint=checkpoint, precision=stored, adapter=adapter, loss="chunked" if loss == "chunked" else "model",
                      kernels="liger" if loss == "liger" else "hf", experts="grouped_mm" if is_mixture else "none",
                      dropout="some" if name in ("gpt2", "bert") else "none", head="tied" if job["tied"] else "usual")
    # What the trace would hold, roughly: below the device's memory.
    scores = 0 if attention != "eager" else layers * z["b"] * n * z["s"] ** 2 * 8
    if not is_image and positions * z["v"] * 14 + scores + layers * positions * (h * 40 + z["f"] * 20) > 150e9:
        return None
    return job


# ------------------------------------------------------------------------------
# the program

def plan_of(job, folder):
    """Writes the plan, with its model as `foretell import hf-config` makes it from the configuration."""
    z, architecture = job["sizes"], models.ARCHITECTURES[job["name"]]
    architecture.kind = architecture.kind or job["name"]
    config = models.configuration(architecture, collections.defaultdict(int, z), job["layers"], job["attention"])
    if job["tied"]:
        config.tie_word_embeddings = True
    path = pathlib.Path(folder, "config.json")
    path.write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    plan = dict(topology=DEVICE, nodes=1, global_batch=z["b"] * job["ranks"] * job["micro_batches"], precision=job["precision"],
                optimizer=job["optimizer"] if job["optimizer"] in ("sgd", "muon") else "adamw", stack="hf-trainer",
                layout=dict(data=job["ranks"], zero=3 if job["wrapper"].startswith("fsdp") else 0, micro_batch=z["b"],
                            recompute=job["checkpoint"]), workload={}, training={})
    workload, training = plan["workload"], plan["training"]
    workload["attention"] = job["attention"]
    if job["wrapper"] == "fsdp1":
        plan["stack"] = "hf-trainer-fsdp1"
    if job["loss"] in ("dpo", "grpo"):
        plan["stack"] = "trl"
    if job["loss"] == "dpo":
        workload["preference"] = "dpo"
        plan["layout"]["micro_batch"] //= 2
        plan["global_batch"] //= 2
    elif job["loss"] not in ("plain", "grpo"):
        workload["loss"] = job["loss"]
    if job["narrow"]:
        workload["no_master_copy"] = True
    if job["optimizer"] == "adafactor":
        workload["moments"] = "factored"
    if job["optimizer"] == "sgd":
        training["momentum"] = 0.9
        if job.get("decay"):                                    # copies all gradients
            training["weight_decay"] = 0.1
    if job["adapter"] != "none":
        targets = ["*"] if job["adapter"].endswith("all") else ["*attn*"]
        training["lora"] = dict(rank=z["r"], alpha=2 * z["r"], targets=targets)
    if job["method"] == "qlora":
        workload["base_bits"] = 4
    return plan, path


def predicted(program, job):
    with tempfile.TemporaryDirectory() as folder:
        plan, config = plan_of(job, folder)
        if job["name"] == "vit":
            plan["model"] = dict(family="vit", layers=job["layers"], hidden=job["sizes"]["h"], heads=job["sizes"]["n"],
                                 ffn=job["sizes"]["f"], patch=16, image=224, channels=3, classes=1000)
        else:
            z = job["sizes"]
            length = z["s"] if "s" in z else z["u"]
            arguments = [program, "import", "hf-config", str(config), "--sequence", str(length), "-o", f"{folder}/model.yaml"]
            made = subprocess.run(arguments, capture_output=True, text=True)
            if made.returncode:
                return {"refused": made.stderr.strip()}
            plan["model"] = f"{folder}/model.yaml"
            if job["name"] == "t5":
                path = pathlib.Path(folder, "model.yaml")
                path.write_text(re.sub("target_sequence: .*", f"target_sequence: {z['u']}", path.read_text(encoding="utf-8")), encoding="utf-8")
        path = pathlib.Path(folder, "plan.yaml")
        path.write_text(json.dumps(plan), encoding="utf-8")
        ran = subprocess.run([program, "simulate", "--plan", str(path), "--json"], capture_output=True, text=True)
        if job.get("by_profile") and "unknown_operators" in ran.stderr:                 # the profile knows no kernel of attention
            del plan["workload"]["attention"]
            path.write_text(json.dumps(plan), encoding="utf-8")
            ran = subprocess.run([program, "simulate", "--plan", str(path), "--json"], capture_output=True, text=True)
        notes = [line for line in ran.stderr.splitlines() if line.startswith("note: ")]
        if ran.returncode:
            return {"refused": ran.stderr.strip()}
    answer = json.loads(ran.stdout)
    parts = answer["memory_by_component"][0]
    allocated = sum(size for name, size in parts.items() if name not in ("unused", "context")) - WORKSPACE
    is_traced = any("are those of the operators of" in note for note in notes)
    told = [n[6:] for n in notes if "calibrated" not in n and "network" not in n and "are those of the operators" not in n]
    if job["loss"] == "dpo" and not is_traced:
        told.append("by the profile")
    return {"allocated": allocated, "reserved": allocated + parts["unused"], "parts": parts, "peak": answer.get("memory_peak"),
            "traced": is_traced, "notes": told}


def row_of(program, job):
    began = time.time()
    row = {"job": job, "predicted": predicted(program, job)}
    if row["predicted"].get("traced") or job.get("by_profile") and "allocated" in row["predicted"]:
        try:
            row["traced"] = table.forked(trace, job)
        except RuntimeError as error:
            row["failed"] = str(error)
    row["seconds"] = round(time.time() - began, 1)
    return row


# ------------------------------------------------------------------------------
# the report

def words(job):
    """A configuration in one line."""
    said = [job["name"], job["method"] if job["method"] == "full" else job["adapter"], job["wrapper"] + (f"x{job['ranks']}" if job["ranks"] > 1 else ""),
            job["attention"], job["checkpoint"], job["optimizer"], "narrow" if job["narrow"] else job["precision"], job["loss"]]
    said += [f"{job['micro_batches']} micro-batches"] * (job["micro_batches"] > 1) + ["tied"] * job["tied"]
    return " ".join(said)


def stands_in(row):
    return any("stands in" in note for note in row["predicted"]["notes"])


def errors(row):
    return [row["predicted"][kind] / row["traced"][kind] - 1 for kind in ("allocated", "reserved")]


def report(rows):
    compared = [r for r in rows if "traced" in r]
    others = [r for r in rows if r not in compared]
    print(f"{len(rows)} configurations: {len(compared)} by operators, "
          f"{sum(r['predicted'].get('traced') is False for r in others)} by the profile alone, {sum('refused' in r['predicted'] for r in others)} refused, "
          f"{sum('failed' in r for r in others)} not traced here")
    share = lambda group, index, limit: sum(abs(errors(r)[index]) <= limit for r in group) / max(1, len(group))
    print(f"{'':32}{'':>6}{'allocated':>30}{'reserved':>26}")
    print(f"{'':32}{'rows':>6}{'within 0.5 %':>14}{'worst':>16}{'within 5 %':>14}{'worst':>12}")
    def line(title, group):
        worst = [max((errors(r)[i] for r in group), key=abs) for i in (0, 1)]
        print(f"{title:32}{len(group):6}{share(group, 0, .005):14.0%}{worst[0]:+16.2%}{share(group, 1, .05):14.0%}{worst[1]:+12.2%}")
    if compared:
        line("all", compared)
        for title, group in (("by tables of their own", [r for r in compared if not stands_in(r)]), ("where another table stands in", [r for r in compared if stands_in(r)])):
            if group:
                line(title, group)
        inside = [r for r in compared if not stands_in(r) and r["job"]["wrapper"] != "fsdp2"]
        if inside:
            line("the first, without FSDP2", inside)
    for title, word in (("", "name"), ("", "method"), ("", "wrapper"), ("", "attention"), ("", "checkpoint"), ("", "optimizer"), ("", "loss")):
        groups = collections.defaultdict(list)
        for row in compared:
            groups[str(row["job"][word])].append(row)
        for value in sorted(groups):
            line(f"{word} {value}", groups[value])
    print("\nallocated differs by more than 0.5 %:")
    for row in sorted(compared, key=lambda r: -abs(errors(r)[0])):
        off = errors(row)
        if abs(off[0]) > 0.005:
            print(f"{off[0]:+8.2%} {off[1]:+8.2%}  {words(row['job'])}  {row['traced']['allocated'] / 2**30:.2f} GiB in {row['traced']['phase']} at "
                  f"{row['traced']['operator']}; predicted {row['predicted']['peak']}", *(f"[{n}]" for n in row["predicted"]["notes"]))
    print("\nnot compared:")
    for row in others:
        why = row["predicted"].get("refused") or row.get("failed") or "; ".join(row["predicted"]["notes"])
        print(f"  {words(row['job'])}: {why.splitlines()[0][:300]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foretell", help="the program")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="no new configuration after so long")
    parser.add_argument("--only", default="", help="one architecture")
    parser.add_argument("--wrapper", default="", choices=["", "none", "ddp", "fsdp1", "fsdp2"], help="configurations with one alone")
    parser.add_argument("--loss", default="", choices=["", "plain", "chunked", "liger", "dpo", "grpo"], help="configurations with such a loss, or such a method of TRL, alone")
    parser.add_argument("--tied", action="store_true", help="configurations whose head shares the embedding's weights alone")
    parser.add_argument("--optimizer", default="", choices=["", "muon"], help="configurations with an optimizer that is not drawn otherwise")
    parser.add_argument("--rows", help="append a JSON line for each configuration; those that are there are not run again")
    parser.add_argument("--report", metavar="ROWS", help="print the report of such a file, and run nothing")
    parser.add_argument("--again", metavar="ROWS", help="predict such a file's jobs again beside the traces that it has, and print the report")
    args = parser.parse_args()
    if args.again:
        rows = [json.loads(line) for line in pathlib.Path(args.again).read_text(encoding="utf-8").splitlines()]
        rows = [{**row, "predicted": predicted(args.foretell, row["job"])} for row in rows if "traced" in row]
        return report([row for row in rows if "allocated" in row["predicted"]])
    if args.report:
        return report([json.loads(line) for line in pathlib.Path(args.report).read_text(encoding="utf-8").splitlines()])
    table.preload()
    rng, rows, began = random.Random(args.seed), [], time.time()
    known = {}
    if args.rows and pathlib.Path(args.rows).exists():
        known = {json.dumps(r["job"], sort_keys=True): r for r in map(json.loads, open(args.rows, encoding="utf-8"))}
    for number in range(args.count):
        job = json.loads(json.dumps(on_preferences(rng, args.loss) if args.loss in ("dpo", "grpo")
                                    else draw(rng, args.only, args.wrapper, args.loss, args.tied, args.optimizer)))
        row = known.get(json.dumps(job, sort_keys=True))
        if row is None:
            if time.time() - began > 60 * args.minutes:
                break
            row = row_of(args.foretell, job)
            if args.rows:
                with open(args.rows, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        off = " ".join(f"{e:+.2%}" for e in errors(row)) if "traced" in row else (row.get("failed") or row["predicted"].get("refused") or "by the profile").splitlines()[0][:200]
        print(number, row["seconds"], words(job), off, flush=True)
        rows.append(row)
    report(rows)


if __name__ == "__main__":
    main()
