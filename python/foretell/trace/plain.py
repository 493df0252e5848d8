"""Models that people train with plain PyTorch: a GPT-2 in the style of nanoGPT, a Llama in the style of torchtitan."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from . import compiled

aten = torch.ops.aten


class Norm(nn.Module):
    """A layer norm without bias."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class GptAttention(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.heads = z["n"]
        self.c_attn = nn.Linear(z["h"], 3 * z["h"], bias=False)
        self.c_proj = nn.Linear(z["h"], z["h"], bias=False)

    def forward(self, x):
        b, s, h = x.size()
        q, k, v = self.c_attn(x).split(h, dim=2)
        k = k.view(b, s, self.heads, h // self.heads).transpose(1, 2)
        q = q.view(b, s, self.heads, h // self.heads).transpose(1, 2)
        v = v.view(b, s, self.heads, h // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, s, h)
        return self.c_proj(y)


class GptMlp(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.c_fc = nn.Linear(z["h"], z["f"], bias=False)
        self.c_proj = nn.Linear(z["f"], z["h"], bias=False)

    def forward(self, x):
        x = self.c_fc(x)
        x = F.gelu(x)
        x = self.c_proj(x)
        return x


class GptBlock(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = Norm(z["h"]), GptAttention(z), Norm(z["h"]), GptMlp(z)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class Gpt(nn.Module):
    """Tied embedding and head, learned positions, no biases, no dropout; the caller keeps the logits."""

    def __init__(self, z, layers, key):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(z["v"], z["h"]), nn.Embedding(z["p"], z["h"])
        self.h = nn.ModuleList(GptBlock(z) for _ in range(layers))
        self.ln_f = Norm(z["h"])
        self.lm_head = nn.Linear(z["h"], z["v"], bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, input_ids, labels):
        pos = torch.arange(0, input_ids.shape[1], dtype=torch.long)
        tok_emb = self.wte(input_ids)
        pos_emb = self.wpe(pos)
        x = tok_emb + pos_emb
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)
        return logits, loss


def gpt_loss(model, inputs, key):
    """-> (loss, what the caller's frame keeps alive during the backward)."""
    if key["precision"] == "fp32":
        logits, loss = model(**inputs)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = model(**inputs)
    return loss, logits


def _root_mean_square(x):
    return F.rms_norm(x, (x.size(-1),))


class ChatAttention(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.heads, self.width = z["n"], z["d"]
        for name in ("c_q", "c_k", "c_v", "c_proj"):
            setattr(self, name, nn.Linear(z["h"], z["h"], bias=False))

    def forward(self, x, rotations):
        b, s, h = x.size()
        q, k, v = (f(x).view(b, s, self.heads, self.width) for f in (self.c_q, self.c_k, self.c_v))
        q, k = (_root_mean_square(_turn(t, *rotations)) for t in (q, k))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, s, h))


def _turn(x, cosine, sine):
    half = x.shape[3] // 2
    first, second = x[..., :half], x[..., half:]
    turned = torch.cat([first * cosine + second * sine, second * cosine - first * sine], 3)
    return turned.to(x.dtype)


class ChatBlock(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.attn = ChatAttention(z)
        self.c_fc, self.c_proj = nn.Linear(z["h"], z["f"], bias=False), nn.Linear(z["f"], z["h"], bias=False)

    def forward(self, x, rotations):
        x = x + self.attn(_root_mean_square(x), rotations)
        return x + self.c_proj(F.relu(self.c_fc(_root_mean_square(x))).square())


class Chat(nn.Module):
    """A model like nanochat's: norms without weights, normed queries and keys, squared ReLU, an embedding in sixteen bits,
    logits that are bounded and cast to single precision."""

    def __init__(self, z, layers, key):
        super().__init__()
        self.wte = nn.Embedding(z["v"], z["h"], dtype=torch.bfloat16)
        self.h = nn.ModuleList(ChatBlock(z) for _ in range(layers))
        self.lm_head = nn.Linear(z["h"], z["v"], bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(1, z["s"], 1, z["d"] // 2, dtype=torch.bfloat16), persistent=False)

    def forward(self, input_ids, labels):
        s = input_ids.shape[1]
        rotations = self.cos[:, :s], self.sin[:, :s]
        x = _root_mean_square(self.wte(input_ids))
        for block in self.h:
            x = block(x, rotations)
        logits = self.lm_head(_root_mean_square(x))
        logits = (15 * torch.tanh(logits / 15)).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)


def chat_loss(model, inputs, key):
    with torch.autocast("cpu", torch.bfloat16):
        return model(**inputs), None


def rotate(xq, xk, rotations):
    q = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    k = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    rotations = rotations[:xq.shape[1]].view(1, xq.shape[1], 1, q.shape[-1])
    xq_out = torch.view_as_real(q * rotations).flatten(3)
    xk_out = torch.view_as_real(k * rotations).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_keys(x, times):
    b, s, k, d = x.shape
    if times == 1:
        return x
    return torch.unsqueeze(x, dim=3).expand(b, s, k, times, d).reshape(b, s, k * times, d)


class TitanAttention(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.heads, self.keys, self.width = z["n"], z["k"], z["d"]
        self.wq = nn.Linear(z["h"], z["n"] * z["d"], bias=False)
        self.wk = nn.Linear(z["h"], z["k"] * z["d"], bias=False)
        self.wv = nn.Linear(z["h"], z["k"] * z["d"], bias=False)
        self.wo = nn.Linear(z["n"] * z["d"], z["h"], bias=False)

    def forward(self, x, rotations):
        b, s, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(b, s, -1, self.width)
        xk = xk.view(b, s, -1, self.width)
        xv = xv.view(b, s, -1, self.width)
        xq, xk = rotate(xq, xk, rotations)
        keys = repeat_keys(xk, self.heads // self.keys)
        values = repeat_keys(xv, self.heads // self.keys)
        xq, xk, xv = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        output = output.transpose(1, 2).contiguous()
        output = output.view(b, s, -1)
        return self.wo(output)


class TitanFeedForward(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.w1 = nn.Linear(z["h"], z["f"], bias=False)
        self.w2 = nn.Linear(z["f"], z["h"], bias=False)
        self.w3 = nn.Linear(z["h"], z["f"], bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TitanBlock(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.attention, self.feed_forward = TitanAttention(z), TitanFeedForward(z)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(z["h"], eps=1e-5), nn.RMSNorm(z["h"], eps=1e-5)

    def forward(self, x, rotations):
        h = x + self.attention(self.attention_norm(x), rotations)
        out = h + self.feed_forward(self.ffn_norm(h))
        return out


def _keep_every_other_product():
    """torchtitan's selective checkpointing: attention and every other matrix product are kept, the rest is recomputed."""
    counts = {False: 0, True: 0}

    def policy(ctx, func, *args, **kwargs):
        kept = func in (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
                        aten.max.default)
        if func is aten.mm.default:
            counts[ctx.is_recompute] += 1
            kept = counts[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Titan(nn.Module):
    def __init__(self, z, layers, key):
        super().__init__()
        self.checkpoint = key["checkpoint"] if key["compiled"] == "none" else "none"    # else the compiler has them
        self.tok_embeddings = nn.Embedding(z["v"], z["h"])
        self.register_buffer("freqs_cis", torch.zeros(z["s"], z["d"] // 2, dtype=torch.complex64), persistent=False)
        self.layers = nn.ModuleList(TitanBlock(z) for _ in range(layers))
        self.norm = nn.RMSNorm(z["h"], eps=1e-5)
        self.output = nn.Linear(z["h"], z["v"], bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            if self.checkpoint == "none":
                h = layer(h, self.freqs_cis)
            else:
                more = {"context_fn": _keep_every_other_product} if self.checkpoint == "selective" else {}
                h = checkpoint(layer, h, self.freqs_cis, use_reentrant=False, preserve_rng_state=False, **more)
        h = self.norm(h)
        return self.output(h)


def titan_loss(model, inputs, key):
    pred = model(inputs["input_ids"])
    cross_entropy = lambda pred, labels: F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))
    if key["compiled"] == "inductor":
        cross_entropy = compiled.Compiled(cross_entropy, key["recorder"], cache=key["recorder"].compiled)
    loss = cross_entropy(pred, inputs["labels"])
    del pred
    return loss, None


def image_loss(model, inputs, key):
    """A training loop for image classification: the outputs stay alive during the backward."""
    with torch.autocast("cpu", torch.bfloat16, enabled=key["precision"] in ("autocast", "mixed")):
        outputs = model(inputs["pixel_values"])
        loss = F.cross_entropy(outputs, inputs["labels"])
    return loss, outputs
