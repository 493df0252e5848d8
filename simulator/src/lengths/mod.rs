//! Lengths of samples and responses, and how samples of different lengths share batches.
//!
//! This module must not know plans or kernels: the caller says how long a step takes if all its
//! samples have one length.

mod batches;
mod distribution;

pub use batches::{BatchShape, LengthCourse, SampleLengths, SampleOrder, WaitsFor};
pub use distribution::Lengths;
