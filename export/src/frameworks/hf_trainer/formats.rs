//! The optimizer of a Trainer, and the formats in which parameters and moments are kept.

use super::super::stated::Stated;
use super::super::{FrameworkError, Surroundings};
use super::Tool;
use foretell_program::{MomentFormat, Optimizer, Plan, Training};
use foretell_units::DataType;
use serde_json::Value;

/// The format in which a model is loaded, and whether kernels compute in it without autocast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loaded {
    /// In single precision, or in an unknown format.
    Single,
    /// In bf16, and the Trainer uses autocast.
    Narrow,
    /// In bf16, without autocast.
    Pure,
}

/// Reads the precision of kernels, and the format in which the model is loaded.
pub(super) fn read_precision(
    stated: &mut Stated,
    tool: Tool,
    surroundings: &Surroundings<'_>,
) -> Result<(DataType, Loaded), FrameworkError> {
    stated.rename("torch_dtype", "dtype")?;
    stated.rename("model_init_kwargs.torch_dtype", "dtype")?;
    stated.rename("model_init_kwargs.dtype", "dtype")?;
    let is_left_to_checkpoint = stated.is_auto("dtype");
    let dtype = stated.text("dtype")?.map(|name| name.trim_start_matches("torch.").to_ascii_lowercase());
    let is_pure = stated.is_on("pure_bf16")?;
    let (precision, is_mixed) = read_mixed(stated, tool, surroundings)?;
    let is_loaded_narrow = match dtype.as_deref() {
        // Axolotl and ms-swift load the model in the format of `bf16`.
        None => matches!(tool, Tool::Axolotl | Tool::Swift) && precision == DataType::Bf16,
        Some("bfloat16" | "bf16") => true,
        Some("float32" | "fp32") => false,
        Some("float16" | "fp16" | "half") if precision == DataType::Fp16 => false,
        Some(_) => return Err(stated.unknown("dtype", "formats: bfloat16, float32")),
    };
    if is_left_to_checkpoint {
        stated.assume(format!(
            "{}: parameters are kept in single precision; if the checkpoint's are in bf16, write `bfloat16`",
            stated.written("dtype")
        ));
    }
    match (is_mixed, is_pure, is_loaded_narrow) {
        (true, true, _) => Err(FrameworkError::Form {
            reason: "`pure_bf16` beside mixed precision".into(),
            hint: "keep one of `pure_bf16` and `bf16`, as LLaMA-Factory demands".into(),
        }),
        (false, true, _) | (false, false, true) => Ok((DataType::Bf16, Loaded::Pure)),
        (true, false, true) if precision == DataType::Bf16 => Ok((precision, Loaded::Narrow)),
        (true, false, true) => Err(stated.unknown("dtype", "formats beside `fp16`: float32")),
        (true, false, false) => Ok((precision, Loaded::Single)),
        (false, false, false) => {
            if precision == DataType::Fp32 {
                stated.assume("`precision` fp32: neither `bf16` nor `fp16` is on, and that is the Trainer's default");
            }
            Ok((precision, Loaded::Single))
        }
    }
}

/// The precision, and whether the Trainer uses autocast.
fn read_mixed(stated: &mut Stated, tool: Tool, surroundings: &Surroundings<'_>) -> Result<(DataType, bool), FrameworkError> {
    if tool == Tool::Trl && !stated.has("bf16") && !stated.is_on("fp16")? {
        stated.assume("`precision` bf16: TRL's default where `fp16` is off");
        stated.provide("bf16", Value::Bool(true));
    }
    let has_tf32 = stated.is_on("tf32")?;
    // Axolotl's `auto` uses the best precision of the devices.
    if stated.is_auto("bf16") {
        stated.assume(format!("`precision` {}: the file says `bf16: auto`", surroundings.precision));
        return Ok((surroundings.precision, true));
    }
    // Axolotl's settings for a model in that format without autocast.
    let [is_bfloat16, is_float16] = [stated.is_on("bfloat16")?, stated.is_on("float16")?];
    if is_bfloat16 || is_float16 {
        return Ok((if is_bfloat16 { DataType::Bf16 } else { DataType::Fp16 }, false));
    }
    match (stated.is_on("bf16")?, stated.is_on("fp16")?) {
        (true, true) => Err(FrameworkError::Form {
            reason: "`bf16` and `fp16` are both on".into(),
            hint: "keep one of them, as the Trainer demands".into(),
        }),
        (true, _) => Ok((DataType::Bf16, true)),
        (_, true) => Ok((DataType::Fp16, true)),
        _ if has_tf32 => Ok((DataType::Tf32, false)),
        _ => Ok((DataType::Fp32, false)),
    }
}

