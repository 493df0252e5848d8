"""Logs which operator reads what another one made: the forward graph of a step, as aten operators.

Tensors have no data, so identity decides: a tensor is the value that was last written to its memory. A tensor that views
the memory of another one, and that no recorded operator made, is recorded as a view of it. Writing in place makes a new
value of the same memory. Only what is recorded here is known later: shapes, number formats, the module that an operator
ran in, whether gradients were off, and FLOPs by PyTorch's own formulas.
"""

import weakref

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .recorder import DTYPES, Recorder, is_view

aten = torch.ops.aten
# Operators that write all of their first operand, whatever it was.
OVERWRITES = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_",
              "aten::bernoulli_", "aten::exponential_", "aten::set_"}
# Arguments that are no tensors and that costs depend on, by operator: name and position.
ARGUMENTS = {
    "aten::convolution": {"stride": 3, "padding": 4, "dilation": 5, "transposed": 6, "groups": 8},
    "aten::max_pool2d_with_indices": {"size": 1, "stride": 2, "padding": 3, "dilation": 4, "partial": 5},
    "aten::_scaled_dot_product_flash_attention": {"causal": 4},
    "aten::_scaled_dot_product_efficient_attention": {"causal": 6},
    "aten::_softmax": {"axis": 1}, "aten::_log_softmax": {"axis": 1}, "aten::native_dropout": {"rate": 1},
    "aten::mean": {"axes": 1}, "aten::permute": {"axes": 1}, "aten::transpose": {"first": 1, "second": 2},
    "aten::t": {}, "aten::native_group_norm": {"groups": 6},
}
DEFAULTS = {"size": [], "stride": [], "padding": [0, 0], "dilation": [1, 1], "partial": False, "causal": False, "rate": 0.0,
            "axes": [], "groups": 1, "transposed": False}


def flops_of(func, args, kwargs, out):
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


