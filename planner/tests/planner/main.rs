//! Tests of the planner as a whole: bounds never exceed what is simulated, and searches find what
//! brute force finds.

use mimalloc::MiMalloc;

/// A fifth of the time goes to the usual allocator otherwise.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

mod anytime;
mod bounds;
mod certificate;
mod common;
mod offload;
mod operator_sharding;
mod post_training;
mod refusals;
mod routing;
mod search;
mod space;
mod traced;
mod unequal_devices;
