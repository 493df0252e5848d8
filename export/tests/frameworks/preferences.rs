//! Plans of training on preferences as jobs of TRL, Axolotl, LLaMA-Factory and torchtune: what is
//! written reads back as the same plan, and no framework is given another job.

use crate::plans::{exported, file, stated};
use foretell_export::{Framework, FrameworkError, ImportedPlan, JobFiles, PlanForm, Surroundings, import_plan};
use foretell_models::Model;
use foretell_program::{
    AttentionKernel, Layout, Lora, LossKernel, MomentFormat, Optimizer, Plan, PlannedWorkload, Preference, Recompute, Stack,
    Training,
};
use foretell_units::DataType;
use foretell_units::diagnostic::one_line;
use proptest::prelude::*;
use proptest::sample::select;

/// The file from which each framework's job is read.
const TUNERS: [(Framework, PlanForm, &str); 4] = [
    (Framework::Trl, PlanForm::HuggingFaceTrainer, "run.sh"),
    (Framework::Axolotl, PlanForm::HuggingFaceTrainer, "axolotl.yaml"),
    (Framework::LlamaFactory, PlanForm::HuggingFaceTrainer, "llama_factory.yaml"),
    (Framework::Torchtune, PlanForm::Torchtune, "torchtune.yaml"),
];

const PREFERENCES: [Preference; 4] = [Preference::Dpo, Preference::Orpo, Preference::Kto, Preference::Reward];

fn llama() -> Model {
    Model::named("llama3-8b").expect("in the zoo")
}

fn read_back(job: &JobFiles, form: PlanForm, name: &str) -> Result<ImportedPlan, String> {
    let beside = |name: &str| job.files.iter().find(|(file, _)| file == name).map(|(_, text)| text.clone());
    let ranks = job.plan.mesh().expect("a mesh").world_size();
    let surroundings = Surroundings { file: &beside, ..Surroundings::from(ranks) };
    import_plan(file(job, name), form, surroundings).map_err(|error| one_line(&error))
}

fn preference_plan(preference: Preference, data: usize, lora: bool) -> Plan {
    let layout = Layout { data, zero: if data > 1 { 3 } else { 0 }, micro_batch: 2, ..Layout::default() };
    let mut plan = Plan { precision: DataType::Bf16, stack: Stack::new("trl"), ..Plan::new(layout, data * 4) };
    plan.workload.preference = Some(preference);
    plan.training.clip_norm = Some(1.0);
    plan.training.lora = lora.then(|| Lora { targets: Lora::targets_named(["all"]), ..Lora::default() });
    plan
}

prop_compose! {
    fn plans()(
        preference in select(PREFERENCES.to_vec()),
        (data, zero, micro_batch, micro_batches) in (1usize..5, 0usize..4, 1usize..4, 1usize..4),
        recompute in select(vec![Recompute::None, Recompute::Full]),
        optimizer in select(vec![Optimizer::Sgd, Optimizer::AdamW]),
        precision in select(vec![DataType::Fp32, DataType::Bf16, DataType::Fp16]),
        clip in proptest::option::of(0.1f32..2.0),
        adapters in proptest::option::of((1usize..65, select(vec![&["all"][..], &["q_proj", "v_proj"]]), any::<bool>(), select(vec![None, Some(4), Some(8)]))),
        loss in select(vec![LossKernel::Plain, LossKernel::Chunked, LossKernel::Liger]),
        (moments, paged_moments) in (select(vec![MomentFormat::Single, MomentFormat::EightBit, MomentFormat::Factored]), any::<bool>()),
        attention in select(vec![None, Some(AttentionKernel::Flash), Some(AttentionKernel::Eager)]),
        (no_master_copy, updates_in_backward, precomputes) in (any::<bool>(), any::<bool>(), any::<bool>()),
        stack in select(vec!["trl", "hf-trainer", "hf-deepspeed", "torchtune"]),
    ) -> Plan {
        let layout = Layout { data, zero, micro_batch, recompute, ..Layout::default() };
        let mut plan = Plan::new(layout, data * micro_batch * micro_batches);
        (plan.optimizer, plan.precision, plan.stack) = (optimizer, precision, Stack::new(stack));
        plan.training = Training { clip_norm: clip, weight_decay: 0.1, ..Training::default() };
        plan.workload = PlannedWorkload {
            preference: Some(preference), loss, moments, paged_moments, attention, no_master_copy, updates_in_backward,
            precomputed_reference: precomputes && preference.has_reference(),
            ..PlannedWorkload::default()
        };
        if let Some((rank, targets, dropout, bits)) = adapters {
            plan.training.lora = Some(Lora { rank, targets: Lora::targets_named(targets.iter().copied()), ..Lora::default() });
            (plan.workload.adapter_dropout, plan.workload.base_bits) = (dropout, bits);
        }
        plan
    }
}

