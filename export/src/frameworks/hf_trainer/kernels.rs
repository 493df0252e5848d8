//! The kernels that users of Hugging Face's libraries choose: for attention, and for the loss over
//! the vocabulary.

use super::super::FrameworkError;
use super::super::stated::Stated;
use foretell_program::{AttentionKernel, LossKernel, Plan};
use serde_json::Value;

/// Liger's kernels other than its loss.
const PARTS_OF_LIGER: [&str; 7] = [
    "liger_rms_norm",
    "liger_rope",
    "liger_glu_activation",
    "liger_layer_norm",
    "liger_swiglu",
    "liger_cross_entropy",
    "liger_kernel_config.*",
];

/// Reads the kernels of attention and loss.
pub(super) fn read(stated: &mut Stated, plan: &mut Plan) -> Result<(), FrameworkError> {
    plan.workload.attention = read_attention(stated)?;
    plan.workload.loss = read_loss(stated, plan.workload.preference.is_some())?;
    Ok(())
}

/// The attention kernel. `None` for the stacks' default, PyTorch's own.
fn read_attention(stated: &mut Stated) -> Result<Option<AttentionKernel>, FrameworkError> {
    let is_eager = stated.is_on("eager_attention")?;
    stated.neutral(&["sdp_attention", "xformers_attention", "flash_attn_*"]);
    // Axolotl has switches; LLaMA-Factory has its own setting.
    let mut names = Vec::new();
    for setting in ["attn_implementation", "model_init_kwargs.attn_implementation", "flash_attn", "flash_attention"] {
        match stated.take(setting) {
            None | Some(Value::Bool(false)) => {}
            Some(Value::Bool(true)) => names.push((setting, "flash".to_string())),
            Some(Value::String(name)) => names.push((setting, name.to_ascii_lowercase())),
            Some(_) => return Err(stated.wrong(setting, "the name of an attention kernel")),
        }
    }
    if is_eager {
        names.push(("eager_attention", "eager".into()));
    }
    let mut found = None;
    for (setting, name) in names {
        let kernel = match name.as_str() {
            "eager" | "disabled" => Some(AttentionKernel::Eager),
            "sdpa" | "auto" | "false" => None,
            "fa2" | "fa3" | "true" => Some(AttentionKernel::Flash),
            name if name.contains("flash") => Some(AttentionKernel::Flash),
            _ => {
                stated.in_part(setting);
                None
            }
        };
        found = found.or(kernel);
    }
    Ok(found)
}

/// Reads the kernel of the loss over the vocabulary. Training on preferences has other losses under
/// the same name.
fn read_loss(stated: &mut Stated, has_preference: bool) -> Result<LossKernel, FrameworkError> {
    let mut is_liger = false;
    for switch in ["use_liger_kernel", "enable_liger_kernel", "use_liger", "liger_fused_linear_cross_entropy"] {
        is_liger |= stated.is_on(switch)?;
    }
    let plugins = stated.list("plugins")?;
    let has_plugin = |part: &str| plugins.iter().filter_map(Value::as_str).any(|plugin| plugin.contains(part));
    let known = ["Liger", "CutCrossEntropy"];
    if let Some(other) =
        plugins.iter().find(|plugin| !known.iter().any(|part| plugin.as_str().unwrap_or_default().contains(part)))
    {
        stated.assume(format!("the plugin {other} is not planned"));
    }
    let is_cut = (has_plugin("CutCrossEntropy") && stated.flag("cut_cross_entropy")?.unwrap_or(true))
        || stated.is_on("cut_cross_entropy")?;
    let parts = stated.stated_of(&PARTS_OF_LIGER);
    stated.neutral(&PARTS_OF_LIGER);
    let is_chunked = match stated.text("loss_type")?.filter(|_| !has_preference).as_deref() {
        None | Some("nll" | "dft") => false,
        Some("chunked_nll") => true,
        Some(_) => return Err(stated.unknown("loss_type", "losses: nll, dft, chunked_nll")),
    };
    stated.noted(&["use_chunked_cross_entropy", "chunked_cross_entropy"]);
    match (is_liger, is_cut || is_chunked) {
        (true, _) => return Ok(LossKernel::Liger),
        (false, true) => {
            if is_cut {
                stated.assume("`workload.loss` chunked: as near as a plan comes to cut cross-entropy, which keeps no logits");
            }
            return Ok(LossKernel::Chunked);
        }
        (false, false) => {}
    }
    if !parts.is_empty() {
        stated.assume(format!("`{}`: the plan has the stack's own kernels beside the loss", parts.join("`, `")));
    }
    Ok(LossKernel::Plain)
}
