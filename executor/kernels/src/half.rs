//! Conversion between single precision and the 16-bit formats bf16 and fp16.
//!
//! Memory and messages hold 16-bit numbers; all arithmetic is in single precision. Narrowing rounds
//! to nearest, ties to even (the default of IEEE 754). A value beyond the format's range becomes
//! infinite, and NaN stays NaN.

use foretell_units::DataType;

/// A 16-bit floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SixteenBits {
    /// bfloat16: the upper 16 bits of a single-precision number.
    Bf16,
    /// IEEE 754 half precision.
    Fp16,
}

impl SixteenBits {
    /// The 16-bit format of a data type; `None` for any other data type.
    pub fn of(data_type: DataType) -> Option<Self> {
        match data_type {
            DataType::Bf16 => Some(SixteenBits::Bf16),
            DataType::Fp16 => Some(SixteenBits::Fp16),
            _ => None,
        }
    }

    /// The value of `bits`, exactly.
    #[inline(always)]
    pub fn to_single(self, bits: u16) -> f32 {
        match self {
            SixteenBits::Bf16 => bf16_to_single(bits),
            SixteenBits::Fp16 => fp16_to_single(bits),
        }
    }

    /// The bits of the number of this format that is nearest to `value`.
    #[inline(always)]
    pub fn nearest(self, value: f32) -> u16 {
        match self {
            SixteenBits::Bf16 => bf16_from_single(value),
            SixteenBits::Fp16 => fp16_from_single(value),
        }
    }

    /// Sets `singles[i]` to the value of `halves[i]`, up to the shorter length.
    pub fn widen(self, singles: &mut [f32], halves: &[u16]) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512bw") {
            // SAFETY: the CPU has the instructions, as just checked.
            unsafe { x86::widen(self, singles, halves) };
            return;
        }
        singles.iter_mut().zip(halves).for_each(|(single, &half)| *single = self.to_single(half));
    }

    /// Sets `halves[i]` to the number nearest to `singles[i]`, up to the shorter length.
    pub fn narrow(self, halves: &mut [u16], singles: &[f32]) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512bw") {
            // SAFETY: the CPU has the instructions, as just checked.
            unsafe { x86::narrow(self, halves, singles) };
            return;
        }
        halves.iter_mut().zip(singles).for_each(|(half, &single)| *half = self.nearest(single));
    }
}

#[inline(always)]
fn bf16_to_single(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
fn bf16_from_single(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // The quiet bit: a NaN with a non-zero lower half only would become infinite.
        return (bits >> 16) as u16 | 0x40;
    }
    // Adds half of the last place, less one if the last place is even: ties go to even.
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[inline(always)]
fn fp16_to_single(bits: u16) -> f32 {
    let (sign, exponent, fraction) = (u32::from(bits & 0x8000) << 16, bits >> 10 & 0x1f, u32::from(bits & 0x3ff));
    match (exponent, fraction) {
        (0, 0) => f32::from_bits(sign),
        // Subnormal here but normal in single precision: the leading bit becomes implicit.
        (0, _) => {
            let shift = fraction.leading_zeros() - 21;
            f32::from_bits(sign | (113 - shift) << 23 | (fraction << shift & 0x3ff) << 13)
        }
        (0x1f, 0) => f32::from_bits(sign | 0x7f80_0000),
        (0x1f, _) => f32::from_bits(sign | 0x7fc0_0000 | fraction << 13),
        _ => f32::from_bits(sign | (u32::from(exponent) + 112) << 23 | fraction << 13),
    }
}

#[inline(always)]
fn fp16_from_single(value: f32) -> u16 {
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 16 & 0x8000) as u16, bits & 0x7fff_ffff);
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00 | (magnitude >> 13 & 0x3ff) as u16;
    }
    // 2^16 and above. A smaller value that rounds up to 2^16 carries into the exponent of
    // infinity below.
    if magnitude >= 0x4780_0000 {
        return sign | 0x7c00;
    }
    let rounded = |value: u32, shift: u32| (value + ((1 << (shift - 1)) - 1) + (value >> shift & 1)) >> shift;
    if magnitude >= 0x3880_0000 {
        return sign | rounded(magnitude - 0x3800_0000, 13) as u16;
    }
    // Below 2^-14 the spacing is 2^-24, so 2^-25 and less round to zero.
    if magnitude <= 0x3300_0000 {
        return sign;
    }
    let shift = 126 - (magnitude >> 23);
    sign | rounded(magnitude & 0x7f_ffff | 0x80_0000, shift) as u16
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::SixteenBits;

    /// Numbers per vector.
    const LANES: usize = 16;

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn widen(half: SixteenBits, singles: &mut [f32], halves: &[u16]) {
        let whole = singles.len().min(halves.len()) / LANES * LANES;
        for first in (0..whole).step_by(LANES) {
            // SAFETY: both slices hold `LANES` numbers from `first` on.
            unsafe {
                let bits = _mm256_loadu_si256(halves.as_ptr().add(first).cast());
                let values = match half {
                    SixteenBits::Bf16 => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))),
                    SixteenBits::Fp16 => _mm512_cvtph_ps(bits),
                };
                _mm512_storeu_ps(singles.as_mut_ptr().add(first), values);
            }
        }
        singles[whole..].iter_mut().zip(&halves[whole..]).for_each(|(single, &bits)| *single = half.to_single(bits));
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn narrow(half: SixteenBits, halves: &mut [u16], singles: &[f32]) {
        let whole = singles.len().min(halves.len()) / LANES * LANES;
        for first in (0..whole).step_by(LANES) {
            // SAFETY: both slices hold `LANES` numbers from `first` on.
            unsafe {
                let values = _mm512_loadu_ps(singles.as_ptr().add(first));
                let bits = match half {
                    SixteenBits::Bf16 => to_bf16(values),
                    SixteenBits::Fp16 => _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(values),
                };
                _mm256_storeu_si256(halves.as_mut_ptr().add(first).cast(), bits);
            }
        }
        halves[whole..].iter_mut().zip(&singles[whole..]).for_each(|(bits, &single)| *bits = half.nearest(single));
    }

    /// With integer arithmetic, for the same bits on every machine: not every CPU has the
    /// conversion instruction, and that one flushes denormals to zero.
    #[target_feature(enable = "avx512f,avx512bw")]
    fn to_bf16(values: __m512) -> __m256i {
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(is_nan, rounded, quiet)))
    }
}

