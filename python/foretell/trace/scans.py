"""Packages of linear attention without a GPU: flash-linear-attention and mamba-ssm are Triton's kernels under Python, which
`log_triton` turns into lines. Of causal-conv1d, whose kernels are CUDA, there are the two calls of one kernel each."""

import contextlib
import importlib.util
import sys
import types

import torch

_LIBRARIES = []
# With one, mamba-ssm sums all heads of a group in one program. With an H100's 132 it divides heads
# of short or few sequences, and needs some megabytes more while it sums up.
MULTIPROCESSORS = 1


# The package whose kernels an architecture's linear attention has.
PACKAGES = {"qwen3_next": "fla", "granite_hybrid": "mamba_ssm", "granite_hybrid_moe": "mamba_ssm"}


def has(architecture):
    """Whether the package that an architecture needs is on the path; without it transformers takes another way."""
    package = PACKAGES.get(architecture)
    return package is None or importlib.util.find_spec(package) is not None


def _define():
    library = torch.library.Library("causal_conv1d", "DEF")
    library.define("causal_conv1d_fwd(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.define("causal_conv1d_bwd(Tensor x, Tensor weight, Tensor? bias, Tensor dout, Tensor(a!) dx, Tensor(b!) dweight, Tensor(c!)? dbias) -> ()")
    library.impl("causal_conv1d_fwd", lambda x, weight, bias: torch.empty_like(x), "Meta")
    library.impl("causal_conv1d_bwd", lambda *_: None, "Meta")
    _LIBRARIES.append(library)


def forward(x, weight, bias, seq_idx, initial_states, final_states, activation):
    """`causal_conv1d_fwd_function`."""
    return torch.ops.causal_conv1d.causal_conv1d_fwd(x, weight, bias)


def backward(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states, activation):
    """`causal_conv1d_bwd_function`."""
    if dout.stride(2) != 1 and dout.stride(1) != 1:
        dout = dout.contiguous()
    dx = torch.empty_like(x) if dx is None else dx
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    dbias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
    torch.ops.causal_conv1d.causal_conv1d_bwd(x, weight, bias, dout, dx, dweight, dbias)
    return dx, dweight.type_as(weight), dbias.type_as(bias) if bias is not None else None, None


class CausalConv1dFn(torch.autograd.Function):
    """Keeps its inputs, and runs the activation in the same kernel."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        return forward(x, weight, bias, None, None, None, True)

    @staticmethod
    def backward(ctx, dout):
        return backward(*ctx.saved_tensors, dout, None, None, None, None, False, True)[:3]


def causal_conv1d_fn(x, weight, bias=None, activation=None):
    return CausalConv1dFn.apply(x, weight, bias)


def install():
    """Before transformers' models are imported, which look for the packages; nothing where there is none of them."""
    if not any(map(has, PACKAGES)):
        return
    _define()
    package, functions = types.ModuleType("causal_conv1d"), types.ModuleType("causal_conv1d.cpp_functions")
    package.causal_conv1d_fn = causal_conv1d_fn
    functions.causal_conv1d_fwd_function, functions.causal_conv1d_bwd_function = forward, backward
    functions.causal_conv1d_update_function = None
    sys.modules |= {"causal_conv1d": package, "causal_conv1d.cpp_functions": functions}
    torch.cuda.device = lambda _: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    with contextlib.suppress(ImportError):
        import mamba_ssm.ops.triton.ssd_combined as combined
        from .older import _Torch
        combined.torch = _Torch()                               # asks for autocast by names that mean CUDA
    # A CPU rounds to what the kernels round to.
    with contextlib.suppress(ImportError):
        import fla.ops.gated_delta_rule                         # noqa: F401
        for name, module in list(sys.modules.items()):
            if name.startswith("fla.") and hasattr(module, "check_shared_mem"):
                module.check_shared_mem = lambda *_: True
