//! The JSON Schemas of files and documents: the reference pages made of them are current, and the
//! examples, the library's files and what commands print match them.

mod common;

use boon::{Compiler, SchemaIndex, Schemas};
use common::{Scratch, text};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference")
}

/// A schema, compiled.
struct Validator {
    schemas: Schemas,
    index: SchemaIndex,
}

impl Validator {
    fn is_valid(&self, document: &Value) -> bool {
        self.schemas.validate(document, self.index).is_ok()
    }
}

fn schema(scratch: &Scratch, name: &str) -> Validator {
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.add_resource("schema.json", scratch.json(&["schema", name])).expect("it is JSON");
    let index = compiler.compile("schema.json", &mut schemas).expect("it is a schema");
    Validator { schemas, index }
}

#[track_caller]
fn assert_matches(validator: &Validator, document: &Value, what: &str) {
    let failure = validator.schemas.validate(document, validator.index).err().map(|error| format!("{error:#}"));
    assert_eq!(failure, None, "{what}");
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).expect("YAML")
}

#[test]
fn the_reference_pages_follow_from_the_schemas() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("examples")).expect("a folder");
    for entry in std::fs::read_dir(reference().join("examples")).expect("examples").flatten() {
        std::fs::copy(entry.path(), scratch.path("examples").join(entry.file_name())).expect("it is copied");
    }
    let output = scratch.run(&["schema", "--pages", "."]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = ["model", "topology", "plan", "profile", "recipe"].map(|name| format!("files/{name}.md"));
    for page in names.iter().map(String::as_str).chain(["answers.md"]) {
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        let is_current = read(scratch.path(page)) == read(reference().join(page));
        assert!(is_current, "`docs/reference/{page}` is old; run `foretell schema --pages docs/reference`");
    }
}

#[test]
fn the_examples_match_their_schemas() {
    let scratch = Scratch::new();
    let mut examples = 0;
    for entry in std::fs::read_dir(reference().join("examples")).expect("examples").flatten() {
        let path = entry.path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        let content = std::fs::read_to_string(&path).expect("it is read");
        let validator = schema(&scratch, name);
        assert_matches(&validator, &yaml(&content), name);
        examples += 1;
        if content.starts_with("schema_version: 1\n") {
            // A schema is no looser than the program where it matters: names of fields.
            let document = yaml(&content.replacen("schema_version: 1", "schema_version: 1\nunknown_field: 1", 1));
            assert!(!validator.is_valid(&document), "the schema of `{name}` allows any field");
        }
    }
    assert!(examples >= 10, "{examples} examples");
}

#[test]
fn the_example_files_are_read() {
    let scratch = Scratch::new();
    let example = |name: &str| reference().join("examples").join(format!("{name}.yaml"));
    scratch.json(&["models", "show", text(&example("model"))]);
    scratch.json(&["topologies", "show", text(&example("topology"))]);
    let plan = ["simulate", "--plan", text(&example("plan")), "--recipe", text(&example("recipe"))].map(String::from);
    let plan: Vec<&str> = plan.iter().map(String::as_str).collect();
    scratch.json(&plan);
    let cpu = "{model: mlp, topology: cpu-pair, layout: {data: 2}, global_batch: 64}";
    let plan = scratch.file("cpu.yaml", cpu);
    scratch.json(&["simulate", "--plan", text(&plan), "--profile", text(&example("profile"))]);
}

#[test]
fn files_of_another_schema_version_are_refused() {
    let scratch = Scratch::new();
    let example = |name: &str| std::fs::read_to_string(reference().join(format!("examples/{name}.yaml"))).expect("it is read");
    let later = |name: &str| {
        let content = example(name).replacen("schema_version: 1", "schema_version: 2", 1);
        scratch.file(&format!("{name}.yaml"), &content)
    };
    let (model, topology, plan, profile, recipe) =
        (later("model"), later("topology"), later("plan"), later("profile"), later("recipe"));
    let current = scratch.file("current.yaml", &example("plan"));
    let based = scratch.file("based.yaml", "base: gpt2\nschema_version: 2\n");
    for arguments in [
        &["models", "show", text(&model)][..],
        &["models", "show", text(&based)],
        &["topologies", "show", text(&topology)],
        &["simulate", "--plan", text(&plan)],
        &["simulate", "--plan", text(&current), "--profile", text(&profile)],
        &["simulate", "--plan", text(&current), "--recipe", text(&recipe)],
    ] {
        let output = scratch.run(arguments);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains("`schema_version` is 2") && message.contains("hint: "), "{arguments:?}: {message}");
    }
}

