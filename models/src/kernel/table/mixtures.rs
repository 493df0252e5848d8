//! Routing of tokens to the slots of experts and back. Only slots that hold a token are read: at
//! most one for each choice.

use super::{KernelFamily, KernelSpec, indices, product, read, write};
use crate::kernel::sizes::Mixture;

#[inline(always)]
fn extents(mixture: &Mixture) -> [usize; 5] {
    let Mixture { tokens, experts, capacity, top, hidden } = *mixture;
    [tokens, experts, capacity, top, hidden]
}

#[inline(always)]
pub(in crate::kernel) fn route(tokens: usize, experts: usize, top: usize) -> KernelSpec {
    KernelSpec::new("route", KernelFamily::Routing, [tokens, experts, top], [
        read("logits", tokens * experts),
        write("gates", tokens * top), write("choices", tokens * top).integers(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn route_gradient(tokens: usize, experts: usize, top: usize) -> KernelSpec {
    KernelSpec::new("route_gradient", KernelFamily::Routing, [tokens, experts, top], [
        read("dgates", tokens * top), read("gates", tokens * top), indices("choices", tokens * top, experts),
        write("dlogits", tokens * experts),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn dispatch(mixture: &Mixture) -> KernelSpec {
    KernelSpec::new("dispatch", KernelFamily::Routing, extents(mixture), [
        read("x", mixture.token_elements()), indices("choices", mixture.choices(), mixture.experts),
        write("dispatched", mixture.slot_elements()), write("places", mixture.choices()).integers(),
        write("dropped", 1).single().optional(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn dispatch_gradient(mixture: &Mixture) -> KernelSpec {
    KernelSpec::new("dispatch_gradient", KernelFamily::Routing, extents(mixture), [
        read("ddispatched", mixture.slot_elements()).moving(mixture.choices() * mixture.hidden),
        indices("choices", mixture.choices(), mixture.experts),
        indices("places", mixture.choices(), mixture.capacity),
        write("dx", mixture.token_elements()),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn combine(mixture: &Mixture) -> KernelSpec {
    KernelSpec {
        flops: Some(2.0 * product(&[mixture.tokens, mixture.top, mixture.hidden])),
        ..KernelSpec::new("combine", KernelFamily::Routing, extents(mixture), [
            read("rows", mixture.slot_elements()).moving(mixture.choices() * mixture.hidden),
            read("gates", mixture.choices()), indices("choices", mixture.choices(), mixture.experts),
            indices("places", mixture.choices(), mixture.capacity),
            write("y", mixture.token_elements()),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn combine_input_gradient(mixture: &Mixture) -> KernelSpec {
    KernelSpec::new("combine_input_gradient", KernelFamily::Routing, extents(mixture), [
        read("dy", mixture.token_elements()), read("gates", mixture.choices()),
        indices("choices", mixture.choices(), mixture.experts),
        indices("places", mixture.choices(), mixture.capacity),
        write("drows", mixture.slot_elements()),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn combine_gate_gradient(mixture: &Mixture) -> KernelSpec {
    KernelSpec {
        flops: Some(2.0 * product(&[mixture.tokens, mixture.top, mixture.hidden])),
        ..KernelSpec::new("combine_gate_gradient", KernelFamily::Routing, extents(mixture), [
            read("dy", mixture.token_elements()),
            read("rows", mixture.slot_elements()).moving(mixture.choices() * mixture.hidden),
            indices("choices", mixture.choices(), mixture.experts),
            indices("places", mixture.choices(), mixture.capacity),
            write("dgates", mixture.choices()),
        ])
    }
}
