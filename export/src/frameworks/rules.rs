//! What frameworks refuse although a plan expresses it: sizes that do not divide. Each framework
//! has one set of rules, for plans that are imported, simulated and exported alike.

use super::FrameworkError;
use foretell_models::Model;
use foretell_program::Plan;

/// Refuses a plan that its stack's framework refuses.
///
/// # Errors
/// [`FrameworkError::Refused`], with the framework's reason.
pub fn check_stack(model: &Model, plan: &Plan) -> Result<(), FrameworkError> {
    // Names of the same stack's other releases start with the same text.
    let stack = plan.stack.name();
    if stack.starts_with("megatron-core") || stack.starts_with("megatron-bridge") {
        megatron(model, plan)
    } else if stack.starts_with("torchtitan") {
        torchtitan(model, plan)
    } else {
        Ok(())
    }
}

/// Sizes of a model that layouts must divide.
struct Sizes {
    heads: usize,
    groups: usize,
    sequence: usize,
}

fn sizes(model: &Model) -> Option<Sizes> {
    let (sequence, _) = model.sample().tokens()?;
    if let Model::Gpt(gpt) = model {
        return Some(Sizes { heads: gpt.heads, groups: gpt.heads, sequence });
    }
    let decoder = model.as_decoder()?;
    // With latent attention, all heads are made from the same low-rank vector, so each has its own
    // keys and values.
    let groups = decoder.kv_heads.filter(|_| decoder.key_value_rank.is_none()).unwrap_or(decoder.heads);
    Some(Sizes { heads: decoder.heads, groups, sequence })
}

fn refuse(framework: &'static str, what: &str, size: usize, by: &str, parts: usize) -> Result<(), FrameworkError> {
    if parts == 0 || size.is_multiple_of(parts) {
        return Ok(());
    }
    Err(FrameworkError::Refused {
        framework,
        reason: format!("{size} {what} cannot be divided by {by} {parts}"),
        hint: "choose sizes that divide, or plan for another `stack`",
    })
}

/// Megatron-LM's `validate_args` and Megatron-Core's `TransformerConfig`.
fn megatron(model: &Model, plan: &Plan) -> Result<(), FrameworkError> {
    const NAME: &str = "Megatron-Core";
    let Some(Sizes { heads, groups, sequence }) = sizes(model) else { return Ok(()) };
    let (tensor, context) = (plan.layout.tensor, plan.layout.context);
    refuse(NAME, "attention heads", heads, "`tensor`", tensor)?;
    refuse(NAME, "key and value heads", groups, "`tensor`", tensor)?;
    if plan.layout.sequence_parallel {
        refuse(NAME, "positions of a sequence", sequence, "`tensor`", tensor)?;
    }
    if context > 1 {
        refuse(NAME, "positions of a sequence", sequence, "twice `context`:", context.saturating_mul(2))?;
    }
    Ok(())
}

/// torchtitan's `parallelize` functions, which shard heads of queries, and of keys and values.
fn torchtitan(model: &Model, plan: &Plan) -> Result<(), FrameworkError> {
    const NAME: &str = "torchtitan";
    let Some(Sizes { heads, groups, sequence }) = sizes(model) else { return Ok(()) };
    let (tensor, context) = (plan.layout.tensor, plan.layout.context);
    refuse(NAME, "attention heads", heads, "`tensor`", tensor)?;
    refuse(NAME, "key and value heads", groups, "`tensor`", tensor)?;
    let factor = tensor.saturating_mul(if context > 1 { context.saturating_mul(2) } else { 1 });
    refuse(NAME, "positions of a sequence", sequence, "`tensor` and twice `context`:", factor)
}
