//! Steps of traced frameworks: peak memory equals what fresh traces of the framework's own code
//! allocate, wrappers included.
#![allow(clippy::unwrap_used)]

use foretell_models::operator_tables::{Element, OperatorTable, TableSizes};
use foretell_program::traced::{Fsdp2Groups, HOST_COPY, RankEvent, Sharding, TracedJob, TracedOptimizer};
use foretell_program::{FrameworkProfile, MachineIdentity, MovesSample, OperatorSample, Origin, Profile, Sample, Timeline};
use foretell_simulator::gpu::Profiles;
use foretell_simulator::gpu::traced::{MeasuredFramework, TracedMachine, traced_memory, traced_time, traced_timeline};
use foretell_simulator::{critical_path, repeated_time};
use foretell_units::{Bytes, Seconds};
use std::collections::BTreeMap;
use std::sync::Arc;

const LLAMA_3_8B: [(&str, usize); 6] = [("h", 4096), ("n", 32), ("k", 8), ("d", 128), ("f", 14336), ("v", 128_256)];
const MISTRAL_7B: [(&str, usize); 6] = [("h", 4096), ("n", 32), ("k", 8), ("d", 128), ("f", 14336), ("v", 32000)];

fn table(checkpoint: &str, precision: &str, adapter: &str) -> Arc<OperatorTable> {
    let key = [
        ("architecture", "llama"),
        ("framework", "hf"),
        ("attention", "flash"),
        ("checkpoint", checkpoint),
        ("precision", precision),
        ("adapter", adapter),
        ("loss", "model"),
        ("kernels", "hf"),
        ("head", "usual"),
    ];
    Arc::new(OperatorTable::library(&key).unwrap().unwrap())
}

fn sizes(layers: usize, batch: usize, sequence: usize, model: &[(&str, usize)]) -> TableSizes {
    let empty = TableSizes { layers, ..TableSizes::default() };
    let all = [("b", batch), ("s", sequence), ("r", 16)];
    model.iter().chain(&all).fold(empty, |sizes, &(symbol, size)| sizes.with(symbol, size))
}

fn job(table: &Arc<OperatorTable>, sizes: TableSizes, sharding: Sharding, ranks: usize, stored: Element) -> TracedJob {
    let table = Arc::clone(table);
    TracedJob::new(table, sizes, ranks, sharding, stored, TracedOptimizer::AdamWForeach)
}

/// GiB that `trace_step.py` of the project's oracle printed on 28 November 2026 (torch 2.15,
/// transformers 5.24, peft, AdamW foreach, clipping): `--model llama3-8b --layers 8` and `--model
/// mistral-7b`, `--attn flash`.
#[test]
fn peak_memory_equals_fresh_traces_of_the_frameworks() {
    let (fsdp1, fsdp2) = (Sharding::Fsdp1, Sharding::Fsdp2 { reduce: Element::F32, groups: Fsdp2Groups::Root });
    let (mixed, plain) = (table("full", "mixed", "none"), table("full", "bf16", "none"));
    let adapters = table("full-reentrant", "mixed", "lora-attention");
    let llama = |batch, sequence| sizes(8, batch, sequence, &LLAMA_3_8B);
    let mistral = |batch| sizes(32, batch, 4096, &MISTRAL_7B);
    for (job, expected) in [
        (job(&mixed, llama(2, 4096), fsdp1, 8, Element::F32), 18.763),
        (job(&mixed, llama(1, 512), fsdp1, 8, Element::F32), 10.589),
        (job(&plain, llama(2, 4096), fsdp2, 8, Element::F32), 18.3567),
        (job(&plain, llama(1, 512), fsdp2, 8, Element::F32), 10.5891),
        (job(&adapters, mistral(4), Sharding::Replicated, 1, Element::F32), 23.7528),
        (job(&adapters, mistral(2), fsdp1, 2, Element::F32), 12.772),
    ] {
        let memory = traced_memory(&job, None).unwrap();
        let gib = memory.allocated.value() / f64::from(1 << 30);
        assert!((gib / expected - 1.0).abs() < 1e-3, "{gib} GiB beside {expected} with {:?} of {}", job.sharding, job.ranks);
        let sum: u64 = memory.contents.values().map(|bytes| bytes.count()).sum();
        assert_eq!(sum, memory.allocated.count(), "what lives at the peak is the peak");
        assert!(memory.reserved >= memory.allocated && memory.flushes == 0);
    }
}

