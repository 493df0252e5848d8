//! The same job in other spellings: settings in another order, under older names, with dashes,
//! nested or not, in JSON or YAML. Whatever the spelling, the plan is the same. And a job that goes
//! back into a user's file.

use foretell_export::{Framework, Job, PlanForm, Surroundings, change_file, export_job, import_plan};
use foretell_models::Model;
use foretell_program::{Layout, Lora, Offload, Optimizer, Plan, Recompute, Training};
use foretell_units::DataType;
use foretell_units::diagnostic::one_line;
use proptest::prelude::*;
use serde_json::{Map, Value};

/// Names that say the same: today's and another.
const OTHERS: [(Framework, &str, &str); 13] = [
    (Framework::Accelerate, "per_device_train_batch_size", "per_gpu_train_batch_size"),
    (Framework::Accelerate, "activation_checkpointing", "gradient_checkpointing"),
    (Framework::Trl, "max_length", "max_seq_length"),
    (Framework::Trl, "dtype", "torch_dtype"),
    (Framework::Trl, "per_device_train_batch_size", "per_gpu_train_batch_size"),
    (Framework::Axolotl, "gradient_checkpointing", "activation_checkpointing"),
    (Framework::LlamaFactory, "lora_rank", "lora_r"),
    (Framework::LlamaFactory, "per_device_train_batch_size", "per_gpu_train_batch_size"),
    (Framework::Torchtitan, "training.local_batch_size", "training.batch_size"),
    (Framework::Torchtitan, "parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
    (Framework::Torchtitan, "parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"),
    (Framework::Torchtitan, "parallelism.context_parallel_degree", "experimental.context_parallel_degree"),
    (Framework::Torchtitan, "parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree"),
];

/// A job's file, its name and its form.
const FILES: [(Framework, &str, PlanForm); 7] = [
    (Framework::Accelerate, "training_arguments.json", PlanForm::HuggingFaceTrainer),
    (Framework::Trl, "trl.yaml", PlanForm::HuggingFaceTrainer),
    (Framework::Axolotl, "axolotl.yaml", PlanForm::HuggingFaceTrainer),
    (Framework::LlamaFactory, "llama_factory.yaml", PlanForm::HuggingFaceTrainer),
    (Framework::Deepspeed, "deepspeed.json", PlanForm::Deepspeed),
    (Framework::Torchtune, "torchtune.yaml", PlanForm::Torchtune),
    (Framework::Torchtitan, "torchtitan.toml", PlanForm::Torchtitan),
];

fn settings(text: &str, name: &str) -> Map<String, Value> {
    let value: Value = match name.rsplit('.').next() {
        Some("json") => serde_json::from_str(text).expect("JSON"),
        Some("toml") => serde_json::to_value(text.parse::<toml::Table>().expect("TOML")).expect("values"),
        _ => serde_saphyr::from_str(text).expect("YAML"),
    };
    value.as_object().cloned().expect("an object")
}

/// Moves a value from one dotted path to another.
fn rename(settings: &mut Map<String, Value>, from: &str, to: &str) {
    let taken = match from.split_once('.') {
        None => settings.remove(from),
        Some((section, name)) => {
            settings.get_mut(section).and_then(Value::as_object_mut).and_then(|section| section.remove(name))
        }
    };
    let Some(value) = taken else { return };
    match to.split_once('.') {
        None => _ = settings.insert(to.into(), value),
        Some((section, name)) => {
            let section = settings.entry(section).or_insert_with(|| Value::Object(Map::new()));
            _ = section.as_object_mut().expect("a section").insert(name.into(), value);
        }
    }
}

/// The text of settings in an order that a seed chooses: JSON, YAML in blocks, or TOML.
fn text(settings: &Map<String, Value>, is_toml: bool, in_blocks: bool, seed: u64) -> String {
    let mut order: Vec<(&String, &Value)> = settings.iter().collect();
    order
        .sort_by_key(|(name, _)| name.bytes().fold(seed | 1, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)));
    let lines: Vec<String> = order
        .into_iter()
        .map(|(name, value)| match value {
            Value::Object(section) if is_toml => {
                let lines: Vec<String> = section.iter().map(|(name, value)| format!("{name} = {value}")).collect();
                format!("[{name}]  # a section\n{}", lines.join("\n"))
            }
            Value::Object(section) if in_blocks && !section.is_empty() => {
                let lines: Vec<String> = section.iter().map(|(name, value)| format!("    {name}:   {value}")).collect();
                format!("{name}:\n{}", lines.join("\n"))
            }
            value if in_blocks || is_toml => format!("{name}{} {value}   # said", if is_toml { " =" } else { ":" }),
            value => format!("{}: {value}", Value::from(name.as_str())),
        })
        .collect();
    if is_toml || in_blocks { lines.join("\n\n") + "\n" } else { format!("{{{}}}", lines.join(",\n")) }
}

