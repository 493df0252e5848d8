//! Numbers as people write them: with separators between thousands, and prices with a currency. It
//! must not know what is counted.

use crate::UnitError;
use crate::separators::{plain, without_separators};
use std::str::FromStr;

/// Reads a count, such as `1024`, `1_024` or `1,024`.
///
/// # Errors
/// [`UnitError::NotACount`] if the text is not a whole number of at least 0.
pub fn count(text: &str) -> Result<usize, UnitError> {
    let digits = without_separators(text.trim());
    digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| UnitError::NotACount { text: text.trim().into() })
}

/// A price, such as `98.32`, `$98.32`, `98.32 EUR` or `1,032.50`.
#[derive(Debug, Clone, PartialEq)]
pub struct Price {
    /// The amount, from 0 to 1e12.
    pub amount: f64,
    /// The currency, if the text names one: a code such as `USD`, or a sign that several currencies
    /// share.
    pub currency: Option<String>,
}

/// The largest price: beyond any hour of any cluster in any currency, so that the price of a long
/// run can still be written.
const MOST: f64 = 1e12;

/// Signs of currencies. The dollar is assumed to be that of the United States.
const SIGNS: [(&str, &str); 4] = [("$", "USD"), ("\u{20ac}", "EUR"), ("\u{a3}", "GBP"), ("\u{a5}", "\u{a5}")];

impl FromStr for Price {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let is_of_number = |character: char| character.is_ascii_digit() || character == '.';
        let price = text.find(is_of_number).zip(text.rfind(is_of_number)).and_then(|(first, last)| {
            let (before, after) = (currency(&text[..first])?, currency(&text[last + 1..])?);
            let currency = match (before, after) {
                (Some(_), Some(_)) => return None,
                (before, after) => before.or(after),
            };
            let amount: f64 = plain(&text[first..=last])?.parse().ok()?;
            (amount <= MOST).then_some(Self { amount, currency })
        });
        price.ok_or_else(|| UnitError::NotAPrice { text: text.trim().into() })
    }
}

/// The currency that `text` names. The inner value is `None` if the text is empty; the outer one if
/// it names no currency.
fn currency(text: &str) -> Option<Option<String>> {
    let text = text.trim();
    if text.is_empty() {
        return Some(None);
    }
    let is_code = text.len() == 3 && text.chars().all(|letter| letter.is_ascii_uppercase());
    let named = SIGNS.iter().find(|sign| sign.0 == text).map(|sign| sign.1).or(is_code.then_some(text));
    named.map(|code| Some(code.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bytes;
    use crate::diagnostic::one_line;

    #[test]
    fn counts_may_have_separators_between_digits() {
        for text in ["1048576", "1_048_576", "1,048,576", " 1048576 "] {
            assert_eq!(count(text), Ok(1_048_576), "{text}");
        }
        for text in ["", "_1", "1_", "1__0", "1,02", "1,0245", ",024", "1,024_5", "-1", "1.5", "ten", "99999999999999999999"] {
            assert!(count(text).is_err_and(|error| one_line(&error).contains("hint: ")), "{text}");
        }
    }

    #[test]
    fn prices_may_have_a_currency() {
        let cases = [
            ("1032.5", None),
            ("$1032.5", Some("USD")),
            ("1032.50 USD", Some("USD")),
            ("EUR 1,032.5", Some("EUR")),
            ("\u{20ac}1_032.5", Some("EUR")),
            ("1,032.50\u{a3}", Some("GBP")),
            ("\u{a5} 1,032.50", Some("\u{a5}")),
            (" 1.0325e3 ", None),
        ];
        for (text, currency) in cases {
            assert_eq!(text.parse(), Ok(Price { amount: 1032.5, currency: currency.map(str::to_owned) }), "{text}");
        }
        assert_eq!(".5".parse::<Price>().map(|price| price.amount), Ok(0.5));
        assert_eq!("0".parse::<Price>().map(|price| price.amount), Ok(0.0));
        for text in
            ["", "$", "-3", "$3 USD", "3 dollars", "1,03.5", "3.5.5", "1e999", "1e308", "inf", "3 \u{20ac} \u{20ac}", "3 and 4"]
        {
            let error = one_line(&text.parse::<Price>().expect_err("it is wrong"));
            assert!(error.contains("is not a price; hint: "), "{text}: {error}");
        }
    }

    #[test]
    fn quantities_may_have_separators_between_thousands() {
        for text in ["1,024.5GB", "1_024.5 GB", "1024.5GB", "1_024.500_0GB"] {
            assert_eq!(text.parse(), Ok(Bytes::new(1_024_500_000_000)), "{text}");
        }
        for text in ["1,02GB", ",024GB", "1,GB", "-1GB", "1._5GB", "1.5_GB", "1.5__0GB"] {
            assert!(matches!(text.parse::<Bytes>(), Err(UnitError::NotANumber { .. })), "{text}");
        }
    }
}
