//! Linear attention: scans of sequences in chunks.

use super::{KernelFamily, KernelOperand, KernelSpec, read, write};
use crate::kernel::sizes::{Scan, ScanRule};

/// Operations of the gradient over those of the forward pass: two products for each, and half of
/// the forward pass again for the states, which are not kept.
const GRADIENT: f64 = 2.5;

#[inline(always)]
fn spec<const OPERANDS: usize>(name: &'static str, sizes: &Scan, operands: [KernelOperand; OPERANDS]) -> KernelSpec {
    let Scan { rule, batch, positions, key_heads, group, key_dimension, value_dimension, chunk } = *sizes;
    KernelSpec {
        flags: [rule == ScanRule::GatedDelta, rule == ScanRule::KimiDelta, rule == ScanRule::FixedDecay, false],
        ..KernelSpec::new(
            name,
            KernelFamily::Attention,
            [batch, positions, key_heads, group, key_dimension, value_dimension, chunk],
            operands,
        )
    }
}

#[inline(always)]
fn operands(sizes: &Scan) -> [KernelOperand; 5] {
    let [controls, scalars, strengths] = [sizes.control_elements(), sizes.scalar_elements(), sizes.strength_elements()];
    [
        read("keys", sizes.key_elements()),
        read("values", sizes.value_elements()),
        read("controls", controls).when(controls > 0),
        read("scalars", scalars).when(scalars > 0),
        read("strengths", strengths).when(strengths > 0),
    ]
}

#[inline(always)]
pub(in crate::kernel) fn scan(sizes: &Scan) -> KernelSpec {
    let [keys, values, controls, scalars, strengths] = operands(sizes);
    let flops = Some(sizes.flops());
    let operands = [keys, values, controls, scalars, strengths, write("y", sizes.value_elements())];
    KernelSpec { flops, model_flops: flops, ..spec("scan", sizes, operands) }
}

#[inline(always)]
pub(in crate::kernel) fn scan_gradient(sizes: &Scan) -> KernelSpec {
    let [keys, values, controls, scalars, strengths] = operands(sizes);
    KernelSpec {
        flops: Some(GRADIENT * sizes.flops()),
        model_flops: Some(2.0 * sizes.flops()),
        ..spec(
            "scan_gradient",
            sizes,
            [
                read("dy", sizes.value_elements()),
                keys,
                values,
                controls,
                scalars,
                strengths,
                write("dkeys", sizes.key_elements()),
                write("dvalues", sizes.value_elements()),
                write("dcontrols", controls.elements).when(controls.elements > 0),
                write("dstrengths", strengths.elements).when(strengths.elements > 0),
                write("dscalars", scalars.elements).when(scalars.elements > 0).single(),
            ],
        )
    }
}
