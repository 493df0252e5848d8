//! Checks of the source tree itself. [`modules`] reads a crate's modules and the imports between
//! them, [`cycles`] finds siblings that import each other, [`invariants`] has what each part must
//! not know, [`page`] what the page without a server must not use. [`codes`] lists the codes of
//! errors, and [`text`] has the rules for comments, test names and cited paths. The tests in
//! `tests/house.rs` apply them to this workspace.
//!
//! This package knows no other crate of the workspace: it reads their source as text.

pub mod codes;
pub mod cycles;
pub mod invariants;
pub mod modules;
pub mod page;
pub mod text;
