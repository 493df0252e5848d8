//! `foretell serve`: a run's report, or a search's progress, in a browser, while it goes and after
//! it. The server
//! listens on the loopback interface only, answers those who know the address's token, and changes
//! nothing. It reads the run's folder, so the run may be another process.

use crate::binding::{self, Limits};
use crate::check::check_compiled;
use crate::failure::Failure;
use crate::inputs;
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::progress_of::last_step;
use crate::run_folder::{Predicted, RunFolder};
use crate::search_progress::ServedSearch;
use clap::Args;
use foretell_program::Compiled;
use foretell_reports::{Chart, Fact, LossPoint, Section, page};
use foretell_units::Seconds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use tiny_http::{Header, Method, Request, Response, Server};

/// Show a run's report or a search's progress in a browser, live while it goes
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  foretell serve runs/1\n  foretell serve search.jsonl")]
pub struct Arguments {
    /// The run's folder [default: the newest under runs/], or the file of `foretell plan
    /// --progress`
    #[arg(value_name = "RUN")]
    run: Option<PathBuf>,
    /// The port on 127.0.0.1 [default: a free one]
    #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
    port: u16,
}

/// The document of `serve`, printed before it answers.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ServeAnswer {
    /// The address, with the token without which nothing is shown.
    url: String,
    /// The run's folder, or the search's file.
    run: PathBuf,
}

/// Seconds between two looks at a run that goes on.
const REFRESH: u32 = 2;

/// Runs the command. It ends by a signal.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let run = match &arguments.run {
        Some(run) => run.clone(),
        None => newest(Path::new("runs"))?,
    };
    let shown =
        if run.is_file() { Served::Search(ServedSearch::open(&run)?) } else { Served::Run(Box::new(ServedRun::open(&run)?)) };
    let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), arguments.port);
    let refused = |error: &dyn std::fmt::Display| {
        Failure::Undone(format!("`{address}` cannot be listened on: {error}; hint: give another `--port`"))
    };
    let server = Server::http(address).map_err(|error| refused(&error))?;
    let bound = server.server_addr().to_ip().ok_or_else(|| refused(&"it has no port"))?;
    let token = token()?;
    let url = format!("http://{bound}/?token={token}");
    if json {
        output::json(&ServeAnswer { url, run })?;
    } else {
        output::line(&format!("{} is shown at {url}\nstop it with Ctrl-C", run.display()))?;
    }
    let door = Door { hosts: [format!("{bound}"), format!("localhost:{}", bound.port())], token };
    for request in server.incoming_requests() {
        let response = match door.admit(&request) {
            Err((status, why)) => plain(status, why),
            Ok(()) => shown.answer(),
        };
        // The reader may have gone.
        let _ = request.respond(response);
    }
    Ok(())
}

/// The run of the highest number in a folder.
fn newest(runs: &Path) -> Result<PathBuf, Failure> {
    let numbers = fs::read_dir(runs).into_iter().flatten().flatten();
    let newest = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok()).max();
    newest.map(|number| runs.join(number.to_string())).ok_or_else(|| {
        let hint = "name a run's folder, or start one with `foretell execute`";
        Failure::Input(format!("`{}` has no run; hint: {hint}", runs.display()))
    })
}

