//! Steps of traced frameworks: memory by replaying what the framework allocates, time by
//! its own list of kernels.
//!
//! The list comes from [`foretell_program::traced`]. Profiles of devices come from microbenchmarks
//! and data sheets, and the values of the frameworks are host times, a few of which were chosen on
//! published runs. On devices without a profile, the framework measures its operators itself.

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
