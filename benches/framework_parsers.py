#!/usr/bin/env python3
"""Exports plans with Foretell and gives the files to the frameworks' own parsers.

Needs torch, transformers, megatron-core, torchtitan, deepspeed, accelerate, trl, axolotl, llamafactory and torchtune from PyPI, each for
its own cases; no GPU. With --megatron-lm FOLDER, a checkout of
Megatron-LM, its argument parser reads the arguments too. `tests/real_parsers.rs` runs it for each framework that can be imported.

Usage: benches/framework_parsers.py --foretell target/debug/foretell [--only FRAMEWORK] [--megatron-lm FOLDER]
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

PLAN = """model: {model}
topology: dgx-h100
nodes: {nodes}
global_batch: 64
precision: bf16
optimizer: adamw
training: {{learning_rate: 0.0003, weight_decay: 0.1, clip_norm: 1.0{lora}}}
layout: {layout}
{more}"""
CASES = {
    "megatron": ("llama3-8b", 2, "{data: 2, tensor: 2, pipeline: 4, zero: 1, sequence_parallel: true, cuts: [7, 9, 9, 9], recompute: selective}"),
    "megatron-interleaved": ("mixtral-8x7b", 2, "{data: 1, expert: 4, pipeline: 2, tensor: 2, virtual_stages: 2, schedule: interleaved, zero: 1}"),
    "megatron-fsdp": ("llama3-8b", 2, "{data: 16, zero: 3, micro_batch: 1, recompute: full}"),
    "megatron-offload": ("llama3-8b", 1, "{data: 4, tensor: 2, zero: 1, offload: optimizer}"),
    "torchtitan": ("llama3-8b", 2, "{data: 4, tensor: 2, pipeline: 2, zero: 3, sequence_parallel: true, cuts: [16, 18], recompute: full}"),
    "torchtitan-fsdp": ("qwen3-32b", 1, "{data: 8, zero: 3, shard_group: 4}"),
    "deepspeed": ("llama3-8b", 1, "{data: 8, zero: 3, micro_batch: 2, offload: optimizer}"),
    "accelerate": ("llama3-8b", 1, "{data: 8, zero: 3, micro_batch: 2, recompute: full}"),
    "trl": ("llama3-8b", 1, "{data: 8, zero: 3, micro_batch: 2, recompute: full}"),
    "trl-zero": ("llama3-8b", 1, "{data: 8, zero: 2, micro_batch: 2, offload: optimizer}"),
    "axolotl": ("llama3-8b", 1, "{data: 8, zero: 3, micro_batch: 2, recompute: full}"),
    "llamafactory": ("llama3-8b", 1, "{data: 8, zero: 0, micro_batch: 2, recompute: full}"),
    "torchtune": ("llama3-8b", 1, "{data: 8, zero: 3, micro_batch: 2, recompute: full}"),
}

# Jobs on preferences: the methods of each tool. All parameters are trained, adapters, and adapters
# on one device.
METHODS = ["dpo", "orpo", "kto", "reward"]
ON_PREFERENCES = {
    "trl": METHODS,
    "axolotl": METHODS,
    "llamafactory": METHODS,
    "torchtune": ["dpo"],
}
FULL, ADAPTERS = "{data: 8, zero: 3, micro_batch: 2, recompute: full}", "{data: 8, zero: 0, micro_batch: 2, recompute: full}"
ONE_DEVICE = "{data: 1, micro_batch: 2, recompute: full}"
LORA = ', lora: {rank: 16, alpha: 32, targets: ["*"]}'

# Names of `--to` that are not those of the Python package.
TO = {"llamafactory": "llama-factory"}


# Megatron's own checks, with an H100's properties where it asks for those of the GPU. The first
# word is the number of ranks.
VALIDATION = """
import contextlib, io, sys, types, typing, typing_extensions
ranks = int(sys.argv.pop(1))
typing.override = typing_extensions.override
import torch
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
from megatron.training.arguments import parse_args, validate_args
arguments = parse_args()
arguments.world_size, arguments.rank = ranks, 0
with contextlib.redirect_stdout(io.StringIO()):
    validate_args(arguments)
