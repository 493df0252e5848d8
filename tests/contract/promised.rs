//! The fields and files that commands promise.

use super::common::Scratch;
use serde_json::Value;

pub const PREDICTED: [&str; 15] = [
    "step_seconds",
    "step_seconds_p10",
    "step_seconds_p90",
    "samples_per_second",
    "tokens_per_second",
    "model_flops_per_device_per_second",
    "mfu",
    "hfu",
    "peak_memory_bytes",
    "fits",
    "breakdown_seconds",
    "calibrated",
    "events",
    "simulated_ranks",
    "wall_seconds",
];
pub const BREAKDOWN: [&str; 5] = ["compute", "exposed_communication", "bubble", "data", "optimizer"];
pub const EXECUTE: [&str; 10] = [
    "run",
    "steps",
    "step_seconds",
    "step_seconds_median",
    "loss",
    "peak_memory_bytes",
    "evaluation",
    "samples_per_second",
    "world_size",
    "backend",
];
pub const CHECK: [&str; 10] = [
    "predicted_step_seconds",
    "measured_step_seconds",
    "error",
    "inside_interval",
    "machine_error",
    "model_error",
    "at_pace",
    "memory_error",
    "by_kind",
    "worst",
];
pub const SEARCH: [&str; 8] =
    ["layouts", "bounded_out", "out_of_memory", "simulated", "best_seconds", "lower_bound_seconds", "gap", "wall_seconds"];
pub const RUN_FILES: [&str; 6] =
    ["plan.yaml", "predicted.json", "metrics.jsonl", "evaluation.jsonl", "measured.json", "ranks/0.log"];
pub const REPORT_FILES: [&str; 8] = [
    "trace.json",
    "report.html",
    "plots/timeline.svg",
    "plots/timeline.png",
    "plots/memory.svg",
    "plots/memory.png",
    "plots/loss.svg",
    "plots/loss.png",
];

#[track_caller]
pub fn assert_has(document: &Value, fields: &[&str]) {
    for field in fields {
        assert!(document.get(field).is_some(), "`{field}` is missing in {document}");
    }
}

#[track_caller]
pub fn number(document: &Value, field: &str) -> f64 {
    document[field].as_f64().expect("a number")
}

#[track_caller]
pub fn assert_is_prediction(document: &Value) {
    assert_has(document, &PREDICTED);
    assert_has(&document["breakdown_seconds"], &BREAKDOWN);
    assert!(document["step_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{document}");
    assert!(document["peak_memory_bytes"].as_array().is_some_and(|stages| stages.iter().all(Value::is_u64)));
}

#[track_caller]
pub fn assert_holds(scratch: &Scratch, folder: &str, files: &[&str]) {
    for file in files {
        assert!(scratch.path(folder).join(file).is_file(), "`{folder}/{file}` is missing");
    }
}
