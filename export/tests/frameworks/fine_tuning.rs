//! Fine-tuning jobs of Hugging Face's Trainer, TRL, Axolotl and LLaMA-Factory: what is trained, in
//! which formats and with which kernels is read or refused.

use foretell_export::{Framework, ImportedPlan, Job, PlanForm, Surroundings, export_job, import_plan};
use foretell_models::Model;
use foretell_program::{AttentionKernel, LossKernel, MomentFormat, NamePatterns, Offload, Optimizer, Recompute};
use foretell_units::DataType;
use foretell_units::diagnostic::one_line;

const BASE: &str = "per_device_train_batch_size: 1\noutput_dir: x\n";

fn read(more: &str) -> Result<ImportedPlan, String> {
    import_plan(&format!("{BASE}{more}"), PlanForm::HuggingFaceTrainer, 8).map_err(|error| one_line(&error))
}

#[track_caller]
fn sound(more: &str) -> ImportedPlan {
    read(more).unwrap_or_else(|error| unreachable!("{more}: {error}"))
}

#[track_caller]
fn refused(more: &str, expected: &[&str]) {
    let error = read(more).map(|imported| imported.plan).expect_err(more);
    assert!(expected.iter().all(|part| error.contains(part)) && error.contains("hint: "), "{more}: {error}");
}

fn targets(names: &[&str]) -> NamePatterns {
    names.iter().copied().collect()
}

#[test]
fn adapters_are_read_in_the_words_of_each_tool() {
    let cases = [
        ("adapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n", [32, 16], &["*"][..], None, false),
        (
            "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_alpha: 8\nlora_dropout: 0.1\nlora_target_modules: [q_proj, v_proj]\n",
            [8, 8],
            &["*q_proj", "*v_proj"],
            Some(4),
            true,
        ),
        ("use_peft: true\nload_in_4bit: true\nlora_target_modules: all-linear\n", [16, 32], &["*"], Some(4), true),
        (
            "adapter: lora\nload_in_8bit: true\nlora_r: 8\nlora_alpha: 16\nlora_dropout: 0.0\nlora_target_linear: true\n",
            [8, 16],
            &["*"],
            Some(8),
            false,
        ),
        ("use_peft: true\nlora_r: 4\nlora_dropout: 0.0\n", [4, 32], &["*q_proj", "*v_proj"], None, false),
        ("stage: sft\nfinetuning_type: lora\nlora_target: q_proj,k_proj\n", [8, 16], &["*q_proj", "*k_proj"], None, false),
        (
            "stage: sft\nfinetuning_type: lora\nlora_rank: 64\nlora_target: all\nquantization_bit: 4\n",
            [64, 128],
            &["*"],
            Some(4),
            false,
        ),
        // LLaMA-Factory's default.
        ("stage: pt\n", [8, 16], &["*"], None, false),
    ];
    for (text, [rank, alpha], names, bits, dropout) in cases {
        let plan = sound(&format!("bf16: true\n{text}")).plan;
        let lora = plan.training.lora.as_ref().expect(text);
        assert_eq!((lora.rank, lora.alpha, &lora.targets), (rank, alpha, &targets(names)), "{text}");
        assert_eq!((plan.workload.base_bits, plan.workload.adapter_dropout), (bits, dropout), "{text}");
        assert!(!plan.workload.no_master_copy, "{text}");
    }
    let full = sound("bf16: true\nlora_r: 8\nuse_peft: false\nfinetuning_type: full\n");
    assert_eq!(full.plan.training.lora, None);
    assert!(full.without_effect.iter().any(|setting| setting.contains("lora_r")), "{:?}", full.without_effect);
    for (text, expected) in [
        ("adapter: lora\ngptq: true\n", "frozen weights of other formats"),
        ("load_in_4bit: true\n", "cannot be trained"),
        ("adapter: llama-adapter\n", "not one of those"),
        ("finetuning_type: freeze\n", "`finetuning_type: \"freeze\"`"),
        ("use_peft: true\nuse_dora: true\n", "`use_dora: true`"),
        ("adapter: lora\nlora_on_cpu: true\n", "`lora_on_cpu: true`"),
        ("adapter: lora\nlora_target_modules: '.*q_proj$'\n", "regular expressions"),
    ] {
        refused(text, &[expected]);
    }
}

