"""Writes a traced step as JSON, which `foretell import torch` reads: the forward graph with every size as a formula.

The step is traced at two batch sizes, and at two sequence lengths if it takes one. A dimension is then a number, or
`[p, a, b, c]` for `batch^p * (a + b*sequence + c*sequence^2)`, with zeros at the end left out; `b` and `c` may be
fractions. A value without `dtype` is of `f32`. The operators that the loss
depends on are kept, in order. What depends on no parameter and is made outside of modules is an input; what depends on
neither parameter nor input is a constant. Values are numbered: parameters, inputs, constants, then what operators make.
"""

import json
import sys
from collections import Counter
from fractions import Fraction

import torch

from . import replay, script
from .graph import GraphRecorder
from .recorder import DTYPES, Boundary


class Inexpressible(Exception):
    """The step cannot be written as a graph."""


class Trace:
    """The live part of one recording, with values in the order of the file once they are numbered."""

    def __init__(self, traced, sizes):
        self.traced, self.sizes = traced, sizes
        recorder = traced.recorder
        self.values, self.names = recorder.values, _names(traced.roots)
        if not recorder.losses:
            raise Inexpressible("the step calls no `backward()`; hint: the function is to run a whole training step")
        self.losses, operators = _segments(recorder)
        self.assumed = self._assumed(len(recorder.losses))
        self._sort(_live(operators, {loss for loss, _ in self.losses}))
        if self.left_out() > 0.0005:
            self.assumed.append(f"the loss does not depend on {self.left_out():.1%} of the forward pass's FLOPs: they are left out")

    def _assumed(self, losses):
        assumed, end = [], self.losses[-1][1]
        for what, places in self.traced.recorder.warnings.items():
            # Outside of modules a script reads the loss, or prepares the batch.
            places = [place for before, place in places if before <= end and place is not None]
            where = sorted({self.names.get(p, "") for p in places if p is not None} - {""})
            where = f" in {', '.join(f'`{w}`' for w in where[:3])}{' and others' if len(where) > 3 else ''}" if where else ""
            if places:
                assumed.append(f"{what}{where}, {len(places)} times")
        if len(self.losses) < losses:
            assumed.append(f"the step accumulates the gradients of {losses} equal micro-batches: one of them is written")
        elif losses > 1:
            assumed.append(f"the step calls `backward()` {losses} times, for different graphs: their sum is written")
        for name, count in self.traced.seen.wrappers.items():
            if name != "init_process_group":
                assumed.append(f"`{name}` wraps the model ({count} times): the plan decides how it is distributed")
        if any(o.get("no_grad") for o in self.traced.recorder.operators if o["modules"]):
            assumed.append("some operators run under `no_grad`: parameters that are read there alone have no gradient")
        return assumed

    def left_out(self):
        """The share of the forward pass's FLOPs that the loss does not depend on."""
        total, kept = self.traced.recorder.flops["forward"], sum(o.get("flops", 0) for o in self.operators)
        return 1 - kept / total if total and len(self.losses) == len(self.traced.recorder.losses) else 0

    def _sort(self, operators):
        """Keeps the operators that depend on parameters, or on inputs inside of modules."""
        made_outside, depends, kept = set(), set(), []
        for o in operators:
            depends.update(v for v in o["in"] if self.values[v]["made"] == "parameter")
            if any(v in depends for v in o["in"]) or o["modules"] and any(v in made_outside for v in o["in"]):
                depends.update(o["out"])
                kept.append(o)
            elif not o["modules"]:
                made_outside.update(o["out"])                   # the batch is prepared here
        self.operators = _live(kept, {loss for loss, _ in self.losses})
        made = {v for o in self.operators for v in o["out"]}
        self.used = list(dict.fromkeys(v for o in self.operators for v in o["in"] if v not in made))
        self.is_input = [v in made_outside for v in self.used]

    def finish(self, varies):
        """Numbers the values. `varies`: whether the shape of each used value depends on the batch."""
        known, self.parameters, self.inputs, self.constants, number = {}, [], [], [], {}
        for root in self.traced.roots:
            for name, p in _prefixed(root, self.traced.roots):
                if id(p) not in known:
                    known[id(p)] = len(self.parameters)
                    self.parameters.append({"name": name, "shape": tuple(p.shape), "dtype": DTYPES[p.dtype], "trained": p.requires_grad})
        for v, is_input, of_batch in zip(self.used, self.is_input, varies):
            value = self.values[v]
            t = value["tensor"]() if "tensor" in value else None
            if t is not None and id(t) in known:
                number[v] = known[id(t)]
            elif value["made"] == "parameter":
                number[v] = len(self.parameters)
                self.parameters.append({"name": f"parameter{v}", "shape": value["shape"], "dtype": value["dtype"], "trained": value["trained"]})
            else:
                (self.inputs if is_input and of_batch else self.constants).append(v)
        order = [*self.inputs, *self.constants, *(v for o in self.operators for v in o["out"])]
        number.update({v: len(self.parameters) + i for i, v in enumerate(order)})
        self.number = number


