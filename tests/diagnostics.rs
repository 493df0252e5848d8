//! A failure's parts: code, message, hint and place are fields of the document, and stand on
//! standard error in lines of their own.
#![allow(clippy::unwrap_used, clippy::panic)] // A test that fails may panic.

mod common;

use common::Scratch;
use serde_json::{Value, json};

/// The error of a command's document, and what it prints on standard error.
fn failure(scratch: &Scratch, arguments: &[&str]) -> (Value, String) {
    let output = scratch.run(&[arguments, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    let document: Value = serde_json::from_slice(&output.stdout).expect("one document");
    (document["error"].clone(), String::from_utf8(output.stderr).expect("text"))
}

#[test]
fn a_fault_in_a_topology_has_its_place_in_the_file() {
    let scratch = Scratch::new();
    scratch.file("c.yaml", "name: c\nnodes:\n  - {name: n, devices: {kind: a100-sxm-80, count: 8}}\n");
    let (error, printed) = failure(&scratch, &["plan", "--model", "gpt2", "--topology", "c.yaml"]);
    assert_eq!(error["code"], "input");
    assert_eq!(error["diagnostic"], "topology::unknown_name");
    assert_eq!(error["message"], "unknown device kind `a100-sxm-80`");
    assert!(error["hint"].as_str().is_some_and(|hint| hint.starts_with("did you mean `a100-sxm-80g`?")), "{error}");
    assert!(error["file"].as_str().is_some_and(|file| file.ends_with("c.yaml")), "{error}");
    assert_eq!((&error["line"], &error["column"]), (&json!(3), &json!(31)));
    let lines: Vec<&str> = printed.lines().collect();
    assert!(lines[0].starts_with("error[topology::unknown_name]: ") && lines[0].contains("c.yaml:3:31: unknown"), "{printed}");
    assert_eq!(lines[2], "3 |   - {name: n, devices: {kind: a100-sxm-80, count: 8}}", "{printed}");
    assert_eq!(lines[3], format!("  |{}^^^^^^^^^^^", " ".repeat(31)), "{printed}");
    assert!(lines[4].starts_with("hint: did you mean") && !printed.contains('\u{1b}'), "{printed}");
}

#[test]
fn a_field_that_a_base_does_not_take_has_its_place_in_the_file() {
    let scratch = Scratch::new();
    scratch.file("m.yaml", "base: llama3-8b\nlayers: 4\nheads: many\n");
    let (error, printed) = failure(&scratch, &["plan", "--model", "m.yaml", "--topology", "8xh100"]);
    assert_eq!((&error["line"], &error["column"]), (&json!(3), &json!(8)), "{error}");
    assert!(printed.contains("3 | heads: many"), "{printed}");
    scratch.file("m.yaml", "layers: 4\nheads: 32\nbase: llama3-8bb\n");
    let (error, printed) = failure(&scratch, &["plan", "--model", "m.yaml", "--topology", "8xh100"]);
    assert_eq!((&error["line"], &error["column"]), (&json!(3), &json!(7)), "{error}");
    assert!(printed.contains("llama3-8b") && printed.contains("3 | base: llama3-8bb"), "{printed}");
}

#[test]
fn a_hint_passes_through_the_reader_of_a_file() {
    let scratch = Scratch::new();
    let plan = |mode: &str| format!("model: gpt2\ntopology: dgx-h100\nglobal_batch: 32\nlayout: {{data: 4}}\nmode: {mode}\n");
    for (mode, hint) in [
        ("{parameter_server: {servers: 1, staleness: some}}", "use a number of steps, or `unbounded`"),
        ("{local_sgd: {every: 2, compression: int3}}", "use `fp32`, `bf16`, `fp16` or `int8` as `compression`"),
    ] {
        scratch.file("plan.yaml", &plan(mode));
        let (error, _) = failure(&scratch, &["simulate", "--plan", "plan.yaml"]);
        assert_eq!((&error["diagnostic"], &error["hint"], &error["line"]), (&json!("file::form"), &json!(hint), &json!(5)));
    }
}

#[test]
fn a_mistake_in_an_option_has_the_hint_of_its_type() {
    let scratch = Scratch::new();
    let plan = ["plan", "--model", "gpt2", "--topology", "dgx-h100"];
    let (error, printed) = failure(&scratch, &[&plan[..], &["--memory-limit", "72"]].concat());
    assert_eq!((&error["diagnostic"], &error["hint"]), (&json!("option::value"), &json!("give it a unit, such as `72GiB`")));
    assert!(printed.starts_with("error[option::value]: ") && printed.contains("\nhint: give it a unit"), "{printed}");
    let (error, _) = failure(&scratch, &[&plan[..], &["--memory-limits", "72GiB"]].concat());
    assert_eq!((&error["diagnostic"], &error["hint"]), (&json!("option::usage"), &json!("did you mean `--memory-limit`?")));
}
