//! Persistent state: ZeRO's shards, offloading, gathered parameters, tied embeddings.

use super::*;

#[test]
fn tied_embeddings_in_two_stages_are_summed_over_both() {
    let model = gpt(r#""layers": 2, "hidden": 16, "heads": 2, "vocab": 32, "sequence": 8"#);
    let program = program(&model, Layout { pipeline: 2, ..Layout::default() }, 2);
    for stage in &program.lists {
        let shared = stage.instructions.iter().filter(|instruction| {
            matches!(*instruction.operation, Operation::Collective { kind: Collective::AllReduce, group, .. }
                if stage.groups[group.0 as usize].stages == [0, 1])
        });
        assert_eq!(shared.count(), 1);
    }
}

#[test]
fn each_stage_of_zero_shards_its_state() {
    let model = Model::Mlp(Mlp { widths: vec![64, 64, 64, 16] });
    // Gathers come right after the update. If they overlap with the next step, parameters are
    // shards in every stage of ZeRO.
    let overlap = Overlap { parameters: false, ..Overlap::default() };
    let program = |zero| {
        let plan = Plan { overlap, ..Plan::new(Layout { data: 4, zero, ..Layout::default() }, 8) };
        compile(&model, "model", &plan).expect("a plan that fits").training
    };
    let kept = |program: &Program, role| -> u64 {
        let buffers =
            program.lists[0].buffers.iter().filter(|buffer| buffer.persistent && buffer.parent.is_none() && buffer.role == role);
        buffers.map(|buffer| buffer.bytes.count()).sum()
    };
    use foretell_program::BufferRole::{Gradient, OptimizerState, Parameter};
    let whole = program(0);
    let ratios = |zero| {
        let program = program(zero);
        [Parameter, Gradient, OptimizerState].map(|role| kept(&whole, role) as f64 / kept(&program, role) as f64)
    };
    let is_about = |ratios: [f64; 3], expected: [f64; 3]| {
        ratios.iter().zip(expected).all(|(ratio, other)| (ratio / other - 1.0).abs() < 0.02)
    };
    assert!(is_about(ratios(1), [1.0, 1.0, 4.0]), "{:?}", ratios(1));
    assert!(is_about(ratios(2), [1.0, 4.0, 4.0]), "{:?}", ratios(2));
    assert!(is_about(ratios(3), [4.0, 4.0, 4.0]), "{:?}", ratios(3));
    let hybrid = Layout { data: 4, zero: 3, shard_group: Some(2), ..Layout::default() };
    let hybrid = compile(&model, "model", &Plan::new(hybrid, 8)).expect("a plan that fits").training;
    assert!((kept(&whole, Parameter) as f64 / kept(&hybrid, Parameter) as f64 - 2.0).abs() < 0.02);
    // Two groups: the shard group, and the ranks with the same shard in all shard groups.
    assert_eq!(hybrid.lists[0].groups.len(), 2);
}

#[test]
fn zero_shards_over_every_axis_that_shards_tokens() {
    let sizes = r#""layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "sequence": 16"#;
    let dense = gpt(sizes);
    let mixture: Model =
        serde_json::from_str(&format!(r#"{{"family": "moe", {sizes}, "ffn": 64, "experts": 4, "top_k": 2}}"#)).expect("a model");
    let state = |model: &Model, layout: Layout| -> f64 {
        let batch = layout.samples_at_once();
        let plan = Plan { optimizer: Optimizer::AdamW, ..Plan::new(layout, batch) };
        let program = compile(model, "model", &plan).expect("a plan that fits").training;
        let buffers = program.lists[0].buffers.iter();
        let kept =
            buffers.filter(|buffer| buffer.role == foretell_program::BufferRole::OptimizerState && buffer.parent.is_none());
        kept.map(|buffer| buffer.bytes.value()).sum()
    };
    let sharded = Layout { zero: 1, micro_batch: 2, ..Layout::default() };
    let ratio =
        |model: &Model, layout: Layout| state(model, Layout { micro_batch: 2, ..Layout::default() }) / state(model, layout);
    for (model, layout) in [
        (&dense, Layout { context: 4, ..sharded.clone() }),
        (&dense, Layout { data: 2, context: 2, ..sharded.clone() }),
        // `expert` shards experts, and ZeRO the parameters outside of them.
        (&mixture, Layout { data: 2, expert: 2, ..sharded.clone() }),
        (&mixture, Layout { expert: 4, ..sharded.clone() }),
    ] {
        let found = ratio(model, layout.clone());
        assert!((found / 4.0 - 1.0).abs() < 0.05, "{found} of 4: {layout:?}");
    }
}

#[test]
fn offloaded_optimizer_state_is_staged_bucket_by_bucket() {
    let model = Model::Mlp(Mlp { widths: vec![64; 9] });
    let program = |offload, precision| {
        // One bucket for each 64 x 64 weight and its bias.
        let layout = Layout { data: 2, zero: 1, offload, bucket: Bytes::new(4 * 65 * 64), ..Layout::default() };
        let plan = Plan { precision, optimizer: Optimizer::AdamW, ..Plan::new(layout, 8) };
        compile(&model, "model", &plan).expect("a plan that fits")
    };
    for (precision, states) in [(DataType::Fp32, 2), (DataType::Bf16, 3)] {
        let [resident, offloaded] = [Offload::None, Offload::Optimizer].map(|offload| program(offload, precision));
        // Each rank has half of the state of eight buckets.
        let state = 8 * states * 4 * (65 * 64 / 2);
        assert_eq!(resident.host_arenas(), [Bytes::ZERO]);
        assert_eq!(offloaded.host_arenas(), [Bytes::new(state)]);
        let kept = |program: &Program| -> u64 {
            let buffers = program.lists[0].buffers.iter().filter(|buffer| buffer.persistent && buffer.parent.is_none());
            buffers.filter(|buffer| buffer.memory == MemoryKind::Device).map(|buffer| buffer.bytes.count()).sum()
        };
        assert_eq!(kept(&resident.training) - kept(&offloaded.training), state);
        let list = &offloaded.training.lists[0];
        for memory in [MemoryKind::Device, MemoryKind::Host] {
            let bytes = list.instructions.iter().filter_map(|instruction| match *instruction.operation {
                Operation::Copy { to, bytes } if to == memory => Some(bytes.count()),
                _ => None,
            });
            assert_eq!(bytes.sum::<u64>(), state, "the whole state comes in and goes out");
        }
        let staging = list
            .buffers
            .iter()
            .filter(|buffer| buffer.role == BufferRole::OptimizerState && !buffer.persistent && buffer.parent.is_none());
        assert_eq!(
            staging.map(|buffer| buffer.bytes.count()).collect::<Vec<_>>(),
            [state / 8; 3],
            "the device has staging buffers for three buckets"
        );
        // The fourth bucket comes in while the second goes out: it waits only until its staging
        // buffer is copied out.
        let copies = |memory| {
            list.instructions
                .iter()
                .filter(move |instruction| matches!(*instruction.operation, Operation::Copy { to, .. } if to == memory))
        };
        let fourth = copies(MemoryKind::Device).nth(3 * states as usize).expect("eight buckets");
        let first_out = copies(MemoryKind::Host).nth(states as usize - 1).expect("eight buckets");
        let awaited: Vec<_> = fourth.after.iter().map(|&id| list.instruction(id)).collect();
        assert!(
            awaited.len() == 1 && std::ptr::eq(awaited[0], first_out),
            "it waits for the copy that empties its staging buffer"
        );
    }
}

#[test]
fn overlapped_gathers_of_parameters_precede_the_last_product() {
    let model = Model::Mlp(Mlp { widths: vec![64; 9] });
    let gathers = |zero, parameters| {
        let layout = Layout { data: 4, zero, bucket: foretell_units::Bytes::new(40_000), ..Layout::default() };
        let plan = Plan { overlap: Overlap { parameters, ..Overlap::default() }, ..Plan::new(layout, 16) };
        let program = compile(&model, "model", &plan).expect("a plan that fits").training;
        let all = program.lists[0]
            .instructions
            .iter()
            .enumerate()
            .filter(|(_, instruction)| instruction.operation.kind() == "all_gather");
        let last_product =
            program.lists[0].instructions.iter().rposition(|instruction| instruction.operation.kind().starts_with("matmul"));
        let precede: Vec<bool> = all.map(|(index, _)| Some(index) < last_product).collect();
        precede
    };
    // Eight layers, two in each bucket.
    assert_eq!(gathers(1, true), [true; 4]);
    assert_eq!(gathers(2, true), [true; 4]);
    assert_eq!(gathers(1, false), [false; 4]);
    assert!(gathers(3, true).len() > 8);
}

#[test]
fn parameters_of_the_next_block_are_gathered_ahead() {
    let model = gpt(r#""layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 8, "tied_embeddings": false"#);
    let program = program(&model, Layout { data: 2, zero: 3, ..Layout::default() }, 2);
    let stage = &program.lists[0];
    let first = |predicate: &dyn Fn(&foretell_program::Instruction) -> bool| {
        stage.instructions.iter().position(predicate).expect("an instruction")
    };
    let gathers: Vec<usize> =
        (0..stage.instructions.len()).filter(|&index| stage.instructions[index].operation.kind() == "all_gather").collect();
    let attention = first(&|instruction| instruction.operation.kind().starts_with("attention"));
    // Before the first attention, the parameters of the embedding and of the first two layers are
    // gathered.
    assert!(gathers.iter().filter(|&&index| index < attention).count() >= 3, "{program}");
    // They are dropped again: the arena never holds all of them.
    let all: u64 = gathers.iter().map(|&index| stage.buffer(stage.instructions[index].writes[0]).bytes.count()).sum();
    assert!(stage.arena.count() < all * 3, "{} and {all}", stage.arena);
}

#[test]
fn gathered_parameters_are_freed_by_the_last_kernel_that_reads_them() {
    let model = gpt(r#""layers": 12, "hidden": 256, "heads": 4, "vocab": 512, "sequence": 8, "tied_embeddings": false"#);
    let layout = Layout { data: 8, zero: 3, recompute: Recompute::Full, ..Layout::default() };
    let program = program(&model, layout, 8);
    let stage = &program.lists[0];
    // Most temporary memory is whole parameters and gradients of a few blocks.
    let mut changes: Vec<(u32, bool, i64)> = Vec::new();
    let mut persistent = 0;
    for buffer in stage.buffers.iter().filter(|buffer| buffer.parent.is_none()) {
        let bytes = buffer.bytes.count() as i64;
        match buffer.lifetime {
            _ if buffer.persistent => persistent += bytes,
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
    let temporary = stage.arena.count() as i64 - persistent;
    // Gradients have a grace after their last use, here of two blocks. With a grace for parameters,
    // too, the ratio would be three.
    assert!((temporary as f64) < 2.3 * most as f64, "{temporary} for {most}");
}

#[test]
fn offloaded_activations_leave_after_their_pass_and_return_early() {
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
        let bytes = |instruction: &Instruction| match *instruction.operation {
            Operation::Copy { to, bytes } if to == memory => bytes.count(),
            _ => 0,
        };
        list.instructions.iter().map(bytes).sum()
    };
    // An upper bound on the arena of each stage with offloading, relative to that without.
    let bounds = [
        (Recompute::None, 1, vec![0.3]),
        (Recompute::None, 4, vec![0.5, 0.6, 0.75, 1.05]),
        (Recompute::Full, 1, vec![0.9]),
        (Recompute::Full, 4, vec![0.95, 0.97, 1.0, 1.05]),
    ];
    for (recompute, pipeline, bounds) in bounds {
        let [resident, offloaded] =
            [Offload::None, Offload::Activations].map(|offload| compiled(recompute.clone(), pipeline, offload));
        for ((with, without), bound) in offloaded.training.lists.iter().zip(&resident.training.lists).zip(bounds) {
            let (out, back) = (moved(with, MemoryKind::Host), moved(with, MemoryKind::Device));
            assert!(out > 0 && out == back, "the bytes that go out come back");
            assert!(with.arena.value() < bound * without.arena.value(), "{recompute:?}, stage {} of {pipeline}", with.stage);
            assert!(with.host_arena.count() <= out && without.host_arena == Bytes::ZERO);
            // The activations of a block come in beside the gradients of the block after it.
            let ahead = with.instructions.iter().enumerate().filter_map(|(index, copy)| {
                let Operation::Copy { to: MemoryKind::Device, .. } = *copy.operation else { return None };
                let later = &with.instructions[index + 1..];
                let reader = later.iter().position(|other| other.reads.contains(&copy.writes[0])).expect("a reader");
                Some(
                    later[..reader]
                        .iter()
                        .filter(|instruction| matches!(*instruction.operation, Operation::Compute { .. }))
                        .count(),
                )
            });
            let mut ahead: Vec<usize> = ahead.collect();
            ahead.sort_unstable();
            assert!(ahead[ahead.len() / 4] > 3, "kernels between: {ahead:?}");
        }
        assert_eq!(
            offloaded.evaluation.host_arenas(),
            vec![Bytes::ZERO; pipeline],
            "evaluation has no backward pass to keep activations for"
        );
    }
}
