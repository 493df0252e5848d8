//! The cost model of a plan. The costs of a device kind come from the profile if that has the kind,
//! else from the GPU profiles and the plan's stack, else from the data sheet. Settings with unknown
//! costs are refused, and assumptions are listed.

use super::remarks;
use crate::answers::traced_plan;
use crate::cost::CostModel;
use crate::gpu::{ProfileError, Profiles};
use foretell_models::Model;
use foretell_program::traced::Untraced;
use foretell_program::{Offload, Plan, Profile};
use foretell_topologies::{Architecture, Topology};
use foretell_units::DataType;
use miette::Diagnostic;
use thiserror::Error;

/// Why a plan has no costs.
#[derive(Clone, Debug, PartialEq, Error, Diagnostic)]
pub enum PlanCostError {
    /// A compiled-in profile is missing or malformed.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Profile(#[from] ProfileError),
    /// No known rate in the plan's number format for a kind of device.
    #[error("`precision: fp8`: no fp8 rate is known for {kinds}")]
    #[diagnostic(code(plan::unknown_rate), help("use `precision: bf16`, or state the device's `peak: {{fp8: ..}}`"))]
    UnknownRate {
        /// The device kinds.
        kinds: String,
    },
    /// The costs of a device kind are those of our own kernels, which compute every slot, so that
    /// skewed routing has no effect.
    #[error("`workload.routing`: costs on `{kind}` are those of our own kernels, which compute every slot of an expert")]
    #[diagnostic(code(plan::unknown_routing), help("leave `routing` out, or use GPUs of the catalogue without `--profile`"))]
    UnknownRouting {
        /// The device kind.
        kind: String,
    },
    /// The plan has a setting whose costs only traced operators have, and the job has none.
    #[error("{setting}: {reason}")]
    #[diagnostic(code(plan::unknown_operators), help("{hint}"))]
    UnknownOperators {
        /// The setting, with the field of a plan file and the option that state it.
        setting: &'static str,
        /// Why its operators are unknown.
        reason: String,
        /// What to change.
        hint: &'static str,
    },
}

/// Makes the cost model of a plan. Its remarks list the assumptions.
///
/// # Errors
/// [`PlanCostError`] if the plan has a setting with unknown costs.
pub fn plan_costs(
    profile: Option<&Profile>,
    topology: &Topology,
    plan: &Plan,
    model: &Model,
) -> Result<CostModel, PlanCostError> {
    require_products(topology, plan.precision)?;
    let mut costs = CostModel::new(profile, topology).with_plan(topology, plan, model)?;
    let kinds = topology.device_kinds();
    if (0..kinds.len()).any(|kind| costs.cluster(kind).is_some()) {
        costs.remarks.extend(remarks::on_stack(Profiles::library()?, plan, model, is_traced(&costs, plan, model)));
        costs.remarks.extend(remarks::on_devices(plan, kinds));
    }
    let of_our_kernels = kinds.iter().enumerate().find(|(kind, _)| costs.cluster(*kind).is_none()).map(|(_, kind)| kind);
    if let Some(kind) = of_our_kernels.filter(|_| !plan.workload.routing.is_balanced()) {
        return Err(PlanCostError::UnknownRouting { kind: kind.name.clone() });
    }
    let measured_itself =
        |kind: &str| (0..kinds.len()).any(|index| kinds[index].name == kind && costs.framework(index).is_some());
    if let Some(kind) = of_our_kernels.filter(|kind| !plan.stack.is_own() && !measured_itself(&kind.name)) {
        costs.remarks.push(format!(
            "`stack: {}` has no costs on `{}`: kernels and communication there are those of our own executor",
            plan.stack.name(),
            kind.name
        ));
    }
    costs.remarks.extend(on_tables(&costs, plan, model)?);
    costs.remarks.extend(remarks::on_woven_passes(plan));
    Ok(costs)
}

