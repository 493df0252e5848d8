"""`python -m foretell.trace.train REQUEST ANSWER`: the framework trains, for `foretell execute`.

Hugging Face's models are trained by its Trainer, on preferences by TRL's, others by a plain loop. The last two steps are watched: one with each
operator timed, one with the tensors that live counted. They count for no step time.
"""

import functools
import importlib.metadata
import os
import tempfile
import time

import torch

from . import matrix, real

WARM_UP = 3
# DDP makes its buckets anew in the second step: they are seen from the first on.
BUCKETS_MADE = 2
# Where a plan states none.
LEARNING_RATE = 1e-4
# What the Trainer is not told as an argument.
OWN = ("alpha", "momentum")
# The folder, beside trained adapters, of the model that they are for.
BASE = "base"


class Watched:
    """The steps of a run: times, and what the last two call and hold."""

    def __init__(self, steps, ranks):
        self.steps, self.count, self.last = steps, 0, None
        self.times, self.timer, self.memory = [], real.Timer(ranks > 1), real.Memory()

    def total(self):
        return WARM_UP + self.steps + 2

    def begin(self, model, optimizer, reference=None):
        if self.count < BUCKETS_MADE:
            self.memory.__enter__()
        if self.count == WARM_UP + self.steps:
            self.timer.__enter__()
        elif self.count == WARM_UP + self.steps + 1:
            self.memory.hold(model, optimizer, reference)
            self.memory.__enter__()

    def end(self):
        now = time.perf_counter()
        if self.count < BUCKETS_MADE:
            self.memory.__exit__(None, None, None)
            self.memory.peak = 0
        if self.count == WARM_UP + self.steps:
            self.timer.__exit__(None, None, None)
        elif self.count == WARM_UP + self.steps + 1:
            self.memory.__exit__(None, None, None)
        elif self.last is not None and self.count >= WARM_UP:
            self.times.append(now - self.last)
        self.last, self.count = now, self.count + 1


class Samples(torch.utils.data.Dataset):
    """Random samples, those of one step again and again."""

    def __init__(self, job, count):
        self.count = count
        self.rows = [{name: t[0] for name, t in job.sample(number).items()} for number in range(job.distinct_samples())]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.rows[index % len(self.rows)]


def arguments(job, watched):
    """What a job says in the words of `TrainingArguments`."""
    return dict(
        use_cpu=True, gradient_accumulation_steps=job.micro_batches, max_steps=watched.total(), logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, ddp_backend="gloo" if job.ranks > 1 else None,
        ddp_find_unused_parameters=False if job.ranks > 1 else None, bf16=job.is_half(), log_level="error",
        optim="sgd" if job.optimizer == "sgd" else "adamw_torch_fused", lr_scheduler_type="constant",
        **{"learning_rate": LEARNING_RATE, **{name: value for name, value in job.recipe.items() if name not in OWN}})


def trainer_steps(job, layers, steps):
    """Steps of Hugging Face's Trainer, or of TRL's trainer of a method."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    watched, losses = Watched(steps, job.ranks), []
    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
            watched.begin(model, optimizer, getattr(trainer, "ref_model", None))

        def on_step_end(self, args, state, control, **_):
            watched.end()

        def on_log(self, args, state, control, logs=None, **_):
            losses.extend([logs["loss"]] if logs and "loss" in logs else [])

    folder = checkpoint_of(job, watched)
    with tempfile.TemporaryDirectory() as output:
        count = job.distinct_samples() * watched.total()
        keep = functools.partial(keep_base, job, folder)
        if job.preference:
            from . import preferences
            trainer = preferences.trainer(job, layers, output, count, [Watch()], keep, **arguments(job, watched))
        else:
            options = TrainingArguments(output, per_device_train_batch_size=job.z["b"], seed=job.seed, **arguments(job, watched))
            trainer = Trainer(job.model(layers, keep=keep), options, train_dataset=Samples(job, count), callbacks=[Watch()])
        if job.optimizer == "sgd":                              # the Trainer's own has no momentum
            trained = [p for p in trainer.model.parameters() if p.requires_grad]
            trainer.optimizer = torch.optim.SGD(trained, lr=trainer.args.learning_rate, momentum=job.momentum(),
                                                weight_decay=trainer.args.weight_decay)
        trainer.train()
        if folder and trainer.is_world_process_zero():
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
    return answer(watched, losses)


def checkpoint_of(job, watched):
    """The folder that the trained parameters are saved in, or none."""
    return os.path.join(job.checkpoint, str(watched.total())) if job.checkpoint else None


def keep_base(job, folder, model):
    """Saves the model that adapters are trained for, as it is before its weights are quantised: adapters name it."""
    if not folder or job.key["adapter"] == "none":
        return
    base = os.path.join(folder, BASE)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        model.save_pretrained(base)
    model.name_or_path = os.path.abspath(base)


def plain_steps(job, layers, steps):
    """Steps of a loop without a trainer."""
    watched, losses = Watched(steps, job.ranks), []
    model, reference = job.prepared(layers)
    optimizer = job.optimizer_of(model)
    trained = torch.nn.parallel.DistributedDataParallel(model) if job.ranks > 1 else model
    batches = [job.inputs(torch.Generator().manual_seed(i)) for i in range(3)]
    for i in range(watched.total()):
        watched.begin(model, optimizer, reference)
        loss, kept = job.loss(trained, batches[i % 3], reference)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss, kept
        watched.end()
    folder = checkpoint_of(job, watched)
    if folder and (job.ranks == 1 or torch.distributed.get_rank() == 0):
        from safetensors.torch import save_model
        os.makedirs(folder, exist_ok=True)
        save_model(model, os.path.join(folder, "model.safetensors"))
    return answer(watched, losses)


def answer(watched, losses):
    return {"step_seconds": watched.times, "peak_bytes": watched.memory.peak, "operators": watched.timer.by_name(1), "loss": losses}


def train(rank, job):
    steps = trainer_steps if job.key["framework"] == "hf" else plain_steps
    return steps(job, job.layers, job.steps)


def main():
    request, told, path = real.run(train)
    slowest = [max(times) for times in zip(*(one["step_seconds"] for one in told))]
    packages = ["torch", *matrix.packages(real.Job(request).key)]
    if request.get("preference") and "trl" not in packages:
        packages.append("trl")
    real.write(path, {**told[0], "step_seconds": slowest, "peak_bytes": [one["peak_bytes"] for one in told],
                      "versions": {name: importlib.metadata.version(name) for name in packages}})


if __name__ == "__main__":
    main()
