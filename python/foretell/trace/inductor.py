"""Inductor's own code for a graph, without a GPU: which kernels it fuses, what it allocates, and when it lets go.

Inductor's decompositions, passes, lowering, scheduler and code generation run as for a CUDA device of stated properties. The
Python function that it writes (`call`) is then run on tensors without data: its buffers are theirs, its kernels become lines of
the log. So fusion, the order of kernels, reuse of buffers and the death of each are Inductor's decisions, not ours.
"""

import ast
import contextlib
import functools
import types

import torch
from torch.utils._pytree import tree_map

from .recorder import DTYPES, Kernel, Tensor, describe

# What decisions depend on besides sizes: how far reductions are split.
DEVICE = dict(type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
              max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32)


def _properties(*_):
    return types.SimpleNamespace(**DEVICE, minor=0, name="NVIDIA H100", total_memory=80 << 30, gcnArchName="")


@functools.lru_cache(None)
def install():
    """Lets Inductor generate code for CUDA on a machine without it; for the rest of this process."""
    import torch._inductor.compile_fx                           # noqa: F401
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, scheduler
    from torch._inductor.codegen import triton as codegen
    from torch._inductor.runtime import hints
    from torch.utils import _triton
    config.shape_padding = False                                # it would measure; the sizes here are multiples of 64
    config.graph_partition = False
    config.compile_threads = 1
    config.fx_graph_cache = config.autotune_local_cache = False
    _triton.has_triton = scheduler.has_triton = lambda *_: True
    _triton.triton_hash_with_backend = lambda *_: ""
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = _properties
    CudaInterface.get_device_properties = staticmethod(_properties)
    CudaInterface.Worker.get_device_properties = staticmethod(_properties)
    fields = {f for f in hints.DeviceProperties._fields}
    hints.DeviceProperties.create = classmethod(lambda cls, device: cls(**{k: v for k, v in DEVICE.items() if k in fields}))

    define = codegen.TritonScheduling.define_kernel
    def defined(self, source, nodes, kernel):
        name = define(self, source, nodes, kernel)
        seen = torch._inductor.virtualized.V.graph.kernels_seen
        if name not in seen:
            seen[name] = _accesses(nodes, kernel)
        return name
    codegen.TritonScheduling.define_kernel = defined


def _accesses(nodes, kernel):
    """What a kernel does with each of its arguments: a list of (reads, writes), numbers of elements; None is all of it."""
    from torch._inductor.dependencies import MemoryDep
    definitions, call, *_ = kernel.args.python_argdefs()
    seen = {"reads": {}, "writes": {}}
    for node in nodes:
        for way, places in seen.items():
            for dep in getattr(getattr(node, "read_writes", None), way, ()):
                place, size = (str(dep.index), int(dep.get_numel())) if isinstance(dep, MemoryDep) else ("", None)
                places.setdefault(dep.name, {})[place] = size
    def elements(names, way, otherwise):
        sizes = [size for name in names for size in seen[way].get(name, {}).values()]
        if not sizes or None in sizes:
            return None if sizes else otherwise
        return sum(n for n in sizes if n > 64) or sum(sizes)    # without single elements at the edges
    shared = {b.inner_name: b.other_names for b in kernel.args.inplace_buffers.values() if hasattr(b, "other_names")}
    answer = []
    for definition, name in zip(definitions, call):
        inner = getattr(definition, "name", str(definition))
        if inner.startswith("in_out_ptr"):                      # a buffer that takes the place of another
            names = shared.get(inner, [name])
            made = set(seen["writes"])
            answer.append((elements([n for n in names if n not in made], "reads", 0), elements(names, "writes", None)))
        elif inner.startswith("in_ptr"):
            answer.append((elements([name], "reads", None), 0))
        elif inner.startswith(("out_ptr", "ws_ptr")):
            answer.append((0, elements([name], "writes", None)))
        else:
            answer.append(None)
    return answer


def _moved(gm):
    """The graph for a CUDA device: operators that make tensors make them there."""
    there = lambda x: torch.device("cuda", 0) if isinstance(x, torch.device) and x.type == "cpu" else x
    for node in gm.graph.nodes:
        node.args, node.kwargs = tree_map(there, node.args), tree_map(there, node.kwargs)
    gm.recompile()
    return gm


