"""Logs what a step does to the device: kernels, allocations, releases, in the order in which they happen.

Every storage that a kernel makes is an allocation, and its death is the release (Python's and autograd's own references
decide, as on a GPU). Sizes are those of tensors without data.
"""

import contextlib
import functools
import sys
import weakref
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .dtypes import WIDTHS

aten = torch.ops.aten
NO_KERNEL = {"aten::_unsafe_view", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided",
             "aten::new_empty_strided", "aten::detach", "aten::lift_fresh", "aten::_reshape_alias", "aten::resize_", "aten::set_",
             "aten::is_same_size", "aten::record_stream", "aten::_version", "aten::alias", "aten::sym_size"}
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64", torch.int64: "i64",
          torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
          torch.uint64: "i64", torch.uint32: "i32", torch.complex64: "c64", torch.float8_e4m3fn: "f8", torch.float8_e5m2: "f8"}


class Tensor(NamedTuple):
    """A tensor as a kernel sees it. `broadcast` dimensions have stride 0: they are read once."""
    dtype: str
    shape: tuple
    broadcast: tuple

    @property
    def bytes(self):
        size = WIDTHS[self.dtype]
        for n, once in zip(self.shape, self.broadcast):
            size *= 1 if once else n
        return size


class Kernel(NamedTuple):
    name: str
    inputs: tuple
    outputs: tuple
    extra: str = ""
    accumulates: tuple = ()          # allocations (old, new) if this is autograd summing two gradients


class Allocation(NamedTuple):
    id: int
    bytes: int
    like: Tensor                     # a tensor that fills the allocation exactly, or None


class Release(NamedTuple):
    id: int


class Gradient(NamedTuple):
    id: int
    parameter: str


