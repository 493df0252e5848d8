//! What is kept from step to step: ZeRO's shards, what is offloaded, what is gathered and when, tied tables.

use super::*;

#[test]
fn tied_embeddings_in_two_stages_are_summed_over_both() {
    let model = gpt(r#""layers": 2, "hidden": 16, "heads": 2, "vocab": 32, "sequence": 8"#);
    let program = program(&model, Layout { pipeline: 2, ..Layout::default() }, 2);
    for stage in &program.lists {
        let shared = stage.instructions.iter().filter(|one| {
            matches!(*one.operation, Operation::Collective { kind: Collective::AllReduce, group, .. }
                if stage.groups[group.0 as usize].stages == [0, 1])
        });
        assert_eq!(shared.count(), 1);
    }
}

#[test]
fn zero_shards_what_it_says() {
    let model = Model::Mlp(Mlp { widths: vec![64, 64, 64, 16] });
    // With gathers after the update; beside the next step's kernels parameters are kept in shards whatever the stage.
    let overlap = Overlap { parameters: false, ..Overlap::default() };
    let program = |zero| {
        let plan = Plan { overlap, ..Plan::new(Layout { data: 4, zero, ..Layout::default() }, 8) };
        compile(&model, "model", &plan).expect("a plan that fits").training
    };
    let kept = |program: &Program, role| -> u64 {
        let buffers = program.lists[0].buffers.iter().filter(|one| one.persistent && one.parent.is_none() && one.role == role);
        buffers.map(|one| one.bytes.count()).sum()
    };
    use foretell_program::BufferRole::{Gradient, OptimizerState, Parameter};
    let whole = program(0);
    let shares = |zero| {
        let program = program(zero);
        [Parameter, Gradient, OptimizerState].map(|role| kept(&whole, role) as f64 / kept(&program, role) as f64)
    };
    let is_about =
        |shares: [f64; 3], expected: [f64; 3]| shares.iter().zip(expected).all(|(one, two)| (one / two - 1.0).abs() < 0.02);
    assert!(is_about(shares(1), [1.0, 1.0, 4.0]), "{:?}", shares(1));
    assert!(is_about(shares(2), [1.0, 4.0, 4.0]), "{:?}", shares(2));
    assert!(is_about(shares(3), [4.0, 4.0, 4.0]), "{:?}", shares(3));
    let hybrid = Layout { data: 4, zero: 3, shard_group: Some(2), ..Layout::default() };
    let hybrid = compile(&model, "model", &Plan::new(hybrid, 8)).expect("a plan that fits").training;
    assert!((kept(&whole, Parameter) as f64 / kept(&hybrid, Parameter) as f64 - 2.0).abs() < 0.02);
    // Two kinds of groups: shards within a shard group, sums over those of the same position in all of them.
    assert_eq!(hybrid.lists[0].groups.len(), 2);
}

#[test]
fn what_is_offloaded_is_on_the_host_and_comes_and_goes_bucket_by_bucket() {
    let model = Model::Mlp(Mlp { widths: vec![64; 9] });
    let program = |offload, precision| {
        // A bucket for each product of 64 x 64 and its bias.
        let layout = Layout { data: 2, zero: 1, offload, bucket: Bytes::new(4 * 65 * 64), ..Layout::default() };
        let plan = Plan { precision, optimizer: Optimizer::AdamW, ..Plan::new(layout, 8) };
        compile(&model, "model", &plan).expect("a plan that fits")
    };
    for (precision, states) in [(DataType::Fp32, 2), (DataType::Bf16, 3)] {
        let [resident, offloaded] = [Offload::None, Offload::Optimizer].map(|offload| program(offload, precision));
        // Each rank updates half of eight buckets.
        let state = 8 * states * 4 * (65 * 64 / 2);
        assert_eq!(resident.host_arenas(), [Bytes::ZERO]);
        assert_eq!(offloaded.host_arenas(), [Bytes::new(state)]);
        let kept = |program: &Program| -> u64 {
            let buffers = program.lists[0].buffers.iter().filter(|one| one.persistent && one.parent.is_none());
            buffers.filter(|one| one.memory == MemoryKind::Device).map(|one| one.bytes.count()).sum()
        };
        assert_eq!(kept(&resident.training) - kept(&offloaded.training), state);
        let list = &offloaded.training.lists[0];
        for memory in [MemoryKind::Device, MemoryKind::Host] {
            let bytes = list.instructions.iter().filter_map(|one| match *one.operation {
                Operation::Copy { to, bytes } if to == memory => Some(bytes.count()),
                _ => None,
            });
            assert_eq!(bytes.sum::<u64>(), state, "all of it comes in and goes out");
        }
        let rooms =
            list.buffers.iter().filter(|one| one.role == BufferRole::OptimizerState && !one.persistent && one.parent.is_none());
        assert_eq!(
            rooms.map(|one| one.bytes.count()).collect::<Vec<_>>(),
            [state / 8; 3],
            "the device has room for three buckets'"
        );
        // The state of the next comes in while that of the one before goes out: it waits for nothing but the copy that leaves it the room.
        let copies = |memory| {
            list.instructions.iter().filter(move |one| matches!(*one.operation, Operation::Copy { to, .. } if to == memory))
        };
        let fourth = copies(MemoryKind::Device).nth(3 * states as usize).expect("there are eight");
        let first_out = copies(MemoryKind::Host).nth(states as usize - 1).expect("there are eight");
        let awaited: Vec<_> = fourth.after.iter().map(|&id| list.instruction(id)).collect();
        assert!(awaited.len() == 1 && std::ptr::eq(awaited[0], first_out), "the copy that empties its room");
    }
}

#[test]
fn parameters_are_gathered_once_a_step_beside_its_kernels_where_they_may_be() {
    let model = Model::Mlp(Mlp { widths: vec![64; 9] });
    let gathers = |zero, parameters| {
        let layout = Layout { data: 4, zero, bucket: foretell_units::Bytes::new(40_000), ..Layout::default() };
        let plan = Plan { overlap: Overlap { parameters, ..Overlap::default() }, ..Plan::new(layout, 16) };
        let program = compile(&model, "model", &plan).expect("a plan that fits").training;
        let all = program.lists[0].instructions.iter().enumerate().filter(|(_, one)| one.operation.kind() == "all_gather");
        let last_product = program.lists[0].instructions.iter().rposition(|one| one.operation.kind().starts_with("matmul"));
        let places: Vec<bool> = all.map(|(index, _)| Some(index) < last_product).collect();
        places
    };
    // Four micro-batches, eight layers of which two fit a bucket.
    assert_eq!(gathers(1, true), [true; 4]);
    assert_eq!(gathers(2, true), [true; 4]);
    assert_eq!(gathers(1, false), [false; 4]);
    assert!(gathers(3, true).len() > 8);
}

#[test]
fn the_next_blocks_parameters_are_gathered_while_this_one_computes() {
    let model = gpt(r#""layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 8, "tied_embeddings": false"#);
    let program = program(&model, Layout { data: 2, zero: 3, ..Layout::default() }, 2);
    let stage = &program.lists[0];
    let first = |predicate: &dyn Fn(&foretell_program::Instruction) -> bool| {
        stage.instructions.iter().position(predicate).expect("there is one")
    };
    let gathers: Vec<usize> =
        (0..stage.instructions.len()).filter(|&index| stage.instructions[index].operation.kind() == "all_gather").collect();
    let attention = first(&|one| one.operation.kind().starts_with("attention"));
    // Before the first layer's attention: the embedding's, the first layer's own and the second's.
    assert!(gathers.iter().filter(|&&index| index < attention).count() >= 3, "{program}");
    // And they are dropped: fewer bytes at once than all parameters.
    let all: u64 = gathers.iter().map(|&index| stage.buffer(stage.instructions[index].writes[0]).bytes.count()).sum();
    assert!(stage.arena.count() < all * 3, "{} and {all}", stage.arena);
}

#[test]
fn what_was_gathered_leaves_its_place_with_the_last_kernel_that_reads_it() {
    let model = gpt(r#""layers": 12, "hidden": 256, "heads": 4, "vocab": 512, "sequence": 8, "tied_embeddings": false"#);
    let layout = Layout { data: 8, zero: 3, recompute: Recompute::Full, ..Layout::default() };
    let program = program(&model, layout, 8);
    let stage = &program.lists[0];
    // Nearly all of what is not kept are whole parameters and their gradients: of a few blocks at a time.
    let mut changes: Vec<(u32, bool, i64)> = Vec::new();
    let mut kept = 0;
    for buffer in stage.buffers.iter().filter(|buffer| buffer.parent.is_none()) {
        let bytes = buffer.bytes.count() as i64;
        match buffer.lifetime {
            _ if buffer.persistent => kept += bytes,
            Some((first, last)) => changes.extend([(first.0, false, bytes), (last.0, true, -bytes)]),
            None => {}
        }
    }
    changes.sort_unstable();
    let mut alive = 0;
    let most = changes.iter().fold(0, |most, &(.., bytes)| {
        alive += bytes;
        most.max(alive)
    });
    let rest = stage.arena.count() as i64 - kept;
    // Gradients have a grace beyond their last use, two blocks of it here; with one for parameters it were three times as much as is alive.
    assert!((rest as f64) < 2.3 * most as f64, "{rest} for {most}");
}

#[test]
fn activations_that_are_offloaded_leave_after_their_pass_and_come_back_a_block_ahead() {
    let model = Model::Gpt(Gpt {
        layers: 16,
        hidden: 32,
        heads: 4,
        ffn: None,
        vocab: 16,
        sequence: 64,
        tied_embeddings: false,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    });
    let compiled = |recompute, pipeline, offload| {
        let schedule = if pipeline > 1 { Schedule::OneForwardOneBackward } else { Schedule::Gpipe };
        let layout = Layout { pipeline, schedule, recompute, offload, ..Layout::default() };
        compile(&model, "model", &Plan::new(layout, 4)).expect("a plan that fits")
    };
    let moved = |list: &StageProgram, memory| -> u64 {
        let bytes = |one: &Instruction| match *one.operation {
            Operation::Copy { to, bytes } if to == memory => bytes.count(),
            _ => 0,
        };
        list.instructions.iter().map(bytes).sum()
    };
    // Into how much of its arena each stage comes.
    let shares = [
        (Recompute::None, 1, vec![0.3]),
        (Recompute::None, 4, vec![0.5, 0.6, 0.75, 1.05]),
        (Recompute::Full, 1, vec![0.9]),
        (Recompute::Full, 4, vec![0.95, 0.97, 1.0, 1.05]),
    ];
    for (recompute, pipeline, shares) in shares {
        let [resident, offloaded] =
            [Offload::None, Offload::Activations].map(|offload| compiled(recompute.clone(), pipeline, offload));
        for ((with, without), share) in offloaded.training.lists.iter().zip(&resident.training.lists).zip(shares) {
            let (out, back) = (moved(with, MemoryKind::Host), moved(with, MemoryKind::Device));
            assert!(out > 0 && out == back, "what goes out comes back");
            assert!(with.arena.value() < share * without.arena.value(), "{recompute:?}, stage {} of {pipeline}", with.stage);
            assert!(with.host_arena.count() <= out && without.host_arena == Bytes::ZERO);
            // A block's come in beside the gradients of the one after it.
            let ahead = with.instructions.iter().enumerate().filter_map(|(index, one)| {
                let Operation::Copy { to: MemoryKind::Device, .. } = *one.operation else { return None };
                let later = &with.instructions[index + 1..];
                let reader = later.iter().position(|other| other.reads.contains(&one.writes[0])).expect("it is for someone");
                Some(later[..reader].iter().filter(|one| matches!(*one.operation, Operation::Compute { .. })).count())
            });
            let mut ahead: Vec<usize> = ahead.collect();
            ahead.sort_unstable();
            assert!(ahead[ahead.len() / 4] > 3, "kernels between: {ahead:?}");
        }
        assert_eq!(offloaded.evaluation.host_arenas(), vec![Bytes::ZERO; pipeline], "nothing is kept where nothing goes back");
    }
}
