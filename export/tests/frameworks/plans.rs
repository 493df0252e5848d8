//! Plans as other frameworks' jobs: what is written reads back as the same plan, and what a
//! framework lacks is said.

use foretell_export::{Framework, FrameworkError, Job, JobFiles, PlanForm, export_job, import_plan, words};
use foretell_models::Model;
use foretell_program::{
    ContextMethod, Layout, LossScale, Optimizer, Plan, Recompute, RunLength, Schedule, StageLayout, Training,
};
use foretell_units::diagnostic::one_line;
use foretell_units::{Bytes, DataType};
use proptest::prelude::*;

/// The file from which each framework's plan is read.
const FORMS: [(Framework, PlanForm, &str); 8] = [
    (Framework::Megatron, PlanForm::MegatronArguments, "megatron.args"),
    (Framework::Torchtitan, PlanForm::Torchtitan, "torchtitan.toml"),
    (Framework::Deepspeed, PlanForm::Deepspeed, "deepspeed.json"),
    (Framework::Accelerate, PlanForm::HuggingFaceTrainer, "training_arguments.json"),
    (Framework::Trl, PlanForm::HuggingFaceTrainer, "trl.yaml"),
    (Framework::Axolotl, PlanForm::HuggingFaceTrainer, "axolotl.yaml"),
    (Framework::LlamaFactory, PlanForm::HuggingFaceTrainer, "llama_factory.yaml"),
    (Framework::Torchtune, PlanForm::Torchtune, "torchtune.yaml"),
];

pub(crate) fn exported(model: &Model, plan: &Plan, framework: Framework) -> Result<JobFiles, FrameworkError> {
    export_job(&Job { name: "model", model, plan, devices_per_node: 8 }, framework)
}

pub(crate) fn file<'a>(job: &'a JobFiles, name: &str) -> &'a str {
    &job.files.iter().find(|(file, _)| file == name).expect("such a file").1
}

/// Reads a job back.
fn read_back(job: &JobFiles, form: PlanForm, name: &str) -> foretell_export::ImportedPlan {
    let ranks = job.plan.mesh().expect("a mesh").world_size();
    import_plan(file(job, name), form, ranks).expect("it reads back")
}

