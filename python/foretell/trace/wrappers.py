"""Takes wrappers off a user's step: a model is traced as one device runs it, and a plan decides how it is distributed.

`torch.distributed` has one rank, whatever the script asks for. DistributedDataParallel, FSDP and `fully_shard` leave the
model as it is, and what was asked for is noted. `torch.compile` leaves functions as they are: the trace is eager.
"""

import contextlib
import functools

import torch


class Seen:
    """What the script asked for: `wrappers` by name, and the modules that it checkpoints."""

    def __init__(self):
        self.wrappers = {}

    def wrapper(self, name):
        self.wrappers[name] = self.wrappers.get(name, 0) + 1


class Plain(torch.nn.Module):
    """In the place of a wrapper: has `module`, and its attributes."""

    def __init__(self, module, *_, **__):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def no_sync(self):
        return contextlib.nullcontext()

    def clip_grad_norm_(self, *args, **kwargs):
        return torch.nn.utils.clip_grad_norm_(self.parameters(), *args, **kwargs)


def install(seen, recorder):
    """Replaces the wrappers; returns a function that puts everything back."""
    undo = []
    def put(owner, name, value):
        if hasattr(owner, name):
            undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def plain(name):
        def wrap(module, *_, **__):
            seen.wrapper(name)
            return Plain(module)
        return wrap

    def fully_shard(module, *_, **__):
        seen.wrapper("fully_shard")
        return module

    put(torch.nn.parallel, "DistributedDataParallel", plain("DistributedDataParallel"))
    put(torch.nn, "DataParallel", plain("DataParallel"))
    put(torch, "compile", lambda model=None, **_: model if model is not None else (lambda f: f))
    put(torch.nn.Module, "compile", lambda self, *_, **__: None)
    distributed = torch.distributed
    if distributed.is_available():
        from torch.distributed import fsdp
        put(fsdp, "FullyShardedDataParallel", plain("FullyShardedDataParallel"))
        put(fsdp, "fully_shard", fully_shard)
        for name, value in {"init_process_group": lambda *_, **__: seen.wrapper("init_process_group"), "is_initialized": lambda: True,
                            "get_rank": lambda *_: 0, "get_world_size": lambda *_: 1, "barrier": lambda *_, **__: None,
                            "all_reduce": lambda *_, **__: None, "broadcast": lambda *_, **__: None,
                            "destroy_process_group": lambda *_: None}.items():
            put(distributed, name, value)

    import torch.utils.checkpoint as checkpointing
    original = checkpointing.checkpoint
    numbers = iter(range(1 << 60))
    @functools.wraps(original)
    def checkpoint(*args, **kwargs):
        if recorder.phase != "forward":
            return original(*args, **kwargs)
        recorder.checkpoints.append(next(numbers))
        try:
            return original(*args, **kwargs)
        finally:
            recorder.checkpoints.pop()
    put(checkpointing, "checkpoint", checkpoint)
    try:
        from transformers import modeling_utils
        put(modeling_utils, "checkpoint", checkpoint)
    except ImportError:
        pass

    def restore():
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)
    return restore
