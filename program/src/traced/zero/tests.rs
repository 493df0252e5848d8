//! What ZeRO holds and sends, beside what a person computes from the number of parameters.

use crate::traced::{Contents, RankEvent, Sharding, TracedCollective, TracedJob, TracedOptimizer, TracedPhase};
use foretell_models::operator_tables::{Element, OperatorTable, ParameterRole, TableSizes};
use std::collections::BTreeMap;
use std::sync::Arc;

const LLAMA: [(&str, usize); 6] = [("h", 4096), ("n", 32), ("k", 8), ("d", 128), ("f", 14336), ("v", 32_000)];
/// `t5-3b`, the model of DeepSpeed's `docs/code-docs/source/memory.rst`.
const T5_3B: [(&str, usize); 6] = [("h", 1024), ("n", 32), ("d", 128), ("f", 16384), ("v", 32_128), ("u", 64)];

fn job(key: &[(&str, &str)], layers: usize, model: &[(&str, usize)], stage: u8, ranks: usize) -> TracedJob {
    let usual = [("framework", "hf"), ("precision", "bf16"), ("loss", "model"), ("kernels", "hf")];
    let key: Vec<_> = key.iter().copied().chain(usual).collect();
    let table = Arc::new(OperatorTable::library(&key).expect("it is sound").expect("it was traced"));
    let all = [("b", 1), ("s", 64), ("r", 16)];
    let empty = TableSizes { layers, ..TableSizes::default() };
    let sizes = model.iter().chain(&all).fold(empty, |sizes, &(symbol, size)| sizes.with(symbol, size));
    let optimizer = TracedOptimizer::AdamWFused;
    TracedJob::new(table, sizes, ranks, Sharding::Zero { stage }, Element::Bf16, optimizer)
}

fn llama(stage: u8, ranks: usize, checkpoint: &str) -> TracedJob {
    let key = [("architecture", "llama"), ("attention", "flash"), ("checkpoint", checkpoint), ("adapter", "none")];
    job(&key, 8, &LLAMA, stage, ranks)
}

/// Elements of a layer, and of all parameters.
fn llama_elements() -> (f64, f64) {
    let (h, f, v) = (4096.0, 14336.0, 32_000.0);
    let layer = h * h * 2.5 + 3.0 * h * f + 2.0 * h;
    (layer, 8.0 * layer + 2.0 * v * h + h)
}

fn t5(stage: u8) -> TracedJob {
    job(&[("architecture", "t5"), ("attention", "sdpa"), ("checkpoint", "none")], 24, &T5_3B, stage, 8)
}

/// What a rank holds and sends over two steps.
#[derive(Default)]
struct Account {
    /// Before the first step, and when the optimizer updates the largest group.
    idle: BTreeMap<Contents, u64>,
    at_update: BTreeMap<Contents, u64>,
    /// The most of each kind in each phase.
    most: BTreeMap<(TracedPhase, Contents), u64>,
    /// The most of all kinds together.
    total: BTreeMap<TracedPhase, u64>,
    /// What is left when the first step has ended.
    left: BTreeMap<Contents, u64>,
    /// Bytes of the first step's collectives.
    sent: BTreeMap<TracedPhase, Vec<(TracedCollective, u64)>>,
    /// Moves of the first step by name, and their bytes.
    moved: BTreeMap<&'static str, u64>,
}

