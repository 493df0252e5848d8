//! Reference pages of forms: a table of fields for each type, and an example. It must not know the
//! types: it reads schemas.

use super::{Form, Kind};
use crate::failure::Failure;
use crate::{inputs, output};
use serde_json::{Map, Value};
use std::fmt::Write;
use std::path::Path;

/// The first lines of each page.
const HEAD: &str = "<!-- `foretell schema --pages docs/reference` writes this page. -->\n\n";

/// Writes a page of each file, and one of all documents.
pub fn write_all(folder: &Path, forms: &[Form]) -> Result<(), Failure> {
    for form in forms.iter().filter(|form| form.kind == Kind::File) {
        let path = folder.join("files").join(format!("{}.md", form.name));
        output::write(&path, of_file(form, folder)?.as_bytes())?;
    }
    output::write(&folder.join("answers.md"), of_answers(forms, folder)?.as_bytes())
}

fn of_file(form: &Form, folder: &Path) -> Result<String, Failure> {
    let document = form.document();
    let name = form.name;
    let mut page = format!("{HEAD}# {}\n\n{}\n\n", title(name), form.meaning);
    let _ = writeln!(page, "`foretell schema {name}` prints this form as a JSON Schema.\n");
    let example = inputs::read(&folder.join("examples").join(format!("{name}.yaml")))?;
    let _ = writeln!(page, "```yaml\n{}\n```\n", example.trim_end());
    page.push_str(&of_type(&document, 2));
    page.push_str(&of_definitions(document.get("$defs").and_then(Value::as_object)));
    Ok(page.trim_end().to_owned() + "\n")
}

fn of_answers(forms: &[Form], folder: &Path) -> Result<String, Failure> {
    let mut page = format!(
        "{HEAD}# JSON documents\n\nThe document that each command prints with `--json`. Durations are in seconds, and \
         sizes in bytes. `foretell schema NAME` prints a form as a JSON Schema; the names are those of the sections.\n\n"
    );
    let mut generator = Kind::Answer.settings().into_generator();
    for form in forms.iter().filter(|form| form.kind == Kind::Answer) {
        let schema = (form.schema)(&mut generator);
        let _ = writeln!(page, "## {}\n\n{}\n", form.name, form.meaning);
        page.push_str(&of_type(&form.described(schema), 3));
        let example = folder.join("examples").join(format!("{}.json", form.name));
        if example.is_file() {
            let _ = writeln!(page, "```json\n{}\n```\n", inputs::read(&example)?.trim_end());
        }
    }
    page.push_str(&of_definitions(Some(&generator.take_definitions(true))));
    Ok(page.trim_end().to_owned() + "\n")
}

fn title(name: &str) -> String {
    let article = if name.starts_with(['a', 'e', 'i', 'o', 'u']) { "An" } else { "A" };
    format!("{article} {name} file")
}

/// The sections of the types that other types refer to.
fn of_definitions(definitions: Option<&Map<String, Value>>) -> String {
    let mut text = String::new();
    for (name, schema) in definitions.into_iter().flatten() {
        let _ = writeln!(text, "## {name}\n");
        if let Some(meaning) = schema.get("description").and_then(Value::as_str) {
            let _ = writeln!(text, "{}\n", one_line(meaning));
        }
        text.push_str(&of_type(schema, 3));
    }
    text
}

/// The fields of a type, or its variants.
fn of_type(schema: &Value, level: usize) -> String {
    let mut text = String::new();
    if let Some(items) = schema.get("items") {
        let _ = writeln!(text, "A list of {}.\n", words(items));
    }
    text.push_str(&fields(schema));
    let variants: Vec<&Value> = ["oneOf", "anyOf"].iter().filter_map(|key| schema.get(*key)?.as_array()).flatten().collect();
    if !variants.is_empty() {
        text.push_str(&of_variants(&variants, level));
    } else if schema.get("properties").is_none() && schema.get("items").is_none() {
        let _ = writeln!(text, "It is {}.\n", words(schema));
    }
    text
}

