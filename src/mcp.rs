//! `foretell mcp`: a Model Context Protocol server on standard input and output. A message is a
//! line of JSON-RPC 2.0. Tool calls are answered in threads by confined child processes
//! (`crate::ask`), so that later messages, such as a cancellation, are read meanwhile.
//!
//! The specification is at <https://modelcontextprotocol.io/specification>. The loop is small
//! enough to be written here: the official SDK brings an asynchronous runtime
//! (`docs/dependencies.md`).

mod memory_error;
mod summary;
mod tools;

use crate::ask::{Answer, Desk, LONGEST_QUESTION, Limits, Place, Refusal, Request};
use crate::failure::{Failure, code};
use crate::output;
use clap::Args;
use foretell_units::diagnostic::one_line;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{BufRead, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tools::{Call, Tool};

/// Answer the questions of agents: a server of the Model Context Protocol
///
/// It reads requests from standard input and writes answers to standard output. Its tools plan,
/// simulate, compare, import and export.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  claude mcp add foretell -- foretell mcp
  foretell mcp --skill > .claude/skills/foretell/SKILL.md")]
pub struct Arguments {
    /// Print the file that tells an agent when to use which tool, and end
    #[arg(long)]
    skill: bool,
    #[command(flatten)]
    limits: Limits,
}

/// The versions of the protocol that this server speaks, newest first.
const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// The longest message. A question may have a few files.
const LONGEST_MESSAGE: u64 = 2 * LONGEST_QUESTION as u64;

/// The file for agents.
const SKILL: &str = include_str!("mcp/skill.md");

/// What the server tells an agent at the start.
const INSTRUCTIONS: &str = "Foretell predicts how long a step of a distributed training run takes and how much memory it needs, \
                            and searches for the fastest layout. `plan` answers what fits and how fast; pass the plan of its answer to \
                            `simulate`, `what_if`, `compare` and `export`. Answers are short; `details: true` gives the whole document.";

/// Error codes of JSON-RPC.
#[derive(Clone, Copy)]
enum Code {
    Parse = -32700,
    Request = -32600,
    Method = -32601,
    Parameters = -32602,
}

/// A message of the client.
#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    id: Option<Value>,
    method: Option<String>,
    #[serde(default)]
    params: Value,
}

/// Runs the server until its standard input ends. `line` is clap's description of the command line.
pub fn run(arguments: &Arguments, line: clap::Command) -> Result<(), Failure> {
    if arguments.skill {
        return output::line(SKILL.trim_end());
    }
    let server = Server { desk: Arc::new(Desk::new(line, arguments.limits)?), output: Arc::default() };
    let mut calls: Vec<JoinHandle<()>> = Vec::new();
    let mut input = std::io::stdin().lock();
    let mut text = Vec::new();
    loop {
        text.clear();
        let read = input.by_ref().take(LONGEST_MESSAGE).read_until(b'\n', &mut text);
        let length =
            read.map_err(|error| Failure::undone(code::FILE_UNREADABLE, format!("standard input cannot be read: {error}")))?;
        if length == 0 {
            break;
        }
        if length as u64 == LONGEST_MESSAGE && text.last() != Some(&b'\n') {
            return Err(Failure::input(code::OPTION_USAGE, "a message is too long"));
        }
        calls.retain(|call| !call.is_finished());
        calls.extend(server.take(text.trim_ascii()));
    }
    // Questions that were piped in are still answered, each within its limits, unless the client
    // has closed the output.
    while calls.iter().any(|call| !call.is_finished()) && !output_is_closed() {
        std::thread::sleep(POLL_INTERVAL);
    }
    server.desk.close();
    Ok(())
}