def _prefixed(root, roots):
    """Parameters by name; those of several modules with parameters have their class before the name."""
    several = sum(1 for r in roots if any(True for _ in r.parameters())) > 1
    for name, p in root.named_parameters():
        name = ".".join(w for w in name.split(".") if w not in ("_orig_mod", "_checkpoint_wrapped_module"))
        name = name[7:] if isinstance(root, script.wrappers.Plain) and name.startswith("module.") else name
        yield (f"{type(root).__name__}.{name}" if several else name), p


def _names(roots):
    """The path of every module, by its identity."""
    names = {}
    for root in roots:
        strip = "module." if isinstance(root, script.wrappers.Plain) else ""
        for name, module in root.named_modules():
            names.setdefault(id(module), name[len(strip):] if name.startswith(strip) else name.removeprefix("module"))
    return names


def _live(operators, wanted):
    """The operators that the wanted values depend on."""
    wanted, kept = set(wanted), []
    for o in reversed(operators):
        if any(v in wanted for v in o["out"]):
            wanted.update(o["in"])
            kept.append(o)
    return kept[::-1]


def _segments(recorder):
    """The losses, and the operators up to the last of them. Of equal micro-batches only the first."""
    ends = [0, *(end for _, end in recorder.losses)]
    parts = [recorder.operators[a:b] for a, b in zip(ends, ends[1:])]
    parts = [_live(part, {loss}) for part, (loss, _) in zip(parts, recorder.losses)]
    kind = lambda part: [(o["op"], tuple(recorder.values[v]["shape"] for v in o["out"])) for o in part]
    if len(parts) > 1 and all(kind(p) == kind(parts[0]) for p in parts[1:]):
        return recorder.losses[:1], recorder.operators[:ends[1]]
    return recorder.losses, recorder.operators[:ends[-1]]


def blocks(root):
    """Paths of the modules that repeat: the outermost members of lists that have two or more composite modules of one class."""
    found = []
    def visit(module, path):
        is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict))
        children = list(module.named_children())
        classes = Counter(type(c).__name__ for _, c in children if any(True for _ in c.children()))
        repeats = is_list and any(n > 1 for n in classes.values())
        for name, child in children:
            place = f"{path}.{name}" if path else name
            if repeats and not _holds_stacks(child):
                found.append(place)
            else:
                visit(child, place)
    visit(root, "")
    return found


def _holds_stacks(module):
    """Whether a member of a list has such a list itself, as the stages of a U-Net or a ResNet do."""
    for m in module.modules():
        if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)):
            classes = Counter(type(c).__name__ for c in m.children() if any(True for _ in c.children()))
            if any(n > 1 for n in classes.values()) and sum(1 for c in m.modules() if any(True for _ in c.parameters(False))) > 8:
                return True
    return False


def dimension(at, what):
    """The formula of a dimension from its values at (b0, s0), (b1, s0) and perhaps (b0, s1)."""
    (b0, s0, n0), (b1, _, n1), *rest = at
    power = 0 if n0 == n1 else 1 if n0 * b1 == n1 * b0 and n0 % b0 == 0 else None
    if power is None:
        raise Inexpressible(f"{what} is {n0} for a batch of {b0} and {n1} for {b1}, which is no multiple of the batch")
    base = n0 // b0 if power else n0
    if not rest or rest[0][2] == n0:
        return base if not power else [1, base]
    s1, other = rest[0][1], rest[0][2] // b0 if power else rest[0][2]
    if base * s1 * s1 == other * s0 * s0:
        return [power, 0, 0, _number(Fraction(base, s0 * s0))]
    slope = Fraction(other - base, s1 - s0)
    return [power, _number(base - slope * s0), _number(slope)]


def _number(x):
    return int(x) if x == int(x) else float(x)


