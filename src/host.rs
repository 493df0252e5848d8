//! Services of the system for the commands: files, streams, a clock, progress bars, and facts about
//! this machine. In a browser there is no such system, and `memory.rs` replaces it. This module
//! knows no commands.

#[cfg(not(target_family = "wasm"))]
mod machine;
#[cfg(target_family = "wasm")]
mod memory;
#[cfg(not(target_family = "wasm"))]
mod system;

#[cfg(not(target_family = "wasm"))]
pub use machine::{local, local_gpus, processor};
#[cfg(target_family = "wasm")]
pub use memory::*;
#[cfg(not(target_family = "wasm"))]
pub use system::*;
