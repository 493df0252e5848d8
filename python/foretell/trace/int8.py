"""8-bit base weights as bitsandbytes keeps them (`Linear8bitLt`, LLM.int8): one scale for each row of the weight.

On processors training makes the weight in the input's format in each call (`MatMul8bitFp`), which is traced as it is.
On CUDA the product of eight-bit numbers leaves out the columns of the input that have an outlier; these are multiplied in the
input's own format. Which columns they are is read from the device in every call. Steps as in `MatMul8bitLt` of
bitsandbytes 0.50 and its CUDA operators.
"""

import torch
from torch import nn

from . import qlora

THRESHOLD = 6.0
# Columns with outliers: from 6.7 billion parameters on, about six in every layer (Dettmers et al.
# 2022, section 4).
OUTLIERS = 6
_LIBRARIES = []


def _define():
    """The CUDA kernels that bitsandbytes has no operator of its own for, and `nonzero` with a known number of results."""
    ours = torch.library.Library("foretell", "FRAGMENT")
    ours.define("nonzero(Tensor x) -> Tensor")
    ours.impl("nonzero", lambda x: x.new_empty((OUTLIERS, 1), dtype=torch.int64), "Meta")
    theirs = torch.library.Library("bitsandbytes", "FRAGMENT")
    theirs.define("int8_vector_quant(Tensor x) -> (Tensor, Tensor)")
    theirs.impl("int8_vector_quant", lambda x: (x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)),
                "Meta")
    _LIBRARIES.extend([ours, theirs])


class _Product(torch.autograd.Function):
    """`x @ weight.T`; the input is kept for the backward, which makes the weight in the input's format anew."""

    @staticmethod
    def forward(ctx, x, weight, scales, bias):
        ctx.shape, ctx.dtype = x.shape, x.dtype
        a = x.reshape(-1, x.shape[-1])
        half = a.to(torch.float16)
        outliers = half.abs() >= THRESHOLD
        outliers.any().item()
        columns = torch.ops.foretell.nonzero(outliers.any(dim=0)).view(-1)
        quantised, rows = torch.ops.bitsandbytes.int8_vector_quant(half)
        quantised[:, columns] = 0
        del half, outliers
        kept = a[:, columns].contiguous()
        part = (weight[:, columns].contiguous() * scales.view(-1, 1) * 7.874e-3).to(a.dtype).t()
        whole = torch.ops.bitsandbytes.int8_linear_matmul.default(quantised, weight)
        output = torch.ops.bitsandbytes.int8_mm_dequant.default(whole, rows, scales, dtype=torch.float16, bias=None).to(a.dtype)
        del whole
        if bias is not None:
            output.add_(bias)
        output = output.addmm(kept, part)
        ctx.weight, ctx.scales, ctx.tensors = weight, scales, (kept, a, columns)
        return output.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        weight = ctx.weight.to(ctx.dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(grad.to(ctx.dtype), weight).view(ctx.shape), None, None, None


def _quantised(linear):
    from bitsandbytes import MatmulLtState, nn as bnb
    new = bnb.Linear8bitLt.__new__(bnb.Linear8bitLt)
    nn.Module.__init__(new)
    new.in_features, new.out_features, new.bias, new.index = linear.in_features, linear.out_features, linear.bias, None
    new.weight = nn.Parameter(torch.zeros(linear.weight.shape, dtype=torch.int8), requires_grad=False)
    new.register_buffer("scales", torch.zeros(linear.out_features), persistent=False)
    new.state = MatmulLtState()
    new.state.threshold, new.state.has_fp16_weights = THRESHOLD, False
    return new


def real(model, is_sharded=False):
    """The model with bitsandbytes' own layers and data, as transformers loads it with `load_in_8bit`, prepared by peft."""
    from bitsandbytes import nn as bnb
    for module, name, child in qlora.linear_layers(model):
        if not isinstance(child, nn.Linear):
            raise SystemExit("frozen weights of 8 bits are run here in `nn.Linear` alone, which this model (`Conv1D`) lacks")
        new = bnb.Linear8bitLt(1, 1, False, has_fp16_weights=False, threshold=THRESHOLD)
        new.in_features, new.out_features, new.bias = child.in_features, child.out_features, child.bias
        new.weight = bnb.Int8Params(child.weight.data, requires_grad=False, has_fp16_weights=False).to("cpu")
        setattr(module, name, new)
    return qlora.prepared(model, "is_loaded_in_8bit", is_sharded)


def quantise(model, device="cuda", is_sharded=False):
    """All linear layers but the head. Everything else is in fp32, as `prepare_model_for_kbit_training` leaves it."""
    import bitsandbytes
    if device == "cuda":
        _define()
        bitsandbytes.nn.Linear8bitLt.forward = lambda self, x: _Product.apply(x, self.weight, self.scales, self.bias)
    else:
        from bitsandbytes.autograd._functions import MatMul8bitFp
        bitsandbytes.nn.Linear8bitLt.forward = lambda self, x: MatMul8bitFp.apply(x, self.weight, None, self.bias, self.state)
    for module, name, child in qlora.linear_layers(model):
        if not isinstance(child, nn.Linear):
            continue
        new = _quantised(child)
        new.state.CB, new.state.SCB = new.weight, new.scales
        setattr(module, name, new)
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                wide = p.float() if p.dtype in (torch.bfloat16, torch.float16) else p
                module._parameters[name] = nn.Parameter(wide.detach(), requires_grad=False)
    model.is_loaded_in_8bit = True
    return model
