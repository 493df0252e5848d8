//! The output that scripts depend on: each command prints exactly one JSON document with at least
//! the promised fields, and writes the promised files.

mod common;
#[path = "contract/promised.rs"]
mod promised;
#[path = "contract/served.rs"]
mod served;

use common::{Scratch, text};
use promised::*;
use serde_json::Value;

const MLP: &str = "{family: mlp, widths: [64, 48, 10]}";

#[test]
fn plan_prints_the_promised_fields_and_is_deterministic() {
    let scratch = Scratch::new();
    let command = ["plan", "--model", "resnet50", "--topology", "dgx-a100-80g", "--global-batch", "256", "-o", "best.yaml"];
    let mut first = scratch.json(&command);
    assert_has(&first, &["plan", "predicted", "alternatives", "search"]);
    assert_is_prediction(&first["predicted"]);
    assert_is_prediction(&first["alternatives"][0]["predicted"]);
    assert_has(&first["alternatives"][0], &["plan", "predicted"]);
    assert_has(&first["search"], &SEARCH);
    // Nobody named a stack, and the devices are GPUs.
    assert_eq!(first["plan"]["stack"], "ddp");
    let mut second = scratch.json(&command);
    without_wall_seconds(&mut first);
    without_wall_seconds(&mut second);
    assert_eq!(first.to_string(), second.to_string());
    // The plan file that it wrote simulates to the same step.
    let mut simulated = scratch.json(&["simulate", "--plan", "best.yaml"]);
    without_wall_seconds(&mut simulated);
    assert_eq!(simulated["step_seconds"], first["predicted"]["step_seconds"]);
}

/// Removes the wall-clock times, which differ between runs.
fn without_wall_seconds(document: &mut Value) {
    match document {
        Value::Object(fields) => {
            fields.remove("wall_seconds");
            fields.values_mut().for_each(without_wall_seconds);
        }
        Value::Array(items) => items.iter_mut().for_each(without_wall_seconds),
        _ => {}
    }
}

#[test]
fn a_plan_written_to_another_folder_still_finds_its_model_file() {
    let scratch = Scratch::new();
    scratch.file("small.yaml", MLP);
    std::fs::create_dir(scratch.path("plans")).expect("a folder");
    let command = ["plan", "--model", "small.yaml", "--topology", "local", "--global-batch", "32", "-o", "plans/best.yaml"];
    scratch.json(&command);
    assert_is_prediction(&scratch.json(&["simulate", "--plan", "plans/best.yaml"]));
    // A library name is written as it was given.
    scratch.json(&["plan", "--model", "mlp", "--topology", "local", "--global-batch", "32", "-o", "plans/named.yaml"]);
    let written = std::fs::read_to_string(scratch.path("plans/named.yaml")).expect("the program wrote the file");
    assert!(written.contains("model: mlp\n") && written.contains("topology: local\n"), "{written}");
}

#[test]
fn a_model_file_may_name_a_base_and_an_option_its_sequence() {
    let scratch = Scratch::new();
    scratch.file("short.yaml", "base: gpt2\nlayers: 2\nsequence: 128\n");
    let job =
        ["plan", "--topology", "dgx-a100-80g", "--global-batch", "32", "--fix", "tensor=1,pipeline=1,micro_batch=1", "--model"];
    let search = |more: &[&str]| scratch.json(&[&job[..], more].concat());
    let tokens = |document: &Value| {
        let predicted = &document["predicted"];
        number(predicted, "tokens_per_second") / number(predicted, "samples_per_second")
    };
    assert_eq!(tokens(&search(&["short.yaml"])).round(), 128.0);
    let shorter = search(&["short.yaml", "--sequence", "64", "-o", "shorter.yaml"]);
    assert_eq!(tokens(&shorter).round(), 64.0);
    // The plan has the sequence that was asked for.
    let simulated = scratch.json(&["simulate", "--plan", "shorter.yaml"]);
    assert_eq!(simulated["step_seconds"], shorter["predicted"]["step_seconds"]);
    for (file, command, expected) in [
        ("base: gpt9\n", &["short.yaml"][..], "`gpt9`"),
        ("base: gpt2\nlayer: 2\n", &["short.yaml"], "unknown field `layer`"),
        ("base: gpt2\nfamily: bert\n", &["short.yaml"], "hint: omit `family`"),
        ("base: gpt2\n", &["resnet50", "--sequence", "64"], "`resnet50` has no one length"),
    ] {
        scratch.file("short.yaml", file);
        let output = scratch.run(&[&job[..], command].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(expected), "{command:?} {file}: {error}");
    }
}

