//! Checkpoints, resuming, initial weights, signals and the loss of ranks, with real processes.

mod common;

use common::{Scratch, text};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const PLAN: &str = "model: {family: mlp, widths: [64, 32, 10]}\ntopology: local\nglobal_batch: 32\noptimizer: adamw\n\
                    layout: {data: 2, micro_batch: 16}\n";
const RESNET: &str = "model: {family: resnet, depth: 18, stem: small, image: 8, channels: 1, classes: 10, width: 4}\n\
                      topology: local\nglobal_batch: 8\nlayout: {data: 2, micro_batch: 4}\n";

/// The header of a safetensors file.
fn header(path: &Path) -> Value {
    let bytes = std::fs::read(path).expect("the file is there");
    let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
    serde_json::from_slice(&rest[..u64::from_le_bytes(*length) as usize]).expect("the header is JSON")
}

/// Runs a command that must be refused with this status. Returns its message.
#[track_caller]
fn refusal(scratch: &Scratch, status: i32, arguments: &[&str]) -> String {
    let output = scratch.run(&[arguments, &["--oversubscribe", "--no-evaluation"]].concat());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{message}");
    assert!(message.contains("hint: ") && !message.contains("panicked"), "{message}");
    message
}

fn checkpoints(scratch: &Scratch, run: &str) -> Vec<String> {
    let entries = std::fs::read_dir(scratch.path(run).join("checkpoints")).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_by_key(|name| name.parse().unwrap_or(usize::MAX));
    names
}

#[test]
fn a_checkpoint_has_whole_tensors_under_their_public_names() {
    let scratch = Scratch::new();
    scratch.train(RESNET, 4, 0, &["--run", "run", "--save-every", "2"]);
    assert_eq!(checkpoints(&scratch, "run"), ["2", "4"]);
    let folder = scratch.path("run/checkpoints/4");
    let model = header(&folder.join("model.safetensors"));
    let shape = |name: &str| model[name]["shape"].clone();
    assert_eq!(shape("conv1.weight"), serde_json::json!([4, 1, 3, 3]));
    assert_eq!(shape("layer1.0.bn1.running_var"), serde_json::json!([4]));
    assert_eq!(shape("fc.weight"), serde_json::json!([10, 32]));
    assert_eq!(model["bn1.num_batches_tracked"]["dtype"], "I64");
    assert_eq!(model["__metadata__"]["format"], "pt");
    let optimizer = header(&folder.join("optimizer.safetensors"));
    assert_eq!(optimizer["conv1.weight.momentum_buffer"]["shape"], serde_json::json!([4, 1, 3, 3]));
    let state: Value = serde_json::from_slice(&std::fs::read(folder.join("state.json")).expect("state")).expect("JSON");
    assert_eq!((&state["step"], &state["world_size"], &state["format"]), (&4.into(), &2.into(), &1.into()));
    assert_eq!(state["files"]["model.safetensors"]["sha256"].as_str().map(str::len), Some(64));
}

#[test]
fn the_last_checkpoints_are_kept_and_never_leaves_none() {
    let scratch = Scratch::new();
    scratch.train(PLAN, 7, 0, &["--run", "kept", "--save-every", "2", "--keep", "2"]);
    assert_eq!(checkpoints(&scratch, "kept"), ["6", "7"]);
    scratch.train(PLAN, 2, 0, &["--run", "none", "--save-every", "never"]);
    assert_eq!(checkpoints(&scratch, "none"), [] as [String; 0]);
    assert!(refusal(&scratch, 2, &["execute", "--resume", "none"]).contains("no whole checkpoint"));
    assert!(refusal(&scratch, 2, &["execute", "--resume", "nowhere"]).contains("nowhere"));
}

