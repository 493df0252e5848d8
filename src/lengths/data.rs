//! Lengths of a data set's samples, as a user states them: a distribution, or a file.

use crate::failure::{Failure, code};
use crate::{inputs, tokenizer};
use foretell_simulator::SampleLengths;
use foretell_units::diagnostic::Mistake;
use serde_json::Value;
use std::path::Path;

/// A log-normal distribution as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Distribution {
    mean: usize,
    p95: usize,
    most: Option<usize>,
}

/// The fields of a sample in JSON that state its length, and those that hold its tokens.
const COUNTS: [&str; 5] = ["length", "num_tokens", "n_tokens", "token_count", "tokens_count"];
const TOKENS: [&str; 2] = ["input_ids", "tokens"];

/// The fields of a sample in JSON that hold its text, in the order of the formats that use them:
/// plain text, Alpaca, prompts and completions, questions and answers.
const TEXTS: [&str; 9] = ["text", "system", "instruction", "input", "prompt", "question", "output", "completion", "answer"];
/// The fields that hold a list of messages, and the fields of a message that hold its text.
const MESSAGES: [&str; 2] = ["messages", "conversations"];
const CONTENTS: [&str; 2] = ["content", "value"];

const HINT: &str = "write for example mean=512,p95=1536, or name a file with a length on each line, or a .jsonl file of samples";

/// Reads lengths: `mean=512,p95=1536`, with `max=4096` if that is less than the model's sequence,
/// or a file. `positions` is the length of the model's sequence. Also returns the number of samples
/// in a file.
pub(super) fn read(text: &str, positions: usize, tokenizer: Option<&Path>) -> Result<(SampleLengths, Option<usize>), Failure> {
    match distribution(text) {
        Some(Ok(_)) if tokenizer.is_some() => Err(Failure::input(code::OPTION_VALUE, "`--tokenizer` without texts")
            .hint("leave it out, or name a .jsonl file in `--lengths`")),
        Some(Ok(Distribution { mean, p95, most })) => {
            Ok((SampleLengths::log_normal(mean, p95, most.unwrap_or(positions.max(p95))), None))
        }
        Some(Err(mistake)) => Err(Failure::of_input(mistake).about("`--lengths`")),
        None => file(Path::new(text), tokenizer).map(|lengths| {
            let count = lengths.count();
            (lengths, Some(count))
        }),
    }
}

/// The distribution that a text states. `None` if the text is the name of a file.
fn distribution(text: &str) -> Option<Result<Distribution, Mistake>> {
    let names = ["mean", "p95", "max"];
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    let is_one = parts.iter().all(|part| {
        let (name, value) = part.split_once('=').unwrap_or((names[0], part));
        names.contains(&name) && value.starts_with(|first: char| first.is_ascii_digit())
    });
    is_one.then(|| {
        let mut found = [None; 3];
        for (place, part) in parts.iter().enumerate() {
            // `512,1536` stands for the mean and the 95th percentile.
            let (name, value) = part.split_once('=').unwrap_or((names.get(place).copied().unwrap_or(""), part));
            let Some(index) = names.iter().position(|known| *known == name) else {
                return Err(Mistake::new(format!("`{text}` has too many numbers"), HINT));
            };
            let value = value.parse::<usize>().ok().filter(|value| *value > 0);
            let value = value.ok_or_else(|| Mistake::new(format!("`{part}` is no whole number of tokens"), HINT))?;
            if found[index].replace(value).is_some() {
                return Err(Mistake::new(format!("`{name}` is given twice"), HINT));
            }
        }
        let [mean, p95, most] = found;
        let mean = mean.ok_or_else(|| Mistake::new("the mean length is missing", HINT))?;
        let p95 = p95.ok_or_else(|| Mistake::new("the 95th percentile is missing", HINT))?;
        if p95 < mean || most.is_some_and(|most| most < p95) {
            return Err(Mistake::new(format!("`{text}`: lengths rise from the mean over the 95th percentile to the most"), HINT));
        }
        Ok(Distribution { mean, p95, most })
    })
}

