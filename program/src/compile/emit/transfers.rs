//! Sends and receives of one tensor: the whole shard to a stage with the same mesh, or fragments of
//! it to stages with other meshes.

use super::list::{Label, ListBuilder};
use crate::compile::reshard::Fragment;
use crate::program::{BufferId, BufferRole};
use foretell_models::Kernel;

/// Sends a fragment of `shard`: directly if it is contiguous, else from a packed copy.
pub(super) fn send_fragment(list: &mut ListBuilder, label: Label<'_>, fragment: &Fragment, shard: BufferId) {
    let mut source = shard;
    for (dimension, (&start, &extent)) in fragment.start.iter().zip(&fragment.extent).enumerate() {
        source = match cut(list, source, dimension, start, extent) {
            Cut::Whole => source,
            Cut::View(view) => view,
            Cut::Packed { packed, rows, columns, start, part } => {
                list.compute(label, Kernel::TakeColumns { rows, columns, start, part }, &[source], &[packed]);
                packed
            }
        };
    }
    list.send(label, fragment.peer, source);
}

/// Receives a fragment of `shard`: in place if it is contiguous, else into a packed buffer that is
/// then unpacked.
pub(super) fn receive_fragment(list: &mut ListBuilder, label: Label<'_>, fragment: &Fragment, shard: BufferId) {
    let mut target = shard;
    let mut unpackings = Vec::new();
    for (dimension, (&start, &extent)) in fragment.start.iter().zip(&fragment.extent).enumerate() {
        target = match cut(list, target, dimension, start, extent) {
            Cut::Whole => target,
            Cut::View(view) => view,
            Cut::Packed { packed, rows, columns, start, part } => {
                unpackings.push((Kernel::PutColumns { rows, columns, start, part }, packed, target));
                packed
            }
        };
    }
    list.receive(label, fragment.peer, target);
    // The innermost packed buffer is unpacked first, into the one around it.
    for (kernel, packed, target) in unpackings.into_iter().rev() {
        list.compute(label, kernel, &[packed], &[target]);
    }
}

/// A part of a buffer along one dimension.
enum Cut {
    /// The part is the whole buffer.
    Whole,
    /// The part is contiguous: a view of it.
    View(BufferId),
    /// The part is `part` columns from `start` on in each of `rows` rows of `columns`: a new buffer
    /// that holds them packed.
    Packed { packed: BufferId, rows: usize, columns: usize, start: usize, part: usize },
}

/// Cuts `extent` indices from `start` on out of one dimension of a buffer.
fn cut(list: &mut ListBuilder, buffer: BufferId, dimension: usize, start: usize, extent: usize) -> Cut {
    let shape = list.buffer(buffer).shape.to_vec();
    if extent == shape[dimension] {
        return Cut::Whole;
    }
    let rows: usize = shape[..dimension].iter().product();
    let inner: usize = shape[dimension + 1..].iter().product();
    let name = list.buffer(buffer).name.clone();
    let mut part = shape.clone();
    part[dimension] = extent;
    if rows == 1 {
        return Cut::View(list.add_view(&name, buffer, start * inner, part));
    }
    let packed = list.add_buffer(&name, BufferRole::Workspace, part, list.buffer(buffer).data_type);
    Cut::Packed { packed, rows, columns: shape[dimension] * inner, start: start * inner, part: extent * inner }
}