fn recomputes() -> impl Strategy<Value = Recompute> {
    prop_oneof![
        Just(Recompute::None),
        Just(Recompute::Selective),
        Just(Recompute::Full),
        Just(Recompute::FullLayers(1)),
        Just(serde_json::from_str(r#"{"all_but": ["attention", "odd_products", "sums"]}"#).expect("a choice")),
    ]
}

prop_compose! {
    fn plans(data_only: bool)(
        (data, tensor, pipeline, context) in (1usize..5, 1usize..3, 1usize..5, 1usize..3),
        (chunks, schedule) in (1usize..3, proptest::sample::select(Schedule::ALL.to_vec())),
        (zero, hybrid, sequence_parallel) in (0usize..4, any::<bool>(), any::<bool>()),
        recompute in recomputes(),
        ring in any::<bool>(),
        (micro_batch, micro_batches) in (1usize..4, 1usize..5),
        optimizer in proptest::sample::select(vec![Optimizer::Sgd, Optimizer::Adam, Optimizer::AdamW, Optimizer::Muon]),
        precision in proptest::sample::select(vec![DataType::Fp32, DataType::Tf32, DataType::Bf16, DataType::Fp16, DataType::Fp8]),
        (rate, decay, clip) in (proptest::option::of(1e-5f32..1.0), 0.0f32..0.5, proptest::option::of(0.1f32..2.0)),
        (momentum, nesterov) in (0.01f32..1.0, any::<bool>()),
        (initial, growth_interval) in (1.0f32..100_000.0, 1u32..5000),
        bucket in 1u64..1_000_000_000,
    ) -> Plan {
        let (tensor, pipeline, context) = if data_only { (1, 1, 1) } else { (tensor, pipeline, context) };
        let chunks = if schedule.allows(chunks) && pipeline > 1 { chunks } else { *schedule.chunks().start() };
        let (schedule, chunks) = if pipeline > 1 { (schedule, chunks) } else { (Schedule::OneForwardOneBackward, 1) };
        let layout = Layout {
            data, tensor, pipeline, context, zero, sequence_parallel, micro_batch, schedule, recompute,
            virtual_stages: chunks,
            context_method: if ring { ContextMethod::Ring } else { ContextMethod::Gather },
            shard_group: Some(2).filter(|_| hybrid && data == 4 && zero > 0),
            bucket: Bytes::new(bucket),
            ..Layout::default()
        };
        // Megatron's interleaved schedule needs micro-batches in multiples of the stages.
        let mut plan = Plan::new(layout, data * micro_batch * micro_batches * pipeline);
        let weight_decay = if optimizer == Optimizer::Adam { 0.0 } else { decay };
        plan.optimizer = optimizer;
        plan.precision = if optimizer == Optimizer::Muon && precision == DataType::Fp16 { DataType::Bf16 } else { precision };
        let loss_scale = LossScale { initial, growth_interval };
        plan.training =
            Training { learning_rate: rate, weight_decay, clip_norm: clip, momentum, nesterov, loss_scale, ..Training::default() };
        plan
    }
}

/// The plan with what a reader always states.
pub(crate) fn stated(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    plan.training.learning_rate = Some(plan.learning_rate_at(0, RunLength { steps: 1, steps_per_epoch: 1 }));
    plan.layout = plan.layout.normalised();
    if plan.layout.context == 1 {
        plan.layout.context_method = ContextMethod::Gather;
    }
    plan
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_exported_plan_reads_back_the_same(general in plans(false), data_only in plans(true)) {
        let llama = Model::named("llama3-8b").expect("in the zoo");
        for (framework, form, name) in FORMS {
            for plan in [&general, &data_only] {
                let Ok(job) = exported(&llama, plan, framework) else { continue };
                let imported = read_back(&job, form, name);
                prop_assert_eq!(stated(&imported.plan), stated(&job.plan), "{:?}\n{}", framework, file(&job, name));
                prop_assert!(imported.unread.is_empty(), "{:?}", imported.unread);
                if let Some(model) = imported.model {
                    prop_assert_eq!(&model, &llama);
                }
            }
        }
    }
}

#[test]
fn models_of_every_kind_read_back_from_megatrons_arguments() {
    let plan = Plan::new(Layout::default(), 4);
    for name in ["gpt2", "llama2-70b", "llama3-8b", "mixtral-8x7b", "qwen2.5-7b", "qwen3-32b"] {
        let model = Model::named(name).expect("in the zoo");
        let job = exported(&model, &plan, Framework::Megatron).expect("it is expressible");
        let imported = read_back(&job, PlanForm::MegatronArguments, "megatron.args");
        assert_eq!(imported.model.as_ref(), Some(&model), "{name}: {}", file(&job, "megatron.args"));
    }
    let error = exported(&Model::named("resnet50").expect("in the zoo"), &plan, Framework::Megatron).expect_err("no decoder");
    assert!(one_line(&error).contains("`resnet` is no decoder"), "{error}");
}

#[test]
fn uneven_cuts_become_a_pipeline_layout() {
    let llama = Model::named("llama3-8b").expect("in the zoo");
    let layout = Layout {
        pipeline: 2,
        virtual_stages: 2,
        schedule: Schedule::Interleaved,
        cuts: Some(vec![7, 9, 1, 17]),
        ..Layout::default()
    };
    let job = exported(&llama, &Plan::new(layout, 2), Framework::Megatron).expect("it is expressible");
    assert!(file(&job, "megatron.args").contains("--pipeline-model-parallel-layout Et*6|t*9|t|t*16L\n"));
    assert!(job.differences.is_empty(), "{:?}", job.differences);
}

#[test]
fn what_a_framework_lacks_is_said() {
    let llama = Model::named("llama3-8b").expect("in the zoo");
    let zero_bubble =
        Layout { pipeline: 4, virtual_stages: 2, schedule: Schedule::ZeroBubbleV, zero: 3, data: 2, ..Layout::default() };
    let job = exported(&llama, &Plan::new(zero_bubble, 8), Framework::Megatron).expect("there is a near plan");
    let said = job.differences.join("\n");
    assert!(said.contains("1f1b") && said.contains("`zero: 1`"), "{said}");
    assert_eq!((job.plan.layout.schedule, job.plan.layout.zero), (Schedule::OneForwardOneBackward, 1));

    let tensor = Plan::new(Layout { tensor: 2, ..Layout::default() }, 1);
    let error = one_line(&exported(&llama, &tensor, Framework::Deepspeed).expect_err("no tensor parallelism"));
    assert!(error.contains("does not shard over `tensor`") && error.contains("hint: "), "{error}");

    let stages = vec![StageLayout { data: 2, ..StageLayout::default() }, StageLayout { tensor: 2, ..StageLayout::default() }];
    let unequal = Plan::new(Layout { pipeline: 2, micro_batch: 2, stages: Some(stages), ..Layout::default() }, 4);
    let error = one_line(&exported(&llama, &unequal, Framework::Megatron).expect_err("stages differ"));
    assert!(error.contains("the same mesh"), "{error}");
}

#[test]
fn flags_that_are_not_understood_are_listed() {
    let arguments = "torchrun --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 \\\n \
                     --tp-comm-overlap # a comment\n --bf16 --global-batch-size 16";
    let imported = import_plan(arguments, PlanForm::MegatronArguments, 8).expect("it is sound");
    assert_eq!(imported.unread, ["--tp-comm-overlap"]);
    assert_eq!((imported.plan.layout.data, imported.plan.layout.tensor, imported.plan.global_batch), (4, 2, 16));
    assert_eq!(imported.plan.precision, DataType::Bf16);

    let groups = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4 --micro-batch-size 1 --bf16";
    let imported = import_plan(groups, PlanForm::MegatronArguments, 1).expect("it is sound");
    assert_eq!(imported.unread, ["--recompute-num-layers 4"]);

    let zero = r#"{"train_batch_size": 32, "zero_optimization": {"stage": 2, "overlap_comm": false}, "wibble": {"wobble": 3}}"#;
    let imported = import_plan(zero, PlanForm::Deepspeed, 8).expect("it is sound");
    assert_eq!(imported.without_effect, ["`zero_optimization.overlap_comm: false`"]);
    assert_eq!(imported.unread, ["wibble.wobble: 3"]);
    assert_eq!((imported.plan.layout.zero, imported.plan.layout.micro_batch), (2, 4));
}

#[test]
fn files_of_another_form_are_refused_with_a_hint() {
    for (text, form) in [
        ("no flags", PlanForm::MegatronArguments),
        ("--micro-batch-size $MBS", PlanForm::MegatronArguments),
        ("--tensor-model-parallel-size 3", PlanForm::MegatronArguments),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ex|L", PlanForm::MegatronArguments),
        ("--recompute-granularity full", PlanForm::MegatronArguments),
        ("--recompute-granularity full --recompute-method thrice", PlanForm::MegatronArguments),
        ("not = [toml", PlanForm::Torchtitan),
        ("[training]\nmixed_precision_param = \"float16\"", PlanForm::Torchtitan),
        ("[training]\n[optimizer]\nname = \"Muon\"", PlanForm::Torchtitan),
        ("[training]\n[activation_checkpoint]\nmode = \"sometimes\"", PlanForm::Torchtitan),
        ("[model]\nname = \"llama3\"", PlanForm::Torchtitan),
        ("[1]", PlanForm::Deepspeed),
        (r#"{"per_device_train_batch_size": -1}"#, PlanForm::HuggingFaceTrainer),
    ] {
        let error = one_line(&import_plan(text, form, 8).expect_err(text));
        assert!(error.contains("hint: "), "{text}: {error}");
    }
}

/// Fuzzing found the first of these. No size may end the command.
#[test]
fn sizes_beyond_any_model_do_not_overflow() {
    let huge = usize::MAX;
    let model = format!("--num-layers 2 --num-attention-heads 8 --kv-channels {huge} --normalization RMSNorm");
    for text in [
        format!("{model} --hidden-size {huge}"),
        format!("{model} --hidden-size {huge} --swiglu"),
        format!("--num-layers 2 --num-attention-heads 8 --hidden-size {huge}"),
        format!("--expert-model-parallel-size {huge} --expert-tensor-parallel-size {huge}"),
    ] {
        let _ = import_plan(&text, PlanForm::MegatronArguments, 8);
    }
    let degrees =
        format!("[training]\n[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = {}", i64::MAX);
    import_plan(&degrees, PlanForm::Torchtitan, 8).expect_err("there are not so many ranks");
}

#[test]
fn words_are_split_as_a_shell_splits_them() {
    assert_eq!(words("a 'b c' \"d\"e \\\n f # g\n(h)"), ["a", "b c", "de", "f", "h"]);
}