/// Reads lengths from a file: a number on each line, a list of numbers, or JSON lines.
fn file(path: &Path, tokenizer: Option<&Path>) -> Result<SampleLengths, Failure> {
    let wrong = |message: String, hint: &str| Failure::input(code::OPTION_VALUE, message).hint(hint).in_file(path);
    let content = inputs::read(path)?;
    let tokenizer = tokenizer.map(|path| Ok::<_, Failure>((tokenizer::open(path)?, path))).transpose()?;
    let mut has_texts = false;
    let mut lengths = Vec::new();
    let values: Vec<(usize, Value)> = match serde_json::from_str::<Vec<Value>>(&content) {
        Ok(list) => list.into_iter().enumerate().collect(),
        Err(_) => {
            let lines = content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
            let value = |(index, line): (usize, &str)| {
                let value = serde_json::from_str(line.trim());
                value
                    .map(|value| (index, value))
                    .map_err(|_| wrong(format!("line {} is neither a length nor JSON", index + 1), HINT))
            };
            lines.map(value).collect::<Result<_, _>>()?
        }
    };
    for (index, value) in values {
        let length = match length_of(&value) {
            Some(length) => length,
            None => {
                let text = text_of(&value)
                    .ok_or_else(|| wrong(format!("sample {} has neither a length nor a text that is known", index + 1), HINT))?;
                has_texts = true;
                let (tokenizer, path) = tokenizer.as_ref().ok_or_else(|| {
                    let hint = "add `--tokenizer` with the model's tokenizer.json, or state lengths";
                    wrong(format!("sample {} is text, whose tokens are not known", index + 1), hint)
                })?;
                let tokens = tokenizer.encode(&text);
                tokens.map_err(|reason| Failure::input(code::TOKENIZER, reason).in_file(path))?.len().max(1)
            }
        };
        lengths.push(length);
    }
    if tokenizer.is_some() && !has_texts {
        return Err(wrong("it has no texts for `--tokenizer`".into(), "leave `--tokenizer` out"));
    }
    SampleLengths::measured(lengths).ok_or_else(|| wrong("it has no lengths, or one that is 0".into(), HINT))
}

/// The length that a value is, or states in a field.
fn length_of(value: &Value) -> Option<usize> {
    let count = |value: &Value| value.as_u64().and_then(|count| usize::try_from(count).ok());
    let stated = || COUNTS.iter().find_map(|name| value.get(name).and_then(count));
    let listed = || TOKENS.iter().find_map(|name| Some(value.get(name)?.as_array()?.len()));
    count(value).or_else(stated).or_else(listed)
}

/// All texts of a sample, concatenated.
fn text_of(value: &Value) -> Option<String> {
    let of_fields = TEXTS.iter().filter_map(|name| value.get(name)?.as_str());
    let messages = MESSAGES.iter().filter_map(|name| value.get(name)?.as_array()).flatten();
    let of_messages = messages.filter_map(|message| CONTENTS.iter().find_map(|name| message.get(name)?.as_str()));
    let texts: Vec<&str> = of_fields.chain(of_messages).collect();
    (!texts.is_empty()).then(|| texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_are_read_or_refused_and_files_are_none() {
        let read = |text| distribution(text).map(|read| read.map_err(|mistake| mistake.message));
        let usual = |most| Some(Ok(Distribution { mean: 512, p95: 1536, most }));
        assert_eq!(read("mean=512,p95=1536"), usual(None));
        assert_eq!(read("512, 1536"), usual(None));
        assert_eq!(read("p95=1536,max=2048,mean=512"), usual(Some(2048)));
        for wrong in
            ["mean=512", "p95=1536", "mean=512,p95=100", "mean=512,p95=1536,max=1000", "1,2,3,4", "mean=0,p95=4", "mean=1,mean=2"]
        {
            assert!(matches!(read(wrong), Some(Err(_))), "{wrong}");
        }
        assert_eq!((read("lengths.txt"), read("data/512.jsonl"), read("most=4")), (None, None, None));
    }

    #[test]
    fn samples_state_lengths_or_hold_texts() {
        let value = |text: &str| serde_json::from_str::<Value>(text).expect("it is JSON");
        assert_eq!(length_of(&value("17")), Some(17));
        assert_eq!(length_of(&value(r#"{"text": "a", "num_tokens": 5}"#)), Some(5));
        assert_eq!(length_of(&value(r#"{"input_ids": [1, 2, 3]}"#)), Some(3));
        let chat = value(r#"{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}"#);
        assert_eq!((length_of(&chat), text_of(&chat).as_deref()), (None, Some("one\ntwo")));
        assert_eq!(text_of(&value(r#"{"instruction": "do", "output": "done"}"#)).as_deref(), Some("do\ndone"));
        assert_eq!(text_of(&value(r#"{"label": 3}"#)), None);
    }
}