/// The library's table of a step that FSDP2 computes in bf16.
fn table_in_bf16(words: &[(&str, &str)]) -> Arc<OperatorTable> {
    let usual = [("framework", "hf"), ("precision", "bf16"), ("adapter", "none"), ("loss", "model"), ("kernels", "hf")];
    let key: Vec<(&str, &str)> = usual.iter().chain(words).copied().collect();
    Arc::new(OperatorTable::library(&key).unwrap().unwrap())
}

/// Bytes of steps under FSDP2 as Accelerate 1.15 sets it up, traced by `benches/fresh_traces.py` on
/// 1 December 2026: embedding, layers, last norm with head, and the rest are groups of their own.
#[test]
fn peak_memory_under_accelerates_fsdp2_equals_fresh_traces() {
    let fsdp2 = Sharding::Fsdp2 { reduce: Element::Bf16, groups: Fsdp2Groups::Accelerate };
    let qwen3 = [("architecture", "qwen3"), ("attention", "flash"), ("head", "usual")];
    let head = |head: &'static str| [("architecture", "qwen3"), ("attention", "flash"), ("checkpoint", "full"), ("head", head)];
    let none = table_in_bf16(&[&qwen3[..], &[("checkpoint", "none")]].concat());
    let gpt2 = table_in_bf16(&[("architecture", "gpt2"), ("attention", "sdpa"), ("dropout", "some"), ("checkpoint", "none")]);
    let (usual, shared) = (table_in_bf16(&head("usual")), table_in_bf16(&head("tied")));
    let of = |table, (layers, batch, sequence), ranks, rest: &[(&str, usize)]| {
        job(table, sizes(layers, batch, sequence, rest), fsdp2, ranks, Element::F32)
    };
    let plain = of(&none, (2, 3, 1000), 2, &[("h", 3392), ("n", 4), ("k", 2), ("d", 128), ("f", 8832), ("v", 50257)]);
    let large = of(&usual, (4, 4, 4096), 2, &[("h", 3584), ("n", 16), ("k", 4), ("d", 128), ("f", 8448), ("v", 151_936)]);
    let tied = of(&shared, (3, 8, 1024), 4, &[("h", 1664), ("n", 8), ("k", 2), ("d", 128), ("f", 4672), ("v", 151_936)]);
    let accumulated = of(&gpt2, (6, 3, 1024), 4, &[("h", 1024), ("n", 8), ("d", 128), ("f", 1472), ("v", 100_352), ("p", 1024)]);
    for (job, optimizer, micro_batches, expected) in [
        (plain, TracedOptimizer::AdamWFused, 1, 6_254_440_448.0),
        (large, TracedOptimizer::AdamWFused, 1, 41_057_986_048.0),
        (tied, TracedOptimizer::Sgd { momentum: true, decay: false }, 1, 16_304_274_944.0),
        (accumulated, TracedOptimizer::AdamWFused, 2, 5_270_444_032.0),
    ] {
        let job = TracedJob { optimizer, micro_batches, ..job };
        let allocated = traced_memory(&job, None).unwrap().allocated.value();
        assert!((allocated / expected - 1.0).abs() < 1e-3, "{allocated} beside {expected} of {:?}", job.table.key);
    }
}

#[test]
fn less_memory_than_the_allocator_wants_flushes_its_cache() {
    let table = table("none", "bf16", "none");
    let job = job(&table, sizes(4, 2, 4096, &MISTRAL_7B), Sharding::Replicated, 1, Element::Bf16);
    let free = traced_memory(&job, None).unwrap();
    let tight = traced_memory(&job, Some(Bytes::new((free.allocated.count() + free.reserved.count()) / 2))).unwrap();
    assert!(tight.flushes > 0 && tight.allocated == free.allocated, "{tight:?} beside {free:?}");
}

