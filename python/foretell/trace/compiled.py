"""`torch.compile` for a step that is traced: AOTAutograd with the min-cut partitioner, and Inductor's code (`inductor`).

A compiled function or module runs as PyTorch's own autograd function; its two generated functions write their kernels into the
log, and keep for the backward pass what the partitioner kept. torchtitan and torchtune compile each layer, nanoGPT and Hugging
Face's Trainer the whole model with its loss; then the statements of the generated functions are cut into layers.
"""

import ast
import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import inductor

WHOLE = ("hf", "nanochat", "nanogpt")               # frameworks that compile the whole model
_TENSOR = object()
_layer = None                           # the layer whose forward pass is being traced, if it is checkpointed, and its policy


class Compiled:
    """A function or a module's forward as `torch.compile` would make it. Layers that are alike share one `cache`."""

    def __init__(self, function, recorder, module=None, cache=None, cut=None):
        self.function, self.recorder, self.module, self.cut = function, recorder, module, cut
        self.cache = {} if cache is None else cache

    def tensors(self):
        if self.module is None:
            return {}
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

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
        return tree_unflatten(run(*own.values(), *given), out_spec[0])

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
            outs, out_spec[:] = (lambda pair: (pair[0], [pair[1]]))(tree_flatten(out))
            return tuple(outs)
        return aot(flat_function, [*own.values(), *given], self.recorder, names, self.cut), out_spec


class _Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def aot(function, examples, recorder, names=(), cut=None):
    """A function of tensors, compiled for its example inputs."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    inductor.install()
    _stamp_nodes()

    def partition(joint, inputs, **options):
        joint = compile_fx._recursive_joint_graph_passes(joint, skip_invoke_subgraph=True, input_device=torch.device("cpu"))
        return min_cut_rematerialization_partition(joint, inputs, **{**options, "compiler": "inductor"})

    def compiler(is_backward):
        def compile_graph(gm, inputs):
            code = inductor.lower(gm, inputs, is_backward)
            marks = cut(code, names, is_backward) if cut else None
            def run(args):
                return code.run(recorder, args, marks)
            run._boxed_call = True
            return run
        return compile_graph

    torch.compiler._is_compiling_flag, before = True, torch.compiler._is_compiling_flag
    try:
        with _disable_current_modes():
            return aot_module_simplified(_Function(function), examples, fw_compiler=compiler(False), bw_compiler=compiler(True),
                                         inference_compiler=compiler(False), partition_fn=partition,
                                         decompositions=select_decomp_table())
    finally:
        torch.compiler._is_compiling_flag = before


# ---- checkpoints inside of what is compiled

@functools.lru_cache(None)
def _stamp_nodes():
    """Operators that are traced inside of a checkpointed layer are marked as Dynamo marks them."""
    plain = torch.fx.Graph.create_node
    def create_node(self, op, target, *args, **kwargs):
        node = plain(self, op, target, *args, **kwargs)
        if _layer is not None and op == "call_function":
            number, policy = _layer
            node.meta["ac_graph_id"], node.meta["recompute"] = number, policy(target)
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
    return lambda operator: CheckpointPolicy.PREFER_RECOMPUTE


def all_but_every_other_product():
    """torchtitan's selective checkpointing: attention and every other matrix product are kept."""
    from torch.utils.checkpoint import CheckpointPolicy
    aten, seen = torch.ops.aten, [0]
    def policy(operator):
        kept = operator in (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default)
        if operator is aten.mm.default:
            seen[0] += 1
            kept = seen[0] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
    return policy


# ---- models

def is_whole(key):
    return key["compiled"] == "inductor" and key["framework"] in WHOLE


def apply(model, key, recorder, stacks, parameters):
    """Compiles a model as its framework does. `parameters` maps long names to (layer or None, name in the table)."""
    inside = key["framework"] != "torchtune"                    # whose checkpoints are around what is compiled
    layers = [m for _, ms in stacks.values() for m in ms]
    make_policy = {"none": None, "full": everything, "selective": all_but_every_other_product}[key["checkpoint"]]
    if make_policy and inside:
        for number, layer in enumerate(layers):
            layer.forward = checkpointed(layer.forward, number, make_policy)
    if is_whole(key):
        model.forward = Compiled(model.forward, recorder, model, cut=cutting(recorder, parameters, len(layers)))
        return
    cache = {}
    for layer in layers:
        inner = getattr(layer, "_checkpoint_wrapped_module", layer)
        inner.forward = Compiled(inner.forward, recorder, inner, cache)


def cutting(recorder, parameters, layers):
    """Cuts a whole model's generated functions into the parts of a table.

    A layer's part begins with the first statement that reads one of its parameters, or names the gradient of one.
    """
    def cut(code, names, is_backward):
        owner = {f"primals_{i + 1}": parameters[name] for i, name in enumerate(names) if name in parameters}
        gradients = {}
        if is_backward:
            outputs = zip(code.outputs(), names)
            gradients = {name: parameters[of] for name, of in outputs if name is not None and of in parameters}
        owner |= gradients
        todo, is_over = list(range(layers)), False
        if is_backward:
            todo.reverse()
        marks, last_use = {}, {}
        for i, statement in enumerate(code.statements[:-1]):
            used = code.names(statement)
            last_use |= {name: i for name in used & set(gradients)}
            if isinstance(statement, ast.Delete) or "args" in used:
                continue
            touched = {owner[n][0] for n in used if n in owner}
            if todo and todo[0] in touched:
                marks.setdefault(i, []).append(functools.partial(_enter, recorder, "layer", todo.pop(0)))
            elif not todo and not is_over and None in touched:
                is_over = True
                marks.setdefault(i, []).append(functools.partial(_enter, recorder, "end", None))
        for name, i in last_use.items():
            marks.setdefault(i + 1, []).insert(0, functools.partial(_gradient, recorder, name, gradients[name][1]))
        return {i: (lambda names, calls=calls: [call(names) for call in calls]) for i, calls in marks.items()}
    return cut


def _enter(recorder, part, layer, _):
    recorder.enter(part, layer)


def _gradient(recorder, name, parameter, names):
    recorder.gradient_of(parameter, names[name])