class GraphRecorder(Recorder):
    """A `Recorder` that also fills `values` and `operators`. `modules` are those that run at the moment."""

    def __init__(self):
        super().__init__()
        self.values, self.operators, self.modules, self.losses = [], [], [], []
        self.flops = {"forward": 0, "backward": 0}
        self.checkpoints, self.warnings, self.is_over = [], {}, False
        self.grads = []                                         # whether gradients were on as each of `modules` began
        self._tensors, self._memory, self._own = {}, {}, 0

    # ---- values
    def value(self, t, **facts):
        self.values.append({"shape": tuple(t.shape), "dtype": DTYPES.get(t.dtype, "f32"), **facts})
        return len(self.values) - 1

    def bind(self, t, number):
        """From now on the tensor is this value."""
        storage = t.untyped_storage()
        key = storage._cdata
        known = self._memory.get(key)
        if known is None or known["storage"]() is not storage:
            known = self._memory[key] = {"storage": weakref.ref(storage), "value": number, "version": 0}
        self._tensors[id(t)] = (weakref.ref(t), number, known["version"])

    def find(self, t):
        """The value that a tensor is now."""
        storage = t.untyped_storage()
        known = self._memory.get(storage._cdata)
        if known is not None and known["storage"]() is not storage:
            known = None
        entry = self._tensors.get(id(t))
        current = self.values[known["value"]] if known is not None else None
        if isinstance(t, torch.nn.Parameter) or known is None and t.is_leaf and t.requires_grad:
            if current is None or current["made"] != "parameter":
                number = self.value(t, made="parameter", tensor=weakref.ref(t), trained=t.requires_grad)
                if known is not None:                           # it was initialised in place before
                    known["value"] = number
                    known["version"] += 1
                self.bind(t, number)
                return number
            if current["shape"] == tuple(t.shape):
                return known["value"]
        elif entry is not None and entry[0]() is t and known is not None and entry[2] == known["version"]:
            return entry[1]
        if known is None:
            number = self.value(t, made="given", tensor=weakref.ref(t))
        else:
            base = self.values[known["value"]]
            if base["shape"] == tuple(t.shape):
                number = known["value"]
            else:
                number = self.value(t, made="operator")
                self._operator("aten.view", [known["value"]], [number])
        self.bind(t, number)
        return number

    def _operator(self, name, reads, writes, **facts):
        in_checkpoint = self.checkpoints and self.checkpoints[-1]
        operator = {"op": name, "in": reads, "out": writes, "modules": tuple(id(m) for m in self.modules)}
        if self.checkpoints:
            operator["checkpoint"] = in_checkpoint
        elif not all(self.grads):
            operator["no_grad"] = True
        operator.update(facts)
        self.operators.append(operator)

    # ---- operators
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.is_over or self.phase != "forward" or self.part == "forward.optimizer":
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if self.phase == "backward" and not self.is_over:
                self.flops["backward"] += flops_of(func, args, kwargs, out)
            return out
        name = func._schema.name
        written = [a for a in _written(func, args, kwargs)]
        whole = name in OVERWRITES and written and _fills(written[0])
        reads = []
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor) and not (whole and t is written[0]):
                number = self.find(t)
                if number not in reads:
                    reads.append(number)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        flops = flops_of(func, args, kwargs, out)
        self.flops["forward"] += flops
        if func is aten._local_scalar_dense.default:
            self.note("a value of a tensor is read (`.item()`, `if tensor:`)")
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        facts = {"flops": flops} if flops else {}
        chosen = {k: _plain(args[i] if len(args) > i else DEFAULTS.get(k)) for k, i in ARGUMENTS.get(name, {}).items()}
        if chosen:
            facts["args"] = chosen
        if is_view(func) and not written:
            facts["view"] = True
        if written:
            self._write(name, written, reads, facts)
            return out
        if name in ("aten::detach", "aten::alias", "aten::lift_fresh") and reads:
            for t in outputs:
                self.bind(t, reads[0])
            return out
        numbers = []
        for t in outputs:
            numbers.append(self.value(t, made="operator"))
            self.bind(t, numbers[-1])
        if numbers:
            self._operator(name.replace("::", "."), reads, numbers, **facts)
        return out

    def _write(self, name, written, reads, facts):
        """Operators in place: the memory has a new value, and with it every tensor that views it."""
        for t in written:
            storage = t.untyped_storage()
            if isinstance(t, torch.nn.Parameter):
                self.find(t)
            known = self._memory.get(storage._cdata)
            if known is None or known["storage"]() is not storage:
                self.bind(t, self.value(t, made="operator"))
                self._operator("aten.empty", [], [self._tensors[id(t)][1]])
                known = self._memory[storage._cdata]
            base = self.values[known["value"]]
            if base["made"] == "parameter":
                continue
            is_part = not _fills(t) or base["shape"] != tuple(t.shape)
            shape = base["shape"] if is_part and not _fills(t) else tuple(t.shape)
            self.values.append({"shape": shape, "dtype": DTYPES.get(t.dtype, "f32"), "made": "operator"})
            number = len(self.values) - 1
            if not _fills(t) and known["value"] not in reads:
                reads = [known["value"], *reads]
            self._operator(name.replace("::", "."), reads, [number], **facts)
            known["value"] = number
            known["version"] += 1
            if shape == tuple(t.shape):
                self._tensors[id(t)] = (weakref.ref(t), number, known["version"])

    def launch(self, name, args, kwargs):
        """A Triton kernel writes the tensors that nothing has written before, and reads the others."""
        super().launch(name, args, kwargs)
        if self.is_over or self.phase != "forward":
            return
        tensors = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        numbers = {key: self.find(t) for key, t in tensors.items()}
        makers = {v: o for o in self.operators for v in o["out"]}
        fresh = [t for key, t in tensors.items() if makers.get(numbers[key], {}).get("op", "").startswith(("aten.empty", "aten.new_empty"))]
        reads = [n for key, n in numbers.items() if not any(tensors[key] is t for t in fresh)]
        for t in fresh:
            self._write(f"triton::{name}", [t], reads, {})

    def note(self, what):
        where = self.modules[-1] if self.modules else None
        self.warnings.setdefault(what, []).append((len(self.operators), id(where) if where is not None else None))

    def _by_mask(self, func, args):
        self.note("a mask selects elements: counted as if it selected all of them")
        return super()._by_mask(func, args)

    def loss(self, t):
        if not self.is_over:
            self.losses.append((self.find(t), len(self.operators)))


def _written(func, args, kwargs):
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (t for t in tree_leaves(given) if isinstance(t, torch.Tensor))


def _fills(t):
    return t.numel() * t.element_size() == t.untyped_storage().nbytes()


def _plain(x):
    if isinstance(x, (list, tuple)):
        return [_plain(y) for y in x]
    return x if isinstance(x, (bool, int, float)) or x is None else str(x)
