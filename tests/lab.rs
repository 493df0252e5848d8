//! The lab, as a user meets it. Where the rights are missing each test says so and is skipped.

mod common;

use common::{Scratch, text};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Whether labs can be made here; where not, the test says why it is skipped.
fn can_be_made(test: &str) -> bool {
    let missing = foretell_lab::missing();
    if !missing.is_empty() {
        // Past the test harness, which keeps the words of tests that pass to itself.
        let _ = writeln!(std::io::stderr(), "skipped: {test}: a lab cannot be made here, missing is {}", missing.join(", "));
    }
    missing.is_empty()
}

/// A topology of a name of its own, so that tests can run beside each other.
fn named(scratch: &Scratch, name: &str, base: &str) -> String {
    let path = scratch.file(&format!("{name}.yaml"), &format!("name: {name}\nbase: {base}\n"));
    text(&path).to_owned()
}

/// What there is of labs of a topology's name, also of those that belong to one process.
fn left_of(name: &str) -> Vec<String> {
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

/// A child that is ended with its test.
struct Run(Child);

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_lab_is_made_used_and_taken_down_without_a_trace() {
    if !can_be_made("a_lab_is_made_used_and_taken_down_without_a_trace") {
        return;
    }
    let scratch = Scratch::new();
    let topology = named(&scratch, "test-up", "lab-hetero");
    let up = scratch.json(&["lab", "up", "--topology", &topology]);
    assert_eq!(up["nodes"].as_array().map(Vec::len), Some(2));
    // From one host to the other, by its address, and with the quota of its device.
    let there = ["lab", "exec", "--topology", &topology, "slow", "--", "ip", "-brief", "address", "show", "eth0"];
    let seen = scratch.run(&there);
    assert!(String::from_utf8_lossy(&seen.stdout).contains("10.77.0.2/16"), "{seen:?}");
    let groups = ["lab", "exec", "--topology", &topology, "slow", "--", "cat", "/proc/self/cgroup"];
    let seen = scratch.run(&groups);
    assert!(String::from_utf8_lossy(&seen.stdout).contains("foretell-lab_test-up/device-1"), "{seen:?}");
    let status = scratch.run(&["lab", "exec", "--topology", &topology, "fast", "--", "sh", "-c", "exit 7"]).status;
    assert_eq!(status.code(), Some(7), "the command's own status");
    // What is wrong is said.
    let words = |arguments: &[&str]| String::from_utf8_lossy(&scratch.run(arguments).stderr).into_owned();
    assert!(words(&["lab", "up", "--topology", &topology]).contains("is up already; hint: take it down with `foretell lab down"));
    assert!(words(&["lab", "exec", "--topology", &topology, "other", "--", "true"]).contains("it has `fast`, `slow`"));
    // A command that goes on in the lab does not outlive it.
    let mut inside =
        Run(scratch.command(&["lab", "exec", "--topology", &topology, "fast", "--", "sleep", "600"]).spawn().expect("it starts"));
    std::thread::sleep(Duration::from_millis(200));
    let down = scratch.json(&["lab", "down", "--topology", &topology]);
    assert_eq!(down["taken_down"], true);
    wait_for("the command to end", || inside.0.try_wait().expect("a child").is_some());
    assert_eq!(left_of("test-up"), Vec::<String>::new());
    assert_eq!(scratch.json(&["lab", "down", "--topology", &topology])["taken_down"], false);
    assert!(words(&["lab", "exec", "--topology", &topology, "fast", "--", "true"]).contains("is not up"));
}

#[test]
fn what_a_crash_left_is_taken_down_without_a_state_file() {
    if !can_be_made("what_a_crash_left_is_taken_down_without_a_state_file") {
        return;
    }
    let scratch = Scratch::new();
    let topology = named(&scratch, "test-half", "lab-4x1g-200m");
    scratch.json(&["lab", "up", "--topology", &topology]);
    // As if the machine had lost some of it.
    std::fs::remove_file("/run/foretell/labs/test-half.json").expect("it is there");
    let deleted = std::process::Command::new("ip").args(["netns", "delete", "foretell-lab_test-half_node-host-2"]).status();
    assert!(deleted.is_ok_and(|status| status.success()));
    let refused = scratch.run(&["lab", "up", "--topology", &topology]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is up in part"), "{refused:?}");
    assert!(!left_of("test-half").is_empty());
    // By the name alone: the file may be gone too.
    assert_eq!(scratch.json(&["lab", "down", "--topology", "test-half"])["taken_down"], true);
    assert_eq!(left_of("test-half"), Vec::<String>::new());
}

#[test]
fn who_is_killed_while_it_makes_a_lab_leaves_none() {
    if !can_be_made("who_is_killed_while_it_makes_a_lab_leaves_none") {
        return;
    }
    let scratch = Scratch::new();
    let topology = named(&scratch, "test-killed", "lab-4x1g-200m");
    let up = scratch.command(&["lab", "up", "--topology", &topology]).spawn();
    let mut up = Run(up.expect("the program starts"));
    wait_for("the lab to be begun", || left_of("test-killed").len() >= 2);
    let _ = up.0.kill();
    let _ = up.0.wait();
    // Its keeper takes down what there was.
    wait_for("what it made to go", || left_of("test-killed").is_empty());
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(left_of("test-killed"), Vec::<String>::new());
}

/// Sends bytes from one host of a lab to another by TCP; returns bytes a second. Python is at hand
/// where the tests of the repository run.
fn rate(scratch: &Scratch, topology: &str, from: &str, to: &str, address: &str, bytes: usize) -> Option<f64> {
    let receive = "import socket,sys\ns=socket.create_server(('0.0.0.0',5001))\nprint('ready',flush=True)\nc,_=s.accept()\n\
                   n=0\nwhile True:\n d=c.recv(1<<20)\n if not d: break\n n+=len(d)\nprint(n)";
    let send = "import socket,sys,time\nc=socket.create_connection((sys.argv[1],5001))\nb=bytes(int(sys.argv[2]))\n\
                t=time.perf_counter()\nc.sendall(b)\nc.shutdown(1)\nc.recv(1)\nprint(time.perf_counter()-t)";
    let inside = |node: &str, words: &[&str]| {
        let mut command =
            scratch.command(&[&["lab", "exec", "--topology", topology, node, "--", "python3", "-c"], words].concat());
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
fn links_carry_what_the_file_says() {
    if !can_be_made("links_carry_what_the_file_says") {
        return;
    }
    let scratch = Scratch::new();
    let topology = named(&scratch, "test-rate", "lab-4x1g-200m");
    scratch.json(&["lab", "up", "--topology", &topology]);
    // 125 MB/s within a rack, 25 MB/s between racks. No link is faster than it is stated, but for
    // what it may send at once and what lies in sockets. That links are not much slower, and those
    // within a rack not held to what those between racks are, shows in any try in which the machine
    // has time for them.
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
        let _ = writeln!(std::io::stderr(), "skipped: links_carry_what_the_file_says: python3 is missing, which measures");
        return;
    };
    assert!(near < NEAR && far < FAR, "{near} and {far}");
    assert!(near > 1.2 * FAR && far > LEAST_FAR, "{near} and {far}");
}

const PLAN: &str = "model: {family: mlp, widths: [64, 32, 48, 10]}\nglobal_batch: 32\noptimizer: sgd\n";

#[test]
fn a_run_in_a_lab_has_the_losses_of_a_run_on_this_machine() {
    if !can_be_made("a_run_in_a_lab_has_the_losses_of_a_run_on_this_machine") {
        return;
    }
    let scratch = Scratch::new();
    for (name, base, layout) in [
        ("test-data", "lab-2x1g", "{data: 2, micro_batch: 16}"),
        // Two ranks a host share memory; the stages are on hosts of their own.
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
        assert_eq!(left_of(name), Vec::<String>::new(), "a lab that was brought up for a run goes with it");
    }
}

/// Starts an endless run in a lab of its own, and waits until it trains.
fn endless(scratch: &Scratch, name: &str) -> (Run, Vec<i32>) {
    let topology = named(scratch, name, "lab-2x1g");
    let plan = scratch.file("plan.yaml", &format!("{PLAN}topology: {topology}\nlayout: {{data: 2, micro_batch: 16}}\n"));
    let arguments = ["execute", "--plan", text(&plan), "--steps", "100000000", "--no-evaluation", "--run", "first"];
    let run = Run(scratch.command(&arguments).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("it starts"));
    let (pids, metrics) = (scratch.path("first/ranks/pids"), scratch.path("first/metrics.jsonl"));
    wait_for("the run to train", || pids.is_file() && std::fs::metadata(&metrics).is_ok_and(|file| file.len() > 0));
    let pids = std::fs::read_to_string(pids).expect("it is there");
    (run, pids.lines().map(|line| line.parse().expect("a process's number")).collect())
}

fn lives(pid: i32) -> bool {
    let state = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).unwrap_or_default();
    state.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

#[test]
fn a_rank_that_dies_in_a_lab_is_named_and_nothing_is_left() {
    if !can_be_made("a_rank_that_dies_in_a_lab_is_named_and_nothing_is_left") {
        return;
    }
    let scratch = Scratch::new();
    let (mut run, pids) = endless(&scratch, "test-died");
    // SAFETY: kill takes two numbers; the process is one that this test has started.
    assert_eq!(unsafe { libc::kill(pids[1], libc::SIGKILL) }, 0);
    wait_for("the run to end", || run.0.try_wait().expect("a child").is_some());
    let mut words = String::new();
    run.0.stderr.take().expect("asked for").read_to_string(&mut words).expect("text");
    assert!(words.contains("rank 1") && words.contains("SIGKILL"), "{words}");
    assert!(pids.iter().all(|&pid| !lives(pid)));
    assert_eq!(left_of("test-died"), Vec::<String>::new());
}

#[test]
fn a_launcher_that_is_killed_leaves_no_rank_and_no_lab() {
    if !can_be_made("a_launcher_that_is_killed_leaves_no_rank_and_no_lab") {
        return;
    }
    let scratch = Scratch::new();
    let (mut run, pids) = endless(&scratch, "test-gone");
    assert!(!left_of("test-gone").is_empty());
    let _ = run.0.kill();
    let _ = run.0.wait();
    wait_for("the ranks to end", || pids.iter().all(|&pid| !lives(pid)));
    wait_for("the lab to go", || left_of("test-gone").is_empty());
}
