//! Numbers of eight bits: how they become single precision and how single precision becomes them, to the bit as NVIDIA's GPUs convert
//! (`cvt.rn.satfinite` in the PTX manual): to the nearest, to the even one of two that are as near; what is too large, and what is
//! infinite, becomes the largest number; a NaN stays one.

use foretell_models::EightBits;

/// The code of a NaN.
const NAN: u8 = 0x7f;

/// How a format's bits are shared out.
struct Form {
    /// Bits of the fraction.
    fraction: u32,
    /// What is added to the exponent.
    bias: u32,
    /// The code of the largest number.
    largest: u32,
}

const fn form(format: EightBits) -> Form {
    match format {
        EightBits::E4M3 => Form { fraction: 3, bias: 7, largest: 0x7e },
        EightBits::E5M2 => Form { fraction: 2, bias: 15, largest: 0x7b },
    }
}

/// The code of the number of a format that is nearest to a value.
#[inline(always)]
pub fn nearest(format: EightBits, value: f32) -> u8 {
    let Form { fraction, bias, largest } = form(format);
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 24 & 0x80) as u8, bits & 0x7fff_ffff);
    if magnitude > 0x7f80_0000 {
        return NAN;
    }
    let shift = 23 - fraction;
    // Where the places are as small as they get, the sum of a value and a number whose last place is as large is rounded to that place.
    let ruler = f32::from_bits((127 + 24 - bias - fraction) << 23);
    let subnormal = (f32::from_bits(magnitude) + ruler).to_bits().wrapping_sub(ruler.to_bits());
    let rebased = magnitude.wrapping_sub((127 - bias) << 23);
    let normal = rebased.wrapping_add(((1 << (shift - 1)) - 1) + (rebased >> shift & 1)) >> shift;
    let is_normal = magnitude >= (128 - bias) << 23;
    sign | (if is_normal { normal.min(largest) } else { subnormal }) as u8
}

/// The number that a code stands for.
pub const fn to_single(format: EightBits, code: u8) -> f32 {
    let Form { fraction, bias, .. } = form(format);
    let magnitude = (code & 0x7f) as u32;
    let (exponent, last) = (magnitude >> fraction, magnitude & ((1 << fraction) - 1));
    let special = match format {
        EightBits::E4M3 => magnitude == 0x7f,
        EightBits::E5M2 => exponent == 0x1f,
    };
    let value = if special {
        if matches!(format, EightBits::E5M2) && last == 0 { f32::INFINITY } else { f32::NAN }
    } else if exponent == 0 {
        // `last` places of `2^(1 - bias - fraction)`.
        last as f32 * f32::from_bits((128 - bias - fraction) << 23)
    } else {
        f32::from_bits((exponent + 127 - bias) << 23 | last << (23 - fraction))
    };
    if code & 0x80 == 0 { value } else { -value }
}

/// What a tensor is multiplied by whose largest magnitude has these bits, and what its copy in eight bits is then multiplied by: powers of two. The
/// latter is no number where something in the tensor is not finite, which formats of eight bits would hide.
pub fn scale_and_factor(format: EightBits, largest: u32) -> (f32, f32) {
    let exponent = exponent_for(format, largest);
    let factor = if largest >= 0x7f80_0000 { f32::NAN } else { power_of_two(-exponent) };
    (power_of_two(exponent), factor)
}

/// The exponent of the power of two by which a tensor is multiplied whose largest magnitude has these bits: the largest for which that has
/// a place in the format. None is found for what is not finite, and none is needed for zero.
fn exponent_for(format: EightBits, largest: u32) -> i32 {
    let (exponent, fraction) = ((largest >> 23) as i32, largest & 0x7f_ffff);
    if largest == 0 || exponent >= 255 {
        return 0;
    }
    // The format's largest number is 1.75 times a power of two.
    let fits = format.largest_exponent() - (exponent - 127) - i32::from(fraction > 0x60_0000);
    // So far that the power and its reciprocal are normal numbers.
    fits.clamp(-126, 126)
}

/// `2^exponent`, of an exponent from [`exponent_for`].
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [EightBits; 2] = [EightBits::E4M3, EightBits::E5M2];

    /// The finite numbers of a format from the least to the largest, with their codes, by what the formats' definition says.
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
    fn every_code_stands_for_its_number_and_that_for_the_code() {
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

    /// Against the definition: around every number, and around the middle of every two, to the last place.
    #[test]
    fn what_lies_between_two_numbers_becomes_the_nearest_or_the_even_one() {
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
            let &(largest, code) = all.last().expect("there are some");
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
    fn the_largest_element_uses_the_format_and_has_a_place_in_it() {
        for format in FORMATS {
            let most = to_single(format, form(format).largest as u8);
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
