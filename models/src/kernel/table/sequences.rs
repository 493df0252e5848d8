//! Kernels on whole positions of a sequence: look-ups, the first position, splits of packed
//! tensors.

use super::{KernelFamily, KernelSpec, indices, read, write};

#[inline(always)]
pub(in crate::kernel) fn prepend(batch: usize, positions: usize, features: usize) -> KernelSpec {
    KernelSpec::new("prepend", KernelFamily::Rearrangement, [batch, positions, features], [
        read("x", batch * positions * features), read("row", features),
        write("y", batch * (positions + 1) * features),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn prepend_input_gradient(batch: usize, positions: usize, features: usize) -> KernelSpec {
    let inputs = batch * positions * features;
    KernelSpec::new(
        "prepend_input_gradient",
        KernelFamily::Rearrangement,
        [batch, positions, features],
        // All positions but the first of each sequence are read.
        [read("dy", batch * (positions + 1) * features).moving(inputs), write("dx", inputs)],
    )
}

#[inline(always)]
pub(in crate::kernel) fn prepend_weight_gradient(batch: usize, positions: usize, features: usize) -> KernelSpec {
    KernelSpec::new(
        "prepend_weight_gradient",
        KernelFamily::Rearrangement,
        [batch, positions, features],
        // Only the first position of each sequence is read.
        [read("dy", batch * (positions + 1) * features).moving(batch * features), write("drow", features).single()],
    )
}

#[inline(always)]
pub(in crate::kernel) fn first(batch: usize, positions: usize, features: usize) -> KernelSpec {
    KernelSpec::new(
        "first",
        KernelFamily::Rearrangement,
        [batch, positions, features],
        // Only the first position of each sequence is read.
        [read("x", batch * positions * features).moving(batch * features), write("y", batch * features)],
    )
}

#[inline(always)]
pub(in crate::kernel) fn first_gradient(batch: usize, positions: usize, features: usize) -> KernelSpec {
    KernelSpec::new("first_gradient", KernelFamily::Rearrangement, [batch, positions, features], [
        read("dy", batch * features),
        write("dx", batch * positions * features),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn embedding([tokens, vocabulary, hidden, parts]: [usize; 4]) -> KernelSpec {
    KernelSpec::new("embedding", KernelFamily::Embedding, [tokens, vocabulary, hidden, parts], [
        indices("ids", tokens, vocabulary * parts),
        // One row for each token is read.
        read("table", vocabulary * hidden).moving(tokens * hidden),
        write("y", tokens * hidden),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn embedding_weight_gradient([tokens, vocabulary, hidden, parts]: [usize; 4]) -> KernelSpec {
    KernelSpec::new("embedding_weight_gradient", KernelFamily::Embedding, [tokens, vocabulary, hidden, parts], [
        read("dy", tokens * hidden),
        // One index for each token, beside `hidden` elements.
        indices("ids", tokens, vocabulary * parts).uncounted(),
        // All rows are zeroed, then one for each token is read and written.
        write("dtable", vocabulary * hidden).single().moving(vocabulary * hidden + 2 * tokens * hidden),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn split(rows: usize, parts: usize, columns: usize) -> KernelSpec {
    let part = |index: usize| write("part", rows * columns).when(index < parts);
    KernelSpec::new("split", KernelFamily::Rearrangement, [rows, parts, columns], [
        read("x", rows * parts * columns),
        part(0), part(1), part(2), part(3), part(4), part(5), part(6), part(7),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn join(rows: usize, parts: usize, columns: usize) -> KernelSpec {
    let part = |index: usize| read("part", rows * columns).when(index < parts);
    KernelSpec::new("join", KernelFamily::Rearrangement, [rows, parts, columns], [
        part(0), part(1), part(2), part(3), part(4), part(5), part(6), part(7),
        write("y", rows * parts * columns),
    ])
}
