"""Times training steps of the models of tests/gpu.sh in PyTorch, in bf16 autocast: eager, compiled, and
compiled with cuDNN's attention.

Prints a JSON line for each case: milliseconds of a step by CUDA events, the median of 20 after 10
warm-up steps, and the file of cuBLASLt that PyTorch computed with. Needs torch, and torchvision for
ResNet.
"""

import contextlib
import json
import pathlib
import statistics
import sys

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, hidden, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before_attention, self.before_ffn = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.widen, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, sequence, hidden = x.shape
        q, k, v = self.attention(self.before_attention(x)).split(hidden, dim=2)
        q, k, v = (t.view(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2) for t in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.project(y.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.narrow(functional.gelu(self.widen(self.before_ffn(x)), approximate="tanh"))


class Transformer(nn.Module):
    """GPT-2, or without a causal mask BERT without its pooler. The head shares the embedding's weights."""

    def __init__(self, layers, hidden, heads, vocabulary, sequence, causal):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, causal) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def transformer(layers, hidden, heads, vocabulary, sequence, batch, causal):
    model = Transformer(layers, hidden, heads, vocabulary, sequence, causal).cuda()
    tokens = torch.randint(vocabulary, (batch, sequence), device="cuda")
    return model, tokens, tokens, lambda y, labels: functional.cross_entropy(y.flatten(0, 1), labels.flatten())


def resnet50(batch):
    import torchvision

    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    return model, images, torch.randint(1000, (batch,), device="cuda"), functional.cross_entropy


CASES = {
    "resnet50-b256": lambda: resnet50(256),
    "gpt2-s1024-b16": lambda: transformer(12, 768, 12, 50257, 1024, 16, True),
    "gpt-1.3b-s1024-b8": lambda: transformer(24, 2048, 16, 50257, 1024, 8, True),
    "gpt-1.3b-s2048-b4": lambda: transformer(24, 2048, 16, 50257, 2048, 4, True),
    "bert-base-s512-b32": lambda: transformer(12, 768, 12, 30522, 512, 32, False),
}


KINDS = ("eager", "compiled", "compiled, cuDNN attention")


def attention(kind):
    """Returns a context in which attention is cuDNN's where cuDNN has it, if the kind says so."""
    if "cuDNN" not in kind:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


def cublaslt():
    """Returns the file of cuBLASLt that this process has loaded."""
    files = {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "libcublasLt" in line}
    return ", ".join(sorted(str(pathlib.Path(one).resolve()) for one in files))


def time_case(name, compiled):
    model, inputs, labels, loss_of = CASES[name]()
    if name.startswith("resnet"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(run(inputs), labels)
        loss.backward()
        optimizer.step()

    for _ in range(10):
        step()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    torch.backends.cudnn.benchmark = True
    for name in sys.argv[1:] or CASES:
        for kind in KINDS:
            if "cuDNN" in kind and name.startswith("resnet"):
                continue
            try:
                with attention(kind):
                    record = {"case": name, "kind": kind, "milliseconds": time_case(name, kind != "eager")}
            except Exception as error:  # the other cases must still be measured
                record = {"case": name, "kind": kind, "error": str(error)[:300]}
            print(json.dumps({**record, "torch": torch.__version__, "cublaslt": cublaslt()}), flush=True)
            torch.cuda.empty_cache()
            torch.compiler.reset()
