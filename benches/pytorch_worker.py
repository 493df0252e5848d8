#!/usr/bin/env python3
"""One PyTorch rank of benches/pytorch.py. Reads a number of repetitions per line from standard input, and trains or all-reduces as often.

Started by benches/pytorch.py in its virtual environment, not by hand. Every answer is one line of JSON.
"""
import argparse
import contextlib
import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as distributed
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A layer of GPT-2 (Radford et al. 2019) without dropout; attention is PyTorch's fused one."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, sequence, hidden = x.shape
        parts = self.qkv(self.ln_1(x)).view(batch, sequence, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 with a head that shares the embedding's weights."""

    def __init__(self, layers, hidden, heads, vocab, sequence):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab, hidden), nn.Parameter(torch.zeros(sequence, hidden))
        self.layers = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Bert(nn.Module):
    """Hugging Face's BERT for masked words, which returns the logits of every position."""

    def __init__(self, layers, hidden, heads, vocab, sequence):
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                            intermediate_size=4 * hidden, max_position_embeddings=sequence, hidden_dropout_prob=0.0,
                            attention_probs_dropout_prob=0.0, attn_implementation="sdpa")
        self.model = BertForMaskedLM(config)

    def forward(self, tokens):
        return self.model(input_ids=tokens).logits.flatten(0, 1)


def build(sizes, batch):
    """Returns the model of a case, the inputs and labels of one synthetic batch, and whether the model is convolutional."""
    family = sizes["family"]
    if family == "mlp":
        widths = sizes["widths"]
        layers = [layer for pair in zip(widths, widths[1:]) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), torch.randn(batch, widths[0]), torch.randint(widths[-1], (batch,)), False
    if family == "resnet":
        import torchvision

        model = getattr(torchvision.models, f"resnet{sizes['depth']}")(num_classes=sizes["classes"])
        if sizes["stem"] == "small":
            model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
        image = sizes["image"]
        return model, torch.randn(batch, 3, image, image), torch.randint(sizes["classes"], (batch,)), True
    shape = {name: sizes[name] for name in ("layers", "hidden", "heads", "vocab", "sequence")}
    model = Gpt(**shape) if family == "gpt" else Bert(**shape)
    tokens = lambda: torch.randint(sizes["vocab"], (batch, sizes["sequence"]))
    return model, tokens(), tokens().flatten(), False


class Training:
    """Training steps of a case: forward, loss, backward, update."""

    def __init__(self, options):
        case = json.loads(options.case)
        tuned = options.variant == "tuned"
        model, self.inputs, self.labels, convolutional = build(case["model"], case["batch"] // options.ranks)
        if tuned and convolutional:
            model = model.to(memory_format=torch.channels_last)
            self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
        parameters = model.parameters()
        fused = True if tuned else None
        if case["optimizer"] == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=fused)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=fused)
        if options.ranks > 1:
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=tuned)
        self.model = model.train()
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
        self.cast = (lambda: torch.autocast("cpu", half)) if half else contextlib.nullcontext

    def step(self):
        self.optimizer.zero_grad()
        with self.cast():
            loss = functional.cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self, count):
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            loss = self.step()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "loss": loss}


class AllReduce:
    """gloo's all-reduce, timed in batches. A single one may find the peer's data already there and seem to take no time."""

    def __init__(self, options):
        self.sizes = json.loads(options.case)

    def run(self, count):
        result = {}
        for size in self.sizes:
            values = torch.zeros(size // 4)
            batch = min(max((1 << 20) // size, 1), 200)
            seconds = []
            for _ in range(max(count if size < 64 << 20 else count // 4, 2)):
                distributed.barrier()
                start = time.perf_counter()
                for _ in range(batch):
                    distributed.all_reduce(values)
                seconds.append((time.perf_counter() - start) / batch)
            result[str(size)] = seconds
        return {"seconds": result}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, help="JSON: a case, or the sizes of all-reduces")
    parser.add_argument("--variant", choices=["stock", "tuned", "all-reduce"], required=True)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--meeting", help="file through which the ranks find each other")
    options = parser.parse_args()
    # One process per rank, each on its own core, as in Foretell.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[options.rank]})
    torch.set_num_threads(1)
    torch.manual_seed(options.rank)
    if options.ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{options.meeting}", rank=options.rank,
                                       world_size=options.ranks, timeout=datetime.timedelta(minutes=10))
    work = AllReduce(options) if options.variant == "all-reduce" else Training(options)
    work.run(2)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(work.run(int(line))), flush=True)


if __name__ == "__main__":
    main()
