//! The figure that a source would print for a device's memory.

use crate::row::Row;
use crate::traced_prediction::TracedPrediction;
use foretell_program::Footprint;
use foretell_simulator::gpu::StackProfile;
use foretell_units::Bytes;

/// Returns the predicted counterpart of a row's memory figure, in bytes.
///
/// `mem_kind` says which figure that is: the bytes that the allocator has handed out, the bytes
/// that it holds, or all bytes in use on the device. Without it, the stack's usual figure is used;
/// for a traced job that is all bytes in use, as most people read them from `nvidia-smi`.
pub fn memory_figure(row: &Row, stack: &StackProfile, footprint: &Footprint, traced: Option<&TracedPrediction>) -> f64 {
    let kind = row.mem_kind.to_lowercase();
    let has_word = |word: &str| kind.contains(word) && !kind.contains("not stated");
    let [handed_out, held, used] = match traced {
        Some(TracedPrediction { memory, outside }) => [memory.allocated, memory.reserved, memory.reserved + *outside],
        None => [allocated(footprint), allocated(footprint) + footprint.unused, footprint.total()],
    };
    let is_unstated = kind.is_empty() || kind.starts_with("as printed");
    let figure = if kind.contains("nvidia-smi") || (is_unstated && traced.is_some()) {
        used
    } else if has_word("reserved") || (stack.memory.prints_reserved && !has_word("allocated") && traced.is_none()) {
        held
    } else {
        handed_out
    };
    figure.value()
}

/// Returns the part of a footprint that the allocator has handed out.
pub(crate) fn allocated(footprint: &Footprint) -> Bytes {
    Footprint { unused: Bytes::ZERO, context: Bytes::ZERO, ..*footprint }.total()
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_simulator::gpu::Profiles;

    #[test]
    fn the_memory_figure_follows_its_stated_kind_or_else_the_stack() {
        let mut stack = Profiles::library().expect("sound").stack("megatron-core").expect("known").clone();
        let gib = |gib: u64| Bytes::new(gib << 30);
        let footprint = Footprint { parameters: gib(4), unused: gib(2), context: gib(1), ..Footprint::default() };
        let row = |kind: &str| Row { mem_kind: kind.into(), ..Row::default() };
        let figure = |stack: &StackProfile, kind| memory_figure(&row(kind), stack, &footprint, None) / gib(1).value();
        assert_eq!(figure(&stack, "nvidia-smi max"), 7.0);
        assert_eq!((figure(&stack, "max_memory_reserved"), figure(&stack, "max over GPUs")), (6.0, 4.0));
        stack.memory.prints_reserved = true;
        assert_eq!((figure(&stack, "max over GPUs"), figure(&stack, "max_memory_allocated")), (6.0, 4.0));
    }
}
