//! Answers in a few lines, and documents without their long lists. Both are made from the document
//! alone, whose fields `foretell schema` describes.

use super::tools::Summary;
use crate::ask::Answer;
use crate::explain::risk;
use foretell_units::{Bytes, Seconds};
use serde_json::{Value, json};

/// The most items of a list in a shortened document.
const MOST_ITEMS: usize = 12;

/// Fields that agents seldom need: long lists, and what the search left out.
const LONG: [&str; 8] =
    ["space", "uncalibrated", "segments", "covers", "breakdown_by_rank", "host_memory_bytes", "heuristic_exclusions", "events"];

/// Summarises an answer.
pub fn of(kind: Summary, document: &Value, answer: &Answer) -> String {
    let mut lines = match kind {
        Summary::Plan if document.get("predicted").is_some() => plan(document),
        Summary::Plan => points(document),
        Summary::Step => step(document),
        Summary::Table => cells(document),
        Summary::Import => import(document),
        Summary::Files => files(document),
        Summary::Library => vec![format!("{} entries", document.as_array().map_or(1, Vec::len))],
    };
    lines.extend(answer.message.iter().map(|message| format!("error: {message}")));
    lines.extend(answer.notes.iter().map(|note| format!("note: {note}")));
    lines.join("\n")
}

/// A document without its long lists.
pub fn shortened(document: Value) -> Value {
    match document {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(name, _)| !LONG.contains(&name.as_str()));
            Value::Object(kept.map(|(name, value)| (name, shortened(value))).collect())
        }
        Value::Array(items) => {
            let more = items.len().saturating_sub(MOST_ITEMS);
            let mut kept: Vec<Value> = items.into_iter().take(MOST_ITEMS).map(shortened).collect();
            if more > 0 {
                kept.push(json!(format!("and {more} more; ask with `details: true`")));
            }
            Value::Array(kept)
        }
        other => other,
    }
}

/// A prediction in a line.
pub fn predicted(predicted: &Value) -> String {
    let seconds = |name: &str| Seconds::new(predicted[name].as_f64().unwrap_or_default()).to_string();
    let (rate, unit) = match predicted["tokens_per_second"].as_f64() {
        Some(rate) => (rate, "tokens/s"),
        None => (predicted["samples_per_second"].as_f64().unwrap_or_default(), "samples/s"),
    };
    let fits = if predicted["fits"] == true { "fits" } else { "does not fit" };
    let chance = predicted["chance_of_running_out"].as_f64();
    let chance = chance.map(|chance| format!(", chance of running out {:.0} %", chance * 100.0)).unwrap_or_default();
    format!(
        "step {} ({} to {} in 8 of 10 cases), {rate:.0} {unit}, MFU {:.1} %, {} on the fullest device, {fits}{chance}",
        seconds("step_seconds"),
        seconds("step_seconds_p10"),
        seconds("step_seconds_p90"),
        predicted["mfu"].as_f64().unwrap_or_default() * 100.0,
        fullest(predicted),
    )
}

/// The memory of the fullest device.
pub fn fullest(predicted: &Value) -> Bytes {
    let held = predicted["peak_memory_bytes"].as_array().into_iter().flatten().filter_map(Value::as_u64);
    Bytes::new(held.max().unwrap_or_default())
}

/// The sizes of a mesh that are above 1, and the other notable settings of a layout.
fn layout(plan: &Value) -> String {
    let layout = &plan["layout"];
    let sizes = ["data", "tensor", "pipeline", "context", "expert"].into_iter();
    let sizes = sizes.filter_map(|name| Some((name, layout[name].as_u64().filter(|size| *size > 1)?)));
    let mut words: Vec<String> = sizes.map(|(name, size)| format!("{name} {size}")).collect();
    let others = ["zero", "micro_batch", "schedule", "recompute"].into_iter().filter(|name| !layout[name].is_null());
    words.extend(others.map(|name| format!("{} {}", name.replace('_', " "), layout[name]).replace('"', "")));
    words.join(", ")
}

fn plan(document: &Value) -> Vec<String> {
    let mut lines = vec![format!("best layout: {}", layout(&document["plan"])), predicted(&document["predicted"])];
    for (index, other) in document["alternatives"].as_array().into_iter().flatten().enumerate() {
        let step = Seconds::new(other["predicted"]["step_seconds"].as_f64().unwrap_or_default());
        lines.push(format!("layout {}: step {step}, {}", index + 2, layout(&other["plan"])));
    }
    let search = &document["search"];
    let gap = search["gap"].as_f64().unwrap_or(f64::INFINITY) * 100.0;
    lines.push(match search["is_cut_off"] == true {
        true => "the search was cut off: this is the best layout so far".into(),
        false => format!("proven: no layout of the space is more than {gap:.2} % faster"),
    });
    if let Some(compared) = document.get("compared") {
        let ratio = compared["predicted"]["step_seconds"].as_f64().unwrap_or_default()
            / document["predicted"]["step_seconds"].as_f64().unwrap_or(1.0);
        lines.push(format!("the plan to compare: {}; {ratio:.2} times the best step", predicted(&compared["predicted"])));
    }
    lines
}

