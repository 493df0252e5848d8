//! The quantities: one type for each kind, with only the arithmetic that has a physical meaning.

use crate::parse::{Unit, UnitError, parse};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};
use std::str::FromStr;

const SIZES: &[Unit] = &[
    ("GiB", 1024.0 * 1024.0 * 1024.0),
    ("MiB", 1024.0 * 1024.0),
    ("KiB", 1024.0),
    ("TiB", 1024.0 * 1024.0 * 1024.0 * 1024.0),
    ("GB", 1e9),
    ("MB", 1e6),
    ("kB", 1e3),
    ("TB", 1e12),
    ("B", 1.0),
];
const RATES: &[Unit] = &[
    ("GB/s", 1e9),
    ("MB/s", 1e6),
    ("kB/s", 1e3),
    ("TB/s", 1e12),
    ("B/s", 1.0),
    ("GiB/s", 1024.0 * 1024.0 * 1024.0),
    ("MiB/s", 1024.0 * 1024.0),
    ("Gbit/s", 1e9 / 8.0),
    ("Mbit/s", 1e6 / 8.0),
    ("kbit/s", 1e3 / 8.0),
    ("Tbit/s", 1e12 / 8.0),
    ("Gb/s", 1e9 / 8.0),
    ("Tb/s", 1e12 / 8.0),
    ("Mb/s", 1e6 / 8.0),
    ("Gbps", 1e9 / 8.0),
    ("Tbps", 1e12 / 8.0),
    ("Mbps", 1e6 / 8.0),
    ("GBps", 1e9),
    ("TBps", 1e12),
    ("MBps", 1e6),
];
const TIMES: &[Unit] = &[("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("ps", 1e-12), ("min", 60.0), ("h", 3600.0)];
const WORK: &[Unit] = &[("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("PFLOP", 1e15), ("FLOP", 1.0)];
const SPEEDS: &[Unit] = &[
    ("TFLOP/s", 1e12),
    ("GFLOP/s", 1e9),
    ("MFLOP/s", 1e6),
    ("PFLOP/s", 1e15),
    ("FLOP/s", 1.0),
    ("TFLOPS", 1e12),
    ("GFLOPS", 1e9),
];
const ENERGIES: &[Unit] = &[("J", 1.0), ("kJ", 1e3), ("MJ", 1e6), ("GJ", 1e9), ("Wh", 3600.0), ("kWh", 3.6e6), ("MWh", 3.6e9)];
const POWERS: &[Unit] = &[("W", 1.0), ("kW", 1e3), ("MW", 1e6)];

/// Defines a quantity: an `f64` in the base unit. `$wanted` is its kind in error messages, `$units`
/// are the units that are read, and `$shown` those that are printed, largest first.
macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $wanted:literal, $units:expr, $shown:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
        pub struct $name(f64);

        impl $name {
            /// Zero.
            pub const ZERO: Self = Self(0.0);

            /// Makes the quantity of `value` base units.
            pub const fn new(value: f64) -> Self {
                Self(value)
            }

            /// Returns the number of base units.
            pub const fn value(self) -> f64 {
                self.0
            }

            /// Returns the larger of two.
            pub fn max(self, other: Self) -> Self {
                Self(self.0.max(other.0))
            }

            /// Returns the smaller of two.
            pub fn min(self, other: Self) -> Self {
                Self(self.0.min(other.0))
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl Mul<f64> for $name {
            type Output = Self;
            fn mul(self, factor: f64) -> Self {
                Self(self.0 * factor)
            }
        }

        impl Div<f64> for $name {
            type Output = Self;
            fn div(self, divisor: f64) -> Self {
                Self(self.0 / divisor)
            }
        }

        impl Div for $name {
            type Output = f64;
            fn div(self, other: Self) -> f64 {
                self.0 / other.0
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
                Self(parts.map(|part| part.0).sum())
            }
        }

        impl FromStr for $name {
            type Err = UnitError;
            fn from_str(text: &str) -> Result<Self, UnitError> {
                parse(text, $wanted, $units).map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.pad(&shown(self.0, $shown))
            }
        }

        text_serde!($name, $wanted, $units);
    };
}

/// Quantities are text in files (`200Gbit/s`), so that a reader sees the unit. A bare number is
/// refused.
macro_rules! text_serde {
    ($name:ident, $wanted:expr, $units:expr) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.exact())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                // YAML returns a bare number as text, so `30` reaches `parse`, which refuses it for
                // lack of a unit.
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(de::Error::custom)
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({"type": "string", "description": format!("{}: a number and a unit, such as `4{}`", $wanted, $units[0].0)})
            }
        }
    };
}

