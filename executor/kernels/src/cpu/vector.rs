//! Loops that the compiler vectorises, compiled for several instruction sets and chosen at run
//! time. So one binary runs on every x86-64 machine and uses AVX-512 if available. Knows no kernel.

/// Instruction sets for which a multiversioned function is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InstructionSet {
    /// 512-bit vectors with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 256-bit vectors with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The target's baseline.
    Baseline,
}

/// Returns the widest instruction set of this machine. The standard library caches the detection,
/// so this is a load and a test.
#[inline]
pub(super) fn instruction_set() -> InstructionSet {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma")
        {
            return InstructionSet::Avx512;
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return InstructionSet::Avx2;
        }
    }
    InstructionSet::Baseline
}

/// Compiles a function's body for every [`InstructionSet`]. In the body the constant `FUSED` says
/// whether [`multiply_add`] is one instruction.
macro_rules! multiversion {
    ($($(#[$attribute:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block)+) => {$(
        $(#[$attribute])*
        #[allow(clippy::too_many_arguments)]
        $visibility fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            #[allow(clippy::extra_unused_type_parameters)]
            fn body<const FUSED: bool>($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($argument: $type),*) $(-> $result)? {
                body::<true>($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                body::<true>($($argument),*)
            }

            match $crate::cpu::vector::instruction_set() {
                // SAFETY: the machine was seen to have these features.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::vector::InstructionSet::Avx512 => unsafe { avx512($($argument),*) },
                // SAFETY: the machine was seen to have these features.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::vector::InstructionSet::Avx2 => unsafe { avx2($($argument),*) },
                $crate::cpu::vector::InstructionSet::Baseline => body::<{ cfg!(target_arch = "aarch64") }>($($argument),*),
            }
        }
    )+};
}
pub(super) use multiversion;

/// Lanes of a reduction: four AVX-512 vectors, so that additions do not wait for each other.
pub(super) const LANES: usize = 64;

/// `a * b + c`, rounded once if the machine has the instruction. Without it a fused operation would
/// be a slow library call.
#[inline(always)]
pub(super) fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// The exponential function with a relative error of about 1e-7, without branches. Arguments are
/// clamped to [-87.3, 88.3], so the result is neither infinite nor subnormal.
///
/// `e^x = 2^n e^r` with `n` the nearest integer to `x / ln 2`, and `e^r` by the minimax polynomial
/// of Cephes' `expf` (Moshier).
#[inline(always)]
pub(super) fn exponential<const FUSED: bool>(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves that integer in the low bits.
    const ROUNDER: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has few enough bits that n times it is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = if x > -87.3 { x } else { -87.3 };
    let x = if x < 88.3 { x } else { 88.3 };
    let shifted = multiply_add::<FUSED>(x, std::f32::consts::LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = multiply_add::<FUSED>(n, -LN_2_HIGH, x);
    let r = multiply_add::<FUSED>(n, -LN_2_LOW, r);
    let mut polynomial = 1.987_569_1e-4;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        polynomial = multiply_add::<FUSED>(polynomial, r, coefficient);
    }
    let mantissa = multiply_add::<FUSED>(polynomial, r * r, r) + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127) << 23);
    mantissa * power
}

/// Combines lanes pairwise. Their number is a power of two.
#[inline(always)]
pub(super) fn fold_lanes<const COUNT: usize>(mut lanes: [f32; COUNT], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = COUNT / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = combine(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Sums lanes pairwise.
#[inline(always)]
pub(super) fn sum_lanes<const COUNT: usize>(lanes: [f32; COUNT]) -> f32 {
    fold_lanes(lanes, |a, b| a + b)
}

/// The larger of two, as one instruction.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// `Σ term(x)`, in a fixed order.
#[inline(always)]
pub(super) fn reduce(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += term(chunk[lane]);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane += term(value);
    }
    sum_lanes(lanes)
}

/// `Σ term(x, y)`, in a fixed order.
#[inline(always)]
pub(super) fn reduce_pairs(x: &[f32], y: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (x_chunks, y_chunks) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let (x_rest, y_rest) = (x_chunks.remainder(), y_chunks.remainder());
    for (x, y) in x_chunks.zip(y_chunks) {
        for lane in 0..LANES {
            lanes[lane] += term(x[lane], y[lane]);
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *lane += term(x, y);
    }
    sum_lanes(lanes)
}

/// The largest element; negative infinity if empty.
#[inline(always)]
pub(super) fn maximum(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, value);
    }
    fold_lanes(lanes, larger)
}

#[cfg(test)]
mod tests {
    use super::exponential;

    #[test]
    fn the_exponential_is_good_to_single_precision() {
        for step in -87_000..88_000 {
            let x = step as f32 / 1000.0;
            let exact = f64::from(x).exp();
            for computed in [exponential::<false>(x), exponential::<true>(x)] {
                assert!((f64::from(computed) - exact).abs() <= 2e-7 * exact, "e^{x}: {computed} for {exact}");
            }
        }
        assert!(exponential::<true>(f32::NEG_INFINITY) < 1e-37 && exponential::<true>(1e30).is_finite());
        assert_eq!(exponential::<true>(0.0), 1.0);
    }
}
