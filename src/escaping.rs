//! Text without characters that control a terminal.

use std::borrow::Cow;

/// The text without characters that control a terminal or reorder what it shows. They may come from
/// a file: a name, or a value that an error repeats.
pub fn escaped(text: &str) -> Cow<'_, str> {
    let is_plain = |character: char| match character {
        '\n' | '\t' => true,
        '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => false,
        character => !character.is_control(),
    };
    if text.chars().all(is_plain) {
        return text.into();
    }
    // JSON has the same escape, so an escaped document stays valid. All of these characters have
    // four hexadecimal digits.
    let escape =
        |character: char| if is_plain(character) { character.to_string() } else { format!("\\u{:04x}", u32::from(character)) };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn characters_that_control_a_terminal_are_escaped() {
        assert_eq!(escaped("two\nlines, a\ttab and µs"), "two\nlines, a\ttab and µs");
        assert_eq!(escaped("\u{1b}[2Jred\r\u{9b}\u{202e}"), r"\u001b[2Jred\u000d\u009b\u202e");
        let json = serde_json::to_string("\u{9b}\u{202e}").expect("a text is JSON");
        assert!(serde_json::from_str::<String>(&escaped(&json)).is_ok(), "an escaped document stays one");
    }
}