/// The answers of `scaling`, `front` and `gpus-needed`, one line each.
fn points(document: &Value) -> Vec<String> {
    let lists = document.as_object().into_iter().flatten().filter_map(|(name, value)| Some((name, value.as_array()?)));
    lists.flat_map(|(name, items)| items.iter().map(move |item| format!("{name}: {}", shortened(item.clone())))).collect()
}

fn step(document: &Value) -> Vec<String> {
    let mut lines = vec![predicted(document)];
    let step = document["step_seconds"].as_f64().unwrap_or(1.0);
    let parts = document["breakdown_seconds"].as_object().into_iter().flatten();
    let parts = parts.filter_map(|(name, time)| Some((name, time.as_f64()? / step))).filter(|(_, share)| *share >= 0.005);
    let parts: Vec<String> = parts.map(|(name, share)| format!("{} {:.0} %", name.replace('_', " "), share * 100.0)).collect();
    lines.push(format!("time: {}", parts.join(", ")));
    if let Some(memory) = memory(document) {
        lines.push(memory);
    }
    if let Some(run) = document["cost"].get("run") {
        let days = run["seconds"].as_f64().unwrap_or_default() / 86_400.0;
        let price = run["price"].as_f64().map_or_else(String::new, |price| format!(", price {price:.0}"));
        let steps = run["steps"].as_f64().unwrap_or_default();
        lines.push(format!("the run: {steps:.0} steps, {days:.2} days{price}"));
    }
    for answer in document["what_if"].as_array().into_iter().flatten() {
        let change = answer["change"].as_f64().unwrap_or_default() * 100.0;
        let step = Seconds::new(answer["step_seconds"].as_f64().unwrap_or_default());
        lines.push(format!("with {}: step {step} ({change:+.1} %)", answer["what_if"].as_str().unwrap_or_default()));
    }
    lines
}

/// What holds the memory of the fullest device. `None` if the memory is not known by part.
pub fn memory(predicted: &Value) -> Option<String> {
    if let Some(peak) = predicted["memory_peak"].as_str() {
        return Some(format!("memory at the peak: {peak}"));
    }
    let held = predicted["peak_memory_bytes"].as_array()?;
    let stage = (0..held.len()).max_by_key(|index| held[*index].as_u64())?;
    let parts = predicted["memory_by_component"].get(stage)?.as_object()?;
    let mut parts: Vec<(&str, u64)> = parts.iter().filter_map(|(name, size)| Some((name.as_str(), size.as_u64()?))).collect();
    parts.sort_by_key(|(_, size)| std::cmp::Reverse(*size));
    let parts = parts.into_iter().filter(|(_, size)| *size > 0);
    let parts: Vec<String> = parts.map(|(name, size)| format!("{} {}", name.replace('_', " "), Bytes::new(size))).collect();
    Some(format!("memory of the fullest device: {}", parts.join(", ")))
}

fn cells(document: &Value) -> Vec<String> {
    let name = |field: &str| document[field].as_str().unwrap_or_default().to_owned();
    let mut lines =
        vec![format!("{} by {}: memory of the fullest device, and tokens or samples per second", name("rows"), name("columns"))];
    for cell in document["cells"].as_array().into_iter().flatten() {
        let memory = cell["memory_bytes"].as_u64().map(Bytes::new);
        let risk = risk(cell["chance_of_running_out"].as_f64()).map(|risk| format!(", {risk}")).unwrap_or_default();
        let answer = match (cell["fits"] == true, memory) {
            (true, Some(memory)) => format!("fits, {memory}, {:.0}/s{risk}", cell["rate"].as_f64().unwrap_or_default()),
            (false, Some(memory)) => format!("does not fit, the least is {memory}"),
            (_, None) => format!("cannot be planned: {}", cell["layout"].as_str().unwrap_or_default()),
        };
        lines.push(format!(
            "{}, {}: {answer}",
            cell["row"].as_str().unwrap_or_default(),
            cell["column"].as_str().unwrap_or_default()
        ));
    }
    lines
}

fn import(document: &Value) -> Vec<String> {
    let what = ["model", "topology", "plan"].into_iter().find(|name| document[name].is_string()).unwrap_or("file");
    let mut lines = vec![format!("a {what}, whose text is in `{what}` of the document")];
    for (field, word) in [("unread", "not understood"), ("assumed", "assumed")] {
        let items = document[field].as_array().into_iter().flatten().filter_map(Value::as_str);
        lines.extend(items.map(|item| format!("{word}: {item}")));
    }
    lines
}

fn files(document: &Value) -> Vec<String> {
    let names: Vec<&str> = document["files"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let word = |field: &str| document[field].as_str().unwrap_or_default().to_owned();
    let mut lines = vec![format!("{} for {}; run: {}", names.join(", "), word("version"), word("command"))];
    let differences = document["differences"].as_array().into_iter().flatten().filter_map(Value::as_str);
    lines.extend(differences.map(|difference| format!("not the plan that was asked for: {difference}")));
    lines
}
