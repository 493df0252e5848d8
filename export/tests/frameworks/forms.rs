//! The same job in other forms of one framework: flags in any order and spelling, in arrays and
//! variables of a script, in a file that the command names, in a recipe or in the command that
//! changes it. Whatever the form, the plan is the same.

use crate::plans::{exported, file};
use crate::spellings::jobs;
use foretell_export::{Framework, ImportedPlan, PlanForm, Surroundings, import_plan, words};
use foretell_models::Model;
use foretell_program::{ContextMethod, Layout, Plan};
use foretell_units::diagnostic::one_line;
use proptest::prelude::*;
use serde_json::{Map, Value};

/// A number that a seed gives to a text, to order texts by.
fn place(text: &str, seed: u64) -> u64 {
    text.bytes().fold(seed | 1, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn shuffled<T: AsRef<str>>(mut texts: Vec<T>, seed: u64) -> Vec<T> {
    texts.sort_by_key(|text| place(text.as_ref(), seed));
    texts
}

fn read(text: &str, form: PlanForm, ranks: usize, files: &[(&str, &str)]) -> Result<ImportedPlan, TestCaseError> {
    let beside = |name: &str| files.iter().find(|(known, _)| *known == name).map(|(_, text)| text.to_string());
    let imported = import_plan(text, form, Surroundings { file: &beside, ..Surroundings::from(ranks) });
    imported.map_err(|error| TestCaseError::fail(format!("{text}\n{files:?}\n{}", one_line(&error))))
}

/// Flags with their values: each begins with `--`.
fn flags(words: Vec<String>) -> Vec<Vec<String>> {
    let mut flags: Vec<Vec<String>> = Vec::new();
    for word in words {
        match flags.last_mut() {
            Some(flag) if !word.starts_with("--") => flag.push(word),
            _ => flags.push(vec![word]),
        }
    }
    flags
}

/// A flag as a seed spells it: with dashes or underscores, its value behind a blank or `=`.
fn spelt(flag: &[String], seed: u64) -> String {
    let choice = place(&flag[0], seed);
    let name = if choice & 1 == 0 { flag[0].clone() } else { format!("--{}", flag[0][2..].replace('-', "_")) };
    let quoted = |value: &String| if value.contains(['(', ' ', '*', '|']) { format!("'{value}'") } else { value.clone() };
    let values: Vec<String> = flag[1..].iter().map(quoted).collect();
    match &values[..] {
        [value] if choice & 2 == 0 => format!("{name}={value}"),
        values => std::iter::once(name).chain(values.iter().cloned()).collect::<Vec<_>>().join(" "),
    }
}

/// A script that starts `launch` with these arguments: in the command, an array, or a variable.
fn script(launch: &str, arguments: &[String], form: usize) -> String {
    let (half, rest) = arguments.split_at(arguments.len() / 2);
    let (half, rest, all) = (half.join(" "), rest.join(" \\\n  "), arguments.join(" "));
    match form % 4 {
        0 => format!("{launch} {all}\n"),
        1 => format!("#!/bin/bash\nARGS=(\n  {half}\n)\n{launch} \"${{ARGS[@]}}\" \\\n  {rest}\n"),
        2 if !all.contains('\'') => format!("MORE=\"{half}\"\nif true; then MORE=\"$MORE {all}\"; fi\n{launch} $MORE\n"),
        _ => format!("run() {{\n  {launch} \"$@\"\n}}\nrun {half} \\\n  {rest}\n"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn megatrons_arguments_are_one_job_in_any_form(plan in jobs(), seed in any::<u64>(), form in 0usize..4) {
        let llama = Model::named("llama3-8b").expect("in the zoo");
        let Ok(job) = exported(&llama, &plan, Framework::Megatron) else { return Ok(()) };
        let ranks = job.plan.mesh().expect("a mesh").world_size();
        let original = file(&job, "megatron.args");
        let expected = read(original, PlanForm::MegatronArguments, ranks, &[])?;
        let arguments: Vec<String> = flags(words(original)).iter().map(|flag| spelt(flag, seed)).collect();
        let text = script("torchrun --nproc_per_node 8 pretrain_gpt.py", &shuffled(arguments, seed), form);
        let imported = read(&text, PlanForm::MegatronArguments, ranks, &[])?;
        prop_assert_eq!(&imported.plan, &expected.plan, "{}", text);
        prop_assert_eq!(&imported.model, &expected.model, "{}", text);
    }

    #[test]
    fn accelerates_configuration_is_one_job_in_any_form(plan in jobs(), seed in any::<u64>(), is_json in any::<bool>()) {
        let llama = Model::named("llama3-8b").expect("in the zoo");
        let Ok(job) = exported(&llama, &plan, Framework::Accelerate) else { return Ok(()) };
        let ranks = job.plan.mesh().expect("a mesh").world_size();
        let original = file(&job, "accelerate.yaml");
        let expected = read(original, PlanForm::Accelerate, ranks, &[])?;
        let settings: Map<String, Value> = serde_saphyr::from_str(original).expect("YAML");
        let lines: Vec<String> = settings.iter().map(|(name, value)| format!("{}: {value}", Value::from(name.as_str()))).collect();
        let text = match is_json {
            true => format!("{{{}}}", shuffled(lines, seed).join(",\n")),
            false => shuffled(lines, seed).join("  # said\n") + "\n",
        };
        let imported = read(&text, PlanForm::Accelerate, ranks, &[])?;
        prop_assert_eq!(&imported.plan, &expected.plan, "{}", text);
    }

    /// Settings of a recipe that the command states, in place of what the file says.
    #[test]
    fn a_recipe_and_its_changes_are_one_job(plan in jobs(), seed in any::<u64>(), moved in any::<u32>()) {
        let llama = Model::named("llama3-8b").expect("in the zoo");
        let Ok(job) = exported(&llama, &plan, Framework::Torchtune) else { return Ok(()) };
        let ranks = job.plan.mesh().expect("a mesh").world_size();
        let original = file(&job, "torchtune.yaml");
        let expected = read(original, PlanForm::Torchtune, ranks, &[])?;
        let mut settings: Map<String, Value> = serde_saphyr::from_str(original).expect("YAML");
        let mut changes = Vec::new();
        let simple: Vec<String> = settings.iter().filter(|(_, value)| !value.is_object()).map(|(name, _)| name.clone()).collect();
        for (index, name) in simple.iter().enumerate().filter(|(index, _)| moved >> (index % 32) & 1 == 1) {
            let value = settings.remove(name).expect("it is there");
            changes.push(format!("'{name}={value}'"));
            if index % 2 == 0 {
                // The file says something else.
                settings.insert(name.clone(), Value::from("another"));
            }
        }
        let recipe = Value::Object(settings).to_string();
        let text = format!("tune run --nproc_per_node {ranks} some_recipe --config r.yaml {}\n", shuffled(changes, seed).join(" "));
        let imported = read(&text, PlanForm::Torchtune, ranks, &[("r.yaml", &recipe)])?;
        prop_assert_eq!(&imported.plan, &expected.plan, "{}\n{}", text, recipe);
        prop_assert_eq!(&imported.model, &expected.model, "{}\n{}", text, recipe);
    }
}

/// What a job of ms-swift or OpenRLHF says.
#[derive(Clone, Debug)]
struct Tuning {
    micro_batch: usize,
    micro_batches: usize,
    zero: usize,
    offloads: bool,
    context: usize,
    rank: Option<usize>,
    is_half: bool,
    recomputes: bool,
    length: usize,
}

prop_compose! {
    fn tunings()(
        (micro_batch, micro_batches) in (1usize..5, 1usize..5),
        (zero, offloads) in (1usize..4, any::<bool>()),
        context in proptest::sample::select(vec![1usize, 2, 4]),
        rank in proptest::option::of(1usize..65),
        (is_half, recomputes) in (any::<bool>(), any::<bool>()),
        length in 64usize..8192,
    ) -> Tuning {
        Tuning { micro_batch, micro_batches, zero, offloads: offloads && zero > 1, context, rank, is_half, recomputes, length }
    }
}

const RANKS: usize = 8;

impl Tuning {
    /// Checks that a plan is this job.
    fn assert_is(&self, imported: &ImportedPlan, context_method: ContextMethod, text: &str) -> Result<(), TestCaseError> {
        let Plan { layout, training, .. } = &imported.plan;
        let Layout { data, context, zero, micro_batch, .. } = *layout;
        prop_assert_eq!((data, context, zero), (RANKS / self.context, self.context, self.zero), "{}", text);
        if self.context > 1 {
            prop_assert_eq!(layout.context_method, context_method, "{}", text);
        }
        prop_assert_eq!(
            (micro_batch, imported.plan.global_batch),
            (self.micro_batch, self.micro_batch * self.micro_batches * data),
            "{}",
            text
        );
        prop_assert_eq!(layout.offload.is_of_optimizer(), self.offloads, "{}", text);
        prop_assert_eq!(training.lora.as_ref().map(|lora| lora.rank), self.rank, "{}", text);
        prop_assert_eq!(imported.plan.precision == foretell_units::DataType::Fp16, self.is_half, "{}", text);
        prop_assert_eq!(layout.recompute == foretell_program::Recompute::Full, self.recomputes, "{}", text);
        prop_assert_eq!(imported.sequence, Some(self.length), "{}", text);
        prop_assert!(imported.unread.is_empty(), "{:?}\n{}", imported.unread, text);
        Ok(())
    }

    /// ms-swift's settings, by their names of today and before.
    fn of_swift(&self, older: u32) -> Vec<(String, String)> {
        let name = |bit: u32, now: &str, before: &str| if older >> bit & 1 == 1 { before.to_owned() } else { now.to_owned() };
        let shards = format!("zero{}{}", self.zero, if self.offloads { "_offload" } else { "" });
        let mut settings = vec![
            (name(0, "model", "model_id_or_path"), "org/m".to_string()),
            (name(1, "per_device_train_batch_size", "batch_size"), self.micro_batch.to_string()),
            ("gradient_accumulation_steps".into(), self.micro_batches.to_string()),
            (name(2, "tuner_type", "train_type"), if self.rank.is_some() { "lora" } else { "full" }.into()),
            (name(3, "torch_dtype", "dtype"), if self.is_half { "float16" } else { "bfloat16" }.into()),
            ("deepspeed".into(), shards),
            ("gradient_checkpointing".into(), self.recomputes.to_string()),
            ("max_length".into(), self.length.to_string()),
        ];
        settings.extend(self.rank.map(|rank| ("lora_rank".to_string(), rank.to_string())));
        settings.extend((self.context > 1).then(|| ("sequence_parallel_size".to_string(), self.context.to_string())));
        settings
    }

    /// OpenRLHF's flags, dotted or plain.
    fn of_open_rlhf(&self, is_dotted: bool) -> Vec<String> {
        let global = self.micro_batch * self.micro_batches * RANKS / self.context;
        let name = |dotted: &str, plain: &str| format!("--{}", if is_dotted { dotted } else { plain });
        let mut flags = vec![
            format!("{} org/m", name("model.model_name_or_path", "pretrain")),
            format!("{} {}", name("train.micro_batch_size", "micro_train_batch_size"), self.micro_batch),
            format!("{} {global}", name("train.batch_size", "train_batch_size")),
            format!("{} {}", name("ds.zero_stage", "zero_stage"), self.zero),
            format!("{} {}", name("data.max_len", "max_len"), self.length),
            format!("--ds.param_dtype {}", if self.is_half { "fp16" } else { "bf16" }),
        ];
        flags.extend(self.offloads.then(|| name("ds.adam_offload", "adam_offload")));
        flags.extend(self.recomputes.then(|| name("model.gradient_checkpointing_enable", "gradient_checkpointing")));
        flags.extend(self.rank.map(|rank| format!("{} {rank}", name("ds.lora.rank", "lora_rank"))));
        flags.extend((self.context > 1).then(|| format!("{} {}", name("ds.ring_attn_size", "ring_attn_size"), self.context)));
        flags
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn ms_swifts_job_is_one_in_any_form(job in tunings(), older in any::<u32>(), seed in any::<u64>(), form in 0usize..5) {
        let settings = job.of_swift(older);
        let (text, settings) = if form == 4 {
            let lines: Vec<String> = settings.iter().map(|(name, value)| format!("{name}: {value}")).collect();
            ("swift sft job.yaml\n".to_string(), shuffled(lines, seed).join("\n") + "\n")
        } else {
            let flags: Vec<String> = settings.iter().map(|(name, value)| spelt(&[format!("--{name}"), value.clone()], seed)).collect();
            (script("swift sft", &shuffled(flags, seed), form), String::new())
        };
        let imported = read(&text, PlanForm::HuggingFaceTrainer, RANKS, &[("job.yaml", &settings)])?;
        job.assert_is(&imported, ContextMethod::AllToAll, &format!("{text}\n{settings}"))?;
        // It goes on to another tool, and is the same there.
        if job.context == 1 {
            let llama = Model::named("llama3-8b").expect("in the zoo");
            let Ok(exported) = exported(&llama, &imported.plan, Framework::LlamaFactory) else { return Ok(()) };
            let zero = exported.files.iter().find(|(name, _)| name == "deepspeed.json").map_or("", |(_, text)| text);
            let back = read(file(&exported, "llama_factory.yaml"), PlanForm::HuggingFaceTrainer, RANKS, &[("deepspeed.json", zero)])?;
            prop_assert_eq!(&back.plan, &exported.plan);
            prop_assert_eq!(&back.plan.training.lora, &imported.plan.training.lora);
            prop_assert_eq!(&back.plan.layout, &imported.plan.layout);
        }
    }

    #[test]
    fn openrlhfs_job_is_one_in_any_form(job in tunings(), is_dotted in any::<bool>(), seed in any::<u64>(), form in 0usize..4) {
        let flags = shuffled(job.of_open_rlhf(is_dotted), seed);
        let text = script("deepspeed --module openrlhf.cli.train_sft", &flags, form);
        let imported = read(&text, PlanForm::HuggingFaceTrainer, RANKS, &[])?;
        job.assert_is(&imported, ContextMethod::Ring, &text)?;
    }
}
