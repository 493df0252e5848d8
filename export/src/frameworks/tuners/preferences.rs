//! Training on preferences and of reward models, by the names of TRL, Axolotl and LLaMA-Factory.
//! All three tools make the reference model themselves: a frozen copy, or the model without its
//! adapters.

use super::super::FrameworkError;
use super::super::nearest::Nearest;
use super::Tuner;
use foretell_program::{LossKernel, Plan, Preference};
use serde_json::{Map, Value, json};

/// Beta's default in TRL, Axolotl and LLaMA-Factory. It is stated so that the file tells its
/// method.
const BETA: f64 = 0.1;

/// The name of TRL's script for a method. `None` for ORPO, whose trainer has no script.
pub(super) const fn trl_script(preference: Option<Preference>) -> Option<&'static str> {
    match preference {
        None => Some("sft"),
        Some(Preference::Dpo) => Some("dpo"),
        Some(Preference::Kto) => Some("kto"),
        Some(Preference::Reward) => Some("reward"),
        Some(Preference::Orpo) => None,
    }
}

/// Replaces settings that a tool lacks when it trains on a preference.
///
/// # Errors
/// [`FrameworkError::Refused`] if the tool would refuse the job when it starts.
pub(super) fn restrict(preference: Preference, nearest: &mut Nearest, tuner: Tuner, is_zero: bool) -> Result<(), FrameworkError> {
    let refuse = |reason: &str, hint| Err(FrameworkError::Refused { framework: tuner.framework(), reason: reason.into(), hint });
    // `KTOTrainer` raises an error for one sample, with any accumulation. LLaMA-Factory's trainer
    // does not check it.
    if preference == Preference::Kto && tuner != Tuner::LlamaFactory && nearest.plan.layout.micro_batch < 2 {
        return refuse(
            "KTO compares samples of a micro-batch, so that needs 2 at least",
            "plan it with `--fix micro_batch=2`, or export it `--to llama-factory`",
        );
    }
    // Axolotl's `check_fsdp2_base_model_quant_rl`.
    let is_fsdp = !is_zero && nearest.plan.layout.zero > 0;
    let is_quantised = nearest.plan.workload.base_bits.is_some();
    if tuner == Tuner::Axolotl && is_fsdp && is_quantised && preference != Preference::Reward {
        return refuse(
            "under FSDP2 it trains on preferences beside frozen weights of 16 bits alone",
            "plan it with `--fix zero=0`, or without `--base-bits`, or export it `--to trl`",
        );
    }
    // LLaMA-Factory has no setting for a precomputed reference, and Axolotl has none for KTO.
    if tuner == Tuner::LlamaFactory || tuner == Tuner::Axolotl && preference == Preference::Kto {
        let what = "the reference's log-probabilities are computed in each step";
        nearest.replace(|plan| &mut plan.workload.precomputed_reference, false, what);
    }
    let loss = Some(nearest.plan.workload.loss).filter(|&loss| loss != LossKernel::Chunked).unwrap_or_default();
    nearest.replace(|plan| &mut plan.workload.loss, loss, "a loss on preferences has no kernel that takes it in chunks");
    if !tuner.keeps_dropout(preference) {
        nearest.replace(|plan| &mut plan.workload.adapter_dropout, false, "in this method the tool switches dropout off");
    }
    Ok(())
}

impl Tuner {
    /// Whether dropout can be on: with TRL, whose files can set `disable_dropout`, and with
    /// LLaMA-Factory for reward models. In all other cases the trainers switch it off.
    fn keeps_dropout(self, preference: Preference) -> bool {
        match self {
            Self::Trl => true,
            Self::Axolotl => false,
            Self::LlamaFactory => preference == Preference::Reward,
        }
    }
}

/// States the method by a tool's names.
pub(super) fn state(plan: &Plan, preference: Preference, tuner: Tuner, settings: &mut Map<String, Value>) {
    let has_beta = preference != Preference::Reward;
    let mut set = |name: &str, value: Value| _ = settings.insert(name.into(), value);
    match tuner {
        Tuner::Trl => {
            set("disable_dropout", json!(!plan.workload.adapter_dropout));
            if preference.has_reference() {
                set("precompute_ref_log_probs", json!(plan.workload.precomputed_reference));
            }
            if has_beta {
                set("beta", json!(BETA));
            } else if plan.training.lora.is_some() {
                // Otherwise peft looks for a head over the vocabulary.
                set("lora_task_type", json!("SEQ_CLS"));
            }
        }
        Tuner::Axolotl if has_beta => {
            set("rl", json!(preference.name()));
            set("rl_beta", json!(BETA));
            match preference {
                Preference::Dpo => set("precompute_ref_log_probs", json!(plan.workload.precomputed_reference)),
                // Axolotl requires it.
                Preference::Kto => set("remove_unused_columns", json!(false)),
                Preference::Orpo | Preference::Reward => {}
            }
        }
        Tuner::Axolotl => set("reward_model", json!(true)),
        Tuner::LlamaFactory => {
            let (stage, loss) = match preference {
                Preference::Dpo => ("dpo", Some("sigmoid")),
                Preference::Orpo => ("dpo", Some("orpo")),
                Preference::Kto => ("kto", None),
                Preference::Reward => ("rm", None),
            };
            set("stage", json!(stage));
            if let Some(loss) = loss {
                set("pref_loss", json!(loss));
            }
            if has_beta {
                set("pref_beta", json!(BETA));
            }
        }
    }
}

/// A comment that explains the file's counts and the tool's defaults.
pub(super) fn comment(plan: &Plan, preference: Preference) -> String {
    let sample = match preference.sequences() {
        2 => "A sample of the batch is two sequences: a chosen and a rejected answer.",
        _ => "A sample of the batch is one sequence, and another one without gradients.",
    };
    let reference = match (preference.has_reference(), &plan.training.lora) {
        (true, _) if plan.workload.precomputed_reference => "The reference runs over all samples before the training.",
        (false, _) => "There is no reference model.",
        (true, Some(_)) => "The reference is the model with its adapters off.",
        (true, None) => "The reference is a frozen copy of the model.",
    };
    format!("# {sample} {reference}\n")
}

/// A script for TRL's ORPO, whose trainer is experimental and has no script. It reads the same
/// arguments as TRL's own scripts.
pub(super) const ORPO_SCRIPT: &str = r#""""Trains by ORPO with TRL's experimental trainer: orpo.py --config trl.yaml --model_name_or_path ... --dataset_name ..."""

import torch
from accelerate import PartialState
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


def main(script, arguments, model):
    quantization = get_quantization_config(model)
    options = {"device_map": {"": PartialState().local_process_index}, "quantization_config": quantization} if quantization else {}
    dtype = model.dtype if model.dtype in ("auto", None) else getattr(torch, model.dtype)
    loaded = AutoModelForCausalLM.from_pretrained(
        model.model_name_or_path, revision=model.model_revision, attn_implementation=model.attn_implementation, dtype=dtype, **options
    )
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = load_dataset(script.dataset_name, name=script.dataset_config)
    trainer = ORPOTrainer(
        loaded,
        args=arguments,
        train_dataset=data[script.dataset_train_split],
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model(arguments.output_dir)


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, ORPOConfig, ModelConfig)).parse_args_and_config(fail_with_unknown_args=True))
"#;
