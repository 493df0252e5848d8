//! Checks of the source tree itself. [`modules`] reads a crate's modules and the imports between
//! them, [`cycles`] finds siblings that import each other, and [`text`] has the rules for comments,
//! test names and cited paths. The tests in `tests/house.rs` apply all three to this workspace.
//!
//! This package knows no other crate of the workspace: it reads their source as text.

pub mod cycles;
pub mod modules;
pub mod text;