#[test]
fn steps_of_traced_jobs_scale_as_their_work() {
    let profiles = Profiles::library().unwrap();
    let table = table("full", "mixed", "none");
    let step = |batch, ranks, micro_batches| {
        let cluster = profiles.cluster("a100-sxm-80g", None, 8, ranks, None).unwrap();
        let sharding = if ranks > 1 { Sharding::Fsdp1 } else { Sharding::Replicated };
        let job = TracedJob { micro_batches, ..job(&table, sizes(8, batch, 2048, &MISTRAL_7B), sharding, ranks, Element::F32) };
        traced_time(&job, &cluster, 0).unwrap()
    };
    let (one, two, accumulated, sharded) = (step(2, 1, 1), step(4, 1, 1), step(2, 1, 2), step(2, 8, 1));
    let ratio = two.step / one.step;
    assert!((1.7..2.0).contains(&ratio), "{ratio}");
    assert!(accumulated.step > two.step, "two passes launch twice as many kernels");
    assert!(one.communication.value() == 0.0 && sharded.communication.value() > 0.0 && sharded.exposed < sharded.communication);
    // Small batches wait for the host.
    let tiny = {
        let cluster = profiles.cluster("a100-sxm-80g", None, 8, 1, None).unwrap();
        let job = job(&table, sizes(8, 1, 16, &MISTRAL_7B), Sharding::Replicated, 1, Element::F32);
        traced_time(&job, &cluster, 0).unwrap()
    };
    assert!(tiny.host_bound > Default::default(), "{tiny:?}");
}

/// Under `no_sync`, whole gradients in sixteen bits stay until the last micro-batch.
#[test]
fn fsdp1_accumulates_whole_gradients() {
    let table = table("full", "mixed", "none");
    let with = |micro_batches| {
        let job = TracedJob { micro_batches, ..job(&table, sizes(8, 1, 512, &MISTRAL_7B), Sharding::Fsdp1, 8, Element::F32) };
        traced_memory(&job, None).unwrap().allocated.value()
    };
    let layer = 4096.0 * 4096.0 * 2.5 + 3.0 * 4096.0 * 14336.0;
    let whole = 2.0 * (8.0 * layer + 2.0 * 4096.0 * 32000.0);
    let more = with(2) - with(1);
    assert!((0.75..1.05).contains(&(more / whole)), "{more} beside {whole}");
    assert_eq!(with(2), with(5), "further micro-batches add to what is there");
}

/// Under ZeRO 1 and 2 kernels wait for reductions, under 3 they run beside them.
#[test]
fn deepspeed_sends_as_its_stage_says() {
    let table = table("full", "bf16", "none");
    let cluster = Profiles::library().unwrap().cluster("a100-sxm-80g", None, 8, 8, None).unwrap();
    let with = |stage, batch| {
        let zero = Sharding::Zero { stage };
        let job = TracedJob {
            optimizer: TracedOptimizer::AdamWFused,
            ..job(&table, sizes(8, batch, 2048, &MISTRAL_7B), zero, 8, Element::Bf16)
        };
        (traced_time(&job, &cluster, 0).unwrap(), traced_memory(&job, None).unwrap())
    };
    let [(first, whole), (second, _), (third, partitioned)] = [1, 2, 3].map(|stage| with(stage, 4));
    for early in [&first, &second] {
        let [exposed, sent] = [early.exposed, early.communication].map(|time| time.value());
        assert!(exposed / sent > 0.99, "{exposed} of {sent}");
    }
    let [exposed, sent] = [third.exposed, third.communication].map(|time| time.value());
    assert!(exposed / sent < 0.5, "{exposed} of {sent}");
    // Parameters twice and gradients once to a partition, beside gradients to all and parameters
    // once.
    assert!((0.8..1.3).contains(&(third.communication / first.communication)), "{third:?} beside {first:?}");
    assert!(partitioned.allocated.value() < 0.9 * whole.allocated.value(), "{partitioned:?} beside {whole:?}");
}

/// Steps with many micro-batches follow from short ones.
#[test]
fn long_steps_are_repeated_short_ones() {
    let table = table("full", "mixed", "none");
    let cluster = Profiles::library().unwrap().cluster("a100-sxm-80g", None, 8, 8, None).unwrap();
    for sharding in
        [Sharding::Fsdp1, Sharding::Ddp, Sharding::Zero { stage: 1 }, Sharding::Zero { stage: 2 }, Sharding::Zero { stage: 3 }]
    {
        let job = TracedJob { micro_batches: 9, ..job(&table, sizes(8, 1, 2048, &MISTRAL_7B), sharding, 8, Element::F32) };
        let (whole, repeated) = (traced_time(&job, &cluster, 0).unwrap(), repeated_time(&job, &cluster, 0).unwrap());
        assert!((repeated.step / whole.step - 1.0).abs() < 1e-3, "{} beside {}", repeated.step, whole.step);
        assert_eq!(repeated.launches, whole.launches);
        assert!((repeated.forward_flops / whole.forward_flops - 1.0).abs() < 1e-9);
    }
}

