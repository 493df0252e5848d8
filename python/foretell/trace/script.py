"""Traces a training step that somebody else wrote, with no GPU: peak memory and kernels.

    python -m foretell.trace my_training.py:step [--operators]

`step` is a function without arguments that builds its model, its optimizer and its batch and runs one step (or several);
if the file has a function `setup`, its result is handed to `step` instead, and what it makes counts as held from the start.
Tensors have no data: `cuda` in the script means the CPU here, and values that the script reads (`loss.item()`) are made up.
"""

import gc
import importlib.util
import json
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from . import cuda, replay
from .recorder import Recorder, in_place_sums, log_triton


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


def trace(place):
    """-> the log of one call of the step."""
    cuda.install()
    torch.autograd.set_multithreading_enabled(False)
    torch.nn.Module.cuda = lambda self, device=None: self
    plain = torch.autocast.__init__
    torch.autocast.__init__ = lambda self, device_type, dtype=None, enabled=True, cache_enabled=None: plain(
        self, "cpu", dtype or torch.bfloat16, enabled, cache_enabled)
    recorder = Recorder()
    log_triton(recorder)
    with FakeTensorMode(allow_non_fake_inputs=True), OnTheCpu(), recorder:
        module, step = load(place)
        recorder.enter("start")
        gc.disable()
        backward = torch.Tensor.backward
        def marked(self, *args, **kwargs):
            recorder.phase = "backward"
            recorder.enter("start")
            out = backward(self, *args, **kwargs)
            recorder.phase = "forward"
            recorder.enter("after")
            return out
        torch.Tensor.backward = marked
        kept = module.setup() if hasattr(module, "setup") else None
        given = kept if isinstance(kept, tuple) else () if kept is None else (kept,)
        result = step(*given)
        events = in_place_sums(list(recorder.events))
        torch.Tensor.backward = backward
        gc.enable()
        del result, kept, given
    return events


def report(place, operators=False):
    result = replay.replay_events(trace(place))
    print(json.dumps({"peak_bytes": result.peak, "backward_start_bytes": result.forward_end, "end_bytes": result.live,
                      "kernels": sum(n for n, _ in result.kernels.values()), "kernel_bytes": sum(b for _, b in result.kernels.values())}))
    if operators:
        for name, (count, size) in sorted(result.kernels.items(), key=lambda x: -x[1][1]):
            print(f"{count:7d} {size:16d} {name}")
