"""Writes the files that tests/references.rs compares our models with, one per model (safetensors).

A file holds a tiny model's weights under their public names and one batch of inputs. It also holds
PyTorch's results, computed in double precision: `output.loss`, `output.logits`, and the gradient of
every weight as `gradient.NAME`. Its metadata has `model`, our model file as JSON. Images are not
stored: `image` here and the test generate the same ones.

Run with torch, torchvision, transformers and safetensors installed:  python generate.py [NAME...]
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional

FOLDER = Path(__file__).parent
BATCH = 2
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def image(channels, size):
    """Images that the test generates too, as [batch, height, width, channels]."""
    count = BATCH * size * size * channels
    values = [((index * 7919) % 1000) / 500.0 - 1.0 for index in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(BATCH, size, size, channels)


def randomise(module):
    """Draws random weights: weights that are zero, one or equal could hide a mistake."""
    generator = torch.Generator().manual_seed(7)
    module.double()
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            spread = 0.3 if parameter.dim() < 2 else 1.5 / parameter[0].numel() ** 0.5
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread
            if parameter.dim() == 1 and name.endswith("weight"):
                values += 1.0
            # The file holds single precision, so compute with the rounded weights.
            parameter.copy_(values.float().double())
    return module


def integers(low, high, shape, seed):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def as_named(key, tensor):
    yield key, tensor


def write(name, model, module, inputs, logits, labels, public=as_named):
    flat = logits.reshape(-1, logits.shape[-1])
    loss = functional.cross_entropy(flat, labels.reshape(-1), ignore_index=-1)
    module.zero_grad()
    loss.backward()
    tensors = {f"input.{key}": value.to(torch.int32) for key, value in inputs.items()}
    tensors["input.labels"] = labels.to(torch.int32)
    tensors["output.loss"] = loss.detach().reshape(1).float()
    tensors["output.logits"] = logits.detach().float()
    for key, parameter in module.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for name_in_files, part in public(key, parameter.detach()):
            tensors[name_in_files] = part.float().contiguous()
        for name_in_files, part in public(key, gradient):
            tensors[f"gradient.{name_in_files}"] = part.float().contiguous()
    path = FOLDER / f"{name}.safetensors"
    save_file({key: value.clone() for key, value in tensors.items()}, path, metadata={"model": json.dumps(model)})
    print(f"{path.name}: {path.stat().st_size} bytes, loss {loss.item():.6f}")


@case
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = {"family": "gpt", "layers": 2, "hidden": 16, "heads": 4, "vocab": 40, "sequence": 9}
    config = GPT2Config(n_layer=2, n_embd=16, n_head=4, vocab_size=40, n_positions=9, attn_implementation="eager",
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    module = randomise(GPT2LMHeadModel(config)).train()
    tokens, labels = integers(0, 40, (BATCH, 9), 1), integers(0, 40, (BATCH, 9), 2)
    write("gpt2", model, module, {"tokens": tokens}, module(tokens).logits, labels)


def llama_case(name, tied, kv_heads, theta):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": kv_heads, "ffn": 24, "vocab": 40,
             "sequence": 11, "tied_embeddings": tied, "rope_theta": theta}
    config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads,
                         intermediate_size=24, vocab_size=40, max_position_embeddings=11, tie_word_embeddings=tied,
                         rope_theta=float(theta), rms_norm_eps=1e-5, attn_implementation="eager")
    config.rope_parameters = {"rope_type": "default", "rope_theta": float(theta)}
    module = randomise(LlamaForCausalLM(config)).train()
    tokens, labels = integers(0, 40, (BATCH, 11), 1), integers(0, 40, (BATCH, 11), 2)
    write(name, model, module, {"tokens": tokens}, module(tokens).logits, labels)


@case
def llama():
    llama_case("llama", False, 2, 10000)


@case
def llama_tied():
    llama_case("llama_tied", True, 4, 500)


@case
def bert():
    from transformers import BertConfig, BertForMaskedLM

    model = {"family": "bert", "layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 40, "sequence": 14}
    config = BertConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=4, intermediate_size=24, vocab_size=40,
                        max_position_embeddings=14, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
                        attn_implementation="eager", pad_token_id=None)
    module = randomise(BertForMaskedLM(config)).train()
    tokens = integers(0, 40, (BATCH, 14), 1)
    labels = torch.full((BATCH, 14), -1)
    labels[0, 3], labels[0, 8], labels[1, 0], labels[1, 13] = 5, 39, 0, 17
    write("bert", model, module, {"tokens": tokens}, module(tokens).logits, labels)


@case
def vit():
    from torchvision.models import VisionTransformer

    model = {"family": "vit", "layers": 2, "hidden": 16, "heads": 4, "ffn": 24, "patch": 4, "image": 16, "channels": 3,
             "classes": 7}
    module = VisionTransformer(image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=24,
                               num_classes=7)
    module = randomise(module).train()
    logits = module(image(3, 16).permute(0, 3, 1, 2))
    write("vit", model, module, {}, logits, torch.tensor([3, 6]))


def vgg_case(name, depth, batch_norm):
    from torchvision.models.vgg import VGG, cfgs, make_layers

    width, hidden = 2, 12
    key = {11: "A", 13: "B", 16: "D", 19: "E"}[depth]
    layers = [item if item == "M" else item * width // 64 for item in cfgs[key]]
    model = {"family": "vgg", "depth": depth, "batch_norm": batch_norm, "channels": 3, "classes": 5, "width": width,
             "hidden": hidden}
    module = VGG(make_layers(layers, batch_norm=batch_norm), num_classes=5, init_weights=False, dropout=0)
    # The classifier is as narrow as the convolutions.
    module.classifier[0] = torch.nn.Linear(8 * width * 7 * 7, hidden)
    module.classifier[3] = torch.nn.Linear(hidden, hidden)
    module.classifier[6] = torch.nn.Linear(hidden, 5)
    module = randomise(module).train()
    logits = module(image(3, 224).permute(0, 3, 1, 2))
    write(name, model, module, {}, logits, torch.tensor([3, 1]))


@case
def vgg16():
    vgg_case("vgg16", 16, False)


@case
def vgg11_bn():
    vgg_case("vgg11_bn", 11, True)


@case
def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    model = {"family": "resnet", "depth": 18, "image": 64, "channels": 3, "classes": 5, "width": 2}
    module = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=5)

    # torchvision's widths are fixed, so replace every layer by one whose width is divided by 32.
    def narrow(parent):
        for key, child in parent.named_children():
            if isinstance(child, torch.nn.Conv2d):
                inputs = child.in_channels if child.in_channels == 3 else child.in_channels // 32
                setattr(parent, key, torch.nn.Conv2d(inputs, child.out_channels // 32, child.kernel_size, child.stride,
                                                     child.padding, bias=False))
            elif isinstance(child, torch.nn.BatchNorm2d):
                setattr(parent, key, torch.nn.BatchNorm2d(child.num_features // 32))
            else:
                narrow(child)

    narrow(module)
    module.fc = torch.nn.Linear(16, 5)
    module = randomise(module).train()
    logits = module(image(3, 64).permute(0, 3, 1, 2))
    write("resnet", model, module, {}, logits, torch.tensor([3, 1]))


@case
def lstm_seq2seq():
    model = {"family": "lstm-seq2seq", "layers": 2, "hidden": 12, "embedding": 9, "source_vocab": 20, "target_vocab": 17,
             "source_sequence": 5, "target_sequence": 7}

    class Part(torch.nn.Module):
        def __init__(self, vocabulary):
            super().__init__()
            self.embedding = torch.nn.Embedding(vocabulary, 9)
            self.rnn = torch.nn.LSTM(9, 12, num_layers=2, batch_first=True)

        def forward(self, tokens, state=None):
            return self.rnn(self.embedding(tokens), state)

    class Seq2Seq(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Part(20), Part(17)
            self.decoder.fc_out = torch.nn.Linear(12, 17)

        def forward(self, source, tokens):
            _, state = self.encoder(source)
            return self.decoder.fc_out(self.decoder(tokens, state)[0])

    module = randomise(Seq2Seq()).train()
    source, tokens, labels = integers(0, 20, (BATCH, 5), 1), integers(0, 17, (BATCH, 7), 2), integers(0, 17, (BATCH, 7), 3)
    inputs = {"source_tokens": source, "tokens": tokens}
    write("lstm_seq2seq", model, module, inputs, module(source, tokens), labels)


def t5_case(name, gated, tied):
    from transformers import T5Config, T5ForConditionalGeneration

    # Sequences are long enough to reach the buckets of several distances, and the last bucket.
    model = {"family": "t5", "layers": 2, "hidden": 16, "heads": 2, "head_dimension": 6, "ffn": 24, "vocab": 40,
             "source_sequence": 26, "target_sequence": 22, "relative_buckets": 8, "relative_max_distance": 20, "gated": gated,
             "tied_embeddings": tied}
    config = T5Config(num_layers=2, d_model=16, num_heads=2, d_kv=6, d_ff=24, vocab_size=40, dropout_rate=0,
                      relative_attention_num_buckets=8, relative_attention_max_distance=20,
                      feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=tied,
                      attn_implementation="eager")
    module = T5ForConditionalGeneration(config)
    if not tied:
        # Version 5 of `transformers` ties the weights until it loads a file that has both.
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    module = randomise(module).train()
    source, tokens, labels = integers(0, 40, (BATCH, 26), 1), integers(0, 40, (BATCH, 22), 2), integers(0, 40, (BATCH, 22), 3)
    logits = module(input_ids=source, decoder_input_ids=tokens).logits
    write(name, model, module, {"source_tokens": source, "tokens": tokens}, logits, labels)


@case
def t5():
    t5_case("t5", False, True)


@case
def t5_gated():
    t5_case("t5_gated", True, False)


def expert_by_expert(key, tensor):
    """Splits experts, which `transformers` 5 stacks. Mixtral's files have one tensor per expert."""
    module, _, kind = key.partition(".mlp.")
    if kind == "experts.gate_up_proj":
        halves = {"w1": 0, "w3": tensor.shape[1] // 2}
        for expert, stacked in enumerate(tensor):
            for matrix, first in halves.items():
                part = stacked[first:first + tensor.shape[1] // 2]
                yield f"{module}.block_sparse_moe.experts.{expert}.{matrix}.weight", part
    elif kind == "experts.down_proj":
        for expert, part in enumerate(tensor):
            yield f"{module}.block_sparse_moe.experts.{expert}.w2.weight", part
    elif kind:
        yield f"{module}.block_sparse_moe.{kind}", tensor
    else:
        yield key, tensor


@case
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    model = {"family": "moe", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 12, "vocab": 40, "sequence": 11,
             "experts": 4, "top_k": 2, "capacity_factor": 2.0, "rope_theta": 10000}
    config = MixtralConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
                           intermediate_size=12, vocab_size=40, max_position_embeddings=11, tie_word_embeddings=False,
                           num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, router_jitter_noise=0.0,
                           attn_implementation="eager", experts_implementation="eager")
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    module = randomise(MixtralForCausalLM(config)).train()
    tokens, labels = integers(0, 40, (BATCH, 11), 1), integers(0, 40, (BATCH, 11), 2)
    write("mixtral", model, module, {"tokens": tokens}, module(tokens).logits, labels, expert_by_expert)


for name in sys.argv[1:] or CASES:
    CASES[name]()
