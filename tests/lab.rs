//! The lab from the command line. A test skips itself, with a message, where labs cannot be made.

mod common;

use common::{Scratch, text};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Whether labs can be made on this machine. If not, prints why the test is skipped.
fn can_be_made(test: &str) -> bool {
    let missing = foretell_lab::missing();
    if !missing.is_empty() {
        // `writeln!`, because the test harness hides what `eprintln!` prints in tests that pass.
        let _ = writeln!(std::io::stderr(), "skipped: {test}: a lab cannot be made here, missing: {}", missing.join(", "));
    }
    missing.is_empty()
}

/// Writes a topology file with a name of its own, so that tests can run in parallel. Returns its
/// path.
fn named(scratch: &Scratch, name: &str, base: &str) -> String {
    let path = scratch.file(&format!("{name}.yaml"), &format!("name: {name}\nbase: {base}\n"));
    text(&path).to_owned()
}

/// Returns the namespaces, control groups and state files of the labs of a topology, including labs
/// that belong to one process.
fn remains(name: &str) -> Vec<String> {
    let folders = ["/run/netns", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup", "/run/foretell/labs"];
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|entry| {
            let rest = entry.strip_prefix("foretell-lab_").unwrap_or(entry);
            rest.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(['_', '~', '.']))
        })
        .collect()
}

#[track_caller]
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60), "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A child process that is killed when the value is dropped.
struct Run(Child);

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_lab_can_be_made_used_and_taken_down_completely() {
    if !can_be_made("a_lab_can_be_made_used_and_taken_down_completely") {
        return;
    }
    let scratch = Scratch::new();
    let topology = named(&scratch, "test-up", "lab-hetero");
    let up = scratch.json(&["lab", "up", "--topology", &topology]);
    assert_eq!(up["nodes"].as_array().map(Vec::len), Some(2));
    // A command in the lab has its host's address and its device's control group.
    let address = ["lab", "exec", "--topology", &topology, "slow", "--", "ip", "-brief", "address", "show", "eth0"];
    let seen = scratch.run(&address);
    assert!(String::from_utf8_lossy(&seen.stdout).contains("10.77.0.2/16"), "{seen:?}");
    let groups = ["lab", "exec", "--topology", &topology, "slow", "--", "cat", "/proc/self/cgroup"];
    let seen = scratch.run(&groups);
    assert!(String::from_utf8_lossy(&seen.stdout).contains("foretell-lab_test-up/device-1"), "{seen:?}");
    let status = scratch.run(&["lab", "exec", "--topology", &topology, "fast", "--", "sh", "-c", "exit 7"]).status;
    assert_eq!(status.code(), Some(7), "`lab exec` exits with the status of its command");
    let message = |arguments: &[&str]| String::from_utf8_lossy(&scratch.run(arguments).stderr).into_owned();
    assert!(
        message(&["lab", "up", "--topology", &topology]).contains("is up already\nhint: take it down with `foretell lab down")
    );
    assert!(message(&["lab", "exec", "--topology", &topology, "other", "--", "true"]).contains("it has `fast`, `slow`"));
    // A command that still runs in the lab does not outlive it.
    let mut inside =
        Run(scratch.command(&["lab", "exec", "--topology", &topology, "fast", "--", "sleep", "600"]).spawn().expect("it starts"));
    std::thread::sleep(Duration::from_millis(200));
    let down = scratch.json(&["lab", "down", "--topology", &topology]);
    assert_eq!(down["taken_down"], true);
    wait_for("the command to end", || inside.0.try_wait().expect("a child").is_some());
    assert_eq!(remains("test-up"), Vec::<String>::new());
    assert_eq!(scratch.json(&["lab", "down", "--topology", &topology])["taken_down"], false);
    assert!(message(&["lab", "exec", "--topology", &topology, "fast", "--", "true"]).contains("is not up"));
}

