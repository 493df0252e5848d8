"""4-bit base weights as bitsandbytes keeps them, for QLoRA: packed weights, block scales that are quantised again.

Every use of a weight makes its bf16 copy anew, in the forward and in the backward. The newest bitsandbytes does the same
inside one operator when there are as many rows as in training: on CUDA its parts are traced, on processors the operator
(`gemm_4bit`), as that is what can be timed there.
"""

import torch
from torch import nn

BLOCK, OUTER_BLOCK = 64, 256


class _Product(torch.autograd.Function):
    """`x @ weight.T`; only the packed weight is kept for the backward."""

    @staticmethod
    def forward(ctx, x, packed, bias, state):
        from bitsandbytes import functional
        output = torch.nn.functional.linear(x, functional.dequantize_4bit(packed, state).to(x.dtype), bias)
        ctx.state, ctx.packed = state, packed
        return output

    @staticmethod
    def backward(ctx, grad):
        from bitsandbytes import functional
        return torch.matmul(grad, functional.dequantize_4bit(ctx.packed, ctx.state).to(grad.dtype)), None, None, None


def _quantised(linear, computed):
    """The layer in four bits, without data; `computed` is the format of its products."""
    from bitsandbytes import functional, nn as bnb
    # GPT-2's `Conv1D` keeps its weight transposed; its four bits are those of a linear layer.
    rows, columns = linear.weight.shape if isinstance(linear, nn.Linear) else linear.weight.shape[::-1]
    numbers = rows * columns
    blocks = -(-numbers // BLOCK)
    outer = functional.QuantState(absmax=torch.zeros(-(-blocks // OUTER_BLOCK)), code=torch.zeros(256), blocksize=OUTER_BLOCK,
                                  dtype=torch.float32)
    state = functional.QuantState(absmax=torch.zeros(blocks, dtype=torch.uint8), shape=torch.Size((rows, columns)),
                                  code=torch.zeros(16), blocksize=BLOCK, quant_type="nf4", dtype=computed,
                                  offset=torch.zeros(()), state2=outer)
    new = bnb.Linear4bit.__new__(bnb.Linear4bit)
    nn.Module.__init__(new)
    new.in_features, new.out_features, new.bias = columns, rows, linear.bias
    new.weight = nn.Parameter(torch.zeros((numbers + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
    new.weight.quant_state, new.weight.compress_statistics, new.weight.quant_type = state, True, "nf4"
    new.compute_dtype, new.compute_type_is_set, new.quant_state, new.quant_storage = computed, True, state, torch.uint8
    new.support_avx512bf16_for_cpu = False
    for name, tensor in (("absmax", state.absmax), ("absmax_absmax", outer.absmax)):
        new.register_buffer(name, tensor, persistent=False)
    return new


def real(model, is_sharded=False):
    """The model with bitsandbytes' own layers and data, as transformers loads it with `load_in_4bit`, NF4, double
    quantisation, and products in the format of the stored weights; then prepared by peft, except for TRL's trainers
    and FSDP (`is_sharded`), which leave the other weights as they are stored."""
    from bitsandbytes import nn as bnb
    from transformers.pytorch_utils import Conv1D
    for module, name, child in linear_layers(model):
        columns, rows = (child.in_features, child.out_features) if isinstance(child, nn.Linear) else child.weight.shape
        new = bnb.Linear4bit(1, 1, False, child.weight.dtype, True, "nf4")
        new.in_features, new.out_features, new.bias = columns, rows, child.bias
        weight = child.weight.data.t().contiguous() if isinstance(child, Conv1D) else child.weight.data
        new.weight = bnb.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=new).to("cpu")
        setattr(module, name, new)
    return prepared(model, "is_loaded_in_4bit", is_sharded)


def linear_layers(model):
    """Every linear layer but the head: `(parent, name, layer)`."""
    from transformers.pytorch_utils import Conv1D
    head = model.get_output_embeddings() or getattr(model, "score", None)
    return [(module, name, child) for module in list(model.modules()) for name, child in list(module.named_children())
            if isinstance(child, (nn.Linear, Conv1D)) and child is not head]


def prepared(model, mark, is_sharded):
    """The model marked as quantised, and with all weights frozen: by peft's preparation, or else by hand."""
    from peft import prepare_model_for_kbit_training
    setattr(model, mark, True)
    model.config._pre_quantization_dtype = model.dtype
    if is_sharded:
        return model.requires_grad_(False)
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def quantise(model, device="cuda", is_sharded=False):
    """All linear layers but the head. Everything else is in fp32, as `prepare_model_for_kbit_training` leaves it, or in
    the format of the stored weights for FSDP, which shards tensors of one format together (`bnb_4bit_quant_storage`).
    The weights of all experts of a layer, which release 5 keeps in one parameter, belong to everything else."""
    import bitsandbytes
    if device == "cuda":
        bitsandbytes.matmul_4bit = lambda x, packed, bias=None, quant_state=None: _Product.apply(x, packed, bias, quant_state)
    for module, name, child in linear_layers(model):
        setattr(module, name, _quantised(child, torch.bfloat16 if device == "cuda" else child.weight.dtype))
    for parameter in model.parameters():
        parameter.requires_grad = False
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and not is_sharded and p.dtype in (torch.bfloat16, torch.float16):
                module._parameters[name] = nn.Parameter(p.float(), requires_grad=False)
        if isinstance(module, bitsandbytes.nn.Linear4bit) and module.bias is not None:      # the first call casts it for good
            module.bias = nn.Parameter(module.bias.to(module.compute_dtype), requires_grad=False)
    model.is_loaded_in_4bit = True
    model.config._pre_quantization_dtype = torch.bfloat16       # older releases cast queries to it, not to the format of packed weights
    return model


def formulas(sizes):
    """Sizes of the block scales of linear layers: value -> formula."""
    found = {}
    for product in ("h*n*d", "h*k*d", "f*h", "h*h", "3*h*h", "m*h", "e*h", "E*h", "h"):
        value = 1
        for factor in product.split("*"):
            value *= int(factor) if factor.isdigit() else sizes.get(factor, 0)
        if value:
            found[-(-value // BLOCK)] = f"ceil({product}/{BLOCK})"
            found[-(-value // (BLOCK * OUTER_BLOCK))] = f"ceil({product}/{BLOCK * OUTER_BLOCK})"
            found[(value + 1) // 2] = f"ceil({product}/2)"
    return found
