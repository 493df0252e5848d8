//! Pages that `foretell serve` gives.

use super::MLP;
use super::common::{Scratch, text};
use serde_json::Value;

/// Ends the process when the value is dropped.
struct Serving(std::process::Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_run_is_served_to_those_who_have_the_token() {
    use std::io::{BufRead, BufReader, Read, Write};
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", &format!("{{model: {MLP}, topology: local, layout: {{data: 1}}, global_batch: 32}}"));
    scratch.json(&["execute", "--plan", text(&plan), "--steps", "3"]);
    let mut serving = scratch.command(&["serve", "runs"]);
    let mut serving = Serving(serving.stdout(std::process::Stdio::piped()).spawn().expect("it starts"));
    let mut line = String::new();
    BufReader::new(serving.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("it prints its address");
    let url = line.trim_end().split_once("http://").expect("an address").1.to_owned();
    let (host, path) = url.split_once('/').expect("a path");
    assert!(host.starts_with("127.0.0.1:"), "{host}");
    let ask = |method: &str, path: &str, name: &str| {
        let mut stream = std::net::TcpStream::connect(host).expect("it listens");
        write!(stream, "{method} /{path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n").expect("it is sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        answer
    };
    let page = ask("GET", path, host);
    assert!(
        page.starts_with("HTTP/1.1 200") && page.contains("predicted and measured") && !page.contains("Refresh:"),
        "{page:.300}"
    );
    assert!(ask("GET", "", host).starts_with("HTTP/1.1 403"));
    assert!(ask("GET", &path.replace("token=", "token=0"), host).starts_with("HTTP/1.1 403"));
    assert!(ask("GET", path, "evil.example").starts_with("HTTP/1.1 403"), "a page elsewhere reaches it");
    assert!(ask("POST", path, host).starts_with("HTTP/1.1 405"));
    // While the run goes there are no totals: the page shows its losses so far, and looks again.
    std::fs::remove_file(scratch.path("runs/1/measured.json")).expect("it is there");
    let page = ask("GET", path, host);
    assert!(page.contains("Refresh: 2") && page.contains("a run in progress") && page.contains("made so far"), "{page:.300}");
}

#[test]
fn a_search_is_served_from_the_file_of_its_progress() {
    use std::io::{BufRead, BufReader, Read, Write};
    let scratch = Scratch::new();
    scratch.file("mlp.yaml", MLP);
    let search =
        ["plan", "--model", "mlp.yaml", "--topology", "dgx-a100-80g", "--global-batch", "64", "--progress", "search.jsonl"];
    scratch.json(&search);
    let lines = std::fs::read_to_string(scratch.path("search.jsonl")).expect("it is written");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("a line is a document")).collect();
    assert_eq!((&lines[0]["started"]["devices"], &lines[0]["started"]["schema_version"]), (&8.into(), &1.into()));
    let ended = &lines.last().expect("a line")["ended"];
    assert!(ended["best"].as_f64() >= ended["bound"].as_f64() && ended["simulated"].as_u64() > Some(0), "{ended}");
    // An interrupted search has no last line, and its page looks again.
    for (kept, is_over) in [(lines.len(), true), (lines.len() - 1, false)] {
        let text: String = lines[..kept].iter().map(|line| format!("{line}\n")).collect();
        scratch.file("search.jsonl", &text);
        let mut serving = scratch.command(&["serve", "search.jsonl"]);
        let mut serving = Serving(serving.stdout(std::process::Stdio::piped()).spawn().expect("it starts"));
        let mut line = String::new();
        BufReader::new(serving.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("it prints its address");
        let (host, path) = line.trim_end().split_once("http://").and_then(|(_, url)| url.split_once('/')).expect("an address");
        let mut stream = std::net::TcpStream::connect(host).expect("it listens");
        write!(stream, "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").expect("it is sent");
        let mut page = String::new();
        stream.read_to_string(&mut page).expect("it answers");
        assert!(page.starts_with("HTTP/1.1 200") && page.contains("8 devices"), "{page:.300}");
        assert_eq!(page.contains("Refresh: 2"), !is_over, "{page:.300}");
    }
    let refused = scratch.run(&["serve", "search.jsonl.old"]);
    assert_eq!(refused.status.code(), Some(2), "{}", String::from_utf8_lossy(&refused.stderr));
}
