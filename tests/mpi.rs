//! Ranks that Open MPI's real `mpirun` starts and whose data MPI carries. Tests that need `mpirun`
//! say so and pass where it is missing.

mod common;

use common::{Scratch, text};
use serde_json::Value;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Two ranks, with gradients of several segments.
const TWO: &str =
    "model: {family: mlp, widths: [64, 512, 512, 10]}\ntopology: local\nglobal_batch: 32\nlayout: {data: 2, micro_batch: 16}\n";
/// Four ranks that also send activations to each other.
const FOUR: &str = "model: {family: gpt, layers: 2, hidden: 32, heads: 4, vocab: 256, sequence: 16}\ntopology: local\n\
    global_batch: 8\nlayout: {data: 2, pipeline: 2, micro_batch: 2}\n";

/// Whether the ranks can be started here. Says so if not.
fn has_mpirun() -> bool {
    let found = Command::new("mpirun").arg("--version").output();
    let is_open_mpi = found.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI"));
    if !is_open_mpi {
        println!("skipped: Open MPI's mpirun is not installed (Debian's openmpi-bin)");
    }
    is_open_mpi
}

/// `foretell execute` with these arguments, started by `mpirun` for so many ranks.
fn mpirun(scratch: &Scratch, ranks: usize, arguments: &[&str]) -> Command {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
    let mut command = Command::new("mpirun");
    command.args(["-n", &ranks.to_string(), "--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]);
    // Parts of Open MPI for networks that a container lacks.
    command.args(["--mca", "btl", "self,vader,tcp", "--mca", "pml", "ob1"]);
    command.arg(env!("CARGO_BIN_EXE_foretell")).args(arguments).current_dir(scratch.path(""));
    command.env("FORETELL_RENDEZVOUS_DIR", scratch.path("secrets")).env("FORETELL_PORT", free.port().to_string());
    command.env("FORETELL_START_SECONDS", "60").env_remove("FORETELL_RUN_KEY");
    command
}

fn arguments<'a>(plan: &'a Path, steps: &'a str, transport: &'a str, run: &'a str) -> Vec<&'a str> {
    let plan = ["execute", "--plan", text(plan), "--steps", steps, "--oversubscribe", "--no-evaluation"];
    [&plan[..], &["--transport", transport, "--run", run, "--overwrite", "--json"]].concat()
}

fn losses(output: &Output) -> Vec<f64> {
    assert!(output.status.success(), "{}", standard_error(output));
    let document: Value = serde_json::from_slice(&output.stdout).expect("one document");
    document["loss"].as_array().expect("a list").iter().filter_map(Value::as_f64).collect()
}

fn standard_error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn losses_over_mpi_are_those_over_tcp_bit_for_bit() {
    if !has_mpirun() {
        return;
    }
    for (ranks, plan, data) in [(2, TWO, &[][..]), (4, FOUR, &["--data", "text.txt"])] {
        let scratch = Scratch::new();
        let plan = scratch.file("plan.yaml", plan);
        scratch.file("text.txt", &"abcdefg ".repeat(200));
        let execute = |transport, run| [&arguments(&plan, "6", transport, run)[..], data].concat();
        let expected = losses(&scratch.run(&execute("tcp", "tcp")));
        let over_mpi = mpirun(&scratch, ranks, &execute("mpi", "mpi")).output().expect("mpirun starts");
        assert_eq!(losses(&over_mpi), expected, "{ranks} ranks");
        assert_eq!(expected.len(), 6);
    }
}

/// The id of the process of a rank whose launcher listens at `port`.
fn process_of(rank: usize, port: &str) -> Option<i32> {
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let mut ids = processes.filter_map(|process| process.file_name().to_str()?.parse::<i32>().ok());
    ids.find(|id| {
        let environment = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        let has = |wanted: String| environment.split(|byte| *byte == 0).any(|word| word == wanted.as_bytes());
        has(format!("FORETELL_RANK={rank}")) && has(format!("FORETELL_PORT={port}"))
    })
}

/// A process that is killed when the value is dropped.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// Sends `signal` to rank 1 of a run of two, while it trains. Returns what the run then says.
fn message_after(signal: i32) -> String {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", TWO);
    let mut execute = arguments(&plan, "100000000", "mpi", "run");
    execute.extend(["--peer-timeout", "3s"]);
    let mut command = mpirun(&scratch, 2, &execute);
    let said = std::fs::File::create(scratch.path("said")).expect("a file");
    command.stdout(Stdio::null()).stderr(said);
    let port = command.get_envs().find(|(name, _)| *name == "FORETELL_PORT").and_then(|(_, port)| port?.to_str());
    let port = port.expect("the port was set").to_owned();
    let mut run = Started(command.spawn().expect("mpirun starts"));
    let metrics = scratch.path("run").join("metrics.jsonl");
    let wait_for = |what: &str, most: u64, done: &mut dyn FnMut() -> bool| {
        let started = Instant::now();
        while !done() {
            let said = std::fs::read_to_string(scratch.path("said")).unwrap_or_default();
            assert!(started.elapsed() < Duration::from_secs(most), "waited for {what}: {said}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait_for("the run to train", 60, &mut || std::fs::metadata(&metrics).is_ok_and(|file| file.len() > 0));
    let victim = process_of(1, &port).expect("rank 1 runs");
    // SAFETY: sends a signal to a process that this test has started.
    unsafe { libc::kill(victim, signal) };
    wait_for("the run to end", 20, &mut || run.0.try_wait().expect("a child").is_some());
    std::fs::read_to_string(scratch.path("said")).expect("a file")
}

#[test]
fn a_killed_or_stopped_rank_over_mpi_is_named() {
    if !has_mpirun() {
        return;
    }
    let killed = message_after(libc::SIGKILL);
    assert!(killed.contains("rank 1"), "{killed}");
    let stopped = message_after(libc::SIGSTOP);
    assert!(stopped.contains("rank 1") && stopped.contains("no sign of life"), "{stopped}");
}

#[test]
fn mpi_without_its_mpirun_or_with_other_ranks_is_refused() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", TWO);
    let execute = arguments(&plan, "2", "mpi", "run");
    let refused = |output: Output, words: &[&str]| {
        let said = standard_error(&output);
        assert!(!output.status.success() && words.iter().all(|word| said.contains(word)), "{words:?}: {said}");
    };
    let mut alone = scratch.command(&execute);
    refused(alone.output().expect("it starts"), &["`--transport mpi` without several ranks", "hint: ", "mpirun -n RANKS"]);
    let torchrun = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "::1")];
    let mut by_another = scratch.command(&execute);
    refused(by_another.envs(torchrun).output().expect("it starts"), &["in ranks that torchrun started", "mpirun -n RANKS"]);
    let unknown = scratch.run(&arguments(&plan, "2", "carrier-pigeon", "run"));
    refused(unknown, &["carrier-pigeon", "hint: use `shared-memory`, `tcp` or `mpi`"]);
    if has_mpirun() {
        let three = mpirun(&scratch, 3, &execute).output().expect("mpirun starts");
        refused(three, &["a plan for 2 ranks", "started 3", "hint: "]);
    }
}