/// A table of an object's fields; empty if it has none.
fn fields(schema: &Value) -> String {
    let Some(properties) = schema.get("properties").and_then(Value::as_object).filter(|fields| !fields.is_empty()) else {
        return String::new();
    };
    let required: Vec<&str> =
        schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let mut text = String::from("| field | value | meaning |\n| --- | --- | --- |\n");
    for (name, field) in properties {
        let meaning = field.get("description").and_then(Value::as_str).map(one_line).unwrap_or_default();
        let default = field.get("default").filter(|value| !value.is_null()).map(|value| format!(" Default: `{}`.", short(value)));
        let mark = if required.contains(&name.as_str()) { "" } else { "?" };
        let _ = writeln!(
            text,
            "| `{name}`{mark} | {} | {}{} |",
            words(field).replace('|', "\\|"),
            meaning.replace('|', "\\|"),
            default.unwrap_or_default().replace('|', "\\|")
        );
    }
    text + "\n"
}

/// The variants of a type: words, objects with a tag, or other types.
fn of_variants(variants: &[&Value], level: usize) -> String {
    let mut list = String::new();
    let mut sections = String::new();
    for variant in variants {
        let meaning = variant.get("description").and_then(Value::as_str).map(one_line).unwrap_or_default();
        let meaning = if meaning.is_empty() { meaning } else { format!(": {meaning}") };
        let tag = variant.get("properties").and_then(Value::as_object).and_then(|fields| {
            fields.iter().find_map(|(name, field)| Some((name.clone(), field.get("const")?.as_str()?.to_owned())))
        });
        match tag {
            Some((name, value)) => {
                let _ = writeln!(sections, "{} `{name}: {value}`\n\n{}", "#".repeat(level), fields(variant));
            }
            None => {
                let _ = writeln!(list, "- {}{meaning}", words(variant));
            }
        }
    }
    if list.is_empty() { sections } else { format!("{list}\n{sections}") }
}

/// The values that a schema allows, in a few words.
fn words(schema: &Value) -> String {
    if let Some(path) = schema.get("$ref").and_then(Value::as_str) {
        let name = path.rsplit('/').next().unwrap_or(path);
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(value) = schema.get("const") {
        return format!("`{}`", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        let shown = values.iter().filter(|value| !value.is_null());
        let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        return shown.map(|value| format!("`{}`", word(value))).collect::<Vec<_>>().join(" or ");
    }
    let variants: Vec<&Value> =
        ["oneOf", "anyOf", "allOf"].iter().filter_map(|key| schema.get(*key)?.as_array()).flatten().collect();
    if !variants.is_empty() {
        return variants.iter().map(|variant| words(variant)).filter(|word| word != "null").collect::<Vec<_>>().join(" or ");
    }
    let kinds: Vec<&str> = match schema.get("type") {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => return "anything".into(),
    };
    let word = |kind: &str| match kind {
        "null" => "null".into(),
        "string" => "text".into(),
        "integer" => "whole number".into(),
        "boolean" => "`true` or `false`".into(),
        "array" => schema.get("items").map_or("list".into(), |items| format!("list of {}", words(items))),
        "object" => of_object(schema),
        other => other.to_owned(),
    };
    let all: Vec<String> = kinds.into_iter().map(word).collect();
    let shown: Vec<String> = all.iter().filter(|word| *word != "null").cloned().collect();
    if shown.is_empty() { "null".into() } else { shown.join(" or ") }
}

/// A mapping: of names to one kind of value, or of its fields.
fn of_object(schema: &Value) -> String {
    match (schema.get("properties").and_then(Value::as_object), schema.get("additionalProperties")) {
        (Some(fields), _) if !fields.is_empty() => {
            let fields = fields.iter().map(|(name, field)| format!("`{name}`: {}", words(field)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        (_, Some(values)) if values.is_object() => format!("mapping of names to {}", words(values)),
        _ => "mapping".into(),
    }
}

/// A documentation comment as a sentence for readers of files: without links into the code, and
/// without Rust's word for a missing field.
fn one_line(text: &str) -> String {
    let mut text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for target in ["](crate::", "](super::"] {
        while let Some(start) = text.find(target) {
            let end = text[start..].find(')').map_or(text.len(), |length| start + length + 1);
            text.replace_range(start..end, "]");
        }
    }
    text.replace("[`", "`").replace("`]", "`").replace("if `None`", "if it is left out").replace("`None`", "left out")
}

/// A default, with the digits of single precision.
fn short(value: &Value) -> String {
    match value.as_f64().filter(|_| value.is_f64()) {
        Some(number) => (number as f32).to_string(),
        None => value.to_string(),
    }
}
