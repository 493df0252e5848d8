//! Every reader of files gets mutated files. It must return a value or an error, within seconds and
//! within a bound on memory.
//!
//! `FORETELL_FUZZ_INPUTS` sets how many inputs each reader gets, and `FORETELL_FUZZ_FIRST` the
//! number of the first, so that a failure replays alone.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails may panic")]

use foretell_executor::checkpoint::{check_start, last_whole};
use foretell_executor::data::{DataSource, Dataset, InputOptions, SampleShape};
use foretell_executor::transport::RunKey;
use foretell_executor::{Length, OnDivergence, Start, TrainingJob};
use foretell_export::{Framework, Job, KinetoTrace, PlanForm, export_job, import_plan, unmatched};
use foretell_fuzz::Corpus;
use foretell_models::{GraphOptions, Model, from_hugging_face, from_torch};
use foretell_program::{Layout, Plan, Profile, Rank, Training, compile};
use foretell_score::read_rows;
use foretell_topologies::{ImportOptions, Topology, from_nccl_xml, from_rocm_topo, from_slurm_nodes, from_smi_topo};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::de::DeserializeOwned;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
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
    let corpus = Corpus::read(&root().join(folder), ending).unwrap();
    fuzz_bytes(name, &corpus, |bytes| read(&String::from_utf8_lossy(bytes)));
}

/// As [`fuzz`], with files that need not be texts.
fn fuzz_bytes(name: &str, corpus: &Corpus, read: impl Fn(&[u8]) -> bool) {
    setrlimit(Resource::As, Rlimit { current: Some(MOST_MEMORY), maximum: Some(MOST_MEMORY) }).unwrap();
    assert!(corpus.files().iter().any(|file| read(file)), "{name}: no file of the corpus is accepted");
    let (first, count) = (number("FORETELL_FUZZ_FIRST", 0), number("FORETELL_FUZZ_INPUTS", 400));
    let mut accepted = 0;
    for input in first..first + count {
        let bytes = corpus.mutated(input);
        let text = String::from_utf8_lossy(&bytes);
        let started = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| read(&bytes)));
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
fn no_output_of_other_tools_makes_the_importers_panic() {
    let options = ImportOptions { name: "here".into(), device: Some("h100-sxm-80g".into()), nic_bandwidth: None };
    fuzz("smi", "topologies/tests/imports", ".smi-topo.txt", |text| from_smi_topo(text, &options).is_ok());
    fuzz("nccl", "topologies/tests/imports", ".nccl.xml", |text| from_nccl_xml(text, &options).is_ok());
    fuzz("rocm", "topologies/tests/imports", ".rocm-topo.txt", |text| from_rocm_topo(text, &options).is_ok());
    fuzz("slurm", "topologies/tests/imports", ".slurm-nodes.txt", |text| from_slurm_nodes(text, &options).is_ok());
}

#[test]
fn no_trace_of_pytorchs_profiler_makes_its_reader_panic() {
    let model = yaml::<Model>("{family: mlp, widths: [4, 3, 2]}").unwrap();
    let program = compile(&model, "fuzzed", &Plan::new(Layout { micro_batch: 4, ..Layout::default() }, 4)).unwrap().training;
    let list = program.list_of(Rank(0));
    fuzz("kineto", "tests/fuzz/corpus/kineto", ".json", |text| {
        let Ok(trace) = KinetoTrace::parse(text) else { return false };
        let spans: usize = trace.steps.iter().map(|step| step.matched(list).spans.len()).sum();
        spans > 0 && unmatched(&trace.steps, list).iter().all(|kernel| kernel.count > 0)
    });
}

#[test]
fn no_text_of_a_key_makes_its_reader_panic() {
    fuzz("key", "tests/fuzz/corpus", ".key", |text| RunKey::from_text(text).is_ok());
}

#[test]
fn no_recipe_makes_the_reader_panic() {
    fuzz("recipe", "tests/fuzz/corpus/recipe", ".yaml", |text| yaml::<Training>(text).is_some());
}

