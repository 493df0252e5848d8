//! Headless Chromium through its debugging pipe: messages are JSON documents, each ended by a zero
//! byte (Chrome DevTools Protocol). It must not know what a page should be like.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long an answer may take on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(60);

/// A browser with one page.
pub struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    calls: u64,
    /// What the page reported since the last [`Browser::take_events`].
    events: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts Chromium, if there is one: `FORETELL_CHROMIUM`, else `chromium`.
    pub fn start() -> Option<Self> {
        let program = std::env::var("FORETELL_CHROMIUM").unwrap_or_else(|_| "chromium".into());
        Command::new(&program).arg("--version").output().ok().filter(|output| output.status.success())?;
        let profile = tempfile::tempdir().expect("a temporary folder");
        // Chromium reads messages from descriptor 3 and writes them to 4.
        let script = "exec \"$0\" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
                      --remote-debugging-pipe --user-data-dir=\"$1\" about:blank 3<&0 4>&1 </dev/null >/dev/null 2>&1";
        let mut command = Command::new("sh");
        command.args(["-c", script, &program]).arg(profile.path());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a shell starts");
        let (input, output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                let document = serde_json::from_slice(message.strip_suffix(&[0]).unwrap_or(&message));
                message.clear();
                if document.is_ok_and(|document| sender.send(document).is_err()) {
                    break;
                }
            }
        });
        let mut browser = Self { child, input, messages, session: None, calls: 0, events: Vec::new(), _profile: profile };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}));
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Network", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Calls a method and returns its result. A failure is the test's.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.input.write_all(format!("{message}\0").as_bytes()).expect("Chromium reads");
        loop {
            let answer = self.next(method);
            if answer["id"] == self.calls {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    fn next(&self, awaited: &str) -> Value {
        let message = self.messages.recv_timeout(PATIENCE);
        assert!(message.is_ok(), "Chromium says nothing: {awaited}");
        message.expect("it was checked")
    }

    /// Opens a file, and returns once it is loaded and drawn.
    pub fn open(&mut self, file: &Path) {
        self.visit(&format!("file://{}", file.display()));
    }

    /// Opens an address, and returns once it is loaded and drawn.
    pub fn visit(&mut self, url: &str) {
        self.events.clear();
        self.call("Page.navigate", json!({"url": url}));
        let end = Instant::now() + PATIENCE;
        while !self.events.iter().any(|event| event["method"] == "Page.loadEventFired") {
            assert!(Instant::now() < end, "the page does not load");
            let event = self.next("Page.loadEventFired");
            self.events.push(event);
        }
        self.settle();
    }

    /// Waits until the page is drawn.
    pub fn settle(&mut self) {
        self.evaluate(
            "new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(() => done(1))), 60))",
        );
    }

    /// The value of an expression in the page.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", parameters);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// The text of the page; empty while another one is being loaded.
    pub fn text(&mut self) -> String {
        let parameters = json!({"expression": "document.body.innerText", "returnByValue": true});
        self.call("Runtime.evaluate", parameters)["result"]["value"].as_str().unwrap_or_default().to_owned()
    }

    /// Presses a key, as a keyboard does.
    pub fn press(&mut self, key: &str) {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "ArrowLeft" => 37,
            "ArrowDown" => 40,
            _ => 0,
        };
        let mut down = json!({"type": "keyDown", "key": key, "windowsVirtualKeyCode": code});
        if key.len() == 1 || key == "Enter" {
            down["text"] = if key == "Enter" { "\r".into() } else { key.into() };
        }
        self.call("Input.dispatchKeyEvent", down);
        self.call("Input.dispatchKeyEvent", json!({"type": "keyUp", "key": key, "windowsVirtualKeyCode": code}));
    }

    /// What the page reported since it was opened.
    pub fn take_events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.session = None;
        let _ = self.input.write_all(b"{\"id\": 0, \"method\": \"Browser.close\"}\0");
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
