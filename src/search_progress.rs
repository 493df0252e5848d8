//! A search's progress in a file that grows while it goes: what `foretell plan --progress` writes
//! and `foretell serve` shows. The first line says what is searched, the next ones how far it is.

use crate::failure::{Failure, code};
use crate::host::{self, File};
use crate::inputs;
use foretell_planner::Progress;
use foretell_reports::{Chart, Fact, GapPoint, Section, page};
use foretell_units::{SchemaVersion, Seconds};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Seconds between two lines, so that a long search writes a short file.
const BETWEEN_LINES: f64 = 0.2;

/// The most moments that a chart shows.
const MOST_MOMENTS: usize = 400;

/// A line of a search's progress.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SearchLine {
    /// The first line: what is searched.
    Started {
        /// The version of the file's form.
        #[serde(default)]
        schema_version: SchemaVersion,
        /// The model.
        model: String,
        /// The topology.
        topology: String,
        /// Its devices.
        devices: usize,
    },
    /// A moment of the search.
    Progress(SearchMoment),
    /// The last line, if the search was not interrupted.
    Ended(SearchMoment),
}

/// A moment of a search. Its values are seconds of a step, or amounts of the objective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SearchMoment {
    /// Seconds since the search began.
    seconds: f64,
    /// Value of the best layout so far.
    best: f64,
    /// Lower bound on the value of every layout.
    bound: f64,
    /// Layouts that were simulated.
    simulated: usize,
}

impl SearchMoment {
    /// The moment `seconds` after the search began.
    pub fn new(seconds: f64, progress: Progress) -> Self {
        Self { seconds, best: progress.best, bound: progress.bound, simulated: progress.simulated }
    }

    /// The moment of a chart.
    pub fn point(self) -> GapPoint {
        GapPoint { seconds: self.seconds, best: self.best, bound: self.bound }
    }

    /// By how many per cent the best layout found may exceed the optimum. Infinite without a bound.
    pub fn gap(self) -> f64 {
        if self.bound > 0.0 { (self.best / self.bound - 1.0) * 100.0 } else { f64::INFINITY }
    }
}

/// Writes a search's progress.
#[derive(Debug)]
pub struct ProgressFile {
    path: PathBuf,
    file: File,
    last: Option<SearchMoment>,
    /// When the last line was written.
    written: f64,
    /// The first write error. It ends the command when the search is over.
    failure: Option<Failure>,
}

impl ProgressFile {
    /// Creates the file with its first line.
    pub fn create(path: &Path, model: &str, topology: &str, devices: usize) -> Result<Self, Failure> {
        let file = host::create(path).map_err(|error| unwritable(path, &error))?;
        let mut this = Self { path: path.into(), file, last: None, written: f64::NEG_INFINITY, failure: None };
        let started =
            SearchLine::Started { schema_version: SchemaVersion, model: model.into(), topology: topology.into(), devices };
        this.line(&started);
        this.failure.take().map_or(Ok(this), Err)
    }

    /// Adds a moment, unless the last line is too recent.
    pub fn add(&mut self, moment: SearchMoment) {
        self.last = Some(moment);
        if moment.seconds - self.written >= BETWEEN_LINES {
            self.written = moment.seconds;
            self.line(&SearchLine::Progress(moment));
        }
    }

    /// Writes the last line, `seconds` after the search began.
    pub fn finish(mut self, seconds: f64) -> Result<(), Failure> {
        if let Some(last) = self.last {
            self.line(&SearchLine::Ended(SearchMoment { seconds, ..last }));
        }
        self.failure.map_or(Ok(()), Err)
    }

    fn line(&mut self, line: &SearchLine) {
        if self.failure.is_some() {
            return;
        }
        // Before the first layout the value is infinite, which becomes null in JSON.
        let text = serde_json::to_string(line).map_err(std::io::Error::other);
        // One write per line, so that a reader sees complete lines.
        if let Err(error) = text.and_then(|text| self.file.write_all(format!("{text}\n").as_bytes())) {
            self.failure = Some(unwritable(&self.path, &error));
        }
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::undone(code::FILE_UNWRITABLE, format!("`{}` cannot be written: {error}", path.display()))
        .hint("give `--progress` a file in a folder that exists")
}

/// A search whose progress is shown.
pub struct ServedSearch {
    path: PathBuf,
}

impl ServedSearch {
    /// The search whose progress is in a file.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let this = Self { path: path.into() };
        this.read()?;
        Ok(this)
    }

