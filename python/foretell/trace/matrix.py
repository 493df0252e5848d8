"""Which tables there are: the combinations of framework options worth a table, the most used first."""

from . import older

ORDER = ["architecture", "framework", "attention", "checkpoint", "precision", "adapter", "loss", "kernels", "experts", "dropout", "head", "version", "compiled"]
USUAL = {"framework": "hf", "attention": "flash", "checkpoint": "none", "precision": "bf16", "adapter": "none", "loss": "model",
         "kernels": "hf", "experts": "none", "dropout": "none", "head": "usual", "version": "latest", "compiled": "none"}


def complete(key):
    """A key with all of its words, in their order."""
    if "architecture" not in key:
        raise SystemExit("a key needs architecture=")
    key = {**USUAL, **key}
    unknown = set(key) - set(ORDER)
    if unknown:
        raise SystemExit(f"no such word in a key: {', '.join(sorted(unknown))}")
    return {word: key[word] for word in ORDER}


def packages(key):
    """The packages besides torch whose versions matter."""
    if key["framework"] != "hf":
        return [key["framework"]] if key["framework"] in ("torchvision", "timm", "torchtune") else []
    extra = {"peft": key["adapter"] != "none", "bitsandbytes": key["adapter"].startswith(("qlora", "int8lora")), "liger-kernel": key["kernels"] == "liger",
             "fms-acceleration-foak": key["kernels"].startswith("foak"),
             "trl": key["loss"] in ("trl-fused", "dpo", "dpo-precomputed", "grpo")}
    return ["transformers", *(name for name, used in extra.items() if used)]


def _product(**choices):
    out = [{}]
    for word, values in choices.items():
        out = [{**o, word: v} for o in out for v in values]
    return out


def keys():
    """Every key, in the order of worth."""
    seen = set()
    for key in _keys():
        key = complete(key)
        mark = tuple(key.items())
        if mark not in seen:
            seen.add(mark)
            yield key