def merge(traces):
    """The document from traces at (b0, s0), (b1, s0) and perhaps (b0, s1)."""
    first = traces[0]
    points = [(t.sizes["batch"], t.sizes.get("sequence") or 0) for t in traces]
    for other in traces[1:]:
        for place, (a, b) in enumerate(zip(first.operators, other.operators)):
            if a["op"] != b["op"]:
                where = first.names.get(a["modules"][-1], "") if a["modules"] else ""
                raise Inexpressible(f"operator {place} is `{a['op']}` at {first.sizes} and `{b['op']}` at {other.sizes}, in `{where}`: "
                                    "the step's operators depend on its sizes")
        if len(first.operators) != len(other.operators) or len(first.used) != len(other.used):
            raise Inexpressible(f"the step has {len(first.operators)} operators at {first.sizes} and {len(other.operators)} at {other.sizes}")
    shape = lambda trace, v: trace.values[v]["shape"]
    varies = [shape(traces[0], a) != shape(traces[1], b) for a, b in zip(traces[0].used, traces[1].used)]
    for trace in traces:
        trace.finish(varies)

    def value(numbers, what):
        shapes = [t.values[v]["shape"] for t, v in zip(traces, numbers)]
        if len({len(s) for s in shapes}) > 1:
            raise Inexpressible(f"{what} has as many dimensions as the sizes say")
        dims = [dimension([(*p, n) for p, n in zip(points, sizes)], f"a dimension of {what}") for sizes in zip(*shapes)]
        dtype = first.values[numbers[0]]["dtype"]
        return {"shape": dims} if dtype == "f32" else {"shape": dims, "dtype": dtype}

    repeated = list(dict.fromkeys(b.removeprefix("module.") for root in first.traced.roots for b in blocks(root)))
    operators = []
    for rows in zip(*(t.operators for t in traces)):
        o = rows[0]
        path = next((first.names[m] for m in reversed(o["modules"]) if first.names.get(m)), "")
        made = [r["out"] for r in rows]
        if len({len(m) for m in made}) > 1:                     # one result for each sample
            made = [[m[0]] * len(made[0]) for m in made]
        entry = {"op": o["op"], "module": path, "in": [first.number[v] for v in o["in"]],
                 "out": [value(numbers, f"the result of `{o['op']}` in `{path}`") for numbers in zip(*made)]}
        if len({len(r["out"]) for r in rows}) > 1:
            entry["samples"] = True
        for key in ("args", "flops", "view", "no_grad", "checkpoint"):
            if o.get(key) is not None:
                entry[key] = o[key]
        operators.append(entry)
    return {
        "format": "foretell-torch-trace", "version": 1, "torch": torch.__version__,
        "sizes": {k: v for k, v in first.sizes.items() if v},
        "parameters": [{**p, "shape": list(p["shape"])} for p in first.parameters],
        "inputs": [value(numbers, "an input") for numbers in zip(*(t.inputs for t in traces))],
        "constants": [value(numbers, "a constant") for numbers in zip(*(t.constants for t in traces))],
        "operators": operators,
        "losses": [first.number[loss] for loss, _ in first.losses if loss in first.number],
        "blocks": repeated, "optimizer": optimizer(first.traced.optimizer), "assumed": first.assumed,
        "measured": [measured(t) for t in traces],
    }


def optimizer(found):
    if found is None:
        return None
    options = {k: v for k, v in found.defaults.items() if isinstance(v, (bool, int, float))}
    if isinstance(found.defaults.get("betas"), (tuple, list)):
        options["betas"] = [float(b) for b in found.defaults["betas"]]
    return {"name": type(found).__name__, "options": options}


def measured(trace):
    """What the trace says of the whole step as it ran: allocated bytes, kernels, FLOPs."""
    events = trace.traced.events
    again = [i for i, e in enumerate(events) if isinstance(e, Boundary) and e.part.endswith(script.AGAIN)]
    result = replay.replay_events(events[:again[0]] if again else events)
    flops, peaks = trace.traced.recorder.flops, script.phase_peaks(events)
    return {**{k: v for k, v in trace.sizes.items() if v}, "peak_bytes": max(peaks.values()), "backward_start_bytes": result.forward_end,
            "end_bytes": result.live, "peaks": peaks, "kernels": sum(n for n, _ in result.kernels.values()),
            "forward_flops": flops["forward"], "backward_flops": flops["backward"]}


def export(place, batch=None, sequence=None):
    """-> the document of a step."""
    takes = script.defaults(place)
    if "batch" not in takes:
        raise Inexpressible("neither `setup` nor the step takes `batch`: the trace at two batch sizes tells which dimensions grow; "
                            "hint: `def setup(batch=8):`")
    first = {"batch": batch or max(2, takes["batch"] or 2), "sequence": sequence or takes.get("sequence")}
    points = [first, {**first, "batch": first["batch"] + 1}]
    if first["sequence"]:
        points.append({**first, "sequence": 2 * first["sequence"]})
    traces = [Trace(script.call(place, GraphRecorder(), sizes, again=i == 0), sizes) for i, sizes in enumerate(points)]
    try:
        return merge(traces)
    except Inexpressible as problem:
        if len(traces) < 3:
            raise
        document = merge(traces[:2])
        document["assumed"].append(f"the sequence is fixed: {problem}")
        return document


def write(place, path, batch=None, sequence=None):
    try:
        document = export(place, batch, sequence)
    except Inexpressible as problem:
        sys.exit(f"error: `{place}`: {problem}")
    with open(path, "w", encoding="utf-8") as file:
        head = {k: v for k, v in document.items() if k != "operators"}
        text = json.dumps(head, separators=(",", ":"))[:-1] + ',"operators":[\n'
        file.write(text + ",\n".join(json.dumps(o, separators=(",", ":")) for o in document["operators"]) + "\n]}\n")
    count = sum(_elements(p["shape"]) for p in document["parameters"])
    print(f"{path}: {count} parameters, {len(document['operators'])} operators of the forward pass, "
          f"{document['measured'][0]['peak_bytes']} bytes allocated at the peak")
    for line in document["assumed"]:
        print(f"assumed: {line}")


def _elements(shape):
    total = 1
    for n in shape:
        total *= n
    return total
