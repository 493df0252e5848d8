//! Ranks that an external launcher starts, one process each. The environment variables of torchrun,
//! Slurm or an MPI launcher tell each process its rank.

mod common;

use common::{Scratch, text};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

const PLAN: &str =
    "model: {family: mlp, widths: [64, 32, 10]}\ntopology: local\nglobal_batch: 32\nlayout: {data: 2, micro_batch: 16}\n";
/// Time within which a rank must end after the other one is lost.
const SOON: Duration = Duration::from_secs(10);

/// A process that is killed when the value is dropped.
struct Started(Option<Child>);

impl Started {
    fn output(mut self) -> Output {
        self.0.take().expect("the process was started").wait_with_output().expect("a child")
    }

    fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("the process was started")
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The folder, plan and port that the ranks of a test share.
struct Site {
    scratch: Scratch,
    plan: PathBuf,
    port: u16,
}

impl Site {
    fn new() -> Self {
        let scratch = Scratch::new();
        let plan = scratch.file("plan.yaml", PLAN);
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("an address").port();
        Self { scratch, plan, port }
    }

    fn secrets(&self) -> PathBuf {
        self.scratch.path("secrets")
    }

    /// Returns the key files that exist.
    fn key_files(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.secrets()).into_iter().flatten();
        files.flatten().map(|file| file.path()).filter(|path| path.extension().is_some_and(|end| end == "key")).collect()
    }