#[test]
fn a_traced_step_becomes_a_model_file_with_the_same_parameters() {
    let scratch = Scratch::new();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tests/torch/transformer.json");
    let imported = scratch.json(&["import", "torch", file, "-o", "encoder.yaml"]);
    assert_eq!(imported["file"], "encoder.yaml");
    for model in [file, "encoder.yaml"] {
        assert_eq!(scratch.json(&["models", "show", model])["parameters"], 136_192, "{model}");
    }
    let plan = scratch.file(
        "plan.yaml",
        "{model: encoder.yaml, topology: dgx-a100-80g, layout: {data: 4, pipeline: 2, zero: 1}, global_batch: 32}",
    );
    assert!(number(&scratch.json(&["simulate", "--plan", text(&plan)]), "step_seconds") > 0.0);
}

#[test]
fn a_plan_of_another_job_is_not_laid_beside_the_answer() {
    let scratch = Scratch::new();
    scratch.file("small.yaml", MLP);
    let compared = |batch: &str| {
        let job =
            ["plan", "--model", "small.yaml", "--topology", "dgx-a100-80g", "--global-batch", batch, "--compare", "mine.yaml"];
        let output = scratch.run(&job);
        let [text, error] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        (output.status.success(), text, error)
    };
    scratch.json(&["plan", "--model", "small.yaml", "--topology", "dgx-a100-80g", "--global-batch", "32", "-o", "mine.yaml"]);
    let (is_same, text, error) = compared("32");
    assert!(is_same && text.contains("mine.yaml: "), "{text}{error}");
    assert!(text.starts_with("small on dgx-a100-80g (8 devices), trained by ddp\n"), "{text}");
    let (is_same, _, error) = compared("64");
    assert!(
        !is_same && error.contains("its `global_batch` is 32, that of the search 64\nhint: add `--global-batch 32`"),
        "{error}"
    );
}

#[test]
fn an_oversubscribed_search_uses_the_ranks_of_the_fixed_layout() {
    let scratch = Scratch::new();
    let basic = ["plan", "--model", "mlp", "--topology", "local", "--global-batch", "64", "--oversubscribe"];
    let document = scratch.json(&[&basic[..], &["--fix", "data=4,tensor=2,pipeline=1"]].concat());
    let layout = &document["plan"]["layout"];
    assert_eq!((layout["data"].as_u64(), layout["tensor"].as_u64()), (Some(4), Some(2)), "{layout}");
    assert_eq!(document["predicted"]["simulated_ranks"], 8);
}

#[test]
fn plan_answers_scaling_and_front_and_obeys_its_time_limit() {
    let scratch = Scratch::new();
    let job = ["plan", "--model", "mlp", "--topology", "dgx-a100-80g", "--global-batch", "512"];
    let scaling = scratch.json(&[&job[..], &["--scaling", "8..16", "--plots", "plots"]].concat());
    let points = scaling["scaling"].as_array().expect("a list of points");
    assert_eq!(points.len(), 2, "{scaling}");
    assert_eq!(points[0]["efficiency"], 1.0);
    assert!(scratch.path("plots/scaling.svg").exists() && scratch.path("plots/scaling.png").exists());
    let front = scratch.json(&[&job[..], &["--front"]].concat());
    let points = front["front"].as_array().expect("a list of points");
    let figures = |point: &serde_json::Value| ["step_seconds", "memory_bytes", "devices"].map(|name| number(point, name));
    for one in points.iter().map(figures) {
        let beats = |other: &[f64; 3]| *other != one && other.iter().zip(one).all(|(theirs, own)| *theirs <= own);
        assert!(!points.iter().map(figures).any(|other| beats(&other)), "{front}");
    }
    let stopped = scratch.json(&[&job[..], &["--time-limit", "1us"]].concat());
    let count = |name: &str| number(&stopped["search"], name);
    assert!(count("gap") >= 0.0 && count("simulated") + count("probed") >= 1.0, "{stopped}");
    assert_eq!(stopped["search"]["is_cut_off"], true, "{stopped}");
}

