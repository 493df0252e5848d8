//! `exp`, `log`, `pow`, `log2` and `hypot` computed with twice the digits and rounded once. They
//! replace the functions of the WebAssembly target. Over 2 million random arguments per function
//! they differ from glibc's, which the native program uses, in 0.007 to 0.2 % of the cases; the
//! target's functions differ in 0.06 to 13 %. With these functions, answers agree with the native
//! program's to the last digit, or nearly so.
//!
//! Numbers with twice the digits are sums of two (Dekker, "A floating-point technique for extending
//! the available precision", 1971).

use std::ops::{Add, Mul};

/// A number as the sum of two; the second is less than a rounding error of the first.
#[derive(Clone, Copy)]
struct Double {
    high: f64,
    low: f64,
}

/// The sum of two numbers, exactly. The first must be the larger.
fn sum_of_ordered(large: f64, small: f64) -> Double {
    let high = large + small;
    Double { high, low: small - (high - large) }
}

/// The sum of two numbers, exactly.
fn sum(one: f64, other: f64) -> Double {
    let high = one + other;
    let part = high - one;
    Double { high, low: (one - (high - part)) + (other - part) }
}

/// The product of two numbers, exactly unless it is huge or tiny.
fn product(one: f64, other: f64) -> Double {
    // Halves of 26 bits.
    let halves = |number: f64| {
        let shifted = number * 134_217_729.0;
        let upper = shifted - (shifted - number);
        (upper, number - upper)
    };
    let high = one * other;
    let ((a, b), (c, d)) = (halves(one), halves(other));
    Double { high, low: ((a * c - high) + a * d + b * c) + b * d }
}

impl From<f64> for Double {
    fn from(high: f64) -> Self {
        Self { high, low: 0.0 }
    }
}

impl Add for Double {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (high, low) = (sum(self.high, other.high), sum(self.low, other.low));
        let near = sum_of_ordered(high.high, high.low + low.high);
        sum_of_ordered(near.high, near.low + low.low)
    }
}

impl Mul for Double {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        let exact = product(self.high, other.high);
        sum_of_ordered(exact.high, exact.low + (self.high * other.low + self.low * other.high))
    }
}

/// The inverse of a small whole number.
fn inverse(number: f64) -> Double {
    let high = 1.0 / number;
    let back = product(high, number);
    Double { high, low: ((1.0 - back.high) - back.low) / number }
}

/// The natural logarithm of 2 in parts, of which products with a short number are exact.
const LN_2: [f64; 3] =
    [f64::from_bits(0x3fe6_2e42_fefa_2000), f64::from_bits(0x3d69_ef35_793c_6000), f64::from_bits(0x3ae6_7300_7e5e_d5e8)];

/// Halvings of the argument before the series.
const HALVINGS: i32 = 8;
/// Terms of the series: the next one is below 2^-115.
const TERMS: u32 = 10;

/// e to the power of a number below 710 in size: a number between 0.7 and 1.5, and a power of two.
fn exponential(power: Double) -> (Double, i32) {
    let doublings = (power.high * std::f64::consts::LOG2_E).round_ties_even();
    let taken = |part: f64| Double::from(-doublings * part);
    let rest = power + taken(LN_2[0]) + taken(LN_2[1]) + taken(LN_2[2]);
    let scale = 0.5f64.powi(HALVINGS);
    let small = Double { high: rest.high * scale, low: rest.low * scale };
    // The series of e^x - 1, innermost term first.
    let mut series = Double::from(1.0);
    for term in (2..=TERMS).rev() {
        series = Double::from(1.0) + small * inverse(f64::from(term)) * series;
    }
    let mut grown = small * series;
    for _ in 0..HALVINGS {
        // (1 + x)^2 - 1
        grown = Double { high: 2.0 * grown.high, low: 2.0 * grown.low } + grown * grown;
    }
    (grown + Double::from(1.0), doublings as i32)
}

/// The natural logarithm of a normal positive number.
fn logarithm(number: f64) -> Double {
    let near = libm::log(number);
    let (back, doublings) = exponential(near.into());
    let number = libm::ldexp(number, -doublings);
    // A step of Halley's method, whose error is that of the first value to the third power.
    let error = (number - back.high) - back.low;
    sum_of_ordered(near, error / (0.5 * (number + back.high)))
}

/// The largest size of a power that is neither huge nor tiny.
const LARGEST_POWER: f64 = 700.0;

fn rounded((value, doublings): (Double, i32)) -> f64 {
    libm::ldexp(value.high, doublings)
}

/// e to the power of a number.
#[unsafe(no_mangle)]
extern "C" fn exp(power: f64) -> f64 {
    if power.abs() < LARGEST_POWER { rounded(exponential(power.into())) } else { libm::exp(power) }
}

/// The natural logarithm.
#[unsafe(no_mangle)]
extern "C" fn log(number: f64) -> f64 {
    if number.is_normal() && number > 0.0 { logarithm(number).high } else { libm::log(number) }
}

/// The logarithm to base 2.
#[unsafe(no_mangle)]
extern "C" fn log2(number: f64) -> f64 {
    const LOG2_E: Double = Double { high: std::f64::consts::LOG2_E, low: f64::from_bits(0x3c77_77d0_ffda_0d24) };
    if number.is_normal() && number > 0.0 { (logarithm(number) * LOG2_E).high } else { libm::log2(number) }
}

/// A number to the power of another.
#[unsafe(no_mangle)]
extern "C" fn pow(base: f64, power: f64) -> f64 {
    if base.is_normal() && base > 0.0 && power.is_normal() {
        let power = logarithm(base) * Double::from(power);
        if power.high.abs() < LARGEST_POWER {
            return rounded(exponential(power));
        }
    }
    libm::pow(base, power)
}

/// The length of the hypotenuse.
#[unsafe(no_mangle)]
extern "C" fn hypot(one: f64, other: f64) -> f64 {
    let is_plain = |side: f64| (1e-100..1e100).contains(&side.abs());
    if !(is_plain(one) && is_plain(other)) {
        return libm::hypot(one, other);
    }
    let square = product(one, one) + product(other, other);
    let near = square.high.sqrt();
    let back = product(near, near);
    near + ((square.high - back.high) - back.low + square.low) / (2.0 * near)
}
