//! Every reader of files gets mutated files. It must return a value or an error, within seconds and
//! within a bound on memory.
//!
//! `FORETELL_FUZZ_INPUTS` sets how many inputs each reader gets, and `FORETELL_FUZZ_FIRST` the
//! number of the first, so that a failure replays alone.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails may panic")]

use foretell_executor::transport::RunKey;
use foretell_fuzz::Corpus;
use foretell_models::{GraphOptions, Model};
use foretell_program::{Plan, Profile, compile};
use foretell_score::read_rows;
use foretell_topologies::{ImportOptions, Topology, from_nccl_xml, from_smi_topo};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::de::DeserializeOwned;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Most time for one input. On a busy machine an ordinary one takes a tenth of it.
const MOST_TIME: Duration = Duration::from_secs(20);
/// Most address space of the process of these tests.
const MOST_MEMORY: u64 = 12 << 30;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Gives all valid files and many mutated ones to `read`, which returns whether it accepted a text.
fn fuzz(name: &str, folder: &str, ending: &str, read: impl Fn(&str) -> bool) {
    setrlimit(Resource::As, Rlimit { current: Some(MOST_MEMORY), maximum: Some(MOST_MEMORY) }).unwrap();
    let corpus = Corpus::read(&root().join(folder), ending).unwrap();
    assert!(corpus.files().iter().any(|file| read(&String::from_utf8_lossy(file))), "no file of the corpus is valid");
    let (first, count) = (number("FORETELL_FUZZ_FIRST", 0), number("FORETELL_FUZZ_INPUTS", 400));
    let mut accepted = 0;
    for input in first..first + count {
        let bytes = corpus.mutated(input);
        let text = String::from_utf8_lossy(&bytes);
        let started = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| read(&text)));
        assert!(
            result.is_ok(),
            "{name}: input {input} panics; FORETELL_FUZZ_FIRST={input} FORETELL_FUZZ_INPUTS=1 replays it:\n{text}"
        );
        assert!(started.elapsed() < MOST_TIME, "{name}: input {input} takes {:?}:\n{text}", started.elapsed());
        accepted += u64::from(result.unwrap_or_default());
    }
    println!("{name}: {count} inputs from {first}, {accepted} accepted");
}

fn yaml<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_saphyr::from_str(text).ok()
}

#[test]
fn no_topology_file_makes_the_reader_panic() {
    fuzz("topology", "topologies/library", ".yaml", |text| {
        let topology = Topology::from_yaml(text, "fuzzed").and_then(|topology| topology.validate().map(|()| topology));
        topology.is_ok()
    });
}

#[test]
fn no_model_file_makes_the_reader_panic() {
    fuzz("model", "tests/fuzz/corpus/model", ".yaml", |text| {
        yaml::<Model>(text).is_some_and(|model| model.graph("fuzzed", &GraphOptions::ONE).is_ok())
    });
}

#[test]
fn no_plan_makes_the_compiler_panic() {
    let model = yaml::<Model>("{family: gpt, layers: 2, hidden: 16, heads: 2, vocab: 32, sequence: 8}").unwrap();
    fuzz("plan", "tests/fuzz/corpus/plan", ".yaml", |text| {
        yaml::<Plan>(text).is_some_and(|plan| compile(&model, "fuzzed", &plan).is_ok())
    });
}

#[test]
fn no_profile_makes_the_reader_panic() {
    fuzz("profile", "tests/fuzz/corpus/profile", ".yaml", |text| yaml::<Profile>(text).is_some());
}

#[test]
fn no_table_of_measurements_makes_the_reader_panic() {
    fuzz("csv", "tests/fuzz/corpus/csv", ".csv", |text| read_rows(text).is_ok());
}

#[test]
fn no_output_of_nvidias_tools_makes_the_importers_panic() {
    let options = ImportOptions { name: "here".into(), device: Some("h100-sxm-80g".into()), nic_bandwidth: None };
    fuzz("smi", "topologies/tests/imports", ".smi-topo.txt", |text| from_smi_topo(text, &options).is_ok());
    fuzz("nccl", "topologies/tests/imports", ".nccl.xml", |text| from_nccl_xml(text, &options).is_ok());
}

#[test]
fn no_text_of_a_key_makes_its_reader_panic() {
    fuzz("key", "tests/fuzz/corpus", ".key", |text| RunKey::from_text(text).is_ok());
}
