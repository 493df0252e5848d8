//! Training on the user's own data: folders of pictures and texts, with any number of workers, and
//! with samples that cannot be used.

mod common;

use common::{Scratch, text};
use serde_json::Value;
use std::path::Path;

const SIDE: usize = 20;

/// Writes a picture of one colour with some noise.
fn write_picture(path: &Path, color: [u8; 3], seed: usize) {
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    let file = std::fs::File::create(path).expect("a file");
    let mut encoder = png::Encoder::new(file, SIDE as u32, SIDE as u32);
    encoder.set_color(png::ColorType::Rgb);
    let noise = |place: usize| (((place + seed * 7919) * 2_654_435_761) >> 7) as u8 % 48;
    let pixels: Vec<u8> = (0..SIDE * SIDE * 3).map(|place| (color[place % 3] / 4 * 3).saturating_add(noise(place))).collect();
    encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels)).expect("a picture");
}

/// Writes a folder of four classes, each in a colour of its own.
fn write_folder(folder: &Path, training: usize, evaluation: usize) {
    let colors = [[250, 40, 40], [40, 250, 40], [40, 40, 250], [220, 220, 30]];
    for (split, count) in [("train", training), ("val", evaluation)] {
        for number in 0..count {
            let class = number % colors.len();
            write_picture(&folder.join(format!("{split}/class{class}/{number:04}.png")), colors[class], number);
        }
    }
}

fn plan(layout: &str) -> String {
    format!(
        "model: {{family: resnet, depth: 18, stem: small, image: 16, channels: 3, classes: 4, width: 4}}\ntopology: local\nglobal_batch: 16\nbatch_norm_group: 8\ntraining: {{learning_rate: 0.02}}\nlayout: {{{layout}}}\n"
    )
}

fn losses(document: &Value) -> Vec<f64> {
    document["loss"].as_array().expect("a list").iter().filter_map(Value::as_f64).collect()
}

#[test]
fn a_folder_of_pictures_is_learnt_the_same_with_any_number_of_workers() {
    let scratch = Scratch::new();
    write_folder(&scratch.path("pictures"), 200, 24);
    let plan = scratch.file("plan.yaml", &plan("data: 2, micro_batch: 8"));
    let train = |more: &[&str]| {
        let basic = ["execute", "--plan", text(&plan), "--data", "pictures", "--oversubscribe", "--epochs", "3"];
        scratch.json(&[&basic[..], more].concat())
    };
    let first = train(&["--workers", "1", "--run", "run"]);
    // Three epochs of twelve batches, each in another order and with other random changes.
    assert_eq!(first["steps"], 36);
    assert_eq!(first["evaluation"]["samples"], 24);
    let top1 = first["evaluation"]["top1"].as_f64().expect("a number");
    assert!(top1 > 0.7, "it learns nothing: top-1 {top1}");
    assert_eq!(first["bad_samples"], Value::Null);
    for more in [["--workers", "3", "--prefetch", "1"], ["--workers", "0", "--prefetch", "2"]] {
        let other = train(&more);
        assert_eq!((losses(&first), &first["evaluation"]), (losses(&other), &other["evaluation"]), "{more:?}");
    }
    let jitter = "crop,flip,jitter=0.4";
    let other = train(&["--augment", jitter, "--run", "jittered"]);
    assert_ne!(losses(&first)[0], losses(&other)[0]);

    // A resumed run reads as before, without being told.
    let basic = ["execute", "--plan", text(&plan), "--data", "pictures", "--oversubscribe", "--steps", "30", "--run", "part"];
    scratch.json(&[&basic[..], &["--augment", jitter, "--workers", "2", "--on-bad-sample", "skip"]].concat());
    let resumed = scratch.json(&["execute", "--resume", "part", "--steps", "36", "--oversubscribe"]);
    assert_eq!(losses(&resumed), losses(&other)[30..]);
    assert_eq!(resumed["bad_samples"], 0);
    let predicted: Value =
        serde_json::from_slice(&std::fs::read(scratch.path("part/predicted.json")).expect("read")).expect("JSON");
    assert_eq!(predicted["input"]["workers"], 2);

    // The prediction has the pipeline, and the check says whether loading limits the step.
    let check = scratch.json(&["check", "run"]);
    assert!(check["input"]["input_bound"].is_boolean(), "{check}");
    assert!(check["input"]["predicted_wait_seconds"].as_f64().is_some_and(|wait| wait >= 0.0));
    let said = String::from_utf8(scratch.run(&["check", "run"]).stdout).expect("text");
    assert!(said.contains("input-bound"), "{said}");
}

#[test]
fn layouts_see_the_same_pictures() {
    let scratch = Scratch::new();
    write_folder(&scratch.path("pictures"), 64, 0);
    // With hardly any learning a loss depends on the step's pictures alone. Else a rounding that
    // moves one number across the kink of a ReLU shows in later steps.
    let plan = |layout: &str| plan(layout).replace("learning_rate: 0.02", "learning_rate: 1e-7");
    let one = scratch.train(&plan("micro_batch: 16"), 4, 3, &["--data", "pictures", "--workers", "2"]);
    for layout in ["data: 2, micro_batch: 8", "pipeline: 2, micro_batch: 8"] {
        let other = scratch.train(&plan(layout), 4, 3, &["--data", "pictures", "--workers", "2"]);
        for (one, other) in one.losses.iter().zip(&other.losses) {
            assert!((one - other).abs() < 1e-5 * one, "{layout}: {one} and {other}");
        }
    }
}

