"""Traces a training step that somebody else wrote, with no GPU: peak memory and kernels, or a model to plan.

    python -m foretell.trace my_training.py:step [--operators]
    python -m foretell.trace my_training.py:step -o trace.json; foretell import torch trace.json -o model.yaml

`step` is a function that builds its model, its optimizer and its batch and runs one step (or several); if the file has a
function `setup`, its result is handed to `step` instead, and what it makes counts as held from the start.
A model to plan needs the step at several batch sizes: one of the two functions takes `batch` (and perhaps `sequence`).
Tensors have no data: `cuda` in the script means the CPU here, and values that the script reads (`loss.item()`) are made up.
"""

import contextlib
import gc
import importlib.util
import inspect
import json
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from . import cuda, replay, wrappers
from .recorder import Allocation, Boundary, Recorder, Release, in_place_sums, log_triton

SIZES = {"batch": ("batch", "batch_size", "micro_batch"), "sequence": ("sequence", "seq", "seq_len", "sequence_length")}
AGAIN = "again"
_INSTALLED = []


class OnTheCpu(TorchFunctionMode):
    """Whatever asks for a CUDA device gets the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        def here(x):
            is_cuda = isinstance(x, torch.device) and x.type == "cuda" or isinstance(x, str) and x.split(":")[0] == "cuda"
            return torch.device("cpu") if is_cuda else x
        if func is not torch.device:
            args, kwargs = tuple(map(here, args)), {k: here(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


def load(place):
    """The module and the function of `FILE.py:FUNCTION`."""
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, getattr(module, name)


def given(function, sizes):
    """The sizes that a function takes, by its own names for them."""
    parameters = inspect.signature(function).parameters
    return {own: sizes[kind] for kind, names in SIZES.items() for own in names if own in parameters and sizes.get(kind)}


def defaults(place):
    """`{"batch": its default or None}` and the like: the sizes that the script's functions take."""
    with FakeTensorMode(allow_non_fake_inputs=True), OnTheCpu():
        module, step = load(place)
    found = {}
    for function in (step, getattr(module, "setup", None)):
        for name, parameter in inspect.signature(function).parameters.items() if function else ():
            for kind, names in SIZES.items():
                if name in names:
                    found.setdefault(kind, parameter.default if parameter.default is not parameter.empty else None)
    return found


class Traced:
    """One call of a step: its `events`, the recorder, its modules, its optimizer, and what wrapped its model."""

    def __init__(self, recorder):
        self.recorder, self.events, self.roots, self.optimizer, self.seen = recorder, [], [], None, wrappers.Seen()


def install():
    """Once in a process."""
    if not _INSTALLED:
        _INSTALLED.append(True)
        cuda.install()
        torch.autograd.set_multithreading_enabled(False)
        torch.nn.Module.cuda = lambda self, device=None: self
        plain = torch.autocast.__init__
        torch.autocast.__init__ = lambda self, device_type, dtype=None, enabled=True, cache_enabled=None: plain(
            self, "cpu", dtype or torch.bfloat16, enabled, cache_enabled)


@contextlib.contextmanager
def _marks(traced):
    """Modules and phases of what is recorded."""
    recorder = traced.recorder
    modules, grads = getattr(recorder, "modules", []), getattr(recorder, "grads", [])
    def before(module, _):
        if not modules and recorder.phase == "forward" and not any(module is root for root in traced.roots):
            traced.roots.append(module)
        modules.append(module)
        grads.append(torch.is_grad_enabled())
    def after(module, *_):
        while modules:
            grads.pop()
            if modules.pop() is module:
                break
    def before_update(optimizer, *_):
        traced.optimizer = traced.optimizer or optimizer
        recorder.enter("optimizer")
    handles = [torch.nn.modules.module.register_module_forward_pre_hook(before),
               torch.nn.modules.module.register_module_forward_hook(after, always_call=True),
               register_optimizer_step_pre_hook(before_update),
               register_optimizer_step_post_hook(lambda *_: recorder.enter("after"))]
    backward = torch.autograd.backward
    def marked(tensors, *args, **kwargs):
        for t in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if hasattr(recorder, "loss"):
                recorder.loss(t)
        recorder.phase = "backward"
        recorder.enter("start")
        out = backward(tensors, *args, **kwargs)
        recorder.phase = "forward"
        recorder.enter("after")
        return out
    torch.autograd.backward = marked
    try:
        yield
    finally:
        torch.autograd.backward = backward
        for handle in handles:
            handle.remove()


def call(place, recorder, sizes=None, again=False):
    """Runs a step once, at sizes that it takes; `again`: and once more if `setup` keeps its state. -> `Traced`"""
    install()
    traced = Traced(recorder)
    if not torch.compiler.is_compiling():
        with contextlib.suppress(ImportError):
            log_triton(recorder)
    restore = wrappers.install(traced.seen, recorder)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), OnTheCpu(), recorder, _marks(traced):
            module, step = load(place)
            recorder.enter("start")
            gc.disable()
            setup = getattr(module, "setup", None)
            kept = setup(**given(setup, sizes or {})) if setup else None
            handed = kept if isinstance(kept, tuple) else () if kept is None else (kept,)
            result = step(*handed, **given(step, sizes or {}))
            if again and setup:
                del result
                recorder.is_over = True
                recorder.enter(AGAIN)
                result = step(*handed, **given(step, sizes or {}))
            traced.events = in_place_sums(list(recorder.events))
            del result, kept, handed
    finally:
        gc.enable()
        restore()
    return traced


def trace(place):
    """-> the log of one call of the step."""
    return call(place, Recorder()).events


def phase_peaks(events):
    """Allocated bytes at the peak of each phase, of the second step if there are two."""
    live, sizes, phase, peaks = 0, {}, "forward", {}
    for event in events:
        if isinstance(event, Boundary) and event.part.endswith(AGAIN):
            phase, peaks = "forward", {}
        elif isinstance(event, Boundary):
            phase = "optimizer" if event.part.endswith(".optimizer") else event.part.split(".")[0]
        elif isinstance(event, Allocation):
            sizes[event.id] = replay.round_up(event.bytes)
            live += sizes[event.id]
        elif isinstance(event, Release):
            live -= sizes.pop(event.id)
        peaks[phase] = max(peaks.get(phase, 0), live)
    return peaks


def report(place, operators=False):
    result = replay.replay_events(trace(place))
    print(json.dumps({"peak_bytes": result.peak, "backward_start_bytes": result.forward_end, "end_bytes": result.live,
                      "kernels": sum(n for n, _ in result.kernels.values()), "kernel_bytes": sum(b for _, b in result.kernels.values())}))
    if operators:
        for name, (count, size) in sorted(result.kernels.items(), key=lambda x: -x[1][1]):
            print(f"{count:7d} {size:16d} {name}")
