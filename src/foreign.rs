//! Recognises files of another kind than a command asks for: files of other tools, and our own of
//! another kind. Used only for messages, after a file could not be read.

use crate::failure::{Failure, code};
use foretell_export::PlanForm;
use serde_json::{Map, Value};
use std::path::Path;

/// The kind of file that a command asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A model file.
    Model,
    /// A topology file.
    Topology,
    /// A plan file.
    Plan,
    /// A profile.
    Profile,
}

/// A kind of file: its description, a hint on what to do with it, and which of our kinds it is, if
/// any.
type Kind = (&'static str, &'static str, Option<Wanted>);

const MODEL: Kind = ("a model file", "give it to `--model`", Some(Wanted::Model));
const TOPOLOGY: Kind = ("a topology file", "give it to `--topology`", Some(Wanted::Topology));
const PLAN: Kind = ("a plan file", "give it to `--plan`", Some(Wanted::Plan));
const PROFILE: Kind = ("a profile of `foretell calibrate`", "give it to `--profile`", Some(Wanted::Profile));

const CONFIG: Kind = ("a `config.json` of Transformers", "give it to `--model`, or use `foretell import hf-config`", None);
const TRACE: Kind = ("a trace, as PyTorch's profiler writes them", "use `foretell import kineto`", None);
const DEEPSPEED: Kind = ("DeepSpeed's configuration", "use `foretell import deepspeed-json`", None);
const TRAINER: Kind = ("`TrainingArguments` of Hugging Face", "use `foretell import hf-trainer`", None);
const TOKENIZER: Kind = ("a tokenizer", "give it to `foretell data tokenize --tokenizer`", None);
const WEIGHT_MAP: Kind = ("an index of weights", "give the `config.json` beside it to `--model`", None);
const TORCHTITAN: Kind = ("a file of settings in TOML, as torchtitan has them", "use `foretell import torchtitan-toml`", None);
const MEGATRON: Kind = ("a list of Megatron-LM's arguments", "use `foretell import megatron-args`", None);
const SBATCH: Kind = ("a batch script of Slurm", "`foretell export --to slurm` writes one; a plan cannot be read from it", None);
const NODES: Kind = ("Slurm's list of nodes", "use `foretell import slurm-nodes`", None);
const NVIDIA: Kind = ("the output of `nvidia-smi topo -m`", "use `foretell import nvidia-smi-topo`", None);
const ROCM: Kind = ("the output of `rocm-smi`", "use `foretell import rocm-smi-topo`", None);
const NCCL: Kind = ("NCCL's topology dump", "use `foretell import nccl-xml`", None);
const TORCHTUNE: Kind = ("a recipe of torchtune", "use `foretell import torchtune`", None);
const NEMO: Kind =
    ("a configuration of NeMo", "it is not read; give Megatron-LM's arguments to `foretell import megatron-args`", None);
const NANOTRON: Kind = ("a configuration of nanotron", "it is not read; use `foretell plan --fix` with its sizes", None);
const FOUNDRY: Kind = ("a configuration of llm-foundry", "it is not read; use `foretell plan --stack mosaicml-composer`", None);
const ACCELERATE: Kind = ("Accelerate's configuration", "use `foretell import accelerate`", None);

/// Replaces the failure of reading a file that is recognised as another kind than the wanted one.
pub fn explain(failure: Failure, text: &str, path: &Path, wanted: Wanted) -> Failure {
    match recognise(text) {
        Some((what, hint, own)) if own != Some(wanted) => {
            let asked = match wanted {
                Wanted::Model => "a model",
                Wanted::Topology => "a topology",
                Wanted::Plan => "a plan",
                Wanted::Profile => "a profile",
            };
            Failure::input(code::FILE_KIND, format!("this is {what}, and {asked} is asked for")).hint(hint).in_file(path)
        }
        _ => failure,
    }
}

/// Refuses a file that is recognised as another kind than the one that it is imported as.
pub fn refuse_other_kinds(text: &str, form: PlanForm, path: &Path) -> Result<(), Failure> {
    let own = match form {
        PlanForm::MegatronArguments => MEGATRON,
        PlanForm::Torchtitan => TORCHTITAN,
        PlanForm::Deepspeed => DEEPSPEED,
        PlanForm::HuggingFaceTrainer => TRAINER,
        PlanForm::Accelerate => ACCELERATE,
        PlanForm::Torchtune => TORCHTUNE,
    };
    match recognise(text) {
        // Scripts and lists of settings contain each other's words, so these kinds are not told
        // apart.
        Some(kind) if kind != own && ![MEGATRON, TORCHTITAN, SBATCH].contains(&kind) => {
            let (what, hint, _) = kind;
            let message = format!("this is {what}, and {} is asked for", own.0);
            Err(Failure::input(code::FILE_KIND, message).hint(hint).in_file(path))
        }
        _ => Ok(()),
    }
}