/// Offloaded states leave the device for the host, which updates them in the time that DeepSpeed's
/// own optimizer takes.
#[test]
fn offloaded_states_lie_on_the_host() {
    let table = table("full", "bf16", "none");
    let cluster = Profiles::library().unwrap().cluster("a100-sxm-80g", None, 8, 8, None).unwrap();
    let layer = 4096.0 * 4096.0 * 2.5 + 3.0 * 4096.0 * 14336.0;
    let of_rank = (8.0 * layer + 2.0 * 4096.0 * 32000.0) / 8.0;
    let with = |stage, offloads_optimizer, offloads_parameters| {
        let job = TracedJob {
            optimizer: TracedOptimizer::AdamWFused,
            offloads_optimizer,
            offloads_parameters,
            micro_batches: 2,
            ..job(&table, sizes(8, 1, 2048, &MISTRAL_7B), Sharding::Zero { stage }, 8, Element::Bf16)
        };
        (traced_time(&job, &cluster, 0).unwrap(), traced_memory(&job, None).unwrap())
    };
    let near = |value: f64, expected: f64| assert!((value / expected - 1.0).abs() < 0.02, "{value} beside {expected}");
    for stage in [1, 2, 3] {
        let ((kept_time, kept), (time, memory)) = (with(stage, false, false), with(stage, true, false));
        assert_eq!((kept.host.value(), kept_time.host_update.value()), (0.0, 0.0));
        // Single precision's copy, its gradient and two moments; and gradients in sixteen bits at
        // stage 3. Before it, parameters in sixteen bits, and earlier gradients of what is the
        // rank's in part, too.
        let least = if stage == 3 { 18.0 } else { 20.0 };
        assert!((least..least * 1.2).contains(&(memory.host.value() / of_rank)), "{stage}: {memory:?}");
        let saved = (kept.allocated.value() - memory.allocated.value()) / of_rank;
        assert!(saved > 10.0, "{stage}: {saved} bytes an element are saved");
        near(time.host_update.value(), 0.257e-9 * of_rank * 8.0);
        assert!(time.step > kept_time.step && time.step.value() > time.host_update.value(), "{time:?}");
    }
    let ((time, memory), (far_time, far)) = (with(3, true, false), with(3, true, true));
    near(far.host.value() - memory.host.value(), 2.0 * of_rank);
    near(memory.allocated.value() - far.allocated.value(), 2.0 * of_rank);
    assert!(far_time.communication > time.communication, "{far_time:?} beside {time:?}");
}

/// Experts that are modules of their own wait for the host's hooks around each of them.
#[test]
fn separate_experts_wait_for_the_host() {
    let key = [("framework", "hf"), ("architecture", "qwen3_moe"), ("attention", "flash"), ("checkpoint", "full")];
    let key: Vec<_> = key.into_iter().chain([("precision", "bf16"), ("experts", "eager")]).collect();
    let table = Arc::new(OperatorTable::library(&key).unwrap().unwrap());
    let model =
        [("h", 2048), ("n", 32), ("k", 4), ("d", 128), ("m", 768), ("v", 151_936), ("E", 128), ("t", 8), ("b", 1), ("s", 2048)];
    let empty = TableSizes { layers: 4, ..TableSizes::default() };
    let sizes = model.into_iter().fold(empty, |sizes, (symbol, size)| sizes.with(symbol, size));
    let cluster = Profiles::library().unwrap().cluster("a100-sxm-80g", None, 8, 8, None).unwrap();
    let with = |separate_experts| {
        let job = TracedJob { separate_experts, ..job(&table, sizes.clone(), Sharding::Zero { stage: 3 }, 8, Element::Bf16) };
        (traced_time(&job, &cluster, 0).unwrap(), traced_memory(&job, None).unwrap())
    };
    let ((one, whole), (other, apart)) = (with(false), with(true));
    // Six hooks of 150 us around each of five modules of 128 experts, in four layers.
    let hooks = 4.0 * 128.0 * 5.0 * 6.0 * 150e-6;
    assert!((hooks..hooks + 1.3 * one.step.value()).contains(&other.step.value()), "{} beside {}", other.step, one.step);
    assert!((apart.allocated.value() / whole.allocated.value() - 1.0).abs() < 0.1, "{apart:?} beside {whole:?}");
}

