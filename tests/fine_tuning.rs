//! Fine-tuning as users ask about it: whether it fits, what would, and a table of both.

mod common;

use common::Scratch;
use serde_json::Value;

const JOB: [&str; 7] = ["plan", "--model", "llama3-8b", "--topology", "rtx4090-8", "--sequence", "2048"];

fn planned(scratch: &Scratch, more: &[&str]) -> Value {
    scratch.json(&[&JOB[..], more].concat())
}

#[test]
fn adapters_fit_where_all_parameters_do_not_and_each_offered_change_does() {
    let scratch = Scratch::new();
    scratch.file("short.yaml", "base: llama3-8b\nlayers: 4\n");
    let job = [
        "--model",
        "short.yaml",
        "--topology",
        "rtx4090-8",
        "--sequence",
        "2048",
        "--global-batch",
        "64",
        "--memory-limit",
        "9GB",
    ];
    let output = scratch.run(&[&["plan"], &job[..], &["--method", "full", "--json"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let failure: Value = serde_json::from_slice(&output.stdout).expect("one document");
    let hint = failure["error"]["hint"].as_str().expect("a hint").to_owned();
    let offered: Vec<&str> = hint.split('`').skip(1).step_by(2).collect();
    assert!(offered.iter().any(|change| change.contains("--method lora")), "{hint}");
    for change in offered {
        let method = if change.contains("--method") { Vec::new() } else { vec!["--method", "full"] };
        let more: Vec<&str> = change.split(' ').chain(method).collect();
        // Changes replace what the job says: an option may be given once.
        let stated: Vec<&str> = job.chunks(2).filter(|pair| !more.contains(&pair[0])).flatten().copied().collect();
        let answer = scratch.json(&[&["plan"][..], &stated, &more].concat());
        assert_eq!(answer["predicted"]["fits"], true, "{change}");
    }
}

#[test]
fn a_plan_of_adapters_says_what_fits_and_simulates_to_the_same() {
    let scratch = Scratch::new();
    let answer = planned(&scratch, &["--method", "qlora", "--global-batch", "16", "-o", "best.yaml"]);
    let predicted = &answer["predicted"];
    assert!(predicted["chance_of_running_out"].as_f64().is_some_and(|chance| chance < 0.5), "{predicted}");
    assert!(predicted["memory_peak"].as_str().is_some_and(|peak| peak.contains("allocated")), "{predicted}");
    assert_eq!(answer["plan"]["stack"], "hf-trainer");
    assert_eq!(answer["plan"]["workload"]["base_bits"], 4);
    let simulated = scratch.json(&["simulate", "--plan", "best.yaml"]);
    for field in ["step_seconds", "peak_memory_bytes", "tokens_per_second"] {
        assert_eq!(simulated[field], predicted[field], "{field}");
    }
}

#[test]
fn a_table_has_a_cell_for_each_job_and_longer_sequences_need_more() {
    let scratch = Scratch::new();
    let job = [
        "plan",
        "--model",
        "llama3-8b",
        "--topology",
        "rtx4090-8",
        "--global-batch",
        "8",
        "--fix",
        "data=8,micro_batch=1,recompute=full,zero=0",
    ];
    let answer = scratch.json(&[&job[..], &["--table", "context,method"]].concat());
    let cells = answer["cells"].as_array().expect("a list");
    assert_eq!(cells.len(), 9 * 3);
    let of_lora: Vec<u64> =
        cells.iter().filter(|cell| cell["column"] == "lora").filter_map(|cell| cell["memory_bytes"].as_u64()).collect();
    assert!(of_lora.len() == 9 && of_lora.windows(2).all(|pair| pair[0] <= pair[1]), "{of_lora:?}");
    assert!(cells.iter().any(|cell| cell["fits"] == true) && cells.iter().any(|cell| cell["fits"] == false));
}

#[test]
fn what_only_operator_tables_know_is_refused_elsewhere() {
    let scratch = Scratch::new();
    for more in [
        &["--method", "qlora", "--stack", "megatron-core"][..],
        &["--attention", "eager", "--stack", "fsdp"],
        &["--adapter", "rank=8"],
        // Not traced together: a profile would forget the four bits.
        &["--method", "qlora", "--loss", "chunked"],
        &["--method", "lora", "--fix", "tensor=2"],
        &["--method", "lora", "--adapter", "size=8"],
    ] {
        let output = scratch.run(&[&JOB[..], more].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains("hint: "), "{more:?}: {said}");
    }
}

#[test]
fn the_least_number_of_devices_fits_and_half_of_it_does_not() {
    let scratch = Scratch::new();
    let job = ["plan", "--model", "llama3-8b", "--sequence", "2048", "--method", "full", "--global-batch", "8"];
    let answer = scratch.json(&[&job[..], &["--gpus-needed", "a100-80g,h100"]].concat());
    for kind in answer["kinds"].as_array().expect("a list") {
        let (device, needed) = (kind["device"].as_str().expect("a name"), kind["devices"].as_u64().expect("it fits"));
        assert!(needed > 1, "{kind}");
        let fewer = scratch.run(&[&job[..], &["--topology", &format!("{}x{device}", needed / 2), "--json"]].concat());
        assert_eq!(fewer.status.code(), Some(1), "{device}");
    }
}

#[test]
fn what_disturbs_or_changes_a_step_is_refused_where_operators_predict_it() {
    let scratch = Scratch::new();
    planned(&scratch, &["--method", "qlora", "--global-batch", "8", "-o", "best.yaml"]);
    for more in [["--jitter", "0.1"], ["--what-if", "device.peak*2"]] {
        let output = scratch.run(&[&["simulate", "--plan", "best.yaml"][..], &more].concat());
        assert_eq!(output.status.code(), Some(2), "{more:?}");
    }
}