#[test]
fn remains_of_a_crashed_lab_are_taken_down_without_a_state_file() {
    if !can_be_made("remains_of_a_crashed_lab_are_taken_down_without_a_state_file") {
        return;
    }
    let scratch = Scratch::new();
    let topology = named(&scratch, "test-half", "lab-4x1g-200m");
    scratch.json(&["lab", "up", "--topology", &topology]);
    // Removes parts of the lab, as a crash could.
    std::fs::remove_file("/run/foretell/labs/test-half.json").expect("the lab has a state file");
    let deleted = std::process::Command::new("ip").args(["netns", "delete", "foretell-lab_test-half_node-host-2"]).status();
    assert!(deleted.is_ok_and(|status| status.success()));
    let refused = scratch.run(&["lab", "up", "--topology", &topology]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is up in part"), "{refused:?}");
    assert!(!remains("test-half").is_empty());
    // The name alone is enough, because the topology file may be gone too.
    assert_eq!(scratch.json(&["lab", "down", "--topology", "test-half"])["taken_down"], true);
    assert_eq!(remains("test-half"), Vec::<String>::new());
}

#[test]
fn a_command_killed_while_it_makes_a_lab_leaves_nothing() {
    if !can_be_made("a_command_killed_while_it_makes_a_lab_leaves_nothing") {
        return;
    }
    let scratch = Scratch::new();
    let topology = named(&scratch, "test-killed", "lab-4x1g-200m");
    let up = scratch.command(&["lab", "up", "--topology", &topology]).spawn();
    let mut up = Run(up.expect("the program starts"));
    wait_for("the lab to be begun", || remains("test-killed").len() >= 2);
    let _ = up.0.kill();
    let _ = up.0.wait();
    // The command's keeper process takes down what was made.
    wait_for("the remains to go", || remains("test-killed").is_empty());
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(remains("test-killed"), Vec::<String>::new());
}

/// Sends bytes over TCP from one host of a lab to another with Python. Returns the rate in bytes
/// per second, or `None` if Python is missing.
fn rate(scratch: &Scratch, topology: &str, from: &str, to: &str, address: &str, bytes: usize) -> Option<f64> {
    let receive = "import socket,sys\ns=socket.create_server(('0.0.0.0',5001))\nprint('ready',flush=True)\nc,_=s.accept()\n\
                   n=0\nwhile True:\n d=c.recv(1<<20)\n if not d: break\n n+=len(d)\nprint(n)";
    let send = "import socket,sys,time\nc=socket.create_connection((sys.argv[1],5001))\nb=bytes(int(sys.argv[2]))\n\
                t=time.perf_counter()\nc.sendall(b)\nc.shutdown(1)\nc.recv(1)\nprint(time.perf_counter()-t)";
    let inside = |node: &str, arguments: &[&str]| {
        let mut command =
            scratch.command(&[&["lab", "exec", "--topology", topology, node, "--", "python3", "-c"], arguments].concat());
        command.stdout(Stdio::piped());
        command
    };
    let mut receiver = Run(inside(to, &[receive]).spawn().ok()?);
    let mut line = [0; 5];
    receiver.0.stdout.as_mut()?.read_exact(&mut line).ok()?;
    let sent = inside(from, &[send, address, &bytes.to_string()]).output().ok()?;
    let seconds: f64 = String::from_utf8_lossy(&sent.stdout).trim().parse().ok()?;
    Some(bytes as f64 / seconds)
}

#[test]
fn links_are_as_fast_as_the_topology_file_says() {
    if !can_be_made("links_are_as_fast_as_the_topology_file_says") {
        return;
    }
    let scratch = Scratch::new();
    let topology = named(&scratch, "test-rate", "lab-4x1g-200m");
    scratch.json(&["lab", "up", "--topology", &topology]);
    // 125 MB/s within a rack, 25 MB/s between racks. The upper limits allow 15 % for bursts and
    // socket buffers. The lower limits need only one of several tries, because a busy machine can
    // slow any of them.
    const NEAR: f64 = 1.15 * 125e6;
    const FAR: f64 = 1.15 * 25e6;
    const LEAST_FAR: f64 = 0.5 * 25e6;
    let fastest = |to: &str, address: &str, enough: f64| {
        let mut fastest = 0.0_f64;
        for _ in 0..30 {
            fastest = fastest.max(rate(&scratch, &topology, "host-0", to, address, 8 << 20)?);
            if fastest > enough {
                break;
            }
        }
        Some(fastest)
    };
    let far = fastest("host-2", "10.77.0.3", LEAST_FAR);
    let near = fastest("host-1", "10.77.0.2", 1.2 * FAR);
    scratch.json(&["lab", "down", "--topology", &topology]);
    let (Some(near), Some(far)) = (near, far) else {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: links_are_as_fast_as_the_topology_file_says: python3, which measures, is missing"
        );
        return;
    };
    assert!(near < NEAR && far < FAR, "too fast: {near} and {far} bytes/s");
    assert!(near > 1.2 * FAR && far > LEAST_FAR, "too slow: {near} and {far} bytes/s");
}

