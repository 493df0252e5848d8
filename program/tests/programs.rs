//! Properties of every Program, for random models and layouts.

#[path = "programs/models.rs"]
mod models;
#[path = "programs/plans.rs"]
mod plans;

use foretell_program::{
    Axis, BufferId, BufferRole, Compiled, Footprint, Instruction, Layout, Mode, Operation, ParameterServer, Phase, Plan, Program,
    Rank, Session, StageLayout, StageProgram, Staleness, compile,
};
use foretell_units::Bytes;
use foretell_units::diagnostic::one_line;
use models::models;
use plans::*;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use std::sync::Arc;

/// Sums that only training or only evaluation has.
const OWN_SUMS: [&str; 3] = ["weight", "top5", "scores"];

/// Asserts that training and evaluation share an arena: persistent buffers have the same offsets in
/// both. Each may have sums of its own behind them, and views of what they share.
fn assert_shares_arena(compiled: &Compiled) {
    let is_own = |buffer: &(Arc<str>, Bytes, Bytes, bool)| OWN_SUMS.contains(&&*buffer.0) || buffer.3;
    for rank in (0..compiled.training.mesh.world_size()).map(Rank) {
        let [training, evaluation] = [&compiled.training, &compiled.evaluation].map(|program| {
            let kept = program.list_of(rank).buffers.iter().filter(|buffer| buffer.persistent);
            kept.map(|buffer| (buffer.name.clone(), buffer.offset, buffer.bytes, buffer.parent.is_some())).collect::<Vec<_>>()
        });
        let shared = training.iter().zip(&evaluation).take_while(|(left, right)| left == right).count();
        assert!(training[shared..].iter().chain(&evaluation[shared..]).all(is_own), "{training:?}\n{evaluation:?}");
    }
}

/// A number of random cases, after the recorded failures.
fn cases(cases: u32) -> ProptestConfig {
    let failed = FileFailurePersistence::Direct("tests/programs.proptest-regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(failed)), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn every_program_is_sound_and_shares_its_arena_with_evaluation(
        model in models(), (layout, batch) in layouts(), (optimizer, training) in recipes(), precision in precisions(),
        seed in any::<u64>(), overlap in overlaps()
    ) {
        let cuts = uneven_cuts(&model, layout.pipeline * layout.virtual_stages, seed);
        let layout = Layout { cuts, ..layout };
        let mut plan = Plan { optimizer, training: for_model(training, &model), ..Plan::new(layout, batch) };
        plan.overlap = overlap;
        plan.precision = precision;
        let compiled = match compile(&model, "model", &plan) {
            Ok(compiled) => compiled,
            Err(error) => { prop_assert!(one_line(&error).contains("hint"), "{error}"); return Ok(()); }
        };
        compiled.training.check().expect("sound");
        compiled.evaluation.check().expect("sound");
        for list in &compiled.training.lists {
            prop_assert_eq!(Footprint::of(list).total(), list.arena, "the components add up to the arena");
        }
        assert_shares_arena(&compiled);
    }
}

/// The first instruction of a pass that reads parameters which the step has updated already.
fn reads_updated_parameters(list: &StageProgram) -> Option<usize> {
    let root = |id: BufferId| list.buffer(id).parent.unwrap_or(id);
    let mut updated = std::collections::BTreeSet::new();
    list.instructions.iter().position(|instruction| {
        if instruction.phase == Phase::Update {
            updated.extend(
                instruction.writes.iter().map(|&id| root(id)).filter(|&id| list.buffer(id).role == BufferRole::Parameter),
            );
            return false;
        }
        instruction.reads.iter().any(|&id| updated.contains(&root(id)))
    })
}

