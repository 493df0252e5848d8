//! Jobs as people start them: shells within shells, functions, recipes beside flags, launches
//! beside recipes, and tools whose defaults a file leaves open.

use foretell_export::{ImportedPlan, PlanForm, Surroundings, import_plan};
use foretell_program::{MomentFormat, NamePatterns, Offload, Optimizer, Preference, Recompute};
use foretell_units::DataType;
use foretell_units::diagnostic::one_line;

const MODEL: &str = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 \
                     --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000";

fn read(text: &str, form: PlanForm) -> Result<ImportedPlan, String> {
    read_in(text, form, Surroundings::from(8))
}

fn read_in(text: &str, form: PlanForm, surroundings: Surroundings<'_>) -> Result<ImportedPlan, String> {
    import_plan(text, form, surroundings).map_err(|error| one_line(&error))
}

fn trainer(text: &str) -> ImportedPlan {
    read(text, PlanForm::HuggingFaceTrainer).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn says(imported: &ImportedPlan, part: &str) -> bool {
    imported.assumed.iter().any(|note| note.contains(part))
}

#[test]
fn an_inner_shell_expands_what_its_script_exports() {
    let script = |inner: &str| {
        format!(
            "LAUNCHER=\"torchrun --nproc_per_node 8\"\nexport CMD=\"pretrain_gpt.py {MODEL} --tensor-model-parallel-size 4 \
             --pipeline-model-parallel-size 2\"\nsrun --jobid 1 {inner}\n"
        )
    };
    for inner in ["bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD'", "bash -lc \"$LAUNCHER $CMD\" 2>&1"] {
        let layout = read(&script(inner), PlanForm::MegatronArguments).expect(inner).plan.layout;
        assert_eq!((layout.tensor, layout.pipeline), (4, 2), "{inner}");
    }
}

#[test]
fn functions_have_their_arguments() {
    let script = format!(
        "ARGS=({MODEL})\nrun_megatron() {{\n  local ranks=\"$1\"; shift\n  torchrun --nproc_per_node $ranks pretrain_gpt.py \"$@\"\n}}\n\
         run_megatron 8 \"${{ARGS[@]}}\" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2\n"
    );
    let layout = read(&script, PlanForm::MegatronArguments).expect("it is sound").plan.layout;
    assert_eq!((layout.tensor, layout.pipeline), (2, 2));
    // One that calls itself ends, and one that nothing calls is read as it stands.
    let endless = script.replace("run_megatron()", "function run_megatron").replace("local", "run_megatron; local");
    assert_eq!(read(&endless, PlanForm::MegatronArguments).expect("it ends").plan.layout.tensor, 2);
    let sourced = format!("main() {{\n  torchrun pretrain_gpt.py {MODEL} --tensor-model-parallel-size 2\n}}\n");
    assert_eq!(read(&sourced, PlanForm::MegatronArguments).expect("it is read").plan.layout.tensor, 2);
}

#[test]
fn flags_of_other_scripts_are_not_those_of_trl() {
    let lora =
        trainer("torchrun train_lora.py --model_name_or_path org/7b --lora_r 8 --lora_alpha 16 --bf16 True --output_dir o");
    assert_eq!(lora.plan.training.lora.map(|lora| lora.rank), Some(8));
    let full = trainer("torchrun train.py --model_name_or_path org/7b --lora_r 8 --use_lora False --bf16 True --output_dir o");
    assert!(full.plan.training.lora.is_none());
    let glue =
        trainer("python run_glue.py --max_seq_length 128 --per_device_train_batch_size 32 --learning_rate 2e-5 --output_dir o");
    assert_eq!((glue.plan.precision, glue.plan.layout.recompute, glue.sequence), (DataType::Fp32, Recompute::None, Some(128)));
    let unexpanded = read("deepspeed train.py --deepspeed $DS --bf16 True --output_dir o", PlanForm::HuggingFaceTrainer);
    assert!(unexpanded.expect_err("its ZeRO stage is not known").contains("$DS"));
}

#[test]
fn what_a_file_leaves_open_is_its_tools_default() {
    for (text, positions) in [
        ("finetuning_type: lora\nstage: sft\nbf16: true\n", 2048),
        ("base_model: org/7b\nmicro_batch_size: 1\nadapter: lora\nbf16: true\n", 512),
        ("packing: true\ndataset_text_field: text\nbf16: true\n", 1024),
    ] {
        let imported = trainer(text);
        assert_eq!(imported.sequence, Some(positions), "{text}");
        assert!(says(&imported, "default of"), "{:?}", imported.assumed);
    }
    assert!(says(&trainer("packing: true\nbf16: true\nmax_length: 4096\n"), "attention is over whole rows"));
    assert!(says(&trainer("dataset_text_field: text\nbf16: true\nmax_length: 4096\n"), "accelerate launch"));
    let pure =
        trainer("base_model: org/7b\nmicro_batch_size: 1\nsequence_len: 512\nfloat16: false\nbfloat16: true\nfp16: null\n");
    assert!(pure.plan.precision == DataType::Bf16 && pure.plan.workload.no_master_copy);
    assert!(trainer("optim: paged_adamw_8bit\nbf16: true\n").plan.workload.paged_moments);
}

#[test]
fn the_part_that_sees_images_is_frozen_as_the_file_says() {
    let vision = NamePatterns::from_iter(["vision*"]);
    let frozen = |text: &str| trainer(text).plan.training.frozen;
    assert_eq!(frozen("stage: sft\nfinetuning_type: full\nimage_max_pixels: 262144\nbf16: true\n"), vision);
    assert!(frozen("stage: sft\nfinetuning_type: full\nfreeze_vision_tower: false\nbf16: true\n").is_empty());
    assert!(frozen("stage: sft\nfinetuning_type: full\nbf16: true\n").is_empty());
    let script = "torchrun train_qwen.py --bf16 --output_dir o --tune_mm_vision False --tune_mm_mlp True --tune_mm_llm";
    assert_eq!(frozen(&format!("{script} True")), vision);
    let error = read(&format!("{script} False"), PlanForm::HuggingFaceTrainer).expect_err("it trains no text model");
    assert!(error.contains("--tune_mm_llm") && error.contains("frozen"), "{error}");
}

#[test]
fn preferences_are_planned_where_the_file_names_them() {
    let preference = |text: &str| trainer(text).plan.workload.preference;
    assert_eq!(preference("stage: dpo\nfinetuning_type: lora\npref_beta: 0.1\nbf16: true\n"), Some(Preference::Dpo));
    assert_eq!(preference("stage: dpo\nfinetuning_type: full\npref_loss: orpo\nbf16: true\n"), Some(Preference::Orpo));
    assert_eq!(preference("stage: rm\nfinetuning_type: full\nbf16: true\n"), Some(Preference::Reward));
    assert_eq!(preference("base_model: org/7b\nmicro_batch_size: 1\nrl: kto\nbf16: true\n"), Some(Preference::Kto));
    assert_eq!(preference("python run_dpo.py --beta 0.1 --bf16 True --output_dir o"), Some(Preference::Dpo));
    for other in ["stage: ppo\nbf16: true\n", "beta: 0.1\nbf16: true\n", "use_vllm: true\nbf16: true\n"] {
        let error = read(other, PlanForm::HuggingFaceTrainer).expect_err(other);
        assert!(error.contains("foretell plan --method"), "{error}");
    }
}

#[test]
fn a_recipe_stands_beside_its_flags_and_its_launch() {
    let file = |name: &str| {
        match name {
        "recipe.yaml" => Some("bf16: true\nmax_length: 2048\nper_device_train_batch_size: 4\ndataset_text_field: text\n".into()),
        "zero3.yaml" => Some(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nnum_machines: 1\n\
             fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
                .into(),
        ),
        _ => None,
    }
    };
    let surroundings = Surroundings { file: &file, ..Surroundings::from(8) };
    let script = "accelerate launch --config_file zero3.yaml sft.py --config recipe.yaml --per_device_train_batch_size 2";
    let of_script = read_in(script, PlanForm::HuggingFaceTrainer, surroundings).expect("both files are there");
    assert_eq!((of_script.sequence, of_script.plan.layout.micro_batch, of_script.plan.layout.zero), (Some(2048), 2, 3));
    let recipe = file("recipe.yaml").expect("it is there");
    let launched = Surroundings { launch_file: Some("zero3.yaml"), ..surroundings };
    assert_eq!(read_in(&recipe, PlanForm::HuggingFaceTrainer, launched).expect("it is sound").plan.layout.zero, 3);
    let of_cli = read_in("#!/bin/bash\nllamafactory-cli train recipe.yaml\n", PlanForm::HuggingFaceTrainer, surroundings);
    assert_eq!(of_cli.expect("it names a file").plan.layout.micro_batch, 4);
    let of_flags =
        trainer("llamafactory-cli train --stage sft --finetuning_type lora --cutoff_len 1024 --bf16 True --output_dir o");
    assert_eq!((of_flags.sequence, of_flags.plan.training.lora.is_some()), (Some(1024), true));
    let of_trl = read_in("trl sft --config recipe.yaml --output_dir o", PlanForm::HuggingFaceTrainer, surroundings);
    assert_eq!(of_trl.expect("it names a file").sequence, Some(2048));
    let missing = read(script, PlanForm::HuggingFaceTrainer).expect_err("no file is there");
    assert!(missing.contains("recipe.yaml") || missing.contains("zero3.yaml"), "{missing}");
}

#[test]
fn sequences_over_ranks_shard_parameters_and_experts_lie_on_ranks_that_do() {
    let file = |parallelism: &str| {
        format!(
            "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nlocal_batch_size = 1\nseq_len = 32768\n[parallelism]\n{parallelism}\n"
        )
    };
    let layout = |parallelism: &str| read(&file(parallelism), PlanForm::Torchtitan).map(|imported| imported.plan.layout);
    let sharded = layout("data_parallel_shard_degree = 1\ncontext_parallel_degree = 8").expect("it is sound");
    assert_eq!((sharded.context, sharded.zero), (8, 3));
    let experts = layout("data_parallel_shard_degree = 8\nexpert_parallel_degree = 4").expect("it is sound");
    assert_eq!((experts.data, experts.expert, experts.zero), (2, 4, 3));
    let early = read(&format!("{}[optimizer]\nearly_step_in_backward = true\n", file("")), PlanForm::Torchtitan);
    assert!(early.expect("it is read").plan.workload.updates_in_backward);
    let error = layout("data_parallel_shard_degree = 2\ncontext_parallel_degree = 4\nexpert_parallel_degree = 8");
    assert!(error.expect_err("8 experts on 2 ranks").contains("expert_parallel_degree = 8"));
}

#[test]
fn moments_and_updates_of_recipes_are_the_plans() {
    let recipe = |more: &str| {
        let text = format!(
            "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\ntokenizer:\n  max_seq_len: 2048\ndtype: bf16\nbatch_size: 2\n{more}"
        );
        read_in(&text, PlanForm::Torchtune, Surroundings::from(1)).unwrap_or_else(|error| panic!("{more}: {error}")).plan.workload
    };
    let paged = recipe("optimizer:\n  _component_: bitsandbytes.optim.PagedAdamW8bit\n  lr: 2e-5\noptimizer_in_bwd: true\n");
    assert!(paged.paged_moments && paged.updates_in_backward && paged.moments == MomentFormat::EightBit);
    assert!(!recipe("optimizer:\n  _component_: torch.optim.AdamW\n  lr: 2e-5\n").updates_in_backward);
}

#[test]
fn scripts_state_settings_under_other_names_and_defaults() {
    let script = ": \"${MICRO:=2}\"\ntorchrun --nproc_per_node 8 run_clm.py --model_name_or_path org/model --bf16 True --output_dir o \
                  --per_device_train_batch_size $MICRO --block_size 512 --gradient_checkpointing 1";
    let imported = trainer(script);
    let layout = &imported.plan.layout;
    assert_eq!((layout.micro_batch, imported.sequence, &layout.recompute), (2, Some(512), &Recompute::Full));
    let adapters = trainer(
        "python train.py --bf16 True --output_dir o --use_lora True --lora_r 16 --per_device_train_batch_size 1 \
         --target_modules q_proj,down_proj",
    );
    let targets = &adapters.plan.training.lora.expect("adapters").targets;
    assert!(targets.match_name("model.layers.0.mlp.down_proj") && !targets.match_name("model.layers.0.mlp.up_proj"));
}

#[test]
fn fsdps_settings_may_lie_in_a_file() {
    let file = |name: &str| (name == "fsdp.json").then(|| r#"{"activation_checkpointing": true}"#.to_owned());
    let surroundings = Surroundings { file: &file, ..Surroundings::from(8) };
    let text = |path: &str| {
        format!(
            "torchrun train.py --bf16 True --output_dir o --per_device_train_batch_size 1 --fsdp \"full_shard auto_wrap\" --fsdp_config {path}"
        )
    };
    let imported = read_in(&text("fsdp.json"), PlanForm::HuggingFaceTrainer, surroundings).expect("the file is there");
    assert_eq!((imported.plan.layout.zero, imported.plan.layout.recompute), (3, Recompute::Full));
    let error = read_in(&text("none.json"), PlanForm::HuggingFaceTrainer, surroundings).expect_err("no such file");
    assert!(error.contains("fsdp_config: none.json") && error.contains("hint: "), "{error}");
}

#[test]
fn megatrons_older_spellings_are_read() {
    let arguments = MODEL.to_owned() + " --swiglu --normalization rmsnorm --num-key-value-heads 4 --position-embedding-type rope";
    let imported = read(&arguments, PlanForm::MegatronArguments).expect("it is sound");
    let model = imported.model.expect("the arguments say the model");
    assert_eq!(model.as_decoder().expect("a decoder").kv_heads, Some(4));
}

#[test]
fn what_readers_are_to_fill_in_is_one_word() {
    let filled =
        format!("pretrain_gpt.py {MODEL} --tensorboard-dir <TENSORBOARD DIRECTORY> --tensor-model-parallel-size 4 --bf16");
    for script in [format!("torchrun {filled}\n"), format!("RUN=\"{filled}\"\nsrun sh -c \"torchrun ${{RUN}}\"\n")] {
        let plan = read(&script, PlanForm::MegatronArguments).expect(&script).plan;
        assert_eq!((plan.layout.tensor, plan.precision), (4, DataType::Bf16), "{script}");
    }
    let redirected = format!("torchrun pretrain_gpt.py {MODEL} --bf16 <input.txt >out.log 2>&1\n");
    assert_eq!(read(&redirected, PlanForm::MegatronArguments).expect("it is sound").plan.precision, DataType::Bf16);
}

#[test]
fn a_launch_is_found_by_its_module_and_behind_another_tool() {
    let flags = "--mixed_precision bf16 --use_deepspeed --zero_stage 3 train.py --per_device_train_batch_size 1 --output_dir o";
    for launcher in [
        "accelerate launch",
        "uv run python -m accelerate.commands.launch",
        "accelerate-launch",
        "python mason.py --cluster a100 --gpus 8 -- accelerate launch",
    ] {
        let plan = trainer(&format!("{launcher} {flags}\n")).plan;
        assert_eq!((plan.precision, plan.layout.zero), (DataType::Bf16, 3), "{launcher}");
    }
}

#[test]
fn a_script_has_no_arguments_of_its_own() {
    let script = format!(
        "TP=2\nwhile [[ $# -gt 0 ]]; do\n  case $1 in --tp) TP=\"$2\"; shift 2 ;; *) exit 1 ;; esac\ndone\n\
         torchrun pretrain_gpt.py {MODEL} --tensor-model-parallel-size $TP\n"
    );
    let imported = read(&script, PlanForm::MegatronArguments).expect("it is sound");
    assert_eq!(imported.plan.layout.tensor, 2);
    assert!(says(&imported, "without arguments of its own"), "{:?}", imported.assumed);
    // Another loop may be run.
    let other = script.replace("$# -gt 0", "-f more");
    assert!(read(&other, PlanForm::MegatronArguments).is_err());
    let read_text =
        format!("read -r -d '' ARGS <<EOF\n{MODEL} --tensor-model-parallel-size 4\nEOF\ntorchrun pretrain_gpt.py $ARGS\n");
    assert_eq!(read(&read_text, PlanForm::MegatronArguments).expect("it is sound").plan.layout.tensor, 4);
    // A command's output is one value, whatever its text.
    let asked = format!(
        "GPUS=$(($(nvidia-smi --query-gpu=name | wc -l)-2))\ntorchrun --nproc_per_node $GPUS pretrain_gpt.py {MODEL} --train-samples $GPUS\n"
    );
    assert!(read(&asked, PlanForm::MegatronArguments).is_ok(), "{:?}", read(&asked, PlanForm::MegatronArguments));
}

#[test]
fn names_that_scripts_share_mean_what_each_of_them_means() {
    let firefly = "{\"max_seq_length\": 1024, \"per_device_train_batch_size\": 1, \"output_dir\": \"o\", \"lora_rank\": 64, \"train_mode\": \"qlora\"}";
    let plan = trainer(firefly).plan;
    assert_eq!((plan.training.lora.map(|lora| lora.rank), plan.workload.base_bits), (Some(64), Some(4)));
    let full = trainer(&firefly.replace("qlora", "full")).plan;
    assert!(full.training.lora.is_none() && full.workload.base_bits.is_none());
    let recipe = "per_device_train_batch_size: 1\noutput_dir: o\nlearning_rate: 1e-5\n";
    let of_trl = read_in(recipe, PlanForm::HuggingFaceTrainer, Surroundings { tool: Some("trl"), ..Surroundings::from(1) });
    let of_trl = of_trl.expect("it is sound").plan;
    assert_eq!((of_trl.precision, of_trl.layout.recompute), (DataType::Bf16, Recompute::Full));
    assert_eq!(trainer(recipe).plan.precision, DataType::Fp32);
    let intern = trainer(
        "torchrun finetune.py --per_device_train_batch_size 1 --output_dir o --freeze_backbone True --freeze_llm False --bf16 True",
    );
    assert_eq!(intern.plan.training.frozen, NamePatterns::from_iter(["vision*"]));
    let lora = trainer(
        "torchrun finetune.py --per_device_train_batch_size 1 --output_dir o --freeze_llm True --use_llm_lora 16 --bf16 True",
    );
    assert_eq!(lora.plan.training.lora.map(|lora| lora.rank), Some(16));
}

#[test]
fn mixtures_of_megatron_drop_no_token_unless_told_to() {
    let capacity = |more: &str| {
        let text = format!("torchrun pretrain_gpt.py {MODEL} --num-experts 8 --moe-router-topk 2 --swiglu {more}\n");
        let imported = read(&text, PlanForm::MegatronArguments).expect("it is sound");
        serde_json::to_value(imported.model.expect("it has one")).expect("it is JSON").to_string()
    };
    assert!(capacity("").contains("\"capacity_factor\":1.0"), "{}", capacity(""));
    assert!(capacity("--moe-expert-capacity-factor 1.25").contains("\"capacity_factor\":1.25"));
}

#[test]
fn an_arm_of_a_case_is_that_of_its_word() {
    let script = |size: &str| {
        format!(
            "SIZE={size}\nTP=1\ncase $SIZE in\n  7b|8b) TP=2 ;;\n  70b)\n    TP=4\n    ;;\n  *) TP=8 ;;\nesac\n(cd x && ls)\n\
             torchrun pretrain_gpt.py {MODEL} --tensor-model-parallel-size $TP\n"
        )
    };
    for (size, tensor) in [("7b", 2), ("8b", 2), ("70b", 4), ("405b", 8)] {
        let layout = read(&script(size), PlanForm::MegatronArguments).expect(size).plan.layout;
        assert_eq!(layout.tensor, tensor, "{size}");
    }
    let error = read(&script("$1"), PlanForm::MegatronArguments).expect_err("the size is not known");
    assert!(error.contains("TP"), "{error}");
}

#[test]
fn labels_and_towers_are_no_models() {
    let labelled = trainer(
        "torchrun train.py --per_device_train_batch_size 1 --output_dir o --bf16 True --model Qwen/Qwen2.5-7B --model_name swift-robot",
    );
    assert_eq!(labelled.unknown_model.as_deref(), Some("Qwen/Qwen2.5-7B"));
    let llava = read(
        "torchrun train.py --per_device_train_batch_size 1 --output_dir o --bf16 True --vision_tower openai/clip-vit-large-patch14",
        PlanForm::HuggingFaceTrainer,
    );
    assert!(llava.as_ref().is_err_and(|error| error.contains("tower that sees images")), "{llava:?}");
    let simpo = trainer(
        "model_name_or_path: org/7b\nstage: dpo\npref_loss: simpo\nsimpo_gamma: 0.3\nper_device_train_batch_size: 1\noutput_dir: o\n",
    );
    assert_eq!(simpo.plan.workload.preference, Some(Preference::Orpo));
}

#[test]
fn adapters_of_others_scripts_are_read_or_refused() {
    let lora = |more: &str| trainer(&format!("{TRAINER} --output_dir o {more}")).plan.training.lora;
    let names = |names: &[&str]| Some(NamePatterns::from_iter(names.iter().map(|name| format!("*{name}"))));
    let targets = |more: &str| lora(more).map(|lora| lora.targets);
    assert_eq!(
        targets("--lora_rank 64 --trainable q_proj,k_proj,v_proj,o_proj"),
        names(&["q_proj", "k_proj", "v_proj", "o_proj"])
    );
    assert_eq!(targets("--lora_enable True --lora_rank 64 --num_lora_modules -1"), names(&[""]));
    assert_eq!(targets("--lora_r 8"), names(&["q_proj", "v_proj"]));
    // Their one module of queries, keys and values is three layers of our decoders.
    let of_all_three = ["q_proj", "k_proj", "v_proj"];
    assert_eq!(targets("--lora_r 8 --lora_target_modules query_key_value"), names(&of_all_three));
    for (model, target) in [
        ("tiiuae/falcon-7b", &of_all_three[..]),
        ("EleutherAI/pythia-1b", &of_all_three[..]),
        ("bigscience/bloom-560m", &of_all_three[..]),
        ("openai-community/gpt2-xl", &["c_attn"][..]),
    ] {
        let text = format!("{TRAINER} --output_dir o --lora_r 8").replace("Qwen/Qwen3-8B", model);
        assert_eq!(trainer(&text).plan.training.lora.map(|lora| lora.targets), names(target), "{model}");
    }
    let bits = |more: &str| trainer(&format!("{TRAINER} --output_dir o {more}")).plan.workload.base_bits;
    for more in [
        "--q_lora True --lora_r 8",
        "--bits 4 --lora_r 64",
        "--quant_bit 4 --lora_r 8",
        "--use_peft_lora True --lora_r 8 --use_4bit_quantization True",
    ] {
        assert_eq!(bits(more), Some(4), "{more}");
    }
    assert_eq!(bits("--bits 16 --lora_r 8"), None);
    for (more, part) in [
        ("--low_rank_training True", "--lora_r 8"),
        ("--use_lora True", "--lora_r"),
        ("--use_peft_lora True", "--lora_r"),
        ("--bits 4", "--lora_r"),
        ("--lora_enable True --lora_r 8 --num_lora_modules 10", "--num_lora_modules -1"),
    ] {
        let error = read(&format!("{TRAINER} --output_dir o {more}"), PlanForm::HuggingFaceTrainer);
        let error = error.map(|imported| imported.plan).expect_err(more);
        assert!(error.contains(part) && !error.contains("leave it out"), "{more}: {error}");
    }
    assert!(lora("--low_rank_training False").is_none());
}

#[test]
fn a_model_and_a_recipe_have_several_names() {
    for name in ["--model_id", "--pretrain", "--config_name"] {
        let imported = trainer(&format!("{TRAINER} --output_dir o").replace("--model_name_or_path", name));
        assert_eq!(imported.unknown_model.as_deref(), Some("Qwen/Qwen3-8B"), "{name}");
    }
    let both = trainer(&format!("{TRAINER} --output_dir o --config_name other"));
    assert_eq!(both.unknown_model.as_deref(), Some("Qwen/Qwen3-8B"));
    let recipe = "model_name_or_path: org/7b\nbf16: true\nper_device_train_batch_size: 2\noutput_dir: o\nmax_length: 512\n";
    let file = |name: &str| (name == "recipes/sft.yaml").then(|| recipe.to_owned());
    let beside = Surroundings { file: &file, ..Surroundings::from(8) };
    let run = |more: &str| {
        let text = format!("ACCELERATE_LOG_LEVEL=info accelerate launch --num_processes 8 scripts/run_sft.py {more}\n");
        read_in(&text, PlanForm::HuggingFaceTrainer, beside)
    };
    let plan = run("recipes/sft.yaml").expect("it is sound").plan;
    assert_eq!((plan.layout.micro_batch, plan.precision), (2, DataType::Bf16));
    assert_eq!(run("recipes/sft.yaml --per_device_train_batch_size 4").expect("it is sound").plan.layout.micro_batch, 4);
    assert!(run("recipes/none.yaml").map(|imported| imported.plan).expect_err("no file").contains("recipes/none.yaml"));
    let megatron = format!("torchrun pretrain_gpt.py {MODEL} --bf16 --log-optimizer-states-to-tensorboard");
    assert_eq!(read(&megatron, PlanForm::MegatronArguments).expect("it is sound").unread, Vec::<String>::new());
}

#[test]
fn a_deepspeed_file_is_followed_in_place_or_refused_by_name() {
    let inline = read(
        &format!(
            "{TRAINER} --output_dir o --deepspeed '{{\"zero_optimization\": {{\"stage\": 3, \"offload_optimizer\": {{\"device\": \"cpu\"}}}}}}'"
        ),
        PlanForm::HuggingFaceTrainer,
    );
    let plan = inline.expect("it is sound").plan;
    assert_eq!((plan.layout.zero, plan.layout.offload), (3, Offload::Optimizer));
    let broken = format!("{TRAINER} --output_dir o --deepspeed '{{\"zero_optimization\": '");
    assert!(read(&broken, PlanForm::HuggingFaceTrainer).expect_err("it is cut").contains("JSON"));
    let missing = read(&format!("{TRAINER} --output_dir o --deepspeed nowhere.json"), PlanForm::HuggingFaceTrainer);
    let error = missing.map(|imported| imported.plan).expect_err("there is no such file");
    assert!(error.contains("nowhere.json") && error.contains("put it there"), "{error}");
    // A name that tells its stage is noted.
    assert!(says(&trainer(&format!("{TRAINER} --output_dir o --deepspeed ./scripts/zero3.json")), "is not followed"));
}

#[test]
fn megatron_deepspeed_has_its_stage_in_a_file() {
    let job = format!("deepspeed pretrain_gpt.py {MODEL} --bf16 --deepspeed");
    let file = |name: &str| {
        let stage = r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": true},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}"#;
        match name {
            "ds.json" => Some(stage.to_owned()),
            "other.json" => Some(stage.replace("64", "32")),
            _ => None,
        }
    };
    let read = |more: &str| {
        read_in(&format!("{job} {more}"), PlanForm::MegatronArguments, Surroundings { file: &file, ..Surroundings::from(8) })
    };
    let imported = read("--deepspeed_config ds.json --zero-stage 3 --no-pipeline-parallel").expect("it is sound");
    assert_eq!((imported.plan.layout.zero, imported.plan.layout.offload), (3, Offload::State));
    assert_eq!((imported.plan.global_batch, imported.unread), (64, Vec::new()));
    let sharded = read("--deepspeed_config ds.json --tensor-model-parallel-size 2").expect("it is sound").plan.layout;
    assert_eq!((sharded.data, sharded.tensor, sharded.zero), (4, 2, 3));
    for (more, part) in [
        ("--deepspeed_config gone.json", "gone.json"),
        ("", "without `--deepspeed_config`"),
        ("--deepspeed_config other.json", "batches"),
    ] {
        let error = read(more).map(|imported| imported.plan).expect_err(more);
        assert!(error.contains(part) && error.contains("hint: "), "{error}");
    }
    let alone = read_in(
        &format!("{} --zero-stage 1", job.replace(" --deepspeed", "")),
        PlanForm::MegatronArguments,
        Surroundings::from(8),
    );
    assert!(alone.map(|imported| imported.plan).expect_err("no engine").contains("--use-distributed-optimizer"));
}

const TRAINER: &str =
    "torchrun train.py --model_name_or_path Qwen/Qwen3-8B --bf16 True --per_device_train_batch_size 4 --model_max_length 2048";

#[test]
fn a_variable_behind_a_flag_with_its_value_may_hold_any_flags() {
    let megatron = format!("torchrun pretrain_gpt.py {MODEL} --bf16");
    let swift = "swift sft --model org/7b --train_type full --torch_dtype bfloat16";
    let rlhf = "deepspeed --module openrlhf.cli.train_sft --pretrain org/7b --max_len 2048 --bf16";
    let (of_trainer, of_megatron) = (PlanForm::HuggingFaceTrainer, PlanForm::MegatronArguments);
    for (command, form, more) in [
        (TRAINER, of_trainer, "--output_dir o $X"),
        (TRAINER, of_trainer, "--report_to none ${X}"),
        (TRAINER, of_trainer, "--overwrite_output_dir $X"),
        (TRAINER, of_trainer, "--output_dir o --train-mode pretrain $X $Y"),
        (swift, of_trainer, "--output_dir o $X"),
        (rlhf, of_trainer, "--save_path o $X"),
        (rlhf, of_trainer, "--apply_chat_template $X"),
        (&megatron, of_megatron, "--save /s $X"),
        (&megatron, of_megatron, "--data-path /d $X"),
        (&megatron, of_megatron, "--tokenizer-model t $(cat more.args)"),
        (&megatron, of_megatron, "--no-log-loss-scale-to-tensorboard $X"),
    ] {
        let error = read(&format!("{command} {more}\n"), form).map(|imported| imported.plan).expect_err(more);
        assert!(error.contains('$') && error.contains("any arguments") && error.contains("hint: "), "{more}: {error}");
    }
    for branch in ["set -e\n[ -f x ] && X=--fp16", "if [ -n \"$A\" ]; then X=a; else X=b; fi"] {
        let error = read(&format!("{branch}\n{TRAINER} --output_dir o $X\n"), of_trainer).map(|imported| imported.plan);
        assert!(error.expect_err(branch).contains("branch"), "{branch}");
    }
    // A flag's own value may be a variable.
    read(&format!("{TRAINER} --output_dir $OUT --data_path \"$DATA\" --run_name $A-$B\n"), of_trainer).expect("they are values");
    read(&format!("{megatron} --save $DIR --data-path 0.5 $ONE 0.5 $OTHER --load $DIR\n"), of_megatron).expect("they are values");
}

#[test]
fn megatrons_muon_is_read_with_what_a_plan_does_otherwise() {
    let flags =
        "--swiglu --normalization RMSNorm --bf16 --optimizer muon --muon-scale-mode spectral --muon-extra-scale-factor 0.2";
    let imported = read(&format!("{MODEL} {flags} --muon-tp-mode duplicated"), PlanForm::MegatronArguments).expect("it is sound");
    assert_eq!((imported.plan.optimizer, imported.plan.training.momentum), (Optimizer::Muon, 0.95));
    assert!(imported.unread.is_empty(), "{:?}", imported.unread);
    let more = |more: &str| read(&format!("{MODEL} {flags} {more}"), PlanForm::MegatronArguments);
    let assumed = more("--muon-momentum 0.9").expect("it is sound");
    assert_eq!(assumed.plan.training.momentum, 0.9);
    assert!(assumed.assumed.iter().any(|assumption| assumption.contains("blockwise")), "{:?}", assumed.assumed);
    for wrong in ["--muon-num-ns-steps 7", "--muon-scalar-optimizer lion"] {
        let error = more(wrong).expect_err(wrong);
        assert!(error.contains(wrong.split(' ').next().unwrap_or_default()), "{error}");
    }
}
