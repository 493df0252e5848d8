"""A method of fine-tuning by transformers, peft and TRL alone, as a user starts them: for `test_methods`.

    python direct.py REQUEST METHOD BASE OUT      # writes losses.json and the adapters into OUT
"""

import json
import sys
from pathlib import Path

import torch


def sequences(seed, number, count, length, words):
    """Random sequences of sample `number`, and as many of labels: those of a job with this seed."""
    generator = torch.Generator().manual_seed((seed << 32) + number + 1)
    make = lambda: torch.zeros(count, length, dtype=torch.int64).random_(0, words, generator=generator)
    return make(), make()


def texts(sizes, count):
    """Pairs as texts, and a tokenizer whose words are the model's."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = {f"w{i}": i for i in range(sizes["v"])} | {"<pad>": sizes["v"], "<end>": sizes["v"] + 1}
    made = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<end>")
    def pair(number):
        ids, _ = sequences(0, number, 2, sizes["s"], sizes["v"])
        chosen, rejected = (" ".join(f"w{i}" for i in row.tolist()) for row in ids)
        return {"prompt": "", "chosen": chosen, "rejected": rejected}
    rows = [pair(number) for number in range(sizes["b"] // 2)]
    return Dataset.from_list([rows[i % len(rows)] for i in range(count)]), tokenizer


def main():
    request, method, base, out = json.loads(Path(sys.argv[1]).read_text()), *sys.argv[2:]
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
    sizes, total = request["sizes"], request["steps"] + 5
    options = dict(use_cpu=True, max_steps=total, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
                   lr_scheduler_type="constant", learning_rate=request["recipe"]["learning_rate"], dataloader_pin_memory=False, weight_decay=0.0,
                   bf16=method == "qlora", optim="adamw_torch_fused")
    lora = LoraConfig(r=sizes["r"], lora_alpha=request["recipe"]["alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                   bnb_4bit_compute_dtype=torch.bfloat16) if method == "qlora" else None
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", quantization_config=quantised).train()
    if method == "dpo":
        from trl import DPOConfig, DPOTrainer
        data, tokenizer = texts(sizes, sizes["b"] // 2 * total)
        arguments = DPOConfig(out, per_device_train_batch_size=sizes["b"] // 2, max_length=sizes["s"], gradient_checkpointing=False, **options)
        trainer = DPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    else:
        if quantised:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        torch.manual_seed(0)
        model = get_peft_model(model, lora)
        rows = [dict(zip(("input_ids", "labels"), (t[0] for t in sequences(0, number, 1, sizes["s"], sizes["v"]))))
                for number in range(sizes["b"])]
        arguments = TrainingArguments(out, per_device_train_batch_size=sizes["b"], **options)
        trainer = Trainer(model, arguments, train_dataset=[rows[i % len(rows)] for i in range(sizes["b"] * total)])
    trainer.train()
    trainer.model.save_pretrained(out)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    Path(out, "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
