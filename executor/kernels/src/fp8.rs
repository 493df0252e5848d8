//! Conversion between single precision and the fp8 formats E4M3 and E5M2.
//!
//! The results equal those of NVIDIA's GPUs bit for bit (`cvt.rn.satfinite` in the PTX manual):
//! narrowing rounds to nearest, ties to even. Values beyond the format's range and infinities
//! become the largest finite number of their sign, and NaN stays NaN.

use foretell_models::EightBits;

/// The code that every NaN becomes. The formats have other NaN codes, too.
const NAN: u8 = 0x7f;

/// The parameters of a format.
struct FormatParameters {
    /// Bits of the fraction.
    fraction_bits: u32,
    /// The exponent's bias.
    bias: u32,
    /// The code of the largest finite number.
    largest: u32,
}

const fn parameters(format: EightBits) -> FormatParameters {
    match format {
        EightBits::E4M3 => FormatParameters { fraction_bits: 3, bias: 7, largest: 0x7e },
        EightBits::E5M2 => FormatParameters { fraction_bits: 2, bias: 15, largest: 0x7b },
    }
}

/// The code of the number that is nearest to `value`.
#[inline(always)]
pub fn nearest(format: EightBits, value: f32) -> u8 {
    let FormatParameters { fraction_bits, bias, largest } = parameters(format);
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 24 & 0x80) as u8, bits & 0x7fff_ffff);
    if magnitude > 0x7f80_0000 {
        return NAN;
    }
    let shift = 23 - fraction_bits;
    // Subnormal results are multiples of the format's smallest number. In single precision, the
    // last bit of `rounder` is worth that smallest number, so adding `rounder` rounds to such a
    // multiple.
    let rounder = f32::from_bits((127 + 24 - bias - fraction_bits) << 23);
    let subnormal = (f32::from_bits(magnitude) + rounder).to_bits().wrapping_sub(rounder.to_bits());
    let rebased = magnitude.wrapping_sub((127 - bias) << 23);
    let normal = rebased.wrapping_add(((1 << (shift - 1)) - 1) + (rebased >> shift & 1)) >> shift;
    let is_normal = magnitude >= (128 - bias) << 23;
    sign | (if is_normal { normal.min(largest) } else { subnormal }) as u8
}

/// The value of a code, exactly.
pub const fn to_single(format: EightBits, code: u8) -> f32 {
    let FormatParameters { fraction_bits, bias, .. } = parameters(format);
    let magnitude = (code & 0x7f) as u32;
    let (exponent, last) = (magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1));
    let special = match format {
        EightBits::E4M3 => magnitude == 0x7f,
        EightBits::E5M2 => exponent == 0x1f,
    };
    let value = if special {
        if matches!(format, EightBits::E5M2) && last == 0 { f32::INFINITY } else { f32::NAN }
    } else if exponent == 0 {
        // Subnormal: multiples of `2^(1 - bias - fraction_bits)`.
        last as f32 * f32::from_bits((128 - bias - fraction_bits) << 23)
    } else {
        f32::from_bits((exponent + 127 - bias) << 23 | last << (23 - fraction_bits))
    };
    if code & 0x80 == 0 { value } else { -value }
}

/// The scale by which a tensor is multiplied before it is narrowed, and the factor that undoes it.
/// Both are powers of two. `largest` has the bits of the tensor's largest magnitude. If that
/// magnitude is infinite or NaN, the factor is NaN; otherwise saturation would hide it.
pub fn scale_and_factor(format: EightBits, largest: u32) -> (f32, f32) {
    let exponent = exponent_for(format, largest);
    let factor = if largest >= 0x7f80_0000 { f32::NAN } else { power_of_two(-exponent) };
    (power_of_two(exponent), factor)
}

/// The exponent of a tensor's scale: the largest one with which the tensor's largest magnitude
/// still fits the format. `largest` has the bits of that magnitude. The exponent lies between -126
/// and 126, and is 0 if the magnitude is zero or not finite.
fn exponent_for(format: EightBits, largest: u32) -> i32 {
    let (exponent, fraction) = ((largest >> 23) as i32, largest & 0x7f_ffff);
    if largest == 0 || exponent >= 255 {
        return 0;
    }
    // In each format, the largest number is 1.75 times a power of two.
    let fits = format.largest_exponent() - (exponent - 127) - i32::from(fraction > 0x60_0000);
    // In this range both the scale and its reciprocal are normal numbers.
    fits.clamp(-126, 126)
}