#[cfg(test)]
mod tests {
    use super::SixteenBits;

    /// The value of a format's bits, by the definition.
    fn exact(half: SixteenBits, bits: u16) -> f64 {
        let (exponent_bits, fraction_bits) = if half == SixteenBits::Bf16 { (8, 7) } else { (5, 10) };
        let (sign, bias) = (if bits >> 15 == 1 { -1.0 } else { 1.0 }, (1 << (exponent_bits - 1)) - 1);
        let exponent = i32::from(bits >> fraction_bits & ((1 << exponent_bits) - 1));
        let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
        match exponent {
            0 => sign * fraction * 2.0_f64.powi(1 - bias),
            _ if exponent == (1 << exponent_bits) - 1 => {
                if fraction == 0.0 {
                    sign * f64::INFINITY
                } else {
                    f64::NAN
                }
            }
            _ => sign * (1.0 + fraction) * 2.0_f64.powi(exponent - bias),
        }
    }

    const FORMATS: [SixteenBits; 2] = [SixteenBits::Bf16, SixteenBits::Fp16];

    #[test]
    fn every_16_bit_number_widens_exactly_and_narrows_back() {
        for half in FORMATS {
            let halves: Vec<u16> = (0..=u16::MAX).collect();
            let mut singles = vec![0.0; halves.len()];
            // The length is not a multiple of the vector length.
            half.widen(&mut singles[1..], &halves[1..]);
            let mut back = vec![0; halves.len()];
            half.narrow(&mut back[1..], &singles[1..]);
            for &bits in &halves[1..] {
                let (single, expected) = (singles[usize::from(bits)], exact(half, bits));
                assert_eq!(half.to_single(bits).to_bits(), single.to_bits(), "{half:?} {bits:#x}");
                if expected.is_nan() {
                    assert!(single.is_nan() && half.to_single(back[usize::from(bits)]).is_nan(), "{half:?} {bits:#x}");
                } else {
                    assert_eq!(f64::from(single), expected, "{half:?} {bits:#x}");
                    assert_eq!(back[usize::from(bits)], bits, "{half:?}");
                }
            }
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_and_ties_to_even() {
        for half in FORMATS {
            let infinite = half.nearest(f32::INFINITY);
            for bits in 0..infinite {
                let (below, above) = (exact(half, bits), exact(half, bits + 1));
                // Above the largest number, rounding behaves as if the exponent continued.
                let above = if above.is_infinite() { 2.0 * below - exact(half, bits - 1) } else { above };
                let middle = (0.5 * (below + above)) as f32;
                let even = if bits % 2 == 0 { bits } else { bits + 1 };
                let just_below = f32::from_bits(middle.to_bits() - 1);
                let just_above = f32::from_bits(middle.to_bits() + 1);
                // Sixteen copies, so that the vector code runs.
                for (value, expected) in [(middle, even), (just_below, bits), (just_above, bits + 1)] {
                    for (value, sign) in [(value, 0), (-value, 0x8000)] {
                        let mut narrowed = [0; 16];
                        half.narrow(&mut narrowed, &[value; 16]);
                        assert_eq!(narrowed, [expected | sign; 16], "{half:?} {value:e}");
                        assert_eq!(half.nearest(value), expected | sign, "{half:?} {value:e}");
                    }
                }
            }
            assert_eq!(half.nearest(f32::MAX), infinite, "{half:?}");
            assert!(half.to_single(half.nearest(f32::from_bits(0x7f80_0001))).is_nan(), "{half:?}");
        }
    }
}
