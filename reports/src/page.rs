//! The report as one self-contained HTML page. Text, figures and tables need no script; a script
//! draws the charts with uPlot, from a JSON document in the page. A content policy in the page
//! forbids loading anything and running any other script. The page follows the reader's light or
//! dark mode.

mod charts;

use crate::check_document::CheckDocument;
use crate::error::ReportError;
use crate::tables::{Alignment, Column, headline, kind_rows, worst_rows};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
pub use charts::{Chart, GapPoint, LayoutPoint};
use sha2::{Digest, Sha256};

/// uPlot; its source and licence are in `assets/README.md`.
const LIBRARY: &str = include_str!("page/assets/uplot.min.js");
const SCRIPT: &str = include_str!("page/assets/page.js");
const STYLES: [&str; 2] = [include_str!("page/assets/uplot.min.css"), include_str!("page/assets/page.css")];

/// A part of a page.
#[derive(Clone, Debug)]
pub enum Section {
    /// Running text.
    Paragraph {
        /// The title above the text; may be empty.
        heading: String,
        /// Sentences; line breaks are kept.
        text: String,
    },
    /// Preformatted text, such as a plan.
    Listing {
        /// The title above the text.
        heading: String,
        /// Lines, kept as they are.
        text: String,
    },
    /// The most important figures.
    Answer {
        /// The figures.
        facts: Vec<Fact>,
        /// Sentences below the figures: what limits the step, and what to change.
        sentences: Vec<String>,
    },
    /// A chart.
    Chart {
        /// The title above the chart.
        heading: String,
        /// The chart.
        chart: Box<Chart>,
        /// How to read the chart.
        caption: String,
    },
    /// A table.
    Table {
        /// The title above the table.
        heading: String,
        /// Each column's title and alignment.
        columns: Vec<(String, Alignment)>,
        /// The cells, row by row.
        rows: Vec<Vec<String>>,
    },
}

/// A figure of [`Section::Answer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// The figure's name.
    pub name: String,
    /// Its value with its unit.
    pub value: String,
    /// The interval, the limit, or another value to compare it with.
    pub note: String,
    /// Per cent of a limit, drawn as a bar.
    pub percent: Option<u32>,
}

impl Fact {
    /// A figure without a limit.
    pub fn new(name: &str, value: impl Into<String>, note: impl Into<String>) -> Self {
        Self { name: name.to_owned(), value: value.into(), note: note.into(), percent: None }
    }
}

impl Section {
    /// The sections of a check: the outcome, the step by kind of time, and the largest differences.
    pub fn check(document: &CheckDocument) -> Vec<Section> {
        let table = |heading: String, (columns, rows): (Vec<Column<'_>>, Vec<Vec<String>>)| {
            let columns = columns.iter().map(|column| (column.title.to_owned(), column.alignment)).collect();
            Section::Table { heading, columns, rows }
        };
        vec![
            Section::Paragraph { heading: "Predicted against measured".to_owned(), text: format!("{}.", headline(document)) },
            table(format!("Where {}'s step went", document.comparison.rank), kind_rows(&document.comparison)),
            Section::Paragraph { heading: String::new(), text: KINDS.to_owned() },
            table("Largest differences, mean over the ranks of a stage".to_owned(), worst_rows(&document.comparison)),
        ]
    }
}

const KINDS: &str = "Compute is the time in which kernels run. Communication and load count only while kernels wait for them. A bubble \
                     is time spent waiting for another rank. Host is time that none of these explains. The shares add up to the error.";

/// Makes a page of a title and sections. Text is escaped. The same sections make the same page.
///
/// # Errors
/// [`ReportError::Document`] if a chart cannot be written as JSON.
pub fn page(title: &str, sections: &[Section]) -> Result<String, ReportError> {
    let title = escaped(title);
    let mut body = String::new();
    let mut charts: Vec<&Chart> = Vec::new();
    for section in sections {
        body.push_str("<section>\n");
        match section {
            Section::Paragraph { heading, text } => {
                let lines = escaped(text).replace('\n', "<br>");
                body.push_str(&format!("{}<p>{lines}</p>\n", heading_of(heading)));
            }
            Section::Listing { heading, text } => {
                body.push_str(&format!("{}<pre tabindex=\"0\">{}</pre>\n", heading_of(heading), escaped(text)));
            }
            Section::Answer { facts, sentences } => body.push_str(&answer(facts, sentences)),
            Section::Chart { heading, chart, caption } => {
                let (number, caption) = (charts.len(), escaped(caption));
                charts.push(chart);
                body.push_str(&heading_of(heading));
                body.push_str(&format!(
                    "<figure>\n<figcaption>{caption}</figcaption>\n<div class=\"chart\" data-chart=\"{number}\">\
                     <noscript>The chart needs JavaScript.</noscript></div>\n</figure>\n"
                ));
            }
            Section::Table { heading, columns, rows } => {
                body.push_str(&heading_of(heading));
                body.push_str(&table(columns, rows));
            }
        }
        body.push_str("</section>\n");
    }
    let data = data(&charts)?;
    let policy = format!(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}' 'sha256-{}'; base-uri 'none'; form-action 'none'",
        hash(LIBRARY),
        hash(SCRIPT)
    );
    let styles = STYLES.concat();
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{styles}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}</main>\n\
         <script type=\"application/json\" id=\"charts\">{data}</script>\n\
         <script>{LIBRARY}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    ))
}