/// Whether an instruction communicates with a rank of another replica.
fn is_between_replicas(program: &Program, rank: Rank, instruction: &Instruction) -> bool {
    let (mesh, list) = (&program.mesh, program.list_of(rank));
    let replica = |rank: Rank| mesh.coordinates(rank).along(Axis::Data);
    match *instruction.operation {
        Operation::Collective { group, .. } => {
            list.groups[group.0 as usize].members(mesh, rank).into_iter().any(|member| replica(member) != replica(rank))
        }
        Operation::Send { peer, .. } | Operation::Receive { peer, .. } => {
            replica(list.peers[peer.0 as usize].of(mesh, rank)) != replica(rank)
        }
        _ => false,
    }
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn all_steps_of_a_mode_are_sound_and_plain_steps_exchange_nothing(
        model in models(), (layout, batch) in layouts(), (optimizer, training) in recipes(), precision in precisions(),
        mode in modes()
    ) {
        let plan = Plan { optimizer, training: for_model(training, &model), precision, mode, ..Plan::new(layout, batch) };
        let compiled = match compile(&model, "model", &plan) {
            Ok(compiled) => compiled,
            Err(error) => { prop_assert!(one_line(&error).contains("hint"), "{error}"); return Ok(()); }
        };
        let (steps, cycle) = (compiled.step_programs(), compiled.cycle);
        prop_assert_eq!(steps.len(), cycle.program_count());
        let (fragments, overlap) = match mode {
            Mode::LocalSgd(mode) => (mode.fragments, mode.overlap),
            _ => (1, 0),
        };
        let has_plain = cycle.round_steps() > fragments * (overlap + 1);
        for step in 0..cycle.steps() {
            let program = steps[cycle.program_of_step(step)];
            program.check().expect("sound");
            for list in &program.lists {
                prop_assert_eq!(reads_updated_parameters(list), None);
            }
            for rank in (0..program.mesh.world_size()).map(Rank) {
                let exchanges = program.list_of(rank).instructions.iter().any(|instruction| is_between_replicas(program, rank, instruction));
                prop_assert!(!has_plain || cycle.program_of_step(step) > 0 || !exchanges, "step {} exchanges", step);
                prop_assert!(program.list_of(rank).arena == compiled.training.list_of(rank).arena);
            }
            let all = program.lists.iter().flat_map(|list| &list.instructions);
            let averages = all.filter(|instruction| matches!(instruction.operation.kind(), "average" | "outer_step")).count();
            // A fragment may have no trained parameters.
            let ends_round = (step + 1).is_multiple_of(cycle.round_steps());
            prop_assert!(fragments > 1 || (averages > 0) == ends_round, "step {}", step);
            let training = program.clone();
            assert_shares_arena(&Compiled { training, ..compiled.clone() });
        }
    }
}

proptest! {
    #![proptest_config(cases(96))]

    #[test]
    fn workers_and_servers_are_sound_and_only_servers_update(
        model in models(), (layout, batch) in layouts(), (optimizer, training) in recipes(), precision in precisions(),
        servers in 1usize..4, staleness in proptest::sample::select(vec![Staleness::None, Staleness::Steps(2), Staleness::Unbounded]),
        compression in compressions(), backup_workers in 0usize..3
    ) {
        let mode = Mode::ParameterServer(ParameterServer { servers, staleness, beside_workers: false, compression, backup_workers });
        let layout = Layout { zero: 0, shard_group: None, ..layout };
        let plan = Plan { optimizer, training: for_model(training, &model), precision, mode, ..Plan::new(layout, batch) };
        let compiled = match compile(&model, "model", &plan) {
            Ok(compiled) => compiled,
            Err(error) => { prop_assert!(one_line(&error).contains("hint"), "{error}"); return Ok(()); }
        };
        for program in [&compiled.training, &compiled.evaluation] {
            program.check().expect("sound");
            for list in &program.lists {
                let is_server = list.stage >= plan.layout.pipeline;
                let is_update = |instruction: &Instruction| matches!(instruction.operation.kind(), "adamw" | "sgd" | "lamb_step" | "muon_step");
                prop_assert!(is_server || !list.instructions.iter().any(is_update));
                let keeps = list.buffers.iter().any(|buffer| buffer.role == BufferRole::OptimizerState);
                prop_assert!(is_server || !keeps, "a worker keeps optimizer state");
                let has_model = list.instructions.iter().any(|instruction| matches!(*instruction.operation, Operation::Load { .. }));
                prop_assert!(!is_server || !has_model, "a server loads samples");
            }
        }
        let updates = |list: &StageProgram| list.stage >= plan.layout.pipeline && list.instructions.iter().any(|instruction| {
            matches!(instruction.operation.kind(), "adamw" | "sgd" | "lamb_step" | "muon_step")
        });
        prop_assert!(compiled.training.lists.iter().any(updates), "nothing is updated");
        let waits_for_all = staleness == Staleness::None && backup_workers == 0;
        prop_assert_eq!(compiled.sessions.len(), if waits_for_all { 0 } else { plan.layout.data });
        for session in &compiled.sessions {
            let Session { snapshot, send, receive, add, update } = session;
            for (part, shares) in [(snapshot, true), (send, false), (receive, false), (add, true), (update, true)] {
                for (list, of_step) in part.lists.iter().zip(&compiled.training.lists) {
                    prop_assert_eq!(list.arena, of_step.arena);
                    prop_assert!(list.stage >= plan.layout.pipeline || list.instructions.is_empty(), "a worker in a session");
                    // Sessions run side by side: they may touch what others do in turns only.
                    for &id in list.instructions.iter().flat_map(|instruction| instruction.reads.iter().chain(&instruction.writes)) {
                        let buffer = list.buffer(id);
                        prop_assert!(buffer.persistent, "`{}` has no place of its own", buffer.name);
                        prop_assert!(shares || buffer.name.contains("of worker"), "`{}` outside a turn", buffer.name);
                    }
                }
            }
        }
        assert_shares_arena(&compiled);
    }
}

