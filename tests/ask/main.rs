//! Questions from outside: the server of the planner's page, and the tools for agents. Answers are
//! those of the command line, and nothing else can be asked for.
#![allow(clippy::panic, reason = "a test that fails may panic")]

#[path = "../common/mod.rs"]
mod common;
mod growth;
mod http;
mod server;
mod tools;

use serde_json::{Value, json};
use std::path::Path;

/// A search that takes minutes.
fn long_search() -> Value {
    json!({"command": "plan", "options": {"model": "llama3-70b", "topology": "64x8xh100@400Gbit/s", "global-batch": 1024}})
}

/// A document without the time that it took.
fn timeless(mut document: Value) -> Value {
    match &mut document {
        Value::Object(fields) => {
            fields.remove("wall_seconds");
            fields.values_mut().for_each(|value| *value = timeless(value.take()));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = timeless(item.take())),
        _ => {}
    }
    document
}

/// The processes whose parent is `process`.
fn children(process: u32) -> Vec<u32> {
    let stat = |folder: &Path| std::fs::read_to_string(folder.join("stat")).ok();
    let parent = |text: &str| text.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<u32>().ok();
    let processes = std::fs::read_dir("/proc").expect("processes").flatten();
    let ids = processes.filter_map(|entry| Some((entry.file_name().to_str()?.parse::<u32>().ok()?, stat(&entry.path())?)));
    ids.filter(|(_, text)| parent(text) == Some(process)).map(|(id, _)| id).collect()
}

/// Waits until something is so, for some seconds at most.
#[track_caller]
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !is_so() {
        assert!(std::time::Instant::now() < end, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
