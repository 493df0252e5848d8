//! Scalars of a topology file with their places, and quantities written in units that make them
//! round.

use crate::error::{Place, TopologyError, TopologyProblem};
use crate::yaml::place;
use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds, UnitError, Watts};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

/// A value with its place in the file. The place is `None` if the value passed through one of
/// serde's buffers.
#[derive(Debug, Clone, Default)]
pub(crate) struct At<T> {
    pub(crate) value: T,
    pub(crate) place: Option<Place>,
}

impl<T> From<T> for At<T> {
    fn from(value: T) -> Self {
        At { value, place: None }
    }
}

/// Equality ignores places.
impl<T: PartialEq> PartialEq for At<T> {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for At<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = serde_saphyr::Spanned::<T>::deserialize(deserializer)?;
        Ok(At { value: spanned.value, place: place(&spanned.referenced) })
    }
}

impl<T: Serialize> Serialize for At<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.value.serialize(serializer)
    }
}

impl<T: JsonSchema> JsonSchema for At<T> {
    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }

    fn inline_schema() -> bool {
        T::inline_schema()
    }
}

/// A scalar as written. It is parsed where it is used, so that an error message can name the field
/// and the unit.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Scalar(pub(crate) String);

impl<T: fmt::Display> From<T> for Scalar {
    fn from(value: T) -> Self {
        Scalar(value.to_string())
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Scalar;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a single value")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Scalar, E> {
                Ok(text.into())
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Scalar, E> {
                Ok(number.into())
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Scalar, E> {
                Ok(number.into())
            }
            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Scalar, E> {
                Ok(number.into())
            }
        }
        // YAML delivers any scalar as text on request. JSON and serde's buffers deliver numbers as
        // numbers.
        deserializer.deserialize_str(Visitor)
    }
}

impl Serialize for Scalar {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Ok(number) = self.0.parse::<u64>() {
            serializer.serialize_u64(number)
        } else if let Some(number) = self.0.parse::<f64>().ok().filter(|number| number.is_finite()) {
            serializer.serialize_f64(number)
        } else {
            serializer.serialize_str(&self.0)
        }
    }
}

impl JsonSchema for Scalar {
    fn schema_name() -> Cow<'static, str> {
        "Scalar".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["string", "number"]})
    }

    fn inline_schema() -> bool {
        true
    }
}

/// One scalar, or a list of them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Scalars {
    One(Scalar),
    List(Vec<At<Scalar>>),
}

impl Scalars {
    pub(crate) fn one(value: impl fmt::Display) -> Self {
        Scalars::One(value.into())
    }

    pub(crate) fn list<T: fmt::Display>(values: &[T]) -> Self {
        Scalars::List(values.iter().map(|value| Scalar::from(value).into()).collect())
    }

    /// Makes one scalar if `values` has a single value, else a list.
    pub(crate) fn one_or_list<T: fmt::Display>(values: &[T]) -> Self {
        if let [one] = values { Self::one(one) } else { Self::list(values) }
    }
}

impl JsonSchema for Scalars {
    fn schema_name() -> Cow<'static, str> {
        "Scalars".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}})
    }

    fn inline_schema() -> bool {
        true
    }
}

// Not derived with `untagged`, which would lose the places of inner values.
impl<'de> Deserialize<'de> for Scalars {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Scalars;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a single value or a list of them")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Scalars, E> {
                Ok(Scalars::one(text))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Scalars, E> {
                Ok(Scalars::one(number))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Scalars, E> {
                Ok(Scalars::one(number))
            }
            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Scalars, E> {
                Ok(Scalars::one(number))
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, list: A) -> Result<Scalars, A::Error> {
                Deserialize::deserialize(de::value::SeqAccessDeserializer::new(list)).map(Scalars::List)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl Serialize for Scalars {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Scalars::One(one) => one.serialize(serializer),
            Scalars::List(list) => list.serialize(serializer),
        }
    }
}

impl At<Scalars> {
    /// Returns each value. A value without a place gets the list's place.
    pub(crate) fn each(&self) -> Vec<At<Scalar>> {
        match &self.value {
            Scalars::One(one) => vec![At { value: one.clone(), place: self.place }],
            Scalars::List(list) => {
                list.iter().map(|item| At { value: item.value.clone(), place: item.place.or(self.place) }).collect()
            }
        }
    }
}

/// The largest count in a topology file. It is larger than any count in the largest clusters, and
/// the product of two such counts is an exact `f64`.
const MOST: usize = 1 << 24;

impl At<Scalar> {
    /// Parses a quantity above zero.
    pub(crate) fn positive<Q>(&self, field: &str) -> Result<Q, TopologyError>
    where
        Q: FromStr<Err = UnitError> + Default + PartialOrd,
    {
        let quantity: Q = self.quantity(field)?;
        if quantity > Q::default() {
            return Ok(quantity);
        }
        Err(TopologyError::invalid(self.place, format!("`{field}` is `{}`", self.value.0), "it must be above zero"))
    }

