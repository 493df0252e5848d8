//! What particular layouts must be laid out as: Megatron's collectives, ZeRO's shards, what recomputation holds, what is refused.

use foretell_models::{DropoutRate, Kernel, Model, Stem};
use foretell_program::{
    Axis, BufferRole, Collective, CollectiveRole, Compiled, ContextMethod, Keep, Kept, Layout, MemoryKind, Offload, Operation,
    Optimizer, Overlap, Phase, Plan, PlanError, Program, Recompute, Schedule, StageProgram, Training, compile,
};
use foretell_units::{Bytes, DataType};

fn program(model: &Model, layout: Layout, batch: usize) -> Program {
    compile(model, "model", &Plan::new(layout, batch)).expect("a plan that fits").training
}

fn count(stage: &StageProgram, kind: &str) -> usize {
    stage.instructions.iter().filter(|one| one.operation.kind() == kind).count()
}

#[test]
fn two_linear_layers_on_two_by_two_are_laid_out_as_the_design_says() {
    let model = Model::Mlp { widths: vec![8, 16, 4] };
    let layout = Layout { data: 2, tensor: 2, micro_batch: 2, ..Layout::default() };
    let program = program(&model, layout, 4);
    let stage = &program.lists[0];
    // z is partial over `tensor` (one all-reduce), the gradients over `data` (one bucket for shards, one for what is whole).
    assert_eq!(count(stage, "all_reduce"), 3, "{program}");
    let weight = |name: &str| stage.buffers.iter().find(|one| *one.name == *name).expect("a weight").shape.to_vec();
    assert_eq!(weight("0.weight"), [8, 8], "columns are shared out");
    assert_eq!(weight("2.weight"), [4, 8], "and then rows");
    assert_eq!(weight("2.bias"), [4], "the bias after the sum is whole");
}

