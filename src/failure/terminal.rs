//! A failure in the form that a terminal shows: the message with its place, the line of the file
//! with a caret below the fault, and the hint.
//!
//! The first line has everything that a script needs: `error[CODE]: FILE:LINE:COLUMN: MESSAGE`.

use crate::escaping::escaped;
use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};
use foretell_units::diagnostic::{help, place};
use miette::Diagnostic;
use std::fmt::Write;

/// Whether the terminal shows colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colours {
    /// It does, and the user has not switched them off.
    On,
    /// It does not, or the output is not a terminal.
    Off,
}

/// Writes a failure as a terminal shows it, without a line feed at the end.
pub fn in_terminal(error: &dyn Diagnostic, colours: Colours) -> String {
    let strong = |text: &str, colour: u8| match colours {
        Colours::On => format!("\u{1b}[1;{colour}m{text}\u{1b}[0m"),
        Colours::Off => text.to_owned(),
    };
    let code = error.code().map_or_else(String::new, |code| format!("[{code}]"));
    let place = place(error).map_or_else(String::new, |place| format!("{place}: "));
    let mut text = strong(&format!("error{code}"), 31);
    let _ = write!(text, ": {}", escaped(&format!("{place}{error}")));
    if let Some(line) = line_of(error, colours) {
        let _ = write!(text, "\n{line}");
    }
    if let Some(help) = help(error) {
        let _ = write!(text, "\n{}: {}", strong("hint", 36), escaped(&help));
    }
    text
}

/// The line of the file with the fault, and a caret; `None` if the fault has no place in a text.
fn line_of(error: &dyn Diagnostic, colours: Colours) -> Option<String> {
    let label = error.labels()?.next()?;
    let end = label.offset() + label.len();
    // Read from the beginning of the text, so that the renderer counts its lines right.
    let contents = error.source_code()?.read_span(&(0, end).into(), 0, 1).ok()?;
    let source = std::str::from_utf8(contents.data()).ok()?;
    if source.is_empty() {
        return None;
    }
    let snippet = Snippet::source(source).annotation(AnnotationKind::Primary.span(label.offset()..end));
    let renderer = match colours {
        Colours::On => Renderer::styled(),
        Colours::Off => Renderer::plain(),
    };
    Some(renderer.render(&[Group::with_level(Level::ERROR).element(snippet)]))
}

#[cfg(test)]
mod tests {
    use super::{Colours, in_terminal};
    use crate::failure::{Fault, code};
    use foretell_topologies::Place;
    use std::path::Path;

    const TEXT: &str = "name: a\nnodes: 4\nnetwork: {kind: fattree}\n";

    fn fault(text: &str, place: Option<Place>) -> Fault {
        Fault::new(code::FILE_FORM, "unknown kind `fattree`").hint("write `fat-tree`").in_text(Path::new("a.yaml"), text, place)
    }

    #[test]
    fn a_fault_in_a_file_shows_the_line_with_a_caret() {
        let shown = in_terminal(&fault(TEXT, Some(Place { line: 3, column: 17 })), Colours::Off);
        let expected = "error[file::form]: a.yaml:3:17: unknown kind `fattree`\n  |\n3 | network: {kind: fattree}\n  |                 \
                        ^^^^^^^\nhint: write `fat-tree`";
        assert_eq!(shown, expected, "{shown}");
        let end = in_terminal(&fault(TEXT, Some(Place { line: 9, column: 1 })), Colours::Off);
        assert!(end.starts_with("error[file::form]: a.yaml:4:1: ") && end.contains("hint: "), "{end}");
    }

    #[test]
    fn a_fault_without_a_line_has_a_message_and_a_help() {
        let shown = in_terminal(&fault("", None), Colours::Off);
        assert_eq!(shown, "error[file::form]: a.yaml: unknown kind `fattree`\nhint: write `fat-tree`");
        let bare = in_terminal(&Fault::new(code::SYSTEM, "it\u{1b}[2J failed"), Colours::Off);
        assert_eq!(bare, "error[system::failed]: it\\u001b[2J failed");
    }

    #[test]
    fn only_colours_come_with_control_characters() {
        let text = "kind: \u{1b}[31mred\u{202e}\n";
        let shown = in_terminal(&fault(text, Some(Place { line: 1, column: 7 })), Colours::Off);
        assert!(!shown.contains('\u{1b}') && !shown.contains('\u{202e}'), "{shown:?}");
        let coloured = in_terminal(&fault(TEXT, Some(Place { line: 3, column: 17 })), Colours::On);
        assert!(coloured.contains("\u{1b}[1;31merror[file::form]"), "{coloured:?}");
    }
}