def _keys():
    precision = ["bf16", "autocast", "mixed"]
    usual = dict(checkpoint=["none", "full"], precision=precision)
    lora = dict(adapter=["lora-all", "lora-attention"], **usual)
    yield from _product(architecture=["llama"], attention=["flash", "sdpa", "sdpa-repeat"], **usual)
    yield from _product(architecture=["llama"], attention=["flash"], **lora)
    yield from _product(architecture=["llama"], checkpoint=["full-reentrant"], precision=precision,
                        adapter=["none", "lora-all", "lora-attention"])
    yield from _product(architecture=["llama"], attention=["sdpa", "sdpa-repeat"], **lora)
    yield from _product(architecture=["llama"], adapter=["lora-all-dropout", "lora-attention-dropout"], **usual)
    yield from _product(architecture=["llama"], adapter=["lora-all-bf16", "lora-attention-bf16"], checkpoint=["none", "full"],
                        precision=["bf16", "mixed"])
    yield from _product(architecture=["llama"], adapter=["qlora-all", "qlora-attention"], checkpoint=["none", "full", "full-reentrant"],
                        precision=["mixed", "bf16"])
    yield from _product(architecture=["llama"], adapter=["int8lora-all", "int8lora-attention"], checkpoint=["none", "full"],
                        precision=["mixed"])
    yield from _product(architecture=["llama"], adapter=["qlora-all-bf16"], checkpoint=["none", "full", "full-reentrant"],
                        precision=["bf16", "mixed"])
    yield from _product(architecture=["gpt2"], attention=["flash", "sdpa"], dropout=["some", "none"], **usual)
    yield from _product(architecture=["qwen3", "qwen2", "mistral", "granite"], **usual)
    yield from _product(architecture=["mixtral", "qwen3_moe"], experts=["grouped_mm", "eager"], **usual)
    yield from _product(architecture=["gemma2", "gemma3", "phi3", "gpt_neox"], **usual)
    yield from _product(architecture=["bert"], attention=["sdpa"], dropout=["some", "none"], **usual)
    yield from _product(architecture=["modernbert"], **usual)
    yield from _product(architecture=["vit"], attention=["sdpa"], **usual)
    yield from _product(architecture=["t5"], attention=["sdpa"], dropout=["some", "none"], **usual)
    yield from _product(architecture=["whisper"], attention=["sdpa"], **usual)
    yield from _product(architecture=["qwen3", "qwen2", "mistral", "granite"], **lora)
    yield from _product(architecture=["mixtral"], experts=["grouped_mm"], **lora)
    yield from _product(architecture=["qwen2_moe"], experts=["grouped_mm"], **usual)
    yield from _product(architecture=["qwen2_moe", "qwen3_moe"], experts=["grouped_mm"], adapter=["lora-all", "lora-attention"],
                        checkpoint=["none", "full"], precision=["mixed", "bf16"])
    yield from _product(architecture=["gpt2"], framework=["nanogpt"], attention=["sdpa"], precision=["autocast", "fp32"])
    yield from _product(architecture=["llama"], framework=["torchtitan"], attention=["sdpa"], checkpoint=["none", "full", "selective"],
                        precision=["bf16", "fp32"])
    yield from _product(architecture=["llama", "mistral", "qwen2", "qwen3"], kernels=["liger"], **usual)
    yield from _product(architecture=["mixtral"], experts=["grouped_mm"], kernels=["liger"], **usual)
    yield from _product(architecture=["llama", "qwen2", "qwen3"], loss=["chunked"], **usual)
    yield from _product(architecture=["resnet50", "resnet18"], framework=["torchvision"], attention=["none"], precision=["autocast", "fp32"])
    yield from _product(architecture=["vit"], framework=["timm"], attention=["sdpa"], precision=["autocast", "fp32"])
    yield from _product(architecture=["llama", "qwen2", "qwen3", "granite"], head=["tied"], **usual)
    yield from _product(architecture=["llama", "gpt2"], attention=["eager"], **usual)
    yield from _product(architecture=["llama", "gpt2", "qwen3", "bert", "vit", "t5"], attention=["sdpa"], precision=["fp32"],
                        checkpoint=["none", "full"])
    yield from _product(architecture=["gpt2", "qwen2", "qwen3", "granite"], checkpoint=["full-reentrant"], precision=precision)
    yield from _product(architecture=["qwen2", "qwen3", "granite"], checkpoint=["full-reentrant"], precision=precision, adapter=["lora-all"])
    yield from _product(architecture=["qwen2", "qwen3", "granite", "phi3"], attention=["sdpa-repeat"], **usual)
    yield from _product(architecture=["mixtral", "qwen3_moe"], experts=["grouped_mm"], attention=["sdpa-repeat"], **usual)
    yield from _product(architecture=["llama", "qwen2"], kernels=["liger"], adapter=["lora-all"], **usual)
    yield from _product(architecture=["gpt_bigcode"], attention=["flash", "sdpa"], dropout=["some"], checkpoint=["none", "full"],
                        precision=["bf16", "mixed"])
    trl = dict(loss=["trl"], precision=["bf16", "autocast", "mixed"], checkpoint=["none", "full"])
    yield from _product(architecture=["llama", "qwen2", "qwen3"], **trl)
    yield from _product(architecture=["llama", "qwen2", "qwen3"], attention=["sdpa"], **trl)
    fused = dict(loss=["trl-fused"], precision=["mixed", "bf16"], checkpoint=["none", "full"])
    yield from _product(architecture=["llama", "qwen2", "qwen3"], **fused)
    yield from _product(architecture=["llama", "qwen2", "qwen3"], adapter=["lora-all", "lora-attention"], **fused)
    yield from _product(architecture=["llama", "qwen3"], head=["tied"], **fused)
    yield from _product(architecture=["llama", "qwen2", "qwen3"], attention=["sdpa"], **fused)
    yield from _product(architecture=["gemma3", "mistral"], **fused)
    yield from _product(architecture=["llama", "qwen2", "qwen3"], adapter=["lora-all", "lora-attention"], **{**trl, "precision": ["mixed", "bf16"]})
    yield from _product(architecture=["llama"], framework=["torchtune"], attention=["sdpa"], checkpoint=["none", "full"],
                        precision=["bf16", "fp32"], adapter=["none", "lora-all"])
    yield from _product(architecture=["llama"], framework=["torchtune"], attention=["sdpa"], checkpoint=["none", "full"],
                        precision=["bf16"], adapter=["none", "lora-all"], loss=["whole"])
    yield from _product(architecture=["llama", "qwen2", "qwen3"], checkpoint=["full-offload"], precision=precision,
                        loss=["model", "chunked"])
    yield from _product(architecture=["llama", "qwen3"], checkpoint=["full-offload"], precision=["mixed"], adapter=["lora-all"])
    yield from _product(architecture=["opt"], attention=["sdpa", "flash"], dropout=["some"], **usual)
    yield from _product(architecture=["starcoder2", "phi"], attention=["sdpa", "flash"], **usual)
    yield from _product(architecture=["opt", "gpt2"], attention=["sdpa"], dropout=["some"], adapter=["lora-all"],
                        checkpoint=["none", "full"], precision=["mixed"])
    yield from _product(architecture=["gemma"], **usual)
    yield from _product(architecture=["gemma", "gemma2", "gemma3", "phi3"], adapter=["lora-all"], checkpoint=["none", "full"],
                        precision=["mixed"])
    yield from _product(architecture=["qwen3", "mistral", "qwen2", "phi3", "gemma2"], adapter=["qlora-all"], checkpoint=["none", "full"],
                        precision=["mixed"])
    yield from _product(architecture=["qwen2", "qwen3"], adapter=["qlora-all"], checkpoint=["full-reentrant"], precision=["mixed"])
    qlora = dict(adapter=["qlora-all", "qlora-attention"], checkpoint=["none", "full"], precision=["mixed"])
    yield from _product(architecture=["mixtral", "qwen2_moe", "qwen3_moe"], experts=["grouped_mm"], **qlora)
    yield from _product(architecture=["gpt2"], attention=["sdpa"], dropout=["some"], **qlora)
    yield from _product(architecture=["gpt_neox", "gemma3", "granite", "phi"], **qlora)
    yield from _product(architecture=["qwen3", "mistral", "qwen2", "gemma2"], **{**qlora, "adapter": ["qlora-attention"]})
    yield from _product(architecture=["mistral", "qwen2", "qwen3"], adapter=["lora-all-dropout", "lora-attention-dropout"],
                        checkpoint=["none", "full"], precision=["mixed"])
    reward = dict(loss=["reward"], checkpoint=["none", "full"])
    yield from _product(architecture=["llama", "qwen2", "qwen3", "mistral"], precision=["bf16", "autocast", "mixed"], **reward)
    yield from _product(architecture=["llama", "qwen2", "qwen3", "mistral"], precision=["mixed"], adapter=["lora-all"], **reward)
    parts = dict(architecture=["llama", "qwen2", "qwen3"], precision=["mixed"])
    yield from _product(adapter=["lora-all"], loss=["chunked"], checkpoint=["none", "full"], **parts)
    yield from _product(adapter=["qlora-all"], loss=["chunked"], checkpoint=["none", "full", "full-reentrant"], **parts)
    yield from _product(adapter=["qlora-all"], kernels=["liger"], checkpoint=["none", "full", "full-reentrant"], **parts)
    yield from _product(architecture=["qwen3"], adapter=["lora-all"], kernels=["liger"], checkpoint=["none", "full"], precision=["mixed"])
    yield from _product(architecture=["llama"], adapter=["lora-all"], attention=["eager"], checkpoint=["none", "full"], precision=["mixed"])
    yield from _of_trl()
    yield from _tied()
    yield from _narrow_adapters()
    low = dict(adapter=["lora-all", "lora-attention"], checkpoint=["none", "full"], precision=["mixed", "bf16"])
    # Its sinks are in no attention of PyTorch's, nor in the package `flash_attn`.
    yield from _product(architecture=["gpt_oss"], experts=["grouped_mm"], attention=["eager"], **usual)
    yield from _product(architecture=["gpt_oss"], experts=["grouped_mm"], attention=["eager"], **low)
    yield from _product(architecture=["deepseek_v2"], experts=["grouped_mm"], attention=["flash", "sdpa"], **usual)
    yield from _product(architecture=["deepseek_v2"], experts=["grouped_mm"], **low)
    for hybrid in (dict(architecture=["qwen3_next", "granite_hybrid_moe"], experts=["grouped_mm"]), dict(architecture=["granite_hybrid"])):
        yield from _product(**hybrid, **usual)
        yield from _product(**hybrid, **low)
    yield from _compiled()
    for release in older.RELEASES:
        yield from _older(release)