impl Account {
    fn of(job: &TracedJob) -> Self {
        let mut account = Self::default();
        let (mut live, mut now) = (BTreeMap::new(), BTreeMap::<Contents, u64>::new());
        let (mut phase, mut steps) = (TracedPhase::Idle, 0);
        let mut total = 0;
        job.emit(2, |event| match event {
            RankEvent::Phase(next) => {
                if phase == TracedPhase::Idle {
                    account.idle = now.clone();
                }
                if phase == TracedPhase::Optimizer {
                    steps += 1;
                    account.left = now.clone();
                }
                phase = next;
                let most = account.total.entry(phase).or_default();
                *most = total.max(*most);
            }
            RankEvent::Allocate { id, bytes, contents, .. } => {
                assert!(live.insert(id, (bytes, contents)).is_none(), "{id} is allocated twice");
                let held = now.entry(contents).or_default();
                *held += bytes;
                total += bytes;
                let most = account.total.entry(phase).or_default();
                *most = total.max(*most);
                let most = account.most.entry((phase, contents)).or_default();
                *most = (*most).max(*held);
            }
            RankEvent::Release { id } => {
                let (bytes, contents) = live.remove(&id).expect("it was allocated, and not released");
                *now.get_mut(&contents).expect("it is held") -= bytes;
                total -= bytes;
            }
            RankEvent::Becomes { id, contents } => {
                let (bytes, before) = live.get_mut(&id).expect("it was allocated");
                *now.get_mut(before).expect("it is held") -= *bytes;
                *before = contents;
                let held = now.entry(contents).or_default();
                *held += *bytes;
                let most = account.most.entry((phase, contents)).or_default();
                *most = (*most).max(*held);
            }
            RankEvent::Moves { name, bytes, .. } if steps == 0 => {
                if name == "AdamW" && account.at_update.is_empty() {
                    account.at_update = now.clone();
                }
                *account.moved.entry(name).or_default() += bytes;
            }
            RankEvent::Collective { kind, bytes } if steps == 0 => {
                account.sent.entry(phase).or_default().push((kind, bytes));
            }
            _ => {}
        })
        .expect("all sizes are given");
        account
    }

    fn most(&self, phase: TracedPhase, contents: Contents) -> f64 {
        self.most.get(&(phase, contents)).copied().unwrap_or(0) as f64
    }

    fn sent(&self, phase: TracedPhase, kind: TracedCollective) -> f64 {
        let all = self.sent.get(&phase).into_iter().flatten();
        all.filter(|(sent, _)| *sent == kind).map(|(_, bytes)| *bytes as f64).sum()
    }
}

/// Bytes of parameters, gradients and states.
fn states(held: &BTreeMap<Contents, u64>) -> f64 {
    let of_states = [Contents::Parameters, Contents::Gradients, Contents::OptimizerStates];
    of_states.iter().filter_map(|contents| held.get(contents)).sum::<u64>() as f64
}

fn near(value: f64, expected: f64, share: f64) {
    assert!((value / expected - 1.0).abs() <= share, "{value} beside {expected}");
}

const GIB: f64 = (1 << 30) as f64;

/// DeepSpeed's `estimate_zero2_model_states_mem_needs`: 2 bytes of a parameter, and 18 of the
/// rank's.
#[test]
fn stage_2_updates_with_what_deepspeed_estimates() {
    let account = Account::of(&t5(2));
    let parameters = account.idle[&Contents::Parameters] as f64 / 2.0;
    near(parameters, 2851.6e6, 1e-4);
    // The rank's gradients are those of whole parameters, of which the largest has 33 million.
    near(states(&account.at_update), 2.0 * parameters + 18.0 * parameters / 8.0, 0.006);
}

/// `docs/code-docs/source/memory.rst`: 6.10 GiB a GPU for `t5-3b` on eight, which is 18 bytes of
/// the rank's parameters and 4 of the largest layer's. The code has two more bytes: gradients in
/// sixteen bits stay while their copies in single precision are used.
#[test]
fn stage_3_holds_sixteen_bytes_and_updates_with_twenty() {
    let account = Account::of(&t5(3));
    let share = 2851.6e6 / 8.0;
    near(states(&account.idle), 16.0 * share, 1e-3);
    near(states(&account.at_update), 20.0 * share, 1e-3);
    let published = states(&account.at_update) - 2.0 * share + 4.0 * 32.9e6;
    near(published / GIB, 6.10, 2e-3);
}

