#!/usr/bin/env python3
"""Checks that weights pass between Foretell and its peers, in both directions.

For each model the peer (torchvision or transformers) draws weights and saves them. Foretell starts from that file (`--init`) and takes a
step in each layout: its loss and gradient norm must be the peer's on the same samples (the norm of ResNets to 1e-2). It trains a few steps; the peer must load the
checkpoint strictly and reach the same evaluation loss and top-1. Every comparison is to 1e-4. Models whose samples the peer cannot
make (masked or paired tokens) are loaded strictly in both directions only. Of language models also: `generate` must take the tokens
that transformers takes, with their log-probabilities; and adapters (LoRA) that `peft` draws must give `peft`'s losses over three steps,
and load into `peft` afterwards.

PyTorch is installed into a virtual environment if it is missing (at FORETELL_VENV or --venv).

Usage: benches/weights.py [--cases NAME...] [--foretell PATH]
"""
import argparse
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

import environment

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4
SEQUENCE, VOCABULARY, SAMPLES, IMAGE, CLASSES = 32, 160, 8, 64, 10
LAYOUTS = ["{micro_batch: 8}", "{data: 2, micro_batch: 4, zero: 3}", "{tensor: 2, micro_batch: 8}", "{pipeline: 2, micro_batch: 4}"]


def foretell(program, folder, plan, *arguments):
    (folder / "plan.yaml").write_text(plan)
    command = [program, "execute", "--plan", "plan.yaml", "--oversubscribe", "--json", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return json.loads(done.stdout)


class Case:
    """A model as both sides know it: how the peer makes it, the plan's `model`, and whether losses can be compared."""

    def __init__(self, make, model, kind, layouts=LAYOUTS):
        self.make, self.model, self.kind, self.layouts = make, model, kind, layouts


def cases():
    import torchvision
    import transformers as hf

    text = dict(vocab_size=VOCABULARY, attn_implementation="eager")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    lm = f"hidden: 32, heads: 4, layers: 2, vocab: {VOCABULARY}, sequence: {SEQUENCE}"
    image = f"image: {IMAGE}, channels: 3, classes: {CLASSES}"
    yield "gpt2", Case(
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=SEQUENCE, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **text)),
        f"{{family: gpt, {lm}}}", "tokens")
    yield "llama", Case(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, intermediate_size=48, rms_norm_eps=1e-5, max_position_embeddings=SEQUENCE, rope_theta=5e5, tie_word_embeddings=False, **sizes, **text)),
        f"{{family: llama, {lm}, kv_heads: 2, ffn: 48, rope_theta: 500000}}", "tokens")
    yield "mixtral", Case(
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(num_key_value_heads=2, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6, max_position_embeddings=SEQUENCE, **sizes, **text)),
        f"{{family: moe, {lm}, kv_heads: 2, ffn: 48, experts: 4, top_k: 2, capacity_factor: 2.0}}", "tokens")
    yield "bert", Case(
        lambda: hf.BertForMaskedLM(hf.BertConfig(intermediate_size=128, max_position_embeddings=SEQUENCE, **sizes, **text)),
        f"{{family: bert, {lm}}}", None)
    yield "t5", Case(
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)),
        f"{{family: t5, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: {VOCABULARY}, source_sequence: 16, target_sequence: 8}}", None)
    models = torchvision.models
    yield "resnet18", Case(lambda: models.resnet18(num_classes=CLASSES), f"{{family: resnet, depth: 18, {image}}}", "images")
    yield "resnet50", Case(lambda: models.resnet50(num_classes=CLASSES), f"{{family: resnet, depth: 50, {image}}}", "images")
    yield "vgg11", Case(lambda: models.vgg11(num_classes=CLASSES), "{family: vgg, depth: 11, image: 224, channels: 3, classes: 10}", None)
    yield "vit_b_32", Case(
        lambda: models.VisionTransformer(IMAGE, 32, 2, 4, 32, 128, num_classes=CLASSES),
        f"{{family: vit, layers: 2, hidden: 32, heads: 4, patch: 32, {image}}}", "images")


