"""TRL's own trainers of preferences, on random pairs of full length in which every token is a completion's.

Such samples are what the traced steps have (`losses.dpo`), so nothing of a step is padding.
"""

import torch

from . import models
from .real import SEQUENCES

PAD, END = "<pad>", "<end>"


def tokenizer():
    """A tokenizer of two marks: trainers ask for their numbers, and the samples are numbers already."""
    from tokenizers import Tokenizer, models as kinds
    from transformers import PreTrainedTokenizerFast
    marks = Tokenizer(kinds.WordLevel({PAD: 0, END: 1}, unk_token=END))
    return PreTrainedTokenizerFast(tokenizer_object=marks, pad_token=PAD, eos_token=END, unk_token=END)


def row(method, sequences, number):
    """A sample as the method's collator reads it."""
    if method == "dpo":
        return {"prompt_ids": [], "chosen_ids": sequences[0], "rejected_ids": sequences[1]}
    if method == "reward":
        return {"chosen_ids": sequences[0], "rejected_ids": sequences[1]}
    if method == "kto":
        return {"prompt_ids": [], "completion_ids": sequences[0], "label": number % 2 == 0}
    made = {"prompt": "", "chosen": "", "rejected": "", "prompt_input_ids": [], "prompt_attention_mask": []}
    for name, ids in zip(("chosen", "rejected"), sequences):
        made |= {f"{name}_input_ids": ids, f"{name}_labels": ids, f"{name}_attention_mask": [1] * len(ids)}
    return made


def samples(job, count):
    """`count` samples in a file that all ranks read, since caches of what is computed beforehand lie beside it."""
    from datasets import Dataset, Features, Sequence, Value, load_from_disk
    distinct, wide = job.distinct_samples(), SEQUENCES[job.preference]
    rows = []
    for number in range(distinct):
        ids = job.sample(number, wide)["input_ids"]
        rows.append(row(job.preference, ids.tolist(), number))
    kinds = {str: Value("string"), bool: Value("bool"), list: Sequence(Value("int64"))}
    features = Features({name: kinds[type(value)] for name, value in rows[0].items()})
    path = f"{job.scratch}/samples"
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        Dataset.from_list([rows[i % distinct] for i in range(count)], features=features).save_to_disk(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return load_from_disk(path)


def classes(method):
    """TRL's trainer of a method, which takes the samples as they are, and its configuration."""
    if method == "dpo":
        from trl import DPOConfig as Configuration, DPOTrainer as Trainer
    elif method == "reward":
        from trl import RewardConfig as Configuration, RewardTrainer as Trainer
    elif method == "kto":
        from trl.trainer.kto_config import KTOConfig as Configuration
        from trl.trainer.kto_trainer import KTOTrainer as Trainer
    elif method == "orpo":
        from trl.experimental.orpo import ORPOConfig as Configuration, ORPOTrainer as Trainer
    else:
        raise SystemExit(f"TRL's trainer of `{method}` is not run here")

    class Prepared(Trainer):
        def _prepare_dataset(self, dataset, processing_class, args, name):
            if not getattr(self, "calculate_KL", False):
                return dataset
            # KTO's other answers: the completions of a batch, each moved on by one.
            def other(batch):
                return {"KL_completion_ids": [batch["completion_ids"][-1]] + batch["completion_ids"][:-1]}
            return dataset.map(other, batched=True, batch_size=args.per_device_train_batch_size)

        def tokenize_row(self, feature, model=None):
            return feature

    Prepared.__name__ = Trainer.__name__
    return Prepared, Configuration


def trainer(job, layers, folder, count, callbacks, keep, **arguments):
    """TRL's trainer of a job."""
    Trainer, Configuration = classes(job.preference)
    more = {}
    if job.preference in ("dpo", "kto"):
        more["precompute_ref_log_probs"] = job.precomputed
    recomputes = job.key["checkpoint"] != "none"
    if recomputes:
        more["gradient_checkpointing_kwargs"] = {"use_reentrant": job.key["checkpoint"] == "full-reentrant"}
    limit = {"max_length": job.z["s"]}
    options = Configuration(folder, per_device_train_batch_size=job.z["b"] // SEQUENCES[job.preference], disable_dropout=job.key["dropout"] == "none",
                            gradient_checkpointing=recomputes, seed=job.seed, **limit, **more, **arguments)
    model = job.model(layers, plain=True, keep=keep)
    given = {"processing_class": tokenizer(), "args": options, "train_dataset": samples(job, count), "callbacks": callbacks}
    if job.key["adapter"] != "none":
        given["peft_config"] = models.adapters(job.architecture, job.z, job.key)
    elif job.preference in ("dpo", "kto") and not job.precomputed:
        given["ref_model"] = job.model(layers, plain=True).requires_grad_(False)
    return Trainer(model, **given)