/// Random letters that no other process can guess.
fn token() -> Result<String, Failure> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| Failure::Undone(format!("the system gives no random bytes: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What a request must have.
struct Door {
    /// The names of this server. A page elsewhere that has its own name lead here has another.
    hosts: [String; 2],
    token: String,
}

impl Door {
    fn admit(&self, request: &Request) -> Result<(), (u16, &'static str)> {
        let host = request.headers().iter().find(|header| header.field.equiv("Host")).map(|header| header.value.as_str());
        if !host.is_some_and(|host| self.hosts.iter().any(|known| known == host)) {
            return Err((403, "the request is not for this server"));
        }
        if !matches!(request.method(), Method::Get | Method::Head) {
            return Err((405, "this server changes nothing: it answers GET"));
        }
        let (path, query) = request.url().split_once('?').unwrap_or((request.url(), ""));
        let given = query.split('&').find_map(|pair| pair.strip_prefix("token=")).unwrap_or_default();
        if !is_equal(given.as_bytes(), self.token.as_bytes()) {
            return Err((403, "use the address that `foretell serve` printed, with its token"));
        }
        if path == "/" { Ok(()) } else { Err((404, "there is one page: /")) }
    }
}

/// Compares without telling by its duration how much is equal.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |different, (a, b)| different | (a ^ b)) == 0
}

type Page = Response<std::io::Cursor<Vec<u8>>>;

fn plain(status: u16, text: &str) -> Page {
    with_headers(Response::from_string(text).with_status_code(status), &[("Content-Type", "text/plain; charset=utf-8")])
}

fn with_headers(mut response: Page, headers: &[(&str, &str)]) -> Page {
    const ALWAYS: [(&str, &str); 3] =
        [("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer"), ("X-Content-Type-Options", "nosniff")];
    for (name, value) in headers.iter().chain(&ALWAYS) {
        if let Ok(header) = Header::from_bytes(*name, *value) {
            response.add_header(header);
        }
    }
    response
}

/// What is shown.
enum Served {
    Run(Box<ServedRun>),
    Search(ServedSearch),
}

impl Served {
    /// The page, or why there is none. It looks again while the run or the search goes.
    fn answer(&self) -> Page {
        let page = match self {
            Self::Run(run) => run.page(),
            Self::Search(search) => search.page(REFRESH),
        };
        let refresh = REFRESH.to_string();
        let mut headers = vec![("Content-Type", "text/html; charset=utf-8")];
        match page {
            Ok((text, is_over)) => {
                if !is_over {
                    headers.push(("Refresh", &refresh));
                }
                with_headers(Response::from_string(text), &headers)
            }
            Err(failure) => plain(500, &failure.to_string()),
        }
    }
}

/// A run that is shown.
struct ServedRun {
    folder: RunFolder,
    loaded: LoadedPlan,
    compiled: Compiled,
    predicted: Predicted,
}

/// The fields of a line of `metrics.jsonl` or `evaluation.jsonl` that a chart needs.
#[derive(Deserialize)]
struct LossLine {
    step: u64,
    loss: Option<f64>,
}

impl ServedRun {
    fn open(run: &Path) -> Result<Self, Failure> {
        let folder = RunFolder::at(run);
        if !folder.file("predicted.json").is_file() {
            let hint = "give the folder of a run that `foretell run` or `foretell execute` made";
            return Err(Failure::Input(format!("`{}` is not a run's folder; hint: {hint}", run.display())));
        }
        let mut loaded = PlanFile::load(&folder.file("plan.yaml"))?;
        let predicted: Predicted = folder.read("predicted.json")?;
        loaded.model.name.clone_from(&predicted.name);
        let compiled = loaded.compile()?;
        Ok(Self { folder, loaded, compiled, predicted })
    }

    /// The page, and whether the run is over.
    fn page(&self) -> Result<(String, bool), Failure> {
        let is_finished = self.folder.file("measured.json").is_file();
        // Workers at their own pace have no step to compare; their losses are shown all the same.
        let text = if is_finished && self.compiled.pacing.is_none() { self.checked() } else { self.so_far() };
        Ok((text?, is_finished))
    }

    fn checked(&self) -> Result<String, Failure> {
        check_compiled(&self.folder, self.loaded.clone(), self.compiled.clone())?.page()
    }

    /// The page of a run that goes on.
    fn so_far(&self) -> Result<String, Failure> {
        let (prediction, topology) = (&self.predicted.prediction, &self.loaded.topology);
        let last = last_step(self.folder.path());
        let facts = match last {
            None => vec![Fact::new("steps", "0", "the ranks are starting")],
            Some(last) => vec![
                Fact::new("steps", (last.step + 1).to_string(), "made so far"),
                Fact::new("loss", format!("{:.4}", last.loss), "of the last step"),
                Fact::new("last step", Seconds::new(last.seconds).to_string(), format!("predicted {}", prediction.step_seconds)),
                Fact::new("samples/s", format!("{:.1}", last.samples_per_second), "of the last step"),
            ],
        };
        let chart = |heading: &str, chart: Chart, caption: &str| Section::Chart {
            heading: heading.into(),
            chart: Box::new(chart),
            caption: caption.into(),
        };
        let losses = [self.losses("metrics.jsonl"), self.losses("evaluation.jsonl")];
        let timeline = Chart::timeline(&self.compiled.training, &[&self.predicted.timeline]);
        let sections = [
            Section::Answer { facts, sentences: vec![format!("The page looks again each {REFRESH} seconds.")] },
            chart("Loss", Chart::loss(&losses[0], &losses[1]), "Loss of the training steps and of the evaluations so far."),
            binding::answer(&self.loaded.plan, prediction, topology, Limits::default(), None)?,
            chart("Timeline", timeline, "The predicted step. The measured one is added when the run has ended."),
            Section::Listing { heading: "Plan".into(), text: self.loaded.file.to_yaml()? },
        ];
        Ok(page(&format!("{}: a run in progress", self.loaded.model.name), &sections)?)
    }

    /// The losses so far. The last line may be half written.
    fn losses(&self, file: &str) -> Vec<LossPoint> {
        let text = inputs::read_run_file(&self.folder.file(file)).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<LossLine>(line).ok());
        lines.filter_map(|line| Some(LossPoint { step: line.step, loss: line.loss? })).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::is_equal;

    #[test]
    fn tokens_are_equal_as_a_whole_only() {
        assert!(is_equal(b"abc", b"abc"));
        for other in [&b"abd"[..], b"ab", b"abcd", b""] {
            assert!(!is_equal(b"abc", other));
        }
    }
}