quantity!(
    /// A duration, measured or modelled. Simulated clocks use [`Picoseconds`] instead.
    Seconds, "a time", TIMES, &[("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)]
);
quantity!(
    /// A rate of data in one direction, in bytes a second.
    BytesPerSecond, "a data rate", RATES, &[("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)]
);
quantity!(
    /// A number of floating-point operations. A multiply-add counts as two.
    Flops, "an amount of floating-point work", WORK,
    &[("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("FLOP", 1.0)]
);
quantity!(
    /// Floating-point operations a second.
    FlopsPerSecond, "a floating-point rate", SPEEDS,
    &[("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("FLOP/s", 1.0)]
);
quantity!(
    /// Electrical power in watts.
    Watts, "a power", POWERS, &[("MW", 1e6), ("kW", 1e3), ("W", 1.0)]
);

quantity!(
    /// Energy in joules.
    Joules, "an energy", ENERGIES,
    &[("TJ", 1e12), ("GJ", 1e9), ("MJ", 1e6), ("kJ", 1e3), ("J", 1.0), ("mJ", 1e-3)]
);

macro_rules! exact {
    ($($name:ident $unit:literal),*) => {
        $(impl $name {
            /// Returns the value in the base unit, with as many digits as are necessary to read
            /// back the same value.
            pub fn exact(self) -> String {
                format!("{}{}", self.0, $unit)
            }
        })*
    };
}
exact!(Seconds "s", BytesPerSecond "B/s", Flops "FLOP", FlopsPerSecond "FLOP/s", Watts "W", Joules "J");

/// A size in whole bytes, since memory is planned to the byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(u64);

impl Bytes {
    /// Zero bytes.
    pub const ZERO: Self = Self(0);

    /// Makes the size of `count` bytes.
    pub const fn new(count: u64) -> Self {
        Self(count)
    }

    /// Returns the number of bytes.
    pub const fn count(self) -> u64 {
        self.0
    }

    /// Returns the number of bytes as a real number, for rates and ratios.
    pub const fn value(self) -> f64 {
        self.0 as f64
    }

    /// Returns the size in bytes as text, which reads back as the same size.
    pub fn exact(self) -> String {
        format!("{}B", self.0)
    }
}

impl FromStr for Bytes {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse(text, "a size in bytes", SIZES).map(|count| Self(count.round() as u64))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = &[("TiB", 1024f64.powi(4)), ("GiB", 1024f64.powi(3)), ("MiB", 1024f64.powi(2)), ("KiB", 1024.0), ("B", 1.0)];
        formatter.pad(&shown(self.0 as f64, units))
    }
}

text_serde!(Bytes, "a size in bytes", SIZES);

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, factor: u64) -> Self {
        Self(self.0 * factor)
    }
}

impl Div for Bytes {
    type Output = f64;
    fn div(self, other: Self) -> f64 {
        self.value() / other.value()
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        Self(parts.map(|part| part.0).sum())
    }
}

/// An instant or a duration of simulated time in whole picoseconds, so that a simulation is exact
/// and equal on every machine. The range is 213 days.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Picoseconds(pub u64);

impl Picoseconds {
    /// The start of every simulation.
    pub const ZERO: Self = Self(0);

    /// The latest instant.
    pub const MAX: Self = Self(u64::MAX);

    /// Returns the time from `other` to `self`, or zero if `other` is later.
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Add for Picoseconds {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Picoseconds {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Picoseconds {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::ZERO, Add::add)
    }
}

impl From<Seconds> for Picoseconds {
    fn from(duration: Seconds) -> Self {
        Self((duration.0 * 1e12).round() as u64)
    }
}

impl From<Picoseconds> for Seconds {
    fn from(duration: Picoseconds) -> Self {
        Self(duration.0 as f64 * 1e-12)
    }
}

impl fmt::Display for Picoseconds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Seconds::from(*self), formatter)
    }
}

macro_rules! rates {
    ($($amount:ident / $rate:ident = $quotient:ident),*) => {
        $(
            impl Div<$rate> for $amount {
                type Output = $quotient;
                fn div(self, rate: $rate) -> $quotient {
                    $quotient::new(self.value() / rate.value())
                }
            }
            impl Div<Seconds> for $amount {
                type Output = $rate;
                fn div(self, duration: Seconds) -> $rate {
                    $rate::new(self.value() / duration.value())
                }
            }
        )*
    };
}
rates!(Bytes / BytesPerSecond = Seconds, Flops / FlopsPerSecond = Seconds, Joules / Watts = Seconds);

impl Mul<Seconds> for Watts {
    type Output = Joules;
    fn mul(self, duration: Seconds) -> Joules {
        Joules::new(self.value() * duration.value())
    }
}

/// Prints `value` with three digits, in the largest of `units` in which it is at least 1.
fn shown(value: f64, units: &[Unit]) -> String {
    let (name, size) = units.iter().find(|unit| value.abs() >= unit.1 * 0.999_5).or(units.last()).copied().unwrap_or(("", 1.0));
    let scaled = value / size;
    let digits = if scaled.abs() >= 99.95 {
        0
    } else if scaled.abs() >= 9.995 {
        1
    } else {
        2
    };
    let text = format!("{scaled:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_rates_are_read_with_their_units() {
        assert_eq!("30GiB".parse::<Bytes>(), Ok(Bytes::new(30 << 30)));
        assert_eq!("1.5 GB".parse::<Bytes>(), Ok(Bytes::new(1_500_000_000)));
        for spelling in ["25Gbit/s", "25 Gb/s", "25Gbps", "25gbps", "0.025Tbps", "25000Mb/s", "3.125GBps"] {
            assert_eq!(spelling.parse::<BytesPerSecond>(), Ok(BytesPerSecond::new(3.125e9)), "{spelling}");
        }
        assert_eq!("8Gb/s".parse::<BytesPerSecond>(), Ok(BytesPerSecond::new(1e9)));
        assert_eq!("8GB/s".parse::<BytesPerSecond>(), Ok(BytesPerSecond::new(8e9)));
        assert_eq!("1e3MB/s".parse::<BytesPerSecond>(), Ok(BytesPerSecond::new(1e9)));
        assert_eq!("312TFLOP/s".parse::<FlopsPerSecond>(), Ok(FlopsPerSecond::new(312e12)));
        assert_eq!("5us".parse::<Seconds>(), Ok(Seconds::new(5.0 * 1e-6)));
    }

    #[test]
    fn a_bare_number_is_refused_with_a_hint() {
        let error = crate::diagnostic::one_line(&"30".parse::<Bytes>().expect_err("no unit"));
        assert_eq!(error, "`30` is a bare number where a size in bytes is wanted; hint: give it a unit, such as `30GiB`");
        assert!("5GB".parse::<Seconds>().is_err());
        assert!("-1GB".parse::<Bytes>().is_err());
        assert!("NaNs".parse::<Seconds>().is_err());
    }

    #[test]
    fn the_exact_text_of_a_quantity_reads_back_unchanged() {
        for seconds in [0.0, 1e-9, 0.1 + 0.2, 1e9] {
            assert_eq!(Seconds::new(seconds).exact().parse(), Ok(Seconds::new(seconds)));
        }
        assert_eq!(Bytes::new(u64::from(u32::MAX)).exact().parse(), Ok(Bytes::new(u64::from(u32::MAX))));
    }

    #[test]
    fn quantities_print_in_the_unit_that_people_would_choose() {
        assert_eq!(Seconds::new(0.0123).to_string(), "12.3 ms");
        assert_eq!(Bytes::new(80 << 30).to_string(), "80 GiB");
        assert_eq!(Seconds::ZERO.to_string(), "0 ns");
        assert_eq!(Picoseconds(1_500_000).to_string(), "1.5 us");
    }
}
