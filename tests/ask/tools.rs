//! The tools for agents: the protocol, and the skill file's commands.

use crate::common::Scratch;
use crate::{children, long_search, timeless, wait_until};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

/// A server of tools, and its client's end.
struct Tools {
    child: Child,
    input: Option<ChildStdin>,
    output: Option<BufReader<ChildStdout>>,
}

impl Tools {
    fn start(scratch: &Scratch, options: &[&str]) -> Self {
        let mut command = scratch.command(&[&["mcp"][..], options].concat());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
        let (input, output) = (child.stdin.take(), child.stdout.take().expect("a pipe"));
        Self { child, input, output: Some(BufReader::new(output)) }
    }

    fn send(&mut self, line: &str) {
        self.input.as_mut().expect("it is open").write_all(format!("{line}\n").as_bytes()).expect("it reads");
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.output.as_mut().expect("it is open").read_line(&mut line).expect("it writes");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    fn request(&mut self, id: u64, method: &str, parameters: &Value) -> Value {
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": parameters}).to_string());
        let answer = self.receive();
        assert_eq!((&answer["jsonrpc"], &answer["id"]), (&json!("2.0"), &json!(id)));
        answer
    }

    fn call(&mut self, tool: &str, arguments: &Value) -> Value {
        self.request(7, "tools/call", &json!({"name": tool, "arguments": arguments}))["result"].take()
    }
}

impl Drop for Tools {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_protocol_is_spoken() {
    let scratch = Scratch::new();
    let mut tools = Tools::start(&scratch, &[]);
    for (wanted, expected) in [("2025-06-18", "2025-06-18"), ("2024-11-05", "2024-11-05"), ("1999-01-01", "2025-11-25")] {
        let answer = tools.request(1, "initialize", &json!({"protocolVersion": wanted, "capabilities": {}}));
        assert_eq!(answer["result"]["protocolVersion"], expected);
        assert_eq!(answer["result"]["serverInfo"]["name"], "foretell");
    }
    tools.send(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    assert_eq!(tools.request(2, "ping", &json!({}))["result"], json!({}));
    let listed = tools.request(3, "tools/list", &json!({}));
    let names: Vec<&str> =
        listed["result"]["tools"].as_array().expect("tools").iter().filter_map(|tool| tool["name"].as_str()).collect();
    for name in ["plan", "simulate", "fits", "compare", "what_if", "import", "export", "explain_error"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    assert_eq!(tools.request(4, "resources/list", &json!({}))["error"]["code"], -32601);
    assert_eq!(tools.request(5, "tools/call", &json!({"name": "shell"}))["error"]["code"], -32602);
    for (line, code) in [("{", -32700), ("[1]", -32600), ("{\"id\": 1}", -32600)] {
        tools.send(line);
        assert_eq!(tools.receive()["error"]["code"], code, "{line}");
    }
}

#[test]
fn an_answer_is_short_and_with_details_the_whole_document() {
    let scratch = Scratch::new();
    let mut tools = Tools::start(&scratch, &[]);
    let job = json!({"model": "gpt2", "topology": "dgx-a100-80g"});
    let brief = tools.call("plan", &job);
    let text = brief["content"][0]["text"].as_str().expect("a summary");
    assert!(brief["isError"] == false && text.contains("best layout: ") && text.contains("proven: "), "{text}");
    assert!(brief["structuredContent"]["search"]["space"].is_null() && text.lines().count() < 20);
    let mut detailed = job.clone();
    detailed["details"] = json!(true);
    let whole = tools.call("plan", &detailed)["structuredContent"].take();
    let expected = scratch.json(&["plan", "--model", "gpt2", "--topology", "dgx-a100-80g"]);
    assert_eq!(timeless(whole.clone()), timeless(expected));

    let plan = &whole["plan"];
    let step = tools.call("what_if", &json!({"plan": plan, "what-if": ["peak*2"]}));
    let text = step["content"][0]["text"].as_str().expect("a summary");
    assert!(text.contains("with device.peak*2: step"), "{text}");
    let files = tools.call("export", &json!({"plan": plan, "to": "megatron"}));
    assert!(files["structuredContent"]["contents"]["run.sh"].is_string(), "{files}");
    let compared = tools.call("compare", &json!({"model": "gpt2", "topology": "dgx-a100-80g", "compare": plan}));
    let text = compared["content"][0]["text"].as_str().expect("a summary");
    assert!(text.contains("1.00 times the best step"), "{text}");
}

#[test]
fn mistakes_are_said_with_hints() {
    let scratch = Scratch::new();
    let mut tools = Tools::start(&scratch, &[]);
    let hostile = [
        ("plan", json!({"model": "/etc/passwd", "topology": "8xh100"})),
        ("plan", json!({"model": "gpt2", "topology": "8xh100", "output": "plan.yaml"})),
        ("plan", json!({"model": "gtp2", "topology": "8xh100"})),
        ("compare", json!({"model": "gpt2", "topology": "8xh100"})),
        ("simulate", json!({"plan": {"model": "/etc/passwd", "topology": "8xh100", "global_batch": 8}})),
        ("export", json!({"plan": {}, "to": "chakra"})),
    ];
    for (tool, arguments) in hostile {
        let result = tools.call(tool, &arguments);
        let text = result["content"][0]["text"].as_str().unwrap_or_default();
        assert!(result["isError"] == true && text.contains("hint: "), "{tool} {arguments}: {result}");
    }
}

#[test]
fn an_out_of_memory_message_is_explained_by_its_job() {
    let scratch = Scratch::new();
    let mut tools = Tools::start(&scratch, &[]);
    let error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of \
        which 1.12 GiB is free.";
    let explained =
        tools.call("explain_error", &json!({"error": error, "model": "llama3-8b", "topology": "1xrtx-4090", "method": "full"}));
    let text = explained["content"][0]["text"].as_str().expect("a text");
    assert!(text.contains("asked for 2 GiB, capacity 23.6 GiB") && text.contains("what to change: it fits with"), "{text}");
    let other = tools.call("explain_error", &json!({"error": "NCCL timeout", "model": "mlp", "topology": "cpu-pair"}));
    assert_eq!(other["isError"], true);
}

#[test]
fn a_cancelled_call_ends_and_has_no_answer() {
    let scratch = Scratch::new();
    let mut tools = Tools::start(&scratch, &[]);
    let process = tools.child.id();
    let options = long_search()["options"].take();
    let call =
        |id: u64| json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": "plan", "arguments": options}});
    tools.send(&call(1).to_string());
    wait_until("it begins", || children(process).len() == 1);
    tools.send(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#);
    wait_until("it ends", || children(process).is_empty());
    assert_eq!(tools.request(2, "ping", &json!({}))["result"], json!({}), "the call has no answer");
    // With the client go its questions.
    tools.send(&call(3).to_string());
    wait_until("it begins", || children(process).len() == 1);
    let child = children(process)[0];
    (tools.input, tools.output) = (None, None);
    wait_until("the server ends", || !std::path::Path::new(&format!("/proc/{child}")).exists());
    assert!(tools.child.wait().expect("it ends").success());
}

/// A client may write all its messages at once, and close its end.
#[test]
fn piped_calls_are_answered_and_an_early_cancellation_counts() {
    let scratch = Scratch::new();
    let mut tools = Tools::start(&scratch, &[]);
    let call = |id: u64, name: &str, arguments: &Value| {
        let parameters = json!({"name": name, "arguments": arguments});
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": parameters}).to_string()
    };
    let options = long_search()["options"].take();
    // Cancelled before it has begun; and an id that is in use.
    tools.send(&call(1, "plan", &options));
    tools.send(&call(1, "plan", &options));
    tools.send(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#);
    tools.send(&call(2, "fits", &json!({"model": "gpt2", "topology": "1xrtx-4090", "global-batch": 8})));
    tools.input = None;
    let answers = [tools.receive(), tools.receive()];
    assert_eq!((&answers[0]["id"], &answers[0]["error"]["code"]), (&json!(1), &json!(-32600)));
    assert_eq!((&answers[1]["id"], &answers[1]["result"]["isError"]), (&json!(2), &json!(false)));
    assert!(tools.child.wait().expect("it ends").success());
}

#[test]
fn the_commands_of_the_skill_file_run() {
    let scratch = Scratch::new();
    let output = scratch.run(&["mcp", "--skill"]);
    let skill = String::from_utf8(output.stdout).expect("text");
    assert!(skill.lines().count() <= 100 && skill.starts_with("---\nname: foretell\n"));
    let commands: Vec<&str> = skill.lines().filter(|line| line.starts_with("foretell ")).collect();
    assert!(commands.len() >= 5, "{commands:?}");
    for command in commands {
        let words: Vec<&str> = command.split(' ').skip(1).map(|word| word.trim_matches('\'')).collect();
        let output = scratch.run(&words);
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        let document: Value = serde_json::from_slice(&output.stdout).expect("one document");
        assert!(document.is_object(), "{command}");
    }
    // Every tool that it names is there.
    let mut tools = Tools::start(&scratch, &[]);
    let listed = tools.request(1, "tools/list", &json!({})).to_string();
    let named = skill.lines().filter(|line| line.starts_with("| ") && line.contains('`')).flat_map(|line| line.split('|').nth(2));
    for name in named.flat_map(|cell| cell.split('`').skip(1).step_by(2)) {
        assert!(listed.contains(&format!("\"name\":\"{name}\"")), "{name}");
    }
}