const PLAN: &str = "model: {family: mlp, widths: [64, 32, 48, 10]}\nglobal_batch: 32\noptimizer: sgd\n";

#[test]
fn a_run_in_a_lab_has_the_same_losses_as_on_this_machine() {
    if !can_be_made("a_run_in_a_lab_has_the_same_losses_as_on_this_machine") {
        return;
    }
    let scratch = Scratch::new();
    for (name, base, layout) in [
        ("test-data", "lab-2x1g", "{data: 2, micro_batch: 16}"),
        // Each stage has a host, whose two ranks use shared memory.
        ("test-mixed", "cpu-pair", "{data: 2, pipeline: 2, micro_batch: 8}"),
        ("test-slow", "lab-hetero", "{tensor: 2, micro_batch: 16}"),
    ] {
        let topology = named(&scratch, name, base);
        let plan = |topology: &str| format!("{PLAN}topology: {topology}\nlayout: {layout}\n");
        let here = scratch.train(&plan("local"), 6, 3, &[]);
        let there = scratch.train(&plan(&topology), 6, 3, &[]);
        assert_eq!(there.losses.len(), 6);
        let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&here.losses), bits(&there.losses), "{layout} in {base}");
        assert_eq!(remains(name), Vec::<String>::new(), "a lab that was made for a run must end with it");
    }
}

/// Starts a practically endless run in its own lab and waits for its first step. Returns it with
/// the process ids of its ranks.
fn endless(scratch: &Scratch, name: &str) -> (Run, Vec<i32>) {
    endless_with(scratch, name, &[])
}

