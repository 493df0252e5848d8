"""One training step the way a trainer runs it: forward with autocast, loss, backward; and the marks of its layers."""

import collections
import contextlib
import gc
import re
import types

import torch
from torch._subclasses import FakeTensorMode

from . import compiled, cuda, losses, models, older
from .recorder import Recorder, in_place_sums, log_triton


# Modules of one expert: those of all are one parameter of a table, with `*` in its name.
EXPERT, FIRST = re.compile(r"\.experts\.\d+\."), re.compile(r"\.experts\.0\.")


# The stack of the frozen model that preferences are compared with. It has a forward pass alone.
REFERENCE = "reference"


def stacks_of(model, layers, before=0):
    """The lists of like layers: `{name: [modules]}`; the name is `layer` where there is one list. Without the `before` first ones."""
    found = [(name, list(m)[before:]) for name, m in model.named_modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))
             and len(m) == before + layers and len({type(x) for x in m}) == 1]
    outer = [(name, m) for name, m in found if not any(name != other and name.startswith(other + ".") for other, _ in found)]
    if len(outer) == 1:
        return {"layer": outer[0]}
    kind = lambda name: next((w for w in ("encoder", "decoder") if w in name.split(".")), name.replace(".", "_"))
    return {kind(name): (name, m) for name, m in outer}


