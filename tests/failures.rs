//! Runs that fail: the program names the cause and leaves no process behind.

mod common;

use common::{Scratch, text};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Time within which a failed run must end.
const SOON: Duration = Duration::from_secs(5);

const ENDLESS: &str =
    "model: {family: mlp, widths: [64, 32, 10]}\ntopology: local\nglobal_batch: 32\nlayout: {data: 2, micro_batch: 16}\n";

/// A run that is killed when the value is dropped, so also when its test fails.
struct Run(Child);

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a practically endless run of two ranks and waits for its first step. Returns it with the
/// process ids of its ranks.
fn start(scratch: &Scratch, more: &[&str]) -> (Run, Vec<i32>) {
    let plan = scratch.file("plan.yaml", ENDLESS);
    let basic =
        ["execute", "--plan", text(&plan), "--steps", "100000000", "--oversubscribe", "--no-evaluation", "--run", "first"];
    let mut command = scratch.command(&[&basic[..], more].concat());
    let run = Run(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts"));
    let pids = scratch.path("first/ranks/pids");
    let metrics = scratch.path("first/metrics.jsonl");
    wait_for("the run to train", Duration::from_secs(30), || {
        pids.is_file() && std::fs::metadata(&metrics).is_ok_and(|file| file.len() > 0)
    });
    let pids = std::fs::read_to_string(pids).expect("the run wrote its process ids");
    (run, pids.lines().map(|line| line.parse().expect("a process id")).collect())
}

#[track_caller]
fn wait_for(what: &str, most: Duration, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < most, "waited {most:?} for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process runs. A zombie does not.
fn is_alive(pid: i32) -> bool {
    let state = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).unwrap_or_default();
    state.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

fn kill(pid: i32) {
    send(pid, libc::SIGKILL);
}

fn send(pid: i32, signal: i32) {
    // SAFETY: kill takes two integers. This test started the process.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "process {pid} cannot be sent signal {signal}");
}

fn read(pipe: Option<impl Read>) -> String {
    let mut text = String::new();
    pipe.expect("the pipe was requested").read_to_string(&mut text).expect("the output is text");
    text
}

fn assert_killed_rank_ends_the_run(more: &[&str]) {
    let scratch = Scratch::new();
    let (mut run, pids) = start(&scratch, more);
    assert_eq!(pids.len(), 2);
    assert!(pids.iter().all(|&pid| is_alive(pid)));
    kill(pids[1]);
    wait_for("the run to end", SOON, || run.0.try_wait().expect("a child").is_some());
    let status = run.0.wait().expect("it has ended");
    let (printed, message) = (read(run.0.stdout.take()), read(run.0.stderr.take()));
    assert_eq!(status.code(), Some(1), "{message}");
    assert!(message.contains("rank 1") && message.contains("SIGKILL"), "{message}");
    assert!(!message.contains("panicked"), "{message}");
    // With `--json` the one document says the same.
    assert!(printed.is_empty() != more.contains(&"--json"), "{printed}");
    assert!(pids.iter().all(|&pid| !is_alive(pid)), "a rank is still running");
    let check = scratch.run(&["check", "first"]);
    assert_eq!(check.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&check.stderr).contains("did not finish"));
}

#[test]
fn a_killed_rank_ends_the_run_and_is_named_with_its_cause() {
    assert_killed_rank_ends_the_run(&[]);
}

#[test]
fn a_killed_rank_ends_the_run_over_tcp_too() {
    assert_killed_rank_ends_the_run(&["--tcp", "--json"]);
}

/// Stops some ranks of a run. It must end by itself and name the first of them.
fn assert_stopped_ranks_end_the_run(stopped: &[usize], more: &[&str]) {
    let scratch = Scratch::new();
    let (mut run, pids) = start(&scratch, &[&["--peer-timeout", "3s"], more].concat());
    stopped.iter().for_each(|&rank| send(pids[rank], libc::SIGSTOP));
    wait_for("the run to end", Duration::from_secs(3) + SOON, || run.0.try_wait().expect("a child").is_some());
    let status = run.0.wait().expect("it has ended");
    let message = read(run.0.stderr.take());
    assert_eq!(status.code(), Some(1), "{message}");
    let expected = format!("error: rank {} has sent no sign of life for 3s: its process is stopped", stopped[0]);
    assert!(message.contains(&expected), "{message}");
    assert!(pids.iter().all(|&pid| !is_alive(pid)), "a rank is still there");
}

#[test]
fn a_stopped_rank_is_named_in_seconds_and_not_its_victim() {
    assert_stopped_ranks_end_the_run(&[1], &[]);
}

#[test]
fn a_stopped_rank_is_named_over_tcp_too() {
    assert_stopped_ranks_end_the_run(&[0], &["--tcp"]);
}

#[test]
fn a_run_whose_ranks_are_all_stopped_ends() {
    assert_stopped_ranks_end_the_run(&[0, 1], &[]);
}

#[test]
fn a_run_that_was_stopped_as_a_whole_goes_on() {
    let scratch = Scratch::new();
    let (mut run, pids) = start(&scratch, &["--peer-timeout", "3s"]);
    let all: Vec<i32> = pids.iter().copied().chain([run.0.id() as i32]).collect();
    all.iter().for_each(|&pid| send(pid, libc::SIGSTOP));
    std::thread::sleep(Duration::from_secs(5));
    all.iter().for_each(|&pid| send(pid, libc::SIGCONT));
    std::thread::sleep(Duration::from_secs(2));
    assert!(run.0.try_wait().expect("a child").is_none(), "{}", read(run.0.stderr.take()));
}

#[test]
fn a_closed_standard_error_does_not_end_a_run() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", ENDLESS);
    let mut command = scratch.command(&["execute", "--plan", text(&plan), "--steps", "3", "--oversubscribe", "--json"]);
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    drop(run.stderr.take());
    let printed = read(run.stdout.take());
    assert!(run.wait().expect("a child").success(), "{printed}");
    assert!(printed.contains("\"top1\""), "{printed}");
}

