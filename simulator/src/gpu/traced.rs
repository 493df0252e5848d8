//! Steps of traced frameworks: memory by replaying what the framework allocates, time by
//! its own list of kernels.
//!
//! The list comes from [`foretell_program::traced`]. Nothing here is fitted to runs: devices'
//! profiles come from microbenchmarks and data sheets, and the one value of the frameworks is the
//! host's time for an operator. On other devices the framework measures its operators itself.

mod allocator;
mod kernels;
mod machine;
mod measured;
mod memory;
mod time;

pub use machine::TracedMachine;
pub use measured::MeasuredFramework;
pub use memory::{TracedMemory, traced_memory};
pub use time::{TracedTime, traced_time, traced_timeline};
