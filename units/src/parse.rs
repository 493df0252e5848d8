//! Quantities from text: a number, then one of the quantity's units. A bare number is refused,
//! because in `memory: 30` it could mean gigabytes or gibibytes.

use crate::separators::plain;
use miette::Diagnostic;
use thiserror::Error;

/// Spelling of a unit, and its size in the quantity's base unit.
pub(crate) type Unit = (&'static str, f64);

/// Why a text is not a quantity of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, Error, Diagnostic)]
pub enum UnitError {
    /// A number without a unit.
    #[error("`{text}` is a bare number where {quantity} is wanted")]
    #[diagnostic(code(quantity::missing_unit), help("give it a unit, such as `{text}{example}`"))]
    MissingUnit {
        /// The text.
        text: String,
        /// The expected kind of quantity, such as "a size in bytes".
        quantity: &'static str,
        /// An example of a unit of this quantity.
        example: &'static str,
    },
    /// A unit that this kind of quantity does not have.
    #[error("`{text}` is not {quantity}: unknown unit `{unit}`")]
    #[diagnostic(code(quantity::unknown_unit), help("the units are {known}"))]
    UnknownUnit {
        /// The text.
        text: String,
        /// The part of the text that should be a unit.
        unit: String,
        /// The expected kind of quantity.
        quantity: &'static str,
        /// The units of the quantity.
        known: String,
    },
    /// No number, or one that is negative or not finite.
    #[error("`{text}` is not {quantity}")]
    #[diagnostic(code(quantity::not_a_number), help("write a number and a unit, such as `4{example}`"))]
    NotANumber {
        /// The text.
        text: String,
        /// The expected kind of quantity.
        quantity: &'static str,
        /// An example of a unit of this quantity.
        example: &'static str,
    },
    /// Not a whole number of at least 0.
    #[error("`{text}` is not a whole number")]
    #[diagnostic(code(quantity::not_a_count), help("write one such as `1024`, `1_024` or `1,024`"))]
    NotACount {
        /// The text.
        text: String,
    },
    /// Not a number from 0 to 1e12 with at most one currency.
    #[error("`{text}` is not a price")]
    #[diagnostic(code(quantity::not_a_price), help("write a number, such as `98.32`, `$98.32` or `98.32 EUR`, of at most 1e12"))]
    NotAPrice {
        /// The text.
        text: String,
    },
}

/// Reads `text` as a number and one of `units`. Error messages give the first unit as an example.
pub(crate) fn parse(text: &str, quantity: &'static str, units: &[Unit]) -> Result<f64, UnitError> {
    let example = units.first().map_or("", |unit| unit.0);
    let trimmed = text.trim();
    let split =
        trimmed.find(|character: char| character.is_alphabetic() && !is_exponent(trimmed, character)).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let value: f64 = match plain(number.trim()).and_then(|number| number.parse().ok()) {
        Some(value) if f64::is_finite(value) && value >= 0.0 => value,
        _ => return Err(UnitError::NotANumber { text: trimmed.into(), quantity, example }),
    };
    let unit = unit.trim();
    if unit.is_empty() {
        return Err(UnitError::MissingUnit { text: trimmed.into(), quantity, example });
    }
    match units.iter().find(|known| known.0.eq_ignore_ascii_case(unit) && same_magnitude(known.0, unit)) {
        Some(known) => Ok(value * known.1),
        None => Err(UnitError::UnknownUnit {
            text: trimmed.into(),
            unit: unit.into(),
            quantity,
            known: units.iter().map(|known| format!("`{}`", known.0)).collect::<Vec<_>>().join(", "),
        }),
    }
}

/// Whether `written` can mean the unit `known`, which it equals except for case. Case matters where
/// it distinguishes bits from bytes (`Gb/s`, `GB/s`) or a milliwatt from a megawatt. Elsewhere
/// `gib` means `GiB`.
fn same_magnitude(known: &str, written: &str) -> bool {
    let confusable = |unit: &str| {
        let unit = unit.to_ascii_lowercase();
        ["b", "b/s", "bps"].iter().any(|end| unit.strip_suffix(end).is_some_and(|prefix| matches!(prefix, "k" | "m" | "g" | "t")))
    };
    if known.eq_ignore_ascii_case("mw") {
        return known == written;
    }
    !confusable(known) || known.contains('B') == written.contains('B')
}

/// Whether `character` is the exponent's `e` of a number such as `1e9`: its first occurrence in
/// `text` is before a digit or a sign.
fn is_exponent(text: &str, character: char) -> bool {
    if !matches!(character, 'e' | 'E') {
        return false;
    }
    text.find(character).is_some_and(|position| {
        text[position + 1..].starts_with(|next: char| next.is_ascii_digit() || next == '-' || next == '+')
    })
}