#[test]
fn a_bad_picture_ends_the_run_or_is_replaced_and_counted() {
    let scratch = Scratch::new();
    write_folder(&scratch.path("pictures"), 32, 8);
    let (bad, empty) = ("pictures/train/class1/0005.png", "pictures/train/class3");
    let whole = std::fs::read(scratch.path(bad)).expect("a picture");
    std::fs::write(scratch.path(bad), &whole[..whole.len() / 2]).expect("a file");
    let plan = scratch.file("plan.yaml", &plan("data: 2, tensor: 2, micro_batch: 8"));
    let basic = ["execute", "--plan", text(&plan), "--data", "pictures", "--oversubscribe", "--epochs", "2", "--run", "run"];
    let refused = scratch.run(&basic);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{message}");
    assert!(message.contains("class1/0005.png` is corrupt") && message.contains("hint:"), "{message}");
    assert!(!scratch.path("run").exists());

    // Ranks of a tensor group load the same samples, and each counts once.
    let skipped = scratch.json(&[&basic[..], &["--on-bad-sample", "skip"]].concat());
    assert_eq!((&skipped["bad_samples"], &skipped["steps"]), (&1.into(), &4.into()));
    let metrics = std::fs::read_to_string(scratch.path("run/metrics.jsonl")).expect("the metrics");
    let last: Value = serde_json::from_str(metrics.lines().last().expect("a line")).expect("JSON");
    assert_eq!(last["bad_samples"], 1);
    let logs = (0..4).map(|rank| std::fs::read_to_string(scratch.path(&format!("run/ranks/{rank}.log"))).unwrap_or_default());
    assert!(logs.into_iter().any(|log| log.contains("class1/0005.png` cannot be used")));

    for entry in std::fs::read_dir(scratch.path(empty)).expect("a class") {
        std::fs::remove_file(entry.expect("a picture").path()).expect("a picture is removed");
    }
    let refused = scratch.run(&basic);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{message}");
    assert!(message.contains("train/class3` has no `.jpg`"), "{message}");
}

/// A tokenizer of words, with a token for the end of a text.
const TOKENIZER: &str = r#"{
  "version": "1.0", "truncation": null, "padding": null,
  "added_tokens": [{"id": 5, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true}],
  "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
  "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "mat": 4}, "unk_token": "[UNK]"}
}"#;

#[test]
#[cfg_attr(not(feature = "tokenizers"), ignore = "needs the feature `tokenizers`")]
fn texts_become_tokens_that_a_model_trains_on() {
    let scratch = Scratch::new();
    scratch.file("tokenizer.json", TOKENIZER);
    scratch.file("a.txt", &"The cat sat.\n".repeat(60));
    scratch.file("b.jsonl", "{\"text\": \"the mat\"}\n\n{\"text\": \"cat\", \"other\": 1}\n");
    let tokenize = ["data", "tokenize", "--tokenizer", "tokenizer.json", "a.txt", "b.jsonl", "-o", "c.tokens"];
    let document = scratch.json(&tokenize);
    assert_eq!((&document["tokens"], &document["documents"]), (&246.into(), &3.into()));
    assert_eq!((&document["vocabulary"], &document["bytes_per_token"]), (&6.into(), &2.into()));
    let file = std::fs::read(scratch.path("c.tokens")).expect("the file");
    let tokens: Vec<u8> = file[64..].iter().copied().step_by(2).collect();
    assert_eq!(tokens[..4], [1, 2, 3, 0]);
    assert_eq!(tokens[240..], [5, 1, 4, 5, 2, 5]);

    let plan = "model: {family: gpt, layers: 1, hidden: 16, heads: 2, ffn: 32, vocab: 6, sequence: 8}\ntopology: local\nglobal_batch: 8\nlayout: {data: 2, micro_batch: 4}\noptimizer: adam\ntraining: {learning_rate: 0.01}\n";
    let trained = scratch.train(plan, 40, 0, &["--data", "c.tokens"]);
    assert!(trained.losses[39] < 0.5 * trained.losses[0], "{:?}", trained.losses);

    // Nothing is written unless all of it can be.
    let before = std::fs::read(scratch.path("c.tokens")).expect("the file");
    scratch.file("b.jsonl", "{\"text\": \"the mat\"}\n{\"words\": \"cat\"}\n");
    let refused = scratch.run(&tokenize);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{message}");
    assert!(message.contains("`b.jsonl`, line 2: is not an object with a field `text`"), "{message}");
    assert_eq!(std::fs::read(scratch.path("c.tokens")).expect("the file"), before);
    let document = scratch.json(&[&tokenize[..], &["--on-bad-sample", "skip"]].concat());
    assert_eq!((&document["documents"], &document["bad_samples"]), (&2.into(), &1.into()));
    for (more, problem) in [
        (["--end-of-text", "<end>"], "has no token `<end>`\nhint:"),
        (["--tokenizer", "a.txt"], "`a.txt` is not a tokenizer: "),
        (["-o", "c.tokens/d.tokens"], "cannot write `c.tokens/d.tokens`"),
    ] {
        let mut arguments: Vec<&str> = tokenize.to_vec();
        match arguments.iter().position(|argument| *argument == more[0]) {
            Some(place) => arguments[place + 1] = more[1],
            None => arguments.extend(more),
        }
        let refused = scratch.run(&arguments);
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && message.contains(problem), "{message}");
    }
}
