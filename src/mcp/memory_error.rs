//! An out-of-memory message of PyTorch, compared with the prediction of its job.
//!
//! PyTorch writes it in `c10/cuda/CUDACachingAllocator.cpp`. It states the bytes asked for, the
//! device's capacity, the free bytes, and the bytes that the process and the allocator hold.

use super::{failed, structured, summary};
use foretell_units::Bytes;
use serde_json::{Value, json};

/// The figures of a message, as far as it has them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct OutOfMemory {
    asked: Option<Bytes>,
    capacity: Option<Bytes>,
    free: Option<Bytes>,
    in_use: Option<Bytes>,
    allocated: Option<Bytes>,
    /// Bytes that the allocator holds outside of tensors.
    unallocated: Option<Bytes>,
}

impl OutOfMemory {
    /// Reads a message. `None` if it is a message of another kind.
    fn read(text: &str) -> Option<Self> {
        let is_one = ["out of memory", "OutOfMemoryError", "Tried to allocate"].iter().any(|words| text.contains(words));
        is_one.then(|| Self {
            asked: after(text, "Tried to allocate "),
            capacity: after(text, "total capacity of ").or_else(|| before(text, " total capacity")),
            free: before(text, " is free").or_else(|| before(text, " free")),
            in_use: before(text, " memory in use"),
            allocated: before(text, " is allocated by PyTorch").or_else(|| before(text, " already allocated")),
            unallocated: before(text, " is reserved by PyTorch but unallocated"),
        })
    }
}

/// The size that follows `words` in the text.
fn after(text: &str, words: &str) -> Option<Bytes> {
    let rest = text.split_once(words)?.1;
    let mut parts = rest.split_whitespace();
    size(parts.next()?, parts.next()?)
}

/// The size that precedes `words` in the text.
fn before(text: &str, words: &str) -> Option<Bytes> {
    let mut parts = text.split_once(words)?.0.split_whitespace().rev();
    let unit = parts.next()?;
    size(parts.next()?, unit)
}

fn size(number: &str, unit: &str) -> Option<Bytes> {
    // A sentence may end after the unit.
    format!("{number}{}", unit.trim_matches(|character: char| !character.is_ascii_alphabetic())).parse().ok()
}

/// The result of a call that explains a message. `document` is the prediction of its job.
pub fn result(text: &str, document: &Value, line: &str) -> Value {
    let Some(message) = OutOfMemory::read(text) else {
        let hint = "this tool reads out-of-memory messages of PyTorch; Foretell's own errors say how to fix them after `hint:`";
        return failed(&json!({"error": {"code": "input", "message": "the message is not about memory", "hint": hint}}));
    };
    let parts = [
        ("asked for", message.asked),
        ("capacity", message.capacity),
        ("free", message.free),
        ("in use by the process", message.in_use),
        ("allocated by PyTorch", message.allocated),
        ("reserved and in no tensor", message.unallocated),
    ];
    let said = parts.iter().filter_map(|(name, size)| Some(format!("{name} {}", (*size)?)));
    let said = said.collect::<Vec<_>>().join(", ");
    let mut lines =
        vec![format!("the message: {}", if said.is_empty() { "out of memory, without figures".into() } else { said })];
    // For a search that found no layout, the error states what would fit.
    let error = document.get("error");
    let predicted = if document.get("predicted").is_some() { &document["predicted"] } else { document };
    match error {
        Some(error) => {
            lines.push(format!("the prediction: {}", error["message"].as_str().unwrap_or_default()));
            lines.extend(error["hint"].as_str().map(|hint| format!("what to change: {hint}")));
        }
        None => {
            lines.push(format!("the prediction: {}", summary::predicted(predicted)));
            lines.extend(summary::memory(predicted));
            lines.push(advice(message, summary::fullest(predicted), document.get("plan").is_some()));
        }
    }
    lines.push(format!("command: {line}"));
    let figures = |size: Option<Bytes>| size.map(Bytes::count);
    let read = json!({"asked_bytes": figures(message.asked), "capacity_bytes": figures(message.capacity), "free_bytes": figures(message.free),
        "in_use_bytes": figures(message.in_use), "allocated_bytes": figures(message.allocated), "unallocated_bytes": figures(message.unallocated)});
    let document = json!({"message": read, "prediction": summary::shortened(document.clone())});
    json!({"content": [{"type": "text", "text": lines.join("\n")}], "structuredContent": structured(document), "isError": false})
}

/// What to do about a job that ran out of memory although its prediction fits.
fn advice(message: OutOfMemory, predicted: Bytes, is_searched: bool) -> String {
    /// Share of the allocator's memory outside of tensors from which on fragmentation is a likely
    /// cause.
    const FRAGMENTED: f64 = 0.08;
    let share = |part: Bytes, whole: Bytes| part.count() as f64 / whole.count().max(1) as f64;
    let held = message.allocated.or(message.in_use);
    match (message.unallocated, held, message.capacity) {
        (Some(unallocated), Some(held), _) if share(unallocated, held) > FRAGMENTED => {
            format!("{unallocated} is held in fragments: try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
        }
        (_, Some(held), _) if held > predicted && is_searched => {
            "the job holds more than the best layout needs: run the layout of this prediction (tool `export` writes it)".into()
        }
        (_, Some(held), _) if held > predicted => {
            format!("the job holds {held}, more than the prediction: is the plan that of the job?")
        }
        (_, _, Some(capacity)) if predicted > capacity => {
            "the prediction is above the device's capacity too: `plan` finds what fits".into()
        }
        _ => "the prediction fits: compare batch, sequence and recomputation of the job with those of the plan".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: &str = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB \
        of which 1.12 GiB is free. Process 1234 has 78.03 GiB memory in use. Of the allocated memory 70.50 GiB is allocated by PyTorch, \
        and 6.91 GiB is reserved by PyTorch but unallocated.";
    const OLD: &str = "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.74 GiB already \
        allocated; 5.62 MiB free; 9.76 GiB reserved in total by PyTorch)";

    #[test]
    fn both_forms_of_the_message_are_read() {
        let size = |text: &str| text.parse::<Bytes>().ok();
        let expected = OutOfMemory {
            asked: size("2GiB"),
            capacity: size("79.15GiB"),
            free: size("1.12GiB"),
            in_use: size("78.03GiB"),
            allocated: size("70.5GiB"),
            unallocated: size("6.91GiB"),
        };
        assert_eq!(OutOfMemory::read(MESSAGE), Some(expected));
        let old = OutOfMemory::read(OLD).expect("it is one");
        assert_eq!((old.asked, old.capacity, old.free), (size("20MiB"), size("10.76GiB"), size("5.62MiB")));
        assert_eq!((old.allocated, old.in_use), (size("9.74GiB"), None));
        assert_eq!(OutOfMemory::read("NCCL timeout"), None);
    }

    #[test]
    fn fragments_are_noticed() {
        let message = OutOfMemory::read(MESSAGE).expect("it is one");
        assert!(advice(message, Bytes::new(60 << 30), true).contains("expandable_segments"));
    }
}