#[test]
fn no_config_of_transformers_makes_the_importer_panic() {
    let cases = std::fs::read(root().join("models/tests/hugging_face.json")).unwrap();
    let cases: serde_json::Value = serde_json::from_slice(&cases).unwrap();
    let cases = cases["cases"].as_array().unwrap().iter();
    let corpus = Corpus::of(cases.map(|case| case["sparse"].to_string().into_bytes()).collect());
    fuzz_bytes("config", &corpus, |bytes| {
        let imported = from_hugging_face(&String::from_utf8_lossy(bytes), None);
        imported.is_ok_and(|imported| imported.model.graph("fuzzed", &GraphOptions::ONE).is_ok())
    });
}

#[test]
fn no_trace_of_a_step_makes_the_importer_panic() {
    let files = ["mlp", "cnn", "unet", "experts"].map(|name| root().join(format!("models/tests/torch/{name}.json")));
    let corpus = Corpus::of(files.map(|file| std::fs::read(file).unwrap()).to_vec());
    fuzz_bytes("step", &corpus, |bytes| {
        let imported = from_torch(&String::from_utf8_lossy(bytes), None);
        imported.is_ok_and(|imported| imported.model.graph("fuzzed", &GraphOptions::ONE).is_ok())
    });
}

#[test]
fn no_job_of_another_framework_makes_the_importers_panic() {
    let model = Model::named("llama3-8b").unwrap();
    for (framework, form, file) in [
        (Framework::Megatron, PlanForm::MegatronArguments, "megatron.args"),
        (Framework::Torchtitan, PlanForm::Torchtitan, "torchtitan.toml"),
        (Framework::Deepspeed, PlanForm::Deepspeed, "deepspeed.json"),
        (Framework::Accelerate, PlanForm::HuggingFaceTrainer, "training_arguments.json"),
        (Framework::Axolotl, PlanForm::HuggingFaceTrainer, "axolotl.yaml"),
        (Framework::Torchtune, PlanForm::Torchtune, "torchtune.yaml"),
    ] {
        let layouts = [
            Layout { data: 8, zero: 1, ..Layout::default() },
            Layout { data: 2, tensor: 2, pipeline: 2, virtual_stages: 1, sequence_parallel: true, ..Layout::default() },
        ];
        let files = layouts.into_iter().filter_map(|layout| {
            let plan = Plan::new(layout, 16);
            let job = export_job(&Job { name: "model", model: &model, plan: &plan, devices_per_node: 8 }, framework).ok()?;
            job.files.into_iter().find(|(name, _)| name == file).map(|(_, text)| text.into_bytes())
        });
        let corpus = Corpus::of(files.collect());
        fuzz_bytes(file, &corpus, |bytes| import_plan(&String::from_utf8_lossy(bytes), form, 8).is_ok());
    }
}

/// A folder with the checkpoint of the corpus as the one after two steps of a run.
fn run_with_checkpoint() -> tempfile::TempDir {
    let run = tempfile::tempdir().unwrap();
    let checkpoint = run.path().join("checkpoints/2");
    std::fs::create_dir_all(&checkpoint).unwrap();
    for name in ["state.json", "model.safetensors", "optimizer.safetensors"] {
        std::fs::copy(root().join("tests/fuzz/corpus/checkpoint").join(name), checkpoint.join(name)).unwrap();
    }
    run
}

fn corpus_file(path: &str) -> Corpus {
    Corpus::of(vec![std::fs::read(root().join("tests/fuzz/corpus").join(path)).unwrap()])
}

/// A job that starts from a path, of the model of the corpus's checkpoint.
fn job_from(start: Start) -> TrainingJob {
    let mut plan = Plan::new(Layout { data: 2, micro_batch: 2, ..Layout::default() }, 4);
    plan.optimizer = foretell_models::Optimizer::AdamW;
    TrainingJob {
        model: yaml("{family: mlp, widths: [4, 3, 2]}").unwrap(),
        name: "mlp".into(),
        plan,
        data: DataSource::Synthetic,
        input: InputOptions::default(),
        cores_per_rank: 1,
        seed: 0,
        length: Length::Steps(2),
        evaluate: false,
        timeline: None,
        start,
        checkpoints: None,
        replay: None,
        on_divergence: OnDivergence::default(),
    }
}