class Workspace(NamedTuple):
    """Memory that a CUDA kernel takes and gives back by itself: factors and what each is rounded up to."""
    terms: tuple                     # of (bytes, ((size, multiple), ...))

    @property
    def bytes(self):
        total = 0
        for size, factors in self.terms:
            for n, multiple in factors:
                size *= -(-n // multiple) * multiple
            total += size
        return total


class Copy(NamedTuple):
    way: str                         # h2d or d2h
    like: Tensor


class Boundary(NamedTuple):
    """The events that follow belong to this part; `layer` is None outside of layers."""
    part: str
    layer: int = None


def describe(t):
    return Tensor(DTYPES[t.dtype], tuple(t.shape), tuple(st == 0 and n != 1 for n, st in zip(t.shape, t.stride())))


def _padded(t, dtype):
    """The tensor whose rows are as far apart as those of `t` (some kernels want rows that are multiples of 16)."""
    dims = sorted(((stride, n) for n, stride in zip(t.shape, t.stride()) if stride and n > 1), reverse=True)
    shape = [dims[0][1]] if dims else []
    for (outer, _), (inner, _) in zip(dims, dims[1:]):
        shape.append(outer // inner)
    return Tensor(dtype, tuple(shape), (False,) * len(shape))


def _flash_backward(out, grad, q, k, v, *_, **__):
    b, n, s, d = q.shape                                        # fp32 sum of dq, row sums, dk and dv per query head
    terms = [(4, ((b, 1), (n, 1), (s, 128), (d, 32))), (4, ((b, 1), (n, 1), (s, 128)))]
    if k.shape[1] != n:
        terms.append((2 * q.element_size(), ((b, 1), (n, 1), (k.shape[2], 1), (d, 1))))
    return Workspace(tuple(terms))


WORKSPACES = {"aten::_scaled_dot_product_flash_attention_backward": _flash_backward}
EXTRAS = {
    "aten::_scaled_dot_product_flash_attention": lambda q, k, v, p=0.0, causal=False, *_, **__: "causal" if causal else "",
    "aten::_scaled_dot_product_flash_attention_backward": lambda *a, **_: "causal" if a[11] else "",
    "aten::_scaled_dot_product_efficient_attention": lambda q, k, v, m, l, p=0.0, causal=False, **_: "causal" if causal else "",
    "aten::_scaled_dot_product_efficient_attention_backward": lambda *a, **_: "causal" if len(a) > 11 and a[11] else "",
}


BY_MASK = {aten.index.Tensor, aten.masked_select.default, aten.index_put_.default, aten._index_put_impl_.default}


def _called_by_engine():
    """Whether autograd's engine itself runs this operator, rather than a Python function that it called."""
    frame = sys._getframe(2)
    between = ("_python_dispatch.py", "_stats.py", "_compile.py", "eval_frame.py")
    while frame and (frame.f_code.co_name == "__torch_dispatch__" or frame.f_code.co_filename.endswith(between)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


@functools.lru_cache(None)
def is_view(func):
    name = func._schema.name
    if name in NO_KERNEL or name.startswith("prim::"):
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


class Recorder(TorchDispatchMode):
    """While active, appends to `events`. `expert_rows`: rows per expert of a mixture of experts (balanced routing).

    `device` is the one whose operators the step has: `cuda` or `cpu`.
    """

    def __init__(self, expert_rows=None, device="cuda"):
        super().__init__()
        self.device = device
        self.events, self.expert_rows, self.phase, self.part = [], expert_rows, "forward", ""
        self._ids, self._known, self._next = {}, {}, 0
        self._library = "aten"
        self.compiled = {}              # code that was compiled in an earlier step

    # ---- memory
    def ignore(self, t):
        """This tensor's memory is counted elsewhere (parameters, buffers)."""
        storage = t.untyped_storage()
        self._known[id(storage)] = (storage, None)

    def is_ignored(self, t):
        known = self._known.get(id(t.untyped_storage()))
        return known is not None and known[0] is t.untyped_storage()

    def copy(self, way, t):
        self.events.append(Copy(way, describe(t)))

    def allocation_of(self, t):
        entry = self._ids.get(id(t.untyped_storage()))
        return entry[0] if entry else None

    def see(self, t):
        storage = t.untyped_storage()
        key = id(storage)
        if key in self._known or (key in self._ids and self._ids[key][1]() is storage):
            return
        if not storage.nbytes():
            return
        self._next += 1
        number = self._next
        def gone(_, key=key, number=number):
            entry = self._ids.get(key)
            if entry and entry[0] == number:
                del self._ids[key]
            self.events.append(Release(number))
        size, like = storage.nbytes(), describe(t)
        full = Tensor(like.dtype, like.shape, (False,) * len(like.shape))
        if full.bytes != size:
            full = _padded(t, like.dtype)
            size = full.bytes if 0 <= full.bytes - size < 256 else size
        self._ids[key] = (number, weakref.ref(storage, gone))
        self.events.append(Allocation(number, size, full if full.bytes == size else None))

    # ---- marks
    def enter(self, part, layer=None):
        self.part = f"{self.phase}.{part}"
        self.events.append(Boundary(self.part, layer))

    def gradient(self, name, parameter):
        if parameter.grad is not None:
            self.gradient_of(name, parameter.grad)

    def gradient_of(self, name, tensor):
        self.see(tensor)
        self.events.append(Gradient(self.allocation_of(tensor), name))

    @contextlib.contextmanager
    def inside_compiled(self):
        """What runs inside is launched by generated code: `inductor.` in place of `aten.`."""
        self._library, before = "inductor", self._library
        try:
            yield
        finally:
            self._library = before

    # ---- kernels
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if func is aten._local_scalar_dense.default:            # .item(): there are no data, any answer is as good
            self.events.append(Copy("d2h", describe(args[0])))
            if args[0].dtype == torch.bool:
                return hasattr(args[0], "every")                # "is every token real" is true, "is any token special" is not
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten.equal.default:
            return True
        if func in BY_MASK and any(isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1])):
            return self._by_mask(func, args)
        if func is aten.nonzero.default and self.expert_rows:
            rows = args[0].shape[0] if args[0].dim() == 1 else self.expert_rows
            out = args[0].new_empty((rows, args[0].dim()), dtype=torch.int64)
        else:
            out = func(*args, **kwargs)
        if name == "aten::native_layer_norm" and args[0].dtype != torch.float32:
            out = (out[0], *(x.to(torch.float32) for x in out[1:]))   # CUDA keeps the statistics in fp32
        if name in ("aten::all", "aten::_is_all_true"):
            out.every = True
        self._count(func, args, out)
        inputs = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not is_view(func):
            extra = EXTRAS[name](*args, **kwargs) if name in EXTRAS else ""
            accumulates = ()
            if self.phase == "backward" and func is aten.add.Tensor and _called_by_engine():
                accumulates = args[0]
            library, _, operator = name.replace("foretell::", "aten::").partition("::")
            library = self._library if library == "aten" else library
            self.events.append(Kernel(f"{library}.{operator}", tuple(map(describe, inputs.values())),
                                      tuple(map(describe, outputs)), extra))
            position = len(self.events) - 1
        else:
            accumulates = ()
        for t in outputs:
            self.see(t)
        if isinstance(accumulates, torch.Tensor):
            old = accumulates                                   # a view keeps its base alive, so the sum cannot be in place
            if not old._is_view() and torch._prims_common.is_non_overlapping_and_dense_or_false(old):
                pair = (self.allocation_of(old), self.allocation_of(out))
                self.events[position] = self.events[position]._replace(accumulates=pair)
        if name in WORKSPACES:
            self.events.append(WORKSPACES[name](*args, **kwargs))
        return out

    def _count(self, func, args, out):
        """Remembers how many tokens a sum of marks counts, which is all of them: a count is above 0 and equal to their number."""
        if func is aten.sum.default and not args[0].is_floating_point():
            out.total = getattr(args[0], "total", args[0].numel())
        elif func in (aten.gt.Scalar, aten.eq.Scalar) and hasattr(args[0], "total") and args[1] in (0, args[0].total):
            out.every = True

    def _by_mask(self, func, args):
        """What a mask selects: everything, as no token is padding. The host waits for the count."""
        mask = next(t for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor))
        self.events.append(Copy("d2h", Tensor("i64", (), ())))
        if func in (aten.index.Tensor, aten.masked_select.default):
            rest = args[0].shape[mask.dim():]
            out = args[0].new_empty((mask.numel(), *rest))
            name, inputs = func._schema.name, (args[0], mask)
        else:
            out, name, inputs = args[0], func._schema.name, (args[2], mask)
        self.events.append(Kernel(name.replace("::", "."), tuple(map(describe, inputs)), (describe(out),)))
        self.see(out)
        return out

    def product(self, name, inputs, out):
        """A product that only a CUDA device has (its output is wider than its inputs)."""
        self.events.append(Kernel(name, tuple(map(describe, inputs)), (describe(out),)))

    def launch(self, name, args, kwargs):
        """A Triton kernel was launched."""
        tensors = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        self.events.append(Kernel(f"triton.{name}", tuple(map(describe, tensors.values())), ()))


