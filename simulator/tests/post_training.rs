//! Steps of RL post-training: memory and time of the roles by placement.
#![allow(clippy::panic)]

use foretell_models::Model;
use foretell_program::{Layout, Plan, PolicyMethod, Reward, Rollout, RolloutOffload, RolloutPlacement, Stack};
use foretell_simulator::{ActorCosts, ActorJob, CostModel, PostTrainingPrediction, RoleSetting};
use foretell_topologies::Topology;
use foretell_units::DataType;
use std::sync::LazyLock;

static TOPOLOGY: LazyLock<Topology> = LazyLock::new(|| Topology::library("dgx-h100").expect("in the library"));
static MODEL: LazyLock<Model> =
    LazyLock::new(|| Model::named("llama3-8b").expect("in the zoo").with_layers(4).expect("it has layers"));

fn rollout() -> Rollout {
    Rollout::new([16, 8], [512, 1024, 3072])
}

/// A step on four ranks under FSDP, so that engines may have the other four devices.
fn predict(method: PolicyMethod, rollout: &Rollout) -> PostTrainingPrediction {
    let layout = Layout { data: 4, zero: 3, micro_batch: 1, ..Layout::default() };
    let plan = Plan { precision: DataType::Bf16, stack: Stack::new("fsdp"), ..Plan::new(layout, rollout.responses()) };
    let job = ActorJob::new(&MODEL, &plan, rollout, None).expect("it is sound");
    let costs = CostModel::new(None, &TOPOLOGY).with_plan(&TOPOLOGY, &job.plan, &job.model).expect("known");
    let actor = ActorCosts::of(&job, "model", &TOPOLOGY, &costs).expect("it is simulated");
    let setting = RoleSetting::new(method, &job.model, &job.plan, &actor, &TOPOLOGY, &costs).expect("GPUs");
    setting.predict(rollout).expect("it is predicted")
}

fn grpo(change: impl Fn(&mut Rollout)) -> PostTrainingPrediction {
    let mut rollout = rollout();
    change(&mut rollout);
    predict(PolicyMethod::Grpo, &rollout)
}

/// Bytes of a phase on the group of devices with this index.
fn held(prediction: &PostTrainingPrediction, group: usize, phase: &str) -> u64 {
    let found = prediction.memory.iter().find(|one| (one.group, &*one.phase) == (group, phase));
    found.unwrap_or_else(|| panic!("no {phase} on group {group}: {:?}", prediction.memory)).bytes
}

#[test]
fn colocated_engines_hold_memory_beside_the_actor_and_others_do_not() {
    let colocated = grpo(|_| ());
    let split = grpo(|rollout| rollout.placement = RolloutPlacement::Split(4));
    assert_eq!((colocated.groups.len(), split.groups.len()), (1, 2));
    assert_eq!(held(&colocated, 0, "training"), held(&split, 0, "training"));
    assert!(held(&colocated, 0, "generation") > held(&split, 1, "generation"));
    // Engines that do not sleep hold their share while the actor trains.
    let awake = grpo(|rollout| rollout.sleep = false);
    let share = (0.6 * 80.0 * f64::from(1 << 30)) as u64;
    let more = held(&awake, 0, "training") - held(&colocated, 0, "training");
    assert!(more.abs_diff(share) < share / 100, "{more} beside {share}");
    // What leaves for engines is no longer beside them, and takes time.
    let mut before = held(&colocated, 0, "generation");
    for offload in [RolloutOffload::Optimizer, RolloutOffload::All] {
        let offloaded = grpo(|rollout| rollout.offload = offload);
        assert!(held(&offloaded, 0, "generation") < before);
        assert_eq!(held(&offloaded, 0, "training"), held(&colocated, 0, "training"));
        assert!(offloaded.transfer_seconds > colocated.transfer_seconds);
        before = held(&offloaded, 0, "generation");
    }
}

#[test]
fn each_role_adds_its_memory_and_its_time() {
    let without = grpo(|rollout| rollout.reference = false);
    let with = grpo(|_| ());
    // Four layers of Llama in two bytes, over four ranks.
    let shard = with.memory[1].bytes - without.memory[1].bytes;
    let parameters = 4.0 * 218_112_000.0 + 2.0 * 128_256.0 * 4096.0 + 4096.0;
    assert!((shard as f64 / (parameters * 2.0 / 4.0) - 1.0).abs() < 1e-3, "{shard}");
    let forward = with.forward_seconds - without.forward_seconds;
    assert!((with.step_seconds - without.step_seconds - forward).abs() < 1e-6 && forward > 0.0);
    let critic = predict(PolicyMethod::Ppo, &rollout());
    assert!((critic.training_seconds / with.training_seconds - 2.0).abs() < 1e-9);
    assert!(critic.peak_memory_bytes > with.peak_memory_bytes);
    let rewarded = grpo(|rollout| rollout.reward = Reward::Model);
    assert!((rewarded.step_seconds - with.step_seconds - forward).abs() < 1e-6);
}

#[test]
fn a_forward_pass_is_a_part_of_an_update() {
    let prediction = grpo(|rollout| rollout.reference = false);
    let share = prediction.forward_seconds / prediction.training_seconds;
    assert!((0.2..0.45).contains(&share), "{share}");
}

#[test]
fn steps_that_overlap_are_never_slower() {
    for (response, most) in [(256, 512), (1024, 3072), (2048, 8192)] {
        for (tensor, reference) in [(1, true), (4, false)] {
            let split = |off_policy| {
                grpo(|rollout| {
                    (rollout.response, rollout.response_max) = (response, most);
                    (rollout.tensor, rollout.reference) = (tensor, reference);
                    (rollout.placement, rollout.off_policy) = (RolloutPlacement::Split(4), off_policy);
                })
            };
            let (synchronous, overlapping) = (split(0), split(1));
            let trained = overlapping.training_seconds + overlapping.forward_seconds;
            let longest = overlapping.generation_seconds.max(trained) + overlapping.transfer_seconds;
            assert!(overlapping.step_seconds < synchronous.step_seconds, "{response} {tensor}");
            assert!((overlapping.step_seconds / longest - 1.0).abs() < 1e-9);
        }
    }
}

#[test]
fn more_memory_of_engines_is_never_slower() {
    let mut before = (0, f64::INFINITY);
    for share in [0.2, 0.3, 0.5, 0.7, 0.9] {
        let prediction = grpo(|rollout| {
            (rollout.memory_share, rollout.placement) = (share, RolloutPlacement::Split(1));
            (rollout.response, rollout.response_max, rollout.concurrency) = (4096, 16_384, 1024);
        });
        let engine = prediction.engine.expect("it fits");
        assert!(engine.concurrent >= before.0 && prediction.step_seconds <= before.1 * 1.001, "{share}");
        before = (engine.concurrent, prediction.step_seconds);
    }
}

#[test]
fn training_takes_the_tokens_that_were_generated() {
    let short = grpo(|rollout| (rollout.response, rollout.response_max) = (1024, 3072));
    let long = grpo(|rollout| (rollout.response, rollout.response_max) = (2048, 3072));
    let ratio = long.training_seconds / short.training_seconds;
    assert!((1.4..2.2).contains(&ratio), "{ratio}");
}