/// As [`endless`], with more arguments.
fn endless_with(scratch: &Scratch, name: &str, more: &[&str]) -> (Run, Vec<i32>) {
    let topology = named(scratch, name, "lab-2x1g");
    let plan = scratch.file("plan.yaml", &format!("{PLAN}topology: {topology}\nlayout: {{data: 2, micro_batch: 16}}\n"));
    let arguments = ["execute", "--plan", text(&plan), "--steps", "100000000", "--no-evaluation", "--run", "first"];
    let run = Run(scratch
        .command(&[&arguments[..], more].concat())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts"));
    let (pids, metrics) = (scratch.path("first/ranks/pids"), scratch.path("first/metrics.jsonl"));
    wait_for("the run to train", || pids.is_file() && std::fs::metadata(&metrics).is_ok_and(|file| file.len() > 0));
    let pids = std::fs::read_to_string(pids).expect("the run wrote its process ids");
    (run, pids.lines().map(|line| line.parse().expect("a process id")).collect())
}

/// Whether a process runs. A zombie does not.
fn is_alive(pid: i32) -> bool {
    let state = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).unwrap_or_default();
    state.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

#[test]
fn a_rank_that_dies_in_a_lab_is_named_and_the_lab_is_removed() {
    if !can_be_made("a_rank_that_dies_in_a_lab_is_named_and_the_lab_is_removed") {
        return;
    }
    let scratch = Scratch::new();
    let (mut run, pids) = endless(&scratch, "test-died");
    // SAFETY: kill takes two integers. This test started the process.
    assert_eq!(unsafe { libc::kill(pids[1], libc::SIGKILL) }, 0);
    wait_for("the run to end", || run.0.try_wait().expect("a child").is_some());
    let mut message = String::new();
    run.0.stderr.take().expect("the pipe was requested").read_to_string(&mut message).expect("text");
    assert!(message.contains("rank 1") && message.contains("SIGKILL"), "{message}");
    assert!(pids.iter().all(|&pid| !is_alive(pid)));
    assert_eq!(remains("test-died"), Vec::<String>::new());
}

#[test]
fn an_elastic_run_in_a_lab_goes_on_with_the_ranks_that_are_left() {
    if !can_be_made("an_elastic_run_in_a_lab_goes_on_with_the_ranks_that_are_left") {
        return;
    }
    let scratch = Scratch::new();
    let topology = named(&scratch, "test-elastic", "lab-2x1g");
    let plan = |topology: &str| format!("{PLAN}topology: {topology}\nlayout: {{data: 2, micro_batch: 16}}\n");
    let whole = scratch.train(&plan("local"), 2000, 0, &["--run", "whole", "--save-every", "never"]);
    let path = scratch.file("plan.yaml", &plan(&topology));
    let save = ["--save-every", "50", "--keep", "2", "--elastic", "--json", "--no-evaluation", "--run", "first"];
    let arguments = [&["execute", "--plan", text(&path), "--steps", "2000"][..], &save].concat();
    let mut run = Run(scratch.command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts"));
    let metrics = scratch.path("first/metrics.jsonl");
    wait_for("the run to train", || std::fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() > 60));
    let pids = std::fs::read_to_string(scratch.path("first/ranks/pids")).expect("the run wrote its process ids");
    let pids: Vec<i32> = pids.lines().map(|line| line.parse().expect("a process id")).collect();
    // SAFETY: kill takes two integers. This test started the process.
    assert_eq!(unsafe { libc::kill(pids[1], libc::SIGKILL) }, 0);
    let printed = std::io::read_to_string(run.0.stdout.take().expect("the pipe was requested")).expect("text");
    let message = std::io::read_to_string(run.0.stderr.take().expect("the pipe was requested")).expect("text");
    assert!(run.0.wait().expect("it has ended").success(), "{message}");
    assert!(message.contains("rank 1 on host `host-1`") && message.contains("with 1 of 2 ranks"), "{message}");
    let document: serde_json::Value = serde_json::from_str(&printed).expect("one JSON document");
    assert_eq!((&document["restarts"], &document["world_size"]), (&1.into(), &1.into()));
    let losses: Vec<f64> = document["loss"].as_array().expect("a list").iter().filter_map(|loss| loss.as_f64()).collect();
    assert_eq!(losses.len(), 2000);
    for (step, (one, other)) in whole.losses.iter().zip(&losses).enumerate().take(400) {
        assert!((one - other).abs() <= 1e-3 * one.abs().max(1.0), "step {step}: {one} and {other}");
    }
    assert!(pids.iter().all(|&pid| !is_alive(pid)));
    assert_eq!(remains("test-elastic"), Vec::<String>::new());
}

#[test]
fn a_lost_link_between_running_ranks_is_named_in_seconds() {
    if !can_be_made("a_lost_link_between_running_ranks_is_named_in_seconds") {
        return;
    }
    let scratch = Scratch::new();
    let (mut run, pids) = endless_with(&scratch, "test-link", &["--peer-timeout", "3s"]);
    // Ranks reach the launcher through their host's loopback interface, which stays.
    let host = remains("test-link").into_iter().find(|name| name.ends_with("node-host-1")).expect("its network namespace");
    let cut = std::process::Command::new("ip").args(["-n", &host, "link", "set", "eth0", "down"]).status();
    assert!(cut.is_ok_and(|status| status.success()));
    let started = Instant::now();
    wait_for("the run to end", || run.0.try_wait().expect("a child").is_some());
    let waited = started.elapsed();
    let mut message = String::new();
    run.0.stderr.take().expect("the pipe was requested").read_to_string(&mut message).expect("text");
    assert!(message.contains("the link between rank") && message.contains("is lost"), "{message}");
    assert!(message.contains("on host `host-0`") && message.contains("on host `host-1`"), "{message}");
    assert!(waited < Duration::from_secs(12), "it took {waited:?}");
    assert!(pids.iter().all(|&pid| !is_alive(pid)));
}

#[test]
fn a_killed_launcher_leaves_no_rank_and_no_lab() {
    if !can_be_made("a_killed_launcher_leaves_no_rank_and_no_lab") {
        return;
    }
    let scratch = Scratch::new();
    let (mut run, pids) = endless(&scratch, "test-gone");
    assert!(!remains("test-gone").is_empty());
    let _ = run.0.kill();
    let _ = run.0.wait();
    wait_for("the ranks to end", || pids.iter().all(|&pid| !is_alive(pid)));
    wait_for("the lab to go", || remains("test-gone").is_empty());
}