prop_compose! {
    /// The mesh of one stage whose samples of a micro-batch can be a multiple of four.
    fn stage_layouts()(
        (data, expert, shares) in prop_oneof![
            Just((1usize, 1usize, None)), Just((2, 1, None)), Just((4, 1, None)),
            Just((2, 1, Some(vec![3, 1]))), Just((2, 1, Some(vec![1, 1]))), Just((3, 1, Some(vec![1, 2, 1]))),
            Just((2, 1, Some(vec![2, 6]))),
        ],
        tensor in prop_oneof![3 => Just(1usize), 2 => Just(2), 1 => Just(4)],
        context in prop_oneof![4 => Just(1usize), 1 => Just(2), 1 => Just(4)],
    ) -> StageLayout {
        StageLayout { data, tensor, context, expert, shares }
    }
}

prop_compose! {
    fn uneven_layouts()(
        (layout, _) in layouts(),
        stages in proptest::collection::vec(stage_layouts(), 1..4),
        uniform in any::<bool>(),
        micro_batches in 1usize..5,
    ) -> (Layout, usize) {
        let first = stages[0].clone();
        let pipeline = stages.len();
        let parts = first.shares.as_ref().map_or(first.data, |shares| shares.iter().sum()) * first.expert;
        // Eight samples can be sharded in all of these ways.
        let micro_batch = 8 / parts;
        let stage_places = rotated(pipeline, micro_batches);
        let base = Layout { pipeline, micro_batch, stage_places, shard_group: None, context: 1, tensor: 1, data: 1, ..layout };
        let StageLayout { data, tensor, context, expert, shares } = first;
        let layout = match uniform {
            true => Layout { data, tensor, context, expert, shares, ..base },
            false => Layout { stages: Some(stages), ..base },
        };
        (layout, 8 * micro_batches)
    }
}

proptest! {
    #![proptest_config(cases(256))]

    /// As above, for stages with different meshes and ranks with different numbers of samples.
    #[test]
    fn programs_with_unequal_meshes_and_shares_are_sound(
        model in models(), (layout, batch) in uneven_layouts(), (optimizer, training) in recipes(), precision in precisions(),
        overlap in overlaps()
    ) {
        let mut plan = Plan { optimizer, training: for_model(training, &model), ..Plan::new(layout, batch) };
        plan.overlap = overlap;
        plan.precision = precision;
        if plan.layout.stages.is_some() || plan.layout.shares.is_some() { plan.batch_norm_group = Some(1); }
        let compiled = match compile(&model, "model", &plan) {
            Ok(compiled) => compiled,
            Err(error) => { prop_assert!(one_line(&error).contains("hint"), "{error}"); return Ok(()); }
        };
        compiled.training.check().expect("sound");
        compiled.evaluation.check().expect("sound");
        assert_shares_arena(&compiled);
    }
}
