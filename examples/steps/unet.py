"""A U-Net with attention in its lower levels that learns to denoise, with a loss of its own, under autocast."""

import torch
from torch import nn
from torch.nn import functional as F

class Residual(nn.Module):
    def __init__(self, a, b, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, a), nn.Conv2d(a, b, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, b), nn.Conv2d(b, b, 3, padding=1)
        self.time = nn.Linear(time, b)
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()
    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))

class Attention(nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.heads, self.norm, self.qkv, self.out = heads, nn.GroupNorm(32, c), nn.Linear(c, 3 * c), nn.Linear(c, c)
    def forward(self, x):
        b, c, h, w = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(y).view(b, h * w, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return x + self.out(y).transpose(1, 2).view(b, c, h, w)

class UNet(nn.Module):
    def __init__(self, widths=(192, 384, 576, 768), time=768):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(192, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.up, c, skips = nn.ModuleList(), nn.ModuleList(), widths[0], [widths[0]]
        for level, w in enumerate(widths):
            for _ in range(2):
                self.down.append(nn.ModuleDict({"res": Residual(c, w, time), **({"attention": Attention(w, w // 64)} if level else {})}))
                c = w
                skips.append(c)
            if level < 3:
                self.down.append(nn.ModuleDict({"pool": nn.Conv2d(c, c, 3, stride=2, padding=1)}))
                skips.append(c)
        self.middle = nn.ModuleList([Residual(c, c, time), Attention(c, c // 64), Residual(c, c, time)])
        for level, w in reversed(list(enumerate(widths))):
            for i in range(3):
                self.up.append(nn.ModuleDict({"res": Residual(c + skips.pop(), w, time), **({"attention": Attention(w, w // 64)} if level else {})}))
                c = w
            if level:
                self.up.append(nn.ModuleDict({"conv": nn.ConvTranspose2d(c, c, 4, stride=2, padding=1)}))
        self.norm, self.head = nn.GroupNorm(32, c), nn.Conv2d(c, 4, 3, padding=1)
    def forward(self, x, t):
        angles = t[:, None].float() * torch.exp(-torch.arange(96, device=x.device) / 10)
        t = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.stem(x)
        kept = [x]
        for part in self.down:
            if "pool" in part:
                x = part["pool"](x)
            else:
                x = part["res"](x, t)
                if "attention" in part:
                    x = part["attention"](x)
            kept.append(x)
        a, b, c = self.middle
        x = c(b(a(x, t)), t)
        for part in self.up:
            if "conv" in part:
                x = part["conv"](x)
            else:
                x = part["res"](torch.cat([x, kept.pop()], 1), t)
                if "attention" in part:
                    x = part["attention"](x)
        return self.head(F.silu(self.norm(x)))


def setup():
    m = UNet().cuda()
    return m, torch.optim.AdamW(m.parameters(), lr=1e-4)

def step(m, o, batch=8):
    x, noise = torch.randn(batch, 4, 64, 64, device="cuda"), torch.randn(batch, 4, 64, 64, device="cuda")
    t = torch.randint(0, 1000, (batch,), device="cuda")
    a = torch.cos(t / 1000)[:, None, None, None]
    with torch.autocast("cuda", torch.bfloat16):
        p = m(a * x + (1 - a * a).sqrt() * noise, t)
    error = (p.float() - noise) ** 2
    weight = torch.clamp(a ** 2 / (1 - a ** 2), max=5)
    loss = (weight * error).mean() + 0.1 * (p.float().diff(dim=-1) - noise.diff(dim=-1)).abs().mean()
    loss.backward()
    o.step()
    o.zero_grad()