    /// Parses a quantity that may be zero.
    pub(crate) fn quantity<Q: FromStr<Err = UnitError>>(&self, field: &str) -> Result<Q, TopologyError> {
        self.value.0.parse().map_err(|reason: UnitError| {
            let Mistake { message, hint } = Mistake::of(&reason);
            TopologyError::at(self.place, TopologyProblem::Quantity { field: field.into(), reason: message, hint })
        })
    }

    /// Parses a count of at least 1 and at most [`MOST`].
    pub(crate) fn count(&self, field: &str) -> Result<usize, TopologyError> {
        let text = self.value.0.trim();
        match foretell_units::count(text) {
            Ok(0) => Err(TopologyError::invalid(self.place, format!("`{field}` is 0"), "write how many there are, at least 1")),
            Ok(count) if count <= MOST => Ok(count),
            Ok(_) => {
                let what = format!("`{field}` is `{text}`, and a count is at most {MOST}");
                Err(TopologyError::invalid(self.place, what, "write how many there are"))
            }
            Err(_) => {
                let what = format!("`{field}` is `{text}`, which is not a whole number below 2^64");
                Err(TopologyError::invalid(self.place, what, "write how many there are, such as `8`"))
            }
        }
    }

    /// Parses a whole number that may be 0, such as an index or a seed.
    pub(crate) fn whole(&self, field: &str) -> Result<u64, TopologyError> {
        let text = self.value.0.trim();
        text.replace('_', "").parse().map_err(|_| {
            let what = format!("`{field}` is `{text}`, which is not a whole number");
            TopologyError::invalid(self.place, what, "write a whole number, such as `0`")
        })
    }

    /// Parses a plain number of at least `least`.
    pub(crate) fn number(&self, field: &str, least: f64) -> Result<f64, TopologyError> {
        match self.value.0.trim().parse() {
            Ok(number) if f64::is_finite(number) && number >= least => Ok(number),
            _ => Err(TopologyError::invalid(
                self.place,
                format!("`{field}` is `{}`", self.value.0),
                format!("write a plain number, at least {least}"),
            )),
        }
    }
}

/// A quantity that can be written in several units.
pub(crate) trait Written: Copy + PartialEq + FromStr<Err = UnitError> {
    /// Units, largest first, with their size in the base unit.
    const UNITS: &'static [(&'static str, f64)];
    /// Returns the value in the base unit, and its exact text.
    fn base(self) -> (f64, String);
}

/// Writes a quantity in the largest unit in which its text is short, else exactly in the base unit.
/// Both read back bit for bit.
pub(crate) fn written<Q: Written>(quantity: Q) -> At<Scalar> {
    const SHORT: usize = 7;
    let (value, exact) = quantity.base();
    let round = Q::UNITS.iter().filter(|unit| value >= unit.1).find_map(|unit| {
        let number = format!("{}", value / unit.1);
        let text = format!("{number}{}", unit.0);
        (number.len() <= SHORT && text.parse() == Ok(quantity)).then_some(text)
    });
    At::from(Scalar(round.unwrap_or(exact)))
}

macro_rules! written {
    ($($quantity:ident $units:expr;)*) => {
        $(impl Written for $quantity {
            const UNITS: &'static [(&'static str, f64)] = $units;
            fn base(self) -> (f64, String) {
                (self.value(), self.exact())
            }
        })*
    };
}
written! {
    Bytes &[("GiB", 1073741824.0), ("MiB", 1048576.0), ("GB", 1e9)];
    BytesPerSecond &[("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)];
    FlopsPerSecond &[("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)];
    Seconds &[("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)];
    Watts &[("W", 1.0)];
}
