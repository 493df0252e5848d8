//! Changes single settings in a text, at the line that has them: YAML and TOML by lines, JSON by
//! values. It must not know frameworks.

use super::{Edit, json_text};
use crate::frameworks::stated::flatten;
use serde_json::Value;
use std::collections::BTreeMap;

/// How a file writes its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notation {
    Json,
    Yaml,
    Toml,
}

/// The settings of a text. Nested settings have paths with dots.
pub(super) fn settings(text: &str, notation: Notation) -> Result<BTreeMap<String, Value>, String> {
    let value: Value = match notation {
        Notation::Json => serde_json::from_str(text).map_err(|error| error.to_string())?,
        Notation::Yaml => serde_saphyr::from_str(text).map_err(|error| error.to_string())?,
        Notation::Toml => toml::from_str(text).map_err(|error| error.to_string())?,
    };
    let mut all = BTreeMap::new();
    if let Value::Object(object) = value {
        for (name, value) in object {
            flatten(name, value, &mut all);
        }
    }
    Ok(all)
}

/// Changes the setting that has one of these paths. If there is none, adds it under the first path.
pub(super) fn apply<'a>(
    text: &str,
    notation: Notation,
    paths: impl Iterator<Item = &'a str>,
    edit: Edit<'_>,
) -> Result<String, String> {
    let paths: Vec<&str> = paths.collect();
    let has = settings(text, notation)?;
    let own = paths.iter().find(|path| has.contains_key(**path));
    match (own, edit) {
        (None, Edit::Remove) => Ok(text.into()),
        (found, edit) => {
            let path = found.or(paths.first()).copied().expect("invariant: a setting has a name");
            let parts: Vec<&str> = path.split('.').collect();
            match notation {
                Notation::Json => json_text::change(text, &parts, edit),
                Notation::Yaml => Ok(lines(text, &parts, edit, Lines::YAML)),
                Notation::Toml => Ok(lines(text, &parts, edit, Lines::TOML)),
            }
        }
    }
}

/// The syntax of a notation that has a setting on each line.
#[derive(Clone, Copy)]
struct Lines {
    separator: char,
    has_headers: bool,
}

impl Lines {
    const YAML: Self = Self { separator: ':', has_headers: false };
    const TOML: Self = Self { separator: '=', has_headers: true };

    /// The line of a setting.
    fn line(self, indent: &str, name: &str, value: &Value) -> String {
        let text = written(value);
        if self.has_headers { format!("{indent}{name} = {text}") } else { format!("{indent}{name}: {text}") }
    }
}

