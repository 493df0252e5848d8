//! Jobs of tools with flags of their own, read with these tools' defaults: ms-swift, OpenRLHF,
//! InternVL's scripts, `tune run`. And sequences that ranks share by heads, under every name.

use foretell_export::{Framework, ImportedPlan, Job, PlanForm, Surroundings, export_job, import_plan};
use foretell_models::Model;
use foretell_program::{AttentionKernel, ContextMethod, Layout, Lora, NamePatterns, Offload, Plan, Preference, Recompute};
use foretell_units::diagnostic::one_line;
use foretell_units::{Bytes, DataType};

fn read_beside(text: &str, form: PlanForm, ranks: usize, files: &[(&str, &str)]) -> Result<ImportedPlan, String> {
    let file = |name: &str| files.iter().find(|(known, _)| *known == name).map(|(_, text)| text.to_string());
    import_plan(text, form, Surroundings { file: &file, ..Surroundings::from(ranks) }).map_err(|error| one_line(&error))
}

fn trainer(text: &str, ranks: usize) -> ImportedPlan {
    read_beside(text, PlanForm::HuggingFaceTrainer, ranks, &[]).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refused(text: &str, form: PlanForm, expected: &str) {
    let error = read_beside(text, form, 8, &[]).map(|imported| imported.plan).expect_err(text);
    assert!(error.contains(expected) && error.contains("hint: "), "{text}: {error}");
}

const SWIFT: &str = "swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset a#500 b#500 --torch_dtype bfloat16";

#[test]
fn ms_swift_has_defaults_of_its_own() {
    let imported = trainer(SWIFT, 8);
    let plan = &imported.plan;
    assert_eq!((plan.layout.micro_batch, plan.global_batch, plan.precision), (1, 16, DataType::Bf16));
    assert_eq!((plan.layout.recompute.clone(), plan.layout.zero), (Recompute::Full, 0));
    let adapters = Lora { rank: 8, alpha: 32, targets: Lora::targets_named(["all"]), ..Lora::default() };
    assert_eq!((plan.training.lora.as_ref(), plan.workload.adapter_dropout), (Some(&adapters), true));
    assert_eq!((plan.training.learning_rate, plan.training.weight_decay, plan.training.beta2), (Some(1e-4), 0.1, 0.95));
    assert!(!plan.workload.no_master_copy && imported.unread.is_empty(), "{:?}", imported.unread);
    assert_eq!(imported.unknown_model.as_deref(), Some("Qwen/Qwen2.5-7B-Instruct"));
    let full = trainer(&format!("{SWIFT} --tuner_type full"), 8).plan;
    assert_eq!((full.training.lora, full.training.learning_rate, full.workload.no_master_copy), (None, Some(1e-5), true));
    // Older names, and the number of ranks in the environment.
    let older = trainer(
        "NPROC_PER_NODE=4 swift sft --model_type qwen1half-7b-chat --sft_type full --batch_size 2 --use_flash_attn true",
        8,
    );
    assert_eq!((older.plan.layout.micro_batch, older.plan.training.lora), (2, None));
    assert_eq!(older.plan.workload.attention, Some(AttentionKernel::Flash));
    assert!(older.assumed.iter().any(|note| note.contains("starts 4 ranks")), "{:?}", older.assumed);
    refused(&format!("{SWIFT} --tuner_type longlora"), PlanForm::HuggingFaceTrainer, "--tuner_type longlora");
    refused(&format!("{SWIFT} --quant_method gptq"), PlanForm::HuggingFaceTrainer, "--quant_method gptq");
    refused(&format!("{SWIFT} --use_galore true"), PlanForm::HuggingFaceTrainer, "--use_galore");
    refused("swift rlhf --rlhf_type grpo --model org/m", PlanForm::HuggingFaceTrainer, "foretell plan --method grpo");
    assert_eq!(trainer("swift rlhf --model org/m", 8).plan.workload.preference, Some(Preference::Dpo));
    assert_eq!(
        trainer("swift rlhf --rlhf_type rm --model org/m --tuner_type full", 8).plan.workload.preference,
        Some(Preference::Reward)
    );
}

#[test]
fn ms_swifts_names_of_configurations_are_written_out() {
    for (name, zero, offload) in [
        ("zero1", 1, Offload::None),
        ("zero2_offload", 2, Offload::Optimizer),
        ("zero3", 3, Offload::None),
        ("zero3_offload", 3, Offload::State),
    ] {
        let layout = trainer(&format!("{SWIFT} --deepspeed {name}"), 8).plan.layout;
        assert_eq!((layout.zero, layout.offload), (zero, offload), "{name}");
    }
    assert_eq!(trainer(&format!("{SWIFT} --fsdp fsdp2"), 8).plan.layout.zero, 3);
    let in_place = trainer(&format!("{SWIFT} --deepspeed '{{\"zero_optimization\": {{\"stage\": 1}}}}'"), 8);
    assert_eq!(in_place.plan.layout.zero, 1);
    // The same job from a file, which may be started by its path in the package.
    let file = "model: Qwen/Qwen2.5-7B-Instruct\ndataset: [a#500, b#500]\ntorch_dtype: bfloat16\ndeepspeed: zero3\n";
    let by_file = read_beside(
        "swift sft --config job.yaml".replace("--config ", "").as_str(),
        PlanForm::HuggingFaceTrainer,
        8,
        &[("job.yaml", file)],
    );
    assert_eq!(by_file.expect("it is read").plan, trainer(&format!("{SWIFT} --deepspeed zero3"), 8).plan);
    let by_path = SWIFT.replace("swift sft", "torchrun --nproc_per_node 8 swift/cli/sft.py");
    assert_eq!(trainer(&by_path, 8).plan, trainer(SWIFT, 8).plan);
}

#[test]
fn ms_swift_on_megatron_is_read_with_its_model_by_name() {
    let job = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --expert_model_parallel_size 4 --tensor_model_parallel_size 2 \
               --sequence_parallel true --micro_batch_size 1 --global_batch_size 32 --max_length 8192 --recompute_granularity full \
               --recompute_method uniform --recompute_num_layers 1";
    let read = |text: &str| read_beside(text, PlanForm::MegatronArguments, 8, &[]);
    let imported = read(job).expect("it is sound");
    let layout = &imported.plan.layout;
    assert_eq!((layout.data, layout.tensor, layout.expert, layout.expert_tensor, layout.zero), (2, 2, 2, Some(1), 1));
    assert_eq!((imported.plan.global_batch, imported.plan.precision, imported.sequence), (32, DataType::Bf16, Some(8192)));
    assert_eq!(imported.unknown_model.as_deref(), Some("Qwen/Qwen3-30B-A3B"));
    refused(&format!("{job} --tuner_type lora"), PlanForm::MegatronArguments, "--method lora");
    refused(job, PlanForm::HuggingFaceTrainer, "foretell import megatron-args");
    // So are experts beside a model that is named elsewhere.
    let sizes = "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 32 --bf16 --expert-model-parallel-size 4";
    assert_eq!(read(sizes).expect("it is sound").plan.layout.expert, 4);
}

const OPEN_RLHF: &str = "--pretrain meta-llama/Meta-Llama-3-8B --dataset d --train_batch_size 256 --micro_train_batch_size 2 --zero_stage 3 --bf16 \
                         --flash_attn --learning_rate 5e-6 --gradient_checkpointing --max_len 4096 --packing_samples";

#[test]
fn openrlhfs_flags_are_a_trainers_with_deepspeed() {
    let older = trainer(&format!("deepspeed --module openrlhf.cli.train_sft {OPEN_RLHF} --adam_offload"), 8);
    let plan = &older.plan;
    assert_eq!((plan.layout.micro_batch, plan.global_batch, plan.layout.zero), (2, 256, 3));
    assert_eq!((plan.layout.offload, plan.layout.recompute.clone()), (Offload::Optimizer, Recompute::Full));
    assert_eq!((plan.workload.attention, plan.training.beta2, older.sequence), (Some(AttentionKernel::Flash), 0.95, Some(4096)));
    assert!(older.unread.is_empty(), "{:?}", older.unread);
    let newer = "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path meta-llama/Meta-Llama-3-8B --data.dataset d \
                 --train.batch_size 256 --train.micro_batch_size 2 --ds.zero_stage 3 --ds.param_dtype bf16 --adam.lr 5e-6 \
                 --model.gradient_checkpointing_enable --data.max_len 4096 --ds.packing_samples --ds.adam_offload";
    assert_eq!(trainer(newer, 8).plan, *plan);
    // Ranks of a ring share samples, so a step has more micro-batches.
    let ring = trainer(&format!("deepspeed --module openrlhf.cli.train_dpo {OPEN_RLHF} --ring_attn_size 4 --beta 0.1"), 8).plan;
    assert_eq!((ring.layout.data, ring.layout.context, ring.layout.context_method), (2, 4, ContextMethod::Ring));
    assert_eq!((ring.global_batch, ring.workload.preference), (256, Some(Preference::Dpo)));
    let adapters =
        trainer(&format!("deepspeed --module openrlhf.cli.train_rm {OPEN_RLHF} --lora_rank 16 --load_in_4bit"), 8).plan;
    assert_eq!((adapters.training.lora.map(|lora| lora.rank), adapters.workload.base_bits), (Some(16), Some(4)));
    let launch = "deepspeed --module openrlhf.cli";
    for (text, expected) in [
        (format!("{launch}.train_sft {OPEN_RLHF} --ds_tensor_parallel_size 2"), "--ds_tensor_parallel_size 2"),
        (format!("{launch}.train_sft {}", OPEN_RLHF.replace("256", "250")), "no multiple of 2 samples on 8 ranks"),
        (format!("{launch}.train_sft {OPEN_RLHF} --optim lion"), "--optim lion"),
        (format!("{launch}.train_dpo {OPEN_RLHF} --ref_offload"), "--ref_offload"),
        (format!("{launch}.train_ppo_ray {OPEN_RLHF}"), "--method ppo"),
    ] {
        refused(&text, PlanForm::HuggingFaceTrainer, expected);
    }
}

#[test]
fn internvls_scripts_recompute_under_a_name_of_their_own() {
    let script = "torchrun internvl_chat_finetune.py --model_name_or_path org/m --conv_style x --force_image_size 448 --max_dynamic_patch 6 \
                  --freeze_llm False --freeze_mlp False --freeze_backbone True --per_device_train_batch_size 4 --bf16 True --output_dir o";
    let imported = trainer(script, 8);
    assert_eq!(imported.plan.layout.recompute, Recompute::Full);
    assert_eq!(imported.plan.training.frozen, NamePatterns::from_iter(["vision*"]));
    assert!(imported.assumed.iter().any(|note| note.contains("how many patches")), "{:?}", imported.assumed);
    assert_eq!(trainer(&format!("{script} --grad_checkpoint False"), 8).plan.layout.recompute, Recompute::None);
    assert_eq!(trainer(&format!("{script} --grad_checkpoint True"), 8).plan.layout.recompute, Recompute::Full);
}

const RECIPE: &str = "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, v_proj], lora_rank: 8, lora_alpha: 16}\n\
                      tokenizer: {max_seq_len: 2048}\nbatch_size: 2\nclip_grad_norm: 1.0\noptimizer: {_component_: torch.optim.AdamW, lr: 3e-4}\n\
                      loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss, num_output_chunks: 8}\ngradient_accumulation_steps: 8\ndtype: bf16\n";

#[test]
fn tune_run_changes_its_recipe() {
    let run = |words: &str| {
        let command = format!("tune run --nnodes 1 --nproc_per_node 8 lora_finetune_distributed --config recipe.yaml {words}");
        read_beside(&command, PlanForm::Torchtune, 8, &[("recipe.yaml", RECIPE)])
    };
    let own = read_beside(RECIPE, PlanForm::Torchtune, 8, &[]).expect("it is sound").plan;
    assert_eq!(run("").expect("it is sound").plan, own);
    let changed =
        run("batch_size=4 optimizer.lr=1e-5 model.lora_rank=32 ~clip_grad_norm tokenizer.max_seq_len=4096").expect("it is sound");
    assert_eq!((changed.plan.layout.micro_batch, changed.plan.global_batch), (4, 256));
    assert_eq!((changed.plan.training.learning_rate, changed.plan.training.clip_norm), (Some(1e-5), None));
    assert_eq!((changed.plan.training.lora.map(|lora| lora.rank), changed.sequence), (Some(32), Some(4096)));
    // A component's name alone stands for the component.
    let plain = run("loss=torch.nn.CrossEntropyLoss ~loss.num_output_chunks").expect("it is sound").plan;
    assert_ne!(plain.workload.loss, own.workload.loss);
    for (words, expected) in [
        ("batch_size=$B", "`batch_size=$B`"),
        ("~no_such_setting", "`~no_such_setting`"),
        ("enable_fancy_offload=True", "`enable_fancy_offload: true`"),
        ("stray words", "the word `stray`"),
    ] {
        let error = run(words).map(|imported| imported.plan).expect_err(words);
        assert!(error.contains(expected) && error.contains("hint: "), "{words}: {error}");
    }
    refused(
        "tune run full_finetune_single_device --config llama3_1/8B_full_single_device",
        PlanForm::Torchtune,
        "tune cp llama3_1/8B_full",
    );
    refused("tune run lora_dpo_distributed --config recipe.yaml", PlanForm::HuggingFaceTrainer, "foretell import torchtune");
}

#[test]
fn sequences_that_ranks_share_by_heads_are_read_under_every_name() {
    let zero3 = "{\"zero_optimization\": {\"stage\": 3}, \"bf16\": {\"enabled\": \"auto\"}}";
    let layout = |text: &str, form: PlanForm| {
        read_beside(text, form, 8, &[("z3.json", zero3), ("ds.yaml", ACCELERATE_DEEPSPEED)])
            .unwrap_or_else(|error| panic!("{text}: {error}"))
            .plan
    };
    let trainer = PlanForm::HuggingFaceTrainer;
    let base = "per_device_train_batch_size: 1\noutput_dir: o\nbf16: true\n";
    let by_heads = [
        (format!("{base}deepspeed: z3.json\nparallelism_config: {{sp_size: 4, sp_backend: deepspeed, dp_shard_size: 2}}\n"), trainer),
        (format!("{base}deepspeed: z3.json\nparallelism_config_sp_size: 4\n"), trainer),
        (format!("{base}stage: sft\nfinetuning_type: full\ndeepspeed: z3.json\nsequence_parallel_size: 4\nsequence_parallel_mode: ulysses\n"), trainer),
        (format!("{SWIFT} --tuner_type full --deepspeed zero3 --sequence_parallel_size 4"), trainer),
        ("accelerate launch --config_file ds.yaml finetune.py --sequence_parallel_size 4 --per_device_train_batch_size 1 --output_dir o".into(), trainer),
        ("{\"train_micro_batch_size_per_gpu\": 1, \"sequence_parallel_size\": 4, \"zero_optimization\": {\"stage\": 3}}".into(), PlanForm::Deepspeed),
        (format!("{ACCELERATE_DEEPSPEED}parallelism_config: {{parallelism_config_sp_size: 4}}\n"), PlanForm::Accelerate),
        (
            "torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --bf16 --ds-sequence-parallel-size 4".into(),
            PlanForm::MegatronArguments,
        ),
    ];
    for (text, form) in by_heads {
        let plan = layout(&text, form);
        let Layout { data, context, context_method, .. } = plan.layout;
        assert_eq!((data, context, context_method), (2, 4, ContextMethod::AllToAll), "{text}");
        // Ranks of a sequence have the same samples.
        let at_once = plan.layout.micro_batch * data;
        assert_eq!((plan.global_batch % at_once, plan.global_batch < 8 * at_once + 8), (0, true), "{text}");
        let is_zero3 = form != PlanForm::MegatronArguments;
        assert_eq!(plan.layout.zero == 3, is_zero3, "{text}");
    }
    let ring = [
        format!("{base}base_model: org/m\nmicro_batch_size: 1\ndeepspeed: z3.json\ncontext_parallel_size: 4\n"),
        format!("{base}stage: sft\nfinetuning_type: full\nsequence_parallel_size: 4\nsequence_parallel_mode: zigzag-ring\n"),
    ];
    for text in ring {
        let layout =
            layout(&text.replace("per_device_train_batch_size: 1\noutput_dir: o\nbf16: true\nbase", "bf16: true\nbase"), trainer)
                .layout;
        assert_eq!((layout.data, layout.context, layout.context_method), (2, 4, ContextMethod::Ring), "{text}");
    }
    for (more, expected) in [
        ("parallelism_config: {sp_size: 4}\n", "with DeepSpeed alone"),
        ("deepspeed: {zero_optimization: {stage: 3}}\nparallelism_config: {cp_size: 4}\n", "DeepSpeed shards nothing"),
        ("parallelism_config: {sp_size: 2, cp_size: 2}\n", "two axes shard a sequence"),
        ("parallelism_config: {sp_size: 4, sp_backend: other}\n", "`sp_backend: other`"),
        (
            "deepspeed: {zero_optimization: {stage: 3}, sequence_parallel_size: 2}\nparallelism_config: {sp_size: 4}\n",
            "the job's arguments say 4",
        ),
    ] {
        refused(&format!("{base}{more}"), trainer, expected);
    }
}

const ACCELERATE_DEEPSPEED: &str =
    "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\nnum_machines: 1\ndeepspeed_config: {zero_stage: 3}\n";

#[test]
fn sequences_shared_by_heads_go_back_into_deepspeeds_file() {
    let llama = Model::named("llama3-8b").expect("in the zoo");
    let layout = Layout { data: 2, context: 4, context_method: ContextMethod::AllToAll, zero: 3, ..Layout::default() };
    let plan = Plan::new(layout, 8);
    let job = export_job(&Job { name: "m", model: &llama, plan: &plan, devices_per_node: 8 }, Framework::Deepspeed)
        .expect("it has that");
    let (_, text) = &job.files[0];
    assert!(text.contains("\"sequence_parallel_size\": 4"), "{text}");
    let read = import_plan(text, PlanForm::Deepspeed, 8).expect("it reads back").plan.layout;
    assert_eq!((read.data, read.context, read.context_method, read.zero), (2, 4, ContextMethod::AllToAll, 3));
    let ring = Plan { layout: Layout { context_method: ContextMethod::Ring, ..plan.layout.clone() }, ..plan };
    assert!(export_job(&Job { name: "m", model: &llama, plan: &ring, devices_per_node: 8 }, Framework::Deepspeed).is_err());
}

#[test]
fn a_published_configuration_is_known_without_its_file() {
    let axolotl = "base_model: org/m\nmicro_batch_size: 1\nsequence_len: 512\nbf16: true\ndeepspeed: ";
    let read = |name: &str, files: &[(&str, &str)]| {
        read_beside(&format!("{axolotl}{name}\n"), PlanForm::HuggingFaceTrainer, 8, files)
            .unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let imported = read("deepspeed_configs/zero3_bf16_cpuoffload_all.json", &[]);
    assert_eq!((imported.plan.layout.zero, imported.plan.layout.offload), (3, Offload::State));
    assert!(imported.assumed.iter().any(|note| note.contains("as it is published")), "{:?}", imported.assumed);
    let known = read("/w/examples/deepspeed/ds_z2_config.json", &[]);
    assert_eq!((known.plan.layout.zero, known.plan.layout.bucket), (2, Bytes::new(2_000_000_000)));
    // Its own file counts where there is one, and others are not guessed.
    let own =
        read("deepspeed_configs/zero2.json", &[("deepspeed_configs/zero2.json", "{\"zero_optimization\": {\"stage\": 1}}")]);
    assert_eq!(own.plan.layout.zero, 1);
    let other = read("configs/my_zero3.json", &[]);
    assert!(other.plan.layout.zero == 0 && other.assumed.iter().any(|note| note.contains("not followed")), "{:?}", other.assumed);
}

#[test]
fn a_stated_bucket_is_stated_even_if_it_is_our_default() {
    let text =
        |bucket: &str| format!("{{\"train_micro_batch_size_per_gpu\": 1, \"zero_optimization\": {{\"stage\": 2{bucket}}}}}");
    let read = |bucket: &str| import_plan(&text(bucket), PlanForm::Deepspeed, 8).expect("it is sound");
    let own = read(", \"reduce_bucket_size\": 6553600");
    assert_eq!((own.plan.layout.bucket, own.states_bucket), (Layout::default().bucket, true));
    assert!(!read("").states_bucket && !read(", \"reduce_bucket_size\": \"auto\"").states_bucket);
}

#[test]
fn experts_of_ms_swift_are_those_of_a_model_that_has_some() {
    let layout = |model: &str| {
        let job = format!(
            "NPROC_PER_NODE=8 megatron sft --model {model} --tensor_model_parallel_size 2 --micro_batch_size 1 --global_batch_size 8 \
             --max_length 2048"
        );
        read_beside(&job, PlanForm::MegatronArguments, 8, &[]).map(|imported| imported.plan.layout)
    };
    for model in ["Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B", "org/a-model"] {
        let layout = layout(model).expect(model);
        assert_eq!((layout.tensor, layout.data, layout.expert, layout.expert_tensor), (2, 4, 1, None), "{model}");
    }
    for model in ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "deepseek-ai/DeepSeek-V3"] {
        assert!(layout(model).expect_err(model).contains("experts on 1 x 1 ranks"), "{model}");
    }
}

#[test]
fn a_recipe_of_preferences_says_so_by_its_loss() {
    let recipe =
        |more: &str| format!("per_device_train_batch_size: 1\noutput_dir: o\nbf16: true\nmax_length: 512\nbeta: 0.1\n{more}");
    for (loss, preference) in [("sigmoid", Preference::Dpo), ("ipo", Preference::Dpo), ("kto", Preference::Kto)] {
        let imported = trainer(&recipe(&format!("loss_type: {loss}\n")), 8);
        assert_eq!(imported.plan.workload.preference, Some(preference), "{loss}");
    }
    // Several trainers share these.
    refused(&recipe(""), PlanForm::HuggingFaceTrainer, "trl dpo --config FILE");
    refused(&recipe("loss_type: hinge_of_our_own\n"), PlanForm::HuggingFaceTrainer, "trl dpo --config FILE");
    let script = trainer("python run_dpo.py --beta 0.1 --loss_type hinge --bf16 True --output_dir o", 8);
    assert_eq!(script.plan.workload.preference, Some(Preference::Dpo));
}

#[test]
fn changes_of_a_nemo_recipe_are_named() {
    let changes = "torchrun megatron_gpt_pretraining.py --config-name x trainer.devices=8 ++model.tensor_model_parallel_size=2";
    refused(changes, PlanForm::MegatronArguments, "changes a recipe of NeMo");
    refused("nemo llm pretrain --factory llama3_8b trainer.max_steps=1", PlanForm::MegatronArguments, "`nemo llm`");
}

#[test]
fn what_a_script_sources_counts_and_loops_over_braces_are_run() {
    const SCRIPT: &str = "#!/bin/bash\nsource ~/.bashrc\nsource $(dirname $0)/sizes.sh\nEXTRA=\nfor n in {1..2}; do EXTRA=\"$EXTRA --save-interval $n\"; done\n\
                          torchrun pretrain_gpt.py --tensor-model-parallel-size ${TP:-1} --num-layers 2 --hidden-size 64 \
                          --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size $MBS \
                          --global-batch-size 16 --vocab-size 1000 --bf16 $EXTRA\n";
    let sizes = ("sizes.sh", "export TP=4\nMBS=2\n");
    let imported = read_beside(SCRIPT, PlanForm::MegatronArguments, 8, &[sizes]).unwrap();
    assert_eq!((imported.plan.layout.tensor, imported.plan.layout.micro_batch), (4, 2));
    assert!(imported.assumed.iter().any(|note| note.contains("`source ./sizes.sh`: the file")), "{:?}", imported.assumed);
    assert!(!imported.assumed.iter().any(|note| note.contains("bashrc")), "{:?}", imported.assumed);
    let error = read_beside(SCRIPT, PlanForm::MegatronArguments, 8, &[]).unwrap_err();
    assert!(error.contains("$MBS"), "{error}");
    let stated = SCRIPT.replace("$MBS", "1");
    let alone = read_beside(&stated, PlanForm::MegatronArguments, 8, &[]).unwrap();
    assert_eq!(alone.plan.layout.tensor, 1);
    assert!(alone.assumed.iter().any(|note| note.contains("sizes.sh`: there is no such file")), "{:?}", alone.assumed);
}
