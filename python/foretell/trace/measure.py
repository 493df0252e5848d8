"""`python -m foretell.trace.measure REQUEST ANSWER`: times a framework's own operators, for `foretell calibrate --stack`.

A model of two layers at the plan's sizes takes a few steps; each operator is timed as its own code calls it, with all ranks
at work. What a step takes beyond them is the framework's own time.
"""

import contextlib
import statistics
import time

import torch

from . import real, table

LAYERS = 2
PLAIN_STEPS, TIMED_STEPS, TRAINER_STEPS = 6, 6, 8
SHORTEST, LONGEST = 1 << 12, 1 << 26
COLLECTIVE_SECONDS = 0.3


def step(job, model, reference, inputs, timer=None):
    """Forward and backward pass, timed; clipping and update are measured apart."""
    with timer or contextlib.nullcontext():
        loss, kept = job.loss(model, inputs, reference)
        loss.backward()
        del loss, kept


def passes(job, model, optimizer):
    """How long clipping and the update take, with the bytes that predictions count."""
    trained = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in trained)
    times = {"gradients' norm": (size, []), "gradients' clipping": (2 * size, []), "AdamW": (7 * size, []), "SGD": (5 * size, [])}
    times |= {real.INTO_BUCKETS: (2 * size, []), real.OUT_OF_BUCKETS: (2 * size, [])} if job.ranks > 1 else {}
    update = "SGD" if job.optimizer == "sgd" else "AdamW"
    bucket = torch.zeros(sum(p.numel() for p in trained), dtype=trained[0].dtype) if job.ranks > 1 else None
    for _ in range(6):
        grads = [p.grad for p in trained]
        began = time.perf_counter()
        norm = torch.nn.utils.get_total_norm(grads)
        done = time.perf_counter()
        times["gradients' norm"][1].append(done - began)
        torch.nn.utils.clip_grads_with_norm_(trained, 1.0, norm)
        began = time.perf_counter()
        times["gradients' clipping"][1].append(began - done)
        optimizer.step()
        times[update][1].append(time.perf_counter() - began)
        if bucket is not None:
            views = [view.view_as(g) for view, g in zip(bucket.split([g.numel() for g in grads]), grads)]
            began = time.perf_counter()
            for view, g in zip(views, grads):
                torch.mul(g, 1.0 / job.ranks, out=view)
            done = time.perf_counter()
            times[real.INTO_BUCKETS][1].append(done - began)
            for view, g in zip(views, grads):
                g.copy_(view)
            times[real.OUT_OF_BUCKETS][1].append(time.perf_counter() - done)
    # The first update makes the states.
    return [{"name": n, "bytes": b, "time": real.sample(t[1:])} for n, (b, t) in times.items() if t]


def exchanges(job):
    """Times collectives of all ranks."""
    if job.ranks == 1:
        return []
    distributed, found = torch.distributed, []
    size = SHORTEST
    while size <= LONGEST:
        whole, times = torch.ones(size // 4), []
        while sum(times) < COLLECTIVE_SECONDS and len(times) < 100 or len(times) < 5:
            distributed.barrier()
            began = time.perf_counter()
            distributed.all_reduce(whole)
            took = torch.tensor([time.perf_counter() - began])
            distributed.all_reduce(took, distributed.ReduceOp.MAX)
            times.append(took.item())
        found.append({"exchange": "all_reduce", "bytes": size, "time": real.sample(times[1:])})
        size *= 4
    return found


def share_of_processor(job):
    """The share of the processor that a collective takes beside kernels: 0 if they run side by side, 1 if in turn."""
    if job.ranks == 1:
        return 1.0
    distributed = torch.distributed
    whole, left = torch.ones(1 << 22), torch.randn(512, 512)
    def kernels():
        for _ in range(count):
            left @ left
    def timed(function):
        times = []
        for _ in range(5):
            distributed.barrier()
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    def both():
        handle = distributed.all_reduce(whole, async_op=True)
        kernels()
        handle.wait()
    alone = timed(lambda: distributed.all_reduce(whole))
    count = 1
    count = max(1, round(2 * alone / max(timed(kernels), 1e-6)))
    counted = torch.tensor([count])
    distributed.broadcast(counted, 0)
    count = counted.item()
    return min(1.0, max(0.0, (timed(both) - timed(kernels)) / alone))


TINY = {"b": 1, "s": 16, "u": 16, "p": 32, "h": 64, "n": 4, "k": 4, "d": 16, "f": 64, "m": 32, "v": 128, "r": 4}


def trainers_part(job):
    """What Hugging Face's Trainer takes of a step beside its operators, by a model that takes hardly any time itself."""
    if job.key["framework"] != "hf" or job.ranks > 1 or job.architecture.inputs != "ids":
        return 0.0
    from .train import plain_steps, trainer_steps
    # Pairs are two sequences, and KTO needs two samples.
    small = {**TINY, "b": 2 if job.preference else 1}
    tiny = real.Job({**job.request, "sizes": {name: small.get(name, size) for name, size in job.sizes.items()}, "micro_batches": 1})
    usual = lambda steps: statistics.median(steps(tiny, 1, TRAINER_STEPS)["step_seconds"])
    return max(0.0, usual(trainer_steps) - usual(plain_steps))


def measure(rank, job):
    layers = min(LAYERS, job.layers)
    model, reference = job.prepared(layers)
    optimizer = job.optimizer_of(model)
    batches = [job.inputs(torch.Generator().manual_seed(rank * 100 + i)) for i in range(3)]
    def together():
        if job.ranks > 1:
            torch.distributed.barrier()
    plain = []
    for i in range(PLAIN_STEPS):
        together()
        began = time.perf_counter()
        step(job, model, reference, batches[i % 3])
        plain.append(time.perf_counter() - began)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    timer = real.Timer()
    for i in range(TIMED_STEPS + 1):
        together()
        if i == 1:
            timer.calls.clear()
        step(job, model, reference, batches[i % 3], timer)
        optimizer.zero_grad()
    step(job, model, reference, batches[0])
    together()
    moves = passes(job, model, optimizer)
    operators = [{"call": call, "bytes": timer.bytes[call], "time": real.sample(times)} for call, times in timer.calls.items()]
    count = sum(map(len, timer.calls.values())) / TIMED_STEPS
    inside = sum(statistics.median(times) * len(times) for times in timer.calls.values()) / TIMED_STEPS
    overheads = [max(0.0, took - inside) / count for took in plain[1:]]
    del model, reference, optimizer
    return {"operators": operators, "moves": moves, "exchanges": exchanges(job), "operator_overhead": real.sample(overheads),
            "step_overhead": real.sample([trainers_part(job)]), "communication_share": share_of_processor(job)}


def main():
    request, told, answer = real.run(measure)
    key = real.Job(request).key
    text, _ = table.forked(table.make, key, table.versions_of(key), "cpu")
    real.write(answer, {**told[0], "table": text})


if __name__ == "__main__":
    main()