#[test]
fn a_checkpoint_is_predicted_measured_and_compared() {
    let scratch = Scratch::new();
    let host = "name: host\nnodes:\n- {name: host, count: 1, devices: {kind: cpu-core, count: 2}, link: shared-memory, \
                mean_time_between_failures: 100h}\nrestart_time: 10s\n";
    let topology = scratch.file("host.yaml", host);
    let plan = scratch.file("plan.yaml", &PLAN.replace("local", "host.yaml"));
    let simulate = ["simulate", "--plan", text(&plan), "--goodput", "--oversubscribe"];
    assert!(refusal_of(&scratch, &simulate).contains("how fast checkpoints are written"));
    let basic = ["calibrate", "--topology", text(&topology), "--plan", text(&plan), "-o", "profile.yaml", "--storage"];
    let quick = ["--patience", "1ms", "--calibration-time", "10ms"];
    assert!(refusal_of(&scratch, &[&basic[..], &["nowhere"], &quick].concat()).contains("nowhere"));
    let storage = scratch.json(&[&basic[..], &["."], &quick].concat())["storage"].clone();
    assert!(storage["write"].as_str().is_some_and(|rate| rate.ends_with("B/s")), "{storage}");
    let seconds = |document: &Value, key: &str| document[key].as_f64().expect(key);
    let predicted = scratch.json(&[&simulate[..], &["--profile", "profile.yaml"]].concat());
    let [wait, written] = ["checkpoint_seconds", "checkpoint_write_seconds"].map(|key| seconds(&predicted, key));
    assert!(0.0 < wait && wait < written, "{wait} {written}");
    let goodput = &predicted["goodput"];
    assert_eq!((seconds(goodput, "checkpoint_seconds"), seconds(goodput, "checkpoint_write_seconds")), (wait, written));
    let more = ["--steps", "20", "--save-every", "5", "--profile", "profile.yaml", "--run", "run", "--no-evaluation"];
    let made = scratch.json(&[&["execute", "--plan", text(&plan), "--oversubscribe"][..], &more].concat());
    let measured = ["checkpoint_seconds", "checkpoint_write_seconds"].map(|key| seconds(&made, key));
    assert!(0.0 < measured[0] && measured[0] <= measured[1], "{measured:?}");
    let check = &scratch.json(&["check", "run"])["checkpoint"];
    let of = |side: &str| ["seconds", "write_seconds"].map(|key| seconds(check, &format!("{side}_{key}")));
    assert_eq!((of("predicted"), of("measured")), ([wait, written], measured));
    let printed = String::from_utf8_lossy(&scratch.run(&["check", "run"]).stdout).into_owned();
    assert!(printed.contains("for a checkpoint, predicted"), "{printed}");
}