print('  validate_args: data', arguments.data_parallel_size, 'tensor', arguments.tensor_model_parallel_size, 'pipeline',
      arguments.pipeline_model_parallel_size, 'micro-batches', arguments.global_batch_size // arguments.micro_batch_size // arguments.data_parallel_size)
"""


def megatron(folder, checkout):
    flags = [line.split() for line in (folder / "megatron.args").read_text().splitlines() if not line.startswith("#")]
    values = {flag[0][2:]: (flag[1] if len(flag) > 1 else True) for flag in flags}
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    if "pipeline-model-parallel-layout" in values:
        layout = PipelineParallelLayerLayout(values["pipeline-model-parallel-layout"], int(values["pipeline-model-parallel-size"]))
        layout.validate_layer_layout(int(values["num-layers"]), 0)
        print("  chunks by stage:", [[len(chunk) for chunk in stage] for stage in layout.layout])
    if checkout:
        words = [word for flag in flags for word in flag]
        # The variables that the exported script sets, which some layouts forbid.
        script = (folder / "run.sh").read_text()
        exported = dict(line.removeprefix("export ").split("=", 1) for line in script.splitlines() if line.startswith("export CUDA_"))
        others = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_DEVICE_MAX")}
        nodes, per_node = (re.search(rf"--{name} (\d+)", script)[1] for name in ("nnodes", "nproc-per-node"))
        environment = {**others, **exported, "PYTHONPATH": checkout}
        checked = subprocess.run([sys.executable, "-c", VALIDATION, str(int(nodes) * int(per_node)), *words],
                                 env=environment, stderr=subprocess.PIPE, text=True)
        assert checked.returncode == 0, checked.stderr.strip().splitlines()[-1]


def torchtitan(folder, _):
    sys.path.insert(0, str(folder))
    sys.modules.pop("foretell_job", None)
    from torchtitan.config.manager import ConfigManager

    config = ConfigManager().parse_args(["--module", "foretell_job", "--config", "job"])
    sys.path.pop(0)
    print("  parallelism:", config.parallelism.data_parallel_shard_degree, config.parallelism.tensor_parallel_degree,
          config.parallelism.pipeline_parallel_degree, type(config.activation_checkpoint).__qualname__)


def deepspeed(folder, _):
    from deepspeed.runtime.config import DeepSpeedConfig

    document = json.loads((folder / "deepspeed.json").read_text())
    # One process stands for all ranks, so the batch of one rank is what it checks.
    document["train_batch_size"] //= 8
    config = DeepSpeedConfig(document)
    print("  stage", config.zero_config.stage, "micro-batch", config.train_micro_batch_size_per_gpu, config.optimizer_name)


def accelerate(folder, _):
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import HfArgumentParser, TrainingArguments

    config = load_config_from_file(str(folder / "accelerate.yaml"))
    document = json.loads((folder / "training_arguments.json").read_text())
    # A machine without GPUs trains neither in bf16 nor with FSDP. The parser still reads every
    # field.
    fields = {field.name for field in __import__("dataclasses").fields(TrainingArguments)}
    unknown = set(document) - fields
    assert not unknown, unknown
    document.pop("fsdp", None)
    [arguments] = HfArgumentParser(TrainingArguments).parse_dict({**document, "bf16": False})
    print("  ", config.distributed_type, config.num_processes, arguments.per_device_train_batch_size, arguments.optim)


def of_yaml(path):
    import yaml

    document = yaml.safe_load(path.read_text())
    # A machine without GPUs trains neither in bf16 nor with FSDP or DeepSpeed.
    text = {name: value for name, value in document.items() if isinstance(value, str)}
    assert not any(value.replace(".", "").replace("e-", "").isdigit() for value in text.values()), text
    return document


def trl(folder, _):
    import importlib

    from trl import ModelConfig, ScriptArguments, TrlParser

    document = of_yaml(folder / "trl.yaml")
    plain = {name: value for name, value in document.items() if name not in ("fsdp", "fsdp_config", "deepspeed")}
    config = folder / "parsed.yaml"
    config.write_text(json.dumps({**plain, "bf16": False, "use_cpu": True}))
    script = re.search(r"-m trl\.scripts\.(\w+)", (folder / "run.sh").read_text())
    if script:
        parser = importlib.import_module(f"trl.scripts.{script[1]}").make_parser()
    else:
        # The exported script of a trainer that has none: its imports hold, and its parser is this.
        specification = importlib.util.spec_from_file_location("orpo", folder / "orpo.py")
        own = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(own)
        parser = TrlParser((ScriptArguments, own.ORPOConfig, ModelConfig))
    words = ["--config", str(config), "--model_name_or_path", "model", "--dataset_name", "data"]
    _, arguments, model, *_ = parser.parse_args_and_config(args=words, fail_with_unknown_args=True)
    assert {"fsdp", "fsdp_config", "deepspeed"} <= {field.name for field in __import__("dataclasses").fields(arguments)}
    print("  ", type(arguments).__name__, arguments.per_device_train_batch_size, arguments.max_length, arguments.gradient_checkpointing,
          arguments.learning_rate, model.lora_task_type if model.use_peft else None)


def axolotl(folder, _):
    from axolotl.utils.schemas.config import AxolotlInputConfig

    document = of_yaml(folder / "axolotl.yaml")
    datasets = [{"path": "data", "type": "alpaca"}]
    config = AxolotlInputConfig(base_model="model", datasets=datasets, **document)
    method = config.rl.value if config.rl else ("reward" if config.reward_model else "sft")
    unknown = set(document) - set(AxolotlInputConfig.model_fields)
    assert not unknown, unknown
    print("  ", method, config.adapter, config.micro_batch_size, config.sequence_len, config.optimizer, bool(config.fsdp_config))


def llamafactory(folder, _):
    from llamafactory.hparams import DataArguments, FinetuningArguments, ModelArguments, TrainingArguments
    from transformers import HfArgumentParser

    document = of_yaml(folder / "llama_factory.yaml")
    plain = {name: value for name, value in document.items() if name not in ("fsdp", "fsdp_config", "deepspeed")}
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments, FinetuningArguments))
    parsed = parser.parse_dict({**plain, "bf16": False, "model_name_or_path": "model", "dataset": "data", "template": "llama3"})
    print("  ", parsed[2].per_device_train_batch_size, parsed[1].cutoff_len, parsed[0].disable_gradient_checkpointing, parsed[3].finetuning_type,
          parsed[3].stage, parsed[3].pref_loss, parsed[3].use_ref_model)


def torchtune(folder, _):
    from omegaconf import OmegaConf
    from torchtune._recipe_registry import get_all_recipes
    from torchtune.config import validate

    config = OmegaConf.load(folder / "torchtune.yaml")
    validate(config)
    words = (folder / "run.sh").read_text().replace("\\\n", " ").split("tune run ")[1].split()
    [recipe] = [recipe for recipe in get_all_recipes() if recipe.name in words]
    # `tune run` refuses torchrun's flags for recipes of one device.
    assert recipe.supports_distributed == ("--nnodes" in words), recipe.name
    source = pathlib.Path(__import__("torchtune").__file__).parents[1] / "recipes" / recipe.file_path
    read = set(re.findall(r"cfg\.(?!get\b)(\w+)", source.read_text()))
    missing = read - set(config) - {"profiler", "keys", "pop", "epochs_run"}
    assert not missing, missing
    print("  ", recipe.name, config.loss._component_.rsplit(".", 1)[1], config.batch_size, config.tokenizer.max_seq_len, config.optimizer.lr, config.enable_activation_checkpointing)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foretell", required=True)
    parser.add_argument("--only", choices=sorted({name.split("-")[0] for name in CASES}))
    parser.add_argument("--megatron-lm")
    arguments = parser.parse_args()
    foretell = str(pathlib.Path(arguments.foretell).resolve())
    with tempfile.TemporaryDirectory() as scratch:
        cases = {name: (PLAN.format(model=model, nodes=nodes, layout=layout, lora="", more="")) for name, (model, nodes, layout) in CASES.items()}
        for tool, methods in ON_PREFERENCES.items():
            for method in methods:
                more = f"stack: trl\nworkload: {{preference: {method}}}\n"
                for kind, layout, lora in [("full", FULL, ""), ("lora", ADAPTERS, LORA), ("one", ONE_DEVICE, LORA)]:
                    cases[f"{tool}-{method}-{kind}"] = PLAN.format(model="llama3-8b", nodes=1, layout=layout, lora=lora, more=more)
        for name, text in cases.items():
            framework = name.split("-")[0]
            if arguments.only not in (None, framework):
                continue
            folder = pathlib.Path(scratch) / name
            plan = pathlib.Path(scratch) / f"{name}.yaml"
            plan.write_text(text)
            subprocess.run([foretell, "export", "--plan", plan, "--to", TO.get(framework, framework), "-o", folder], check=True)
            globals()[framework](folder, arguments.megatron_lm)
            print(f"{name}: accepted")


if __name__ == "__main__":
    main()
