//! Values of settings, and texts about them. It must not know how settings are handled.

use serde_json::Value;
use std::collections::BTreeMap;

/// The YAML parser's error, without its advice on parser options.
pub(super) fn yaml_error(text: &str) -> String {
    let line = text.lines().next().unwrap_or("it is no YAML");
    let end = [", set ", "; set ", " (set ", ". Set "].iter().filter_map(|mark| line.find(mark)).min().unwrap_or(line.len());
    let place = line.find(" at line ").filter(|&place| place > end).and_then(|place| line.get(place..));
    format!("{}{}", line.get(..end).unwrap_or(line), place.unwrap_or_default())
}

/// Inserts the leaves of a value by their paths. Empty objects and lists are leaves.
pub(in super::super) fn flatten(path: String, value: Value, settings: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(object) if !object.is_empty() => {
            for (name, inner) in object {
                flatten(format!("{path}.{name}"), inner, settings);
            }
        }
        leaf => _ = settings.insert(path, leaf),
    }
}

/// Whether a value switches a setting off.
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::String(text) => {
            let is_zero = text.parse::<f64>().is_ok_and(|number| number == 0.0);
            is_zero || matches!(text.to_ascii_lowercase().as_str(), "" | "none" | "no" | "false")
        }
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Bool(true) => false,
    }
}

/// The reason why the first variable in a text was not expanded, if it is known.
pub(in super::super) fn unexpanded_in(text: &str, unexpanded: &BTreeMap<String, String>) -> Option<String> {
    let names = text.split('$').skip(1);
    let name = |rest: &str| {
        let rest = rest.trim_start_matches('{');
        let end = rest.find(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_')).unwrap_or(rest.len());
        rest.get(..end).map(String::from)
    };
    names.filter_map(name).find_map(|name| unexpanded.get(&name).map(|why| format!("`${name}` {why}")))
}

/// A number as its shortest decimal, which reads back the same.
pub(in super::super) fn decimal(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}
