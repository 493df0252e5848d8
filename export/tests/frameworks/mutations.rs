//! A value that decides what is planned is read or refused: with another one the plan is another,
//! or the import fails. Nothing that a file states vanishes.

mod texts;

use foretell_export::{ImportedPlan, PlanForm, import_plan};
use foretell_models::Model;
use foretell_program::{Offload, Optimizer, Plan};
use foretell_units::DataType;
use foretell_units::diagnostic::one_line;
use proptest::prelude::*;
use texts::{
    ACCELERATE, ACCELERATE_ZERO, AXOLOTL, DEEPSPEED, INTERN_VL, LLAMA_FACTORY, MEGATRON, MEGATRON_SWIFT, OPEN_RLHF, SWIFT,
    TORCHTITAN, TORCHTUNE, TRAINER,
};

/// What was read of a text for 8 ranks.
fn read(text: &str, form: PlanForm) -> Result<(Plan, Option<Model>), String> {
    import_plan(text, form, 8).map(|imported| (imported.plan, imported.model)).map_err(|error| one_line(&error))
}

/// Texts in a file of a form, and what replaces them. Each replacement decides what is planned.
type Changes = &'static [(&'static str, &'static str)];

const CASES: [(PlanForm, &str, Changes); 12] = [
    (
        PlanForm::MegatronArguments,
        MEGATRON,
        &[
            ("--num-layers 12", "--num-layers 24"),
            ("--hidden-size 1024", "--hidden-size 2048"),
            ("--num-experts 8", "--num-experts 16"),
            ("--num-experts 8", ""),
            ("topk 2", "topk 4"),
            ("([1]*12)", "([0]*3+[1]*9)"),
            ("* 4)) --bf16", "* 8)) --bf16"),
            (" --bf16", " --fp16"),
            (" --bf16", " --bf16 --fp8-format hybrid"),
            (" --bf16", " --bf16 --fp8-format hybrid --fp8-param-gather"),
            (" --bf16", " --bf16 --grad-reduce-in-bf16"),
            (" --bf16", " --bf16 --exp-avg-dtype bf16"),
            ("TP:-2", "TP:-4"),
            ("TP=${TP:-2}", ""),
            ("parallel-size $TP", "parallel-size $TENSOR"),
            ("--vocab-size 32000", "--tokenizer-type HuggingFaceTokenizer"),
            ("--swiglu", "--swiglu --group-query-attention --num-query-groups 4"),
            ("--swiglu", "--swiglu --multi-latent-attention --kv-lora-rank 64"),
            ("--swiglu", "--swiglu --mtp-num-layers 1"),
            ("--swiglu", "--swiglu --qk-layernorm"),
            ("--swiglu", ""),
            ("--swiglu", "--swiglu --pipeline-model-parallel-size 2"),
            ("--swiglu", "--swiglu --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4"),
            ("--swiglu", "--swiglu --pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split"),
            ("--swiglu", "--swiglu --context-parallel-size 2"),
            ("--swiglu", "--swiglu --recompute-granularity full --recompute-method uniform"),
            ("--swiglu", "--swiglu --recompute-granularity selective --recompute-modules mlp"),
            ("--swiglu", "--swiglu --optimizer-cpu-offload"),
            ("--swiglu", "--swiglu --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
            ("--swiglu", "--swiglu --optimizer muon"),
            ("--swiglu", "--swiglu --squared-relu"),
            ("--swiglu", "--swiglu $MORE"),
            ("--swiglu", "--swiglu yes"),
            ("--expert-model-parallel-size 2", "--expert-model-parallel-size 4"),
            ("--expert-model-parallel-size 2", "--expert-model-parallel-size 3"),
            ("--use-distributed-optimizer", ""),
            ("\"${MOE_ARGS[@]}\"", ""),
        ],
    ),
    (
        PlanForm::Torchtitan,
        TORCHTITAN,
        &[
            ("\"8B\"", "\"70B\""),
            ("local_batch_size = 2", "local_batch_size = 4"),
            ("local_batch_size = 2", "batch_size = 4"),
            ("seq_len = 4096", "seq_len = 8192"),
            ("shard_degree = -1", "shard_degree = 1\ndata_parallel_replicate_degree = 2"),
            ("tensor_parallel_degree = 2", "tensor_parallel_degree = 4"),
            ("tensor_parallel_degree = 2", "tensor_parallel_degree = 2\ncontext_parallel_degree = 2"),
            ("[optimizer]", "[experimental]\ncontext_parallel_degree = 2\n[optimizer]"),
            ("[optimizer]", "[experimental]\nsome_parallel_degree = 2\n[optimizer]"),
            ("[optimizer]", "[float8]\nenable_float8_linear = true\n[optimizer]"),
            ("flavor = \"8B\"", "flavor = \"8B\"\nconverters = [\"float8\"]"),
            ("flavor = \"8B\"", "flavor = \"8B\"\nconverters = [\"mx\"]"),
            ("seq_len = 4096", "seq_len = 4096\nenable_cpu_offload = true"),
            ("seq_len = 4096", "seq_len = 4096\ndtype = \"bfloat16\""),
            ("seq_len = 4096", "seq_len = 4096\nmixed_precision_reduce = \"bfloat16\""),
            ("pipeline_parallel_degree = 2", ""),
            ("\"1F1B\"", "\"Interleaved1F1B\""),
            ("\"1F1B\"", "\"ZBVZeroBubble\""),
            ("\"1F1B\"", "\"1F1B\"\npipeline_parallel_split_points = [\"layers.4\"]"),
            ("\"selective\"", "\"full\""),
            ("\"selective\"", "\"selective\"\nselective_ac_option = \"2\""),
            ("\"AdamW\"", "\"Adam\""),
            ("\"AdamW\"", "\"AdamW\"\nearly_step_in_backward = true"),
        ],
    ),
    (
        PlanForm::Deepspeed,
        DEEPSPEED,
        &[
            ("_per_gpu\": 2", "_per_gpu\": 4"),
            ("steps\": 4", "steps\": 8"),
            ("steps\": 4", "steps\": 4, \"train_batch_size\": 128"),
            ("\"stage\": 2", "\"stage\": 3"),
            ("\"stage\": 2", "\"stage\": \"3\""),
            ("\"stage\": 2", "\"stage\": 2, \"cpu_offload\": true"),
            ("\"stage\": 2", "\"stage\": 2, \"mics_shard_size\": 4"),
            ("\"stage\": 2", "\"stage\": 2, \"zero_hpz_partition_size\": 8"),
            ("\"stage\": 2", "\"stage\": 2, \"zero_quantized_weights\": true"),
            ("\"stage\": 2", "\"stage\": 2, \"offload_param\": {\"device\": \"cpu\"}"),
            ("5e8", "2e8"),
            ("5e8", "\"many\""),
            ("\"none\"", "\"cpu\""),
            ("\"none\"", "\"nvme\""),
            ("{\"enabled\": true}", "{\"enabled\": false}"),
            ("{\"enabled\": true}", "{\"enabled\": true, \"bf16_optimizer_states\": true}"),
            ("{\"enabled\": true}", "{\"enabled\": true}, \"fp16\": {\"enabled\": true}"),
            ("{\"enabled\": true}", "{\"enabled\": true}, \"data_types\": {\"grad_accum_dtype\": \"bf16\"}"),
            ("{\"enabled\": true}", "{\"enabled\": true}, \"tensor_parallel\": {\"autotp_size\": 2}"),
            ("{\"enabled\": true}", "{\"enabled\": true}, \"sequence_parallel_size\": 2"),
            ("\"AdamW\"", "\"SGD\""),
            ("\"AdamW\"", "\"OneBitAdam\""),
        ],
    ),
    (
        PlanForm::HuggingFaceTrainer,
        TRAINER,
        &[
            ("batch_size\": 2", "batch_size\": 4"),
            ("steps\": 4", "steps\": 8"),
            ("\"bf16\": true", "\"bf16\": false"),
            ("\"bf16\": true", "\"fp16\": true"),
            ("adamw_torch", "adamw_8bit"),
            ("adamw_torch", "adafactor"),
            ("\"gradient_checkpointing\": true", "\"gradient_checkpointing\": false"),
            ("\"full_shard auto_wrap\"", "\"shard_grad_op auto_wrap\""),
            ("\"full_shard auto_wrap\"", "[\"shard_grad_op\"]"),
            ("\"full_shard auto_wrap\"", "[\"full_shard\", \"offload\"]"),
            ("\"full_shard auto_wrap\"", "[]"),
            ("\"full_shard auto_wrap\"", "true, \"fsdp_config\": {\"reshard_after_forward\": false}"),
            ("\"full_shard auto_wrap\"", "true, \"fsdp_config\": {\"fsdp_offload_params\": true}"),
            ("\"full_shard auto_wrap\"", "\"\", \"parallelism_config\": {\"tp_size\": 2}"),
            (
                "\"full_shard auto_wrap\", \"weight_decay\": 0.1, \"deepspeed\": null",
                "[], \"deepspeed\": {\"zero_optimization\": {\"stage\": 1}}",
            ),
            ("\"deepspeed\": null", "\"deepspeed\": {\"zero_optimization\": {\"stage\": 1}}"),
            ("\"deepspeed\": null", "\"use_peft\": true"),
        ],
    ),
    (
        PlanForm::Accelerate,
        ACCELERATE_ZERO,
        &[
            ("zero_stage: 3", "zero_stage: 2"),
            ("offload_optimizer_device: none", "offload_optimizer_device: cpu"),
            ("mixed_precision: bf16", "mixed_precision: fp16"),
            ("num_processes: 8", "num_processes: 4"),
            ("accumulation_steps: 4", "accumulation_steps: 8"),
            ("deepspeed_config:", "parallelism_config: {sp_size: 2}\ndeepspeed_config:"),
            ("deepspeed_config:", "parallelism_config: {tp_size: 2}\ndeepspeed_config:"),
            ("deepspeed_config:", "parallelism_config: {cp_size: 2}\ndeepspeed_config:"),
        ],
    ),
    (
        PlanForm::Torchtune,
        TORCHTUNE,
        &[
            ("llama3_1_8b", "llama3_1_70b"),
            ("lora_llama", "qlora_llama"),
            ("lora_llama", "llama"),
            ("lora_rank: 8", "lora_rank: 16"),
            ("apply_lora_to_mlp: true", "apply_lora_to_mlp: false"),
            ("batch_size: 2", "batch_size: 4"),
            ("steps: 8", "steps: 4"),
            ("max_seq_len: 2048", "max_seq_len: 4096"),
            ("dtype: bf16", "dtype: fp32"),
            ("AdamW", "AdamW8bit"),
            ("AdamW", "Muon"),
            ("CEWithChunkedOutputLoss", "DPOLoss"),
            ("checkpointing: false", "checkpointing: true"),
            ("checkpointing: false", "checkpointing: false\nfsdp_cpu_offload: true"),
            ("checkpointing: false", "checkpointing: false\noptimizer_in_bwd: true"),
            ("checkpointing: false", "checkpointing: false\ntensor_parallel_dim: 2"),
            ("lora_alpha: 16", "lora_alpha: 16, use_dora: true"),
        ],
    ),
    (
        PlanForm::HuggingFaceTrainer,
        AXOLOTL,
        &[
            ("micro_batch_size: 2", "micro_batch_size: 4"),
            ("steps: 4", "steps: 8"),
            ("adapter: qlora", "adapter: lora"),
            ("adapter: qlora", "adapter: ia3"),
            ("lora_r: 32", "lora_r: 64"),
            ("target_linear: true", "target_linear: false"),
            ("optimizer: adamw_torch_fused", "optimizer: paged_adamw_8bit"),
            ("optimizer: adamw_torch_fused", "optimizer: muon"),
            ("bf16: true", "fp16: true"),
            ("gradient_checkpointing: true", "gradient_checkpointing: false"),
            ("gradient_checkpointing: true", "gradient_checkpointing: offload"),
            ("sequence_len: 4096", "sequence_len: 4096\ncontext_parallel_size: 2"),
            ("sequence_len: 4096", "sequence_len: 4096\nsequence_parallel_degree: 2"),
            ("sequence_len: 4096", "sequence_len: 4096\ntensor_parallel_size: 2"),
            ("sequence_len: 4096", "sequence_len: 4096\nrl: dpo"),
            ("sequence_len: 4096", "sequence_len: 4096\ndeepspeed: deepspeed_configs/zero3.json"),
            ("sequence_len: 4096", "sequence_len: 4096\nfsdp: [full_shard]"),
            ("sequence_len: 4096", "sequence_len: 4096\nunfrozen_parameters: [lm_head]"),
        ],
    ),
    (
        PlanForm::HuggingFaceTrainer,
        LLAMA_FACTORY,
        &[
            ("stage: sft", "stage: dpo"),
            ("stage: sft", "stage: ppo"),
            ("finetuning_type: lora", "finetuning_type: full"),
            ("finetuning_type: lora", "finetuning_type: freeze"),
            ("lora_rank: 8", "lora_rank: 16"),
            ("lora_target: all", "lora_target: q_proj"),
            ("batch_size: 1", "batch_size: 2"),
            ("steps: 8", "steps: 16"),
            ("bf16: true", "pure_bf16: true"),
            ("bf16: true", "bf16: true\nquantization_bit: 4"),
            ("bf16: true", "bf16: true\ndisable_gradient_checkpointing: true"),
            ("bf16: true", "bf16: true\nflash_attn: fa2"),
            ("bf16: true", "bf16: true\nenable_liger_kernel: true"),
            ("bf16: true", "bf16: true\nuse_galore: true"),
            ("bf16: true", "bf16: true\nsequence_parallel_size: 2"),
            ("bf16: true", "bf16: true\nsequence_parallel_size: 2\nsequence_parallel_mode: zigzag-ring"),
            ("bf16: true", "bf16: true\ndeepspeed: examples/deepspeed/ds_z2_config.json"),
        ],
    ),
    (
        PlanForm::HuggingFaceTrainer,
        SWIFT,
        &[
            ("swift sft", "swift rlhf"),
            ("swift sft", "swift rlhf --rlhf_type kto"),
            ("lora_rank 8", "lora_rank 16"),
            ("train_type lora", "train_type full"),
            ("train_type lora", "train_type adalora"),
            ("batch_size 2", "batch_size 4"),
            ("steps 4", "steps 8"),
            ("bfloat16", "float16"),
            ("zero2", "zero3"),
            ("zero2", "zero2_offload"),
            ("zero2", "zero2 --sequence_parallel_size 2"),
            ("zero2", "zero2 --deepspeed_autotp_size 2"),
            ("zero2", "zero2 --zero_hpz_partition_size 4"),
            ("zero2", "zero2 --gradient_checkpointing false"),
            ("zero2", "zero2 --quant_method bnb --quant_bits 4"),
            ("zero2", "zero2 --optim adafactor"),
            ("zero2", "zero2 --attn_impl flash_attn"),
            ("zero2", "zero2 --freeze_parameters_ratio 0.5"),
            ("zero2", "zero2 --use_dora true"),
            ("zero2", "$ZERO"),
        ],
    ),
    (
        PlanForm::HuggingFaceTrainer,
        OPEN_RLHF,
        &[
            ("train_sft", "train_dpo"),
            ("train_sft", "train_rm"),
            ("train_sft", "train_ppo_ray"),
            ("micro_train_batch_size 2", "micro_train_batch_size 4"),
            ("train_batch_size 128", "train_batch_size 256"),
            ("zero_stage 2", "zero_stage 3"),
            ("--bf16", "--ds.param_dtype fp16"),
            ("--bf16", "--bf16 --adam_offload"),
            ("--bf16", "--bf16 --ring_attn_size 2"),
            ("--bf16", "--bf16 --ds_tensor_parallel_size 2"),
            ("--bf16", "--bf16 --zpg 8"),
            ("--bf16", "--bf16 --grad_accum_dtype bf16"),
            ("--bf16", "--bf16 --lora_rank 8"),
            ("--bf16", "--bf16 --optim muon"),
            ("--bf16", "--bf16 --use_liger_kernel"),
            ("--gradient_checkpointing", ""),
            ("--flash_attn", "--attn_implementation eager"),
        ],
    ),
    (
        PlanForm::MegatronArguments,
        MEGATRON_SWIFT,
        &[
            ("tensor_model_parallel_size 2", "tensor_model_parallel_size 4"),
            ("expert_model_parallel_size 4", "expert_model_parallel_size 2"),
            ("micro_batch_size 1", "micro_batch_size 2"),
            ("global_batch_size 32", "global_batch_size 64"),
            ("--sequence_parallel true", "--sequence_parallel false"),
            ("recompute_granularity full --recompute_method uniform", "recompute_granularity selective"),
            ("--max_length 8192", "--max_length 8192 --pipeline_model_parallel_size 2"),
            ("--max_length 8192", "--max_length 8192 --context_parallel_size 2"),
            ("--max_length 8192", "--max_length 8192 --tuner_type lora"),
            ("--max_length 8192", "--max_length 8192 --optimizer_cpu_offload true"),
            ("--max_length 8192", "--max_length 8192 --fp8_format hybrid"),
            ("--max_length 8192", "--max_length 8192 --use_distributed_optimizer false"),
            ("megatron sft", "megatron rlhf"),
        ],
    ),
    (
        PlanForm::HuggingFaceTrainer,
        INTERN_VL,
        &[
            ("batch_size 4", "batch_size 2"),
            ("--freeze_backbone True", "--freeze_backbone False"),
            ("--freeze_llm False", "--freeze_llm True"),
            ("--freeze_llm False", "--freeze_llm True --use_llm_lora 16"),
            ("--freeze_llm False", "--freeze_llm False --use_backbone_lora 16"),
            ("--freeze_llm False", "--freeze_llm False --grad_checkpoint False"),
            ("--freeze_llm False", "--freeze_llm False --unfreeze_vit_layers 2"),
            ("--bf16 True", "--fp16 True"),
        ],
    ),
];

#[test]
fn a_value_that_decides_the_plan_is_read_or_refused() {
    let mut kept = Vec::new();
    for (form, text, changes) in CASES {
        let original = read(text, form).unwrap_or_else(|error| panic!("{form:?}: {error}"));
        for (old, new) in changes {
            assert!(text.contains(old), "{form:?} has `{old}`");
            let changed = read(&text.replacen(old, new, 1), form);
            if changed.as_ref() == Ok(&original) {
                kept.push(format!("{form:?}: `{old}` as `{new}`"));
            } else if let Err(error) = changed
                && !error.contains("hint: ")
            {
                kept.push(format!("{form:?}: `{new}` without a hint: {error}"));
            }
        }
    }
    assert!(kept.is_empty(), "{kept:#?}");
}

#[test]
fn a_published_script_is_read_as_its_shell_expands_it() {
    let (plan, model) = read(MEGATRON, PlanForm::MegatronArguments).expect("it is sound");
    let layout = &plan.layout;
    assert_eq!((layout.data, layout.tensor, layout.expert, layout.zero, plan.global_batch), (2, 2, 2, 1, 32));
    assert_eq!(plan.precision, DataType::Bf16);
    let decoder = model.and_then(|model| model.as_decoder()).expect("a decoder");
    assert_eq!((decoder.layers, decoder.mixtures.map(|mixtures| mixtures.experts)), (12, Some(8)));
    // What a branch adds is left out and said if it decides nothing, and an error otherwise.
    let adding =
        |words: &str| MEGATRON.replace("torchrun", &format!("if [ -n \"$W\" ]; then\n MOE_ARGS+=(\n{words}\n)\nfi\ntorchrun"));
    let with_more = imported(&adding("--wandb-project ${P:-x}"), PlanForm::MegatronArguments);
    assert_eq!(with_more.plan, plan);
    assert!(with_more.assumed.iter().any(|note| note.contains("--wandb-project")), "{:?}", with_more.assumed);
    read(&adding("--moe-extended-tp"), PlanForm::MegatronArguments).expect_err("it decides the layout");
    // What a branch assigns is not known.
    let branch = MEGATRON.replace("TP=${TP:-2}", "if [ -n \"$BIG\" ]; then TP=8; fi");
    let error = read(&branch, PlanForm::MegatronArguments).expect_err("unknown");
    assert!(error.contains("`--tensor-model-parallel-size $TP`") && error.contains("as the shell expands it"), "{error}");
}

fn imported(text: &str, form: PlanForm) -> ImportedPlan {
    import_plan(text, form, 8).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn what_a_file_leaves_open_is_the_frameworks_and_is_said() {
    let auto = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "fp16":
        {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}}"#;
    let filled = imported(auto, PlanForm::Deepspeed);
    assert_eq!((filled.plan.precision, filled.plan.optimizer), (DataType::Bf16, Optimizer::AdamW));
    assert_eq!((filled.plan.layout.micro_batch, filled.plan.training.learning_rate), (8, Some(5e-5)));
    let said = filled.assumed.join("\n");
    assert!(said.contains("`precision` bf16") && said.contains("`micro_batch` 8"), "{said}");
    // Inside a Trainer's arguments they are its own, and need no note.
    let inside = format!(r#"{{"per_device_train_batch_size": 3, "model_max_length": 512, "fp16": true, "deepspeed": {auto}}}"#);
    let filled = imported(&inside, PlanForm::HuggingFaceTrainer);
    assert_eq!((filled.plan.precision, filled.plan.layout.micro_batch), (DataType::Fp16, 3));
    assert!(filled.assumed.iter().all(|note| note.starts_with("`stack` ")), "{:?}", filled.assumed);
    let nvme = DEEPSPEED.replace("\"none\"", "\"nvme\"");
    assert_eq!(imported(&nvme, PlanForm::Deepspeed).plan.layout.offload, Offload::Optimizer);
}

#[test]
fn accelerates_configuration_is_read_or_refused() {
    let plan = imported(ACCELERATE, PlanForm::Accelerate).plan;
    assert_eq!((plan.layout.zero, plan.precision), (3, DataType::Bf16));
    for (old, new) in [
        ("FULL_SHARD", "SHARD_GRAD_OP"),
        ("FULL_SHARD", "HYBRID_SHARD_ZERO2"),
        ("offload_params: false", "offload_params: true"),
        ("num_processes: 8", "num_processes: 16"),
        ("precision: bf16", "precision: fp16"),
        ("type: FSDP", "type: MULTI_GPU"),
        ("type: FSDP", "type: MEGATRON_LM"),
        ("fsdp_config:\n", "parallelism_config:\n  tp_size: 2\nfsdp_config:\n"),
        ("fsdp_config:\n", "fsdp_config:\n  fsdp_activation_checkpointing: true\n"),
    ] {
        let changed = read(&ACCELERATE.replacen(old, new, 1), PlanForm::Accelerate);
        assert!(
            changed.is_ok_and(|changed| changed.0 != plan)
                || read(&ACCELERATE.replacen(old, new, 1), PlanForm::Accelerate).is_err(),
            "{new}"
        );
    }
    let deepspeed = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n";
    let plan = imported(deepspeed, PlanForm::Accelerate).plan;
    assert_eq!((plan.layout.zero, plan.layout.offload), (3, Offload::Optimizer));
}

#[test]
fn what_a_framework_refuses_is_refused() {
    let heads = "--num-layers 4 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 500 --micro-batch-size 1 --bf16";
    for (more, expected) in [
        ("--tensor-model-parallel-size 8", "12 attention heads cannot be divided by `tensor` 8"),
        ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2", "2 key and value heads"),
        ("--context-parallel-size 8 --seq-length 1000", "twice `context`"),
        ("--pipeline-model-parallel-size 8", "4 layers cannot be divided by 8 stages"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "2 layers of a stage"),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2", "cannot be divided by 3 other stages"),
        ("--global-batch-size 12", "no multiple of 1 samples on 8 ranks"),
        ("--max-position-embeddings 512", "exceeds `--max-position-embeddings 512`"),
        ("--fp16", "`--bf16` beside `--fp16`"),
    ] {
        let error = read(&format!("{heads} {more}"), PlanForm::MegatronArguments).expect_err(more);
        assert!(error.contains(expected) && error.contains("hint: "), "{more}: {error}");
    }
    let sequence = TORCHTITAN.replace("seq_len = 4096", "seq_len = 4095");
    let error = read(&sequence, PlanForm::Torchtitan).expect_err("it does not divide");
    assert!(error.contains("torchtitan refuses this plan: 4095 positions"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// An unknown setting at any depth is refused or listed, and never lost.
    #[test]
    fn no_setting_vanishes(name in "wib[a-z_]{1,12}", depth in 0usize..3, value in 1u32..1000, decides in any::<bool>()) {
        let name = if decides { format!("{name}_parallel_size") } else { name };
        let nested = (0..depth).fold(format!("{value}"), |inner, level| format!("{{\"wobble{level}\": {inner}}}"));
        let json = [(PlanForm::Deepspeed, DEEPSPEED), (PlanForm::HuggingFaceTrainer, TRAINER)];
        let mut texts: Vec<(PlanForm, String)> =
            json.map(|(form, text)| (form, text.replacen('{', &format!("{{\"{name}\": {nested},"), 1))).to_vec();
        texts.push((PlanForm::MegatronArguments, MEGATRON.replace("--swiglu", &format!("--swiglu --{} {value}", name.replace('_', "-")))));
        texts.push((PlanForm::Torchtitan, TORCHTITAN.replace("[optimizer]", &format!("[wibble.more]\n{name} = {value}\n[optimizer]"))));
        for (form, text) in texts {
            match import_plan(&text, form, 8) {
                Ok(imported) => {
                    let is_listed = imported.unread.iter().any(|line| line.replace('-', "_").contains(&name) && line.contains(&value.to_string()));
                    prop_assert!(is_listed && !decides, "{:?}: {:?}", form, imported.unread);
                }
                Err(error) => prop_assert!(decides && one_line(&error).replace('-', "_").contains(&name), "{:?}: {}", form, error),
            }
        }
    }
}

#[test]
fn torchtitans_settings_of_what_is_off_configure_nothing() {
    let off = TORCHTITAN.replace(
        "[optimizer]",
        "[float8]\nfilter_fqns = [\"output\"]\n[quantize.grouped_mm.float8]\nfqns = [\"experts\"]\n[optimizer]",
    );
    assert_eq!(imported(&off, PlanForm::Torchtitan).plan, imported(TORCHTITAN, PlanForm::Torchtitan).plan);
    let narrow = imported(&TORCHTITAN.replace("seq_len = 4096", "seq_len = 4096\ndtype = \"bfloat16\""), PlanForm::Torchtitan);
    assert!(narrow.plan.workload.no_master_copy);
    assert!(read(&TORCHTITAN.replace("seq_len = 4096", "seq_len = 4096\ndtype = \"float16\""), PlanForm::Torchtitan).is_err());
}