#[test]
fn with_several_precisions_each_point_uses_the_fastest() {
    let scratch = Scratch::new();
    let points = |question: &[&str], name: &str, formats: &str| {
        let job = ["plan", "--model", "gpt2", "--topology", "dgx-a100-80g", "--global-batch", "64", "--precision", formats];
        let document = scratch.json(&[&job[..], &["--fix", "pipeline=1,tensor=1,recompute=none"], question].concat());
        document[name].as_array().expect("a list of points").clone()
    };
    let [single, half, both] = ["fp32", "bf16", "fp32,bf16"].map(|formats| points(&["--scaling", "4..8"], "scaling", formats));
    assert_eq!(both.len(), 2);
    for (both, [single, half]) in both.iter().zip(single.iter().zip(&half).map(|(single, half)| [single, half])) {
        assert!(number(half, "step_seconds") < number(single, "step_seconds"), "{half} and {single}");
        assert_eq!([&both["precision"], &half["precision"], &single["precision"]], ["bf16", "bf16", "fp32"]);
        assert_eq!([&both["step_seconds"], &both["memory_bytes"]], [&half["step_seconds"], &half["memory_bytes"]]);
        let layout = both["layout"].as_str().expect("a text");
        assert!(layout.starts_with("bf16, "), "with several precisions each point must name its own: {layout}");
    }
    // The front of both precisions is at least as good as the front of one. It has no point that
    // another one dominates.
    let [half, both] = ["bf16", "fp32,bf16"].map(|formats| points(&["--front"], "front", formats));
    let figures = |point: &serde_json::Value| ["step_seconds", "memory_bytes", "devices"].map(|name| number(point, name));
    for one in &half {
        let known = both.iter().map(figures).any(|other| other.iter().zip(figures(one)).all(|(theirs, own)| *theirs <= own));
        assert!(known, "no point of {both:?} is as good as {one}");
    }
    for one in both.iter().map(figures) {
        let beats = |other: &[f64; 3]| *other != one && other.iter().zip(one).all(|(theirs, own)| *theirs <= own);
        assert!(!both.iter().map(figures).any(|other| beats(&other)), "{both:?}");
    }
}

#[test]
fn folding_does_not_change_the_predicted_step() {
    let scratch = Scratch::new();
    let layout = "layout: {data: 4, tensor: 2, pipeline: 2, micro_batch: 2}";
    let plan = scratch.file(
        "plan.yaml",
        &format!("model: gpt2\ntopology: dgx-a100-80g\nnodes: 2\nglobal_batch: 16\nprecision: bf16\n{layout}\n"),
    );
    let [folded, unfolded] = ["on", "off"].map(|fold| scratch.json(&["simulate", "--plan", text(&plan), "--fold", fold]));
    assert_eq!(number(&unfolded, "simulated_ranks"), 16.0);
    assert_eq!(number(&folded, "simulated_ranks"), 2.0, "one representative rank per stage");
    let steps = [&folded, &unfolded].map(|document| number(document, "step_seconds"));
    assert!((steps[0] / steps[1] - 1.0).abs() < 1e-9, "{steps:?}");
}

#[test]
fn jobs_on_one_network_are_predicted_alone_and_together() {
    let scratch = Scratch::new();
    let plan = |network: &str| {
        format!(
            "model: {{family: mlp, widths: [64, 512, 512, 10]}}\nlayout: {{data: 3}}\nglobal_batch: 12\ntopology:\n  nodes:\n    \
             - {{name: host, count: 6, devices: {{kind: cpu-core}}, nics: {{bandwidth: 100Mbit/s}}}}\n  network: {network}\n"
        )
    };
    // The second leaf switch joins the last host of the first job and the first host of the second.
    let narrow = scratch.file("narrow.yaml", &plan("{kind: fat-tree, nodes_per_leaf: 2, oversubscription: 2}"));
    let wide = scratch.file("wide.yaml", &plan("{kind: fat-tree, nodes_per_leaf: 2}"));
    let jobs = |plan: &std::path::Path| {
        let document = scratch.json(&["simulate", "--plan", text(plan), "--beside", text(&narrow)]);
        assert_is_prediction(&document);
        document["jobs"].as_array().expect("a list").clone()
    };
    let slowed = jobs(&narrow);
    assert_eq!((slowed[0]["first_node"].as_str(), slowed[1]["first_node"].as_str()), (Some("host-0"), Some("host-3")));
    assert_eq!(slowed.iter().map(|job| number(job, "ranks")).collect::<Vec<_>>(), [3.0, 3.0]);
    for job in &slowed {
        assert_has(job, &["plan", "nodes", "step_seconds_alone", "step_seconds"]);
        assert!(number(job, "ratio") > 1.5, "{job}");
    }
    assert!(jobs(&wide).iter().all(|job| (number(job, "ratio") - 1.0).abs() < 1e-6));
    let refused = |beside: &str| {
        let output = scratch.run(&["simulate", "--plan", text(&narrow), "--beside", &format!("{}@{beside}", text(&narrow))]);
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("text")
    };
    assert!(refused("host-2").contains("jobs 0 and 1 both run on node `host-2`"), "{}", refused("host-2"));
    assert!(
        refused("host-9").contains("has no node `host-9`\nhint: nodes are numbered from 0 to 5; the last one is called `host-5`")
    );
    assert!(refused("4").contains("the layout has 3 ranks, but from node 4 on"), "{}", refused("4"));
}