/// The charts as JSON that can be part of a page: no text in it ends the element or starts a
/// comment.
fn data(charts: &[&Chart]) -> Result<String, ReportError> {
    Ok(serde_json::to_string(charts)?.replace('<', "\\u003c"))
}

/// A script's hash in the form of content policies.
fn hash(script: &str) -> String {
    STANDARD.encode(Sha256::digest(script.as_bytes()))
}

fn answer(facts: &[Fact], sentences: &[String]) -> String {
    let fact = |fact: &Fact| {
        let bar = fact.percent.map_or_else(String::new, |percent| {
            let state = if percent > 100 { " class=\"over\"" } else { "" };
            format!("<meter{state} min=\"0\" max=\"100\" high=\"90\" optimum=\"0\" value=\"{percent}\">{percent} %</meter>")
        });
        let (name, value, note) = (escaped(&fact.name), escaped(&fact.value), escaped(&fact.note));
        format!("<div><dt>{name}</dt><dd><strong>{value}</strong>{bar}<span>{note}</span></dd></div>\n")
    };
    let facts: String = facts.iter().map(fact).collect();
    let sentences: String = sentences.iter().map(|sentence| format!("<li>{}</li>\n", escaped(sentence))).collect();
    let list = if sentences.is_empty() { String::new() } else { format!("<ul class=\"advice\">\n{sentences}</ul>\n") };
    format!("<dl class=\"facts\">\n{facts}</dl>\n{list}")
}

fn heading_of(heading: &str) -> String {
    if heading.is_empty() { String::new() } else { format!("<h2>{}</h2>\n", escaped(heading)) }
}

