"""Losses of trainers other than the model's own."""

import collections
import contextlib
import re
import types

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def chunked(model, ids, labels, chunk):
    """Head and cross entropy per chunk, recomputed in the backward (torchtune, older TRL)."""
    head = model.get_output_embeddings()
    hidden = model.model(input_ids=ids).last_hidden_state
    hidden, labels = hidden[:, :-1].reshape(-1, hidden.shape[-1]), labels[:, 1:].reshape(-1)
    one = lambda h, y: F.cross_entropy(head(h).float(), y, reduction="sum")
    loss = torch.zeros((), dtype=torch.float32)
    for start in range(0, labels.shape[0], chunk):
        loss = loss + checkpoint(one, hidden[start:start + chunk], labels[start:start + chunk], use_reentrant=False)
    return loss / labels.shape[0]


def reward(model, inputs):
    """TRL's RewardTrainer: a number for each sequence, and the log-sigmoid of the differences in pairs.

    Here each number stands for a difference: the batch may be odd, and pairs cost nothing beside the model.
    """
    rewards = model(input_ids=inputs["input_ids"]).logits.squeeze(-1)
    return -F.logsigmoid(rewards).mean()


def trl(model, inputs, chunk):
    """The model's own loss, with the entropy and accuracy that TRL's SFTTrainer logs (0.20 to 1.0).

    The logits are read again, `chunk` rows at a time for the entropy, and live until all is logged.
    TRL joins the chunks' entropies; here each is added to the sum.
    """
    outputs = model(**inputs)
    with torch.no_grad():
        entropy = torch.zeros((), dtype=torch.float32)
        for logits in outputs.logits.reshape(-1, outputs.logits.shape[-1]).split(chunk):
            log_probabilities = F.log_softmax(logits, dim=-1)
            entropy += -(torch.exp(log_probabilities) * log_probabilities).sum(-1).sum()
        entropy.item()
        labels = inputs["labels"][..., 1:]
        predictions = outputs.logits[..., :-1, :].argmax(dim=-1)
        mask = labels != -100
        ((predictions == labels) & mask).sum().item()
        mask.sum().item()
    return outputs.loss


# TRL's losses that never have the logits: of supervised fine-tuning, of preferences with their
# reference or with its log-probabilities from before, and of GRPO's training step.
FUSED = {"trl-fused": ("log_probs", "entropy", "is_top1"), "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
         "dpo-precomputed": ("log_probs", "entropy", "mean_logits", "is_top1"), "grpo": ("log_probs", "entropy")}
FUSED_TILE, TRACED_TILE = 32768, 131072


class _OneProcess:
    """What TRL's losses ask of Accelerate, with one process."""

    device, num_processes, is_main_process = torch.device("cpu"), 1, False
    gather = gather_for_metrics = staticmethod(lambda x: x)
    unwrap_model = staticmethod(lambda model: model)
    reduce = staticmethod(lambda x, reduction: x)
    autocast = contextlib.nullcontext


def dpo(model, inputs, reference, precomputed):
    """`DPOTrainer._compute_loss` of TRL 1.x: pairs as [chosen, rejected], every token a completion's.

    The reference runs after the model's own forward pass: `reference`, or the model without adapters.
    """
    from trl.trainer.dpo_trainer import DPOTrainer
    trainer = types.SimpleNamespace(
        model=getattr(model, "module", model), ref_model=reference, accelerator=_OneProcess, args=types.SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": False}),
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=precomputed, f_divergence_type="reverse_kl", loss_types=["sigmoid"],
        loss_weights=[1.0], beta=0.1, use_weighting=False, _total_train_tokens=0, _tp_size=1,
        _metrics={"train": collections.defaultdict(list)})
    return DPOTrainer._compute_loss(trainer, model, inputs, False)


def grpo(model, inputs):
    """`GRPOTrainer._compute_loss` of TRL 1.x with its defaults: no reference, and the log-probabilities of before are the model's own."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    trainer = types.SimpleNamespace(
        model=model, accelerator=_OneProcess, args=types.SimpleNamespace(delta=None, steps_per_generation=1), aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0, loss_type="dapo",
        epsilon_low=0.2, epsilon_high=0.2, use_vllm=False, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)})
    trainer._get_per_token_logps_and_entropies = types.MethodType(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
    return GRPOTrainer._compute_loss(trainer, model, inputs)


def trl_fused(model, inputs):
    """The loss of TRL's SFTTrainer from 1.x on, with the entropy and accuracy that it logs."""
    outputs = model(**inputs, fused_lm_head=True)
    loss = (-outputs.log_probs).sum() / outputs.label_mask.sum().clamp(min=1)
    valid, entropy, correct = outputs.label_mask.sum(), outputs.entropy.detach().sum(), outputs.is_top1.sum()
    (entropy / valid).item()
    (correct / valid).item()
    return loss


def use_fused_head(model, tokens, recorder, outputs):
    """Adds TRL's head to the model (`add_fused_lm_head`), with what it returns of each token.

    It multiplies 4,096 tokens with 32,768 words at a time; here `tokens` with all words at once, in
    a buffer that the table states at its true width (`tile`). Without a recorder it is TRL's own head,
    whose tiles are folded by PyTorch's operators on processors.
    """
    import trl.kernels.chunked_logprob as kernels
    from trl.trainer import utils
    if recorder is not None:
        if recorder.device == "cuda":
            kernels._use_triton = utils._use_triton = lambda device: True
            kernels._addmm_fp32 = lambda total, a, b: recorder.product("aten.addmm", (total, a, b), total)
        utils._CHUNKED_LOGPROB_CHUNK_SIZE = TRACED_TILE
        kernels.TOKEN_CHUNK_SIZE = tokens
    utils.add_fused_lm_head(model, outputs=outputs)


def tile(text, from_width=TRACED_TILE, to_width=FUSED_TILE):
    """A table's text with the true size of the fused head's buffer, or back."""
    def resized(found):
        size = int(found[2])
        return f"{found[1]}{size // from_width * to_width}*q" if size % from_width == 0 else found[0]
    return re.sub(r"^(\+ \d+ )(\d+)\*q$", resized, text, flags=re.MULTILINE)
