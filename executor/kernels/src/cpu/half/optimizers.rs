//! Optimizer steps in mixed precision: the single-precision step updates the master copy, and the
//! parameter is rounded from it.

use foretell_models::Kernel;
use foretell_units::DataType;

use crate::cpu::CpuBackend;
use crate::cpu::memory::{floats, halves, halves_mut};
use crate::half::SixteenBits;
use crate::{Backend as _, BackendError, KernelCall, Operand};

/// Parameters per block, updated before they are narrowed: their gradient, master copy and state,
/// 32 KiB, stay in the L1 cache.
const BLOCK: usize = 1 << 11;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn step(backend: &mut CpuBackend, call: &KernelCall<'_>, half: SixteenBits) -> Result<(), BackendError> {
    let (gradient, parameter) = (&call.reads[0], &call.writes[0]);
    let states = &call.writes[1..];
    // Muon's direction is stored in the parameter's format.
    let is_half = matches!(call.kernel, Kernel::MuonStep { .. });
    let elements = parameter.bytes / 2;
    let mut widened = [0.0f32; BLOCK];
    for first in (0..elements).step_by(BLOCK) {
        let count = BLOCK.min(elements - first);
        let part = |operand: &Operand, width: usize| Operand {
            pointer: operand.pointer.wrapping_add(width * first),
            bytes: width * count,
        };
        // The master copy, the last of the states, takes the role of the parameter.
        let mut writes = [part(&states[states.len() - 1], 4); 3];
        writes[1..].iter_mut().zip(states).for_each(|(write, state)| *write = part(state, 4));
        let kernel = match *call.kernel {
            Kernel::Sgd { momentum, nesterov, controlled, exempt, .. } => {
                Kernel::Sgd { elements: count, momentum, nesterov, controlled, exempt }
            }
            Kernel::AdamW { controlled, exempt, .. } => Kernel::AdamW { elements: count, controlled, exempt },
            Kernel::LambStep { controlled, .. } => Kernel::LambStep { elements: count, controlled },
            Kernel::MuonStep { longest, controlled, exempt, .. } => {
                Kernel::MuonStep { elements: count, longest, controlled, exempt }
            }
            kernel => kernel,
        };
        // All blocks read the same control, and the same norms for LAMB, if the call has them. If
        // the control skips the update, the parameter is still rounded from its master copy: it may
        // be a shard without content yet.
        let mut reads = [part(gradient, 4); 3];
        if is_half {
            // SAFETY: this function's own contract.
            half.widen(&mut widened[..count], unsafe { halves(&part(gradient, 2)) });
            reads[0] = Operand { pointer: widened.as_mut_ptr().cast(), bytes: 4 * count };
        }
        reads[1..].iter_mut().zip(&call.reads[1..]).for_each(|(read, shared)| *read = *shared);
        let (reads, writes) = (&reads[..call.reads.len()], &writes[..states.len()]);
        // SAFETY: these are parts of the call's operands.
        unsafe {
            backend.run(&KernelCall { kernel: &kernel, reads, writes, precision: DataType::Fp32, ..*call })?;
            half.narrow(halves_mut(&part(parameter, 2)), floats(&writes[0]));
        }
    }
    Ok(())
}