fn table(columns: &[(String, Alignment)], rows: &[Vec<String>]) -> String {
    let class = |alignment: Alignment| if alignment == Alignment::Right { " class=\"number\"" } else { "" };
    let line = |tag: &str, cells: &mut dyn Iterator<Item = (&str, Alignment)>| {
        let cells: String =
            cells.map(|(text, alignment)| format!("<{tag}{}>{}</{tag}>", class(alignment), escaped(text))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let head = line("th", &mut columns.iter().map(|(title, alignment)| (title.as_str(), *alignment)));
    let alignment = |index: usize| columns.get(index).map_or(Alignment::Left, |column| column.1);
    let body: String = rows
        .iter()
        .map(|row| line("td", &mut row.iter().enumerate().map(|(index, cell)| (cell.as_str(), alignment(index)))))
        .collect();
    format!("<div class=\"wide\"><table>\n<thead>\n{head}</thead>\n<tbody>\n{body}</tbody>\n</table></div>\n")
}

/// Escapes text for HTML.
fn escaped(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => result.push_str("&amp;"),
            '<' => result.push_str("&lt;"),
            '>' => result.push_str("&gt;"),
            '"' => result.push_str("&quot;"),
            '\'' => result.push_str("&#39;"),
            other => result.push(other),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare;
    use crate::sample;
    use foretell_units::{Bytes, Seconds};

    #[test]
    fn all_text_is_escaped_and_nothing_is_fetched() {
        let evil = "</script><script>alert('1 & 2')</script><!--";
        let point = LayoutPoint {
            name: evil.into(),
            plan: evil.into(),
            step_seconds: 1.0,
            memory_bytes: 1,
            facts: vec![(evil.into(), evil.into())],
            is_on_front: true,
        };
        let sections = [
            Section::Paragraph { heading: evil.into(), text: format!("{evil}\n{evil}") },
            Section::Listing { heading: evil.into(), text: evil.into() },
            Section::Answer { facts: vec![Fact::new(evil, evil, evil)], sentences: vec![evil.into()] },
            Section::Chart { heading: evil.into(), chart: Box::new(Chart::layouts(vec![point])), caption: evil.into() },
            Section::Table {
                heading: evil.into(),
                columns: vec![(evil.into(), Alignment::Right)],
                rows: vec![vec![evil.into(), evil.into()]],
            },
        ];
        let html = page(evil, &sections).expect("a page");
        assert!(!html.contains("<script>alert"));
        // The document, uPlot and the page's own script.
        assert_eq!((html.matches("<script").count(), html.matches("</script").count()), (3, 3));
        assert!(html.contains("&lt;script&gt;alert(&#39;1 &amp; 2&#39;)&lt;/script&gt;"));
        assert_eq!(html.matches("&lt;!--<br>&lt;/script&gt;").count(), 1, "a line break");
        assert!(!html.contains(" href=") && !html.contains(" src=") && !html.contains("url(") && !html.contains("@import"));
        let start = html.find("id=\"charts\">").expect("the document") + "id=\"charts\">".len();
        let document = html[start..].split("</script>").next().unwrap_or_default();
        let document: serde_json::Value = serde_json::from_str(document).expect("valid JSON");
        assert_eq!(document[0]["points"][0]["name"], evil);
    }

    /// The page after its scripts ran in headless Chromium, and what they reported; `None` where
    /// there is no Chromium.
    fn in_browser(html: &str) -> Option<(String, String)> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("page.html");
        std::fs::write(&file, html).expect("the page is written");
        let profile = format!("--user-data-dir={}", folder.path().join("profile").display());
        let run = std::process::Command::new("chromium")
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"])
            .args(["--window-size=390,800", "--virtual-time-budget=2000", "--dump-dom", &profile])
            .arg(&file)
            .output();
        let run = run.ok()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let console = text(&run.stderr).lines().filter(|line| line.contains("CONSOLE")).collect::<Vec<_>>().join("\n");
        Some((text(&run.stdout), console))
    }

    #[test]
    fn a_browser_draws_every_chart_and_runs_no_other_script() {
        let (program, predicted, measured) = sample::pipeline();
        let point = |step_seconds, memory_bytes| LayoutPoint {
            name: "<img src=x onerror=\"document.title='broken'\">".into(),
            plan: "</pre><script>document.title = 'broken'</script>".into(),
            step_seconds,
            memory_bytes,
            facts: Vec::new(),
            is_on_front: false,
        };
        let losses = [crate::LossPoint { step: 1, loss: 2.0 }, crate::LossPoint { step: 2, loss: 1.0 }];
        let charts = [
            Chart::timeline(&program, &[&predicted, &measured]),
            Chart::memory(&program, &predicted, Some(Bytes::new(16 << 20))),
            Chart::loss(&losses, &losses[1..]),
            Chart::gap(&[GapPoint { seconds: 0.0, best: 2.0, bound: 1.0 }, GapPoint { seconds: 1.0, best: 1.5, bound: 1.4 }]),
            Chart::layouts(vec![point(1.0, 9), point(2.0, 4)]),
        ];
        let count = charts.len();
        let section =
            |chart| Section::Chart { heading: "chart".into(), chart: Box::new(chart), caption: "how to read it".into() };
        let html = page("whole", &charts.map(section)).expect("a page");
        // A script of another origin than the page's own must not run.
        let html = html.replace("</body>", "<script>document.title = 'broken'</script></body>");
        let Some((dom, console)) = in_browser(&html) else {
            eprintln!("skipped: there is no Chromium");
            return;
        };
        assert_eq!(dom.matches("<canvas").count(), count, "{console}");
        assert!(dom.contains("<title>whole</title>"), "a foreign script ran");
        assert_eq!(console.matches("CONSOLE").count(), 1, "only the refusal of the foreign script: {console}");
        assert!(console.contains("Content Security Policy"), "{console}");
    }

    #[test]
    fn scripts_and_styles_can_stand_in_a_page() {
        for script in [LIBRARY, SCRIPT] {
            assert!(!script.contains("</script") && !script.contains("<!--"));
        }
        assert!(STYLES.iter().all(|style| !style.contains("</style")));
    }

    #[test]
    fn a_page_of_a_check_shows_the_causes() {
        let (program, predicted, measured) = sample::pipeline();
        let comparison = compare(&program, &predicted, &measured);
        let document = CheckDocument::new(comparison, Seconds::ZERO, Seconds::new(1.0), Bytes::new(1), None);
        let html = page("check", &Section::check(&document)).expect("a page");
        assert!(html.contains("<td>bubble</td>") && html.contains("kernel slower than its calibration"));
    }
}
