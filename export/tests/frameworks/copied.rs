//! Scripts that people copy from one another, whose names and defaults are not a framework's:
//! alpaca-lora's, `qlora.py`, Firefly's, and scripts that train on preferences under other names.

use foretell_export::{ImportedPlan, PlanForm, Surroundings, import_plan};
use foretell_program::{NamePatterns, Preference, Recompute};
use foretell_units::diagnostic::one_line;

const JOB: &str =
    "--model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 --model_max_length 1024 --bf16 --output_dir o";

fn read_beside(text: &str, ranks: usize, files: &[(&str, &str)]) -> Result<ImportedPlan, String> {
    let file = |name: &str| {
        let name = name.trim_start_matches("./");
        files.iter().find(|(known, _)| *known == name).map(|(_, text)| text.to_string())
    };
    let surroundings = Surroundings { file: &file, ..Surroundings::from(ranks) };
    import_plan(text, PlanForm::HuggingFaceTrainer, surroundings).map_err(|error| one_line(&error))
}

fn read(text: &str) -> ImportedPlan {
    read_beside(text, 8, &[]).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refused(text: &str, expected: &str) {
    let error = read_beside(text, 8, &[]).map(|imported| imported.plan).expect_err(text);
    assert!(error.contains(expected) && error.contains("hint: "), "{text}: {error}");
}

fn is_noted(imported: &ImportedPlan, part: &str) -> bool {
    imported.assumed.iter().any(|note| note.contains(part))
}

#[test]
fn flags_of_alpaca_lora_are_adapters_and_its_batch_is_a_steps() {
    let script = "python finetune.py --base_model org/llama --micro_batch_size 4 --batch_size 128 --cutoff_len 512 --lora_r 8 \
                  --lora_alpha 16 --lora_target_modules '[q_proj,v_proj]' --output_dir o";
    let imported = read(script);
    let lora = imported.plan.training.lora.as_ref().expect("adapters");
    assert_eq!((lora.rank, lora.alpha, imported.sequence), (8, 16, Some(512)));
    assert_eq!((imported.plan.layout.micro_batch, imported.plan.global_batch), (4, 128));
    assert!(is_noted(&imported, "`--batch_size 128`: samples of a step"), "{:?}", imported.assumed);
    let minimal = read("python finetune.py --base_model org/llama --data_path d --output_dir o --bf16");
    assert_eq!((minimal.plan.layout.micro_batch, minimal.plan.global_batch, minimal.sequence), (4, 128, Some(256)));
    assert_eq!((minimal.plan.training.lora.map(|lora| lora.rank), minimal.plan.workload.base_bits), (Some(8), Some(8)));
    // LLaMA-Factory's flags without its script are no job of its either.
    let own = read(&format!("python train.py {JOB} --finetuning_type lora --lora_r 8"));
    assert_eq!(own.plan.layout.recompute, Recompute::None);
}

#[test]
fn qlora_trains_adapters_beside_four_bits_unless_it_is_told_otherwise() {
    let imported = read("python qlora.py --model_name_or_path org/m --source_max_len 384 --target_max_len 128");
    let lora = imported.plan.training.lora.as_ref().expect("adapters");
    assert_eq!((lora.rank, imported.plan.workload.base_bits, imported.sequence), (64, Some(4), Some(512)));
    assert_eq!((imported.plan.layout.micro_batch, imported.plan.global_batch), (1, 128));
    assert_eq!(imported.plan.layout.recompute, Recompute::Full);
    assert!(is_noted(&imported, "defaults of `qlora.py`"), "{:?}", imported.assumed);
    let all = read("python qlora.py --model_name_or_path org/m --lora_modules all --bits 8");
    assert_eq!(
        (all.plan.training.lora.map(|lora| lora.targets), all.plan.workload.base_bits),
        (Some(lora.targets.clone()), Some(8))
    );
    assert!(
        read("python qlora.py --model_name_or_path org/m --full_finetune --bits 16 --output_dir o").plan.training.lora.is_none()
    );
}

#[test]
fn names_of_scripts_and_settings_say_what_is_trained_on() {
    for (script, preference) in [
        ("train_dpo.py", Preference::Dpo),
        ("src/finetune_dpo_trainer.py --dpo_beta 0.1 --dpo_loss sigmoid", Preference::Dpo),
        ("rm.py", Preference::Reward),
        ("train_reward_model.py", Preference::Reward),
        ("orpo_training.py", Preference::Orpo),
        ("run_simpo.py", Preference::Orpo),
        ("train-kto.py", Preference::Kto),
        ("train.py --dpo_beta 0.1", Preference::Dpo),
        ("train.py --beta 0.1 --loss_type sigmoid", Preference::Dpo),
    ] {
        let imported = read(&format!("torchrun --nproc_per_node 8 {script} {JOB}"));
        assert_eq!(imported.plan.workload.preference, Some(preference), "{script}");
        assert!(is_noted(&imported, "`workload.preference`"), "{script}: {:?}", imported.assumed);
    }
    for script in ["grpo.py", "train_ppo.py", "train_gkd.py", "distill.py"] {
        refused(&format!("python {script} {JOB}"), "trains by rewards or from a teacher");
    }
    refused(&format!("python train.py {JOB} --reward_funcs accuracy"), "by rewards");
    for text in [format!("python train_distilbert.py {JOB}"), format!("python train.py {JOB} --experiment_name lora")] {
        assert_eq!(read(&text).plan.workload.preference, None, "{text}");
    }
    // A setting of another method's name alone does not change what a tool trains.
    refused("base_model: org/m\nmicro_batch_size: 1\norpo_alpha: 0.1\nbf16: true\n", "orpo_alpha");
    refused(&format!("python train_sft.py {JOB} --orpo_alpha 0.1"), "orpo_alpha");
}

#[test]
fn launches_say_how_many_ranks_they_start() {
    for (launch, ranks) in [
        ("deepspeed --include localhost:0,1 train.py", 2),
        ("accelerate launch --gpu_ids 0,1,2 train.py", 3),
        ("CUDA_VISIBLE_DEVICES=0 python train.py", 1),
        ("export CUDA_VISIBLE_DEVICES=0,1,2,3\naccelerate launch train.py", 4),
        ("mpirun -np 16 python train.py", 16),
        ("srun -N 2 --ntasks-per-node=8 python train.py", 16),
        ("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=4\nsrun python train.py", 16),
    ] {
        let imported = read(&format!("#!/bin/bash\n{launch} {JOB}"));
        assert!(is_noted(&imported, &format!("starts {ranks} ranks")), "{launch}: {:?}", imported.assumed);
    }
    // `torchrun` starts one rank unless it is told otherwise. What a later command sees is its own.
    for silent in [
        "export CUDA_VISIBLE_DEVICES=0,1\ntorchrun train.py",
        "srun -N 2 python -m torch.distributed.run --nproc_per_node=8 --nnodes=$SLURM_NNODES train.py",
    ] {
        let imported = read(&format!("#!/bin/bash\n{silent} {JOB}"));
        assert!(!is_noted(&imported, "ranks"), "{silent}: {:?}", imported.assumed);
    }
    let later = read(&format!("#!/bin/bash\ndeepspeed train.py {JOB}\nCUDA_VISIBLE_DEVICES=0 python eval.py --ckpt o"));
    assert!(!is_noted(&later, "starts 1 ranks"), "{:?}", later.assumed);
    let inner = format!("python train.py {JOB}");
    let started = read_beside("srun -N 2 --ntasks-per-node=8 bash in.sh", 8, &[("in.sh", &inner)]).expect("it is read");
    assert!(is_noted(&started, "starts 16 ranks"), "{:?}", started.assumed);
    let same = read(&format!("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 deepspeed train.py {JOB}"));
    assert!(!is_noted(&same, "ranks"), "{:?}", same.assumed);
}

#[test]
fn adapters_under_unknown_names_and_other_methods_are_refused() {
    let job = format!("python train.py {JOB}");
    refused(&format!("{job} --finetune_type lora"), "may say that adapters are trained");
    refused(&format!("{job} --pre_seq_len 128 --quantization_bit 4"), "trained prefixes are not planned");
    refused(&format!("{job} --num_virtual_tokens 20"), "trained prefixes are not planned");
    refused(&format!("{job} --lora_enable True --lora_r 8 --freeze_vision_tower False"), "trained whole");
    let frozen = read(&format!("{job} --lora_enable True --lora_r 8 --freeze_vision_tower True")).plan.training.frozen;
    assert_eq!(frozen, NamePatterns::from_iter(["vision*"]));
    let quantised = read("python train.py --model_name_or_path org/m-7b-GPTQ-Int4 --lora_r 8 --bf16 --output_dir o").plan;
    assert_eq!(quantised.workload.base_bits, Some(4));
    let own_file = format!("{job} --use_lora --lora_config lora.json");
    let imported = read_beside(&own_file, 8, &[("lora.json", r#"{"lora_r": 32, "lora_alpha": 16}"#)]).expect("it is read");
    assert_eq!(imported.plan.training.lora.map(|lora| lora.rank), Some(32));
    refused(&own_file, "rank is its own default");
    for (mode, bits) in [("lora", None), ("qlora", Some(4))] {
        let recipe = format!(r#"{{"model_name_or_path": "org/m", "train_mode": "{mode}", "bf16": true, "output_dir": "o"}}"#);
        let plan = read(&recipe).plan;
        assert_eq!((plan.training.lora.map(|lora| lora.rank), plan.workload.base_bits), (Some(64), bits), "{mode}");
    }
    let contradicting = format!("{job} --deepspeed ds.json");
    let error = read_beside(&contradicting, 8, &[("ds.json", r#"{"fp16": {"enabled": true}}"#)]).expect_err("they differ");
    assert!(error.contains("`--bf16` beside `fp16.enabled: true`"), "{error}");
}

#[test]
fn scripts_find_files_beside_them_and_say_what_they_leave_out() {
    let file = ("ds.json", r#"{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}"#);
    for folder in ["DIR=$(cd \"$(dirname \"$0\")\" && pwd)", "DIR=$(dirname ${BASH_SOURCE[0]})", "DIR=$(pwd)", "DIR=$PWD"] {
        let script = format!("{folder}\ndeepspeed --num_gpus 8 train.py --deepspeed $DIR/ds.json {JOB}");
        let imported = read_beside(&script, 8, &[file]).unwrap_or_else(|error| panic!("{folder}: {error}"));
        assert_eq!(imported.plan.layout.zero, 3, "{folder}");
    }
    let two = read(&format!("#!/bin/bash\ntorchrun --nproc_per_node 8 train.py {JOB}\npython second.py --bf16 --output_dir p"));
    assert!(is_noted(&two, "also starts `second.py`"), "{:?}", two.assumed);
    let commented = read(&format!(
        "python sft.py {JOB} \\\n  --use_peft True --lora_target_modules q_proj v_proj `# memory` \\\n  --lora_r 8"
    ));
    assert_eq!(commented.plan.training.lora.map(|lora| lora.rank), Some(8));
    let quoted = read(&format!(
        "torchrun train.py {JOB} --gradient_checkpointing --gradient_checkpointing_kwargs '{{\"use_reentrant\": false}}'"
    ));
    assert_eq!(quoted.plan.layout.recompute, Recompute::Full);
    let wrapper = "DATA=x.json # the data\nbash train.sh $DATA 2";
    refused(wrapper, "`train.sh`, a script that does not lie beside this one");
    let inner = format!("torchrun --nproc_per_node 8 train.py {JOB} --data_path $1 --gradient_accumulation_steps $2");
    let imported = read_beside(wrapper, 8, &[("train.sh", &inner)]).expect("it is read");
    assert_eq!(imported.plan.global_batch, 64);
    for (test, batch) in [("if [ -n \"$6\" ]; then A=$6; else A=4; fi", 128), ("[ -z \"$A\" ] && A=2", 64)] {
        let imported = read(&format!("#!/bin/bash\n{test}\ntorchrun train.py {JOB} --gradient_accumulation_steps $A"));
        assert_eq!(imported.plan.global_batch, batch, "{test}");
        assert!(is_noted(&imported, "is taken to have no value"), "{:?}", imported.assumed);
    }
}

#[test]
fn scripts_that_call_themselves_end() {
    let script = format!("f() {{ f; f; f; f; }}\nsource own.sh\nsource own.sh\nf\ntorchrun train.py {JOB}");
    let imported = read_beside(&script, 8, &[("own.sh", script.as_str())]).expect("it is read");
    assert!(is_noted(&imported, "calls itself, or runs loops, too often"), "{:?}", imported.assumed);
}

#[test]
fn scripts_that_are_run_have_variables_of_their_own() {
    let launch = format!("torchrun train.py {JOB} --gradient_accumulation_steps");
    let batch = |text: &str, files: &[(&str, &str)]| read_beside(text, 8, files).expect(text).plan.global_batch;
    let sets = ("set.sh", "A=16\n");
    assert_eq!(batch(&format!("A=1\nbash set.sh\n{launch} $A"), &[sets]), 32);
    assert_eq!(batch(&format!("A=1\nsource ./set.sh\n{launch} $A"), &[sets]), 512);
    let inner = format!("{launch} ${{A:-1}}");
    let inner = ("in.sh", inner.as_str());
    assert_eq!(batch("A=4\nbash in.sh", &[inner]), 32);
    assert_eq!(batch("export A=4\nbash in.sh", &[inner]), 128);
    assert_eq!(batch("A=4 bash in.sh", &[inner]), 128);
    // The script's own launch goes before others.
    let own = read_beside(&format!("bash prep.sh\n{launch} 2"), 8, &[("prep.sh", "python prep.py --in x --out y\n")]);
    assert_eq!(own.expect("it is read").plan.global_batch, 64);
    // Files of this machine are not the job's.
    let absolute =
        read_beside(&format!("A=1\nsource /set.sh\n{launch} $A"), 8, &[("/set.sh", "A=16\n"), sets]).expect("it is read");
    assert_eq!(absolute.plan.global_batch, 32);
    assert!(is_noted(&absolute, "there is no such file"), "{:?}", absolute.assumed);
    // A folder above the script's is another one.
    let above = format!("D=$(dirname $(dirname $0))\ndeepspeed train.py --deepspeed $D/ds.json {JOB}");
    refused(&above, "--deepspeed");
    let long = format!("A=x\nfor i in {{1..40}}; do A=\"$A$A\"; done\n{launch} $A");
    refused(&long, "is not a whole number");
}