#[test]
fn a_transformer_layer_has_megatrons_four_all_reduces() {
    let model = Model::Gpt {
        layers: 3,
        hidden: 32,
        heads: 4,
        ffn: None,
        vocab: 64,
        sequence: 8,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let program = program(&model, Layout { tensor: 2, ..Layout::default() }, 1);
    // And the vocabulary's: the embedding's sum, that of the head's input gradient, and the statistics of the loss.
    assert_eq!(count(&program.lists[0], "all_reduce"), 3 * 4 + 2, "{program}");
    assert_eq!(count(&program.lists[0], "all_gather"), 1);
}

#[test]
fn attention_reads_its_packed_projection_without_a_copy() {
    let gpt = Model::Gpt {
        layers: 3,
        hidden: 32,
        heads: 4,
        ffn: None,
        vocab: 64,
        sequence: 8,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    for recompute in [Recompute::None, Recompute::Full] {
        let program = program(&gpt, Layout { tensor: 2, recompute, ..Layout::default() }, 1);
        let kinds = ["split", "join", "attention_gradient"].map(|kind| count(&program.lists[0], kind));
        assert_eq!(kinds, [0, 0, 3], "{program}");
    }
}

#[test]
fn keys_of_grouped_queries_are_shared_out_with_their_queries() {
    let llama = |kv_heads| Model::Llama {
        layers: 2,
        hidden: 32,
        heads: 8,
        kv_heads: Some(kv_heads),
        head_dimension: None,
        ffn: 48,
        vocab: 64,
        sequence: 8,
        tied_embeddings: false,
        rope_theta: 10_000,
    };
    for (kv_heads, shape) in [(8, vec![4, 4, 32]), (2, vec![1, 4, 4, 32])] {
        let program = program(&llama(kv_heads), Layout { tensor: 2, ..Layout::default() }, 1);
        let stage = &program.lists[0];
        // Megatron's four a layer, and those of the shared out vocabulary: the embedding's sum, and the head's in the backward pass.
        assert_eq!(count(stage, "all_reduce"), 2 * 4 + 2, "{program}");
        let query = stage.buffers.iter().find(|one| one.name.ends_with("0.self_attn.q_proj.weight")).expect("a weight");
        assert_eq!(*query.shape, *shape);
    }
}

#[test]
fn full_recomputation_runs_forward_operators_twice_and_holds_less() {
    let model = Model::Gpt {
        layers: 6,
        hidden: 32,
        heads: 4,
        ffn: None,
        vocab: 64,
        sequence: 32,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let none = program(&model, Layout { micro_batch: 4, ..Layout::default() }, 4);
    let full = program(&model, Layout { micro_batch: 4, recompute: Recompute::Full, ..Layout::default() }, 4);
    assert_eq!(count(&none.lists[0], "attention"), 6);
    assert_eq!(count(&full.lists[0], "attention"), 12);
    assert!(full.lists[0].arena.value() < 0.8 * none.lists[0].arena.value(), "{} {}", full.lists[0].arena, none.lists[0].arena);
}

/// torchtitan's policy keeps the queries, the values, the gate and the last product of a Llama block, and what attention and reduce-scatters left.
#[test]
fn what_a_policy_keeps_is_neither_forgotten_nor_computed_again() {
    let model = Model::Llama {
        layers: 4,
        hidden: 32,
        heads: 4,
        kv_heads: None,
        head_dimension: None,
        ffn: 64,
        vocab: 64,
        sequence: 32,
        tied_embeddings: false,
        rope_theta: 10_000,
    };
    // Products and attentions of a block that are computed again, and what all of it takes.
    let again = |recompute, tensor| {
        let layout = Layout { micro_batch: 4, tensor, recompute, sequence_parallel: tensor > 1, ..Layout::default() };
        let program = program(&model, layout, 4);
        let list = &program.lists[0];
        let repeated = list.instructions.iter().filter(|one| one.phase == Phase::Recompute);
        let kernels = repeated.filter_map(|one| match &*one.operation {
            Operation::Compute { kernel, .. } => Some(*kernel),
            _ => None,
        });
        let (mut products, mut attentions) = (0, 0);
        for kernel in kernels {
            products += usize::from(matches!(kernel, Kernel::Matmul { .. }));
            attentions += usize::from(matches!(kernel, Kernel::Attention(_)));
        }
        ((products as f64 / 4.0, attentions as f64 / 4.0), list.arena)
    };
    let all_but = |kinds: &[Keep]| Recompute::AllBut(Kept::from(kinds.to_vec()));
    let titan = all_but(&[Keep::Attention, Keep::OddProducts, Keep::Sums]);
    let (none, holds_none) = again(Recompute::None, 1);
    let (products, holds_products) = again(all_but(&[Keep::Attention, Keep::Products]), 1);
    let (odd, holds_odd) = again(titan, 1);
    let (full, holds_full) = again(Recompute::Full, 1);
    // The last product of a block is read by no gradient.
    assert_eq!((none, products, odd, full), ((0.0, 0.0), (0.0, 0.0), (3.0, 0.0), (6.0, 1.0)));
    assert!(holds_none > holds_products && holds_products > holds_odd && holds_odd > holds_full);
    assert_eq!(again(all_but(&[]), 1), (full, holds_full));
    assert_eq!(again(all_but(&[Keep::Projections]), 1).0, (3.0, 1.0));
    // Of the product after attention what is kept is its sum over the ranks of `tensor`.
    assert_eq!(again(titan, 2).0, (2.0, 0.0));
    let text = serde_json::to_string(&titan).expect("it can be written");
    assert_eq!(text, r#"{"all_but":["attention","odd_products","sums"]}"#);
    assert_eq!(serde_json::from_str::<Recompute>(&text).expect("it reads back"), titan);
}

#[test]
fn one_forward_one_backward_holds_less_than_gpipe() {
    let model = Model::Mlp { widths: vec![64; 9] };
    let layout = |schedule| Layout { pipeline: 2, micro_batch: 64, schedule, ..Layout::default() };
    let gpipe = program(&model, layout(Schedule::Gpipe), 64 * 12);
    let one = program(&model, layout(Schedule::OneForwardOneBackward), 64 * 12);
    assert!(one.lists[0].arena.value() < 0.6 * gpipe.lists[0].arena.value());
}

#[test]
fn tied_embeddings_in_two_stages_are_summed_over_both() {
    let model = Model::Gpt {
        layers: 2,
        hidden: 16,
        heads: 2,
        ffn: None,
        vocab: 32,
        sequence: 8,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
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
fn one_tensor_a_micro_batch_crosses_between_stages_each_way() {
    for model in
        ["gpt2", "resnet18", "llama3-8b", "bert-base-uncased", "vgg11"].map(|name| Model::named(name).expect("in the zoo"))
    {
        let program = program(&model, Layout { pipeline: 2, ..Layout::default() }, 2);
        // An input's gradient is summed where its readers are, not where it was made.
        assert_eq!([0, 1].map(|stage| count(&program.lists[stage], "send")), [2, 2], "{model:?}");
    }
}

#[test]
fn the_same_plan_gives_the_same_program() {
    let model = Model::named("resnet18").expect("in the zoo");
    let layout = Layout { data: 2, tensor: 2, pipeline: 2, micro_batch: 2, ..Layout::default() };
    assert_eq!(program(&model, layout.clone(), 8).to_string(), program(&model, layout, 8).to_string());
}

#[test]
fn hardware_arithmetic_is_never_less_than_the_models() {
    let model = Model::Gpt {
        layers: 3,
        hidden: 32,
        heads: 4,
        ffn: None,
        vocab: 64,
        sequence: 32,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let odd = Model::Gpt {
        layers: 3,
        hidden: 32,
        heads: 4,
        ffn: None,
        vocab: 63,
        sequence: 32,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let ratio = |model: &Model, tensor, recompute| {
        let program = program(model, Layout { tensor, recompute, ..Layout::default() }, 2);
        program.hardware_flops.value() / program.model_flops.value()
    };
    assert!((ratio(&model, 1, Recompute::None) - 1.0).abs() < 1e-12, "nothing is done twice");
    assert!((ratio(&model, 2, Recompute::None) - 1.0).abs() < 1e-12, "ranks share out all products");
    assert!(ratio(&odd, 2, Recompute::None) > 1.0, "a vocabulary that does not divide is whole on every rank");
    assert!(ratio(&model, 1, Recompute::Full) > 1.2, "blocks are computed again");
}

#[test]
fn sequence_parallelism_turns_megatrons_all_reduces_into_halves() {
    let model = Model::Gpt {
        layers: 3,
        hidden: 32,
        heads: 4,
        ffn: None,
        vocab: 64,
        sequence: 8,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let program = program(&model, Layout { tensor: 2, sequence_parallel: true, ..Layout::default() }, 1);
    let stage = &program.lists[0];
    // Korthikanti et al. 2022: each of the four all-reduces of a layer, and those of the vocabulary, becomes a reduce-scatter and an
    // all-gather, and what a product reads is gathered again for its weight's gradient.
    assert_eq!(count(stage, "reduce_scatter"), 3 * 4 + 2, "{program}");
    assert!(count(stage, "all_gather") >= 3 * 4 + 2, "{program}");
    let activations = |stage: &StageProgram| {
        let norms = stage.instructions.iter().filter(|one| one.operation.kind() == "layer_norm");
        norms.map(|one| stage.buffer(one.writes[0]).shape.clone()).collect::<Vec<_>>()
    };
    assert!(activations(stage).iter().all(|shape| shape[..] == [1, 4, 32]), "norms have half of the sequence: {program}");
    // The gradients of what every rank has whole are sums over the ranks of `tensor`, too.
    assert!(count(stage, "all_reduce") >= 1);
}

#[test]
fn no_activation_waits_behind_the_sum_of_the_norms_gradients() {
    let model = Model::Gpt {
        layers: 3,
        hidden: 32,
        heads: 4,
        ffn: None,
        vocab: 64,
        sequence: 8,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    for zero in [1, 2, 3] {
        let layout = Layout { data: 2, tensor: 2, sequence_parallel: true, zero, ..Layout::default() };
        let program = program(&model, layout, 4);
        let stage = &program.lists[0];
        // In a stream one comes after the other, and the sum waits for the shard, which comes over `data`.
        let roles = |along: &[Axis]| {
            let is_it = |group: &foretell_program::Group| group.axes == along;
            let of_group = stage.instructions.iter().filter_map(move |one| match *one.operation {
                Operation::Collective { group, role, .. } if is_it(&stage.groups[group.0 as usize]) => Some(role),
                _ => None,
            });
            of_group.collect::<Vec<_>>()
        };
        let tensor = roles(&[Axis::Tensor]);
        let sums = tensor.iter().filter(|&&role| role == CollectiveRole::Gradients).count();
        assert!(sums > 0, "norms are shared out along the sequence");
        let (activations, last) = tensor.split_at(tensor.len() - sums);
        assert!(!activations.contains(&CollectiveRole::Gradients), "ZeRO {zero}: {tensor:?}");
        assert!(last.iter().all(|&role| role == CollectiveRole::Gradients));
    }
}

#[test]
fn a_ring_passes_parts_on_and_holds_less_than_gathering() {
    // A long sequence, of which attention would gather all.
    let model = Model::Gpt {
        layers: 2,
        hidden: 32,
        heads: 4,
        ffn: Some(32),
        vocab: 16,
        sequence: 4096,
        tied_embeddings: false,
        dropout: Default::default(),
        attention_dropout: DropoutRate::NONE,
    };
    let compiled = |context_method, precision| {
        let layout = Layout { context: 4, context_method, recompute: Recompute::Full, ..Layout::default() };
        let plan = Plan { precision, ..Plan::new(layout, 1) };
        compile(&model, "model", &plan).expect("a plan that fits").training
    };
    for precision in [foretell_units::DataType::Fp32, foretell_units::DataType::Bf16] {
        let [gather, ring] = [ContextMethod::Gather, ContextMethod::Ring].map(|method| compiled(method, precision));
        let [gathers, rings] = [&gather, &ring].map(|program| &program.lists[0]);
        assert_eq!(count(gathers, "shift"), 0);
        // Of each layer k and v go on three times in the forward pass, when it is run again and in the backward pass, in which their
        // gradients go on four times.
        assert_eq!(count(rings, "shift"), 2 * (3 * 2 * 3 + 2 * 4), "{ring}");
        assert_eq!(count(rings, "attention"), 2 * 2 * 4);
        assert_eq!(count(rings, "attention_gradient"), 2 * 4);
        // Other operators gather nothing along a sequence.
        assert_eq!(count(rings, "all_gather"), 0, "{ring}");
        assert!(count(gathers, "all_gather") >= 2 * 2);
        assert!(rings.arena < gathers.arena, "{} {}", rings.arena, gathers.arena);
        assert_eq!(ring.hardware_flops, gather.hardware_flops, "the same products in other parts");
        // What attention reads and writes at a time: the rank's own, and two parts that come and go.
        let whole = 2 * 4096 * 32 * precision.size().count();
        let room = |stage: &StageProgram, kind: &str| {
            let mut touched = std::collections::BTreeSet::new();
            for one in stage.instructions.iter().filter(|one| one.operation.kind() == kind && one.phase == Phase::Forward) {
                touched.extend(one.reads[1..3].iter().copied().filter(|&read| *stage.name_of(one) == *stage.buffer(read).name));
            }
            touched.iter().map(|&id| stage.buffer(id).bytes.count()).sum::<u64>()
        };
        assert_eq!(room(rings, "attention"), 2 * whole / 2, "two of four parts in each of two layers");
    }
}

#[test]
fn attention_that_is_no_ring_gathers_all_the_same() {
    let model = Model::named("t5-small").expect("in the zoo");
    let layout = |context_method| Layout { context: 2, context_method, ..Layout::default() };
    let [gather, ring] = [ContextMethod::Gather, ContextMethod::Ring].map(|method| program(&model, layout(method), 1));
    let kinds = |program: &Program| ["shift", "all_gather"].map(|kind| count(&program.lists[0], kind));
    // Relative positions everywhere but in attention over the encoder's sequence.
    assert_eq!(kinds(&gather)[0], 0);
    assert!(kinds(&ring)[1] > 0);
}

#[test]
fn zero_shards_what_it_says() {
    let model = Model::Mlp { widths: vec![64, 64, 64, 16] };
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
    let model = Model::Mlp { widths: vec![64; 9] };
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
    let model = Model::Mlp { widths: vec![64; 9] };
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
    let model = Model::Gpt {
        layers: 4,
        hidden: 32,
        heads: 4,
        ffn: None,
        vocab: 64,
        sequence: 8,
        tied_embeddings: false,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
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
fn an_all_reduced_tensor_is_whole_for_everyone() {
    // A sum that is made in place leaves no summands: whoever reads the buffer afterwards finds what is whole.
    let model = Model::Gpt {
        layers: 2,
        hidden: 16,
        heads: 4,
        ffn: None,
        vocab: 32,
        sequence: 8,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let program = program(&model, Layout { tensor: 2, data: 2, ..Layout::default() }, 4);
    for stage in &program.lists {
        let mut summed = std::collections::BTreeSet::new();
        for instruction in &stage.instructions {
            if let Operation::Collective { kind: Collective::AllReduce, .. } = *instruction.operation
                && !stage.buffer(instruction.writes[0]).persistent
            {
                assert!(summed.insert(instruction.writes[0]), "{} is summed twice", stage.name_of(instruction));
            }
        }
        assert!(!summed.is_empty());
    }
}

/// What `compile` says of a plan that it refuses.
fn refusal(model: &Model, plan: &Plan) -> String {
    let error = compile(model, "m", plan).expect_err("it is to be refused").to_string();
    assert!(error.contains("; hint: "), "{error}");
    error
}

#[test]
fn a_tensor_axis_that_nothing_can_be_shared_out_along_is_refused() {
    let layout = |tensor| Layout { tensor, ..Layout::default() };
    let refused = |model: &Model, tensor| refusal(model, &Plan::new(layout(tensor), 4));
    let perceptron = Model::Mlp { widths: vec![784, 512, 512, 10] };
    let error = refused(&perceptron, 3);
    assert!(error.starts_with("`features` of `0` (512) is not divisible by tensor (3)"), "{error}");
    let gpt = Model::Gpt {
        layers: 1,
        hidden: 30,
        heads: 5,
        ffn: Some(25),
        vocab: 33,
        sequence: 8,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
    let error = refused(&gpt, 2);
    assert!(error.contains("`heads` of `transformer.h.0.attn.c_attn` (5) is not divisible by tensor (2)"), "{error}");
    let error = refused(&Model::Mlp { widths: vec![8, 4] }, 2);
    assert!(error.starts_with("`tensor`: `m` has no width that 2 ranks could share out"), "{error}");
    assert!(compile(&perceptron, "m", &Plan::new(layout(4), 4)).is_ok());
}

#[test]
fn plans_beyond_any_machine_are_refused_before_they_take_its_memory() {
    let small = Model::Mlp { widths: vec![8, 8, 4] };
    let layout = Layout::default();
    let plan = |layout: Layout, global_batch| Plan::new(layout, global_batch);
    let max = usize::MAX;
    let cases = [
        (small.clone(), plan(layout.clone(), 1 << 30), "raise `micro_batch`"),
        (small.clone(), plan(layout.clone(), max), "`global_batch`: more than"),
        (small.clone(), plan(Layout { micro_batch: max, data: 2, ..layout.clone() }, 1 << 32), "is not divisible by"),
        (small.clone(), plan(Layout { data: max, tensor: max, ..layout.clone() }, 1 << 32), "global_batch (4294967296)"),
        (small.clone(), plan(Layout { tensor: max, pipeline: max, ..layout.clone() }, 8), "multiply to more than"),
        (
            small.clone(),
            plan(Layout { pipeline: 2, cuts: Some(vec![max, 3]), ..layout.clone() }, 8),
            "does not share out 2 blocks",
        ),
        (Model::Mlp { widths: vec![2; 2000] }, plan(Layout { pipeline: 1500, ..layout.clone() }, 8), "use 1024 stages or less"),
        (
            Model::Mlp { widths: vec![1 << 24, 1 << 16, 4] },
            plan(Layout { micro_batch: 1 << 22, ..layout.clone() }, 1 << 32),
            "makes more than 256 PiB",
        ),
        (
            Model::Resnet { depth: 18, stem: Stem::Imagenet, image: 8192, channels: 3, classes: 10, width: 64 },
            plan(Layout { micro_batch: 2, ..layout.clone() }, 2),
            "`maxpool` takes more than 2^31 elements",
        ),
        (small, plan(Layout { micro_batch: 1 << 32, ..layout }, 1 << 32), ""),
    ];
    for (model, plan, expected) in cases {
        match compile(&model, "m", &plan) {
            // The last is as large as it gets: sizes that can be counted with.
            Ok(compiled) => assert!(expected.is_empty() && compiled.arenas()[0].value() > 2.0f64.powi(34), "{expected}"),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains(expected) && error.contains("; hint: "), "{error}");
            }
        }
    }
}

#[test]
fn what_the_optimizer_is_told_has_to_mean_something() {
    let model = Model::Mlp { widths: vec![8, 8, 4] };
    let usual = Training::default();
    let cases = [
        ("learning_rate", Training { learning_rate: Some(f32::NAN), ..usual }),
        ("learning_rate", Training { learning_rate: Some(-0.1), ..usual }),
        ("momentum", Training { momentum: f32::INFINITY, ..usual }),
        ("weight_decay", Training { weight_decay: -1.0, ..usual }),
        ("beta1", Training { beta1: 1.0, ..usual }),
        ("beta2", Training { beta2: f32::NAN, ..usual }),
        ("epsilon", Training { epsilon: 0.0, ..usual }),
    ];
    for (field, training) in cases {
        let plan = Plan { training, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 4) };
        assert!(matches!(compile(&model, "m", &plan), Err(PlanError::Invalid { .. })));
        assert!(refusal(&model, &plan).starts_with(&format!("`training.{field}`: ")), "{field}");
    }
    let zero = Training { learning_rate: Some(0.0), momentum: 0.0, beta1: 0.0, ..usual };
    assert!(compile(&model, "m", &Plan { training: zero, ..Plan::new(Layout::default(), 4) }).is_ok());
}

/// The dropouts of all stages.
fn dropouts(program: &Program) -> Vec<foretell_models::Dropout> {
    let instructions = program.lists.iter().flat_map(|stage| &stage.instructions);
    let of = |operation: &Operation| match operation {
        Operation::Compute { kernel: foretell_models::Kernel::Dropout(sizes), .. } => Some(*sizes),
        _ => None,
    };
    instructions.filter_map(|instruction| of(&instruction.operation)).collect()
}

#[test]
fn dropout_knows_its_samples_and_its_part_and_evaluation_has_none() {
    let gpt = |dropout| Model::Gpt {
        layers: 1,
        hidden: 16,
        heads: 4,
        ffn: None,
        vocab: 32,
        sequence: 8,
        tied_embeddings: true,
        dropout,
        attention_dropout: DropoutRate::NONE,
    };
    let layout = Layout { data: 2, tensor: 2, context: 2, sequence_parallel: true, micro_batch: 3, ..Layout::default() };
    let plan = Plan::new(layout, 12);
    let compiled = compile(&gpt(DropoutRate::TENTH), "gpt", &plan).expect("it can be laid out");
    let found = dropouts(&compiled.training);
    // Embedding, attention, perceptron; forward and back; of two micro-batches.
    assert_eq!(found.len(), 3 * 2 * 2);
    assert!(found.iter().all(|one| (one.samples, one.positions, one.parts, one.features) == (3, 2, 4, 16)), "{found:?}");
    assert_eq!(found.iter().filter(|one| one.first_sample == 6).count(), 6, "the second micro-batch begins at sample 6");
    assert_eq!(found.iter().map(|one| one.site.site).collect::<std::collections::BTreeSet<_>>().len(), 3);
    assert!(dropouts(&compiled.evaluation).is_empty());
    assert!(dropouts(&compile(&gpt(DropoutRate::NONE), "gpt", &plan).expect("it can be laid out").training).is_empty());
}

#[test]
fn attentions_dropout_knows_its_samples_and_what_part_it_has_of_positions_and_heads() {
    let gpt = |attention_dropout| Model::Gpt {
        layers: 2,
        hidden: 16,
        heads: 4,
        ffn: None,
        vocab: 32,
        sequence: 8,
        tied_embeddings: true,
        dropout: DropoutRate::NONE,
        attention_dropout,
    };
    let attentions = |program: &Program| -> Vec<foretell_models::Attention> {
        let of = |operation: &Operation| match operation {
            Operation::Compute { kernel: Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes), .. } => Some(*sizes),
            _ => None,
        };
        let instructions = program.lists.iter().flat_map(|list| &list.instructions);
        instructions.filter_map(|instruction| of(&instruction.operation)).collect()
    };
    for (context_method, steps) in [(ContextMethod::Gather, 1), (ContextMethod::Ring, 2)] {
        let layout = Layout {
            data: 2,
            tensor: 2,
            context: 2,
            context_method,
            recompute: Recompute::Selective,
            micro_batch: 3,
            ..Layout::default()
        };
        let plan = Plan::new(layout, 12);
        let compiled = compile(&gpt(DropoutRate::TENTH), "gpt", &plan).expect("it can be laid out");
        // Forward, again and back; of two layers, and of two micro-batches.
        let found: Vec<_> = attentions(&compiled.training).iter().map(|one| one.dropout.expect("a dropout")).collect();
        assert_eq!(found.len(), 3 * 2 * 2 * steps);
        assert!(found.iter().all(|one| (one.position_parts, one.head_parts, one.group_parts) == (2, 2, 1)));
        assert_eq!(found.iter().filter(|one| one.first_sample == 6).count(), found.len() / 2);
        for site in [0, 1] {
            assert_eq!(found.iter().filter(|one| one.site.site == site).count(), found.len() / 2, "each layer has its own");
        }
        assert!(attentions(&compiled.evaluation).iter().all(|one| one.dropout.is_none()));
        let without = compile(&gpt(DropoutRate::NONE), "gpt", &plan).expect("it can be laid out");
        assert!(attentions(&without.training).iter().all(|one| one.dropout.is_none()));
        // Dropout is no matrix product.
        let flops = |compiled: &Compiled| (compiled.training.model_flops, compiled.training.hardware_flops);
        assert_eq!(flops(&compiled), flops(&without));
    }
}

#[test]
fn dropout_between_the_columns_and_rows_of_tensor_parallel_products_keeps_them_apart() {
    let vgg = Model::Vgg {
        depth: 11,
        batch_norm: false,
        stem: Stem::Imagenet,
        image: 224,
        channels: 3,
        classes: 10,
        width: 4,
        hidden: 64,
        dropout: DropoutRate::TENTH,
    };
    let plan = Plan::new(Layout { tensor: 2, micro_batch: 2, ..Layout::default() }, 2);
    let found = dropouts(&compile(&vgg, "vgg", &plan).expect("it can be laid out").training);
    assert!(found.iter().any(|one| (one.samples, one.positions, one.parts, one.features) == (2, 32, 2, 1)), "{found:?}");
    let small = Model::Vgg {
        depth: 11,
        batch_norm: false,
        stem: Stem::Small,
        image: 32,
        channels: 1,
        classes: 10,
        width: 4,
        hidden: 64,
        dropout: DropoutRate::TENTH,
    };
    let error = compile(&small, "vgg", &plan).expect_err("it has no inner layers").to_string();
    assert!(error.contains("`stem: small` does not have"), "{error}");
}

#[test]
fn experts_are_cut_by_tensor_or_spread_over_it_and_their_tokens_over_the_sequence() {
    let text = r#"{"family": "moe", "layers": 1, "hidden": 16, "heads": 4, "ffn": 32, "vocab": 64, "sequence": 16, "experts": 8, "top_k": 2, "capacity_factor": 1.5}"#;
    let model: Model = serde_json::from_str(text).expect("a model");
    let look = |layout: Layout| {
        let program = compile(&model, "model", &Plan::new(layout, 2)).expect("a plan that fits").training;
        let list = &program.lists[0];
        let kernels = list.instructions.iter().filter_map(|one| match *one.operation {
            Operation::Compute { kernel, .. } => Some(kernel),
            _ => None,
        });
        let product = kernels.clone().find_map(|kernel| match kernel {
            Kernel::ExpertMatmul { experts, rows, columns, .. } => Some([experts, rows, columns]),
            _ => None,
        });
        let tokens = kernels.clone().find_map(|kernel| match kernel {
            Kernel::Dispatch(sizes) => Some(sizes.tokens),
            _ => None,
        });
        let exchanges: Vec<Vec<Axis>> = list
            .instructions
            .iter()
            .filter_map(|one| match *one.operation {
                Operation::Collective { kind: Collective::AllToAll, role: CollectiveRole::Expert, group, .. } => {
                    Some(list.groups[group.0 as usize].axes.clone())
                }
                _ => None,
            })
            .collect();
        (product.expect("experts"), tokens.expect("a dispatch"), exchanges)
    };
    // Slots: 1.5 x 16 tokens x 2 choices over 8 experts, of two samples.
    let ([experts, rows, columns], tokens, exchanges) = look(Layout { micro_batch: 2, ..Layout::default() });
    assert_eq!((experts, columns, tokens, exchanges), (8, 32, 32, vec![]));
    let cut = look(Layout { micro_batch: 2, tensor: 2, ..Layout::default() });
    assert_eq!(cut, ([8, rows, 16], 32, vec![]));
    // Megatron's expert-parallel size of 2 with an expert-tensor-parallel size of 1: there and back, and once more for the gradients.
    let spread = look(Layout { micro_batch: 2, tensor: 2, expert_tensor: Some(1), sequence_parallel: true, ..Layout::default() });
    assert_eq!(spread, ([4, rows, 32], 16, vec![vec![Axis::Tensor]; 4]));
    let context = look(Layout { micro_batch: 2, context: 2, ..Layout::default() });
    assert_eq!((context.0, context.1), ([8, rows / 2, 32], 16));
}

#[test]
fn what_was_gathered_leaves_its_place_with_the_last_kernel_that_reads_it() {
    let model = Model::Gpt {
        layers: 12,
        hidden: 256,
        heads: 4,
        ffn: None,
        vocab: 512,
        sequence: 8,
        tied_embeddings: false,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    };
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
