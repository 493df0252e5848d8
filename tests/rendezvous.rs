//! Ranks that somebody else starts: a process each, told by torchrun's, Slurm's or an MPI
//! launcher's variables which it is.

mod common;

use common::{Scratch, text};
use serde_json::Value;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

const PLAN: &str =
    "model: {family: mlp, widths: [64, 32, 10]}\ntopology: local\nglobal_batch: 32\nlayout: {data: 2, micro_batch: 16}\n";
/// How soon a run must have ended whose other rank is lost.
const SOON: Duration = Duration::from_secs(10);

/// A process that ends with its test.
struct Started(Option<Child>);

impl Started {
    fn output(mut self) -> Output {
        self.0.take().expect("it was started").wait_with_output().expect("a child")
    }

    fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("it was started")
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

/// What two ranks share.
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

    /// The secrets' files that are there.
    fn kept(&self) -> Vec<PathBuf> {
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

fn words(output: &Output) -> String {
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
fn ranks_that_others_start_train_as_those_of_our_own_launcher() {
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
        // The caller that comes first waits.
        let second = site.start("second", 6, &variables("1"));
        let first = site.start(name, 6, &variables("0")).output();
        assert_eq!(losses(&first), expected, "{name}");
        let second = second.output();
        assert!(second.status.success() && second.stdout.is_empty(), "{name}: {}", words(&second));
        assert!(site.scratch.path(name).join("metrics.jsonl").is_file() && !site.scratch.path("second").exists());
        assert!(site.kept().is_empty(), "{name} leaves the secret behind");
    }
}

#[test]
fn who_does_not_come_is_named_and_who_has_another_secret_is_not_let_in() {
    let site = Site::new();
    let soon = ("FORETELL_START_SECONDS", "3");
    let alone = site.torchrun("0", 6, &[soon]).output();
    assert_eq!(alone.status.code(), Some(1));
    assert!(words(&alone).contains("rank") && words(&alone).contains('1'), "{}", words(&alone));
    let lonely = site.torchrun("1", 6, &[soon]).output();
    assert!(!lonely.status.success() && words(&lonely).contains("secret"), "{}", words(&lonely));
    let keys = ["11", "22"].map(|digits| digits.repeat(48));
    let stranger = site.torchrun("1", 6, &[soon, ("FORETELL_RUN_KEY", &keys[1])]);
    let first = site.torchrun("0", 6, &[soon, ("FORETELL_RUN_KEY", &keys[0])]).output();
    assert_eq!(first.status.code(), Some(1), "{}", words(&first));
    assert!(!stranger.output().status.success());
    assert!(!words(&first).contains("panicked"));
}

#[test]
fn another_number_of_ranks_than_the_plans_is_refused_with_both() {
    let site = Site::new();
    let refused = site.torchrun("0", 6, &[("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3")]).output();
    let words = words(&refused);
    assert!(words.contains("2 ranks") && words.contains("torchrun started 3"), "{words}");
}

#[test]
fn a_lost_rank_ends_the_run_and_what_it_leaves_does_not_stop_the_next() {
    let site = Site::new();
    let mut second = site.torchrun("1", 100_000_000, &[]);
    let mut first = site.torchrun("0", 100_000_000, &[]);
    let metrics = site.scratch.path("run-0").join("metrics.jsonl");
    let trains = |path: &Path| std::fs::metadata(path).is_ok_and(|file| file.len() > 0);
    wait_for("the run to train", Duration::from_secs(60), || trains(&metrics));
    second.child().kill().expect("it runs");
    wait_for("the first rank to end", SOON, || first.child().try_wait().expect("a child").is_some());
    let first = first.output();
    assert!(first.status.code() == Some(1) && words(&first).contains("rank 1"), "{}", words(&first));
    // A launcher that is killed takes its ranks along, and leaves its secret.
    std::fs::remove_file(&metrics).expect("it is there");
    let mut second = site.torchrun("1", 100_000_000, &[]);
    let mut first = site.torchrun("0", 100_000_000, &[]);
    wait_for("the run to train", Duration::from_secs(60), || trains(&metrics));
    first.child().kill().expect("it runs");
    wait_for("the other rank to end", SOON, || second.child().try_wait().expect("a child").is_some());
    assert_eq!(site.kept().len(), 1);
    let second = site.torchrun("1", 3, &[]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(losses(&site.torchrun("0", 3, &[]).output()).len(), 3);
    assert!(second.output().status.success());
}
