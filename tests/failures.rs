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
    start_plan(scratch, ENDLESS, &[&["--steps", "100000000", "--no-evaluation"], more].concat())
}

/// Starts a run of a plan and waits for its first step.
fn start_plan(scratch: &Scratch, plan: &str, more: &[&str]) -> (Run, Vec<i32>) {
    let plan = scratch.file("plan.yaml", plan);
    let basic = ["execute", "--plan", text(&plan), "--oversubscribe", "--run", "first"];
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

/// A plan whose ranks are three workers with so many stages each, and behind them one server for
/// each stage.
fn with_servers(stages: usize, staleness: &str) -> String {
    format!(
        "model: {{family: mlp, widths: [64, 32, 32, 10]}}\ntopology: local\nglobal_batch: 48\n\
         layout: {{data: 3, pipeline: {stages}, micro_batch: 8}}\n\
         mode: {{parameter_server: {{servers: 1, staleness: {staleness}}}}}\n\
         training: {{learning_rate: 0.02, momentum: 0.0, evaluate_every: 2000}}\n"
    )
}

/// Kills or stops a rank of worker 1, of three. The others must end the run as if nothing were.
fn assert_the_others_go_on(stages: usize, staleness: &str, signal: i32, more: &[&str]) {
    let scratch = Scratch::new();
    let steps = ["--steps", "2000", "--save-every", "1999", "--peer-timeout", "3s", "--json"];
    let (mut run, pids) = start_plan(&scratch, &with_servers(stages, staleness), &[&steps[..], more].concat());
    assert_eq!(pids.len(), 4 * stages);
    // The document is longer than a pipe holds.
    let printed = run.0.stdout.take();
    let printed = std::thread::spawn(move || read(printed));
    // The ranks of a stage follow each other.
    send(pids[1], signal);
    wait_for("the run to end", Duration::from_secs(240), || run.0.try_wait().expect("a child").is_some());
    let status = run.0.wait().expect("it has ended");
    let (printed, message) = (printed.join().expect("the output is read"), read(run.0.stderr.take()));
    assert!(status.success(), "{message}");
    assert!(message.contains("worker 1 has left after") && message.contains("rank 1 "), "{message}");
    let document: serde_json::Value = serde_json::from_str(&printed).expect("one document");
    let losses: Vec<f64> = document["loss"].as_array().expect("losses").iter().filter_map(|loss| loss.as_f64()).collect();
    assert_eq!(losses.len(), 2000, "{message}");
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&losses[1900..]) < 0.5 * losses[0], "the others do not learn: {} to {}", losses[0], mean(&losses[1900..]));
    let departures = document["departures"].as_array().expect("a list");
    assert_eq!((departures.len(), &departures[0]["worker"]), (1, &serde_json::json!(1)), "{departures:?}");
    let (evaluated, accuracy) = (&document["evaluation"]["samples"], document["evaluation"]["top1"].as_f64());
    assert!(evaluated.as_u64().is_some_and(|samples| samples > 0), "{document}");
    assert!(accuracy.is_some_and(|top1| (0.5..=1.0).contains(&top1)), "{document}");
    assert!(pids.iter().all(|&pid| !is_alive(pid)), "a rank is still there");
    // The checkpoint is whole, and all workers go on from it.
    let plan = scratch.path("plan.yaml");
    let again = ["execute", "--plan", text(&plan), "--oversubscribe", "--resume", "first", "--run", "second", "--steps", "2010"];
    let document = scratch.json(&again);
    let losses: Vec<f64> = document["loss"].as_array().expect("losses").iter().filter_map(|loss| loss.as_f64()).collect();
    assert_eq!((losses.len(), &document["departures"]), (10, &serde_json::json!([])));
}

#[test]
fn a_killed_worker_leaves_those_at_their_own_pace() {
    assert_the_others_go_on(1, "unbounded", libc::SIGKILL, &[]);
}

#[test]
fn a_worker_leaves_with_all_its_stages_and_nobody_waits_for_it() {
    assert_the_others_go_on(2, "2", libc::SIGKILL, &["--tcp"]);
}

#[test]
fn a_stopped_worker_leaves_once_it_is_silent() {
    assert_the_others_go_on(1, "1", libc::SIGSTOP, &[]);
}

/// Kills a rank of a run with servers. The run must end and name it.
fn assert_ends_without(rank: usize, staleness: &str) {
    let scratch = Scratch::new();
    let more = ["--steps", "100000000", "--no-evaluation"];
    let (mut run, pids) = start_plan(&scratch, &with_servers(1, staleness), &more);
    kill(pids[rank]);
    wait_for("the run to end", SOON, || run.0.try_wait().expect("a child").is_some());
    let message = read(run.0.stderr.take());
    assert_eq!(run.0.wait().expect("it has ended").code(), Some(1), "{message}");
    assert!(message.contains(&format!("error[run::rank_died]: rank {rank} was killed")), "{message}");
    assert!(pids.iter().all(|&pid| !is_alive(pid)), "a rank is still there");
}

#[test]
fn a_killed_worker_ends_a_run_that_waits_for_all() {
    assert_ends_without(1, "0");
}

#[test]
fn a_killed_server_ends_the_run_and_is_named() {
    assert_ends_without(3, "0");
    assert_ends_without(3, "unbounded");
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
    let expected = format!("error[run::rank_died]: rank {} has sent no sign of life for 3s: its process is stopped", stopped[0]);
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
    refused(&again, "`first` has a run already\nhint: give another folder with `--run`, or `--overwrite`");
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
    // Its metrics go on with null, and all that reads them goes on too.
    let anyway = ["execute", "--plan", text(&plan), "--steps", "20", "--oversubscribe", "--run", "second", "--allow-divergence"];
    let document = scratch.json(&anyway);
    assert_eq!(document["loss"].as_array().map(Vec::len), Some(20));
    assert!(document["loss"][19].is_null(), "{document}");
    scratch.json(&["check", "second"]);
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
