"""Small training steps that the tests trace. `models/tests/torch` has their traces:

    for name in mlp cnn transformer hybrid unet experts resnet50; do
        python -m foretell.trace python/tests/trace/steps.py:$name -o models/tests/torch/$name.json
    done
"""

import torch
from torch import nn
from torch.nn import functional as F


def train(model, loss, lr=0.1, optimizer=torch.optim.SGD):
    update = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
    loss.backward()
    update.step()
    update.zero_grad()
    return loss.item()


def mlp(batch=8):
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.Sigmoid(), nn.Linear(256, 10)).cuda()
    x, y = torch.randn(batch, 784, device="cuda"), torch.randint(0, 10, (batch,), device="cuda")
    return train(model, F.cross_entropy(model(x), y))


class Separable(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.depth = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm, self.point = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x):
        return x + self.point(F.relu(self.norm(self.depth(x))))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(Separable(16), Separable(16))
        self.pool, self.wide, self.head = nn.MaxPool2d(2), nn.Conv2d(16, 24, (1, 3), padding=(0, 1)), nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.wide(self.pool(self.blocks(self.stem(x)))).mean((2, 3)))


def cnn(batch=4):
    model = Convolutions().cuda()
    x, y = torch.randn(batch, 3, 32, 32, device="cuda"), torch.randint(0, 10, (batch,), device="cuda")
    return train(model, F.cross_entropy(model(x), y))


class Transformer(nn.Module):
    """Its batch is the second dimension, its head is its embedding, and its layers are checkpointed."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(500, 64), nn.Parameter(torch.zeros(64, 1, 64))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, activation="gelu") for _ in range(2))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 500, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) + self.position[:x.shape[0]]
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def transformer(batch=3, sequence=16):
    model = Transformer().cuda()
    x = torch.randint(0, 500, (sequence, batch), device="cuda")
    return train(model, F.cross_entropy(model(x).flatten(0, 1), x.flatten()), optimizer=torch.optim.AdamW)


class Scan(nn.Module):
    """A state-space mixer in plain operators, as Mamba is without its kernels."""

    def __init__(self, width, state=8):
        super().__init__()
        self.inner, self.state = 2 * width, state
        self.enter, self.leave = nn.Linear(width, 2 * self.inner, bias=False), nn.Linear(self.inner, width, bias=False)
        self.conv = nn.Conv1d(self.inner, self.inner, 4, groups=self.inner, padding=3)
        self.select, self.a_log, self.skip = nn.Linear(self.inner, 2 * state + 1), nn.Parameter(torch.zeros(self.inner)), nn.Parameter(torch.ones(self.inner))

    def forward(self, x):
        x, gate = self.enter(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :x.shape[1]].transpose(1, 2))
        b, c, step = self.select(x).split([self.state, self.state, 1], -1)
        decay = F.softplus(step) * -torch.exp(self.a_log)
        states = torch.cumsum((x * torch.exp(-decay))[..., None] * b[:, :, None], 1)
        y = (states @ c[..., None]).squeeze(-1) * torch.exp(decay) + self.skip * x
        return self.leave(y * F.silu(gate))


class Block(nn.Module):
    def __init__(self, width, attends):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mixer = None if attends else Scan(width)
        self.qkv, self.out = (nn.Linear(width, 3 * width), nn.Linear(width, width)) if attends else (None, None)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        y = self.norm(x)
        if self.mixer:
            x = x + self.mixer(y)
        else:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(y).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 32), nn.Linear(32, 300)
        self.layers = nn.ModuleList(Block(32, i == 1) for i in range(3))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def hybrid(batch=2, sequence=32):
    model = Hybrid().to("cuda", torch.bfloat16)
    x = torch.randint(0, 300, (batch, sequence), device="cuda")
    return train(model, F.cross_entropy(model(x).float().flatten(0, 1), x.flatten()), optimizer=torch.optim.AdamW)


class Residual(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm, self.conv, self.time = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1), nn.Linear(8, after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x, t):
        return self.skip(x) + F.silu(self.conv(F.silu(self.norm(x))) + self.time(t)[:, :, None, None])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Residual(4, 8), Residual(8, 16)])
        self.pool, self.grow = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.up, self.out = nn.ModuleList([Residual(16, 8), Residual(8, 4)]), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x, t):
        first = self.down[0](x, t)
        x = self.grow(self.down[1](self.pool(first), t))
        x = self.up[0](torch.cat([x, first], 1), t)
        return self.out(self.up[1](x, t))


def unet(batch=2):
    """A loss of the user's own: Dice, and the error weighed by a sample's noise; under autocast."""
    model = UNet().cuda()
    x, t = torch.randn(batch, 4, 16, 16, device="cuda"), torch.rand(batch, 8, device="cuda")
    y = (torch.rand(batch, 1, 16, 16, device="cuda") > 0.5).float()
    with torch.autocast("cuda", torch.bfloat16):
        p = model(x, t).float().sigmoid()
    dice = 1 - 2 * (p * y).sum((1, 2, 3)) / (p.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1)
    return train(model, dice.mean() + (t.mean(1)[:, None, None, None] * (p - y) ** 2).mean())


class Experts(nn.Module):
    """Two of four experts a token, as one product of all experts."""

    def __init__(self):
        super().__init__()
        self.embed, self.router, self.head = nn.Embedding(100, 16), nn.Linear(16, 4, bias=False), nn.Linear(16, 100)
        self.enter, self.leave = nn.Parameter(torch.zeros(4, 16, 32)), nn.Parameter(torch.zeros(4, 32, 16))

    def forward(self, x):
        x = self.embed(x)
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.topk(2)
        gates = torch.zeros_like(scores).scatter(-1, chosen, weight)
        y = torch.einsum("bsh,ehf->bsef", x, self.enter)
        return self.head(x + torch.einsum("bsef,efh,bse->bsh", F.silu(y), self.leave, gates))


def experts(batch=2, sequence=8):
    model = Experts().cuda()
    model.router.weight.requires_grad_(False)
    x = torch.randint(0, 100, (batch, sequence), device="cuda")
    return train(model, F.cross_entropy(model(x).flatten(0, 1), x.flatten()), optimizer=torch.optim.Adam)


def resnet50(batch=8):
    from torchvision.models import resnet50
    model = resnet50().cuda()
    x, y = torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (batch,), device="cuda")
    return train(model, F.cross_entropy(model(x), y))


# ---- steps of other forms

def accumulated(batch=4):
    """Gradients of two micro-batches, in DistributedDataParallel."""
    torch.distributed.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).cuda())
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(batch, 8, device="cuda"), torch.randint(0, 3, (batch,), device="cuda")
        F.cross_entropy(model(x), y).backward()
    update.step()


def contrastive(batch=4):
    """Samples meet each other: no graph of one sample."""
    model = nn.Linear(8, 16)
    z = F.normalize(model(torch.randn(batch, 8)), dim=-1)
    return train(model, F.cross_entropy(z @ z.t(), torch.arange(batch)))


def branching(batch=4):
    """The operators depend on the batch."""
    model = nn.Linear(8, 3)
    x = torch.randn(batch, 8)
    for _ in range(batch):
        x = x * 2
    return train(model, sum(model(x).sum(1) for _ in range(batch)).mean())


def without_backward(batch=4):
    nn.Linear(8, 3)(torch.randn(batch, 8))


def without_batch():
    model = nn.Linear(8, 3)
    return train(model, model(torch.randn(4, 8)).sum())
