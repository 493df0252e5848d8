//! Sentences for the user about what a prediction assumes under another software stack. It must not
//! know any predicted time.

use crate::gpu::{AttentionKind, Profiles, RoutingSkew, StackProfile};
use foretell_models::{Model, Moe};
use foretell_program::{Overlap, Plan};
use foretell_topologies::{Architecture, DeviceKind};
use foretell_units::diagnostic::{Mistake, one_line};

/// Returns what the prediction of a plan assumes of its stack, one sentence each.
pub(super) fn on_stack(profiles: &Profiles, plan: &Plan, model: &Model, is_traced: bool) -> Vec<String> {
    let named = plan.stack.name();
    let mut remarks = Vec::new();
    if let Some(name) = profiles.alias(named) {
        remarks.push(format!("`stack: {named}` is predicted as `{name}`"));
    }
    let Ok(stack) = profiles.stack(named) else { return remarks };
    // The interval of traced operators does not come from a fit.
    if stack.estimated && !plan.stack.is_own() && !is_traced {
        remarks.push(format!(
            "the stack `{named}` was fitted on too few runs or none: its interval is that of sources left out of the fit"
        ));
    }
    let is_fused = matches!(stack.attention, AttentionKind::Fused { .. });
    if matches!(named, "ddp" | "fsdp") && is_fused && model.is_transformer() {
        remarks.push(format!("`stack: {named}` is taken to compute attention in one kernel; `pytorch-eager` does not"));
    }
    if plan.workload.packed.is_some() && (!is_fused || model.sample().tokens().is_none()) {
        remarks.push(format!(
            "`packed` without effect: `{named}` computes the scores of all pairs of tokens in this model's sequences"
        ));
    }
    if plan.workload.nodes_per_token.is_some() && (model.experts().is_none() || !stack.communication.once_per_node) {
        remarks.push(format!(
            "`nodes_per_token` without effect: under `{named}` a token travels once to each of its experts, or there are none"
        ));
    }
    if is_traced {
        remarks.extend(on_traced(plan, stack));
    }
    remarks.extend(on_routing(plan, model));
    remarks.extend(on_layout(plan, model));
    remarks
}

/// Returns a sentence if a plan states what the framework's own operators were traced without.
fn on_traced(plan: &Plan, stack: &StackProfile) -> Option<String> {
    let usual = [Overlap::default(), stack.defaults.overlap];
    let stated = [
        ("overlap", !usual.contains(&plan.overlap)),
        ("workload.eager_loss", plan.workload.eager_loss),
        ("training.label_smoothing", plan.training.label_smoothing > 0.0),
        ("layout.collective", !plan.layout.collective.is_automatic()),
        ("batch_norm_group", plan.batch_norm_group.is_some()),
    ];
    let names: Vec<String> =
        stated.into_iter().filter(|(_, is_stated)| *is_stated).map(|(name, _)| format!("`{name}`")).collect();
    (!names.is_empty()).then(|| {
        let stack = plan.stack.name();
        format!(
            "without effect: {}; the step is predicted from the operators of `{stack}`, as they were traced",
            names.join(", ")
        )
    })
}

/// Returns a sentence if a framework is not known to train on these devices.
pub(super) fn on_devices(plan: &Plan, kinds: &[DeviceKind]) -> Option<String> {
    let stack = plan.stack.name();
    if plan.stack.is_own() {
        return None;
    }
    let is_for_tpus = stack == "maxtext-tpu";
    let other = kinds.iter().find(|kind| (kind.architecture == Architecture::Tpu) != is_for_tpus)?;
    let (known, hint) =
        if is_for_tpus { ("TPUs", "name a stack for GPUs, such as `maxtext`") } else { ("GPUs", "name `maxtext-tpu`") };
    let message = format!("the costs of `stack: {stack}` are those on {known}, and `{}` is none", other.name);
    Some(one_line(&Mistake::new(message, hint)))
}

/// Describes the effect of skewed routing on a layout. `None` if routing is balanced.
fn on_routing(plan: &Plan, model: &Model) -> Option<String> {
    let (routing, layout) = (&plan.workload.routing, &plan.layout);
    let skew = RoutingSkew::of(routing, model)?;
    let spread = if layout.expert_tensor == Some(1) { layout.tensor } else { 1 };
    let of_stages = layout.stages.iter().flatten().map(|stage| stage.expert).max();
    let ranks = of_stages.unwrap_or(layout.expert) * spread;
    let on_rank = skew.on_each_of(ranks);
    Some(match (ranks, skew.fullest(on_rank), skew.over_slots(on_rank)) {
        (1, _, over) if over <= 1.0 => format!("`routing: {routing}` changes nothing where every rank has all experts"),
        (_, fullest, over) if over <= 1.0 => format!(
            "`routing: {routing}` changes nothing here: the fullest of {ranks} ranks of experts receives {fullest:.2} times the mean \
             of the tokens, and `capacity_factor` has slots for them"
        ),
        (_, fullest, _) => format!(
            "`routing: {routing}` is assumed, and that no token is dropped: the fullest of {ranks} ranks of experts \
             receives {fullest:.2} times the mean of the tokens, and all wait for it; memory is that of the fullest rank"
        ),
    })
}

/// Returns a sentence for each setting of a layout that has no effect.
fn on_layout(plan: &Plan, model: &Model) -> Vec<String> {
    let mut remarks = Vec::new();
    if let Model::Moe(Moe { shared_ffn: None, .. }) = model
        && plan.overlap.expert
        && plan.layout.expert > 1
    {
        remarks.push(
            "`overlap: {expert: true}` has next to no effect: without `shared_ffn` all kernels of the layer wait for its tokens"
                .into(),
        );
    }
    let tensor = plan.layout.tensor;
    if let Some((sequence, _)) = model.sample().tokens().filter(|(sequence, _)| sequence % tensor != 0)
        && plan.layout.sequence_parallel
    {
        remarks.push(format!(
            "`sequence_parallel: true` without effect: `tensor: {tensor}` does not divide the sequence of {sequence} tokens"
        ));
    }
    remarks
}

/// Returns a sentence if passes cannot overlap each other although the plan asks for it.
pub(super) fn on_woven_passes(plan: &Plan) -> Option<String> {
    let (layout, overlap) = (&plan.layout, &plan.overlap);
    if !overlap.passes {
        return None;
    }
    if plan.woven_pairs() == 0 {
        let message = "`overlap: {passes: true}` without effect: no forward and backward pass of this layout can run at a time";
        let hint = format!("use {}", plan.weaving_layouts());
        return Some(one_line(&Mistake::new(message, hint)));
    }
    // Experts may also be divided along `tensor`.
    let along_tensor = if layout.expert_tensor == Some(1) { layout.tensor } else { 1 };
    let experts = layout.expert * along_tensor;
    let exchanges = [(experts, overlap.expert), (layout.tensor, overlap.tensor), (layout.context, overlap.context)];
    let overlaps = exchanges.into_iter().any(|(ranks, overlaps)| ranks > 1 && overlaps);
    (!overlaps).then(|| {
        "`overlap: {passes: true}` without effect: no pass waits for communication of its activations that overlaps with kernels"
            .into()
    })
}
