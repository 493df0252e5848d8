"""Makes the CPU take the operators that CUDA would take, where the two allocate differently.

The step is traced with CPU tensors that hold no data. PyTorch chooses some kernels and casts by device; these are replaced
in the dispatcher, so that calls from Python and from C++ are both caught:

- autocast: CUDA runs norms, softmax, powers, sums and losses in fp32, the CPU does not;
- attention: CUDA takes flash attention (half precision, no mask), memory-efficient attention (mask or fp32) or plain
  operators (grouped keys with a mask or in fp32);
- softmax with a cast to fp32, dropout and RMS norm are one kernel each on CUDA.
"""

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
_LIBRARIES = []

FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm group_norm rms_norm cosine_similarity logsumexp dist renorm
frobenius_norm.dim nuclear_norm""".split()
FP32_BY_DTYPE = "softmax.int log_softmax.int cumsum cumprod sum sum.dim_IntList linalg_vector_norm".split()


def _operator(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _without_autocast():
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _fp32(operator):
    up = lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x
    def kernel(*args, **kwargs):
        with _without_autocast():
            return operator(*tree_map(up, args), **tree_map(up, kwargs))
    return kernel


def _fp32_by_dtype(operator):
    def kernel(x, *args, **kwargs):
        with _without_autocast():
            place = 1 if operator in (aten.softmax.int, aten.log_softmax.int) else None
            given = kwargs.get("dtype") or (args[place] if place is not None and len(args) > place else None)
            if given is None and x.dtype in (*HALF, torch.float32):
                args = args[:place] if place is not None else args
                kwargs["dtype"] = torch.float32
            return operator(x, *args, **kwargs)
    return kernel


def _softmax(plain):
    def kernel(x, dim, dtype=None):
        if dtype == torch.float32 and x.dtype in HALF:
            return plain(x, dim, True)                          # the cast happens inside the kernel
        return plain(x if dtype is None else x.to(dtype), dim, False)
    return kernel


def _dropout(x, p, train):
    return aten.native_dropout(x, p, True)[0] if train and p else x


def _rms_norm(x, shape, weight=None, eps=None):
    if torch.compiler.is_compiling():                           # the compiler has its parts
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + (eps or torch.finfo(x.dtype).eps))
        return (y if weight is None else y * weight).to(x.dtype)
    if weight is not None and weight.dtype != x.dtype:          # the fused kernel wants one dtype
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True).add_(eps or torch.finfo(x.dtype).eps))
        return (y * weight).to(x.dtype)
    return _FusedRmsNorm.apply(x, weight)


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's kernel, which the CPU does not have: keeps its input and one fp32 number per row."""

    @staticmethod
    def forward(ctx, x, weight):
        out, scale = torch.ops.foretell._fused_rms_norm(x, weight)
        ctx.save_for_backward(x, scale, weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, scale, weight = ctx.saved_tensors
        dx, dw = torch.ops.foretell._fused_rms_norm_backward(grad, x, scale, weight)
        return dx, dw if weight is not None else None


def _define_fused():
    library = torch.library.Library("foretell", "DEF")
    library.define("_fused_rms_norm(Tensor x, Tensor? weight) -> (Tensor, Tensor)")
    library.define("_fused_rms_norm_backward(Tensor grad, Tensor x, Tensor scale, Tensor? weight) -> (Tensor, Tensor)")
    library.impl("_fused_rms_norm", lambda x, w: (x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)), "Meta")
    library.impl("_fused_rms_norm_backward", lambda g, x, r, w: (x.new_empty(x.shape), x.new_empty(w.shape if w is not None else (0,))), "Meta")
    _LIBRARIES.append(library)


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """`scaled_dot_product_attention` by the rules by which CUDA chooses a kernel."""
    grouped = q.shape[1] != k.shape[1]
    if attn_mask is None and q.dtype in HALF and q.shape[-1] == v.shape[-1]:
        return flash(q, k, v, dropout_p, is_causal, scale)
    if not grouped:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
            attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=True)[0]


def flash(q, k, v, dropout=0.0, causal=True, scale=None):
    """Flash attention of `[b, n, s, d]`; the kernel wants a head width that is a multiple of 8."""
    width = q.shape[-1]
    scale = scale or width ** -0.5
    if width % 8:
        q, k, v = (torch.nn.functional.pad(x, (0, 8 - width % 8)) for x in (q, k, v))
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0][..., :width]


def flash_attention_2(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **_):
    """Hugging Face's `flash_attention_2`: grouped keys as they are, no mask, fp32 inputs cast to half precision."""
    if query.dtype == torch.float32:
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.bfloat16
        query, key, value = query.to(half), key.to(half), value.to(half)
    causal = module.is_causal if is_causal is None else is_causal
    width = value.shape[-1]
    if width != query.shape[-1]:                                # the package wants one width
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        return flash(query, key, value, dropout, causal, scaling).transpose(1, 2)[..., :width], None
    return flash(query, key, value, dropout, causal, scaling).transpose(1, 2), None


def _replace_parameters(module, fn, recurse=True):
    """`nn.Module.to` swaps the data of tensors in place, which tensors without data refuse: replace the tensors."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    for table in (module._parameters, module._buffers):
        for name, old in table.items():
            new = None if old is None else fn(old)
            if new is not None and new is not old:
                table[name] = torch.nn.Parameter(new.detach(), old.requires_grad) if table is module._parameters else new
    return module


def install():
    """Replaces the operators; for the rest of this process."""
    install_models()
    _define_fused()
    library = torch.library.Library("aten", "IMPL")
    _LIBRARIES.append(library)                                  # the replacements live as long as this object
    for names, make in ((FP32, _fp32), (FP32_BY_DTYPE, _fp32_by_dtype)):
        for name in names:
            library.impl(name, make(_operator(name)), "AutocastCPU")
    for name, kernel in {"softmax.int": _softmax(aten._softmax), "log_softmax.int": _softmax(aten._log_softmax),
                         "dropout": _dropout, "rms_norm": _rms_norm, "scaled_dot_product_attention": attention}.items():
        library.impl(name, kernel, "CompositeImplicitAutograd", allow_override=True)
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        # Absent before 4.53: older releases call the package's own function (`older`).
        from transformers import masking_utils                  # noqa: F401
        ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = flash_attention_2
    except ImportError:
        pass


def install_models():
    """Lets models be built of tensors without data, and take the branches of a real step; for the rest of this process."""
    import warnings
    warnings.filterwarnings("ignore")
    torch.nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    torch.nn.Module._apply = _replace_parameters
    try:
        from transformers import PreTrainedModel
        from transformers.utils import import_utils
        PreTrainedModel.initialize_weights = lambda self: None  # there are no data to initialise
        PreTrainedModel._initialize_weights = lambda self, module, *_: None
        import_utils.is_fake_tensor = lambda x: False           # take the branches of a real step, not those of a compiler
    except ImportError:
        pass
