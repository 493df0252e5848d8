//! Lengths of samples and responses, and how samples of different lengths share batches.
//!
//! It knows no plans and no kernels: whoever asks says how long a step takes whose samples all have
//! one length.

mod batches;
mod distribution;

pub use batches::{BatchShape, LengthCourse, SampleLengths, SampleOrder, WaitsFor};
pub use distribution::Lengths;
