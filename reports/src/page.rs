//! The report as one self-contained HTML page: plots are inline SVG, styles are inline, and there
//! is no script. It follows the reader's light or dark mode.

use crate::compare::CheckDocument;
use crate::error::ReportError;
use crate::plots::Plot;
use crate::tables::{Alignment, Column, headline, kind_rows, worst_rows};

/// A part of a page.
#[derive(Clone, Debug)]
pub enum Section {
    /// Running text.
    Paragraph {
        /// The title above the text; may be empty.
        heading: String,
        /// Sentences.
        text: String,
    },
    /// Preformatted text, such as a plan.
    Listing {
        /// The title above the text.
        heading: String,
        /// Lines, kept as they are.
        text: String,
    },
    /// A plot.
    Figure {
        /// The title above the plot.
        heading: String,
        /// The plot.
        plot: Box<Plot>,
        /// How to read it.
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

/// Makes a page of sections below a title. Text is escaped. The same sections give the same page.
///
/// # Errors
/// [`ReportError::Draw`] if a plot cannot be drawn.
pub fn page(title: &str, sections: &[Section]) -> Result<String, ReportError> {
    let title = escaped(title);
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
    );
    for section in sections {
        html.push_str("<section>\n");
        match section {
            Section::Paragraph { heading, text } => {
                html.push_str(&format!("{}<p>{}</p>\n", heading_of(heading), escaped(text)));
            }
            Section::Listing { heading, text } => {
                html.push_str(&format!("{}<pre>{}</pre>\n", heading_of(heading), escaped(text)));
            }
            Section::Figure { heading, plot, caption } => html.push_str(&format!(
                "{}<figure>\n{}<figcaption>{}</figcaption>\n</figure>\n",
                heading_of(heading),
                plot.svg()?,
                escaped(caption)
            )),
            Section::Table { heading, columns, rows } => {
                html.push_str(&heading_of(heading));
                html.push_str(&table(columns, rows));
            }
        }
        html.push_str("</section>\n");
    }
    html.push_str("</main>\n</body>\n</html>\n");
    Ok(html)
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

/// Recolours the plots' background, text and grid in dark mode. plotters writes colours as
/// attributes, which styles override.
const STYLE: &str = "\
:root { color-scheme: light dark; --paper: #ffffff; --ink: #222222; --faint: #666666; --line: #e1e1e1; --panel: #f6f6f6; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e6e6e6; --faint: #a0a4a8; --line: #3a3d41; --panel: #202327; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
pre { background: var(--panel); padding: 12px 16px; overflow-x: auto; border-radius: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 600; }
.number { text-align: right; }
figure { margin: 0; overflow-x: auto; } figcaption { color: var(--faint); }
svg { max-width: 100%; height: auto; }
svg [fill='#FFFFFF'] { fill: var(--paper); }
svg text[fill='#FFFFFF'] { fill: #ffffff; }
svg text[fill='#222222'] { fill: var(--ink); } svg text[fill='#666666'] { fill: var(--faint); }
svg [stroke='#222222'] { stroke: var(--ink); } svg [stroke='#E1E1E1'] { stroke: var(--line); }
svg [stroke='#666666'] { stroke: var(--faint); }
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;
    use crate::{compare, plots::LossPoint};
    use foretell_units::{Bytes, Seconds};

    #[test]
    fn all_text_is_escaped_and_nothing_is_fetched() {
        let evil = "<script>alert('1 & 2')</script>";
        let plot = Plot::loss(evil, &[LossPoint { step: 1, loss: 2.0 }], &[]);
        let sections = [
            Section::Paragraph { heading: evil.into(), text: evil.into() },
            Section::Listing { heading: evil.into(), text: evil.into() },
            Section::Figure { heading: evil.into(), plot: Box::new(plot), caption: evil.into() },
            Section::Table {
                heading: evil.into(),
                columns: vec![(evil.into(), Alignment::Right)],
                rows: vec![vec![evil.into(), evil.into()]],
            },
        ];
        let html = page(evil, &sections).expect("a page");
        assert!(!html.contains("<script"));
        assert!(html.contains("&lt;script&gt;alert(&#39;1 &amp; 2&#39;)&lt;/script&gt;"));
        assert!(!html.contains("href") && !html.contains("src=") && !html.contains("url("));
        assert!(html.contains("<svg") && html.contains("prefers-color-scheme: dark"));
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