#[test]
fn simulate_execute_and_check_print_the_promised_fields() {
    let scratch = Scratch::new();
    let plan = scratch.file(
        "plan.yaml",
        &format!("model: {MLP}\ntopology: local\nglobal_batch: 64\nlayout: {{pipeline: 2, micro_batch: 16}}\n"),
    );
    let simulated = scratch.json(&["simulate", "--plan", text(&plan), "--oversubscribe", "--critical-path"]);
    assert_is_prediction(&simulated);
    assert_has(&simulated["critical_path"], &["by_kind", "between_seconds", "segments"]);
    let parts = simulated["critical_path"]["by_kind"].as_array().expect("a list").iter();
    let parts: f64 = parts.filter_map(|part| part["seconds"].as_f64()).sum();
    let whole = parts + simulated["critical_path"]["between_seconds"].as_f64().expect("a number");
    let step = simulated["step_seconds"].as_f64().expect("a number");
    assert!((whole - step).abs() <= 1e-6 * step, "the critical path takes {whole} s, the step {step} s");

    let executed = scratch.json(&["execute", "--plan", text(&plan), "--steps", "30", "--oversubscribe"]);
    assert_has(&executed, &EXECUTE);
    assert_has(&executed["evaluation"], &["loss", "top1", "top5", "precision", "recall", "f1", "roc_auc", "samples"]);
    assert_eq!(executed["steps"], 30);
    assert_eq!(executed["step_seconds"].as_array().map(Vec::len), Some(30));
    assert_eq!(executed["world_size"], 2);
    assert_eq!(executed["backend"], "cpu");
    assert_eq!(executed["peak_memory_bytes"], simulated["peak_memory_bytes"], "the arenas must have the predicted size");
    assert_eq!(executed["run"], "runs/1", "without `--run` the folder is numbered");
    assert_holds(&scratch, "runs/1", &RUN_FILES);
    assert_eq!(
        std::fs::read_dir(scratch.path("runs/1/timeline")).map(Iterator::count).ok(),
        Some(2),
        "one timeline file per rank"
    );
    let metrics = std::fs::read_to_string(scratch.path("runs/1/metrics.jsonl")).expect("the program wrote the file");
    assert_eq!(metrics.lines().count(), 30);
    for line in metrics.lines() {
        let line: Value = serde_json::from_str(line).expect("each line is a JSON document");
        assert_has(&line, &["step", "loss", "seconds", "learning_rate", "samples_per_second", "gradient_norm"]);
    }

    let checked = scratch.json(&["check", "runs/1"]);
    assert_has(&checked, &CHECK);
    assert_eq!(checked["memory_error"].as_f64(), Some(0.0));
    assert_holds(&scratch, "runs/1", &REPORT_FILES);
    let again = scratch.json(&["execute", "--plan", text(&plan), "--steps", "2", "--no-evaluation", "--oversubscribe"]);
    assert_eq!(again["run"], "runs/2");
}

#[test]
fn an_overwritten_run_folder_keeps_no_file_of_the_previous_run() {
    let scratch = Scratch::new();
    let plan = |layout: &str| format!("model: {MLP}\ntopology: local\nglobal_batch: 32\nlayout: {{{layout}, micro_batch: 16}}\n");
    let basic = ["execute", "--plan", "plan.yaml", "--steps", "3", "--oversubscribe", "--run", "first"];
    scratch.file("plan.yaml", &plan("data: 2"));
    scratch.json(&basic);
    scratch.json(&["check", "first"]);
    scratch.file("plan.yaml", &plan("data: 1"));
    scratch.json(&[&basic[..], &["--overwrite"]].concat());
    for name in ["trace.json", "report.html", "plots", "ranks/1.log"] {
        assert!(!scratch.path("first").join(name).exists(), "`{name}` is left from the previous run");
    }
    assert_eq!(std::fs::read_dir(scratch.path("first/timeline")).map(Iterator::count).ok(), Some(1));
}