#[test]
fn no_state_of_a_checkpoint_makes_resuming_panic() {
    let run = run_with_checkpoint();
    let path = run.path().join("checkpoints/2");
    fuzz_bytes("state", &corpus_file("checkpoint/state.json"), |bytes| {
        std::fs::write(path.join("state.json"), bytes).unwrap();
        let Ok(found) = last_whole(run.path()) else { return false };
        check_start(&job_from(Start::Checkpoint { path: path.clone(), step: found.state.step })).is_ok()
    });
}

#[test]
fn no_file_of_weights_makes_its_reader_panic() {
    for name in ["model.safetensors", "optimizer.safetensors"] {
        let run = run_with_checkpoint();
        let path = run.path().join("checkpoints/2");
        fuzz_bytes(name, &corpus_file(&format!("checkpoint/{name}")), |bytes| {
            std::fs::write(path.join(name), bytes).unwrap();
            let is_whole = last_whole(run.path()).is_ok();
            // Without checksums the contents decide.
            let is_taken = check_start(&job_from(Start::Checkpoint { path: path.clone(), step: 2 })).is_ok();
            let is_initial = check_start(&job_from(Start::Weights(path.clone()))).is_ok();
            is_whole && is_taken && is_initial
        });
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(root().join("tests/fuzz/corpus/checkpoint/model.safetensors"), folder.path().join("part.safetensors")).unwrap();
    let index = "model.safetensors.index.json";
    fuzz_bytes("index", &corpus_file(&format!("checkpoint/{index}")), |bytes| {
        std::fs::write(folder.path().join(index), bytes).unwrap();
        check_start(&job_from(Start::Weights(folder.path().into()))).is_ok()
    });
}

/// Gives mutations of one file of a data set to the reader of that set.
fn fuzz_data(name: &str, files: &[(&str, &[u8])], changed: &str, opened: &Path, shape: &SampleShape) {
    let folder = tempfile::tempdir().unwrap();
    files.iter().for_each(|(file, bytes)| std::fs::write(folder.path().join(file), bytes).unwrap());
    let valid = files.iter().find(|(file, _)| *file == changed).unwrap().1;
    let source = DataSource::Path(folder.path().join(opened));
    fuzz_bytes(name, &Corpus::of(vec![valid.to_vec()]), |bytes| {
        std::fs::write(folder.path().join(changed), bytes).unwrap();
        Dataset::open(&source, shape, 0).is_ok()
    });
}

#[test]
fn no_file_of_samples_makes_its_reader_panic() {
    let images = [&[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2][..], &[7; 8]].concat();
    let labels = [0, 0, 8, 1, 0, 0, 0, 2, 1, 0];
    let idx: [(&str, &[u8]); 4] = [
        ("train-images-idx3-ubyte", &images),
        ("train-labels-idx1-ubyte", &labels),
        ("t10k-images-idx3-ubyte", &images),
        ("t10k-labels-idx1-ubyte", &labels),
    ];
    let image = SampleShape::Image { channels: 1, height: 2, width: 2, classes: 2 };
    fuzz_data("idx images", &idx, "train-images-idx3-ubyte", Path::new("."), &image);
    fuzz_data("idx labels", &idx, "t10k-labels-idx1-ubyte", Path::new("."), &image);
    let mut tokens = [&b"FTTOKENS"[..], &[1, 0, 0, 0, 2, 0, 0, 0, 40, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0]].concat();
    tokens.resize(64, 0);
    tokens.extend([9, 0].repeat(40));
    let sequence = SampleShape::Tokens { sequence: 4, vocabulary: 16 };
    fuzz_data("tokens", &[("some.tokens", &tokens)], "some.tokens", Path::new("some.tokens"), &sequence);
    let megatron = megatron_index();
    let pair: [(&str, &[u8]); 2] = [("some.idx", &megatron), ("some.bin", &[3, 0].repeat(40))];
    fuzz_data("megatron", &pair, "some.idx", Path::new("some.idx"), &sequence);
}

/// Megatron's index of one document of forty 16-bit tokens.
fn megatron_index() -> Vec<u8> {
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(8);
    index.extend(1_u64.to_le_bytes());
    index.extend(2_u64.to_le_bytes());
    index.extend(40_u32.to_le_bytes());
    index.extend(0_u64.to_le_bytes());
    index.extend([0_u64, 1].iter().flat_map(|document| document.to_le_bytes()));
    index
}