def log_triton(recorder):
    """Launches of Triton kernels become log lines: the libraries' own code runs, the kernels do not."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction
    Autotuner.best_config = property(lambda self: self.configs[0])     # which one a GPU would choose is not known
    Autotuner.run = lambda self, *a, **k: self.fn.run(*a, **k)
    JITFunction.run = lambda self, *a, grid=None, warmup=False, **k: recorder.launch(self.__name__, a, k)


def in_place_sums(events):
    """Autograd sums a second gradient into the first one in place if nobody else holds the first.

    It does not do so for tensors without data, so the log has a new allocation there, followed at once by the release of
    the old one: rewrite that as the in-place sum which a GPU would run.
    """
    merged, out, i = {}, [], 0
    while i < len(events):
        event = events[i]
        if isinstance(event, Kernel) and event.accumulates:
            old, new = event.accumulates
            j = i + 2 if i + 1 < len(events) and isinstance(events[i + 1], Allocation) and events[i + 1].id == new else None
            k = j
            while k is not None and k < len(events) and isinstance(events[k], Release) and events[k].id != old:
                k += 1
            if k is not None and k < len(events) and isinstance(events[k], Release):
                out.append(event._replace(name="aten.add_", accumulates=()))
                out.extend(events[j:k])
                merged[new] = old
                i = k + 1
                continue
        out.append(event)
        i += 1
    def root(number):
        while number in merged:
            number = merged[number]
        return number
    return [e._replace(id=root(e.id)) if isinstance(e, (Release, Gradient)) else e for e in out]