def names_of(tensors, stacks, layers, before=0, period=1):
    """`(stack, layer, name)` of each tensor by its full name; names are unique in the table.

    The `before` first layers are outside of layers. Where `period` layers are one of the table's,
    names begin with the number among these.

    With several stacks a layer's names begin with the stack's. What only some layers have is outside
    of layers (T5's position bias). `base_layer`, which peft inserts, is left out except where peft
    wraps one module twice (experts).
    """
    inserted = lambda n: n.replace("base_model.model.", "").replace("_checkpoint_wrapped_module.", "")
    short = [inserted(n) for n in tensors]
    bare = [n.replace(".base_layer", "") for n in short]
    counts = collections.Counter(bare)
    clean = [b if counts[b] == 1 else n for n, b in zip(short, bare)]
    prefixes = {inserted(prefix) + ".": stack for stack, (prefix, _) in stacks.items()}
    found = []
    for name in clean:
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        if prefix is None:
            found.append((None, None, name))
            continue
        number, _, rest = name[len(prefix):].partition(".")
        stack, number = prefixes[prefix], int(number) - before
        if number < 0:
            found.append((None, None, name))
            continue
        rest = rest if period == 1 else f"{number % period}.{rest}"
        found.append((stack, number // period, rest if len(stacks) == 1 else f"{stack}.{rest}"))
    of_layers = collections.Counter((stack, name) for stack, _, name in found)
    def everywhere(stack, layer, name):
        return stack is None or of_layers[stack, name] > layers // 2
    return [f if everywhere(*f) else (None, None, name) for f, name in zip(found, clean)]


def _first_tensor(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (tuple, list)):
            inner = _first_tensor(value)
            if inner is not None:
                return inner
    return None


def mark_layers(recorder, stacks, period=1, has_reference=False):
    """Every call of a layer is a part of the log; so is its backward, which begins when its output's gradient is complete.

    With a reference, calls without gradients are those of its stack.
    """
    order = list(stacks) + [REFERENCE] * (has_reference and REFERENCE not in stacks)
    after = {s: (order[i + 1] + "_start" if i + 1 < len(order) else "end") for i, s in enumerate(order)}
    place = {id(m): (s, i, len(ms)) for s, (_, ms) in stacks.items() for i, m in enumerate(ms)}
    inside = set()                                              # layers whose call is running

    def marked(self, function, args, kwargs):
        if recorder.phase != "forward" or id(self) not in place or id(self) in inside:
            return function(self, *args, **kwargs)
        stack, number, count = place[id(self)]
        if has_reference and not torch.is_grad_enabled():
            stack = REFERENCE
        i = number // period
        given = _first_tensor((*args, *kwargs.values())) if number == 0 else None
        if given is not None and given.requires_grad:
            given.register_hook(lambda g, part=f"{stack}_end" if stack != order[0] else "end": recorder.enter(part))
        given = None
        recorder.enter(stack, i)
        inside.add(id(self))
        out = function(self, *args, **kwargs)
        inside.remove(id(self))
        if number == count - 1:
            recorder.enter(after[stack])
        made = _first_tensor((out,))
        if made.requires_grad:
            made.register_hook(lambda g: recorder.enter(stack, i))
        return out

    for kind in {type(m) for _, ms in stacks.values() for m in ms}:
        plain = kind.__call__
        kind.__call__ = lambda self, *args, plain=plain, **kwargs: marked(self, plain, args, kwargs)
    return marked


def train_forward(model, key):
    """The model's forward as Accelerate prepares it."""
    if key["precision"] not in ("autocast", "mixed"):
        return model
    from accelerate.utils import convert_outputs_to_fp32
    inner = model.forward
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(inner))
    return model


def compute_loss(model, inputs, key):
    """-> (loss, what the caller keeps alive); Trainer.compute_loss drops the outputs."""
    if key["loss"] == "trl":
        return losses.trl(model, inputs, key["chunk"]), None
    if key["loss"] == "trl-fused":
        return losses.trl_fused(model, inputs), None
    if key["loss"] == "reward":
        return losses.reward(model, inputs), None
    if key["loss"].startswith("dpo"):
        return losses.dpo(model, inputs, key["reference"], key["loss"] == "dpo-precomputed"), None
    if key["loss"] == "grpo":
        return losses.grpo(model, inputs), None
    outputs = model(**inputs)
    return outputs["loss"], None


def offloading(recorder):
    """Sends what layers save for the backward to the host, as `OffloadActivations` of TRL and
    torchtune does without streams: no parameters, nothing below 1 KiB, nothing of the head."""
    def pack(t):
        if recorder.is_ignored(t) or t.nbytes < 1024 or recorder.part in ("forward.end", "forward.start"):
            return t
        recorder.copy("d2h", t)
        return tuple(t.shape), tuple(t.stride()), t.dtype

    def unpack(saved):
        if isinstance(saved, torch.Tensor):
            return saved
        shape, stride, dtype = saved
        t = torch.empty_strided(shape, stride, dtype=dtype)
        recorder.copy("h2d", t)
        return t

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def run(recorder, model, inputs, key, loss_of):
    """Trainer.training_step: the loss, then its backward."""
    recorder.phase = "forward"
    recorder.enter("start")
    for t in inputs.values():
        recorder.see(t)
    with offloading(recorder) if key["checkpoint"] == "full-offload" else contextlib.nullcontext():
        loss, kept = loss_of(model, inputs, key)
    recorder.phase = "backward"
    recorder.enter("start")
    loss.backward()
    recorder.enter("end")
    del loss, kept, inputs, t


def trace(name, z, layers, key, device="cuda"):
    """-> (events, parameters, stack names); once per process: operators and classes are replaced for good."""
    if device == "cuda":
        cuda.install()
    else:
        cuda.install_models()
    if key["version"] in older.RELEASES:
        older.install()
    torch.autograd.set_multithreading_enabled(False)
    architecture = models.find(key)
    rows = z["b"] * z["s"] * z["t"] // z["E"] if architecture.experts else None
    recorder = Recorder(rows, device)
    log_triton(recorder)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = models.build(name, z, layers, key, recorder)
        before, period = architecture.before, architecture.period
        stacks = stacks_of(model, period * layers, before) if architecture.layered else {}
        tensors = [*model.named_parameters(remove_duplicate=False), *((n, b) for n, b in model.named_buffers())]
        reference = models.reference(name, z, layers, key, recorder)
        if reference is not None:
            (prefix, modules), = stacks_of(reference, period * layers, before).values()
            stacks[REFERENCE] = (f"{REFERENCE}.{prefix}", modules)
            named = [*reference.named_parameters(remove_duplicate=False), *reference.named_buffers()]
            tensors += [(f"{REFERENCE}.{n}", t) for n, t in named]
            train_forward(reference, key)
        parameters, seen, places = [], {}, {}
        for (long, p), (stack, layer, name) in zip(tensors, names_of([n for n, _ in tensors], stacks, layers, before, period)):
            recorder.ignore(p)
            short = EXPERT.sub(".experts.*.", name)
            places[long] = (layer, short)
            is_parameter = isinstance(p, torch.nn.Parameter)
            experts = () if short == name else (z["E"],)
            parameters.append(types.SimpleNamespace(
                stack=stack, layer=layer, name=short, dtype=p.dtype, shape=(*experts, *p.shape), like=short != name and not FIRST.search(name),
                adapter="lora_" in long, frozen=is_parameter and not p.requires_grad, buffer=not is_parameter,
                tied=seen.get(id(p))))
            if id(p) not in seen:
                seen[id(p)] = short
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(lambda p, short=short: recorder.gradient(short, p))
        del tensors, p
        marked = mark_layers(recorder, stacks, period, key["loss"] == "dpo")
        if key["version"] in older.RELEASES and key["checkpoint"] != "none":
            older.mark_checkpoints(model, marked)
        if not architecture.loss:
            train_forward(model, key)
        if key["compiled"] != "none":
            compiled.apply(model, key, recorder, stacks, places)
        options = {**key, "chunk": z.get("q"), "recorder": recorder, "reference": reference}
        loss_of = architecture.loss or compute_loss
        if key["compiled"] != "none":                           # the first step compiles, which keeps tensors alive
            with recorder:
                run(recorder, model, models.inputs(architecture, z, key), options, loss_of)
            model.zero_grad()
            gc.collect()
            recorder.events.clear()
        gc.collect()
        gc.disable()
        data = models.inputs(architecture, z, key)
        with recorder:
            run(recorder, model, data, options, loss_of)
            data.clear()
            events = in_place_sums(list(recorder.events))
        gc.enable()
    return events, parameters, list(stacks)