/// The message of a command that must fail.
#[track_caller]
fn refusal_of(scratch: &Scratch, arguments: &[&str]) -> String {
    let output = scratch.run(arguments);
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_resumed_run_goes_on_in_its_folder() {
    let scratch = Scratch::new();
    let whole = scratch.train(PLAN, 6, 3, &["--run", "whole"]);
    scratch.train(PLAN, 4, 3, &["--run", "run"]);
    // Steps after the checkpoint, as a run that crashed leaves them.
    let metrics = scratch.path("run/metrics.jsonl");
    let text = std::fs::read_to_string(&metrics).expect("metrics");
    std::fs::write(&metrics, format!("{text}{{\"step\": 4, \"loss\": 1e9}}\n{{\"step\": 5, \"lo")).expect("writable");
    let document = scratch.json(&["execute", "--resume", "run", "--steps", "6", "--oversubscribe", "--no-evaluation"]);
    assert_eq!((&document["resumed_from_step"], &document["steps"]), (&4.into(), &2.into()));
    let lines = std::fs::read_to_string(&metrics).expect("metrics");
    let losses: Vec<f64> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("a line is JSON"))
        .filter_map(|line| line["loss"].as_f64())
        .collect();
    assert_eq!(losses, whole.losses);
    assert!(refusal(&scratch, 2, &["execute", "--resume", "run"]).contains("6 steps"));
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_is_used() {
    let scratch = Scratch::new();
    let whole = scratch.train(PLAN, 6, 0, &["--run", "run", "--save-every", "2"]);
    for file in ["model.safetensors", "optimizer.safetensors", "state.json"] {
        for damage in ["flip", "cut", "remove"] {
            let copy = scratch.path("copy");
            let _ = std::fs::remove_dir_all(&copy);
            copy_folder(&scratch.path("run"), &copy);
            let path = copy.join("checkpoints/6").join(file);
            let mut bytes = std::fs::read(&path).expect("a file");
            let last = bytes.len() - 1;
            match damage {
                "flip" => bytes[last] ^= 1,
                _ => bytes.truncate(last / 2),
            }
            std::fs::write(&path, bytes).expect("writable");
            if damage == "remove" {
                std::fs::remove_file(&path).expect("removable");
            }
            let basic = ["execute", "--resume", "copy", "--steps", "6", "--oversubscribe", "--no-evaluation", "--json"];
            let output = scratch.run(&basic);
            let message = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{file} {damage}: {message}");
            assert!(message.contains(file) && message.contains("goes on from step 4"), "{file} {damage}: {message}");
            let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            assert_eq!(document["loss"].as_array().map(Vec::len), Some(2), "{file} {damage}");
            assert_eq!(document["loss"][1].as_f64(), Some(whole.losses[5]), "{file} {damage}");
        }
    }
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("writable");
    for entry in std::fs::read_dir(from).expect("a folder").flatten() {
        match entry.path().is_dir() {
            true => copy_folder(&entry.path(), &to.join(entry.file_name())),
            false => drop(std::fs::copy(entry.path(), to.join(entry.file_name())).expect("a copy")),
        }
    }
}

#[test]
fn what_cannot_be_resumed_or_loaded_is_refused_with_a_hint() {
    let scratch = Scratch::new();
    scratch.train(PLAN, 2, 0, &["--run", "run"]);
    let weights = "run/checkpoints/2/model.safetensors";
    let plan = |name: &str, from: &str, to: &str| {
        assert!(PLAN.contains(from), "{from}");
        scratch.file(name, &PLAN.replace(from, to))
    };
    let wider = plan("wider.yaml", "32, 10", "48, 10");
    let deeper = plan("deeper.yaml", "32, 10", "32, 32, 10");
    let sgd = plan("sgd.yaml", "adamw", "sgd");
    let batch = plan("batch.yaml", "global_batch: 32", "global_batch: 64");
    let resume =
        |plan: &Path, status| refusal(&scratch, status, &["execute", "--resume", "run", "--plan", text(plan), "--steps", "4"]);
    assert!(resume(&wider, 2).contains("[48, 64]"));
    assert!(resume(&deeper, 2).contains("is missing") || resume(&deeper, 2).contains("in the model"));
    assert!(resume(&sgd, 2).contains("`adamw`"));
    assert!(resume(&batch, 2).contains("global_batch"));
    let init = |weights: &str| refusal(&scratch, 2, &["execute", "--plan", "plan.yaml", "--init", weights, "--steps", "1"]);
    assert!(init("nowhere.safetensors").contains("nowhere.safetensors"));
    // Not a number, cut, and of a newer version.
    let mut bytes = std::fs::read(scratch.path(weights)).expect("weights");
    let place = bytes.len() - 4;
    bytes[place..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(scratch.path("nan.safetensors"), &bytes).expect("writable");
    assert!(init("nan.safetensors").contains("NaN"));
    std::fs::write(scratch.path("cut.safetensors"), &bytes[..place]).expect("writable");
    assert!(init("cut.safetensors").contains("cut.safetensors"));
    let state = scratch.path("run/checkpoints/2/state.json");
    let newer = std::fs::read_to_string(&state).expect("state").replace("\"format\": 1", "\"format\": 99");
    std::fs::write(&state, newer).expect("writable");
    assert!(refusal(&scratch, 2, &["execute", "--resume", "run", "--steps", "4"]).contains("format 99"));
}

#[test]
fn weights_initialise_a_model_whose_head_may_differ() {
    let scratch = Scratch::new();
    scratch.train(RESNET, 3, 0, &["--run", "run", "--data", "synthetic"]);
    let weights = "run/checkpoints/3/model.safetensors";
    let fewer = RESNET.replace("classes: 10", "classes: 7").replace("data: 2, micro_batch: 4", "micro_batch: 8");
    let plan = scratch.file("fewer.yaml", &fewer);
    let basic = ["execute", "--plan", text(&plan), "--init", weights, "--steps", "1", "--data", "synthetic", "--run", "tuned"];
    let output = scratch.run(&[&basic[..], &["--no-evaluation", "--oversubscribe"]].concat());
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{message}");
    assert!(message.contains("`fc.weight`") && message.contains("start fresh"), "{message}");
    // With the same head the first loss is that of the trained weights.
    let tuned = scratch.train(RESNET, 1, 0, &["--init", weights, "--data", "synthetic", "--run", "same"]);
    let fresh = scratch.train(RESNET, 1, 0, &["--data", "synthetic", "--run", "fresh"]);
    assert_ne!(tuned.losses, fresh.losses);
}

/// A run that is killed when the value is dropped, so also when its test fails.
struct Run(Child);

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a run in the folder `run` and waits until it has written a number of lines of metrics.
fn start(scratch: &Scratch, steps: &str, lines: usize, more: &[&str]) -> Run {
    let plan = scratch.file("plan.yaml", PLAN);
    let basic =
        ["execute", "--plan", text(&plan), "--steps", steps, "--oversubscribe", "--no-evaluation", "--run", "run", "--json"];
    let mut command = scratch.command(&[&basic[..], more].concat());
    let run = Run(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts"));
    let metrics = scratch.path("run/metrics.jsonl");
    wait_for("the run to train", || std::fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() >= lines));
    run
}

#[track_caller]
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60), "waited for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: kill takes two integers. This test started the process.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

#[test]
fn a_signal_leaves_a_checkpoint_and_its_conventional_status() {
    for number in [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1] {
        let scratch = Scratch::new();
        let mut run = start(&scratch, "100000000", 3, &[]);
        signal(run.0.id(), number);
        wait_for("the run to end", || run.0.try_wait().expect("a child").is_some());
        let output = std::io::read_to_string(run.0.stderr.take().expect("a pipe")).expect("text");
        assert_eq!(run.0.wait().expect("it has ended").code(), Some(128 + number), "{output}");
        let last: usize = checkpoints(&scratch, "run").last().and_then(|name| name.parse().ok()).expect("a checkpoint");
        let lines = std::fs::read_to_string(scratch.path("run/metrics.jsonl")).expect("metrics").lines().count();
        assert_eq!(last, lines, "the checkpoint is that of the last step");
        assert!(output.contains(&format!("after {last} steps")) && output.contains("--resume run"), "{output}");
        let more = (last + 2).to_string();
        let resumed = scratch.json(&["execute", "--resume", "run", "--steps", &more, "--oversubscribe", "--no-evaluation"]);
        assert_eq!(resumed["resumed_from_step"], last);
    }
}

/// Kills a rank of a run of 2 ranks, which must go on to its end. Returns its document.
fn survive(scratch: &Scratch, more: &[&str]) -> Value {
    let steps = "3000";
    let mut run = start(scratch, steps, 60, &[&["--save-every", "50", "--keep", "2"], more].concat());
    let pids = std::fs::read_to_string(scratch.path("run/ranks/pids")).expect("the process ids");
    signal(pids.lines().nth(1).and_then(|pid| pid.parse().ok()).expect("a process id"), libc::SIGKILL);
    let printed = std::io::read_to_string(run.0.stdout.take().expect("a pipe")).expect("text");
    let messages = std::io::read_to_string(run.0.stderr.take().expect("a pipe")).expect("text");
    assert!(run.0.wait().expect("it has ended").success(), "{messages}");
    assert!(messages.contains("rank 1") && messages.contains("goes on from step"), "{messages}");
    let document: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!((&document["restarts"], &document["steps"]), (&1.into(), &3000.into()));
    let lines = std::fs::read_to_string(scratch.path("run/metrics.jsonl")).expect("metrics");
    let numbers: Vec<u64> =
        lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).expect("a line is JSON")["step"].as_u64()).collect();
    assert_eq!(numbers, (0..3000).collect::<Vec<_>>());
    document
}

