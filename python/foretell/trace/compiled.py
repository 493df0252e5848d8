"""`torch.compile` for a step that is traced: AOTAutograd with the min-cut partitioner, and Inductor's code (`inductor`).

A compiled function or module runs as PyTorch's own autograd function; its two generated functions write their kernels into the
log, and keep for the backward pass what the partitioner kept. torchtitan and torchtune compile each layer, nanoGPT and Hugging
Face's Trainer the whole model with its loss: that is cut at the borders of layers, so that layers are alike (`_in_parts`).
"""

import contextlib
import functools
import operator

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import inductor

WHOLE = ("hf", "nanochat", "nanogpt")   # frameworks that compile the whole model
_TENSOR = object()
_layer = None                           # the layer whose forward pass is being traced, if it is checkpointed, and its policy


class Compiled:
    """A function or a module's forward as `torch.compile` would make it. Layers that are alike share one `cache`."""

    def __init__(self, function, recorder, module=None, cache=None, only=None):
        self.function, self.recorder, self.module, self.only = function, recorder, module, only
        self.cache = {} if cache is None else cache

    def tensors(self):
        if self.module is None:
            return {}
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: t for name, t in tensors.items() if self.only is None or name in self.only}

    def __call__(self, *args, **kwargs):
        own = self.tensors()
        flat, spec = tree_flatten((args, kwargs))
        given = [x for x in flat if isinstance(x, torch.Tensor)]
        rest = [_TENSOR if isinstance(x, torch.Tensor) else x for x in flat]
        describe = lambda t: (tuple(t.shape), t.stride(), t.dtype, t.requires_grad)
        key = (spec, tuple(map(str, rest)), tuple(map(describe, [*own.values(), *given])), torch.is_grad_enabled(),
               torch.is_autocast_enabled("cpu"))
        if key not in self.cache:
            self.cache[key] = self._compile(own, given, rest, spec)
        run, out_spec = self.cache[key]
        outs = iter(run(*own.values(), *given))
        shape, rest = out_spec
        return tree_unflatten([next(outs) if r is _TENSOR else r for r in rest], shape)

    def _compile(self, own, given, rest, spec):
        names, out_spec = list(own), []
        def flat_function(*tensors):
            mine, others = dict(zip(names, tensors)), iter(tensors[len(names):])
            args, kwargs = tree_unflatten([next(others) if r is _TENSOR else r for r in rest], spec)
            if self.module is None:
                out = self.function(*args, **kwargs)
            else:
                with torch.nn.utils.stateless._reparametrize_module(self.module, mine, tie_weights=True):
                    out = self.function(*args, **kwargs)
            outs, shape = tree_flatten(out)
            out_spec[:] = [shape, [_TENSOR if isinstance(x, torch.Tensor) else x for x in outs]]
            return tuple(x for x in outs if isinstance(x, torch.Tensor))
        return aot(flat_function, [*own.values(), *given], self.recorder), out_spec


class _Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def aot(function, examples, recorder):
    """A function of tensors, compiled for its example inputs."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import compile_fx
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    inductor.install()
    _stamp_nodes()

    def partition(joint, inputs, **options):
        with V.set_fake_mode(detect_fake_mode(inputs)):
            joint = compile_fx._recursive_joint_graph_passes(joint, skip_invoke_subgraph=True, input_device=torch.device("cpu"))
        return min_cut_rematerialization_partition(joint, inputs, **{**options, "compiler": "inductor"})

    def compiler(is_backward):
        def compile_graph(gm, inputs):
            with _disable_current_modes():                      # the backward pass may be compiled when it first runs
                code = inductor.lower(gm, inputs, is_backward)
            def run(args):
                return code.run(recorder, args)
            run._boxed_call = True
            return run
        return compile_graph

    torch.compiler._is_compiling_flag, before = True, torch.compiler._is_compiling_flag
    try:
        with _disable_current_modes():
            examples = [_like(t) for t in examples]             # what is compiled keeps its examples alive
            return aot_module_simplified(_Function(function), examples, fw_compiler=compiler(False), bw_compiler=compiler(True),
                                         inference_compiler=compiler(False), partition_fn=partition,
                                         decompositions=select_decomp_table())
    finally:
        torch.compiler._is_compiling_flag = before


def _like(t):
    with t.fake_mode if hasattr(t, "fake_mode") else contextlib.nullcontext():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, requires_grad=t.requires_grad)


# ---- checkpoints inside of what is compiled

@functools.lru_cache(None)
def _stamp_nodes():
    """Operators that are traced inside of a checkpointed layer are marked as Dynamo marks them."""
    plain = torch.fx.Graph.create_node
    def create_node(self, op, target, *args, **kwargs):
        node = plain(self, op, target, *args, **kwargs)
        if _layer is not None and op == "call_function":
            number, policy = _layer
            of = node.args[0] if target is operator.getitem else None
            node.meta["ac_graph_id"] = number
            node.meta["recompute"] = of.meta.get("recompute", policy(target)) if of is not None else policy(target)
        return node
    torch.fx.Graph.create_node = create_node


def checkpointed(function, number, make_policy):
    """A layer's forward whose operators are computed again in the backward pass, if the policy says so."""
    def forward(*args, **kwargs):
        global _layer
        _layer = (number, make_policy())
        try:
            return function(*args, **kwargs)
        finally:
            _layer = None
    return forward