#[test]
fn formats_of_parameters_and_moments_are_read() {
    for name in ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"] {
        let imported = sound(&format!("bf16: true\nweight_decay: 0.1\noptim: {name}\n"));
        assert_eq!((imported.plan.optimizer, imported.plan.workload.moments), (Optimizer::AdamW, MomentFormat::EightBit));
        assert_eq!(imported.plan.workload.paged_moments, name.starts_with("paged"), "{name}");
    }
    // A setting is named as the file names it.
    refused("bf16: true\noptimizer: lion\n", &["`optimizer: \"lion\"`"]);
    let muon = sound("bf16: true\nuse_muon: true\n").plan;
    assert_eq!((muon.optimizer, muon.training.momentum), (Optimizer::Muon, 0.95));
    for setting in ["use_galore", "use_badam", "use_adam_mini"] {
        refused(&format!("bf16: true\n{setting}: true\n"), &[setting]);
    }
    let pure = |text: &str| {
        let plan = sound(text).plan;
        (plan.precision, plan.workload.no_master_copy)
    };
    for text in [
        "bf16: true\ntorch_dtype: bfloat16\n",
        "dtype: bfloat16\n",
        "pure_bf16: true\nfinetuning_type: full\n",
        "bf16: true\nmicro_batch_size: 1\n",
    ] {
        assert_eq!(pure(text), (DataType::Bf16, true), "{text}");
    }
    for text in [
        "bf16: true\ndtype: float32\n",
        "bf16: true\ndtype: auto\n",
        "bf16: true\ndtype: bfloat16\nfsdp: full_shard\n",
        "bf16: true\n",
    ] {
        assert_eq!(pure(text), (DataType::Bf16, false), "{text}");
    }
    refused("bf16: true\npure_bf16: true\n", &["pure_bf16"]);
}

#[test]
fn kernels_of_attention_and_loss_are_read() {
    let workload = |text: &str| sound(&format!("bf16: true\n{text}")).plan.workload;
    for text in [
        "use_liger_kernel: true\n",
        "enable_liger_kernel: true\n",
        "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_fused_linear_cross_entropy: true\n",
    ] {
        assert_eq!(workload(text).loss, LossKernel::Liger, "{text}");
    }
    for text in ["loss_type: chunked_nll\n", "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"] {
        assert_eq!(workload(text).loss, LossKernel::Chunked, "{text}");
    }
    assert_eq!(workload("liger_rms_norm: true\n").loss, LossKernel::Plain);
    for (text, expected) in [
        ("attn_implementation: flash_attention_2\n", Some(AttentionKernel::Flash)),
        ("flash_attention: true\n", Some(AttentionKernel::Flash)),
        ("flash_attn: fa2\n", Some(AttentionKernel::Flash)),
        ("attn_implementation: sdpa\n", None),
        ("flash_attn: auto\n", None),
        ("attn_implementation: eager\n", Some(AttentionKernel::Eager)),
    ] {
        assert_eq!(workload(text).attention, expected, "{text}");
    }
}

#[test]
fn training_by_rewards_or_on_unnamed_preferences_is_refused() {
    for text in [
        "beta: 0.1\n",
        "stage: ppo\n",
        "num_generations: 8\n",
        "rl: grpo\nmicro_batch_size: 1\n",
        "reward_funcs: [x]\n",
        "loss_type: unheard_of\n",
        "ref_model_sync_steps: 4\n",
        "pref_beta: 0.1\n",
        "use_vllm: true\n",
    ] {
        refused(&format!("bf16: true\n{text}"), &[text.split(':').next().unwrap_or_default(), "foretell plan --method"]);
    }
    // Leaving out what the hint names is the way forward.
    let error = read("bf16: true\nbeta: 0.1\nmax_prompt_length: 512\n").expect_err("preferences");
    assert!(
        error.contains("leave out `beta`, `max_prompt_length`") || error.contains("leave out `max_prompt_length`, `beta`"),
        "{error}"
    );
    assert!(sound("bf16: true\nstage: sft\nloss_type: nll\nfinetuning_type: full\n").unread.is_empty());
}