def write_tokens(folder, generator):
    """Writes as many tokens as make SAMPLES training windows and one evaluation window. Returns both as (inputs, labels)."""
    import torch
    training = SEQUENCE + SAMPLES
    tokens = torch.randint(VOCABULARY, (training + SEQUENCE + 1,), generator=generator)
    (folder / "tokens.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens.tolist()))
    windows = lambda starts: (torch.stack([tokens[s:s + SEQUENCE] for s in starts]), torch.stack([tokens[s + 1:s + SEQUENCE + 1] for s in starts]))
    return folder / "tokens.bin", windows(range(SAMPLES)), windows([training])


def write_images(folder, generator):
    """Writes grey images in MNIST's format. Returns both splits, normalised as Foretell does, in three channels."""
    import torch
    splits = []
    for split in ["train", "t10k"]:
        pixels = torch.randint(256, (SAMPLES, IMAGE, IMAGE), generator=generator, dtype=torch.uint8)
        labels = torch.randint(CLASSES, (SAMPLES,), generator=generator, dtype=torch.uint8)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, *pixels.shape) + pixels.numpy().tobytes())
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, SAMPLES) + labels.numpy().tobytes())
        splits.append((pixels.double(), labels.long()))
    mean, deviation = splits[0][0].mean(), splits[0][0].std(correction=0)
    fit = lambda images: ((images - mean) / deviation).float()[:, None].expand(-1, 3, -1, -1).contiguous()
    return folder, *[(fit(images), labels) for images, labels in splits]


def loss_of(model, inputs, labels):
    import torch
    output = model(inputs)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    top = (logits.argmax(-1) == labels).double().mean().item()
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), top


def load_strictly(case, folder, checkpoint):
    """Loads a checkpoint as the peers do, and refuses any name or shape that differs. Returns the model and the number of tensors."""
    from safetensors.torch import load_file
    stored = load_file(checkpoint / "model.safetensors")
    model = case.make()
    if not hasattr(model, "save_pretrained"):
        model.load_state_dict(stored, strict=True)
        return model, len(stored)
    shutil.copy(folder / "peer/config.json", checkpoint)
    model, found = type(model).from_pretrained(checkpoint, output_loading_info=True, attn_implementation="eager")
    if differs := {what: names for what, names in found.items() if names}:
        sys.exit(f"{checkpoint} does not load strictly: {differs}")
    return model, len(stored)


def compare(what, ours, theirs, tolerance=TOLERANCE):
    error = abs(ours - theirs) / max(abs(theirs), 1e-12)
    if error > tolerance:
        sys.exit(f"{what}: {ours} here, {theirs} there, {error:.1e} apart")
    return error


def check_generated(name, case, model, weights, program, folder):
    """Compares greedy continuations, and the log-probability of each token. Returns the largest difference."""
    import torch
    (folder / "model.yaml").write_text(case.model)
    prompt = [3, 141, 59, 26]
    command = [program, "generate", "--init", weights, "--model", "model.yaml", "--prompt-tokens", ",".join(map(str, prompt)), "--tokens", "20", "--json"]
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stderr}")
    ours = json.loads(done.stdout)
    model.eval()
    with torch.no_grad():
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=VOCABULARY)[0].tolist()
        if ours["tokens"] != theirs[len(prompt):]:
            sys.exit(f"{name}: generated {ours['tokens']} here, {theirs[len(prompt):]} there")
        logits = model(torch.tensor([theirs])).logits[0].double().log_softmax(-1)
    places = range(len(prompt) - 1, len(theirs) - 1)
    differences = [abs(ours["log_probabilities"][i] - logits[place, theirs[place + 1]].item()) for i, place in enumerate(places)]
    if max(differences) > TOLERANCE:
        sys.exit(f"{name}: log-probabilities differ by {max(differences):.1e}")
    return max(differences)


