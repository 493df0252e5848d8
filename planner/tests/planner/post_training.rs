//! Placements of the roles of RL post-training: the answer is no slower than what an expert would
//! try first, and keeps what is fixed and what the framework runs.
#![allow(clippy::panic)]

use foretell_models::Model;
use foretell_planner::{
    FixedRollout, Framework, PlannedRoles, PostTrainingPlanError, PostTrainingRequest, Request, plan_post_training,
};
use foretell_program::{Layout, Plan, PolicyMethod, Recompute, Rollout, RolloutOffload, RolloutPlacement, Stack};
use foretell_simulator::{ActorJob, CostModel, predict_post_training};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType};
use std::sync::LazyLock;

static TOPOLOGY: LazyLock<Topology> = LazyLock::new(|| Topology::library("dgx-h100").expect("in the library"));
static MODEL: LazyLock<Model> =
    LazyLock::new(|| Model::named("llama3-8b").expect("in the zoo").with_layers(4).expect("it has layers"));

/// A search on one node, whose actor is trained by FSDP.
fn planned(
    rollout: &Rollout,
    fixed: FixedRollout,
    framework: Option<&Framework>,
    limit: Option<Bytes>,
) -> Result<PlannedRoles, PostTrainingPlanError> {
    let base = base(rollout);
    let job = ActorJob::new(&MODEL, &base, rollout, Some(1)).expect("it is sound");
    let costs = CostModel::new(None, &TOPOLOGY).with_plan(&TOPOLOGY, &job.plan, &job.model).expect("known");
    let actor = Request { top: 5, memory_limit: limit, ..Request::new(&job.model, "model", &TOPOLOGY, &costs, &job.plan) };
    plan_post_training(&PostTrainingRequest { method: PolicyMethod::Grpo, rollout, fixed, framework, base: &base, actor })
}

fn base(rollout: &Rollout) -> Plan {
    Plan { precision: DataType::Bf16, stack: Stack::new("fsdp"), ..Plan::new(Layout::default(), rollout.responses()) }
}

fn rollout() -> Rollout {
    Rollout::new([16, 8], [512, 1024, 3072])
}

/// The step of a placement that someone chose, if it fits.
fn step(layout: Layout, rollout: &Rollout) -> Option<f64> {
    let plan = Plan { layout, ..base(rollout) };
    let job = ActorJob::new(&MODEL, &plan, rollout, None).expect("it is sound");
    let costs = CostModel::new(None, &TOPOLOGY).with_plan(&TOPOLOGY, &job.plan, &job.model).expect("known");
    let found = predict_post_training(PolicyMethod::Grpo, rollout, &job, "model", &TOPOLOGY, &costs).expect("it is predicted");
    found.fits.then_some(found.step_seconds)
}

#[test]
fn the_answer_is_no_slower_than_what_experts_would_place() {
    let sharded = |data| Layout { data, zero: 3, recompute: Recompute::Full, ..Layout::default() };
    for off_policy in [0, 1] {
        // The search replaces the placement; one on the actor's devices would be refused.
        let placement = if off_policy > 0 { RolloutPlacement::Split(4) } else { rollout().placement };
        let open = Rollout { off_policy, placement, ..rollout() };
        let best = planned(&open, FixedRollout::default(), None, None).expect("it fits").candidates[0].prediction.step_seconds;
        let split = |devices, tensor| Rollout {
            placement: RolloutPlacement::Split(devices),
            tensor,
            memory_share: 0.9,
            off_policy,
            ..rollout()
        };
        let experts = [
            // Colocated, an engine on each device, and the optimizer's state on the hosts.
            (sharded(8), Rollout { offload: RolloutOffload::Optimizer, ..rollout() }),
            // Colocated, engines of two devices, and half of the memory.
            (sharded(8), Rollout { tensor: 2, memory_share: 0.5, ..rollout() }),
            // Half of the devices each.
            (sharded(4), split(4, 1)),
            // Six devices train and two generate.
            (sharded(6), split(2, 2)),
        ];
        for (layout, expert) in experts.into_iter().filter(|(_, expert)| expert.off_policy == off_policy) {
            let chosen = step(layout, &expert).expect("it fits");
            assert!(best <= chosen * 1.0005, "{best} beside {chosen} of {expert:?}");
        }
    }
}

#[test]
fn candidates_fit_and_are_in_order_and_keep_what_is_fixed() {
    let fixed = FixedRollout { tensor: Some(2), placement: Some(RolloutPlacement::Split(4)), ..FixedRollout::default() };
    let planned = planned(&rollout(), fixed, None, None).expect("it fits");
    assert!(planned.candidates.is_sorted_by(|one, other| one.prediction.step_seconds <= other.prediction.step_seconds));
    for placed in &planned.candidates {
        assert!(placed.prediction.fits);
        assert_eq!((placed.rollout.tensor, placed.rollout.placement), (2, RolloutPlacement::Split(4)));
        assert_eq!(placed.plan.global_batch, 128);
        // It is predicted as the plan says.
        assert_eq!(step(placed.plan.layout.clone(), &placed.rollout), Some(placed.prediction.step_seconds));
    }
}

#[test]
fn frameworks_limit_what_is_placed() {
    let nemo = Framework::named("nemo-rl").expect("listed");
    let planned = planned(&rollout(), FixedRollout::default(), Some(nemo), None).expect("it fits");
    for placed in &planned.candidates {
        let is_colocated = placed.rollout.placement == RolloutPlacement::Colocated;
        assert!(!is_colocated || placed.rollout.offload == RolloutOffload::All, "{:?}", placed.rollout);
    }
}

#[test]
fn roles_that_fit_nowhere_are_refused_with_what_holds_the_memory() {
    let limit = Some(Bytes::new(3 << 30));
    let error = planned(&rollout(), FixedRollout::default(), None, limit).expect_err("it does not fit");
    let PostTrainingPlanError::OutOfMemory { needed, limit: stated, holder, .. } = &error else { panic!("{error}") };
    assert!(*needed > *stated && *stated <= Bytes::new(3 << 30) && !holder.is_empty(), "{error}");
}