/// All gradients wait for the last micro-batch at stage 1, and lie in the bucket at stage 2.
#[test]
fn stage_1_keeps_whole_gradients_and_stage_2_those_of_its_partition() {
    let (_, parameters) = llama_elements();
    for micro_batches in [1, 2, 4] {
        let [first, second] = [1, 2].map(|stage| Account::of(&TracedJob { micro_batches, ..llama(stage, 8, "none") }));
        // At stage 1 the rank's copy is made once the bucket is full, which has freed as much by
        // then. Later micro-batches add the one that is computed, at most the embedding's.
        let computed = if micro_batches == 1 { 0.0 } else { 2.0 * 131.072e6 };
        near(first.most(TracedPhase::Backward, Contents::Gradients), 2.0 * parameters + computed, 1e-4);
        let of_partition = 2.0 * parameters / 8.0;
        let most = second.most(TracedPhase::Backward, Contents::Gradients);
        // Two copies from the second micro-batch on; whole parameters at the borders, and the one
        // that is computed.
        let copies = if micro_batches == 1 { 1.0 } else { 2.0 };
        let borders = 2.0 * 131.1e6;
        assert!((copies * of_partition..=copies * (of_partition + borders) + borders).contains(&most), "{most}");
        // The bucket of 5e8 elements: one where nothing overlaps.
        for account in [&first, &second] {
            let bucket = account.most(TracedPhase::Backward, Contents::Communication);
            assert!((1e9..=2.0e9).contains(&bucket), "{bucket}");
        }
    }
}

/// Stage 2 reduces each micro-batch to all ranks, stage 1 the sum; both gather what was updated.
#[test]
fn early_stages_send_gradients_and_parameters_once() {
    let (_, parameters) = llama_elements();
    for (stage, micro_batches, passes) in [(1, 1, 1.0), (1, 3, 1.0), (2, 1, 1.0), (2, 3, 3.0)] {
        let account = Account::of(&TracedJob { micro_batches, ..llama(stage, 8, "none") });
        near(account.sent(TracedPhase::Backward, TracedCollective::AllReduce), passes * 2.0 * parameters, 1e-6);
        near(account.sent(TracedPhase::Optimizer, TracedCollective::AllGather), 2.0 * parameters, 1e-6);
        assert!(account.sent[&TracedPhase::Backward].iter().all(|(_, bytes)| *bytes <= 1_000_000_000));
    }
}

/// The forward pass gathers all, the backward pass all that was released; gradients go to each
/// rank's partition in buckets of at most as many elements as the largest parameter has, or `h *
/// h`.
#[test]
fn stage_3_gathers_twice_and_scatters_gradients() {
    let (_, parameters) = llama_elements();
    let account = Account::of(&llama(3, 8, "full"));
    // Norms' weights stay.
    let large = parameters - 17.0 * 4096.0;
    near(account.sent(TracedPhase::Forward, TracedCollective::AllGather), 2.0 * large, 1e-6);
    // 1e9 elements and at most one more parameter stay.
    let again = account.sent(TracedPhase::Backward, TracedCollective::AllGather) / 2.0;
    assert!((large - 1.132e9..=large - 0.7e9).contains(&again), "{again} of {large}");
    near(account.sent(TracedPhase::Backward, TracedCollective::ReduceScatter), 2.0 * parameters, 1e-6);
    let largest = account.sent[&TracedPhase::Backward].iter().map(|(_, bytes)| *bytes).max();
    assert_eq!(largest, Some(2 * 32_000 * 4096));
}

