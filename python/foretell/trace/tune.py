"""torchtune's own Llama (0.6) as its full and LoRA recipes train it.

Logits come in eight chunks, with `loss=whole` all at once; layers are checkpointed by wrappers.
"""

import torch

from . import compiled


def model(z, layers, key):
    """The builder's model; `lora-all` adapts every linear layer of attention and feed-forward."""
    from torchtune import modules, training
    from torchtune.models.llama3_1 import _position_embeddings as position_embeddings, llama3_1, lora_llama3_1
    from torchtune.models.llama3_2._component_builders import llama3_2, lora_llama3_2
    from torchtune.modules.peft import get_adapter_params, set_trainable_params
    # It reads the values of frequencies, which do not exist here.
    position_embeddings.Llama3ScaledRoPE.apply_scaling = lambda self, freqs, *_: freqs
    sizes = dict(vocab_size=z["v"], num_layers=layers, num_heads=z["n"], num_kv_heads=z["k"], embed_dim=z["h"],
                 max_seq_len=z["s"], intermediate_dim=z["f"])
    plain, adapted = (llama3_2, lora_llama3_2) if key["head"] == "tied" else (llama3_1, lora_llama3_1)
    if key["adapter"] == "none":
        made = plain(**sizes)
    else:
        made = adapted(["q_proj", "k_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, lora_rank=z["r"],
                             lora_alpha=2 * z["r"], lora_dropout=0.0, **sizes)
        set_trainable_params(made, get_adapter_params(made))
    if key["loss"] != "whole":
        made.set_num_output_chunks(8)
    if key["checkpoint"] == "full":
        training.set_activation_checkpointing(made, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    return made


def loss(model, inputs, key):
    """The recipes' `_loss_step`."""
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    labels = inputs["labels"]
    logits = model(inputs["input_ids"])
    ignored = torch.full((labels.shape[0], 1), -100, dtype=labels.dtype)
    labels = torch.hstack((labels[..., 1:], ignored))
    compile_it = (lambda f: compiled.Compiled(f, key["recorder"], cache=key["recorder"].compiled)) if key["compiled"] == "inductor" else (lambda f: f)
    if isinstance(logits, list):
        chunked = CEWithChunkedOutputLoss()
        chunked.compute_cross_entropy = compile_it(chunked.compute_cross_entropy)
        value = chunked(logits, labels)
    else:
        entropy = compile_it(torch.nn.functional.cross_entropy)
        value = entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
    del logits
    return value, None
