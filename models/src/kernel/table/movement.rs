//! Kernels that only move numbers, of either width: a rank's part of a tensor, and changes of order
//! before and after collectives.

use super::{KernelFamily, KernelSpec, read, write};

#[inline(always)]
pub(in crate::kernel) fn slice(outer: usize, parts: usize, inner: usize) -> KernelSpec {
    KernelSpec {
        moves_any_width: true,
        ..KernelSpec::new(
            "slice",
            KernelFamily::Rearrangement,
            [outer, parts, inner],
            // Only the rank's part is read.
            [read("x", outer * parts * inner).moving(outer * inner), write("y", outer * inner)],
        )
    }
}

/// Describes an interleaving, or its reverse.
#[inline(always)]
pub(in crate::kernel) fn interleave(name: &'static str, outer: usize, parts: usize, inner: usize) -> KernelSpec {
    let elements = outer * parts * inner;
    KernelSpec {
        moves_any_width: true,
        ..KernelSpec::new(name, KernelFamily::Rearrangement, [outer, parts, inner], [
            read("x", elements),
            write("y", elements),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn take_columns(rows: usize, columns: usize, part: usize) -> KernelSpec {
    KernelSpec {
        moves_any_width: true,
        ..KernelSpec::new(
            "take_columns",
            KernelFamily::Other,
            [rows, columns, part],
            // Only the columns that are taken are read.
            [read("x", rows * columns).moving(rows * part), write("y", rows * part)],
        )
    }
}

#[inline(always)]
pub(in crate::kernel) fn put_columns(rows: usize, columns: usize, part: usize) -> KernelSpec {
    KernelSpec {
        moves_any_width: true,
        ..KernelSpec::new(
            "put_columns",
            KernelFamily::Other,
            [rows, columns, part],
            // Only the columns that are put are written.
            [read("x", rows * part), write("y", rows * columns).moving(rows * part)],
        )
    }
}
