//! Values that an option or a field does not take. The program refuses each with a hint, and never
//! ignores or replaces it without a word.

mod common;

use common::{Scratch, text};

/// Runs a command that must refuse its input. Returns its standard error.
#[track_caller]
fn refused(scratch: &Scratch, arguments: &[&str]) -> String {
    let output = scratch.run(arguments);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    assert!(message.contains("hint: ") && !message.contains("panicked"), "{arguments:?}: {message}");
    message
}

#[track_caller]
fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

const PLAN: &str = "model: {family: mlp, widths: [64, 32, 10]}\ntopology: local\nglobal_batch: 8\n";

#[test]
fn an_input_pipeline_in_a_file_has_the_bounds_of_its_options() {
    let scratch = Scratch::new();
    for (field, number, range) in [
        ("prefetch", "2305843009213693944", "from 1 to 1024"),
        ("prefetch", "100000000", "from 1 to 1024"),
        ("prefetch", "0", "from 1 to 1024"),
        ("workers", "18446744073709551615", "from 0 to 1024"),
    ] {
        let input = format!("{PLAN}input: {{bytes_per_sample: 100kB, {field}: {number}}}\n");
        let plan = scratch.file("plan.yaml", &input);
        let message = refused(&scratch, &["simulate", "--plan", text(&plan)]);
        assert_contains(&message, &["plan.yaml:4:", &format!("`input.{field}` is {number}"), range]);
    }
    let plan = scratch.file("plan.yaml", &format!("{PLAN}input: {{bytes_per_sample: 100kB, workers: 0, prefetch: 1024}}\n"));
    scratch.json(&["simulate", "--plan", text(&plan)]);
}

#[test]
fn a_kernel_too_large_to_count_in_a_profile_is_refused() {
    let scratch = Scratch::new();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/examples/profile.yaml");
    let profile = std::fs::read_to_string(example).expect("it is read");
    let large = profile.replace("elements: 65536", "elements: 18446744073709551615");
    assert_ne!(large, profile);
    let (plan, profile) = (scratch.file("plan.yaml", PLAN), scratch.file("profile.yaml", &large));
    let message = refused(&scratch, &["simulate", "--plan", text(&plan), "--profile", text(&profile)]);
    assert_contains(&message, &["profile.yaml:", "sizes that no device holds", "foretell calibrate"]);
}

#[test]
fn lengths_and_prices_of_a_run_that_no_run_has_are_refused() {
    let scratch = Scratch::new();
    scratch.file("plan.yaml", PLAN);
    for (option, number) in [("--steps", "nan"), ("--steps", "inf"), ("--samples", "1e300"), ("--epochs", "nan")] {
        let message = refused(&scratch, &["simulate", "--plan", "plan.yaml", option, number]);
        assert_contains(&message, &[option, "no length of a run", "up to 1e18"]);
    }
    let message = refused(&scratch, &["simulate", "--plan", "plan.yaml", "--cost", "--device-price", "1e308"]);
    assert_contains(&message, &["`1e308` is not a price", "at most 1e12"]);
}

#[test]
fn options_without_effect_are_refused_by_name() {
    let scratch = Scratch::new();
    scratch.file("plan.yaml", PLAN);
    scratch.file("short.yaml", "base: llama3-8b\nlayers: 4\n");
    let on_policies = ["plan", "--model", "short.yaml", "--topology", "8xh100", "--method", "grpo"];
    let full = ["plan", "--model", "short.yaml", "--topology", "8xh100", "--method", "full"];
    let job = ["export", "--plan", "plan.yaml", "-o", "job", "--to"];
    let cases: [(&[&str], &[&str], &str); 8] = [
        (&job, &["megatron", "--oversubscribe"], "`--oversubscribe` is about a step"),
        (&job, &["slurm", "--profile", "nowhere.yaml"], "`--profile` is about a step"),
        (&full, &["--plots", "plots"], "`--plots` draws the points of"),
        (&full, &["--reference", "beside"], "`--reference` without a reference model"),
        (&full, &["--reference", "precomputed"], "`--reference` without a reference model"),
        (&on_policies, &["--reference", "beside"], "`--reference` without a reference model"),
        (&on_policies, &["--checkpoint-every", "5"], "`--checkpoint-every` has no answer"),
        (&["plan", "--model", "gpt2", "--topology", "8xh100", "--method", "lora"], &["--adapter", "targets=+"], "an empty name"),
    ];
    for (command, more, expected) in cases {
        assert_contains(&refused(&scratch, &[command, more].concat()), &[expected]);
    }
    assert!(!scratch.path("job").exists() && !scratch.path("plots").exists());
}

#[test]
fn a_group_that_shares_no_batch_statistics_is_refused() {
    let scratch = Scratch::new();
    let plan = ["plan", "--topology", "8xa100-80g", "--global-batch", "64", "--batch-norm-group"];
    let message = refused(&scratch, &[&plan[..], &["7", "--model", "gpt2"]].concat());
    assert_contains(&message, &["`gpt2` has no batch normalisation"]);
    assert_contains(&refused(&scratch, &[&plan[..], &["0", "--model", "resnet50"]].concat()), &["has no samples"]);
    let path = scratch.file("plan.yaml", &format!("{PLAN}batch_norm_group: 0\n"));
    assert_contains(&refused(&scratch, &["simulate", "--plan", text(&path)]), &["batch_norm_group", "plan.yaml"]);
    let path = scratch.file("plan.yaml", &format!("{PLAN}batch_norm_group: 2\n"));
    let output = scratch.run(&["simulate", "--plan", text(&path)]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("`batch_norm_group` without effect"));
}