/// A loop over experts launches kernels for each of them, and reads from the device which tokens an
/// expert has, so that the host is never ahead of it.
#[test]
fn loops_over_experts_wait_for_the_host() {
    let model =
        [("h", 2048), ("n", 32), ("k", 4), ("d", 128), ("m", 768), ("v", 151_936), ("E", 128), ("t", 8), ("b", 1), ("s", 2048)];
    let empty = TableSizes { layers: 4, ..TableSizes::default() }.with("r", 16);
    let sizes = model.into_iter().fold(empty, |sizes, (symbol, size)| sizes.with(symbol, size));
    let cluster = Profiles::library().unwrap().cluster("a100-sxm-80g", None, 8, 1, None).unwrap();
    let time = |experts, version| {
        let key = [("framework", "hf"), ("architecture", "qwen3_moe"), ("attention", "flash"), ("precision", "mixed")];
        let own = [("adapter", "lora-all"), ("experts", experts), ("version", version), ("checkpoint", "none")];
        let key: Vec<_> = key.into_iter().chain(own).collect();
        let table = Arc::new(OperatorTable::library(&key).unwrap().unwrap());
        traced_time(&job(&table, sizes.clone(), Sharding::Replicated, 1, Element::F32), &cluster, 0).unwrap()
    };
    let (one_by_one, at_once) = (time("eager", "4.48"), time("grouped_mm", "latest"));
    assert!(one_by_one.launches > 20 * at_once.launches, "{} beside {}", one_by_one.launches, at_once.launches);
    assert!(one_by_one.host_bound / one_by_one.step > 0.5, "{one_by_one:?}");
    assert!(one_by_one.step / at_once.step > 4.0, "{} beside {}", one_by_one.step, at_once.step);
}

/// A step's interval is wide where it waits for the host, and where the device was not measured.
#[test]
fn intervals_follow_from_what_a_step_waits_for() {
    let (profiles, table) = (Profiles::library().unwrap(), table("full", "mixed", "none"));
    let small = [("h", 256), ("n", 4), ("k", 4), ("d", 64), ("f", 1024), ("v", 1000)];
    let width = |device, model, batch, sequence| {
        let cluster = profiles.cluster(device, None, 8, 1, None).unwrap();
        // Many micro-batches, beside which the optimizer takes no time.
        let job = job(&table, sizes(8, batch, sequence, model), Sharding::Replicated, 1, Element::F32);
        let time = repeated_time(&TracedJob { micro_batches: 64, ..job }, &cluster, 0).unwrap();
        let [fast, slow] = time.step_range;
        assert!(fast < time.step && time.step < slow, "{time:?}");
        slow / fast
    };
    let large = width("a100-sxm-80g", &MISTRAL_7B, 8, 2048);
    assert!(width("a100-sxm-80g", &small, 1, 16) > 1.5 * large, "small batches wait for the host");
    assert!(width("h20", &MISTRAL_7B, 8, 2048) > 1.2 * large, "this device was not measured");
}

/// A reference adds a copy of the model, and a forward pass of which nothing stays.
#[test]
fn references_add_a_copy_and_a_forward_pass() {
    let table = table("none", "bf16", "none");
    let cluster = Profiles::library().unwrap().cluster("a100-sxm-80g", None, 8, 8, None).unwrap();
    let parameters = 8.0 * (4096.0 * 4096.0 * 2.5 + 3.0 * 4096.0 * 14336.0) + 2.0 * 4096.0 * 32000.0;
    for (sharding, ranks) in [(Sharding::Replicated, 1), (Sharding::Fsdp1, 8), (Sharding::Zero { stage: 3 }, 8)] {
        let with = |passes_without_gradients, has_reference| {
            let job = TracedJob {
                passes_without_gradients,
                has_reference,
                ..job(&table, sizes(8, 2, 2048, &MISTRAL_7B), sharding, ranks, Element::Bf16)
            };
            (traced_time(&job, &cluster, 0).unwrap(), traced_memory(&job, None).unwrap())
        };
        let ((alone_time, alone), (time, memory), (_, without_copy)) = (with(0, false), with(1, true), with(1, false));
        let copy = memory.allocated.value() - without_copy.allocated.value();
        assert!((copy / (2.0 * parameters / ranks as f64) - 1.0).abs() < 0.01, "{copy}");
        // What the reference's pass allocates beside the model's activations is a layer's, or the
        // logits'.
        let beside = without_copy.allocated.value() / alone.allocated.value();
        assert!((1.0..1.2).contains(&beside), "{beside}");
        assert_eq!(time.reference_flops, time.forward_flops);
        let longer = time.step / alone_time.step;
        assert!((1.15..1.5).contains(&longer), "{longer} with {sharding:?}");
    }
}

