"""The models that are traced, built from the framework's own classes at the sizes of a probe.

`ARCHITECTURES[name]` is `(family, symbols, options)`: the symbols that the architecture has, and how its configuration
names them.
"""

import torch

from . import int8, losses, older, plain, qlora, tune
from . import sizes as sizes_

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LLAMA = "b s h n k d f v"


class Architecture:
    """How to build one architecture. `config` maps resolved sizes to keyword arguments of its Hugging Face configuration."""

    def __init__(self, symbols, config, kind=None, task="causal", tied_width=False, atoms=(), constants=(), inputs="ids",
                 grouped=True, experts=False, attention=ATTENTION, make=None, loss=None, layered=True,
                 alternating=False, before=0, period=1):
        self.symbols, self.config, self.kind, self.task = symbols.split(), config, kind, task
        self.tied_width, self.atoms, self.constants, self.inputs = tied_width, atoms, constants, inputs
        self.grouped, self.experts, self.attention = grouped, experts, attention
        self.make, self.loss, self.layered, self.alternating = make, loss, layered, alternating
        # Layers of another kind before a table's first one, and layers that are one of a table's.
        self.before, self.period = before, period

    def sizes(self, base, key):
        """The resolved sizes of a model whose independent sizes are `base`."""
        full = sizes_.resolve(base, self.tied_width)
        names = self.symbols + (["r"] if key["adapter"] != "none" else [])
        sizes = {s: full[s] for s in names}
        if key["loss"] == "chunked" or key["loss"] in losses.FUSED:     # the last chunk is shorter
            sizes |= sizes_.chunks(sizes["b"] * (sizes["s"] - 1), full["c"])
        elif key["loss"] == "trl":
            sizes |= sizes_.chunks(sizes["b"] * sizes["s"], full["c"])
        elif key["kernels"].endswith("liger"):                  # foak's drops the last position
            rows = sizes["b"] * (sizes["s"] - 1 if key["kernels"] == "foak-liger" else sizes["s"])
            sizes |= sizes_.liger_chunks(rows, sizes["v"], sizes["h"])
        return sizes


def _llama(z, layers, **more):
    return dict(hidden_size=z["h"], num_hidden_layers=layers, num_attention_heads=z["n"], num_key_value_heads=z["k"],
                head_dim=z["d"], intermediate_size=z["f"], vocab_size=z["v"], max_position_embeddings=z["s"], **more)


def _gpt2(z, layers, **more):
    return dict(n_embd=z["h"], n_layer=layers, n_head=z["n"], n_inner=z["f"], vocab_size=z["v"], n_positions=z["p"], **more)


def _bert(z, layers, **more):
    return dict(hidden_size=z["h"], num_hidden_layers=layers, num_attention_heads=z["n"], intermediate_size=z["f"],
                vocab_size=z["v"], **more)