    fn start(&self, run: &str, steps: usize, variables: &[(&str, &str)]) -> Started {
        let steps = steps.to_string();
        let arguments = [
            "execute",
            "--plan",
            text(&self.plan),
            "--steps",
            &steps,
            "--oversubscribe",
            "--no-evaluation",
            "--run",
            run,
            "--overwrite",
            "--json",
        ];
        let mut command = self.scratch.command(&arguments);
        for name in ["FORETELL_RUN_KEY", "RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]
        {
            command.env_remove(name);
        }
        command.env("FORETELL_RENDEZVOUS_DIR", self.secrets()).env("FORETELL_PORT", self.port.to_string());
        command.env("FORETELL_START_SECONDS", "40").envs(variables.iter().copied());
        Started(Some(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")))
    }

    fn torchrun(&self, rank: &str, steps: usize, more: &[(&str, &str)]) -> Started {
        let variables = [("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2")];
        let all = [&variables[..], &[("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")], more].concat();
        self.start(&format!("run-{rank}"), steps, &all)
    }
}

fn losses(output: &Output) -> Vec<f64> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).expect("one document");
    document["loss"].as_array().expect("a list").iter().filter_map(Value::as_f64).collect()
}

fn standard_error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn wait_for(what: &str, most: Duration, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < most, "waited {most:?} for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn externally_started_ranks_have_the_losses_of_our_launcher() {
    let site = Site::new();
    let expected = losses(&site.start("own", 6, &[]).output());
    let slurm = |rank: &'static str| {
        let variables = [("SLURM_PROCID", rank), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", rank), ("SLURM_STEP_ID", "0")];
        [&variables[..], &[("SLURM_STEP_NODELIST", "localhost"), ("SLURM_STEP_NUM_NODES", "1"), ("SLURM_JOB_ID", "7")]].concat()
    };
    let mpi = |rank: &'static str| {
        let (own, of_machine) = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK");
        vec![(own, rank), (of_machine, rank), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]
    };
    let torchrun = |rank: &'static str| {
        let variables = [("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2")];
        [&variables[..], &[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")]].concat()
    };
    type Variables = Vec<(&'static str, &'static str)>;
    let launchers: [(&str, &dyn Fn(&'static str) -> Variables); 3] =
        [("torchrun", &torchrun), ("srun", &slurm), ("mpirun", &mpi)];
    for (name, variables) in launchers {
        // Rank 1 starts first and waits for rank 0.
        let second = site.start("second", 6, &variables("1"));
        let first = site.start(name, 6, &variables("0")).output();
        assert_eq!(losses(&first), expected, "{name}");
        let second = second.output();
        assert!(second.status.success() && second.stdout.is_empty(), "{name}: {}", standard_error(&second));
        assert!(site.scratch.path(name).join("metrics.jsonl").is_file() && !site.scratch.path("second").exists());
        assert!(site.key_files().is_empty(), "{name} must delete its key file");
    }
}

#[test]
fn missing_ranks_are_named_and_ranks_with_another_key_are_refused() {
    let site = Site::new();
    let soon = ("FORETELL_START_SECONDS", "3");
    let alone = site.torchrun("0", 6, &[soon]).output();
    assert_eq!(alone.status.code(), Some(1));
    assert!(standard_error(&alone).contains("rank") && standard_error(&alone).contains('1'), "{}", standard_error(&alone));
    let without_rank_0 = site.torchrun("1", 6, &[soon]).output();
    assert!(
        !without_rank_0.status.success() && standard_error(&without_rank_0).contains("secret"),
        "{}",
        standard_error(&without_rank_0)
    );
    let keys = ["11", "22"].map(|digits| digits.repeat(48));
    let with_other_key = site.torchrun("1", 6, &[soon, ("FORETELL_RUN_KEY", &keys[1])]);
    let first = site.torchrun("0", 6, &[soon, ("FORETELL_RUN_KEY", &keys[0])]).output();
    assert_eq!(first.status.code(), Some(1), "{}", standard_error(&first));
    assert!(!with_other_key.output().status.success());
    assert!(!standard_error(&first).contains("panicked"));
}

/// Listens at a port of its own, and passes on to and from `port` what arrives. What the launcher
/// sends is sent twice from byte 1000 on, which is in the middle of the job. Returns the port.
fn relay_that_repeats(port: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = listener.local_addr().expect("an address").port();
    let pass_on = |mut from: TcpStream, mut to: TcpStream, once: usize| {
        std::thread::spawn(move || {
            let (mut piece, mut passed) = ([0; 65536], 0);
            while let Ok(length @ 1..) = from.read(&mut piece) {
                passed += length;
                let times = if passed > once { 2 } else { 1 };
                if (0..times).any(|_| to.write_all(&piece[..length]).is_err()) {
                    break;
                }
            }
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        });
    };
    std::thread::spawn(move || {
        for rank in listener.incoming().flatten() {
            // The launcher may not listen yet: the rank tries again.
            let Ok(launcher) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            let clone = |stream: &TcpStream| stream.try_clone().expect("another handle");
            pass_on(clone(&rank), clone(&launcher), usize::MAX);
            pass_on(launcher, rank, 1000);
        }
    });
    own
}

#[test]
fn a_rank_that_hears_a_changed_order_fails_and_says_why() {
    let site = Site::new();
    let key = ("FORETELL_RUN_KEY", &*"5a".repeat(48));
    let through = relay_that_repeats(site.port).to_string();
    let second = site.torchrun("1", 6, &[key, ("FORETELL_PORT", &through)]);
    let first = site.torchrun("0", 6, &[key]).output();
    let second = second.output();
    for (rank, output) in [&first, &second].into_iter().enumerate() {
        let message = standard_error(output);
        assert_eq!(output.status.code(), Some(1), "rank {rank}: {message}");
        assert!(message.contains("what the launcher sent was changed, repeated or cut on the way"), "rank {rank}: {message}");
    }
}

#[test]
fn a_number_of_ranks_other_than_the_plans_is_refused() {
    let site = Site::new();
    let refused = site.torchrun("0", 6, &[("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3")]).output();
    let message = standard_error(&refused);
    assert!(message.contains("2 ranks") && message.contains("torchrun started 3"), "{message}");
}

#[test]
fn a_lost_rank_ends_the_run_and_a_stale_key_does_not_stop_the_next() {
    let site = Site::new();
    let mut second = site.torchrun("1", 100_000_000, &[]);
    let mut first = site.torchrun("0", 100_000_000, &[]);
    let metrics = site.scratch.path("run-0").join("metrics.jsonl");
    let trains = |path: &Path| std::fs::metadata(path).is_ok_and(|file| file.len() > 0);
    wait_for("the run to train", Duration::from_secs(60), || trains(&metrics));
    second.child().kill().expect("it runs");
    wait_for("the first rank to end", SOON, || first.child().try_wait().expect("a child").is_some());
    let first = first.output();
    assert!(first.status.code() == Some(1) && standard_error(&first).contains("rank 1"), "{}", standard_error(&first));
    // When rank 0 is killed, the other rank ends. The key file stays.
    std::fs::remove_file(&metrics).expect("the metrics file exists");
    let mut second = site.torchrun("1", 100_000_000, &[]);
    let mut first = site.torchrun("0", 100_000_000, &[]);
    wait_for("the run to train", Duration::from_secs(60), || trains(&metrics));
    first.child().kill().expect("it runs");
    wait_for("the other rank to end", SOON, || second.child().try_wait().expect("a child").is_some());
    assert_eq!(site.key_files().len(), 1);
    let second = site.torchrun("1", 3, &[]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(losses(&site.torchrun("0", 3, &[]).output()).len(), 3);
    assert!(second.output().status.success());
}
