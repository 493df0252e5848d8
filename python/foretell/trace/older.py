"""Older releases of transformers: what their code needs to be traced like the newest one's.

Flash attention is the package's own function there, layers are checkpointed from outside of their
call, and a model asks at its construction whether its attention is installed. `foak` are the fused
kernels of `fms-acceleration-foak`.
"""

import sys

import torch

from . import cuda

RELEASES = ("4.45", "4.48")
# A later release that stands for one of these, for the architectures that came after it.
LATER = {"4.51": ("4.48", ("qwen3_moe",))}


def _installed():
    import importlib.metadata as metadata
    return ".".join(metadata.version("transformers").split(".")[:2])


def release():
    """The installed release as tables' keys name it: `4.45`, or `latest`."""
    version = _installed()
    if version.startswith("4.") and version not in (*RELEASES, *LATER):
        raise SystemExit(f"transformers {version} is not one of the traced releases {', '.join((*RELEASES, *LATER))}")
    return LATER[version][0] if version in LATER else version if version in RELEASES else "latest"


def has(architecture):
    """Whether the tables of an architecture are traced with the installed release."""
    later = {name for _, names in LATER.values() for name in names}
    version = _installed()
    if version in LATER:
        return architecture in LATER[version][1]
    return version not in RELEASES or architecture not in later


def _flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return cuda.flash(q, k, v, dropout_p, causal, softmax_scale).transpose(1, 2)


def install():
    """Makes an older release call `flash_attn_func` without the package, from now on."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils as flash
    flash.flash_attn_func, flash._flash_supports_window_size = _flash_attn_func, True
    PreTrainedModel._autoset_attn_implementation = classmethod(lambda cls, config, *_, **__: config)


def prepare(model):
    """Gives the model's code the function that it imports only where the package is there."""
    from transformers import modeling_flash_attention_utils as flash
    code = sys.modules[type(model).__module__]
    if not hasattr(code, "_flash_attention_forward"):
        code._flash_attention_forward = flash._flash_attention_forward


class _Torch:
    """The module `torch` to code for a CUDA device: what it makes there is made on the CPU."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*size, device=None, **options):
        return torch.empty(*size, **options)

    @staticmethod
    def is_autocast_enabled():
        return torch.is_autocast_enabled("cpu")

    @staticmethod
    def get_autocast_gpu_dtype():
        return torch.get_autocast_dtype("cpu")


def use_foak(model, key):
    """Applies the plugin's rules for full fine-tuning and standard adapters to the model."""
    from fms_acceleration.model_patcher import ModelPatcher
    from fms_acceleration_foak.framework_plugin_fast_kernels import register_foak_model_patch_rules
    loss = {"fused-lce"} if key["kernels"] == "foak-liger" else {"cross-ent", "custom-loss"}
    register_foak_model_patch_rules("auto_gptq", {*loss, "rms", "rope"}, model.config)
    ModelPatcher.patch(model)
    for name, module in list(sys.modules.items()):
        if name.startswith(("fms_acceleration_foak.kernels", "fms_acceleration_foak.fused_ops")) and hasattr(module, "torch"):
            module.torch = _Torch()


def mark_checkpoints(model, marked):
    """Lets `marked(layer, function, args, kwargs)` see a checkpointed layer's whole call."""
    for module in model.modules():
        plain = getattr(module, "_gradient_checkpointing_func", None)
        if plain is not None:
            module._gradient_checkpointing_func = lambda function, *args, plain=plain, **kwargs: marked(
                getattr(function, "func", function).__self__, lambda _, *a, **k: plain(function, *a, **k), args, kwargs)