def lower(gm, examples, is_backward):
    """-> `Code` of an ATen graph whose example inputs are tensors without data."""
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    install()
    gm = _moved(gm)
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") if isinstance(t, torch.Tensor) else t
                  for t in examples]
    with torch.no_grad(), mode:
        view_to_reshape(gm)
        torch._inductor.compile_fx.fake_tensor_prop(gm, inputs)
        compile_fx._recursive_record_original_output_strides(gm)
        with V.set_fake_mode(mode):
            compile_fx._recursive_post_grad_passes(gm, is_inference=False)
    with V.set_fake_mode(mode), torch.no_grad():
        graph = GraphLowering(gm, example_inputs=inputs, is_inference=False, is_backward=is_backward, graph_id=0)
        graph.kernels_seen = {}
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            made = graph.codegen()
    source = made[0]

    return Code(getattr(source, "value", source), graph.kernels_seen)


class Code:
    """A generated function, which runs on tensors without data."""

    def __init__(self, source, kernels):
        self.kernels = kernels
        function = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "call")
        function.args.args = [a for a in function.args.args if a.arg != "self"]
        body = []
        for statement in function.body:
            body += statement.body if isinstance(statement, ast.With) else [statement]
        function.body = [s for s in body if not _is_of_device(s)]
        module = ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[]))
        self._compiled = compile(module, "<inductor>", "exec")

    def run(self, recorder, args):
        space = _namespace(recorder, self.kernels)
        exec(self._compiled, space)
        recorder.events.append(Kernel("inductor.call", (), ()))
        with recorder.inside_compiled():
            return space["call"](args)


def _is_of_device(statement):
    text = ast.unparse(statement)
    return text.startswith(("torch.cuda.", "assert_", "stream0 = "))


class _Fused:
    """A kernel that Inductor wrote."""

    def __init__(self, recorder, accesses):
        self.recorder, self.accesses = recorder, accesses

    def run(self, *args, stream=None, **_):
        ins, outs = [], []
        for t, access in zip(args, self.accesses):
            if not isinstance(t, torch.Tensor) or access is None:
                continue
            for count, side in zip(access, (ins, outs)):
                if count != 0:
                    whole = _distinct(t)
                    side.append(Tensor(DTYPES[t.dtype], (whole if count is None else min(count, whole),), (False,)))
        self.recorder.events.append(Kernel("inductor.fused", tuple(ins), tuple(outs)))


def _distinct(t):
    count = 1
    for n, stride in zip(t.shape, t.stride()):
        count *= 1 if stride == 0 else n
    return count


class _Extern:
    """Kernels that are called with their output."""

    def __init__(self, recorder):
        self.recorder = recorder

    def __getattr__(self, name):
        def call(*args, out=None, **_):
            tensors, made = tuple(describe(t) for t in args if isinstance(t, torch.Tensor)), (describe(out),)
            if name == "_mm_plus_mm":                           # two kernels, the second adds to the first's output
                self.recorder.events.append(Kernel("inductor.mm", tensors[:2], made))
                self.recorder.events.append(Kernel("inductor.addmm", made + tensors[2:], made))
            else:
                self.recorder.events.append(Kernel(f"inductor.{name}", tensors, made))
        return call


def _namespace(recorder, kernels):
    """What the generated function may call."""
    reinterpret = lambda t, size, stride, offset=0: torch.as_strided(t, size, stride, t.storage_offset() + offset)
    empty = lambda size, stride, dtype, *_: torch.empty_strided(size, stride, dtype=dtype)
    space = {"torch": torch, "aten": torch.ops.aten, "inductor_ops": torch.ops.inductor, "reinterpret_tensor": reinterpret,
             "empty_strided_cuda": empty, "empty_strided_cpu": empty, "stream0": None, "device": torch.device,
             "get_raw_stream": lambda *_: None, "extern_kernels": _Extern(recorder), "rand_strided": empty, "math": __import__("math")}
    space |= {name: _Fused(recorder, accesses) for name, accesses in kernels.items()}
    return space