#[test]
fn run_plans_executes_and_checks_and_learns_the_digits() {
    let scratch = Scratch::new();
    scratch.file("digits-mlp.yaml", "{family: mlp, widths: [64, 64, 10]}");
    let basic =
        ["run", "--model", "digits-mlp.yaml", "--topology", "local", "--epochs", "8", "--global-batch", "64", "--run", "out"];
    let document = scratch.json(&[&basic[..], &["--patience", "1ms", "--calibration-time", "100ms"]].concat());
    assert_has(&document, &["plan", "predicted", "execute", "check", "report"]);
    assert_is_prediction(&document["predicted"]);
    assert_has(&document["execute"], &EXECUTE);
    assert_has(&document["check"], &CHECK);
    assert_eq!(document["report"], "out");
    assert_eq!(document["execute"]["peak_memory_bytes"], document["predicted"]["peak_memory_bytes"]);
    let top1 = document["execute"]["evaluation"]["top1"].as_f64().expect("a number");
    assert!(top1 >= 0.9, "top-1 accuracy {top1}");
    assert_holds(&scratch, "out", &RUN_FILES);
    assert_holds(&scratch, "out", &REPORT_FILES);
    assert_holds(&scratch, "out", &["profile.yaml"]);
    let page = std::fs::read_to_string(scratch.path("out/report.html")).expect("the program wrote the file");
    assert!(page.contains("digits-mlp: predicted and measured"), "the report must name the model");
}

#[test]
fn models_topologies_and_doctor_print_one_document_each() {
    let scratch = Scratch::new();
    let models = scratch.json(&["models"]);
    assert!(models.as_array().is_some_and(|models| models.iter().any(|model| model["name"] == "resnet50")));
    assert_has(&scratch.json(&["models", "show", "gpt2"]), &["name", "model", "parameters"]);
    let topologies = scratch.json(&["topologies"]);
    assert!(topologies.as_array().is_some_and(|all| all.iter().any(|topology| topology["name"] == "local")));
    assert_has(&scratch.json(&["topologies", "show", "dgx-a100-80g"]), &["name", "nodes"]);
    let findings = scratch.json(&["doctor"]);
    assert!(findings.as_array().is_some_and(|all| all.iter().all(|library| library["found"].is_boolean())));
}

#[test]
fn score_lists_every_row_once_with_overall_scores() {
    let scratch = Scratch::new();
    let rows = "row_id,table,model,layers,hidden,heads,vocab,seq,gpu,n_gpus,dp,tp,pp,mbs,gbs,precision,framework,step_s\n\
        a,mine,GPT,8,1024,16,50257,1024,A100-SXM4-80GB,8,8,1,1,1,8,bf16,Megatron-LM,0.1\n\
        b,mine,GPT,8,1024,16,50257,1024,abacus,8,8,1,1,1,8,bf16,Megatron-LM,0.1\n";
    let file = scratch.file("rows.csv", rows);
    let document = scratch.json(&["score", text(&file), "--plots", text(&scratch.path("plots"))]);
    assert_has(&document, &["rows", "by_source", "overall", "fitted_values"]);
    assert_has(&document["overall"], &["macro_mean_error", "macro_inside_interval"]);
    let rows = document["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_has(
            row,
            &[
                "row_id",
                "table",
                "split",
                "measured_step_seconds",
                "predicted_step_seconds",
                "p10",
                "p90",
                "measured_memory_bytes",
                "predicted_memory_bytes",
                "calibrated",
                "refused",
            ],
        );
    }
    assert!(rows[0]["predicted_step_seconds"].is_f64() && rows[0]["refused"].is_null());
    assert!(rows[1]["refused"].as_str().is_some_and(|reason| reason.contains("abacus")));
    for file in ["scores.csv", "predicted-over-measured.svg", "predicted-over-measured.png"] {
        assert!(scratch.path("plots").join(file).is_file(), "{file}");
    }
}