#[test]
fn a_run_goes_on_after_the_loss_of_a_rank() {
    let scratch = Scratch::new();
    let whole = scratch.train(PLAN, 3000, 0, &["--run", "whole", "--save-every", "never"]);
    let losses = |document: &Value| -> Vec<f64> {
        document["loss"].as_array().expect("a list").iter().filter_map(Value::as_f64).collect()
    };
    // With as many ranks as before: the same bits.
    let restarted = survive(&scratch, &["--max-restarts", "1"]);
    assert_eq!(restarted["world_size"], 2);
    assert_eq!(losses(&restarted), whole.losses);
    // With the rank that is left: the same curve.
    std::fs::remove_dir_all(scratch.path("run")).expect("a folder");
    let elastic = survive(&scratch, &["--elastic"]);
    assert_eq!(elastic["world_size"], 1);
    for (step, (one, other)) in whole.losses.iter().zip(&losses(&elastic)).enumerate().take(400) {
        assert!((one - other).abs() <= 1e-3 * one.abs().max(1.0), "step {step}: {one} and {other}");
    }
}

#[test]
fn a_trained_language_model_continues_a_text() {
    let scratch = Scratch::new();
    let model = "{family: gpt, layers: 1, hidden: 32, heads: 4, vocab: 256, sequence: 24}";
    scratch.file("model.yaml", model);
    scratch.file("text.txt", &"abcdefg ".repeat(200));
    let plan = "model: model.yaml\ntopology: local\nglobal_batch: 16\nlayout: {data: 2, micro_batch: 8}\noptimizer: adamw\n\
                training: {learning_rate: 0.01}\n";
    scratch.train(plan, 60, 0, &["--run", "run", "--data", "text.txt"]);
    let generate = |more: &[&str]| {
        let basic = ["generate", "--init", "run/checkpoints/60", "--model", "model.yaml", "--prompt", "cdef"];
        scratch.json(&[&basic[..], more].concat())
    };
    let greedy = generate(&["--tokens", "20"]);
    assert_eq!(greedy["text"], "g abcdefg abcdefg ab");
    assert_eq!(generate(&["--tokens", "5"])["text"], "g abc", "a shorter model continues as the longer one does");
    assert!(greedy["log_probabilities"][0].as_f64().is_some_and(|difference| (-0.5..=0.0).contains(&difference)), "{greedy}");
    let hot = |seed| generate(&["--tokens", "12", "--temperature", "50", "--seed", seed])["tokens"].clone();
    assert_eq!(hot("1"), hot("1"));
    assert_ne!(hot("1"), hot("2"));
    let basic = ["generate", "--init", "run/checkpoints/60", "--model"];
    for (more, hint) in [
        (&["model.yaml", "--prompt", "cdef", "--tokens", "21"][..], "fewer tokens"),
        (&["model.yaml", "--prompt", ""], "at least one token"),
        (&["model.yaml", "--prompt-tokens", "256"], "below 256"),
        (&["gpt2", "--prompt", "cdef"], "tokenizer.json"),
        (&["bert-base-uncased", "--prompt-tokens", "1"], "a GPT, a Llama"),
    ] {
        let output = scratch.run(&[&basic[..], more].concat());
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && message.contains(hint), "{more:?}: {message}");
    }
}

