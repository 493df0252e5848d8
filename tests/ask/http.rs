//! A server of the planner, and requests to it as a browser sends them.

use crate::common::Scratch;
use serde_json::Value;
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};

/// A server. It ends with the value.
pub struct Planner {
    child: Child,
    /// Its host and port.
    pub host: String,
    /// Its token.
    pub token: String,
}

/// A status with a body.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The code of the error that the body has.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}

impl Planner {
    /// Starts a server with some options.
    pub fn start(scratch: &Scratch, options: &[&str]) -> Self {
        Self::start_in(scratch, options, &std::env::temp_dir())
    }

    /// Starts a server with some options and a folder for its temporary files.
    pub fn start_in(scratch: &Scratch, options: &[&str], temporary: &Path) -> Self {
        let mut command = scratch.command(&[&["serve", "--json"][..], options].concat());
        let mut child = command.env("TMPDIR", temporary).stdout(Stdio::piped()).spawn().expect("the program starts");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let document: Value =
            serde_json::Deserializer::from_reader(output).into_iter().next().expect("a document").expect("JSON");
        assert!(document["run"].is_null(), "{document}");
        Self::of(child, &document)
    }

    /// The server of a process that printed its document.
    pub fn of(child: Child, document: &Value) -> Self {
        let url = document["url"].as_str().expect("an address");
        let (host, token) = url.strip_prefix("http://").and_then(|rest| rest.split_once("/?token=")).expect("a token");
        Self { host: host.to_owned(), token: token.to_owned(), child }
    }

    /// The server's process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Asks the server to stop, as Ctrl-C does.
    pub fn stop(&self) {
        let process = i32::try_from(self.process()).expect("a number of a process");
        // SAFETY: it only sends a signal.
        assert_eq!(unsafe { libc::kill(process, libc::SIGINT) }, 0);
    }

    /// Ends the server, and returns what it said on standard error.
    pub fn messages(mut self) -> String {
        self.stop();
        self.ended();
        let mut text = String::new();
        self.child.stderr.take().expect("a pipe").read_to_string(&mut text).expect("text");
        text
    }

    /// Waits for the server's end.
    pub fn ended(&mut self) -> ExitStatus {
        self.child.wait().expect("it ends")
    }

    /// Sends a request as it is, and returns the reply.
    pub fn send(&self, request: &str) -> Reply {
        let mut stream = TcpStream::connect(&self.host).expect("it listens");
        stream.write_all(request.as_bytes()).expect("it is sent");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("it answers");
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let (head, body) = (String::from_utf8(bytes[..end].to_vec()).expect("a head of text"), &bytes[end + 4..]);
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let body = if head.to_lowercase().contains("transfer-encoding: chunked") { joined(body) } else { body.to_vec() };
        Reply { status, head, body: String::from_utf8(body).expect("text") }
    }

    /// Sends a request to a path with the token, as the server's page does.
    pub fn request(&self, method: &str, path: &str, body: &str) -> Reply {
        let Self { host, token, .. } = self;
        let joint = if path.contains('?') { '&' } else { '?' };
        self.send(&format!(
            "{method} {path}{joint}token={token} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nSec-Fetch-Site: same-origin\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        ))
    }

    /// Asks a question in a lane.
    pub fn ask(&self, lane: &str, question: &Value) -> Reply {
        self.request("POST", &format!("/ask?lane={lane}"), &question.to_string())
    }
}

/// The body of a reply in chunks. A chunk may end inside of a letter.
fn joined(mut chunks: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = chunks.windows(2).position(|window| window == b"\r\n") {
        let length = std::str::from_utf8(&chunks[..end]).ok().and_then(|text| usize::from_str_radix(text, 16).ok());
        let length = length.expect("a length");
        body.extend_from_slice(&chunks[end + 2..][..length]);
        chunks = &chunks[end + 2 + length + 2..];
    }
    body
}

impl Drop for Planner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