/// `2^exponent`, for an exponent from [`exponent_for`].
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [EightBits; 2] = [EightBits::E4M3, EightBits::E5M2];

    /// The finite non-negative numbers of a format and their codes, ascending, by the definition.
    fn finite(format: EightBits) -> Vec<(f64, u8)> {
        let (fraction, bias, count) = match format {
            EightBits::E4M3 => (3, 7, 0x7f),
            EightBits::E5M2 => (2, 15, 0x7c),
        };
        let value = |code: u8| {
            let (exponent, last) = (i32::from(code >> fraction), f64::from(code & ((1 << fraction) - 1)));
            let steps = f64::from(1u32 << fraction);
            if exponent == 0 { last / steps * 2f64.powi(1 - bias) } else { (1.0 + last / steps) * 2f64.powi(exponent - bias) }
        };
        (0..count).map(|code| (value(code), code)).collect()
    }

    #[test]
    fn every_code_widens_exactly_and_narrows_back() {
        for format in FORMATS {
            for (value, code) in finite(format) {
                for (value, code) in [(value, code), (-value, code | 0x80)] {
                    let decoded = to_single(format, code);
                    assert_eq!(f64::from(decoded), value, "{format:?} {code:#x}");
                    assert_eq!(nearest(format, decoded), code, "{format:?} {value}");
                }
            }
        }
        assert_eq!([0x7e, 0x08, 0x01].map(|code| to_single(EightBits::E4M3, code)), [448.0, 2f32.powi(-6), 2f32.powi(-9)]);
        assert_eq!([0x7b, 0x04, 0x01].map(|code| to_single(EightBits::E5M2, code)), [57344.0, 2f32.powi(-14), 2f32.powi(-16)]);
        assert_eq!(to_single(EightBits::E5M2, 0xfc), f32::NEG_INFINITY);
        assert!([0x7f, 0xff].into_iter().all(|code| FORMATS.iter().all(|&format| to_single(format, code).is_nan())));
        assert!([0x7d, 0x7e].into_iter().all(|code| to_single(EightBits::E5M2, code).is_nan()));
    }

    /// Against the definition, one unit in the last place around every midpoint.
    #[test]
    fn narrowing_rounds_to_nearest_ties_to_even_and_saturates() {
        for format in FORMATS {
            let all = finite(format);
            for pair in all.windows(2) {
                let ((low, low_code), (high, high_code)) = (pair[0], pair[1]);
                let middle = ((low + high) / 2.0) as f32;
                assert_eq!(f64::from(middle), (low + high) / 2.0, "no rounding in the test");
                let even = if low_code % 2 == 0 { low_code } else { high_code };
                assert_eq!(nearest(format, middle), even, "{format:?} {middle}");
                assert_eq!(nearest(format, middle.next_down()), low_code, "{format:?} below {middle}");
                assert_eq!(nearest(format, middle.next_up()), high_code, "{format:?} above {middle}");
                assert_eq!(nearest(format, -middle.next_up()), high_code | 0x80);
            }
            let &(largest, code) = all.last().expect("a format has numbers");
            for large in [largest as f32 * 1.001, largest as f32 * 1.9, 1e30, f32::INFINITY] {
                assert_eq!(nearest(format, large), code, "{large}");
                assert_eq!(nearest(format, -large), code | 0x80, "{large}");
            }
            assert_eq!(nearest(format, f32::NAN), NAN);
            assert_eq!(nearest(format, -0.0), 0x80);
            assert_eq!(nearest(format, f32::from_bits(1)), 0);
        }
    }

    #[test]
    fn the_scaled_largest_element_fits_the_format_and_uses_its_range() {
        for format in FORMATS {
            let most = to_single(format, parameters(format).largest as u8);
            for value in [448.0, 449.0, 1.0, 1.75, 1.7500001, 1.9999999, 3.4e38, 1e-30, 57344.0, 6e-8] {
                let scaled = f64::from(value) * f64::from(power_of_two(exponent_for(format, f32::to_bits(value))));
                assert!(scaled <= f64::from(most) && scaled > f64::from(most) / 2.0, "{format:?} {value}: {scaled}");
            }
            assert_eq!([0.0, f32::INFINITY, f32::NAN].map(|value| exponent_for(format, value.to_bits())), [0; 3]);
            assert_eq!(exponent_for(format, 1), 126);
            assert_eq!(scale_and_factor(format, 2.0f32.to_bits()).0 * scale_and_factor(format, 2.0f32.to_bits()).1, 1.0);
            assert!([f32::INFINITY, f32::NAN].iter().all(|value| scale_and_factor(format, value.to_bits()).1.is_nan()));
        }
    }
}
