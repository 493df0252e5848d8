//! Changes single values in the text of a JSON object. The text around them stays as written.

use super::Edit;
use serde_json::Value;
use std::ops::Range;

/// A member of an object: where its name begins, and where its value is.
struct Member {
    name: String,
    start: usize,
    value: Range<usize>,
}

/// Changes, adds or removes the value at a path.
pub(super) fn change(text: &str, parts: &[&str], edit: Edit<'_>) -> Result<String, String> {
    let mut object = 0..text.trim_end().len();
    object.start = text.find('{').ok_or("it is no object")?;
    let [outer @ .., name] = parts else { return Ok(text.into()) };
    for (depth, part) in outer.iter().enumerate() {
        let inside = members(text, object.clone())?;
        match inside.iter().find(|member| member.name == *part) {
            Some(member) if text[member.value.clone()].starts_with('{') => object = member.value.clone(),
            Some(member) => return Err(format!("`{}` is no object", member.name)),
            None => {
                let Edit::Set(value) = edit else { return Ok(text.into()) };
                let nested = parts[depth + 1..]
                    .iter()
                    .rev()
                    .fold(value.clone(), |inner, part| Value::Object([((*part).to_string(), inner)].into_iter().collect()));
                return Ok(added(text, object, &inside, part, &nested));
            }
        }
    }
    let inside = members(text, object.clone())?;
    let found = inside.iter().position(|member| member.name == **name);
    Ok(match (found, edit) {
        (Some(index), Edit::Set(value)) => {
            let Range { start, end } = inside[index].value;
            format!("{}{value}{}", &text[..start], &text[end..])
        }
        (Some(index), Edit::Remove) => {
            // Remove the comma before the member as well; for the first member, the one after it.
            let (start, end) = match (index.checked_sub(1).map(|before| &inside[before]), inside.get(index + 1)) {
                (Some(before), _) => (before.value.end, inside[index].value.end),
                (None, Some(after)) => (inside[index].start, after.start),
                (None, None) => (object.start + 1, object.end - 1),
            };
            format!("{}{}", &text[..start], &text[end..])
        }
        (None, Edit::Set(value)) => added(text, object, &inside, name, value),
        (None, Edit::Remove) => text.into(),
    })
}

/// The text with one more member at the end of an object, formatted as the last one.
fn added(text: &str, object: Range<usize>, inside: &[Member], name: &str, value: &Value) -> String {
    let key = Value::from(name);
    match inside.last() {
        Some(last) => {
            // On a new line if the last member is.
            let line = text[..last.start].rfind('\n').unwrap_or(last.start);
            let between = &text[line..last.start];
            let gap = if between.is_empty() || !between.trim().is_empty() { " " } else { between };
            format!("{},{gap}{key}: {value}{}", &text[..last.value.end], &text[last.value.end..])
        }
        None => format!("{}{key}: {value}{}", &text[..=object.start], &text[object.end - 1..]),
    }
}

/// The members of the object in a range. The text must be valid JSON.
fn members(text: &str, object: Range<usize>) -> Result<Vec<Member>, String> {
    let bytes = text.as_bytes();
    let mut members = Vec::new();
    let mut place = object.start + 1;
    loop {
        while bytes.get(place).is_some_and(|letter| letter.is_ascii_whitespace() || *letter == b',') {
            place += 1;
        }
        if bytes.get(place) != Some(&b'"') {
            return Ok(members);
        }
        let start = place;
        place = end_of(text, place)?;
        let name: String = serde_json::from_str(&text[start..place]).map_err(|error| error.to_string())?;
        while bytes.get(place).is_some_and(|letter| letter.is_ascii_whitespace() || *letter == b':') {
            place += 1;
        }
        let end = end_of(text, place)?;
        members.push(Member { name, start, value: place..end });
        place = end;
    }
}

/// Where the value that begins at `start` ends.
fn end_of(text: &str, start: usize) -> Result<usize, String> {
    let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
    match values.next() {
        Some(Ok(_)) => Ok(start + values.byte_offset()),
        Some(Err(error)) => Err(error.to_string()),
        None => Err("a value is missing".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_changes_and_the_text_around_it_stays() {
        let text = "{\n  \"a\": 1,\n  \"zero\": {\"stage\": 2},\n  \"b\": [1, 2]\n}\n";
        let set = |path: &[&str], value: Value| change(text, path, Edit::Set(&value)).expect("it is sound");
        assert_eq!(set(&["a"], json!(true)), text.replace("\"a\": 1", "\"a\": true"));
        assert_eq!(set(&["zero", "stage"], json!(3)), text.replace("2}", "3}"));
        assert_eq!(set(&["c"], json!("x")), text.replace("[1, 2]", "[1, 2],\n  \"c\": \"x\""));
        assert_eq!(set(&["d", "e"], json!(1)), text.replace("[1, 2]", "[1, 2],\n  \"d\": {\"e\":1}"));
        assert_eq!(set(&["zero", "more"], json!(1)), text.replace("2}", "2, \"more\": 1}"));
        let without = |path: &[&str]| change(text, path, Edit::Remove).expect("it is sound");
        assert_eq!(without(&["a"]), text.replace("\"a\": 1,\n  ", ""));
        assert_eq!(without(&["b"]), text.replace(",\n  \"b\": [1, 2]", ""));
        assert_eq!(without(&["zero", "stage"]), text.replace("{\"stage\": 2}", "{}"));
    }
}
