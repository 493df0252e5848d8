//! Numbers of options as people write them: with separators between thousands, and prices with a
//! currency. This module must not know what is counted.

/// Reads a count, such as `1024`, `1_024` or `1,024`.
pub fn count(text: &str) -> Result<usize, String> {
    let count = without_separators(text.trim()).and_then(|digits| digits.parse().ok());
    count.ok_or_else(|| "hint: write a whole number, such as `1024`, `1_024` or `1,024`".into())
}

/// Reads a price, such as `98.32`, `$98.32`, `98.32 EUR` or `1,032.50`. The currency is that of the
/// topology file, so which one stands there makes no difference.
pub fn price(text: &str) -> Result<f64, String> {
    let is_currency = |text: &str| {
        let is_code = text.len() == 3 && text.chars().all(|letter| letter.is_ascii_uppercase());
        text.is_empty() || is_code || ["$", "\u{20ac}", "\u{a3}", "\u{a5}"].contains(&text)
    };
    let is_of_number = |character: char| character.is_ascii_digit() || character == '.';
    let ends = text.find(is_of_number).zip(text.rfind(is_of_number));
    let price = ends.and_then(|(first, last)| {
        let (before, number, after) = (text[..first].trim(), &text[first..=last], text[last + 1..].trim());
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let is_one = is_currency(before) && is_currency(after) && (before.is_empty() || after.is_empty());
        let whole = without_separators(if whole.is_empty() { "0" } else { whole })?;
        let is_fraction = fraction.chars().all(|digit| digit.is_ascii_digit());
        format!("{whole}.{fraction}").parse::<f64>().ok().filter(|price| is_one && is_fraction && price.is_finite())
    });
    price.ok_or_else(|| "hint: write a number, such as `98.32`, `$98.32` or `98.32 EUR`".into())
}

/// The digits of a whole number. Commas stand before every third digit from the end, underscores
/// anywhere between digits.
fn without_separators(text: &str) -> Option<String> {
    let groups: Vec<&str> = text.split(',').collect();
    let is_digits = |text: &str| !text.is_empty() && text.chars().all(|digit| digit.is_ascii_digit());
    let are_thousands = groups.len() == 1
        || (groups[0].len() <= 3
            && groups[1..].iter().all(|group| group.len() == 3)
            && groups.iter().all(|group| is_digits(group)));
    (are_thousands && groups.concat().split('_').all(is_digits)).then(|| groups.concat().replace('_', ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_may_have_separators_between_digits() {
        for text in ["1048576", "1_048_576", "1,048,576", " 1048576 "] {
            assert_eq!(count(text), Ok(1_048_576), "{text}");
        }
        for text in ["", "_1", "1_", "1__0", "1,02", "1,0245", ",024", "1,024_5", "-1", "1.5", "ten", "99999999999999999999"] {
            assert!(count(text).is_err_and(|error| error.starts_with("hint: ")), "{text}");
        }
    }

    #[test]
    fn prices_may_have_a_currency() {
        for text in ["1032.5", "$1032.5", "1032.50 USD", "EUR 1,032.5", "\u{20ac}1_032.5", "1,032.50\u{a3}"] {
            assert_eq!(price(text), Ok(1032.5), "{text}");
        }
        assert_eq!(price(".5"), Ok(0.5));
        for text in ["", "$", "-3", "$3 USD", "3 dollars", "1,03.5", "3.5.5", "1e3", "inf", "3 \u{20ac} \u{20ac}"] {
            assert!(price(text).is_err(), "{text}");
        }
    }
}
