//! The script of the GitHub Action that compares plans of two commits.

use crate::common::{Scratch, text};
use std::path::Path;
use std::process::{Command, Output};

fn plan(batch: usize) -> String {
    format!(
        "{{model: ../models/tiny.yaml, topology: dgx-a100-80g, layout: {{data: 8}}, global_batch: {batch}, precision: bf16}}\n"
    )
}

fn git(scratch: &Scratch, arguments: &[&str]) {
    let names = ["-c", "user.name=a", "-c", "user.email=a@example.org"];
    let output = Command::new("git").args(names).args(arguments).current_dir(scratch.path("")).output().expect("git starts");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn growth(scratch: &Scratch, arguments: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/actions/plan-growth/plan_growth.py");
    let mut command = Command::new("python3");
    command.arg(script).args(["--program", env!("CARGO_BIN_EXE_foretell"), "--base", "HEAD"]);
    command.args(arguments).current_dir(scratch.path("")).output().expect("Python starts")
}

#[test]
fn a_plan_that_grows_fails_the_pull_request() {
    let is_there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !is_there("git") || !is_there("python3") {
        let _ = std::io::Write::write_all(&mut std::io::stderr(), b"skipped: git and Python 3 are needed\n");
        return;
    }
    let scratch = Scratch::new();
    ["plans", "models"].iter().for_each(|folder| std::fs::create_dir(scratch.path(folder)).expect("a folder"));
    scratch.file("models/tiny.yaml", "base: gpt2\nlayers: 2\n");
    let first = scratch.file("plans/one.yaml", &plan(64));
    git(&scratch, &["init", "-q"]);
    git(&scratch, &["add", "."]);
    git(&scratch, &["commit", "-q", "-m", "plans"]);

    let unchanged = growth(&scratch, &[text(&first)]);
    let table = String::from_utf8_lossy(&unchanged.stdout).into_owned();
    assert!(unchanged.status.success() && table.contains("+0.0 %"), "{table} {}", String::from_utf8_lossy(&unchanged.stderr));

    // A larger batch takes longer, and a new plan is listed.
    scratch.file("plans/one.yaml", &plan(128));
    let new = scratch.file("plans/new.yaml", &plan(64));
    let grown = growth(&scratch, &[text(&first), text(&new)]);
    let table = String::from_utf8_lossy(&grown.stdout).into_owned();
    assert_eq!(grown.status.code(), Some(1), "{table}");
    assert!(table.contains("**grew** `plans/one.yaml`") && table.contains("| `plans/new.yaml` | is new"), "{table}");
    assert!(growth(&scratch, &["--most-step", "200", text(&first)]).status.success());
    scratch.file("plans/one.yaml", &plan(64));
    scratch.file("models/tiny.yaml", "base: gpt2\nlayers: 4\n");
    assert_eq!(growth(&scratch, &[text(&first)]).status.code(), Some(1), "the model grew");

    scratch.file("plans/one.yaml", "{model: gpt2");
    assert_eq!(growth(&scratch, &[text(&first)]).status.code(), Some(2), "no plan");
    let trees = Command::new("git").args(["worktree", "list"]).current_dir(scratch.path("")).output().expect("git starts");
    assert_eq!(String::from_utf8_lossy(&trees.stdout).lines().count(), 1, "no tree is left");
}