prop_compose! {
    pub(crate) fn jobs()(
        data in proptest::sample::select(vec![1usize, 2, 4, 8]),
        (tensor, pipeline, context) in (1usize..3, 1usize..3, 1usize..3),
        (zero, recompute, state) in (0usize..4, any::<bool>(), any::<bool>()),
        (micro_batch, micro_batches) in (1usize..4, 1usize..4),
        optimizer in proptest::sample::select(vec![Optimizer::Sgd, Optimizer::Adam, Optimizer::AdamW, Optimizer::Muon]),
        precision in proptest::sample::select(vec![DataType::Fp32, DataType::Bf16, DataType::Fp16]),
        (rate, decay, clip) in (1e-6f32..1.0, 0.01f32..0.5, proptest::option::of(0.1f32..2.0)),
        adapters in proptest::option::of((1usize..65, any::<bool>(), any::<bool>())),
        data_only in any::<bool>(),
    ) -> Plan {
        let (tensor, pipeline, context) = if data_only { (1, 1, 1) } else { (tensor, pipeline, context) };
        let recompute = if recompute { Recompute::Full } else { Recompute::None };
        let offload = if state && zero == 3 { Offload::State } else { Offload::None };
        let layout = Layout { data, tensor, pipeline, context, zero, recompute, micro_batch, offload, ..Layout::default() };
        let mut plan = Plan::new(layout, data * micro_batch * micro_batches * pipeline);
        plan.optimizer = optimizer;
        plan.precision = if optimizer == Optimizer::Muon && precision == DataType::Fp16 { DataType::Bf16 } else { precision };
        let weight_decay = if optimizer == Optimizer::Adam { 0.0 } else { decay };
        plan.training = Training { learning_rate: Some(rate), weight_decay, clip_norm: clip, ..Training::default() };
        if let Some((rank, all, quantised)) = adapters.filter(|_| data_only) {
            let targets = if all { Lora::targets_named(["all"]) } else { Lora::targets_named(["q_proj", "v_proj"]) };
            plan.training.lora = Some(Lora { rank, alpha: 2 * rank, targets, ..Lora::default() });
            plan.workload.base_bits = quantised.then_some(4);
        }
        plan
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_job_in_another_spelling_is_the_same(plan in jobs(), renamed in any::<u32>(), seed in any::<u64>(), in_blocks in any::<bool>()) {
        let llama = Model::named("llama3-8b").expect("in the zoo");
        for (framework, name, form) in FILES {
            let Ok(job) = export_job(&Job { name: "m", model: &llama, plan: &plan, devices_per_node: 8 }, framework) else { continue };
            let ranks = job.plan.mesh().expect("a mesh").world_size();
            let original = &job.files.iter().find(|(file, _)| file == name).expect("its file").1;
            let expected = import_plan(original, form, ranks).expect("it reads back");
            let mut settings = settings(original, name);
            for (index, (_, from, to)) in OTHERS.iter().enumerate().filter(|(_, other)| other.0 == framework) {
                if renamed >> index & 1 == 1 {
                    rename(&mut settings, from, to);
                }
            }
            let is_toml = name.ends_with("toml");
            let spelt = text(&settings, is_toml, in_blocks, seed);
            let imported = import_plan(&spelt, form, ranks);
            let imported = imported.map_err(|error| TestCaseError::fail(format!("{spelt}\n{}", one_line(&error))))?;
            prop_assert_eq!(&imported.plan, &expected.plan, "{:?}\n{}", framework, spelt);
            prop_assert_eq!(&imported.model, &expected.model, "{:?}\n{}", framework, spelt);
        }
    }

    /// A user's file takes another plan of the same framework, or is refused; comments stay.
    #[test]
    fn a_changed_file_states_the_plan(own in jobs(), other in jobs(), seed in any::<u64>()) {
        let llama = Model::named("llama3-8b").expect("in the zoo");
        let layout = Layout { data: own.layout.data, tensor: 1, pipeline: 1, context: 1, ..other.layout.clone() };
        let mut wanted = Plan { layout, ..other };
        wanted.global_batch = wanted.layout.data * wanted.layout.micro_batch;
        let own = Plan { layout: Layout { tensor: 1, pipeline: 1, context: 1, ..own.layout.clone() }, ..own };
        let own = Plan { global_batch: own.layout.data * own.layout.micro_batch, ..own };
        for (framework, name, form) in FILES {
            let job = |plan: &Plan| export_job(&Job { name: "m", model: &llama, plan, devices_per_node: 8 }, framework);
            let (Ok(from), Ok(to)) = (job(&own), job(&wanted)) else { continue };
            let ranks = to.plan.mesh().expect("a mesh").world_size();
            let text_of = &from.files.iter().find(|(file, _)| file == name).expect("its file").1;
            let original = text(&settings(text_of, name), name.ends_with("toml"), true, seed);
            let wanted = Job { name: "m", model: &llama, plan: &wanted, devices_per_node: 8 };
            let changed = change_file(&wanted, framework, &original, Surroundings::from(ranks));
            let changed = changed.map_err(|error| TestCaseError::fail(format!("{framework:?}\n{original}\n{}", one_line(&error))))?;
            let read = import_plan(&changed.text, form, ranks).expect("it is read");
            prop_assert_eq!(&read.plan.layout.normalised(), &to.plan.layout.normalised(), "{:?}\n{}", framework, changed.text);
            prop_assert_eq!(read.plan.global_batch, to.plan.global_batch);
            prop_assert_eq!(&read.plan.training.lora, &to.plan.training.lora);
        }
    }
}

#[test]
fn only_the_settings_that_a_plan_changes_change_in_a_users_file() {
    let llama = Model::named("llama3-8b").expect("in the zoo");
    let own = "# our job\nbase_model: org/llama\nmicro_batch_size: 2   # fits\ngradient_accumulation_steps: 4\nbf16: auto\n\
               optimizer: adamw_torch_fused\nlearning_rate: 2e-5\ndatasets:\n  - path: ours\n    type: alpaca\nsequence_len: 8192\n\
               fsdp:\n  - full_shard\n  - auto_wrap\nfsdp_config:\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n";
    let imported = import_plan(own, PlanForm::HuggingFaceTrainer, 8).expect("it is sound");
    let mut plan = imported.plan;
    let job = |plan: &Plan| {
        let job = Job { name: "m", model: &llama, plan, devices_per_node: 8 };
        change_file(&job, Framework::Axolotl, own, Surroundings::from(8)).map_err(|error| one_line(&error))
    };
    let unchanged = job(&plan).expect("it is the same");
    assert_eq!((unchanged.text.as_str(), unchanged.difference.len()), (own, 0));
    plan.layout.micro_batch = 4;
    plan.global_batch = 32;
    plan.layout.recompute = Recompute::Full;
    let changed = job(&plan).expect("it can say that");
    assert!(
        changed.text.contains("micro_batch_size: 4  # fits\n") && changed.text.contains("    type: alpaca\n"),
        "{}",
        changed.text
    );
    assert_eq!(changed.difference.iter().filter(|line| line.starts_with('-')).count(), 2, "{:#?}", changed.difference);
    assert_eq!(changed.job.plan.layout.recompute, Recompute::Full);
}