/// A value as YAML and TOML both read it. Numbers have no exponent, which PyYAML reads as text.
fn written(value: &Value) -> String {
    match value {
        Value::Number(number) if number.is_f64() => {
            let text = number.as_f64().map_or_else(|| number.to_string(), |number| number.to_string());
            if text.contains('.') { text } else { format!("{text}.0") }
        }
        Value::Array(list) => format!("[{}]", list.iter().map(written).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

fn indent_of(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The name of the setting that a line states. `None` for comments and blank lines.
fn name_of(line: &str, separator: char) -> Option<&str> {
    let (name, _) = line.trim_start().split_once(separator)?;
    let name = name.trim().trim_matches(['"', '\'']);
    (!name.is_empty() && !name.starts_with('#') && !name.starts_with('-')).then_some(name)
}

/// Returns the comment at the end of a line.
fn comment_of(line: &str) -> Option<&str> {
    let mut quote = None;
    for (place, letter) in line.char_indices() {
        match (quote, letter) {
            (None, '"' | '\'') => quote = Some(letter),
            (Some(open), letter) if open == letter => quote = None,
            (None, '#') if line[..place].ends_with(' ') => return line.get(place..),
            _ => {}
        }
    }
    None
}

fn lines(text: &str, parts: &[&str], edit: Edit<'_>, form: Lines) -> String {
    let mut all: Vec<String> = text.lines().map(String::from).collect();
    let [section @ .., name] = parts else { return text.into() };
    let section = section.join(".");
    let range = if form.has_headers {
        of_header(&all, &section)
    } else {
        of_mapping(&all, section.split('.').filter(|part| !part.is_empty()))
    };
    match range {
        Section::Lines { first, end, indent } => {
            let found =
                (first..end).find(|&line| indent_of(&all[line]) == indent && name_of(&all[line], form.separator) == Some(*name));
            let blank = " ".repeat(indent);
            match (found, edit) {
                (Some(line), Edit::Set(value)) => {
                    let last = end_of_value(&all, line, end);
                    let comment = comment_of(&all[line]).map(|comment| format!("  {comment}")).unwrap_or_default();
                    let changed = form.line(&blank, name, value) + &comment;
                    drop(all.splice(line..last, [changed]));
                }
                (Some(line), Edit::Remove) => {
                    let last = end_of_value(&all, line, end);
                    drop(all.drain(line..last));
                }
                (None, Edit::Set(value)) => {
                    // After the section's last line that is not blank.
                    let last = (first..end).rev().find(|&line| !all[line].trim().is_empty()).map_or(first, |line| line + 1);
                    all.insert(last, form.line(&blank, name, value));
                }
                (None, Edit::Remove) => {}
            }
        }
        Section::Elsewhere => rewrite(text, &mut all, parts, edit),
        Section::Missing => {
            if let Edit::Set(value) = edit {
                if !form.has_headers && section.contains('.') {
                    rewrite(text, &mut all, parts, edit);
                } else {
                    let (header, indent) =
                        if form.has_headers { (format!("\n[{section}]"), "") } else { (format!("{section}:"), "  ") };
                    all.push(header);
                    all.push(form.line(indent, name, value));
                }
            }
        }
    }
    let end = if text.ends_with('\n') { "\n" } else { "" };
    all.join("\n") + end
}

/// Rewrites a top-level mapping of YAML in one line of JSON, with one value changed. Its comments
/// are lost.
fn rewrite(text: &str, all: &mut Vec<String>, parts: &[&str], edit: Edit<'_>) {
    let [top, inner @ .., name] = parts else { return };
    let mut whole: serde_json::Map<String, Value> =
        serde_saphyr::from_str(text).expect("invariant: `settings` has read the text as a mapping");
    let mut place = whole.entry(*top).or_insert(Value::Null);
    for part in inner {
        place = object(place).entry(*part).or_insert(Value::Null);
    }
    match edit {
        Edit::Set(value) => _ = object(place).insert((*name).into(), value.clone()),
        Edit::Remove => _ = object(place).remove(*name),
    }
    let changed = format!("{top}: {}", whole.get(*top).unwrap_or(&Value::Null));
    match (0..all.len()).find(|&line| indent_of(&all[line]) == 0 && name_of(&all[line], ':') == Some(*top)) {
        Some(line) => {
            let last = end_of_value(all, line, all.len());
            drop(all.splice(line..last, [changed]));
        }
        None => all.push(changed),
    }
}

/// The value as an object. Replaces a value that is none.
fn object(value: &mut Value) -> &mut serde_json::Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(serde_json::Map::new());
    }
    value.as_object_mut().expect("invariant: it is an object now")
}

/// Where a section's settings are.
enum Section {
    /// In these lines, each indented by `indent` blanks.
    Lines { first: usize, end: usize, indent: usize },
    /// In braces, or in a section that must be created within an existing mapping.
    Elsewhere,
    /// Nowhere.
    Missing,
}

/// The lines under a header of TOML.
fn of_header(all: &[String], section: &str) -> Section {
    let is_header = |line: &String| line.trim_start().starts_with('[');
    let next = |from: usize| (from..all.len()).find(|&line| is_header(&all[line])).unwrap_or(all.len());
    if section.is_empty() {
        return Section::Lines { first: 0, end: next(0), indent: 0 };
    }
    let found =
        all.iter().position(|line| is_header(line) && line.trim().trim_start_matches('[').split(']').next() == Some(section));
    found.map_or(Section::Missing, |line| Section::Lines { first: line + 1, end: next(line + 1), indent: 0 })
}

/// The lines of a nested mapping of YAML.
fn of_mapping<'a>(all: &[String], parts: impl Iterator<Item = &'a str>) -> Section {
    let (mut first, mut end, mut indent) = (0, all.len(), 0);
    let mut is_outermost = true;
    for part in parts {
        let found = (first..end).find(|&line| indent_of(&all[line]) == indent && name_of(&all[line], ':') == Some(part));
        let Some(line) = found else {
            return if is_outermost { Section::Missing } else { Section::Elsewhere };
        };
        is_outermost = false;
        let value = all[line].split_once(':').map(|(_, value)| value.trim()).unwrap_or_default();
        if value.starts_with('{') {
            return Section::Elsewhere;
        }
        let last = end_of_value(all, line, end);
        let inner = (line + 1..last).find(|&inner| name_of(&all[inner], ':').is_some());
        indent = inner.map_or(indent + 2, |inner| indent_of(&all[inner]));
        (first, end) = (line + 1, last);
    }
    Section::Lines { first, end, indent }
}

/// The line after a setting's value, which includes lists, more deeply indented lines, and lines up
/// to the closing bracket.
fn end_of_value(all: &[String], line: usize, end: usize) -> usize {
    let indent = indent_of(&all[line]);
    let open = |text: &str| text.matches(['[', '{']).count() as isize - text.matches([']', '}']).count() as isize;
    let mut depth = open(&all[line]);
    let mut last = line + 1;
    let mut next = line + 1;
    while next < end {
        let text = &all[next];
        let is_inner =
            depth > 0 || indent_of(text) > indent || (indent_of(text) == indent && text.trim_start().starts_with("- "));
        if text.trim().is_empty() {
            next += 1;
            continue;
        }
        if !is_inner {
            break;
        }
        depth += open(text);
        next += 1;
        last = next;
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn set(text: &str, notation: Notation, path: &str, value: Value) -> String {
        apply(text, notation, std::iter::once(path), Edit::Set(&value)).expect("it is sound")
    }

    #[test]
    fn a_setting_of_yaml_changes_where_it_is() {
        let text = "# mine\na: 1  # why\nlist:\n- x\n- y\nouter:\n    inner: true\n\nlast: z\n";
        assert_eq!(set(text, Notation::Yaml, "a", json!(2)), text.replace("a: 1", "a: 2"));
        assert_eq!(set(text, Notation::Yaml, "list", json!(["q"])), text.replace("list:\n- x\n- y\n", "list: [\"q\"]\n"));
        assert_eq!(set(text, Notation::Yaml, "outer.inner", json!(false)), text.replace("inner: true", "inner: false"));
        assert_eq!(set(text, Notation::Yaml, "outer.more", json!(0.5)), text.replace("true\n", "true\n    more: 0.5\n"));
        assert_eq!(set(text, Notation::Yaml, "new.part", json!(3)), format!("{text}new:\n  part: 3\n"));
        assert_eq!(set("o: {x: 1}\n", Notation::Yaml, "o.x", json!(2)), "o: {\"x\":2}\n");
        assert_eq!(set("o:\n  x: 1\n", Notation::Yaml, "o.y.z", json!(2)), "o: {\"x\":1,\"y\":{\"z\":2}}\n");
        let without = apply(text, Notation::Yaml, ["list", "a"].into_iter(), Edit::Remove).expect("it is sound");
        assert_eq!(without, text.replace("list:\n- x\n- y\n", ""));
    }

    #[test]
    fn a_setting_of_toml_changes_in_its_section() {
        let text = "[training]\nsteps = 10 # few\n\n[parallelism]\ntensor = 2\n";
        assert_eq!(set(text, Notation::Toml, "training.steps", json!(20)), text.replace("10 # few", "20  # few"));
        assert_eq!(set(text, Notation::Toml, "training.more", json!("x")), text.replace("few\n", "few\nmore = \"x\"\n"));
        assert_eq!(set(text, Notation::Toml, "other.x", json!(1)), format!("{text}\n[other]\nx = 1\n"));
    }
}