/// What a binary file may be: its description, and a hint.
pub fn of_bytes(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    let begins = |head: &[u8]| bytes.starts_with(head);
    let length = bytes.first_chunk().map(|head| u64::from_le_bytes(*head));
    let weights = "give the `config.json` beside it to `--model`, and weights to `execute --init`";
    // ONNX's protocol buffer begins with its version, followed by a producer, graph or operators.
    if matches!(bytes, [0x08, 1..=16, 0x12 | 0x3a | 0x42, ..]) {
        Some(("a model in ONNX's format", "trace the step in PyTorch: `python -m foretell.trace FILE.py:FUNCTION -o trace.json`"))
    } else if bytes.get(8) == Some(&b'{') && length.is_some_and(|length| length < 1 << 32) {
        Some(("a file of weights in safetensors' format", weights))
    } else if begins(b"PK\x03\x04") {
        Some(("a zip archive, such as a checkpoint of PyTorch", weights))
    } else if begins(b"\x1f\x8b") {
        Some(("compressed with gzip", "decompress it"))
    } else if begins(b"SQLite format 3") {
        Some((
            "a database, as Nsight Systems exports them",
            "traces of PyTorch's profiler can be read (`foretell import kineto`)",
        ))
    } else {
        None
    }
}

fn recognise(text: &str) -> Option<Kind> {
    let text = text.trim_start();
    if text.starts_with('{')
        && let Ok(Value::Object(object)) = serde_json::from_str(text)
    {
        return of_object(&object);
    }
    if text.starts_with('<') && text.contains("<system") {
        return Some(NCCL);
    }
    let keys = of_keys(|key| text.lines().any(|line| line.strip_prefix(key).is_some_and(|rest| rest.starts_with(':'))));
    if keys.is_some_and(|(.., own)| own.is_some()) {
        // The keys show one of our own files, whatever its comments mention.
        return keys;
    }
    if text.contains("_component_: torchtune.") {
        return Some(TORCHTUNE);
    }
    let has = |part: &str| text.contains(part);
    let is_section = |line: &str| {
        let name = line.strip_prefix('[').and_then(|line| line.trim_end().strip_suffix(']')).unwrap_or_default();
        !name.is_empty() && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "_.".contains(letter))
    };
    if has("--tensor-model-parallel-size") || has("--num-layers") || has("pretrain_gpt.py") {
        return Some(MEGATRON);
    }
    if has("#SBATCH ") {
        return Some(SBATCH);
    }
    if has("NodeName=") && has("CPUTot=") {
        return Some(NODES);
    }
    if has("GPU0") && (has("CPU Affinity") || has("Legend:")) {
        return Some(NVIDIA);
    }
    if has("ROCm System Management Interface") {
        return Some(ROCM);
    }
    if text.lines().any(is_section) {
        return Some(TORCHTITAN);
    }
    keys
}

fn of_object(object: &Map<String, Value>) -> Option<Kind> {
    let has = |key: &str| object.contains_key(key);
    let has_one = |keys: &[&str]| keys.iter().any(|key| has(key));
    if has("traceEvents") {
        Some(TRACE)
    } else if has("model_type") {
        Some(CONFIG)
    } else if has_one(&["zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"]) {
        Some(DEEPSPEED)
    } else if has_one(&["per_device_train_batch_size", "num_train_epochs"]) {
        Some(TRAINER)
    } else if has("weight_map") {
        Some(WEIGHT_MAP)
    } else if has("added_tokens") {
        Some(TOKENIZER)
    } else {
        of_keys(has)
    }
}

