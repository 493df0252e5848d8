//! `foretell serve`: the planner's page, or a run's report or a search's progress in a browser,
//! during and after it. The server listens on the loopback interface, or at the address of
//! `--host`, and answers requests that have the address's token. It changes nothing: the planner's
//! answers come from confined child processes (`crate::ask`).

mod door;
mod planner;
mod run_page;

use crate::ask::{Desk, Limits};
use crate::failure::{Failure, code};
use crate::output;
use crate::search_progress::ServedSearch;
use clap::Args;
use door::{Door, Page, Refused, plain, with_headers};
use foretell_executor::StopSignals;
use planner::Planner;
use run_page::ServedRun;
use schemars::JsonSchema;
use serde::Serialize;
use std::fs;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tiny_http::{Method, Request, Response, Server};

/// Open the planner in a browser, or show a run's report or a search's progress, live
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  foretell serve                  the planner: which layouts fit, and how fast they are
  foretell serve runs/1           a run
  foretell serve runs             the newest run of a folder
  foretell serve search.jsonl     a search, from `foretell plan --progress search.jsonl`")]
pub struct Arguments {
    /// The run's folder, a folder of runs, or the file of `foretell plan --progress` [default: the
    /// planner]
    #[arg(value_name = "RUN")]
    run: Option<PathBuf>,
    /// The port [default: a free one]
    #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// Name or address of this machine at which other machines reach the page; `0.0.0.0` is all of
    /// its addresses. The connection is not encrypted: prefer `ssh -L`
    #[arg(long, value_name = "HOST", default_value = LOOPBACK)]
    host: String,
    #[command(flatten)]
    limits: Limits,
}

/// The document of `serve`, printed before it answers.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ServeAnswer {
    /// The address, including the token that every request needs.
    url: String,
    /// The run's folder, or the search's file; null for the planner.
    run: Option<PathBuf>,
}

/// The host name that only this machine can reach.
const LOOPBACK: &str = "127.0.0.1";

/// Seconds between two reloads of the page of an active run.
const REFRESH: u32 = 2;

/// Time between two checks of whether a signal asked to stop.
const SIGNAL_CHECK: Duration = Duration::from_millis(200);

/// The longest that the server waits for its last replies.
const LAST_REPLIES: Duration = Duration::from_secs(1);

/// The most requests that are answered at once. A page has six connections.
const MOST_REQUESTS: usize = 32;

/// The warning for a server that other machines can reach.
const WARNING: &str = "warning: other machines can reach this server, and its connections are not encrypted: who reads the network \
                       reads the token, the questions and the answers. Whoever has the token uses this machine's processors";

impl Arguments {
    /// The address to listen on.
    fn address(&self) -> Result<SocketAddr, Failure> {
        let host = self.host.trim_matches(['[', ']']);
        let found = (host, self.port).to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
        found.ok_or_else(|| {
            let failure = Failure::input(code::OPTION_VALUE, format!("`--host`: `{}` has no address", self.host));
            failure.hint("give a name or an address of this machine, or forward a port with `ssh -L`")
        })
    }
}

/// Runs the command until a signal asks to stop. `line` is clap's description of the command line.
pub fn run(arguments: &Arguments, line: clap::Command, json: bool) -> Result<(), Failure> {
    let run = arguments.run.as_deref().map(newest).transpose()?;
    let shown = match &run {
        None => Served::Planner(Box::new(Planner::new(Desk::new(line, arguments.limits)?)?)),
        Some(run) if run.is_file() => Served::Search(ServedSearch::open(run)?),
        Some(run) => Served::Run(Box::new(ServedRun::open(run)?)),
    };
    let address = arguments.address()?;
    let refused = |error: &dyn std::fmt::Display| {
        Failure::undone(code::PORT, format!("`{address}` cannot be listened on: {error}"))
            .hint("give another `--port`, or a `--host` of this machine")
    };
    let server = Server::http(address).map_err(|error| refused(&error))?;
    let bound = server.server_addr().to_ip().ok_or_else(|| refused(&"it has no port"))?;
    let door = Door::new(bound, &arguments.host)?;
    let url = door.url();
    if !bound.ip().is_loopback() {
        output::message(WARNING);
    }
    if json {
        output::json(&ServeAnswer { url, run })?;
    } else {
        let what = run.map_or_else(|| "the planner".to_owned(), |run| run.display().to_string());
        output::line(&format!("{what} is shown at {url}\nstop it with Ctrl-C"))?;
    }
    answer_all(&server, Arc::new((door, shown)), &StopSignals::catch()?)
}