def _of_trl():
    """TRL 1.x: DPO with its reference in the step or before it, and GRPO's training step."""
    both = dict(checkpoint=["none", "full"])
    whole, adapted = dict(precision=["autocast"], **both), dict(precision=["mixed"], **both)
    known = ["llama", "qwen2", "qwen3"]
    yield from _product(architecture=known, loss=["dpo"], **whole)
    # It casts adapters beside quantised weights itself, and leaves norms as they are stored.
    yield from _product(architecture=known, loss=["dpo"], adapter=["lora-all", "lora-attention", "qlora-all-bf16"], **adapted)
    yield from _product(architecture=known, loss=["dpo"], head=["tied"], adapter=["none"], **whole)
    yield from _product(architecture=known, loss=["dpo"], head=["tied"], adapter=["lora-all", "lora-attention"], **adapted)
    yield from _product(architecture=known, loss=["dpo"], attention=["sdpa"], **whole)
    yield from _product(architecture=known, loss=["dpo"], attention=["sdpa"], adapter=["lora-all", "lora-attention"], **adapted)
    yield from _product(architecture=known, loss=["grpo"], **whole)
    yield from _product(architecture=known, loss=["grpo"], adapter=["lora-all"], **adapted)
    yield from _product(architecture=["llama"], loss=["dpo-precomputed"], **whole)
    yield from _product(architecture=["llama"], loss=["dpo-precomputed"], adapter=["lora-all"], **adapted)