/// A profile in which every call of a job takes a time of its own, and the time of all together.
fn measured(job: &TracedJob, left_out: &str) -> (Profile, f64) {
    let sample = |seconds: f64| {
        let time = Seconds::new(seconds);
        Sample { median: time, p10: time * 0.9, p90: time * 1.2, count: 9 }
    };
    let (values, mut total) = (job.table.values(&job.sizes).unwrap(), 0.0);
    let (mut operators, mut moves) = (BTreeMap::new(), BTreeMap::new());
    job.emit(1, |event| match event {
        RankEvent::Operator(operator) => {
            let count = operators.len() as f64;
            let (_, time) = operators.entry(operator.call(&values)).or_insert((operator.name.clone(), 1e-4 * (1.0 + count)));
            total += *time;
        }
        RankEvent::Moves { name, bytes, .. } if name != HOST_COPY => {
            moves.entry(name).or_insert(bytes);
            total += 1e-12 * bytes as f64;
        }
        _ => {}
    })
    .unwrap();
    let operators = operators.into_iter().filter(|(_, (name, _))| name != left_out);
    let framework = FrameworkProfile {
        stack: "hf-trainer".into(),
        table: "foretell-operator-table 1".into(),
        ranks: 1,
        threads: 1,
        operators: operators
            .map(|(call, (_, time))| OperatorSample { call, bytes: Bytes::new(1000), time: sample(time) })
            .collect(),
        moves: moves
            .into_iter()
            .map(|(name, bytes)| MovesSample { name: name.into(), bytes: Bytes::new(bytes), time: sample(1e-12 * bytes as f64) })
            .collect(),
    };
    let profile = Profile {
        schema_version: Default::default(),
        device: "local-core".into(),
        machine: MachineIdentity { device: "a processor".into(), system: "a system".into(), devices: 1, cores: None },
        backend: "pytorch".into(),
        transport: "gloo".into(),
        measured_at: 0,
        instruction_overhead: sample(0.0),
        stream_handoff: sample(0.0),
        step_overhead: sample(0.25),
        launch: Seconds::ZERO,
        load_seconds_per_byte: Seconds::ZERO,
        communication_share: 1.0,
        communication_growth: None,
        interruption: Seconds::ZERO,
        buffered_bytes: 0,
        paces: vec![1.0],
        reference: None,
        speeds: Vec::new(),
        input: None,
        storage: None,
        framework: Some(framework),
        kernels: Vec::new(),
        exchanges: Vec::new(),
    };
    (profile, total)
}

#[test]
fn a_step_takes_what_its_framework_measured_of_each_call() {
    let job = job(&table("none", "mixed", "none"), sizes(2, 1, 512, &LLAMA_3_8B), Sharding::Replicated, 1, Element::F32);
    let (profile, total) = measured(&job, "");
    let framework = MeasuredFramework::of_profile(&profile).expect("it has one");
    let time = traced_time(&job, TracedMachine::Measured(&framework), 0).unwrap();
    assert!((time.step.value() / (total + 0.25) - 1.0).abs() < 1e-9, "{} for {total}", time.step);
    assert!(time.estimated.is_empty(), "{:?}", time.estimated);
    let [fast, slow] = time.step_range;
    assert!(fast < time.step && slow > time.step);

    // Collectives that were not measured are refused, and so is a profile without operators.
    assert_eq!(framework.lacks(&job).unwrap(), None);
    let of_two = TracedJob { ranks: 2, sharding: Sharding::Ddp, ..job.clone() };
    assert!(framework.lacks(&of_two).unwrap().is_some_and(|reason| reason.contains("collectives of 2 ranks")));
    let mut empty = profile.clone();
    empty.framework.as_mut().unwrap().operators.clear();
    assert!(MeasuredFramework::of_profile(&empty).unwrap().lacks(&job).unwrap().is_some());

    // What was not measured is said.
    let (profile, _) = measured(&job, "aten.mm");
    let framework = MeasuredFramework::of_profile(&profile).expect("it has one");
    let time = traced_time(&job, TracedMachine::Measured(&framework), 0).unwrap();
    assert_eq!(time.estimated.iter().map(String::as_str).collect::<Vec<_>>(), ["aten.mm"]);
}

