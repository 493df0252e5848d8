//! Traces of PyTorch's profiler. `tests/kineto/` has two steps of a GPT of four layers, trained by
//! DDP of two processes on CPUs (PyTorch 2.15), trimmed by `benches/trim_kineto.py`.
use foretell_export::{KinetoTrace, MatchedStep, TracedMachine, traced_profile, unmatched};
use foretell_models::{Gpt, KernelFamily, Model};
use foretell_program::{Exchange, Layout, Operation, Optimizer, Plan, Program, Rank, compile};
use foretell_units::DataType;
use foretell_units::diagnostic::one_line;

const TRACES: [&str; 2] = [include_str!("../kineto/rank0.json"), include_str!("../kineto/rank1.json")];

fn program(sequence: usize) -> Program {
    let sizes = Gpt {
        layers: 4,
        hidden: 128,
        heads: 4,
        ffn: None,
        vocab: 512,
        sequence,
        tied_embeddings: true,
        dropout: Default::default(),
        attention_dropout: Default::default(),
    };
    let mut plan = Plan::new(Layout { data: 2, micro_batch: 4, ..Layout::default() }, 8);
    (plan.precision, plan.optimizer) = (DataType::Fp32, Optimizer::AdamW);
    compile(&Model::Gpt(sizes), "gpt", &plan).unwrap().training
}

fn matched(program: &Program) -> Vec<Vec<MatchedStep>> {
    let traces = TRACES.iter().map(|text| KinetoTrace::parse(text).unwrap());
    traces
        .enumerate()
        .map(|(rank, trace)| trace.steps.iter().map(|step| step.matched(program.list_of(Rank(rank)))).collect())
        .collect()
}

#[test]
fn a_trace_says_its_rank_and_steps() {
    let trace = KinetoTrace::parse(TRACES[1]).unwrap();
    assert_eq!((trace.rank, trace.world_size, trace.transport.as_deref()), (Some(1), Some(2), Some("gloo")));
    assert_eq!(trace.device, None);
    assert_eq!(trace.steps.iter().map(|step| step.number).collect::<Vec<_>>(), [3, 4]);
}

#[test]
fn every_product_of_the_program_has_its_call() {
    let program = program(64);
    let list = program.list_of(Rank(0));
    let families =
        [KernelFamily::Product, KernelFamily::Attention, KernelFamily::Norm, KernelFamily::Loss, KernelFamily::Optimizer];
    for steps in matched(&program) {
        for step in steps {
            for (instruction, (busy, span)) in list.instructions.iter().zip(step.busy.iter().zip(&step.spans)) {
                match &*instruction.operation {
                    Operation::Compute { kernel, .. } if families.contains(&kernel.family()) => {
                        assert!(*busy > 0 && span.1 > span.0, "{} {kernel:?}", list.name_of(instruction));
                    }
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn matched_calls_take_no_longer_than_the_step() {
    let program = program(64);
    let trace = KinetoTrace::parse(TRACES[0]).unwrap();
    let list = program.list_of(Rank(0));
    for step in &trace.steps {
        let matched = step.matched(list);
        let is_kernel = |index: usize| matches!(*list.instructions[index].operation, Operation::Compute { .. });
        let busy: u64 = matched.busy.iter().enumerate().filter(|(index, _)| is_kernel(*index)).map(|(_, busy)| busy).sum();
        assert!(busy > 0 && busy < step.end - step.start, "{busy}");
    }
    // What is left is small and has names.
    let left = unmatched(&trace.steps, list);
    assert!(left.windows(2).all(|pair| pair[0].nanoseconds >= pair[1].nanoseconds));
    assert!(!left.iter().any(|kernel| kernel.name == "aten::mm" || kernel.name == "aten::addmm"), "{left:?}");
}

#[test]
fn the_plan_of_another_model_leaves_products_unmatched() {
    let trace = KinetoTrace::parse(TRACES[0]).unwrap();
    let left = unmatched(&trace.steps, program(32).list_of(Rank(0)));
    assert!(left.iter().any(|kernel| kernel.name == "aten::addmm" && kernel.count == 16), "{left:?}");
}

#[test]
fn a_profile_has_the_times_of_kernels_and_collectives() {
    let program = program(64);
    let machine = TracedMachine {
        kind: "cpu-core".into(),
        device: "CPU".into(),
        is_accelerator: false,
        transport: "gloo".into(),
        measured_at: 0,
    };
    let profile = traced_profile(&program, &matched(&program), &machine);
    // Sixteen products forward, as many gradients twice, and the head's three: of eleven kinds.
    let products = profile.kernels.iter().filter(|sample| sample.kernel.is_matrix_product());
    assert!(products.clone().count() >= 11 && products.clone().all(|sample| sample.time.median.value() > 0.0));
    assert!(profile.exchanges.iter().any(|sample| sample.exchange == Exchange::AllReduce && sample.ranks == 2));
    assert!(profile.instruction_overhead.count > 0);
}

#[test]
fn other_files_are_refused_with_a_hint() {
    let event =
        |cat: &str| format!(r#"{{"traceEvents": [{{"ph": "X", "cat": "{cat}", "name": "aten::mm", "ts": 1, "dur": 2}}]}}"#);
    for (text, expected) in [
        ("[]".to_owned(), "no trace of PyTorch's profiler"),
        ("{\"traceEvents\": []}".to_owned(), "has no operators"),
        (event("kernel"), "has no operators"),
        (event("cpu_op"), "have no shapes"),
    ] {
        let error = one_line(&KinetoTrace::parse(&text).unwrap_err());
        assert!(error.contains(expected) && error.contains("hint: "), "{error}");
    }
}

#[test]
fn kernels_of_a_device_count_for_the_operators_that_launched_them() {
    let text = r#"{"traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 100},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 10, "dur": 5, "args": {"External id": 7, "Input Dims": [[2, 3], [3, 4]]}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 150, "dur": 30, "args": {"External id": 7}},
        {"ph": "X", "cat": "kernel", "name": "memset", "ts": 190, "dur": 1, "args": {}}
    ], "deviceProperties": [{"name": "NVIDIA H100"}]}"#;
    let trace = KinetoTrace::parse(text).unwrap();
    assert_eq!(trace.device.as_deref(), Some("NVIDIA H100"));
    let [step] = &trace.steps[..] else { unreachable!("one step") };
    assert_eq!((step.start, step.end), (150_000, 180_000));
}