def _tied():
    """Small models whose head has the embedding's weights, with adapters or Liger's kernels."""
    known, both = ["llama", "qwen2", "qwen3"], dict(head=["tied"], checkpoint=["none", "full"])
    adapters = ["lora-all", "lora-attention", "qlora-all", "qlora-attention"]
    yield from _product(architecture=known, adapter=adapters, precision=["mixed"], **both)
    # In sixteen bits as FSDP2 gathers them.
    for parts in (dict(kernels=["liger"]), dict(loss=["chunked"])):
        yield from _product(architecture=known, precision=["autocast", "mixed", "bf16"], **parts, **both)
        yield from _product(architecture=known, adapter=["lora-all", "lora-attention"], precision=["mixed"], **parts, **both)
    fused = dict(loss=["trl-fused"], **both)
    yield from _product(architecture=known, precision=["mixed", "bf16"], **fused)
    yield from _product(architecture=known, adapter=["lora-all", "lora-attention"], precision=["mixed"], **fused)


def _narrow_adapters():
    """Adapters that are gathered in sixteen bits with what is around them, without autocast: FSDP2's and DeepSpeed's."""
    narrow = dict(adapter=["lora-all-bf16", "lora-attention-bf16"], checkpoint=["none", "full"], precision=["bf16"])
    known = ["llama", "qwen2", "qwen3"]
    yield from _product(architecture=["llama"], attention=["sdpa"], **narrow)
    yield from _product(architecture=["qwen2", "qwen3", "mistral", "granite"], **narrow)
    yield from _product(architecture=known, head=["tied"], **narrow)
    yield from _product(architecture=known, loss=["trl-fused"], **narrow)
    yield from _product(architecture=["mixtral", "qwen3_moe", "qwen2_moe"], experts=["grouped_mm"], **narrow)
    yield from _product(architecture=["gpt_oss"], experts=["grouped_mm"], attention=["eager"], **narrow)
    all_layers = {**narrow, "adapter": ["lora-all-bf16"]}
    yield from _product(architecture=["llama"], attention=["eager"], **all_layers)
    yield from _product(architecture=["phi3", "gemma", "gemma2", "gemma3", "phi", "gpt_neox"], **all_layers)
    yield from _product(architecture=["gpt2"], attention=["sdpa"], dropout=["some"], **all_layers)
    for parts in (dict(loss=["chunked"]), dict(kernels=["liger"])):
        yield from _product(architecture=known, **parts, **narrow)
        yield from _product(architecture=known, head=["tied"], **parts, **narrow)
    yield from _product(architecture=known, head=["tied"], loss=["trl-fused"], **narrow)
    yield from _product(architecture=["mistral"], kernels=["liger"], **narrow)


