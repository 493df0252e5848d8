//! LSTM layers.

use super::{KernelFamily, KernelSpec, product, read, write};
use crate::kernel::sizes::Recurrence;

#[inline(always)]
fn extents(sizes: &Recurrence) -> [usize; 3] {
    [sizes.batch, sizes.sequence, sizes.hidden]
}

/// Operations of the recurrent product over all positions, or of one of its gradients.
#[inline(always)]
fn flops(sizes: &Recurrence) -> Option<f64> {
    Some(2.0 * product(&[sizes.batch, sizes.sequence, sizes.weight_elements()]))
}

#[inline(always)]
pub(in crate::kernel) fn lstm(sizes: &Recurrence) -> KernelSpec {
    let outputs = sizes.output_elements();
    KernelSpec {
        flags: [sizes.initial, false, false, false],
        flops: flops(sizes),
        ..KernelSpec::new("lstm", KernelFamily::Product, extents(sizes), [
            read("projected", 4 * outputs), read("w", sizes.weight_elements()),
            read("state", sizes.state_elements()).when(sizes.initial),
            write("y", outputs), write("gates", 4 * outputs), write("cells", outputs),
            write("last", sizes.state_elements()),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn lstm_gradient(sizes: &Recurrence, has_outputs: bool, has_last: bool) -> KernelSpec {
    let outputs = sizes.output_elements();
    let state = sizes.state_elements();
    KernelSpec {
        flags: [sizes.initial, has_outputs, has_last, false],
        flops: flops(sizes),
        ..KernelSpec::new("lstm_gradient", KernelFamily::Product, extents(sizes), [
            read("dy", outputs).when(has_outputs), read("dlast", state).when(has_last),
            read("w", sizes.weight_elements()), read("gates", 4 * outputs), read("cells", outputs),
            read("state", state).when(sizes.initial),
            write("dprojected", 4 * outputs), write("dstate", state).when(sizes.initial),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn lstm_weight_gradient(sizes: &Recurrence) -> KernelSpec {
    let outputs = sizes.output_elements();
    KernelSpec {
        flags: [sizes.initial, false, false, false],
        flops: flops(sizes),
        ..KernelSpec::new("lstm_weight_gradient", KernelFamily::Product, extents(sizes), [
            read("dprojected", 4 * outputs), read("y", outputs),
            // Only the output, half of the state, is multiplied by the weight.
            read("state", sizes.state_elements()).when(sizes.initial).moving(sizes.state_elements() / 2),
            write("dw", sizes.weight_elements()).single(),
        ])
    }
}