#[test]
fn a_full_disk_under_a_log_does_not_hide_the_cause() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", ENDLESS);
    std::fs::create_dir_all(scratch.path("first/ranks")).expect("a folder");
    for rank in 0..2 {
        std::os::unix::fs::symlink("/dev/full", scratch.path(&format!("first/ranks/{rank}.log"))).expect("a link");
    }
    // No rank can write its spans.
    scratch.file("first/timeline", "in the way");
    let arguments = ["execute", "--plan", text(&plan), "--steps", "2", "--oversubscribe", "--run", "first"];
    let output = scratch.run(&arguments);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("failed: could not write") && message.contains("timeline"), "{message}");
}

#[test]
fn a_folder_takes_one_run_at_a_time_and_is_replaced_only_if_asked() {
    let scratch = Scratch::new();
    let (mut run, _) = start(&scratch, &[]);
    let plan = scratch.path("plan.yaml");
    let again = ["execute", "--plan", text(&plan), "--steps", "2", "--oversubscribe", "--no-evaluation", "--run", "first"];
    let refused = |arguments: &[&str], reason: &str| {
        let output = scratch.run(arguments);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(reason), "{message}");
    };
    refused(&[&again[..], &["--overwrite"]].concat(), "another process writes a run into `first`");
    kill(run.0.id() as i32);
    run.0.wait().expect("it has ended");
    let before = std::fs::read(scratch.path("first/metrics.jsonl")).expect("metrics");
    refused(&again, "`first` has a run already; hint: give another folder with `--run`, or `--overwrite`");
    assert_eq!(std::fs::read(scratch.path("first/metrics.jsonl")).expect("metrics"), before);
    let output = scratch.run(&[&again[..], &["--overwrite"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metrics = std::fs::read_to_string(scratch.path("first/metrics.jsonl")).expect("metrics");
    assert_eq!(metrics.lines().count(), 2);
}

#[test]
fn ranks_do_not_outlive_their_launcher() {
    let scratch = Scratch::new();
    let (mut run, pids) = start(&scratch, &[]);
    kill(run.0.id() as i32);
    run.0.wait().expect("it has ended");
    wait_for("the ranks to end", SOON, || pids.iter().all(|&pid| !is_alive(pid)));
}

#[test]
fn a_diverged_run_fails_with_the_step_and_a_hint() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", &format!("{ENDLESS}training: {{learning_rate: 1e30}}\n"));
    let output = scratch.run(&["execute", "--plan", text(&plan), "--steps", "200", "--oversubscribe", "--run", "first"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("the loss became") && message.contains("hint: lower the learning rate"), "{message}");
    assert!(output.stdout.is_empty());
}

#[test]
fn a_pipe_in_place_of_a_lock_or_a_log_ends_a_run_at_once() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", ENDLESS);
    std::fs::create_dir_all(scratch.path("log/ranks")).expect("a folder");
    std::fs::create_dir_all(scratch.path("lock")).expect("a folder");
    for (folder, file) in [("log", "ranks/0.log"), ("lock", "lock")] {
        let pipe = scratch.path(folder).join(file);
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
        let output = scratch.run(&["execute", "--plan", text(&plan), "--steps", "2", "--oversubscribe", "--run", folder]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains(file) && message.contains("a named pipe"), "{message}");
    }
}