def _compiled():
    """Steps under `torch.compile`."""
    usual = dict(compiled=["inductor"], checkpoint=["none", "full"])
    wide = dict(precision=["autocast", "mixed", "bf16"], **usual)
    yield from _product(architecture=["llama"], framework=["torchtune"], attention=["sdpa"], precision=["bf16"],
                        adapter=["none", "lora-all"], loss=["model", "whole"], **usual)
    yield from _product(architecture=["llama"], framework=["torchtune"], attention=["sdpa"], precision=["bf16"], head=["tied"],
                        loss=["model", "whole"], compiled=["inductor", "none"], checkpoint=["none", "full"])
    yield from _product(architecture=["llama"], framework=["torchtune"], attention=["sdpa"], precision=["bf16"], head=["tied"],
                        adapter=["lora-all"], compiled=["inductor"], checkpoint=["none", "full"])
    yield from _product(architecture=["gpt2"], framework=["nanogpt"], attention=["sdpa"], precision=["autocast"],
                        compiled=["inductor"])
    yield from _product(architecture=["nanochat"], framework=["nanochat"], attention=["sdpa"], precision=["autocast"],
                        compiled=["inductor"])
    yield from _product(architecture=["llama"], framework=["torchtitan"], attention=["sdpa"], precision=["bf16"],
                        checkpoint=["none", "full", "selective"], compiled=["inductor"])
    yield from _product(architecture=["llama"], attention=["sdpa"], **wide)
    yield from _product(architecture=["gpt2"], attention=["sdpa"], dropout=["some"], **wide)
    yield from _product(architecture=["llama"], attention=["sdpa"], adapter=["lora-all"], precision=["mixed"], **usual)
    yield from _product(architecture=["qwen3", "qwen2", "mistral", "phi3", "gemma2"], attention=["sdpa"],
                        precision=["autocast", "bf16"], **usual)
    yield from _product(architecture=["llama"], attention=["flash"], precision=["autocast", "mixed", "bf16"], **usual)
    yield from _product(architecture=["qwen3", "qwen2"], attention=["sdpa"], adapter=["lora-all"], precision=["mixed"], **usual)


def _older(release):
    """The tables of an older release of transformers. Its checkpoints are reentrant by default."""
    checkpoint = ["none", "full-reentrant"]
    usual = dict(version=[release], checkpoint=checkpoint, precision=["bf16", "autocast", "mixed"])
    narrow = dict(version=[release], checkpoint=checkpoint, precision=["mixed", "bf16"])
    dropout = ["lora-attention-dropout", "lora-all-dropout"]
    yield from _product(architecture=["mistral", "llama"], kernels=["foak", "foak-liger"], version=[release],
                        checkpoint=["full-reentrant"], precision=["bf16", "mixed"], adapter=["none", "lora-attention-dropout"])
    yield from _product(architecture=["gpt_bigcode"], dropout=["some"], kernels=["hf", "foak"], version=[release],
                        checkpoint=["full-reentrant"])
    yield from _product(architecture=["mistral", "llama"], adapter=["none", *dropout], **narrow)
    if release != "4.48":
        return
    yield from _product(architecture=["llama", "mistral", "qwen2"], attention=["flash", "sdpa"], **usual)
    yield from _product(architecture=["llama", "mistral", "qwen2"], adapter=["lora-all", "lora-attention"], **narrow)
    yield from _product(architecture=["llama", "qwen2"], attention=["sdpa"], adapter=["lora-all", "lora-attention", *dropout], **narrow)
    yield from _product(architecture=["gpt2"], attention=["sdpa", "flash"], dropout=["some"], **usual)
    yield from _product(architecture=["granite"], kernels=["foak", "foak-liger"], version=[release], checkpoint=["full-reentrant"],
                        precision=["bf16", "mixed"], adapter=["none", "lora-attention-dropout"])
    yield from _product(architecture=["granite", "gemma", "gemma2", "phi3"], **narrow)
    mixtures = dict(architecture=["mixtral", "qwen2_moe", "qwen3_moe"], experts=["eager"])
    yield from _product(adapter=["lora-all", "lora-attention"], **mixtures, **narrow)
    yield from _product(**mixtures, **usual)
    yield from _product(adapter=["qlora-all", "qlora-attention"], **mixtures, **narrow)
    yield from _product(adapter=["lora-all-dropout", "lora-attention-dropout"], **{**mixtures, "architecture": ["mixtral"]}, **narrow)
    yield from _product(architecture=["llama", "gpt2"], attention=["sdpa"], precision=["fp32"], checkpoint=checkpoint,
                        version=[release])
    yield from _product(architecture=["granite", "gemma", "phi3"], adapter=["lora-all"], precision=["mixed"], checkpoint=checkpoint,
                        version=[release])
    yield from _product(architecture=["llama"], attention=["eager"], **narrow)
    yield from _product(architecture=["bert"], attention=["sdpa"], dropout=["some"], precision=["autocast", "fp32"],
                        version=[release])
    yield from _product(architecture=["gpt_neox"], **narrow)
