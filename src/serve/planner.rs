//! The planner's page and what it asks for: `POST /ask` answers a question, `POST /cancel` cancels
//! the questions of a lane, `GET /progress` returns a search's progress, `GET /report` shows a
//! step's report. The page is files of this program; nothing is loaded from elsewhere.

use super::door::{Door, Page, Refused, parameter, plain, random_letters, with_headers};
use crate::ask::{self, Answer, Desk, LONGEST_QUESTION, Refusal};
use crate::failure::Failure;
use crate::inputs::{LOCAL, LOCAL_GPUS};
use std::collections::VecDeque;
use std::io::Read;
use std::sync::{Mutex, PoisonError};
use tiny_http::{Method, Request, Response};

const HTML: &str = include_str!("page/index.html");
const STYLE: &str = include_str!("page/style.css");
/// The scripts, in the order in which they are joined into one.
const SCRIPTS: [&str; 9] = [
    include_str!("page/draw.js"),
    include_str!("page/refused.js"),
    include_str!("page/state.js"),
    include_str!("page/server.js"),
    include_str!("page/answer.js"),
    include_str!("page/panels.js"),
    include_str!("page/files.js"),
    include_str!("page/fields.js"),
    include_str!("page/main.js"),
];

/// The longest name of a lane.
const LONGEST_LANE: usize = 64;

/// The most reports that are kept for the page to show.
const MOST_REPORTS: usize = 6;

/// The planner.
pub struct Planner {
    desk: Desk,
    known: String,
    reports: Mutex<Reports>,
}

/// The last reports, each with its number.
#[derive(Default)]
struct Reports {
    made: u64,
    kept: VecDeque<(u64, String)>,
}

impl Planner {
    /// The planner, whose questions a desk answers.
    pub fn new(desk: Desk) -> Result<Self, Failure> {
        let known = ask::known(desk.line(), &[LOCAL, LOCAL_GPUS])?;
        // `<` is escaped, so that no text can end the element that contains it.
        Ok(Self { desk, known: known.replace('<', "\\u003c"), reports: Mutex::default() })
    }

    /// Answers a request that has the token.
    pub fn answer(&self, door: &Door, request: &mut Request) -> Result<Page, Refused> {
        let url = request.url().to_owned();
        let path = url.split('?').next().unwrap_or_default();
        let is_get = matches!(request.method(), Method::Get | Method::Head);
        match (path, is_get, request.method() == &Method::Post) {
            ("/", true, _) => self.page(),
            ("/progress", true, _) => Ok(self.progress(lane(&url)?)),
            ("/report", true, _) => self.report(&url),
            ("/ask", _, true) => {
                door.admit_from_own_page(request)?;
                let lane = lane(&url)?;
                let question = body(request)?;
                Ok(self.ask(lane, &question))
            }
            ("/cancel", _, true) => {
                door.admit_from_own_page(request)?;
                self.desk.cancel(lane(&url)?);
                Ok(plain(200, ""))
            }
            ("/" | "/progress" | "/report" | "/ask" | "/cancel", ..) => Err((405, "this address has another method")),
            _ => Err((404, "there is no such page")),
        }
    }

    /// Cancels all answers, and removes their folders.
    pub fn close(&self) {
        self.desk.close();
    }

    fn page(&self) -> Result<Page, Refused> {
        let nonce = random_letters().map_err(|_| (500, "the system gives no random bytes"))?;
        let script = format!("(() => {{\n\"use strict\";\n{}}})();\n", SCRIPTS.concat());
        let text = HTML.replace("{{nonce}}", &nonce).replace("{{style}}", STYLE);
        let text = text.replace("{{known}}", &self.known).replace("{{script}}", &script);
        let policy = format!(
            "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; frame-src 'self'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        );
        let headers = [("Content-Type", "text/html; charset=utf-8"), ("Content-Security-Policy", policy.as_str())];
        Ok(with_headers(Response::from_string(text), &headers))
    }

    fn ask(&self, lane: &str, question: &str) -> Page {
        let request = serde_json::from_str(question).map_err(|error| {
            Refusal::Question(format!("the question cannot be read: {error}"), "send a command with its options".into())
        });
        match request.and_then(|request| self.desk.ask(lane, &request)) {
            Ok(answer) => self.answered(answer),
            Err(refusal) => refused(&refusal),
        }
    }

    /// An answer as a response, with the number of its report.
    fn answered(&self, mut answer: Answer) -> Page {
        let report = answer.report.take().map(|page| self.keep(page));
        with_headers(Response::from_string(answer.text(&report.into())), &JSON)
    }

    /// Keeps a report for [`Self::report`], and returns its number.
    fn keep(&self, page: String) -> u64 {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.made += 1;
        let number = reports.made;
        reports.kept.push_back((number, page));
        if reports.kept.len() > MOST_REPORTS {
            reports.kept.pop_front();
        }
        number
    }

    /// A report, for a frame without permissions or for download.
    fn report(&self, url: &str) -> Result<Page, Refused> {
        let number = parameter(url, "number").and_then(|number| number.parse::<u64>().ok());
        let reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        let found = reports.kept.iter().find(|(kept, _)| Some(*kept) == number);
        let (_, page) = found.ok_or((404, "this report is not kept any more"))?;
        let mut headers = vec![
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Security-Policy", "sandbox allow-scripts; frame-ancestors 'self'"),
        ];
        if parameter(url, "save").is_some() {
            headers.push(("Content-Disposition", "attachment; filename=\"foretell-report.html\""));
        }
        Ok(with_headers(Response::from_string(page.clone()), &headers))
    }

    fn progress(&self, lane: &str) -> Page {
        let line = self.desk.progress(lane).unwrap_or_else(|| "null".into());
        with_headers(Response::from_string(line), &JSON)
    }
}

const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];

/// The refusal of a question, as the document of a command that fails.
fn refused(refusal: &Refusal) -> Page {
    let status = match refusal {
        Refusal::Question(..) => 400,
        Refusal::Cancelled => 409,
        Refusal::Time(_) => 504,
        Refusal::Busy => 503,
        Refusal::Memory(_) | Refusal::Broken(_) => 500,
    };
    let text = serde_json::to_string(&refusal.document()).unwrap_or_default();
    with_headers(Response::from_string(text).with_status_code(status), &JSON)
}

/// The lane that a URL names.
fn lane(url: &str) -> Result<&str, Refused> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    let lane = parameter(url, "lane").filter(|lane| !lane.is_empty() && lane.len() <= LONGEST_LANE);
    lane.filter(|lane| lane.bytes().all(is_plain)).ok_or((400, "`lane` is a short name"))
}

/// The body of a request, which must state its length.
fn body(request: &mut Request) -> Result<String, Refused> {
    let length = request.body_length().ok_or((411, "the question has no length"))?;
    if length > LONGEST_QUESTION {
        return Err((413, "the question is too long"));
    }
    let mut bytes = Vec::new();
    let read = request.as_reader().take(length as u64).read_to_end(&mut bytes);
    read.map_err(|_| (400, "the question is cut off"))?;
    String::from_utf8(bytes).map_err(|_| (400, "the question is no text"))
}