pub(super) fn read_optimizer(stated: &mut Stated, tool: Tool, plan: &mut Plan) -> Result<(), FrameworkError> {
    let usual = Training::default();
    // The Trainer's defaults.
    let weight_decay = stated.number("weight_decay")?.unwrap_or(0.0);
    let clip = stated.number("max_grad_norm")?.unwrap_or(1.0);
    plan.training = Training {
        learning_rate: Some(stated.number("learning_rate")?.unwrap_or(if tool == Tool::Trl { 2e-5 } else { 5e-5 })),
        weight_decay,
        beta1: stated.number("adam_beta1")?.unwrap_or(usual.beta1),
        beta2: stated.number("adam_beta2")?.unwrap_or(usual.beta2),
        epsilon: stated.number("adam_epsilon")?.unwrap_or(usual.epsilon),
        clip_norm: Some(clip).filter(|&norm| norm > 0.0),
        ..usual.clone()
    };
    stated.refuse(
        &["use_galore", "use_badam", "use_adam_mini", "use_apollo", "use_lomo"],
        "no plan has this optimizer; adamw, 8-bit AdamW, muon and sgd are planned",
    )?;
    let name = stated.text("optim")?;
    let name = match stated.is_on("use_muon")? {
        true => {
            if let Some(other) = name {
                stated.assume(format!("`optim` {other}: `use_muon` goes before it"));
            }
            Some("muon".into())
        }
        false => name,
    };
    let adam = if weight_decay == 0.0 { Optimizer::Adam } else { Optimizer::AdamW };
    plan.optimizer = match name.as_deref() {
        Some("sgd") => {
            let training = &mut plan.training;
            *training =
                Training { momentum: 0.0, beta1: usual.beta1, beta2: usual.beta2, epsilon: usual.epsilon, ..training.clone() };
            Optimizer::Sgd
        }
        Some("muon") => {
            plan.training.momentum = Optimizer::Muon.usual_momentum();
            Optimizer::Muon
        }
        Some("adamw_bnb_8bit" | "adamw_8bit" | "paged_adamw_8bit" | "adamw_torch_8bit") => {
            plan.workload.moments = MomentFormat::EightBit;
            adam
        }
        Some("adafactor") => {
            plan.workload.moments = MomentFormat::Factored;
            adam
        }
        None
        | Some(
            "adamw_torch"
            | "adamw_torch_fused"
            | "adamw_torch_xla"
            | "adamw_torch_npu_fused"
            | "adamw_hf"
            | "adamw_apex_fused"
            | "adamw"
            | "paged_adamw"
            | "paged_adamw_32bit"
            | "adamw_bnb_32bit",
        ) => adam,
        Some(_) => {
            let known = "optimizers: adamw_torch, adamw_torch_fused, adamw_bnb_8bit, adamw_torch_8bit, paged_adamw_8bit, \
                         paged_adamw_32bit, adafactor, muon, sgd";
            return Err(stated.unknown("optim", known));
        }
    };
    if name.as_deref() == Some("paged_adamw_8bit") {
        plan.workload.paged_moments = true;
    } else if name.is_some_and(|name| name.starts_with("paged_")) {
        stated.assume(format!(
            "{}: the plan keeps the state in device memory, from which pages move to the host only where memory runs out",
            stated.written("optim")
        ));
    }
    Ok(())
}