/// Refuses fp8 if a device's data sheet has no fp8 rate. CPUs are exempt: they have no fp8
/// arithmetic, but compute the same values, so that the training of a GPU can be tried on them.
///
/// # Errors
/// [`PlanCostError::UnknownRate`], with the device kinds.
pub fn require_products(topology: &Topology, format: DataType) -> Result<(), PlanCostError> {
    if format != DataType::Fp8 {
        return Ok(());
    }
    let kinds = topology.device_kinds().iter();
    let without = kinds.filter(|kind| kind.architecture != Architecture::Cpu && !kind.peak.contains_key(&format));
    let names: Vec<String> = without.map(|kind| format!("`{}`", kind.name)).collect();
    if names.is_empty() { Ok(()) } else { Err(PlanCostError::UnknownRate { kinds: names.join(", ") }) }
}

/// Whether the framework's own traced operators predict a plan.
fn is_traced(costs: &CostModel, plan: &Plan, model: &Model) -> bool {
    (0..costs.kind_count()).any(|kind| traced_plan(plan, model, costs, kind).is_ok())
}

/// Returns what stands in for a framework's own operators, one sentence each. Refuses settings that
/// need operator tables if there is no table.
fn on_tables(costs: &CostModel, plan: &Plan, model: &Model) -> Result<Vec<String>, PlanCostError> {
    let stack = plan.stack.name();
    let unknown = |setting: &'static str, reason: String, hint: &'static str| {
        Err(PlanCostError::UnknownOperators { setting, reason, hint })
    };
    if plan.layout.offload == Offload::State && !is_traced(costs, plan, model) {
        let reason = format!("the operators of `{stack}` were not traced for this job");
        let hint = "use `offload: optimizer`, or `stack: hf-deepspeed` with a model whose operators are known there";
        return unknown("state on hosts (`offload: state`)", reason, hint);
    }
    let Some(kind) = (0..costs.kind_count()).find(|&kind| costs.tables(kind).is_some()) else {
        return match plan.workload.stated_kernels() {
            Some("loss") if !plan.stack.is_own() => Ok(Vec::new()),
            Some("adapter_dropout") if !plan.stack.is_own() => Ok(vec![WITHOUT_DROPOUT.into()]),
            Some(field) => {
                let reason = format!("`stack: {stack}` does not tell such kernels apart");
                unknown(setting_of(field), reason, "use the stack `hf-trainer` on GPUs of the catalogue, or leave it out")
            }
            None => Ok(Vec::new()),
        };
    };
    // A stack's profile has only one attention kernel and no four-bit weights. Dropout on the
    // inputs of adapters takes little time.
    let needs_table = plan.workload.stated_kernels().filter(|field| !matches!(*field, "loss" | "adapter_dropout"));
    match (traced_plan(plan, model, costs, kind), needs_table) {
        (Ok(traced), _) => Ok(traced.assumptions),
        (Err(Untraced { reason }), Some(field)) => unknown(
            setting_of(field),
            format!("the operators of `{stack}` are not known for {reason}"),
            "leave it out, or use what was traced: docs/reference/operator-tables.md",
        ),
        (Err(Untraced { reason }), None) => {
            let profile = format!(
                "the operators of `{stack}` are not known for {reason}: its profile, with wider errors, predicts the step"
            );
            let dropout = plan.workload.adapter_dropout.then(|| WITHOUT_DROPOUT.into());
            Ok([profile].into_iter().chain(dropout).collect())
        }
    }
}

/// Describes a setting of a plan's `workload`, with the field of a plan file and the option that
/// state it.
fn setting_of(field: &str) -> &'static str {
    match field {
        "preference" => "training on preferences (`workload.preference`, `--method dpo` and its like)",
        "precomputed_reference" => "log-probabilities from before the training (`workload.precomputed_reference`, `--reference`)",
        "base_bits" => "frozen weights in few bits (`workload.base_bits`, `--method qlora`, `--base-bits`)",
        "paged_moments" => "moments in paged memory (`workload.paged_moments`, `--optimizer paged-adamw-8bit`)",
        "attention" => "the kernel of attention (`workload.attention`, `--attention`)",
        "loss" => "the kernel of the loss (`workload.loss`, `--loss`)",
        "updates_in_backward" => "updates in the backward pass (`workload.updates_in_backward`)",
        "adapter_dropout" => "dropout of adapters (`workload.adapter_dropout`, `--adapter dropout=`)",
        other => unreachable!("no kernel is stated by `{other}`"),
    }
}

/// The assumption for dropout that no table has.
const WITHOUT_DROPOUT: &str = "`workload.adapter_dropout` is left out: the adapters are predicted without dropout";
