//! Every mode with everything else of a plan: it compiles, or a sentence says why not.

use super::*;
use foretell_units::diagnostic::one_line;

/// The modes, each with a letter for the table.
const MODES: [(char, &str); 11] = [
    ('L', r#"{"local_sgd": {"every": 2}}"#),
    ('D', r#"{"local_sgd": {"every": 2, "outer": {"optimizer": "nesterov"}}}"#),
    ('S', r#"{"local_sgd": {"every": 8, "fragments": 2, "overlap": 2, "compression": "int8"}}"#),
    ('R', r#"{"decentralised": {"graph": "ring"}}"#),
    ('E', r#"{"decentralised": {"graph": "exponential"}}"#),
    ('P', r#"{"parameter_server": {"servers": 2}}"#),
    ('C', r#"{"parameter_server": {"servers": 2, "compression": "int8"}}"#),
    ('A', r#"{"parameter_server": {"servers": 2, "staleness": 1}}"#),
    ('U', r#"{"parameter_server": {"servers": 2, "staleness": "unbounded", "compression": "bf16"}}"#),
    ('B', r#"{"parameter_server": {"servers": 2, "backup_workers": 1}}"#),
    ('W', r#"{"parameter_server": {"servers": 4, "beside_workers": true}}"#),
];

const GPT: &str =
    r#"{"family": "gpt", "layers": 2, "hidden": 16, "heads": 4, "vocab": 128, "sequence": 8, "tied_embeddings": false}"#;
const TIED: &str = r#"{"family": "gpt", "layers": 2, "hidden": 16, "heads": 4, "vocab": 128, "sequence": 8}"#;
const MOE: &str = r#"{"family": "moe", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 128, "sequence": 8,
                      "experts": 4, "top_k": 2, "capacity_factor": 2.0}"#;
const RESNET: &str =
    r#"{"family": "resnet", "depth": 18, "stem": "small", "image": 16, "channels": 1, "classes": 10, "width": 4}"#;
const MLP: &str = r#"{"family": "mlp", "widths": [32, 16, 10]}"#;

/// The modes (by letter) that refuse, and part of the message.
const VERSIONS: (&str, &str) = ("AUB", "would pull different versions");
const NORM: (&str, &str) = ("AUB", "no common norm");
const SCALE: (&str, &str) = ("LDSRE", "loss scale of its own");
const SCALE_OF_WORKERS: (&str, &str) = ("PCAUB", "loss scale of workers");
const UNEQUAL: (&str, &str) = ("LDSRE", "replicas have equal parts of the batch and equal meshes");
const UNEQUAL_WORKERS: (&str, &str) = ("PCAUBW", "workers have equal parts of the batch and equal meshes");
const NO_ZERO: (&str, &str) = ("PCAUBW", "ZeRO has nothing to shard");
const ONE_REPLICA: (&str, &str) = ("LDSRE", "there is only one replica");
const STATES: (&str, &str) = ("LDSRE", "offloaded optimizer states are not there yet");
const STATES_OF_SERVERS: (&str, &str) = ("PCAUB", "in their own memory");
const STATISTICS: (&str, &str) = ("AUB", "no common running statistics");
const TIES: (&str, &str) = ("AUB", "their servers would hold different versions");
const LABELS: (&str, &str) = ("PCAUB", "do not know the labels");
const STACK: (&str, &str) = ("LDSREPCAUBW", "other software is modelled in the synchronous mode only");

/// Each part of a plan, beside four replicas: the model, the layout's and the plan's further
/// fields, and the modes that refuse it, with a part of the sentence. All others compile.
type Row = (&'static str, &'static str, &'static str, &'static [(&'static str, &'static str)]);
const ROWS: [Row; 35] = [
    (GPT, "", "", &[]),
    (GPT, r#", "tensor": 2"#, "", &[VERSIONS]),
    (GPT, r#", "tensor": 2, "sequence_parallel": true"#, "", &[VERSIONS]),
    (GPT, r#", "context": 2, "context_method": "ring""#, "", &[VERSIONS]),
    (GPT, r#", "context": 2, "context_method": "gather""#, "", &[VERSIONS]),
    (MOE, r#", "expert": 2"#, "", &[VERSIONS]),
    (MOE, "", "", &[]),
    (GPT, r#", "pipeline": 2, "schedule": "gpipe""#, "", &[]),
    (GPT, r#", "pipeline": 2, "schedule": "1f1b""#, "", &[]),
    (GPT, r#", "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2"#, "", &[]),
    (GPT, r#", "pipeline": 2, "schedule": "zb-h1""#, "", &[]),
    (GPT, r#", "pipeline": 2, "schedule": "zb-v", "virtual_stages": 2"#, "", &[]),
    (TIED, r#", "pipeline": 2"#, "", &[TIES]),
    (GPT, r#", "tensor": 2, "pipeline": 2"#, "", &[VERSIONS]),
    (GPT, r#", "zero": 1, "shard_group": 2"#, "", &[NO_ZERO]),
    (GPT, r#", "zero": 2, "shard_group": 2"#, "", &[NO_ZERO]),
    (GPT, r#", "zero": 3, "shard_group": 2"#, "", &[NO_ZERO]),
    (GPT, r#", "zero": 1, "shard_group": 2, "tensor": 2, "pipeline": 2"#, "", &[NO_ZERO]),
    (GPT, r#", "zero": 3"#, "", &[NO_ZERO, ONE_REPLICA]),
    (GPT, "", r#", "training": {"lora": {"rank": 4}}"#, &[]),
    (GPT, r#", "tensor": 2"#, r#", "training": {"lora": {"rank": 4}}"#, &[VERSIONS]),
    (GPT, "", r#", "training": {"frozen": ["*0*"]}"#, &[]),
    (GPT, "", r#", "training": {"clip_norm": 1.0}"#, &[NORM]),
    (GPT, "", r#", "optimizer": "lamb""#, &[NORM]),
    (GPT, "", r#", "precision": "bf16""#, &[]),
    (MLP, "", r#", "precision": "fp8""#, &[]),
    (GPT, "", r#", "precision": "fp16""#, &[SCALE, SCALE_OF_WORKERS]),
    (GPT, r#", "recompute": "full""#, "", &[]),
    (GPT, r#", "offload": "activations""#, "", &[]),
    (GPT, r#", "offload": "optimizer""#, "", &[STATES, STATES_OF_SERVERS]),
    (RESNET, "", "", &[STATISTICS]),
    (MLP, "", r#", "training": {"class_weights": [1, 2, 1, 1, 1, 1, 1, 1, 1, 1]}"#, &[LABELS]),
    (MLP, r#", "shares": [1, 1, 1, 1]"#, "", &[UNEQUAL, UNEQUAL_WORKERS]),
    (GPT, "", r#", "stack": "megatron-core""#, &[STACK]),
    (GPT, r#", "bucket": "256B""#, r#", "overlap": {"gradients": false}"#, &[]),
];

#[test]
fn every_mode_goes_with_everything_else_or_says_why_not() {
    let mut wrong = Vec::new();
    for (model, layout, more, refusals) in ROWS {
        let model: Model = serde_json::from_str(model).expect("a model");
        for (letter, mode) in MODES {
            let text =
                format!(r#"{{"global_batch": 16, "layout": {{"data": 4, "micro_batch": 1{layout}}}{more}, "mode": {mode}}}"#);
            let plan: Plan = serde_json::from_str(&text).map_err(|error| format!("{text}: {error}")).expect("a plan");
            let expected = refusals.iter().find(|(letters, _)| letters.contains(letter));
            match (compile(&model, "m", &plan), expected) {
                (Ok(_), None) => {}
                (Err(error), Some((_, part))) if one_line(&error).contains(part) && one_line(&error).contains("; hint: ") => {}
                (Ok(_), Some((_, part))) => wrong.push(format!("{letter}{layout}{more}: compiles, and not `{part}`")),
                (Err(error), _) => wrong.push(format!("{letter}{layout}{more}: {error}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