def _dropout_free(z, layers):
    return _gpt2(z, layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def _granite_hybrid(z, layers, **more):
    """Granite 4's hybrids: one layer with attention in ten."""
    return {**{k: v for k, v in _llama(dict(z, f=z.get("f", z.get("m"))), layers, **more).items() if k != "head_dim"},
            "layer_types": ["full_attention" if i % 10 == 5 else "linear_attention" for i in range(layers)], "position_embedding_type": "nope",
            "mamba_n_heads": z["j"], "mamba_d_state": z["a"], "mamba_n_groups": 1}


WIDE = "b s h n d f v"
ARCHITECTURES = {
    "llama": Architecture(LLAMA, _llama),
    "mistral": Architecture(LLAMA, lambda z, l: _llama(z, l, sliding_window=None)),
    "qwen2": Architecture(LLAMA, lambda z, l: {k: v for k, v in _llama(z, l).items() if k != "head_dim"}, tied_width=True),
    "qwen3": Architecture(LLAMA, _llama),
    "granite": Architecture(LLAMA, lambda z, l: {k: v for k, v in _llama(z, l).items() if k != "head_dim"}, tied_width=True),
    "phi3": Architecture(LLAMA, lambda z, l: {k: v for k, v in _llama(z, l, pad_token_id=0).items() if k != "head_dim"},
                         tied_width=True, atoms=("n+2*k",)),
    "gemma2": Architecture(LLAMA, lambda z, l: _llama(z, l, sliding_window=z["s"], query_pre_attn_scalar=z["d"])),
    "gemma3": Architecture(LLAMA, lambda z, l: _llama(z, l, sliding_window=z["s"], query_pre_attn_scalar=z["d"],
                           layer_types=["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(l)]),
                           kind="gemma3_text", alternating=True),
    "gpt_neox": Architecture(WIDE, lambda z, l: dict(_bert(z, l), max_position_embeddings=z["s"]), tied_width=True,
                             atoms=("d/8", "3*d/4"),
                             attention=["query_key_value", "dense"]),
    "gpt2": Architecture(WIDE + " p", _gpt2, tied_width=True, attention=["c_attn"]),
    "gemma": Architecture(LLAMA, _llama),
    "opt": Architecture(WIDE + " p", lambda z, l: dict(hidden_size=z["h"], num_hidden_layers=l, num_attention_heads=z["n"],
                        ffn_dim=z["f"], vocab_size=z["v"], max_position_embeddings=z["p"], word_embed_proj_dim=z["h"]),
                        tied_width=True, atoms=("p+2",), attention=["q_proj", "k_proj", "v_proj", "out_proj"]),
    "starcoder2": Architecture(LLAMA, lambda z, l: {k: v for k, v in _llama(z, l, sliding_window=None).items() if k != "head_dim"},
                               tied_width=True),
    "phi": Architecture(LLAMA, lambda z, l: {k: v for k, v in _llama(z, l).items() if k != "head_dim"}, tied_width=True,
                        atoms=("d/4",), attention=["q_proj", "k_proj", "v_proj", "dense"]),
    "gpt_bigcode": Architecture(WIDE + " p", _gpt2, tied_width=True, atoms=("n*d+2*d",), attention=["c_attn", "c_proj"]),
    "mixtral": Architecture("b s h n k d f v E t", lambda z, l: _llama(z, l, num_local_experts=z["E"], num_experts_per_tok=z["t"],
                            sliding_window=None), atoms=("b*s*t/E", "E+1", "ceil(b*s/128)"), experts=True),
    "qwen3_moe": Architecture("b s h n k d m v E t", lambda z, l: dict(
        {k: v for k, v in _llama(dict(z, f=z["m"]), l).items()}, num_experts=z["E"], num_experts_per_tok=z["t"],
        moe_intermediate_size=z["m"], norm_topk_prob=True), atoms=("b*s*t/E", "E+1"), experts=True),
    "qwen2_moe": Architecture("b s h n k d m e v E t", lambda z, l: dict(
        {k: v for k, v in _llama(dict(z, f=z["m"]), l).items() if k != "head_dim"}, num_experts=z["E"], num_experts_per_tok=z["t"],
        moe_intermediate_size=z["m"], shared_expert_intermediate_size=z["e"]), tied_width=True, atoms=("b*s*t/E", "E+1"), experts=True),
    "gpt_oss": Architecture("b s h n k d f v E t", lambda z, l: _llama(z, l, num_local_experts=z["E"], num_experts_per_tok=z["t"],
                            sliding_window=z["s"], layer_types=["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(l)]),
                            atoms=("b*s*t/E", "E+1", "s+1"), experts=True, alternating=True),
    "deepseek_v2": Architecture("b s h n d f m v E t x y z", lambda z, l: dict(
        hidden_size=z["h"], num_hidden_layers=l, num_attention_heads=z["n"], intermediate_size=z["f"], vocab_size=z["v"],
        max_position_embeddings=z["s"], q_lora_rank=None, kv_lora_rank=z["z"], qk_nope_head_dim=z["d"], qk_rope_head_dim=z["x"],
        v_head_dim=z["y"], first_k_dense_replace=1, n_routed_experts=z["E"], num_experts_per_tok=z["t"], n_shared_experts=2,
        moe_intermediate_size=z["m"]), atoms=("b*s*t/E", "E+1", "d+x", "d+y", "z+x", "x/2"), experts=True, before=1,
        attention=["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
    "qwen3_next": Architecture("b s h n k d m e v E t i j a l", lambda z, l: dict(
        {k: v for k, v in _llama(dict(z, f=z["m"]), l).items()}, num_experts=z["E"], num_experts_per_tok=z["t"],
        moe_intermediate_size=z["m"], shared_expert_intermediate_size=z["e"], linear_num_key_heads=z["i"], linear_num_value_heads=z["j"],
        linear_key_head_dim=z["a"], linear_value_head_dim=z["l"], rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)),
        atoms=("b*s*t/E", "E+1", "d/8", "3*d/4", "j/i", "2*i*a+2*j*l", "2*i*a+j*l", "2*a+2*l*j/i", "ceil(s/64)"), constants=(4, 64), experts=True, period=4,
        attention=ATTENTION + ["in_proj_qkvz", "in_proj_ba", "out_proj"]),
    "granite_hybrid": Architecture("b s h n k d f v j a", lambda z, l: _granite_hybrid(z, l, num_local_experts=0, shared_intermediate_size=z["f"]),
                                   kind="granitemoehybrid", tied_width=True, period=10, constants=(4, 8, 256),
                                   atoms=("2*h/j", "2*h+2*a", "4*h+2*a+j", "ceil(s/256)", "ceil(2*a*h/j/64)")),
    "granite_hybrid_moe": Architecture("b s h n k d m e v E t j a", lambda z, l: _granite_hybrid(
        z, l, num_local_experts=z["E"], num_experts_per_tok=z["t"], shared_intermediate_size=z["e"]), kind="granitemoehybrid", tied_width=True,
        period=10, constants=(4, 8, 256), experts=True, atoms=("b*s*t/E", "E+1", "2*h/j", "2*h+2*a", "4*h+2*a+j", "ceil(s/256)", "ceil(2*a*h/j/64)")),
    "bert": Architecture(WIDE + " p", lambda z, l: _bert(z, l, max_position_embeddings=z["p"]), tied_width=True, task="masked",
                         attention=["query", "key", "value"]),
    "modernbert": Architecture(WIDE, lambda z, l: _bert(z, l, max_position_embeddings=z["s"], pad_token_id=0, local_attention=z["s"]),
                               tied_width=True, task="masked", alternating=True, constants=(3,)),
    "t5": Architecture("b s u h n d f v", lambda z, l: dict(d_model=z["h"], d_kv=z["d"], d_ff=z["f"], num_layers=l,
                       num_decoder_layers=l, num_heads=z["n"], vocab_size=z["v"], decoder_start_token_id=0, pad_token_id=0,
                       eos_token_id=1), task="pairs", inputs="pairs", alternating=True, constants=(32,), attention=["q", "k", "v", "o"]),
    "whisper": Architecture("b u h n d f v p", lambda z, l: dict(d_model=z["h"], encoder_layers=l, decoder_layers=l,
                            encoder_attention_heads=z["n"], decoder_attention_heads=z["n"], encoder_ffn_dim=z["f"],
                            decoder_ffn_dim=z["f"], vocab_size=z["v"], max_target_positions=z["p"], pad_token_id=0,
                            decoder_start_token_id=0, bos_token_id=0, eos_token_id=0), task="speech", inputs="speech",
                            tied_width=True, constants=(3, 80, 1500, 3000)),
    "vit": Architecture("b h n d f", lambda z, l: dict(hidden_size=z["h"], num_hidden_layers=l, num_attention_heads=z["n"],
                        intermediate_size=z["f"], num_labels=1000), tied_width=True, task="image", inputs="image",
                        constants=(3, 14, 16, 196, 197, 224, 768, 1000, 1001), attention=["query", "key", "value"]),
}


def _resnet(name):
    def make(z, layers, key):
        import torchvision
        return getattr(torchvision.models, name)()
    return Architecture("b", None, make=make, loss=plain.image_loss, inputs="image", layered=False, constants=FIXED)


def _timm_vit(z, layers, key):
    from timm.models import vision_transformer
    vision_transformer.calculate_drop_path_rates = lambda rate, depth: [0.0] * depth
    return vision_transformer.VisionTransformer(embed_dim=z["h"], depth=layers, num_heads=z["n"], mlp_ratio=z["f"] / z["h"], weight_init="skip")


FIXED = tuple(n for n in range(3, 2049) if n % sizes_.PROBE["b"])      # an image network's fixed sizes
OTHER_FRAMEWORKS = {
    ("nanogpt", "gpt2"): Architecture(WIDE + " p", None, make=plain.Gpt, loss=plain.gpt_loss, tied_width=True),
    ("nanochat", "nanochat"): Architecture(WIDE, None, make=plain.Chat, loss=plain.chat_loss, tied_width=True),
    ("torchtitan", "llama"): Architecture(LLAMA, None, make=plain.Titan, loss=plain.titan_loss),
    ("torchtune", "llama"): Architecture(LLAMA, None, make=tune.model, loss=tune.loss, tied_width=True, atoms=("s/8",)),
    ("torchvision", "resnet50"): _resnet("resnet50"),
    ("torchvision", "resnet18"): _resnet("resnet18"),
    ("timm", "vit"): Architecture("b h n d f", None, make=_timm_vit, loss=plain.image_loss, inputs="image", tied_width=True,
                                  constants=ARCHITECTURES["vit"].constants),
}


def find(key):
    """The architecture of a table's key."""
    if key["framework"] == "hf":
        return ARCHITECTURES[key["architecture"]]
    return OTHER_FRAMEWORKS[key["framework"], key["architecture"]]


def use_liger(kind):
    """Liger's kernels in place of the model's own; as on CUDA, logits go into one buffer."""
    from liger_kernel.ops import fused_linear_cross_entropy as fused
    from liger_kernel.transformers import _apply_liger_kernel
    _apply_liger_kernel(kind)
    def same_dtype(x, weight):
        if torch.is_grad_enabled() or x.dtype != weight.dtype:
            return False
        return not torch.is_autocast_enabled("cpu") or x.dtype == torch.get_autocast_dtype("cpu")
    fused._can_use_mm_out = same_dtype


def configuration(architecture, z, layers, attention, dropout=None):
    """Its Hugging Face configuration at sizes `z`."""
    from transformers import AutoConfig
    layers = architecture.before + architecture.period * layers
    config = AutoConfig.for_model(architecture.kind, **architecture.config(z, layers))
    usual = "sdpa" if attention.startswith("sdpa") else "eager"
    config._attn_implementation = "flash_attention_2" if attention == "flash" and older.release() != "latest" else usual
    # GPT-BigCode of older releases keeps keys and values under checkpointing too, as nobody
    # switches that off.
    config.use_cache = config.model_type == "gpt_bigcode" and older.release() != "latest"
    return config


QUANTISED = {"qlora": qlora, "int8lora": int8}


def adapters(architecture, z, key):
    """peft's configuration of a key's adapters. `alpha` is twice the rank, if `z` has no other."""
    from peft import LoraConfig
    words = key["adapter"].split("-")
    targets = architecture.attention if "attention" in words else "all-linear"
    task = "SEQ_CLS" if key["loss"] == "reward" else "CAUSAL_LM"
    return LoraConfig(r=z["r"], lora_alpha=z.get("alpha") or 2 * z["r"], target_modules=targets, task_type=task,
                      lora_dropout=0.05 if "dropout" in words else 0.0)


def build(name, z, layers, key, recorder=None, plain=False, keep=None):
    """The model in training mode. `key` is a table's key.

    With a recorder it has no data, and the kernels of the recorder's device; without one it is for
    this machine's processors. A `plain` model has neither adapters nor a head of TRL's, for
    trainers that add them. `keep` is called with the model before its weights are quantised.
    """
    import transformers
    architecture = find(key)
    stored = torch.bfloat16 if key["precision"] in ("bf16", "mixed") else torch.float32
    if architecture.make:
        torch.set_default_dtype(stored)
        model = architecture.make(z, layers, key)
        torch.set_default_dtype(torch.float32)
        return model.train()
    architecture.kind = architecture.kind or name
    config = configuration(architecture, z, layers, key["attention"])
    if key["head"] == "tied":
        config.tie_word_embeddings = True
    if key["dropout"] == "none":
        for field in vars(config):
            if "drop" in field and isinstance(getattr(config, field), float):
                setattr(config, field, 0.0)
    if key["attention"] == "sdpa-repeat":                       # before grouped keys went into the kernel (4.4x)
        from transformers.integrations import sdpa_attention
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    if architecture.experts:
        config._experts_implementation = key["experts"]
    auto = {"causal": transformers.AutoModelForCausalLM, "masked": transformers.AutoModelForMaskedLM,
            "image": transformers.AutoModelForImageClassification, "pairs": transformers.AutoModelForSeq2SeqLM,
            "speech": transformers.AutoModelForSpeechSeq2Seq}[architecture.task]
    if key["loss"] == "reward":                                 # TRL's RewardTrainer
        auto, config.num_labels, config.pad_token_id = transformers.AutoModelForSequenceClassification, 1, 0
    torch.set_default_dtype(stored)
    if key["kernels"] == "liger":
        use_liger(config.model_type)
    model = auto.from_config(config)
    if key["version"] in older.RELEASES:
        older.prepare(model)
    if key["kernels"].startswith("foak"):
        older.use_foak(model, key)
    torch.set_default_dtype(torch.float32)
    model.train()
    if key["attention"] == "flash" and key["version"] == "latest":
        model.config._attn_implementation = "flash_attention_2"
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "_attn_implementation"):
                module.config._attn_implementation = "flash_attention_2"
    if key["loss"] in losses.FUSED and not plain:
        losses.use_fused_head(model, z["q"], recorder, losses.FUSED[key["loss"]])
    if key["loss"] == "chunked":
        chunk = z["q"]
        model.forward = lambda input_ids, labels, base=model, **_: {"loss": losses.chunked(base, input_ids, labels, chunk)}
    if keep:
        keep(model)
    if key["adapter"] != "none":
        # lora-all, lora-attention, qlora-all, int8lora-all; -dropout, -bf16
        words = key["adapter"].split("-")
        if words[0] in QUANTISED:
            quantise = QUANTISED[words[0]]
            model = quantise.real(model, "bf16" in words) if recorder is None else quantise.quantise(model, recorder.device, "bf16" in words)
        if not plain:
            from peft import get_peft_model
            if recorder is None:
                torch.manual_seed(z.get("seed", 0))
            model = get_peft_model(model, adapters(architecture, z, key), autocast_adapter_dtype="bf16" not in words)
    if plain:
        return model
    if key["checkpoint"] != "none" and key["compiled"] == "none":   # else the compiler has them
        if key["adapter"] != "none":
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": key["checkpoint"] == "full-reentrant"})
    return model


def reference(name, z, layers, key, recorder=None):
    """The frozen copy that preferences are compared with, or none: with adapters it is the model without them."""
    if key["loss"] != "dpo" or key["adapter"] != "none":
        return None
    made = build(name, z, layers, {**key, "loss": "model", "checkpoint": "none"}, recorder).requires_grad_(False)
    losses.use_fused_head(made, z["q"], recorder, ("log_probs",))
    return made


def inputs(architecture, z, key):
    """What the data loader hands to the model, already on the device."""
    real = torch.bfloat16 if key["precision"] == "bf16" else torch.float32
    if architecture.inputs == "image":
        return dict(pixel_values=torch.zeros(z["b"], 3, 224, 224, dtype=real), labels=torch.zeros(z["b"], dtype=torch.int64))
    if architecture.inputs == "speech":
        return dict(input_features=torch.zeros(z["b"], 80, 3000, dtype=real), labels=torch.zeros(z["b"], z["u"], dtype=torch.int64))
    ids = torch.zeros(z["b"], z["s"], dtype=torch.int64)
    if architecture.inputs == "pairs":
        return dict(input_ids=ids, labels=torch.zeros(z["b"], z["u"], dtype=torch.int64))
    if key["loss"].startswith("dpo"):                           # `DataCollatorForPreference`
        marks = dict(attention_mask=torch.ones_like(ids), completion_mask=torch.ones_like(ids))
        before = [n for n in ("ref_chosen_logps", "ref_rejected_logps") if key["loss"] == "dpo-precomputed"]
        return dict(input_ids=ids, **marks, **{n: torch.zeros(z["b"] // 2) for n in before})
    if key["loss"] == "grpo":                                   # a prompt of one token
        parts = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids[:, 1:], "completion_mask": ids[:, 1:]}
        return {n: torch.zeros(t.shape, dtype=torch.int64) for n, t in parts.items()} | dict(
            advantages=torch.zeros(z["b"]), num_items_in_batch=torch.ones(()))
    return dict(input_ids=ids, labels=torch.zeros(z["b"], z["s"], dtype=torch.int64))