/// `stage3_max_live_parameters` limits what is gathered, to a parameter; smaller models are
/// gathered as a whole.
#[test]
fn stage_3_gathers_what_may_live() {
    let (layer, _) = llama_elements();
    for checkpoint in ["none", "full"] {
        let account = Account::of(&llama(3, 8, checkpoint));
        for phase in [TracedPhase::Forward, TracedPhase::Backward] {
            let most = account.most(phase, Contents::Gathered);
            assert!((2e9..=2.0 * 1.132e9).contains(&most), "{most}");
        }
        let short = llama(3, 8, checkpoint);
        let short = TracedJob { sizes: TableSizes { layers: 2, ..short.sizes.clone() }, ..short };
        let all = 2.0 * (2.0 * layer + 2.0 * 131.072e6 + 4096.0);
        let account = Account::of(&short);
        near(account.most(TracedPhase::Forward, Contents::Gathered), all, 1e-6);
        assert_eq!(account.sent(TracedPhase::Backward, TracedCollective::AllGather), 0.0);
    }
}

/// What a step allocates is gone after it, and DeepSpeed's persistent buffers stay.
#[test]
fn nothing_is_left_of_a_step() {
    for stage in [1, 2, 3] {
        for micro_batches in [1, 2] {
            for ranks in [1, 2, 8] {
                let account = Account::of(&TracedJob { micro_batches, ..llama(stage, ranks, "full") });
                let mut left = account.left.clone();
                left.retain(|_, bytes| *bytes > 0);
                let mut idle = account.idle.clone();
                idle.retain(|_, bytes| *bytes > 0);
                assert_eq!(left, idle, "stage {stage}, {micro_batches} micro-batches, {ranks} ranks");
            }
        }
    }
}

const MIXTRAL: [(&str, usize); 8] =
    [("h", 4096), ("n", 32), ("k", 8), ("d", 128), ("f", 14336), ("v", 32_000), ("E", 8), ("t", 2)];

fn mixtral(stage: u8, checkpoint: &str, adapter: &str) -> TracedJob {
    let key = [("architecture", "mixtral"), ("version", "4.48"), ("attention", "flash"), ("checkpoint", checkpoint)];
    let key: Vec<_> = key.into_iter().chain([("adapter", adapter)]).collect();
    job(&key, 4, &MIXTRAL, stage, 8)
}

/// Each expert's weights and gradients are its own where it is modules of its own.
#[test]
fn experts_hold_and_drop_what_is_their_own() {
    let (h, f) = (4096.0, 14336.0);
    let layer = h * h * 2.5 + 8.0 * 3.0 * h * f + 8.0 * h + 2.0 * h;
    let parameters = 4.0 * layer + 2.0 * 32_000.0 * h + h;
    // Those of attention's layers, of the router's and of three of each expert.
    let adapters = 4.0 * 16.0 * (2.0 * (h + h) + 2.0 * (h + 1024.0) + (h + 8.0) + 8.0 * 3.0 * (h + f));
    for (checkpoint, adapter, trained) in [("none", "none", parameters), ("full-reentrant", "lora-all", adapters)] {
        let all = if adapter == "none" { parameters } else { parameters + adapters };
        for stage in [1, 2, 3] {
            for micro_batches in [1, 2] {
                let account = Account::of(&TracedJob { micro_batches, ..mixtral(stage, checkpoint, adapter) });
                let shards = if stage == 3 { 8.0 } else { 1.0 };
                near(account.idle[&Contents::Parameters] as f64, 2.0 * all / shards, 1e-3);
                near(account.idle[&Contents::OptimizerStates] as f64, 12.0 * trained / 8.0, 1e-3);
                let [left, idle] = [account.left.clone(), account.idle.clone()].map(|mut held| {
                    held.retain(|_, bytes| *bytes > 0);
                    held
                });
                assert_eq!(left, idle, "stage {stage}, {micro_batches} micro-batches, adapters {adapter}");
            }
        }
    }
}

