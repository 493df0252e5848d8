//! Rules for text: how wide a comment may be, how long a test's name, and which paths, names and
//! links a document may have.

use std::path::Path;

/// Comments and documentation in source files end by this column.
pub const COMMENT_COLUMNS: usize = 100;

/// A test's name has at most this many characters.
pub const TEST_NAME_LENGTH: usize = 70;

/// Lines (from 1) of `source` that are comments wider than [`COMMENT_COLUMNS`]. A line that holds a
/// link may be wider, since a link cannot be broken; so may code in an example and a row of a
/// table.
#[must_use]
pub fn wide_comments(source: &str) -> Vec<usize> {
    let mut in_example = false;
    let mut wide = Vec::new();
    for (number, line) in numbered(source) {
        let text = line.trim_start();
        let comment = ["//", "# ", "* "].iter().any(|start| text.starts_with(start));
        let content = text.trim_start_matches(['/', '!', '#', '*', ' ']);
        if comment && content.starts_with("```") {
            in_example = !in_example;
        }
        let exempt = !comment || in_example || content.starts_with('|') || line.contains("://");
        if !exempt && line.chars().count() > COMMENT_COLUMNS {
            wide.push(number);
        }
    }
    wide
}

/// Names of tests in Rust source that are longer than [`TEST_NAME_LENGTH`].
#[must_use]
pub fn long_test_names(source: &str) -> Vec<String> {
    let mut after_attribute = false;
    let mut long = Vec::new();
    for line in source.lines().map(str::trim_start) {
        if line.starts_with("#[test]") {
            after_attribute = true;
        } else if let Some(rest) = line.strip_prefix("fn ").filter(|_| after_attribute) {
            let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            after_attribute = false;
            if name.len() > TEST_NAME_LENGTH {
                long.push(name);
            }
        }
    }
    long
}

/// What a document cites in backticks and the tree does not have: paths that end no path of `tree`
/// (all files and folders, from the root), and snake-case names that stand in no source (`sources`
/// is their joined text).
#[must_use]
pub fn dangling_citations(document: &str, tree: &[String], sources: &str) -> Vec<String> {
    let exists = |cited: &str| {
        let cited = cited.trim_end_matches('/');
        tree.iter().any(|path| path.strip_suffix(cited).is_some_and(|rest| rest.is_empty() || rest.ends_with('/')))
    };
    let mut dangling = Vec::new();
    for (number, line) in numbered(document) {
        for cited in line.split('`').skip(1).step_by(2) {
            let missing = if is_path(cited) { !exists(cited) } else { is_name(cited) && !has_word(sources, cited) };
            if missing {
                dangling.push(format!("line {number}: `{cited}`"));
            }
        }
    }
    dangling
}

/// The citations "`name` in `file`" of a document whose file does not have the last part of the
/// name. `read` returns a file's text.
#[must_use]
pub fn misplaced_names(document: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut misplaced = Vec::new();
    for (number, line) in numbered(document) {
        let parts: Vec<&str> = line.split('`').collect();
        for triple in parts.windows(3).skip(1).step_by(2) {
            let [name, between, file] = [triple[0], triple[1], triple[2]];
            let word = name.rsplit("::").next().unwrap_or(name);
            if between == " in " && is_path(file) && read(file).is_some_and(|text| !has_word(&text, word)) {
                misplaced.push(format!("line {number}: `{name}` is not in `{file}`"));
            }
        }
    }
    misplaced
}

/// Relative links of a Markdown document in `folder` that lead to no file.
#[must_use]
pub fn broken_links(document: &str, folder: &Path) -> Vec<String> {
    let mut broken = Vec::new();
    for (number, line) in numbered(document) {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap_or_default();
            if !file.is_empty() && !target.contains("://") && !folder.join(file).exists() {
                broken.push(format!("line {number}: {target}"));
            }
        }
    }
    broken
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

/// A path of the tree: it has a slash or a source file's ending, and no blanks, placeholders or
/// wildcards. Hidden folders are not searched, so a path such as `.ci/run` is left out.
fn is_path(cited: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let ending = [".rs", ".md", ".yaml", ".py", ".sh", ".cu", ".toml"].iter().any(|end| cited.ends_with(end));
    let placeholder = cited.chars().any(|c| c.is_ascii_uppercase()) && !ending;
    cited.chars().all(plain)
        && !placeholder
        && !cited.starts_with('/')
        && !cited.starts_with('.')
        && !cited.contains("NAME")
        && (cited.contains('/') || ending)
}

/// A function's or test's name: snake case with at least two underscores.
fn is_name(cited: &str) -> bool {
    cited.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_') && cited.matches('_').count() >= 2
}

/// The lines of a source file (from 1) whose text has a hint inside a message. Tests may have them.
pub fn hints_in_messages(source: &str) -> Vec<usize> {
    let code = numbered(source).take_while(|(_, line)| !line.trim_start().starts_with("#[cfg(test)]"));
    code.filter(|(_, line)| line.contains("; hint: ")).map(|(number, _)| number).collect()
}

pub(crate) fn has_word(text: &str, word: &str) -> bool {
    let edge = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (text.get(..at).unwrap_or(""), text.get(at + word.len()..).unwrap_or(""));
        edge(before.chars().next_back()) && edge(after.chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_inside_a_message_is_found_outside_of_tests() {
        let source = "format!(\"no; hint: yes\")\nhint: String,\n#[cfg(test)]\nmod tests { \"no; hint: yes\" }";
        assert_eq!(hints_in_messages(source), [1]);
    }

    #[test]
    fn a_comment_of_101_columns_is_too_wide() {
        let line = format!("// {}", "x".repeat(98));
        assert_eq!(wide_comments(&format!("fn a() {{}}\n{line}\n")), [2]);
        assert_eq!(wide_comments(&line[..100]), [] as [usize; 0]);
    }

    #[test]
    fn a_link_to_no_file_is_broken() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let document = "[a](src/text.rs), [b](src/text.rs#part), [c](none.md), [d](https://example.org)";
        assert_eq!(broken_links(document, folder), ["line 1: none.md"]);
    }

    #[test]
    fn a_name_that_its_cited_file_does_not_have_is_misplaced() {
        let document = "`Type::here` in `a.rs`, `there` in `a.rs`; `x_y` beside `a.rs`, `there` in `b.rs`";
        let read = |file: &str| (file == "a.rs").then(|| "fn here() {}".to_owned());
        assert_eq!(misplaced_names(document, read), ["line 1: `there` is not in `a.rs`"]);
    }

    #[test]
    fn a_missing_path_and_a_missing_name_dangle() {
        let tree = ["house/src/text.rs".to_owned(), "house/src".to_owned()];
        let document = "`src/text.rs`, `src/` and `src/none.rs`; `here_it_is_named` and `nobody_has_this`";
        assert_eq!(
            dangling_citations(document, &tree, "fn here_it_is_named() {}"),
            ["line 1: `src/none.rs`", "line 1: `nobody_has_this`"]
        );
    }
}