/// A tokenizer in the form of SentencePiece's: spaces are `▁`, one is put before the text, and
/// characters without a token are bytes.
fn sentence_piece() -> Value {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "b", "c", "d", "▁a", "▁ab", "▁abc", "▁d"].map(String::from));
    let vocab: serde_json::Map<String, Value> = tokens.iter().cloned().zip((0..).map(|id: usize| id.into())).collect();
    let added = |id: usize| {
        serde_json::json!({"id": id, "content": tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [added(0), added(1), added(2)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": [["▁", "a"], ["▁a", "b"], ["▁ab", "c"], ["▁", "d"]]},
    })
}

#[test]
#[cfg_attr(not(feature = "tokenizers"), ignore = "needs the feature `tokenizers`")]
fn a_tokenizer_of_sentence_piece_keeps_spaces_and_bytes() {
    let scratch = Scratch::new();
    scratch.file("tokenizer.json", &sentence_piece().to_string());
    scratch.file("model.yaml", "{family: llama, layers: 1, hidden: 32, heads: 4, ffn: 64, vocab: 268, sequence: 16}");
    scratch.file("text.txt", "abc dé ".repeat(300).trim_end());
    let made = scratch.json(&["data", "tokenize", "--tokenizer", "tokenizer.json", "text.txt", "-o", "text.tokens"]);
    assert_eq!(made["tokens"], 1 + 4 * 300, "{made}");
    let plan = "model: model.yaml\ntopology: local\nglobal_batch: 16\nlayout: {micro_batch: 16}\noptimizer: adamw\n\
                training: {learning_rate: 0.01}\n";
    scratch.train(plan, 60, 0, &["--run", "run", "--data", "text.tokens"]);
    std::fs::copy(scratch.path("tokenizer.json"), scratch.path("run/checkpoints/60/tokenizer.json")).expect("writable");
    let generate = ["generate", "--init", "run/checkpoints/60", "--model", "model.yaml", "--tokens", "8", "--prompt"];
    let document = scratch.json(&[&generate[..], &["dé abc"]].concat());
    assert_eq!(document["prompt_tokens"].as_array().map(Vec::len), Some(4), "{document}");
    // The first new word keeps the space that such decoders take from the start of a text.
    assert_eq!(document["text"], " dé abc dé abc");
    let printed = scratch.run(&[&generate[..], &["dé abc"]].concat());
    assert_eq!(String::from_utf8_lossy(&printed.stdout).trim_end(), "dé abc dé abc dé abc");
}

#[test]
fn adapters_are_saved_as_peft_names_them_and_go_on_in_another_layout() {
    let scratch = Scratch::new();
    scratch.file("model.yaml", "{family: gpt, layers: 2, hidden: 32, heads: 4, vocab: 256, sequence: 16}");
    scratch.file("text.txt", &"abcdefg ".repeat(200));
    let plan = |layout: &str, recipe: &str| {
        format!(
            "model: model.yaml\ntopology: local\nglobal_batch: 8\nlayout: {{{layout}}}\noptimizer: adamw\ntraining: {{{recipe}}}\n"
        )
    };
    let data = ["--data", "text.txt", "--run"];
    scratch.train(&plan("micro_batch: 8", ""), 2, 0, &[&data[..], &["base"]].concat());
    let lora = "learning_rate: 0.01, lora: {rank: 4, alpha: 8, targets: [\"*.c_attn\", \"*.mlp.c_proj\"]}";
    let init = ["--init", "base/checkpoints/2"];
    let whole = scratch.train(&plan("micro_batch: 8", lora), 6, 0, &[&data[..], &["whole"], &init].concat());
    scratch.train(&plan("micro_batch: 8", lora), 3, 0, &[&data[..], &["run", "--save-every", "3"], &init].concat());
    let folder = scratch.path("run/checkpoints/3");
    let adapters = header(&folder.join("adapter_model.safetensors"));
    let shape = |name: &str| adapters[format!("base_model.model.transformer.h.1.{name}.weight")]["shape"].clone();
    assert_eq!(shape("attn.c_attn.lora_A"), serde_json::json!([4, 32]));
    assert_eq!(shape("attn.c_attn.lora_B"), serde_json::json!([96, 4]));
    assert_eq!(shape("mlp.c_proj.lora_A"), serde_json::json!([4, 128]));
    let config: Value =
        serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).expect("a file")).expect("JSON");
    assert_eq!((&config["r"], &config["lora_alpha"], &config["fan_in_fan_out"]), (&4.into(), &8.into(), &true.into()));
    assert_eq!(config["target_modules"].as_array().map(Vec::len), Some(4));
    // The base is as it was, and the optimizer has nothing of it.
    let model = |run: &str| std::fs::read(scratch.path(run).join("model.safetensors")).expect("weights");
    assert!(model("run/checkpoints/3") == model("base/checkpoints/2"), "the base weights are trained");
    let optimizer = header(&folder.join("optimizer.safetensors"));
    let names = optimizer.as_object().expect("a header").keys().filter(|name| *name != "__metadata__");
    assert!(names.clone().count() == 16 && names.clone().all(|name| name.contains(".lora_")), "{optimizer}");

    let other = scratch.file("other.yaml", &plan("data: 2, tensor: 2, micro_batch: 4", lora));
    let more = ["execute", "--resume", "run", "--plan", text(&other), "--steps", "6", "--oversubscribe", "--no-evaluation"];
    let resumed = scratch.json(&more);
    let losses: Vec<f64> = resumed["loss"].as_array().expect("a list").iter().filter_map(Value::as_f64).collect();
    for (one, other) in whole.losses[3..].iter().zip(&losses) {
        assert!((one - other).abs() < 1e-4 * one, "{:?} and {losses:?}", whole.losses);
    }
    assert!(losses[2] < whole.losses[0], "{:?} and {losses:?}", whole.losses);
    let text =
        |weights| scratch.json(&["generate", "--init", weights, "--model", "model.yaml", "--prompt", "cdef", "--tokens", "8"]);
    let [adapted, again] = ["run/checkpoints/6", "whole/checkpoints/6"].map(|weights| text(weights)["log_probabilities"].clone());
    let first = |document: &Value| document[0].as_f64().expect("a number");
    assert!((first(&adapted) - first(&again)).abs() < 1e-3, "{adapted} and {again}");
    std::fs::remove_file(folder.join("adapter_model.safetensors")).expect("removable");
    std::fs::remove_dir_all(scratch.path("run/checkpoints/6")).expect("removable");
    assert!(refusal(&scratch, 2, &["execute", "--resume", "run", "--steps", "6"]).contains("adapter_model.safetensors"));
}
