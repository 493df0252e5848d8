//! Reading quantities from text: a number, then one of the units the quantity knows.
//!
//! A bare number is refused, because `memory: 30` has cost people days: thirty of what?

use thiserror::Error;

/// A unit's spelling and what one of it is in the quantity's SI base unit.
pub(crate) type Unit = (&'static str, f64);

/// Why a text is not a quantity of the kind that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UnitError {
    /// A number without its unit.
    #[error("`{text}` is a bare number where {quantity} is wanted; hint: give it a unit, such as `{text}{example}`")]
    MissingUnit {
        /// What was written.
        text: String,
        /// The kind of quantity that was wanted, such as "a size in bytes".
        quantity: &'static str,
        /// A unit that would do.
        example: &'static str,
    },
    /// A unit of another quantity, or of none.
    #[error("`{text}` is not {quantity}: unknown unit `{unit}`; hint: the units are {known}")]
    UnknownUnit {
        /// What was written.
        text: String,
        /// The part of it that should be a unit.
        unit: String,
        /// The kind of quantity that was wanted.
        quantity: &'static str,
        /// The units that would do.
        known: String,
    },
    /// Not a number at all, negative, or not finite.
    #[error("`{text}` is not {quantity}; hint: write a number and a unit, such as `4{example}`")]
    NotANumber {
        /// What was written.
        text: String,
        /// The kind of quantity that was wanted.
        quantity: &'static str,
        /// A unit that would do.
        example: &'static str,
    },
}

/// Reads `text` as a number and one of `units`; the first unit is the one that messages give as an example.
pub(crate) fn parse(text: &str, quantity: &'static str, units: &[Unit]) -> Result<f64, UnitError> {
    let example = units.first().map_or("", |unit| unit.0);
    let trimmed = text.trim();
    let split =
        trimmed.find(|character: char| character.is_alphabetic() && !is_exponent(trimmed, character)).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let value: f64 = match number.trim().replace('_', "").parse() {
        Ok(value) if f64::is_finite(value) && value >= 0.0 => value,
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

/// Bits and bytes differ by a case only (`Gb/s`, `GB/s`), so there the case counts; elsewhere `gib` is `GiB`.
fn same_magnitude(known: &str, written: &str) -> bool {
    let confusable =
        |unit: &str| matches!(unit.to_ascii_lowercase().as_str(), "gb/s" | "mb/s" | "kb/s" | "tb/s" | "gb" | "mb" | "kb");
    // A milliwatt is no megawatt.
    if known.eq_ignore_ascii_case("mw") {
        return known == written;
    }
    !confusable(known) || known.contains('B') == written.contains('B')
}

/// Whether `character` can only be the `e` of `1e9`: an `e` straight before a digit or a sign.
fn is_exponent(text: &str, character: char) -> bool {
    if !matches!(character, 'e' | 'E') {
        return false;
    }
    text.find(character).is_some_and(|position| {
        text[position + 1..].starts_with(|next: char| next.is_ascii_digit() || next == '-' || next == '+')
    })
}