def everything():
    from torch.utils.checkpoint import CheckpointPolicy
    return lambda target: CheckpointPolicy.PREFER_RECOMPUTE


def all_but_every_other_product():
    """torchtitan's selective checkpointing: attention and every other matrix product are kept."""
    from torch.utils.checkpoint import CheckpointPolicy
    aten, seen = torch.ops.aten, [0]
    def policy(target):
        kept = target in (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default)
        if target is aten.mm.default:
            seen[0] += 1
            kept = seen[0] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
    return policy


# ---- models

def apply(model, key, recorder, stacks, places):
    """Compiles a model as its framework does. `places` maps the long names of parameters to (layer or None, name in the table)."""
    inside = key["framework"] != "torchtune"                    # whose checkpoints are around what is compiled
    layers = [m for _, ms in stacks.values() for m in ms]
    make_policy = {"none": None, "full": everything, "selective": all_but_every_other_product}[key["checkpoint"]]
    cache = {}
    for number, layer in enumerate(layers):
        inner = getattr(layer, "_checkpoint_wrapped_module", layer)
        function = checkpointed(inner.forward, number, make_policy) if make_policy and inside else inner.forward
        inner.forward = Compiled(function, recorder, inner, cache)
    if key["framework"] in WHOLE:
        rest = {name for name, (layer, _) in places.items() if layer is None}
        model.forward = _in_parts(model, layers, key, recorder, rest)


class _Reached(Exception):
    """The first layer is reached, with these arguments."""


def _in_parts(model, layers, key, recorder, rest):
    """The forward of a model whose code is compiled as a whole: what is before its layers, each layer, and what is behind them.

    So what crosses a layer's border is kept where the whole model's partitioner could compute it again from the layers before.
    """
    whole = model.forward
    def before(*args, **kwargs):
        def stop(*args, **kwargs):
            raise _Reached(args, kwargs)
        with _replaced(layers[:1], stop):
            try:
                whole(*args, **kwargs)
            except _Reached as reached:
                return reached.args
        raise ValueError("the model never calls its first layer")

    def behind(hidden, *args, **kwargs):
        with _replaced(layers, lambda *_, **__: hidden if plain else (hidden,)):
            return whole(*args, **kwargs)

    plain = True
    start, end = (Compiled(f, recorder, model, only=rest) for f in (before, behind))
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=key["precision"] in ("autocast", "mixed"))

    def forward(*args, **kwargs):
        nonlocal plain
        given, options = start(*args, **kwargs)
        hidden, more = given[0], given[1:]
        del given
        with autocast():
            for layer in layers:
                hidden = layer(hidden, *more, **options)
                plain = isinstance(hidden, torch.Tensor)
                hidden = hidden if plain else hidden[0]
        del more, options
        return end(hidden, *args, **kwargs)
    return forward


@contextlib.contextmanager
def _replaced(layers, function):
    """Calls of the layers are calls of the function; the classes' own calls stay marked."""
    kinds = {type(layer) for layer in layers}
    before = {kind: kind.__call__ for kind in kinds}
    chosen = set(map(id, layers))
    for kind, call in before.items():
        kind.__call__ = lambda self, *a, call=call, **k: function(*a, **k) if id(self) in chosen else call(self, *a, **k)
    try:
        yield
    finally:
        for kind, call in before.items():
            kind.__call__ = call