#[test]
fn what_the_library_holds_matches_the_schemas() {
    let scratch = Scratch::new();
    for (command, form, names) in [("models", "model", "models-answer"), ("topologies", "topology", "topologies-answer")] {
        let listed = scratch.json(&[command]);
        assert_matches(&schema(&scratch, names), &listed, names);
        let validator = schema(&scratch, form);
        for entry in listed.as_array().expect("a list") {
            let name = entry["name"].as_str().expect("a name");
            let shown = scratch.run(&[command, "show", name]);
            let file = String::from_utf8(shown.stdout).expect("text");
            assert!(file.contains("schema_version: 1"), "`{name}` is shown without its version");
            assert_matches(&validator, &yaml(&file), name);
        }
    }
}

#[test]
fn the_documents_of_commands_match_their_schemas() {
    let scratch = Scratch::new();
    let plan = "{model: {family: mlp, widths: [64, 48, 10]}, topology: local, layout: {data: 1}, global_batch: 32}";
    let plan = scratch.file("plan.yaml", plan);
    let dgx =
        scratch.file("dgx.yaml", "{model: gpt2, topology: dgx-a100-80g, layout: {data: 8}, global_batch: 64, precision: bf16}");
    let (plan, dgx) = (text(&plan), text(&dgx));
    let search = ["plan", "--model", "mlp", "--topology", "cpu-pair", "--global-batch", "64"];
    let commands: [(&str, Vec<&str>); 12] = [
        ("plan-answer", search.to_vec()),
        ("plan-answer", [&search[..], &["--compare", "cpu.yaml"]].concat()),
        ("points-answer", [&search[..], &["--scaling", "1..2"]].concat()),
        ("points-answer", [&search[..], &["--front"]].concat()),
        (
            "simulate-answer",
            vec![
                "simulate",
                "--plan",
                dgx,
                "--critical-path",
                "--what-if",
                "peak*2",
                "--jitter",
                "0.1",
                "--straggler",
                "1=2",
                "--cost",
                "--steps",
                "100",
            ],
        ),
        ("execute-answer", vec!["execute", "--plan", plan, "--steps", "4", "--run", "first"]),
        ("check-answer", vec!["check", "first"]),
        ("export-answer", vec!["export", "--plan", dgx, "--to", "megatron", "-o", "job"]),
        ("trace-answer", vec!["export", "--plan", dgx, "--to", "perfetto", "-o", "trace.json"]),
        ("chakra-answer", vec!["export", "--plan", dgx, "--to", "chakra", "-o", "chakra"]),
        ("model-answer", vec!["models", "show", "gpt2"]),
        ("doctor-answer", vec!["doctor"]),
    ];
    scratch.file("cpu.yaml", "{model: mlp, topology: cpu-pair, layout: {data: 2}, global_batch: 64}");
    let mut validators: BTreeMap<&str, Validator> = BTreeMap::new();
    for (name, command) in &commands {
        let document = scratch.json(command);
        let validator = validators.entry(name).or_insert_with(|| schema(&scratch, name));
        assert_matches(validator, &document, name);
        assert!(document.is_array() || document["schema_version"] == 1, "{name}: {document}");
    }
    assert!(schema(&scratch, "model").is_valid(&yaml("base: gpt2\nlayers: 2\n")), "a file with a base is no model");
    let failed = scratch.run(&["models", "show", "gtp2", "--json"]);
    let document: Value = serde_json::from_slice(&failed.stdout).expect("one document");
    assert_matches(&schema(&scratch, "error-answer"), &document, "error-answer");
    assert_eq!(document["schema_version"], 1);
}
