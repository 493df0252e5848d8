//! Frameworks as operator tables: what the framework's own code allocates, releases and launches in
//! a training step.
//!
//! A table was traced without a GPU, from the framework's code, with symbolic sizes. So it holds
//! for any model of its architecture, any batch and any sequence. The tracer is
//! `python/foretell/trace`, whose documentation has the format. A table is the forward and backward
//! pass of one unsharded replica; sharding and the optimizer follow from its parameters.
//!
//! The nouns: an [`OperatorTable`] has [`Part`]s of [`Line`]s over [`Formula`]s;
//! [`OperatorTable::expand`] gives the [`StepEvent`]s of a step at given [`TableSizes`].
//!
//! This module knows no devices and no durations.

mod architecture;
mod error;
mod formula;
mod library;
mod sizes;
mod step;
mod table;

pub use architecture::{is_tied, layers_of_table_layer, traced_architecture};
pub use error::TableError;
pub use formula::Formula;
pub use step::{StepEvent, TableSizes};
pub use table::{
    AllocationReference, Element, LayerReference, Line, OperatorTable, ParameterRole, Part, TableParameter, TracedOperator,
    TracedTensor, Variant,
};