def check_adapters(name, case, program, folder, weights, training):
    """Trains adapters that `peft` drew for three steps on both sides. Returns the largest relative difference of losses."""
    import peft
    import torch
    targets = ["c_attn", "c_proj"] if name == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=name == "gpt2", init_lora_weights=False)
    model = peft.get_peft_model(type(case.make()).from_pretrained(weights, attn_implementation="eager"), config)
    shutil.copytree(weights, folder / "adapted")
    model.save_pretrained(folder / "adapted")
    patterns = ", ".join(f'"*.{target}"' for target in targets)
    lora = f"{{rank: 4, alpha: 8, targets: [{patterns}]}}"
    plan = (f"model: {case.model}\ntopology: local\nglobal_batch: {SAMPLES}\nlayout: {{data: 2, micro_batch: 4}}\noptimizer: sgd\n"
            f"training: {{learning_rate: 0.1, momentum: 0, lora: {lora}}}\n")
    more = ["--steps", 3, "--no-evaluation", "--data", folder / "tokens.bin", "--run", "lora"]
    done = foretell(program, folder, plan, "--init", folder / "adapted", *more)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()
    differences = []
    for step in range(3):
        optimizer.zero_grad()
        loss, _ = loss_of(model, *training)
        loss.backward()
        optimizer.step()
        differences.append(compare(f"{name}: loss of step {step} with adapters", done["loss"][step], loss.item()))
    saved = folder / "lora/checkpoints/3"
    again = peft.PeftModel.from_pretrained(type(case.make()).from_pretrained(weights, attn_implementation="eager"), saved)
    with torch.no_grad():
        ours, theirs = again(training[0]).logits, model.eval()(training[0]).logits
    if (difference := (ours - theirs).abs().max().item()) > TOLERANCE:
        sys.exit(f"{name}: logits of the saved adapters differ by {difference:.1e}")
    return max(differences)


def check(name, case, program, folder):
    import torch
    from safetensors.torch import save_model
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = case.make()
    # Heads that start at zero would make every loss equal.
    for parameter in model.parameters():
        if parameter.abs().sum() == 0:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder / "peer")
        weights = folder / "peer"
    else:
        save_model(model, str(folder / "peer.safetensors"))
        weights = folder / "peer.safetensors"
    plan = lambda layout, more="": f"model: {case.model}\ntopology: local\nglobal_batch: {SAMPLES}\nlayout: {layout}\noptimizer: sgd\ntraining: {{learning_rate: 0.001{more}}}\n"
    line = {"case": name}
    if case.kind is None:
        foretell(program, folder, plan(case.layouts[0]), "--init", weights, "--steps", 1, "--no-evaluation", "--data", "synthetic", "--run", "run")
        _, line["tensors"] = load_strictly(case, folder, folder / "run/checkpoints/1")
        return line
    data, training, evaluation = (write_tokens if case.kind == "tokens" else write_images)(folder, generator)
    model.train()
    loss, _ = loss_of(model, *training)
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])).item()
    errors, checked = [], 0
    for index, layout in enumerate(case.layouts):
        # Batch norm sees the whole batch, whatever the layout.
        batch = f"batch_norm_group: {SAMPLES}\n" if name.startswith("resnet") else ""
        if batch and ("data: 2" in layout or "micro_batch: 4" in layout):
            continue
        checked += 1
        done = foretell(program, folder, batch + plan(layout), "--init", weights, "--steps", 3, "--data", data, "--run", f"run{index}")
        errors += [compare(f"{name} {layout}: loss", done["loss"][0], loss.item())]
        # Batch norm over few samples magnifies rounding from layer to layer.
        error = compare(f"{name} {layout}: gradient norm", done["gradient_norm"][0], norm, 1e-2 if batch else TOLERANCE)
        errors += [] if batch else [error]
        trained, line["tensors"] = load_strictly(case, folder, folder / f"run{index}/checkpoints/3")
        trained.eval()
        with torch.no_grad():
            theirs, top = loss_of(trained, *evaluation)
        errors += [compare(f"{name} {layout}: evaluation loss", done["evaluation"]["loss"], theirs.item())]
        errors += [compare(f"{name} {layout}: top-1", 1 + done["evaluation"]["top1"], 1 + top)]
    if name in ("gpt2", "llama"):
        line["generated, largest difference of log-probabilities"] = f"{check_generated(name, case, model, weights, program, folder):.1e}"
        line["adapters, largest relative difference of losses"] = f"{check_adapters(name, case, program, folder, weights, training):.1e}"
    return {**line, "layouts": checked, "worst relative difference": f"{max(errors):.1e}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*")
    environment.add_argument(parser)
    parser.add_argument("--foretell", type=pathlib.Path, default=ROOT / "target/release/foretell")
    arguments = parser.parse_args()
    environment.enter(arguments.venv)
    for name, case in cases():
        if not arguments.cases or name in arguments.cases:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(check(name, case, arguments.foretell.resolve(), pathlib.Path(folder))), flush=True)


if __name__ == "__main__":
    main()