    /// The file's lines. The last one may be incomplete.
    fn read(&self) -> Result<(SearchLine, Vec<SearchLine>), Failure> {
        let text = inputs::read_run_file(&self.path)?;
        let mut lines = text.lines().filter_map(|line| serde_json::from_str::<SearchLine>(line).ok());
        match lines.next() {
            Some(first @ SearchLine::Started { .. }) => Ok((first, lines.collect())),
            _ => {
                let hint = "give a file of `foretell plan --progress FILE`, or a run's folder";
                Err(Failure::input(code::RUN_MISSING, format!("`{}` is not the progress of a search", self.path.display()))
                    .hint(hint))
            }
        }
    }

    /// The page, and whether the search is over.
    pub fn page(&self, refresh: u32) -> Result<(String, bool), Failure> {
        let (first, lines) = self.read()?;
        let SearchLine::Started { model, topology, devices, .. } = first else { return Ok((String::new(), true)) };
        let moments: Vec<SearchMoment> = lines
            .iter()
            .filter_map(|line| match line {
                SearchLine::Progress(moment) | SearchLine::Ended(moment) => Some(*moment),
                SearchLine::Started { .. } => None,
            })
            .collect();
        let is_over = matches!(lines.last(), Some(SearchLine::Ended(_)));
        let facts = match moments.last() {
            None => vec![Fact::new("layouts", "0", "no layout is simulated yet")],
            Some(last) => vec![
                Fact::new("best step", Seconds::new(last.best).to_string(), "of the best layout so far"),
                Fact::new("bound", Seconds::new(last.bound).to_string(), "no layout of the space is faster"),
                Fact::new("gap", format!("{:.1} %", last.gap()), "how far the best layout may be above the best of all"),
                Fact::new("layouts", last.simulated.to_string(), format!("simulated in {:.1} s", last.seconds)),
            ],
        };
        let sentence = match is_over {
            true => "The search is over.".to_string(),
            false => format!("The search goes on. The page looks again each {refresh} seconds."),
        };
        let every = moments.len().div_ceil(MOST_MOMENTS).max(1);
        let mut points: Vec<GapPoint> = moments.iter().step_by(every).map(|moment| moment.point()).collect();
        points.extend(moments.last().map(|last| last.point()));
        let sections = [
            Section::Answer { facts, sentences: vec![sentence] },
            Section::Chart {
                heading: "Search".into(),
                chart: Box::new(Chart::gap(&points)),
                caption: "The best layout so far, and the time below which no layout of the space can be.".into(),
            },
        ];
        let title = format!("{model} on {topology} ({devices} devices): the search");
        Ok((page(&title, &sections)?, is_over))
    }
}

#[cfg(test)]
mod tests {
    use super::{ProgressFile, SearchMoment, ServedSearch};

    fn moment(seconds: f64) -> SearchMoment {
        SearchMoment { seconds, best: 0.2, bound: 0.16, simulated: 3 }
    }

    #[test]
    fn a_page_shows_the_progress_while_a_search_goes_and_after_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("search.jsonl");
        let mut file = ProgressFile::create(&path, "gpt", "dgx", 8).expect("it is written");
        let served = ServedSearch::open(&path).expect("a search");
        let (text, is_over) = served.page(2).expect("a page");
        assert!(text.contains("no layout is simulated yet") && !is_over);
        // Two moments at nearly the same time are one line.
        [0.5, 0.51, 1.0].into_iter().for_each(|seconds| file.add(moment(seconds)));
        let lines = std::fs::read_to_string(&path).expect("it is there");
        assert_eq!(lines.lines().count(), 3, "{lines}");
        let (text, is_over) = served.page(2).expect("a page");
        assert!(text.contains("25.0 %") && text.contains("goes on") && !is_over);
        file.finish(1.5).expect("it is written");
        let (text, is_over) = served.page(2).expect("a page");
        assert!(text.contains("The search is over.") && text.contains("1.5 s") && is_over);
    }

    #[test]
    fn another_file_is_not_the_progress_of_a_search() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plan.yaml");
        std::fs::write(&path, "model: gpt\n").expect("it is written");
        let error = ServedSearch::open(&path).err().expect("another file").one_line();
        assert!(error.contains("is not the progress of a search; hint: "), "{error}");
        let missing = folder.path().join("no/such.jsonl");
        assert!(ProgressFile::create(&missing, "gpt", "dgx", 8).expect_err("no folder").one_line().contains("hint: "));
    }
}