/// Time between two checks of whether the last calls are answered.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Whether the reader of standard output is gone.
fn output_is_closed() -> bool {
    let output = std::io::stdout();
    let mut looked = [PollFd::new(&output, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut looked, Some(&now)).is_ok_and(|ready| ready > 0) && looked[0].revents().contains(PollFlags::ERR)
}

/// The state of the server.
#[derive(Clone)]
struct Server {
    desk: Arc<Desk>,
    /// Held while a message is written.
    output: Arc<Mutex<()>>,
}

impl Server {
    /// Handles a message. Returns the thread of a tool call, if the message is one.
    fn take(&self, text: &[u8]) -> Option<JoinHandle<()>> {
        if text.is_empty() {
            return None;
        }
        let Ok(document) = serde_json::from_slice::<Value>(text) else {
            self.fail(&Value::Null, Code::Parse, "the message is not JSON");
            return None;
        };
        let Ok(message) = Message::deserialize(&document) else {
            self.fail(&Value::Null, Code::Request, "the message is no request");
            return None;
        };
        match (message.method.as_deref(), message.id) {
            (Some("notifications/cancelled"), _) => self.desk.cancel(&lane(&message.params["requestId"])),
            (Some(_), None) => {}
            (Some("tools/call"), Some(id)) => return self.begin(id, &message.params),
            (Some(method), Some(id)) => self.request(method, &id, &message.params),
            // A response of the client. The server sends no requests, so ignore it.
            (None, Some(_)) if document.get("result").is_some() || document.get("error").is_some() => {}
            (None, id) => self.fail(&id.unwrap_or_default(), Code::Request, "the message has no method"),
        }
        None
    }

    /// Begins a tool call, which can be cancelled from here on.
    fn begin(&self, id: Value, parameters: &Value) -> Option<JoinHandle<()>> {
        let lane = lane(&id);
        if self.desk.is_taken(&lane) {
            self.fail(&id, Code::Request, "a request with this id is being answered");
            return None;
        }
        let call = match Call::read(parameters) {
            Ok(call) => call,
            Err(why) => {
                self.fail(&id, Code::Parameters, &one_line(&why));
                return None;
            }
        };
        let entered = call.request().and_then(|request| Ok((request, self.desk.enter(&lane)?)));
        match entered {
            Ok((request, place)) => {
                let server = self.clone();
                Some(std::thread::spawn(move || server.call(&id, place, &request, &call)))
            }
            Err(refusal) => {
                self.answer(&id, refused(&refusal));
                None
            }
        }
    }

    fn request(&self, method: &str, id: &Value, parameters: &Value) {
        match method {
            "initialize" => self.answer(id, initialized(parameters)),
            "ping" => self.answer(id, json!({})),
            "tools/list" => {
                let tools: Vec<Value> = tools::TOOLS.iter().map(|tool| tool.document(self.desk.line())).collect();
                self.answer(id, json!({"tools": tools}));
            }
            _ => self.fail(id, Code::Method, &format!("there is no method `{method}`")),
        }
    }

    /// Answers a tool call. A cancelled call gets no answer.
    fn call(&self, id: &Value, place: Place, request: &Request, call: &Call) {
        match self.desk.ask_in(place, request) {
            Err(Refusal::Cancelled) => {}
            Err(refusal) => self.answer(id, refused(&refusal)),
            Ok(answer) => self.answer(id, result(call.tool, call, &answer)),
        }
    }

    fn answer(&self, id: &Value, result: Value) {
        self.write(&json!({"jsonrpc": "2.0", "id": id, "result": result}));
    }

    fn fail(&self, id: &Value, code: Code, message: &str) {
        self.write(&json!({"jsonrpc": "2.0", "id": id, "error": {"code": code as i32, "message": message}}));
    }

    fn write(&self, message: &Value) {
        let _one_at_a_time = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let mut output = std::io::stdout();
        // If the client has gone, the end of the input ends the server.
        let _ = output.write_all(format!("{message}\n").as_bytes()).and_then(|()| output.flush());
    }
}

/// The lane of a request's question. The suffix ensures that no lane is the beginning of another.
fn lane(id: &Value) -> String {
    format!("{id};")
}

fn initialized(parameters: &Value) -> Value {
    let wanted = parameters["protocolVersion"].as_str().unwrap_or_default();
    let version = VERSIONS.into_iter().find(|version| *version == wanted).unwrap_or(VERSIONS[0]);
    json!({
        "protocolVersion": version,
        "capabilities": {"tools": {"listChanged": false}},
        "serverInfo": {"name": "foretell", "version": env!("CARGO_PKG_VERSION")},
        "instructions": INSTRUCTIONS,
    })
}

/// The result of a tool call that was refused.
fn refused(refusal: &Refusal) -> Value {
    failed(&serde_json::to_value(refusal.document()).unwrap_or_default())
}

/// The result of a tool call that failed: the message with its hint, and the document.
fn failed(document: &Value) -> Value {
    let error = &document["error"];
    let mut text = error["message"].as_str().unwrap_or("it failed").to_owned();
    if let Some(hint) = error["hint"].as_str() {
        text.push_str(&format!("\nhint: {hint}"));
    }
    json!({"content": [{"type": "text", "text": text}], "structuredContent": document, "isError": true})
}

/// The result of a tool call: a summary, then the document, shortened unless details were asked
/// for.
fn result(tool: &Tool, call: &Call, answer: &Answer) -> Value {
    let Ok(document) = serde_json::from_str::<Value>(&answer.document) else {
        return failed(&json!({"error": {"message": "the answer is no document"}}));
    };
    if let Some(error) = &call.error_text {
        return memory_error::result(error, &document, &answer.line);
    }
    if document.get("error").is_some() {
        return failed(&document);
    }
    let mut text = summary::of(tool.summary, &document, answer);
    text.push_str(&format!("\ncommand: {}", answer.line));
    let mut document = if call.details { document } else { summary::shortened(document) };
    if !answer.files.is_empty()
        && let Some(document) = document.as_object_mut()
    {
        document.insert("contents".into(), json!(answer.files));
    }
    let contents = [json!({"type": "text", "text": text}), json!({"type": "text", "text": document.to_string()})];
    json!({"content": contents, "structuredContent": structured(document), "isError": false})
}

/// Structured content must be an object, so a list is wrapped.
fn structured(document: Value) -> Value {
    if document.is_object() { document } else { json!({"items": document}) }
}