/// The FLOPs, samples and mesh that a step's Program takes from our own compiler's.
fn own_program(ranks: usize) -> foretell_program::Program {
    let model = foretell_models::Model::named("mlp").unwrap();
    let layout = foretell_program::Layout { data: ranks, micro_batch: 1, ..foretell_program::Layout::default() };
    let plan = foretell_program::Plan::new(layout, ranks);
    foretell_program::compile(&model, "mlp", &plan).unwrap().training
}

/// The Program of a traced step has an instruction for each span, in an order that the spans keep,
/// its buffers need at their peak what the replay of the allocator says, and the critical path is
/// the step.
#[test]
fn the_program_of_a_traced_step_agrees_with_its_time_and_memory() {
    let profiles = Profiles::library().unwrap();
    let cluster = &profiles.cluster("h100-sxm-80g", None, 8, 8, None).unwrap();
    let (mixed, plain) = (table("full", "mixed", "none"), table("none", "bf16", "none"));
    let small = |layers| sizes(layers, 1, 2048, &MISTRAL_7B);
    let offloaded = TracedJob {
        offloads_optimizer: true,
        offloads_parameters: true,
        ..job(&plain, small(2), Sharding::Zero { stage: 3 }, 8, Element::Bf16)
    };
    let jobs = [
        job(&plain, small(2), Sharding::Replicated, 1, Element::Bf16),
        TracedJob { micro_batches: 3, ..job(&plain, small(2), Sharding::Ddp, 8, Element::F32) },
        TracedJob { micro_batches: 2, ..job(&mixed, small(3), Sharding::Fsdp1, 8, Element::F32) },
        job(&mixed, small(3), Sharding::Fsdp2 { reduce: Element::F32, groups: Fsdp2Groups::Root }, 8, Element::F32),
        TracedJob {
            micro_batches: 2,
            ..job(&plain, small(3), Sharding::Fsdp2 { reduce: Element::Bf16, groups: Fsdp2Groups::Accelerate }, 8, Element::F32)
        },
        job(&plain, small(2), Sharding::Zero { stage: 2 }, 8, Element::Bf16),
        offloaded,
    ];
    for job in jobs {
        let program = job.step_program(&own_program(job.ranks)).unwrap();
        let timeline = traced_timeline(&job, cluster, 0).unwrap();
        let (list, time) = (&program.lists[0], traced_time(&job, cluster, 0).unwrap());
        assert_eq!(list.instructions.len(), timeline.spans.len(), "{:?}", job.sharding);
        assert_eq!(timeline.end, time.step.into());
        let mut end_of_stream = vec![foretell_units::Picoseconds::ZERO; list.streams.len()];
        for (instruction, span) in list.instructions.iter().zip(&timeline.spans) {
            let before = &mut end_of_stream[instruction.stream.0 as usize];
            assert!(span.start >= *before && span.end >= span.start, "{:?}: {instruction:?}", job.sharding);
            *before = span.end;
            for after in &instruction.after {
                assert!(timeline.spans[after.0 as usize].end <= span.start, "{:?}: {instruction:?}", job.sharding);
            }
        }
        let memory = traced_memory(&job, None).unwrap();
        let error = list.arena.value() / memory.allocated.value() - 1.0;
        assert!(error.abs() < 5e-3, "{:?}: {} beside {}", job.sharding, list.arena, memory.allocated);
        let rank = Arc::new(timeline);
        let ranks = (0..job.ranks).map(|_| Arc::clone(&rank)).collect();
        let timeline = Timeline { origin: Origin::Predicted, ranks };
        let path = critical_path(&timeline, &program).unwrap();
        let on_path = path.by_time.compute + path.by_time.optimizer + path.by_time.communication + path.between;
        assert!((on_path / time.step - 1.0).abs() < 1e-6, "{on_path} beside {}", time.step);
    }
}
