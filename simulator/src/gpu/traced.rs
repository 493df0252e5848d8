//! Steps of traced frameworks on GPUs: memory by replaying what the framework allocates, time by
//! its own list of kernels.
//!
//! The list comes from [`foretell_program::traced`]. Nothing here is fitted to runs: devices'
//! profiles come from microbenchmarks and data sheets, and the one value of the frameworks is the
//! host's time for an operator.

mod allocator;
mod kernels;
mod memory;
mod time;

pub use memory::{TracedMemory, traced_memory};
pub use time::{TracedTime, traced_time};
