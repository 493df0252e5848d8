"""The operators of a real step on this machine's processors are those of the table that is traced without data."""

import collections
import unittest

import torch

from foretell.trace import matrix, real, replay, table

SIZES = {"b": 2, "s": 32, "h": 64, "n": 4, "k": 2, "d": 16, "f": 96, "v": 160, "p": 48, "r": 4}
LAYERS = 3
KEYS = [
    {"architecture": "llama"},
    {"architecture": "llama", "adapter": "lora-all"},
    {"architecture": "llama", "checkpoint": "full"},
    {"architecture": "gpt2", "dropout": "some"},
    {"architecture": "bert"},
    {"architecture": "qwen3"},
    {"architecture": "llama", "adapter": "lora-all", "precision": "mixed"},
    {"architecture": "llama", "adapter": "qlora-all"},
    {"architecture": "llama", "adapter": "qlora-all", "precision": "mixed"},
    {"architecture": "gpt2", "adapter": "qlora-all", "dropout": "some"},
    {"architecture": "llama", "adapter": "int8lora-all", "precision": "mixed"},
    {"architecture": "llama", "loss": "dpo"},
    {"architecture": "llama", "loss": "dpo", "adapter": "lora-all"},
    {"architecture": "llama", "loss": "dpo", "adapter": "qlora-all-bf16", "precision": "mixed"},
    {"architecture": "llama", "loss": "dpo-precomputed", "adapter": "lora-all"},
    {"architecture": "llama", "loss": "reward", "adapter": "lora-all"},
]


def job(key, sizes=SIZES):
    # Two pairs, where a sample is one.
    sizes = {**sizes, "b": 4} if key.get("loss", "").startswith("dpo") else sizes
    return real.Job({"key": {"framework": "hf", "attention": "sdpa", "precision": "fp32", **key}, "sizes": sizes, "layers": LAYERS,
                     "ranks": 1, "threads": 1, "micro_batches": 1, "optimizer": "adamw", "steps": 1})


def real_calls(job):
    """How often a step calls each operator, by name and the tensors that it reads."""
    model, reference = job.prepared(LAYERS)
    timer, memory = real.Timer(), real.Memory()
    inputs = job.inputs(torch.Generator().manual_seed(0))
    memory.hold(model, torch.optim.SGD(p for p in model.parameters() if p.requires_grad), reference)
    held = memory.live
    with memory, timer:
        loss, _ = job.loss(model, inputs, reference)
        loss.backward()
    return collections.Counter({call: len(times) for call, times in timer.calls.items()}), memory.peak - held


def told_calls(text, sizes):
    """The same by a table."""
    calls = collections.Counter()
    parsed = replay.Table(text)
    sizes = with_chunks(parsed, sizes)
    for _, lines, _ in parsed.sequence(LAYERS):
        for line in replay.unrolled(lines, sizes):
            if not line.startswith("o "):
                continue
            name, *tensors = line[2:].split(" > ")[0].split(" ; ")[0].split()
            calls[" ".join([name, *(concrete(t, sizes) for t in tensors)])] += 1
    return calls


def with_chunks(table, sizes):
    """The sizes with the chunks of TRL's head, as `OperatorTable::values` derives them."""
    rows = sizes["b"] * (sizes["s"] - 1)
    length = min(4096, rows)
    return {**sizes, "q": length, "c": -(-rows // length)} if "q" in table.symbols else sizes


def concrete(tensor, sizes):
    kind, _, inside = tensor.rstrip("]").partition("[")
    size = lambda text: ("^" if text.startswith("^") else "") + str(int(replay.evaluate(text.lstrip("^"), sizes)))
    return f"{kind}[{','.join(map(size, filter(None, inside.split(','))))}]"


def comparable(counts):
    """Autograd sums gradients in place or not, as it finds them; a value that the host reads is no operator of a table."""
    found = collections.Counter()
    for call, n in counts.items():
        if not call.startswith("aten._local_scalar_dense"):
            found[call.replace("add_ ", "add ", 1)] += n
    return found


class RealSteps(unittest.TestCase):
    def test_a_real_step_calls_what_the_table_says(self):
        for key in KEYS:
            with self.subTest(**key):
                asked = job(key)
                calls, _ = real_calls(asked)
                text, _ = table.forked(table.make, asked.key, table.versions_of(asked.key), "cpu")
                told = told_calls(text, asked.z)
                self.assertEqual(comparable(calls) - comparable(told), {})
                self.assertEqual(comparable(told) - comparable(calls), {})

    def test_a_sample_leaves_outliers_out(self):
        told = real.sample([1e-3] * 9 + [1.0])
        self.assertEqual((told["median"], told["count"]), ("1000.0000us", 9))

    def test_matrix_knows_the_keys(self):
        for key in KEYS:
            self.assertEqual(matrix.complete({**key})["architecture"], key["architecture"])


if __name__ == "__main__":
    unittest.main()