/// Whether a framework trains such a plan.
fn is_trained(plan: &Plan, framework: Framework) -> bool {
    let preference = plan.workload.preference.expect("it is on preferences");
    let is_of_one = preference == Preference::Kto && plan.layout.micro_batch == 1;
    let is_sharded = plan.layout.zero > 0 && plan.stack.name() != "hf-deepspeed";
    match framework {
        Framework::Trl => !is_of_one,
        Framework::Axolotl => {
            let is_refused = is_sharded && plan.workload.base_bits.is_some() && preference != Preference::Reward;
            !(is_of_one || is_refused)
        }
        Framework::LlamaFactory => true,
        Framework::Torchtune => preference == Preference::Dpo,
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_job_on_preferences_reads_back_the_same(plan in plans()) {
        for (framework, form, name) in TUNERS {
            let job = match exported(&llama(), &plan, framework) {
                Ok(job) => job,
                Err(error) => {
                    prop_assert!(!is_trained(&plan, framework), "{:?}: {}", framework, one_line(&error));
                    continue;
                }
            };
            prop_assert!(is_trained(&plan, framework), "{:?} trains no such plan", framework);
            prop_assert_eq!(job.plan.workload.preference, plan.workload.preference);
            prop_assert_eq!(&job.plan.training.lora, &plan.training.lora);
            let imported = read_back(&job, form, name).expect("it reads back");
            // The asked stack is kept where several have such jobs.
            let expected = Plan { stack: imported.plan.stack.clone(), ..stated(&job.plan) };
            prop_assert_eq!(stated(&imported.plan), expected, "{:?}\n{:?}", framework, job.files);
            prop_assert!(imported.unread.is_empty(), "{:?}: {:?}", framework, imported.unread);
            // What was asked for is expressed, or said to be lacking.
            let is_same = job.plan.workload == plan.workload;
            prop_assert!(is_same || !job.differences.is_empty(), "{:?}: {:?}", framework, job.plan.workload);
        }
    }
}

#[test]
fn frameworks_without_a_trainer_of_preferences_refuse_them() {
    for framework in [Framework::Accelerate, Framework::Deepspeed, Framework::Megatron, Framework::Torchtitan] {
        for preference in PREFERENCES {
            let error = exported(&llama(), &preference_plan(preference, 8, false), framework).expect_err("another job");
            assert!(matches!(error, FrameworkError::Method { .. }), "{framework:?}: {error}");
            let error = one_line(&error);
            assert!(
                error.contains(&format!("`{}`", preference.name())) && error.contains("hint: export it `--to trl`"),
                "{error}"
            );
        }
    }
    for preference in [Preference::Orpo, Preference::Kto, Preference::Reward] {
        let error = exported(&llama(), &preference_plan(preference, 8, true), Framework::Torchtune).expect_err("no recipe");
        assert!(one_line(&error).contains("by `dpo` alone"), "{error}");
    }
}

#[test]
fn each_method_starts_its_own_trainer() {
    let job = |preference, data, lora, framework| {
        exported(&llama(), &preference_plan(preference, data, lora), framework).expect("it is expressible")
    };
    for (preference, start, line) in [
        (Preference::Dpo, "-m trl.scripts.dpo --config trl.yaml", "precompute_ref_log_probs: false\n"),
        (Preference::Kto, "-m trl.scripts.kto --config trl.yaml", "precompute_ref_log_probs: false\n"),
        (Preference::Reward, "-m trl.scripts.reward --config trl.yaml", "lora_task_type: SEQ_CLS\n"),
        (Preference::Orpo, "  orpo.py --config trl.yaml", "beta: 0.1\n"),
    ] {
        let job = job(preference, 8, true, Framework::Trl);
        assert!(file(&job, "run.sh").contains(start), "{}", file(&job, "run.sh"));
        assert!(file(&job, "trl.yaml").contains(line), "{}", file(&job, "trl.yaml"));
        assert_eq!(job.files.iter().any(|(name, _)| name == "orpo.py"), preference == Preference::Orpo);
        // The file alone names no method. It is not taken for one on texts.
        let error = read_back(&job, PlanForm::HuggingFaceTrainer, "trl.yaml").expect_err("it names no method");
        assert!(error.contains("give the script that starts the job"), "{error}");
    }
    for (preference, expected) in [
        (Preference::Dpo, "stage: dpo\npref_loss: sigmoid\n"),
        (Preference::Orpo, "stage: dpo\npref_loss: orpo\n"),
        (Preference::Kto, "stage: kto\n"),
        (Preference::Reward, "stage: rm\n"),
    ] {
        let job = job(preference, 8, true, Framework::LlamaFactory);
        let text = file(&job, "llama_factory.yaml");
        assert!(expected.lines().all(|line| text.lines().any(|own| own == line)), "{text}");
    }
    for (preference, expected) in [
        (Preference::Dpo, "rl: dpo\n"),
        (Preference::Orpo, "rl: orpo\n"),
        (Preference::Kto, "rl: kto\n"),
        (Preference::Reward, "reward_model: true\n"),
    ] {
        let job = job(preference, 8, false, Framework::Axolotl);
        assert!(file(&job, "axolotl.yaml").contains(expected), "{}", file(&job, "axolotl.yaml"));
    }
    for (data, lora, recipe) in [
        (1, true, "tune run lora_dpo_single_device"),
        (8, true, "lora_dpo_distributed"),
        (8, false, "full_dpo_distributed"),
        (1, false, "--nnodes 1 --nproc_per_node 1"),
    ] {
        let job = job(Preference::Dpo, data, lora, Framework::Torchtune);
        assert!(file(&job, "run.sh").contains(recipe), "{}", file(&job, "run.sh"));
        let text = file(&job, "torchtune.yaml");
        assert!(text.contains("torchtune.rlhf.loss.DPOLoss") && text.contains("stack_exchange_paired_dataset"), "{text}");
        assert_eq!(text.contains("ref_checkpointer:"), !lora, "a copy is the reference of a model without adapters");
    }
}

#[test]
fn counts_of_a_batch_are_samples_of_two_sequences() {
    for (framework, _, name) in TUNERS {
        let name = if framework == Framework::Trl { "trl.yaml" } else { name };
        let job = exported(&llama(), &preference_plan(Preference::Dpo, 8, true), framework).expect("it is expressible");
        let text = file(&job, name);
        let sizes = ["per_device_train_batch_size: 2\n", "micro_batch_size: 2\n", "\nbatch_size: 2\n"];
        assert!(sizes.iter().any(|size| text.contains(size)) && text.contains("gradient_accumulation_steps: 2\n"), "{text}");
    }
}

#[test]
fn a_learning_rate_that_nobody_chose_is_the_usual_one_of_the_method() {
    for (lora, preference, rate) in [(false, None, 2e-5), (true, None, 2e-4), (false, Some(Preference::Dpo), 1e-6)] {
        let mut plan = preference_plan(Preference::Dpo, 8, lora);
        plan.workload.preference = preference;
        for (framework, ..) in TUNERS {
            let open = exported(&llama(), &plan, framework).expect("it is trained");
            assert_eq!(open.plan.training.learning_rate, Some(rate), "{framework:?}");
            assert!(open.differences.iter().any(|difference| difference.contains("learning rate")), "{:?}", open.differences);
            let mut stated = plan.clone();
            stated.training.learning_rate = Some(3e-5);
            let kept = exported(&llama(), &stated, framework).expect("it is trained").plan;
            assert_eq!(kept.training.learning_rate, Some(3e-5), "{framework:?}");
        }
    }
}