#[test]
fn a_job_gets_the_stack_of_its_library() {
    let stack = |text: &str| sound(&format!("bf16: true\n{text}"));
    for (text, expected) in [
        ("", "hf-trainer"),
        ("fsdp: full_shard\n", "hf-trainer"),
        ("max_length: 512\n", "trl"),
        ("base_model: x\n", "hf-trainer"),
        ("finetuning_type: full\n", "hf-trainer"),
        ("deepspeed:\n  zero_optimization: {stage: 2}\n", "hf-deepspeed"),
        ("fsdp: shard_grad_op\n", "fsdp2"),
        ("fsdp: shard_grad_op\nfsdp_config: {version: 1}\n", "fsdp2"),
        ("fsdp: full_shard\nfsdp_config: {version: 2}\n", "hf-trainer"),
        ("fsdp: full_shard\nfsdp_config: {version: 1}\n", "hf-trainer-fsdp1"),
        ("fsdp: full_shard\nfsdp_config: {fsdp_version: 1}\n", "hf-trainer-fsdp1"),
        ("fsdp: full_shard\nfsdp_config: {version: 1}\nmax_length: 512\n", "trl-fsdp1"),
        ("fsdp_version: 1\n", "hf-trainer-fsdp1"),
        ("fsdp_config: {version: 1}\n", "hf-trainer"),
    ] {
        let imported = stack(text);
        assert_eq!(imported.plan.stack.name(), expected, "{text}");
        assert!(imported.assumed.iter().any(|note| note.starts_with(&format!("`stack` {expected}: "))), "{:?}", imported.assumed);
    }
    let of = |text: &str, form| import_plan(text, form, 8).expect("it is sound").plan.stack.name().to_string();
    // `accelerate launch` takes the first version where a file states none.
    for (config, expected) in [("", "hf-trainer-fsdp1"), ("1", "hf-trainer-fsdp1"), ("2", "hf-trainer")] {
        let config = if config.is_empty() { String::new() } else { format!("fsdp_config: {{fsdp_version: {config}}}\n") };
        assert_eq!(of(&format!("distributed_type: FSDP\nmixed_precision: bf16\n{config}"), PlanForm::Accelerate), expected);
    }
    assert_eq!(of("distributed_type: MULTI_GPU\nmixed_precision: bf16\n", PlanForm::Accelerate), "hf-trainer");
    assert_eq!(of("distributed_type: DEEPSPEED\nmixed_precision: bf16\n", PlanForm::Accelerate), "hf-deepspeed");
    assert_eq!(of(r#"{"train_batch_size": 8, "bf16": {"enabled": true}}"#, PlanForm::Deepspeed), "deepspeed-zero");
    assert_eq!(of(r#"{"train_batch_size": "auto", "bf16": {"enabled": true}}"#, PlanForm::Deepspeed), "hf-deepspeed");
    // An import goes back without another stack.
    let llama = Model::named("llama3-8b").expect("in the zoo");
    for (text, framework) in
        [("max_length: 512\n", Framework::Accelerate), ("deepspeed: {zero_optimization: {stage: 2}}\n", Framework::Deepspeed)]
    {
        let plan = stack(text).plan;
        let job = export_job(&Job { name: "model", model: &llama, plan: &plan, devices_per_node: 8 }, framework)
            .expect("it is expressible");
        assert_eq!(job.plan.stack, plan.stack);
    }
}

#[test]
fn fsdp_has_two_versions_and_a_job_one_of_them() {
    for version in [3, 7, 99] {
        refused(&format!("fsdp: full_shard\nfsdp_version: {version}\n"), &["fsdp_version", "versions of FSDP: 1, 2"]);
        refused(&format!("fsdp: full_shard\nfsdp_config: {{version: {version}}}\n"), &["version", "versions of FSDP: 1, 2"]);
    }
    refused("fsdp: full_shard\nfsdp_version: 1\nfsdp_config: {version: 2}\n", &["fsdp_version", "version 2 in `fsdp_config`"]);
    let launched = |arguments: &str, version: &str| {
        let text = format!("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {{{version}}}\n");
        let file = |name: &str| (name == "launch.yaml").then(|| text.clone());
        let surroundings = Surroundings { file: &file, launch_file: Some("launch.yaml"), ..Surroundings::from(8) };
        let read = import_plan(&format!("{BASE}bf16: true\n{arguments}"), PlanForm::HuggingFaceTrainer, surroundings);
        read.map(|imported| imported.assumed.join("\n")).map_err(|error| one_line(&error))
    };
    let own = "fsdp_config: {version: 1}\n";
    let error = launched(own, "fsdp_version: 2").expect_err("they differ");
    assert!(error.contains("version 1 of FSDP, and the launch has version 2; hint: write one version"), "{error}");
    assert!(launched(own, "fsdp_version: 1").is_ok_and(|notes| notes.contains("first FSDP, as the file says")));
    assert!(
        launched("", "fsdp_offload_params: false").is_ok_and(|notes| notes.contains("first FSDP, which `accelerate launch`"))
    );
    let alone = import_plan("distributed_type: FSDP\nmixed_precision: bf16\n", PlanForm::Accelerate, 8).expect("it is sound");
    assert!(alone.assumed.iter().any(|note| note.contains("where no file states `fsdp_version`")), "{:?}", alone.assumed);
}

#[test]
fn a_fine_tuning_job_goes_back_to_its_framework() {
    let llama = Model::named("llama3-8b").expect("in the zoo");
    for text in [
        "use_peft: true\nload_in_4bit: true\nlora_target_modules: all-linear\noptim: adamw_bnb_8bit\nattn_implementation: flash_attention_2\n",
        "use_peft: true\nlora_r: 8\nlora_alpha: 8\nlora_dropout: 0.0\nlora_target_modules: [q_proj, v_proj]\nlora_modules_to_save: [embed_tokens]\n",
        "max_length: 512\ndtype: bfloat16\nuse_liger_kernel: true\n",
        "max_length: 512\noptim: adafactor\n",
        "max_length: 512\nloss_type: chunked_nll\nattn_implementation: eager\nfsdp: full_shard\n",
    ] {
        let plan = sound(&format!("bf16: true\n{text}")).plan;
        let job = export_job(&Job { name: "model", model: &llama, plan: &plan, devices_per_node: 8 }, Framework::Accelerate)
            .expect(text);
        assert!(job.differences.is_empty(), "{text}: {:?}", job.differences);
        let (_, arguments) = job.files.iter().find(|(name, _)| name == "training_arguments.json").expect("it is written");
        let back = import_plan(arguments, PlanForm::HuggingFaceTrainer, 8).expect(text);
        assert_eq!((&back.plan.training, &back.plan.workload), (&plan.training, &plan.workload), "{text}: {arguments}");
        assert_eq!(back.plan.layout, job.plan.layout, "{text}");
    }
    // What peft's words lack is said.
    let mut plan = sound("bf16: true\nuse_peft: true\n").plan;
    plan.training.lora.as_mut().expect("adapters").targets = targets(&["model.*.q_proj"]);
    let job = export_job(&Job { name: "model", model: &llama, plan: &plan, devices_per_node: 8 }, Framework::Accelerate)
        .expect("it is near");
    assert!(job.differences.iter().any(|difference| difference.contains("adapters are left out")), "{:?}", job.differences);
}

#[test]
fn axolotls_fsdp2_and_further_axes_are_read() {
    let plan = sound("bf16: true\nfsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n  offload_params: false\n").plan;
    assert_eq!((plan.layout.zero, plan.layout.data), (3, 8));
    let plan = sound("bf16: true\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: false}\n").plan;
    assert_eq!(plan.layout.zero, 2);
    let fsdp = "bf16: true\nfsdp_version: 2\n";
    let plan = sound(&format!("{fsdp}dp_shard_size: 2\ndp_replicate_size: 2\ntensor_parallel_size: 2\n")).plan;
    assert_eq!((plan.layout.data, plan.layout.tensor, plan.layout.shard_group, plan.global_batch), (4, 2, Some(2), 4));
    assert_eq!(plan.stack.name(), "fsdp2");
    let plan = sound("bf16: true\nparallelism_config: {tp_size: 2, dp_shard_size: 4}\n").plan;
    assert_eq!((plan.layout.data, plan.layout.tensor, plan.layout.zero), (4, 2, 3), "shards are FSDP's");
    let plan = sound(&format!("{fsdp}context_parallel_size: 2\n")).plan;
    assert_eq!((plan.layout.data, plan.layout.context), (4, 2));
    refused(&format!("{fsdp}dp_shard_size: 3\n"), &["3 ranks", "8 devices"]);
    for setting in ["cp_size: 2", "dist_config: {name: fsdp2}", "model_class: llm", "qat: {group_size: 16}"] {
        refused(&format!("bf16: true\n{setting}\n"), &[setting.split([':', '.']).next().unwrap_or_default()]);
    }
    let offloaded = sound("bf16: true\ngradient_checkpointing: true\nactivation_offloading: true\n").plan;
    assert_eq!(offloaded.layout.offload, Offload::Activations);
}

#[test]
fn a_script_that_launches_a_trainer_is_read() {
    let script = "#!/bin/bash\nGPUS=8\nMODEL=\"org/model\"\nARGS=\"--bf16 True\"\ntorchrun --nproc_per_node $GPUS train.py --model_name_or_path $MODEL \\\n  \
                  --per_device_train_batch_size 2 --gradient-accumulation-steps 4 $ARGS --output_dir $OUT --gradient_checkpointing True \\\n  \
                  --deepspeed zero3.json --use_lora True\n";
    let zero3 = r#"{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}"#;
    let fsdp = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n";
    let file = |name: &str| match name {
        "zero3.json" => Some(zero3.to_string()),
        "fsdp.yaml" => Some(fsdp.to_string()),
        _ => None,
    };
    let surroundings = Surroundings { file: &file, ..Surroundings::from(8) };
    let read = |text: &str| import_plan(text, PlanForm::HuggingFaceTrainer, surroundings).map_err(|error| one_line(&error));
    // A setting of the script's own that decides is refused in its own words.
    let error = read(script).expect_err("adapters of its own");
    assert!(error.contains("`--use_lora True`"), "{error}");
    let imported = read(&script.replace(" --use_lora True", "")).expect("it is sound");
    let layout = &imported.plan.layout;
    assert_eq!((layout.zero, layout.micro_batch, imported.plan.global_batch), (3, 2, 64));
    assert_eq!((imported.plan.precision, imported.plan.stack.name()), (DataType::Bf16, "hf-deepspeed"));
    assert_eq!(imported.unknown_model.as_deref(), Some("org/model"));
    let one_line = "deepspeed --num_gpus 8 train.py --per_device_train_batch_size 1 --fp16 True --output_dir x";
    assert_eq!(read(one_line).expect("it is sound").plan.precision, DataType::Fp16);
    let own_flags =
        "deepspeed train.py --per_device_train_batch_size 1 --bf16 --output_dir x --deepspeed --deepspeed_config zero3.json";
    assert_eq!(read(own_flags).expect("it is sound").plan.layout.zero, 3);
    // The launcher's own file has layout and precision.
    let launched = "accelerate launch --config_file fsdp.yaml train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --output_dir x";
    let plan = read(launched).expect("it is sound").plan;
    assert_eq!((plan.layout.zero, plan.precision, plan.global_batch), (3, DataType::Bf16, 32));
    assert_eq!((plan.layout.recompute, plan.stack.name()), (Recompute::Full, "hf-trainer"));
    read(&format!("{launched} --fsdp full_shard")).expect_err("two layouts");
    // So have its flags, beside a file or without one.
    let script = "train.py --per_device_train_batch_size 2 --output_dir x";
    let of_flags =
        |flags: &str| read(&format!("accelerate launch --num_processes 8 {flags} {script}")).expect("it is sound").plan;
    let sharded = of_flags("--mixed_precision bf16 --use_fsdp --fsdp_sharding_strategy FULL_SHARD --fsdp_offload_params true");
    assert_eq!((sharded.layout.zero, sharded.layout.offload, sharded.precision), (3, Offload::State, DataType::Bf16));
    let staged = of_flags("--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --mixed_precision bf16");
    assert_eq!((staged.layout.zero, staged.layout.offload, staged.stack.name()), (3, Offload::Optimizer, "hf-deepspeed"));
    let changed = of_flags("--config_file fsdp.yaml --fsdp_activation_checkpointing false");
    assert_eq!((changed.layout.zero, changed.layout.recompute), (3, Recompute::None));
    assert_eq!(of_flags("--main_process_port 29500").layout.zero, 0);
    for (text, expected) in [
        ("#!/bin/bash\necho hello\n", "starts no Python script"),
        ("accelerate launch --config_file none.yaml train.py --bf16 True --output_dir x", "--config_file none.yaml"),
        ("torchrun train.py --per_device_train_batch_size $BATCH --output_dir x", "`--per_device_train_batch_size $BATCH`"),
    ] {
        let error = read(text).expect_err(text);
        assert!(error.contains(expected) && error.contains("hint: "), "{text}: {error}");
    }
}

#[test]
fn accelerates_ranks_axes_and_switches_are_read_or_refused() {
    let read = |text: &str, ranks: usize, devices_per_node: usize| {
        let surroundings = Surroundings { devices_per_node, device: "a100-sxm-80g", ..Surroundings::from(ranks) };
        import_plan(text, PlanForm::Accelerate, surroundings).map_err(|error| one_line(&error))
    };
    for (text, expected) in [
        ("distributed_type: 'NO'\nmixed_precision: bf16\n", "`--topology 1xa100-sxm-80g`"),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\n", "`--topology 2x4xa100-sxm-80g`"),
        ("distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 1\n", "`--topology 4xa100-sxm-80g`"),
        ("distributed_type: FSDP\nparallelism_config:\n  parallelism_config_sp_size: 2\n", "by heads with DeepSpeed alone"),
    ] {
        let error = read(text, 8, 8).expect_err(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
    for text in
        ["distributed_type: no\nmixed_precision: no\n", "distributed_type: false\nmixed_precision: false\nnum_processes: 1\n"]
    {
        assert_eq!(read(text, 1, 1).expect(text).plan.layout.data, 1, "{text}");
    }
    assert_eq!(
        read("distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\n", 8, 4).expect("it is sound").plan.layout.data,
        8
    );
    let axes = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n  \
                parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n";
    let plan = read(axes, 8, 8).expect("it is sound").plan;
    assert_eq!((plan.layout.data, plan.layout.tensor, plan.layout.shard_group, plan.layout.zero), (4, 2, Some(2), 3));
    let in_place = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}\n  \
                    bf16: {enabled: true}\n  activation_checkpointing: {partition_activations: true}\n";
    let plan = read(in_place, 8, 8).expect("it is sound").plan;
    assert_eq!((plan.layout.zero, plan.layout.offload, plan.precision), (2, Offload::Optimizer, DataType::Bf16));
    let short =
        "distributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 4}\n";
    let plan = read(short, 8, 8).expect("it is sound").plan;
    assert_eq!((plan.layout.zero, plan.precision, plan.global_batch), (3, DataType::Fp16, 8 * 8 * 4));
}

#[test]
fn a_deepspeed_file_without_bf16_is_not_taken_for_one_in_bf16() {
    let read = |text: &str| import_plan(text, PlanForm::Deepspeed, 8).expect(text);
    let imported = read(r#"{"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}"#);
    assert_eq!(imported.plan.precision, DataType::Fp16);
    assert!(imported.assumed.iter().any(|note| note.contains("no `bf16`")), "{:?}", imported.assumed);
    let both = read(r#"{"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}"#);
    assert_eq!(both.plan.precision, DataType::Bf16);
}