#[test]
fn a_trace_of_another_framework_becomes_a_checked_run() {
    let scratch = Scratch::new();
    let plan = "model: {family: gpt, layers: 4, hidden: 128, heads: 4, vocab: 512, sequence: 64, tied_embeddings: true}\n\
                topology: cpu-pair\nlayout: {data: 2, micro_batch: 4}\nglobal_batch: 8\nprecision: fp32\noptimizer: adamw\nstack: ddp\n";
    scratch.file("plan.yaml", plan);
    let traces = [0, 1].map(|rank| format!("{}/export/tests/kineto/rank{rank}.json", env!("CARGO_MANIFEST_DIR")));
    let import = ["import", "kineto", &traces[0], &traces[1], "--plan", "plan.yaml", "--run", "theirs", "-o", "profile.yaml"];
    let imported = scratch.json(&import);
    assert_has(&imported, &["profile", "file", "run", "kernels", "exchanges", "unread"]);
    assert_holds(&scratch, "theirs", &["plan.yaml", "predicted.json", "measured.json", "timeline/0.json", "timeline/1.json"]);
    let checked = scratch.json(&["check", "theirs"]);
    assert_has(&checked, &CHECK);
    assert_eq!(number(&checked, "measured_step_seconds"), number(&imported, "measured_step_seconds"));
    assert!(number(&checked, "predicted_step_seconds") > 0.0 && checked["memory_error"].is_null());
    assert_holds(&scratch, "theirs", &REPORT_FILES);
    // The profile serves other predictions too.
    assert_is_prediction(&scratch.json(&["simulate", "--plan", "plan.yaml", "--profile", "profile.yaml"]));
}

#[test]
fn quiet_and_verbose_change_standard_error_only() {
    let scratch = Scratch::new();
    let plan = "{model: gpt2, topology: dgx-a100-80g, layout: {data: 8}, global_batch: 64, precision: bf16}";
    scratch.file("plan.yaml", plan);
    let run = |more: &[&str]| {
        let output = scratch.run(&[&["export", "--plan", "plan.yaml", "--to", "perfetto", "-o", "trace.json"], more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (output.stdout, String::from_utf8(output.stderr).expect("text"))
    };
    let (answer, usual) = run(&[]);
    let (quiet_answer, quiet) = run(&["-q"]);
    let (verbose_answer, verbose) = run(&["-v"]);
    let (_, detailed) = run(&["-vv"]);
    assert_eq!((&answer, &answer), (&quiet_answer, &verbose_answer));
    assert!(usual.contains("note: ") && !usual.contains("wrote"), "{usual}");
    assert_eq!(quiet, "");
    assert!(verbose.contains("wrote `trace.json`") && verbose.contains("simulate: "), "{verbose}");
    assert!(detailed.contains("read `plan.yaml`") && !verbose.contains("read `plan.yaml`"), "{detailed}");
    assert!(!detailed.contains('\u{1b}'), "colours, where there is no terminal");
    let wrong = scratch.run(&["-q", "simulate", "--plan", "none.yaml"]);
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("error[file::unreadable]: "));
}

#[test]
fn a_trace_has_the_ranks_that_differ_and_may_be_compressed() {
    let scratch = Scratch::new();
    scratch.file("plan.yaml", "{model: gpt2, topology: dgx-a100-80g, layout: {data: 8}, global_batch: 64, precision: bf16}");
    let write = |name: &str, ranks: &[&str]| {
        let output = scratch.run(&[&["simulate", "--plan", "plan.yaml", "--trace", name], ranks].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (std::fs::read(scratch.path(name)).expect("it is written"), String::from_utf8(output.stderr).expect("text"))
    };
    let ranks = |bytes: &[u8]| {
        let document: Value = serde_json::from_slice(bytes).expect("one document");
        let events = document["traceEvents"].as_array().expect("a list").clone();
        events.iter().filter_map(|event| event["pid"].as_u64()).collect::<std::collections::BTreeSet<_>>()
    };
    let (differing, note) = write("differing.json", &[]);
    assert_eq!(ranks(&differing).len(), 1, "all replicas do the same");
    assert!(note.contains("the trace has 1 of 8 ranks"), "{note}");
    assert_eq!(ranks(&write("all.json", &["--trace-ranks", "all"]).0).len(), 8);
    let (some, _) = write("some.json", &["--trace-ranks", "1,6..7"]);
    assert_eq!(ranks(&some).into_iter().collect::<Vec<_>>(), [1, 6, 7]);
    let (compressed, _) = write("some.json.gz", &["--trace-ranks", "1,6..7"]);
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&compressed[..]), &mut text).expect("gzip");
    assert_eq!(text, some);
    assert!(compressed.len() * 4 < some.len());
    let none = scratch.run(&["simulate", "--plan", "plan.yaml", "--trace", "none.json", "--trace-ranks", "9"]);
    assert_eq!(none.status.code(), Some(2), "{}", String::from_utf8_lossy(&none.stderr));
}
