//! A machine that is slower than at calibration, told from an error of the model.

mod common;

use common::{Scratch, text};
use serde_json::{Value, json};

const PLAN: &str = "model: {family: mlp, widths: [784, 512, 512, 10]}\ntopology: local\nglobal_batch: 128\n\
                    layout: {micro_batch: 128}\n";

fn number(document: &Value, path: &str) -> f64 {
    let found = document.pointer(path).and_then(Value::as_f64);
    assert!(found.is_some(), "`{path}` is a number in {document}");
    found.unwrap_or(f64::NAN)
}

/// Multiplies a measured duration and its spread.
fn scale(sample: &mut Value, factor: f64) {
    for part in ["median", "p10", "p90"] {
        sample[part] = json!(format!("{:e}s", seconds(&sample[part]) * factor));
    }
}

/// The seconds of a duration in a profile, such as `0.002s`.
fn seconds(duration: &Value) -> f64 {
    let text = duration.as_str().and_then(|text| text.strip_suffix('s')).expect("a time in seconds");
    text.parse().expect("a number")
}

/// Trains with a profile, and checks the run.
fn checked(scratch: &Scratch, name: &str, profile: &Value) -> Value {
    let file = scratch.file(&format!("{name}.yaml"), &profile.to_string());
    let plan = scratch.path("plan.yaml");
    scratch.json(&[
        "execute",
        "--plan",
        text(&plan),
        "--profile",
        text(&file),
        "--steps",
        "60",
        "--no-evaluation",
        "--run",
        name,
    ]);
    let document = scratch.json(&["check", name]);
    let product = (1.0 + number(&document, "/machine_error")) * (1.0 + number(&document, "/model_error"));
    assert!((product - 1.0 - number(&document, "/error")).abs() < 1e-9, "{document}");
    assert_eq!(number(&document, "/at_pace/reference_kernels"), 60.0, "one in each step");
    document
}

#[test]
fn slowed_kernels_are_an_error_of_the_machine() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    let basic = ["calibrate", "--topology", "local", "--plan", text(&plan), "-o", "profile.yaml"];
    let profile = scratch.json(&[&basic[..], &["--patience", "1ms", "--calibration-time", "500ms"]].concat());
    assert!(seconds(&profile["reference"]["median"]) > 0.0);
    // Beside a calibration by a machine that was three times as fast, this one's kernels are slow.
    let mut faster = profile.clone();
    for kernel in faster["kernels"].as_array_mut().expect("a list") {
        scale(&mut kernel["time"], 1.0 / 3.0);
    }
    for part in ["reference", "instruction_overhead", "step_overhead", "stream_handoff"] {
        scale(&mut faster[part], 1.0 / 3.0);
    }
    // Other programs on the machine may change its pace between the two runs.
    let mut said = Vec::new();
    let told_apart = (0..4).find(|attempt| {
        let usual = checked(&scratch, &format!("usual-{attempt}"), &profile);
        let slowed = checked(&scratch, &format!("slowed-{attempt}"), &faster);
        let pace = |document: &Value| number(document, "/at_pace/pace");
        // A third, but for what this machine's pace changed between the two runs.
        let machine = (1.0 + number(&slowed, "/machine_error")) / (1.0 + number(&usual, "/machine_error"));
        // Kernels are most of this step: at the same pace both calibrations predict nearly the
        // same.
        let at_pace_1 = |document: &Value| number(document, "/at_pace/predicted_step_seconds") / pace(document);
        let same = 3.0 * at_pace_1(&slowed) / at_pace_1(&usual);
        said.push(format!("pace {} and {}, {machine}, {same}", pace(&usual), pace(&slowed)));
        pace(&slowed) > 1.7 * pace(&usual) && machine < 0.6 && (same - 1.0).abs() < 0.25
    });
    assert!(told_apart.is_some(), "{said:?}");
    let slowed = format!("slowed-{}", told_apart.unwrap_or_default());
    let printed = scratch.run(&["check", &slowed]);
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    assert!(printed.contains("slower than at calibration: error -"), "{printed}");
    assert!(printed.contains(": model error "), "{printed}");
}

#[test]
fn without_a_profile_the_machines_part_of_the_error_is_unknown() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    scratch.json(&["execute", "--plan", text(&plan), "--steps", "3", "--no-evaluation", "--run", "first"]);
    let document = scratch.json(&["check", "first"]);
    assert!(document["machine_error"].is_null() && document["model_error"].is_null() && document["at_pace"].is_null());
}

#[test]
fn a_profile_of_another_machine_is_said() {
    let scratch = Scratch::new();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/examples/profile.yaml");
    let example = std::fs::read_to_string(example).expect("it is read");
    let remarks = |topology: &str, profile: &str| {
        let job = format!("model: mlp\ntopology: {topology}\nglobal_batch: 64\nstack: foretell\nlayout: {{}}\n");
        let (plan, profile) = (scratch.file("plan.yaml", &job), scratch.file("profile.yaml", profile));
        scratch.json(&["simulate", "--plan", text(&plan), "--profile", text(&profile)])["remarks"].to_string()
    };
    assert!(remarks("dgx-a100-80g", &example).contains("the profile is not used: it was measured on `cpu-core`"));
    let of_its_own_kind = remarks("cpu-pair", &example);
    assert!(!of_its_own_kind.contains("profile"), "{of_its_own_kind}");
    let of_cores = example.replacen("device: cpu-core", "device: local-core", 1);
    let found = remarks("local", &of_cores);
    assert!(found.contains("was measured on `AMD EPYC 7763`") && found.contains("hint: run `foretell calibrate`"), "{found}");
}
