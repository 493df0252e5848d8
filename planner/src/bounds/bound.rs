//! A lower bound on what a layout needs, and its units.
//!
//! Memory is what the request's software stack needs on a device, in bytes. On unequal devices,
//! bytes are weighted; see [`DeviceKinds`](crate::space::DeviceKinds).

use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, Seconds};

/// Lower bounds on what a layout needs; for a set of layouts, on what every one of them needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bound {
    /// Step time. `None` if `memory` exceeds the memory limit, and the layout is excluded anyway.
    pub(crate) time: Option<Seconds>,
    /// Memory of the fullest device, in weighted bytes. Zero if it is not bounded.
    pub(crate) memory: Bytes,
}

impl Bound {
    /// The bound of a layout of which nothing is known.
    pub(super) const TRIVIAL: Self = Self { time: Some(Seconds::ZERO), memory: Bytes::ZERO };

    /// Returns the bound of a layout that needs more memory than there is.
    pub(crate) fn too_large(memory: Bytes) -> Self {
        Self { time: None, memory }
    }
}

/// Why a layout has no bound.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Excluded {
    /// The layout does not divide the model or the batch. Contains the compiler's message.
    Indivisible(Mistake),
    /// The layout keeps more on a host than the host has memory.
    HostMemory,
}

/// A bound, or why there is none.
pub(crate) type Bounded = Result<Bound, Excluded>;

/// Factor on bounds that allows for rounding in their sums.
pub(crate) const ROUNDING: f64 = 1.0 - 1e-9;

pub(super) fn seconds(picoseconds: f64) -> Seconds {
    Seconds::new(picoseconds * 1e-12)
}