/// Kinds of YAML files, by the keys of their outermost mapping.
fn of_keys(has: impl Fn(&str) -> bool) -> Option<Kind> {
    if has("distributed_type") && has("compute_environment") {
        Some(ACCELERATE)
    } else if has("layout") && has("model") {
        Some(PLAN)
    } else if has("parallelism") && has("tokens") && (has("checkpoints") || has("optimizer")) {
        Some(NANOTRON)
    } else if has("trainer") && has("model") && (has("exp_manager") || has("run") || has("name")) {
        Some(NEMO)
    } else if has("fsdp_config") && has("max_seq_len") && has("model") {
        Some(FOUNDRY)
    } else if has("kernels") && has("exchanges") {
        Some(PROFILE)
    } else if has("family") {
        Some(MODEL)
    } else if has("nodes") && (has("network") || has("devices")) && !has("model") {
        Some(TOPOLOGY)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_tools_are_recognised() {
        let cases = [
            ("{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 1}}", "import deepspeed-json"),
            ("{\"traceEvents\": [], \"schemaVersion\": 1}", "import kineto"),
            ("{\"model_type\": \"llama\"}", "import hf-config"),
            ("{\"per_device_train_batch_size\": 8}", "import hf-trainer"),
            ("{\"weight_map\": {}}", "`config.json` beside it"),
            ("{\"added_tokens\": [], \"model\": {}}", "data tokenize"),
            ("# a job\n[parallelism]\ntensor_parallel_degree = 2\n", "import torchtitan-toml"),
            ("#!/bin/bash\ntorchrun pretrain_gpt.py --num-layers 32\n", "import megatron-args"),
            ("#!/bin/bash\n#SBATCH --nodes=2\n", "export --to slurm"),
            ("NodeName=n1 Arch=x86_64\n   CPUTot=64\n", "import slurm-nodes"),
            ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\t0-31\n", "import nvidia-smi-topo"),
            ("======= ROCm System Management Interface =======\n", "import rocm-smi-topo"),
            ("<system version=\"1\"></system>", "import nccl-xml"),
            ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "import accelerate"),
            ("model:\n  _component_: torchtune.models.llama3.llama3_8b\n", "import torchtune"),
            ("trainer:\n  devices: 8\nmodel:\n  mcore_gpt: true\nexp_manager:\n  x: 1\n", "NeMo"),
            ("parallelism:\n  dp: 8\ntokens:\n  x: 1\noptimizer:\n  x: 1\n", "nanotron"),
            ("max_seq_len: 2048\nmodel:\n  name: mpt\nfsdp_config:\n  x: 1\n", "llm-foundry"),
        ];
        for (text, expected) in cases {
            for wanted in [Wanted::Model, Wanted::Topology, Wanted::Plan, Wanted::Profile] {
                let failure = explain(Failure::input(code::OPTION_VALUE, "as it was"), text, Path::new("x"), wanted).one_line();
                assert!(failure.starts_with("x: this is ") && failure.contains(expected), "{text}: {failure}");
            }
        }
    }

    #[test]
    fn our_own_files_are_named_where_another_is_asked_for() {
        let cases = [
            ("family: gpt\nlayers: 2\n", Wanted::Model),
            ("name: n\nnodes: []\nnetwork: switch\n", Wanted::Topology),
            ("model: gpt2\ntopology: local\nlayout: {data: 2}\n", Wanted::Plan),
            ("{\"kernels\": [], \"exchanges\": []}", Wanted::Profile),
        ];
        for (text, kind) in cases {
            for wanted in [Wanted::Model, Wanted::Topology, Wanted::Plan, Wanted::Profile] {
                let failure = explain(Failure::input(code::OPTION_VALUE, "as it was"), text, Path::new("x"), wanted).to_string();
                assert_eq!(failure == "as it was", wanted == kind, "{text} for {wanted:?}: {failure}");
            }
        }
        let unknown = explain(Failure::input(code::OPTION_VALUE, "as it was"), "colour: red\n", Path::new("x"), Wanted::Plan);
        assert_eq!(unknown.to_string(), "as it was");
    }

    #[test]
    fn files_that_are_no_text_are_recognised() {
        let weights = [&64_u64.to_le_bytes()[..], b"{\"a\": {}}"].concat();
        assert!(of_bytes(&weights).is_some_and(|(what, _)| what.contains("safetensors")));
        assert!(of_bytes(b"PK\x03\x04..").is_some_and(|(what, _)| what.contains("zip")));
        assert!(of_bytes(b"\x08\x08\x12\x07pytorch\xff").is_some_and(|(what, _)| what.contains("ONNX")));
        assert!(of_bytes(b"\x1f\x8b\x08").is_some_and(|(what, _)| what.contains("gzip")));
        assert_eq!(of_bytes(b"\xff\xfe"), None);
        assert_eq!(of_bytes(b""), None);
    }
}