/// An expert has five modules, and seventeen with an adapter at each of its layers. A hook runs
/// before and after each in the forward pass, in the backward pass, and where it is computed again.
#[test]
fn each_module_of_an_expert_has_hooks() {
    let hooks = |experts: usize, checkpoint: &str, adapter: &str| {
        let job = mixtral(3, checkpoint, adapter);
        let sizes = job.sizes.clone().with("E", experts);
        let mut hooks = 0;
        TracedJob { sizes, ..job }
            .emit(1, |event| {
                if let RankEvent::Hooks { calls } = event {
                    hooks += calls;
                }
            })
            .expect("sizes are given");
        hooks
    };
    for (checkpoint, adapter, modules) in
        [("none", "none", 2 * 2 * 5), ("full-reentrant", "none", 2 * 3 * 5), ("full-reentrant", "lora-all", 2 * 3 * 17)]
    {
        let [eight, nine] = [8, 9].map(|experts| hooks(experts, checkpoint, adapter));
        assert_eq!(nine - eight, 4 * modules, "{checkpoint} with adapters {adapter}");
    }
}

/// Adapters alone have states and gradients; what is frozen is whole at stage 2 and partitioned at
/// stage 3.
#[test]
fn frozen_parameters_have_no_states() {
    let key = [("architecture", "llama"), ("attention", "flash"), ("checkpoint", "none"), ("adapter", "lora-all-bf16")];
    let (layer, parameters) = llama_elements();
    let job = |stage| job(&key, 8, &LLAMA, stage, 8);
    let (h, f, kv) = (4096.0, 14336.0, 1024.0);
    let adapters = 8.0 * 16.0 * (2.0 * (h + h) + 2.0 * (h + kv) + 3.0 * (h + f));
    assert!(job(2).table.parameters.iter().any(|parameter| parameter.role == ParameterRole::Adapter) && layer > 0.0);
    let second = Account::of(&job(2));
    near(second.idle[&Contents::Parameters] as f64, 2.0 * (parameters + adapters), 1e-4);
    near(second.idle[&Contents::OptimizerStates] as f64, 12.0 * adapters / 8.0, 1e-4);
    let third = Account::of(&job(3));
    near(third.idle[&Contents::Parameters] as f64, 2.0 * (parameters + adapters) / 8.0, 1e-4);
    near(third.idle[&Contents::OptimizerStates] as f64, 12.0 * adapters / 8.0, 1e-4);
}

/// The most bytes at once in the forward pass, the backward pass and the update, which DeepSpeed
/// 0.19.8 itself allocated on 28 November 2026: a small Llama (transformers 5.24, eager attention,
/// one sample of four tokens) on a CPU, the third step of rank 3 of four, or 0 at stage 3, whose
/// collectives moved nothing (PyTorch's `fake` process group). Storages were counted around each
/// operator.
#[test]
fn peaks_equal_deepspeeds_own() {
    let small = [("h", 512), ("n", 8), ("k", 8), ("d", 64), ("f", 1024), ("v", 3000), ("s", 4)];
    for (stage, micro_batches, checkpoint, measured) in [
        (1, 1, "none", [94_670_444, 1_131_655_356, 132_653_748]),
        (1, 2, "none", [1_132_285_036, 1_135_265_100, 132_653_748]),
        (2, 1, "none", [94_670_444, 1_131_651_256, 132_653_748]),
        (2, 2, "none", [105_086_572, 1_142_067_384, 132_653_748]),
        (3, 1, "none", [114_002_033, 116_982_097, 103_954_641]),
        (3, 2, "none", [114_002_033, 116_982_097, 103_954_641]),
        (3, 1, "full", [113_530_353, 116_510_417, 103_954_641]),
    ] {
        let key = [("architecture", "llama"), ("attention", "eager"), ("checkpoint", checkpoint), ("adapter", "none")];
        let mut job = TracedJob { micro_batches, ..job(&key, 6, &small, stage, 4) };
        job.sizes = job.sizes.with("s", 4);
        let account = Account::of(&job);
        for (phase, measured) in [TracedPhase::Forward, TracedPhase::Backward, TracedPhase::Optimizer].into_iter().zip(measured) {
            near(account.total[&phase] as f64, f64::from(measured), 2e-4);
        }
    }
}