/// Answers requests, each in a thread, until a signal asks to stop.
fn answer_all(server: &Server, site: Arc<(Door, Served)>, signals: &StopSignals) -> Result<(), Failure> {
    let open = Arc::new(AtomicUsize::new(0));
    while signals.received().is_none() {
        let request = server.recv_timeout(SIGNAL_CHECK);
        let request = request.map_err(|error| Failure::undone(code::SYSTEM, format!("requests cannot be received: {error}")))?;
        let Some(request) = request else { continue };
        if open.fetch_add(1, Ordering::Relaxed) >= MOST_REQUESTS {
            open.fetch_sub(1, Ordering::Relaxed);
            // Responding reads the rest of the body, which may never come.
            std::thread::spawn(move || request.respond(plain(503, "too many requests at once")));
            continue;
        }
        let (site, open) = (Arc::clone(&site), Arc::clone(&open));
        std::thread::spawn(move || {
            let mut request = request;
            let answer = site.1.answer(&site.0, &mut request);
            let is_refused = answer.is_err();
            // Responding reads the rest of the body, so a refused request must not occupy a slot
            // meanwhile.
            if is_refused {
                open.fetch_sub(1, Ordering::Relaxed);
            }
            // The reader may have gone.
            let _ = request.respond(answer.unwrap_or_else(|(status, why)| plain(status, why)));
            if !is_refused {
                open.fetch_sub(1, Ordering::Relaxed);
            }
        });
    }
    if let Served::Planner(planner) = &site.1 {
        planner.close();
    }
    // Wait for the replies to requests that were cancelled.
    let end = Instant::now() + LAST_REPLIES;
    while open.load(Ordering::Relaxed) > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The run with the highest number in a folder of runs; returns other paths unchanged.
fn newest(path: &Path) -> Result<PathBuf, Failure> {
    if !path.is_dir() || path.join("predicted.json").is_file() {
        return Ok(path.to_owned());
    }
    let numbers = fs::read_dir(path).into_iter().flatten().flatten();
    let newest = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok()).max();
    newest.map(|number| path.join(number.to_string())).ok_or_else(|| {
        let hint = "name a run's folder, or start one with `foretell execute`";
        Failure::input(code::RUN_MISSING, format!("`{}` has no run", path.display())).hint(hint)
    })
}

/// What the server shows.
enum Served {
    Planner(Box<Planner>),
    Run(Box<ServedRun>),
    Search(ServedSearch),
}

impl Served {
    fn answer(&self, door: &Door, request: &mut Request) -> Result<Page, Refused> {
        door.admit(request)?;
        match self {
            Self::Planner(planner) => planner.answer(door, request),
            Self::Run(run) => single(request, || run.page()),
            Self::Search(search) => single(request, || search.page(REFRESH)),
        }
    }
}

/// The single page of a run or a search, or why there is none. It reloads while the run or the
/// search is active.
fn single(request: &Request, page: impl FnOnce() -> Result<(String, bool), Failure>) -> Result<Page, Refused> {
    if !matches!(request.method(), Method::Get | Method::Head) {
        return Err((405, "this server changes nothing: it answers GET"));
    }
    if request.url().split('?').next() != Some("/") {
        return Err((404, "there is one page: /"));
    }
    let refresh = REFRESH.to_string();
    let mut headers = vec![("Content-Type", "text/html; charset=utf-8")];
    Ok(match page() {
        Ok((text, is_over)) => {
            if !is_over {
                headers.push(("Refresh", &refresh));
            }
            with_headers(Response::from_string(text), &headers)
        }
        Err(failure) => plain(500, &failure.one_line()),
    })
}
