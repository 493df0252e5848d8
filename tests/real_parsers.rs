//! Exported plans are given to the programs that read them: the frameworks' own parsers and Slurm.
//! A test says in one line what is missing here, and passes.
//!
//! `FORETELL_FRAMEWORKS_PYTHON` names the Python that has the frameworks; else it is `python3`.
//! `FORETELL_MEGATRON_LM` names a checkout of Megatron-LM, whose argument parser is then asked too.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

/// Says why a test checks nothing here, past the test runner's capture.
fn skip(test: &str, missing: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {missing}");
}

fn python() -> String {
    std::env::var("FORETELL_FRAMEWORKS_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// Runs a script of `benches/` on the program under test.
fn script(python: &str, name: &str, arguments: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches").join(name);
    let mut command = Command::new(python);
    command.arg(script).args(["--foretell", env!("CARGO_BIN_EXE_foretell")]).args(arguments);
    command.output().expect("the interpreter starts")
}

fn text(output: &[u8]) -> String {
    String::from_utf8_lossy(output).into_owned()
}

/// Gives the exported jobs of a framework to its parser. The script's output must have each of
/// `expected`.
fn accepts(framework: &str, modules: &str, expected: &[&str]) {
    let python = python();
    let import = format!("import torch, transformers, {modules}");
    let found = Command::new(&python).args(["-c", &import]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        return skip(
            framework,
            &format!("`{python}` cannot import torch, transformers, {modules} (pip; FORETELL_FRAMEWORKS_PYTHON)"),
        );
    }
    let checkout = std::env::var("FORETELL_MEGATRON_LM").ok();
    let of_checkout = checkout.as_deref().map_or(vec![], |checkout| vec!["--megatron-lm", checkout]);
    let output = script(&python, "framework_parsers.py", &[&["--only", framework][..], &of_checkout].concat());
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    for line in expected {
        assert!(printed.lines().any(|printed| printed.trim() == *line), "no `{line}` in\n{printed}");
    }
}

#[test]
fn the_tools_of_fine_tuning_read_the_exported_jobs() {
    let of_trl = [
        "trl: accepted",
        "trl-zero: accepted",
        "DPOConfig 2 8192 False 0.0003 None",
        "ORPOConfig 2 8192 True 0.0003 CAUSAL_LM",
        "KTOConfig 2 8192 True 0.0003 CAUSAL_LM",
        "RewardConfig 2 8192 True 0.0003 SEQ_CLS",
    ];
    accepts("trl", "trl, peft", &of_trl);
    let of_axolotl = [
        "axolotl: accepted",
        "dpo None 2 8192 adamw_torch_fused True",
        "orpo lora 2 8192 adamw_torch_fused False",
        "kto lora 2 8192 adamw_torch_fused False",
        "reward lora 2 8192 adamw_torch_fused False",
    ];
    accepts("axolotl", "axolotl.utils.schemas.config", &of_axolotl);
    let of_llama_factory = [
        "llamafactory: accepted",
        "2 8192 False lora dpo sigmoid True",
        "2 8192 False lora dpo orpo False",
        "2 8192 False lora kto sigmoid False",
        "2 8192 False lora rm sigmoid False",
    ];
    accepts("llamafactory", "llamafactory.hparams", &of_llama_factory);
    let of_torchtune = [
        "torchtune: accepted",
        "full_dpo_distributed DPOLoss 2 8192 0.0003 True",
        "lora_dpo_distributed DPOLoss 2 8192 0.0003 True",
        "lora_dpo_single_device DPOLoss 2 8192 0.0003 True",
    ];
    accepts("torchtune", "torchtune.config", &of_torchtune);
}

#[test]
fn megatron_core_reads_the_exported_pipeline_layout() {
    let layouts = [
        "chunks by stage: [[7], [9], [9], [9]]",
        "megatron: accepted",
        "chunks by stage: [[9, 8], [8, 9]]",
        "megatron-interleaved: accepted",
    ];
    accepts("megatron", "megatron.core.transformer.pipeline_parallel_layer_layout", &layouts);
}

#[test]
fn torchtitans_config_manager_reads_the_exported_job() {
    let jobs =
        ["parallelism: 4 2 2 FullAC.Config", "torchtitan: accepted", "parallelism: 4 1 1 NoneType", "torchtitan-fsdp: accepted"];
    accepts("torchtitan", "torchtitan.config.manager", &jobs);
}

#[test]
fn deepspeeds_own_config_reads_the_exported_job() {
    accepts("deepspeed", "deepspeed.runtime.config", &["stage 3 micro-batch 2 adamw", "deepspeed: accepted"]);
}

#[test]
fn accelerates_config_loader_reads_the_exported_job() {
    accepts(
        "accelerate",
        "accelerate.commands.config.config_args",
        &["DistributedType.FSDP 8 2 OptimizerNames.ADAMW_TORCH_FUSED", "accelerate: accepted"],
    );
}

#[test]
fn a_real_slurm_would_start_the_exported_job() {
    let missing: Vec<&str> = ["sbatch", "slurmctld", "slurmd", "munged"]
        .into_iter()
        .filter(|program| Command::new(program).arg("--version").output().is_err())
        .collect();
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    if !missing.is_empty() || !is_root {
        let missing = if is_root { missing.join(", ") + " are not installed" } else { "only root can start its daemons".into() };
        return skip("Slurm", &format!("{missing} (Debian's slurmctld, slurmd, slurm-client and munge)"));
    }
    let output = script("python3", "one_machine_slurm.py", &["--test-only"]);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    assert!(printed.contains("using 2 processors on nodes n[1-2]"), "{printed}");
}
