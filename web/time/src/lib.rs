//! A clock for dependencies that read one, such as `microlp`, in place of the crate of this name:
//! as there, the standard library's, but in a browser that of the page, without wasm-bindgen.

#[cfg(target_family = "wasm")]
mod page;

#[cfg(target_family = "wasm")]
pub use page::Instant;
pub use std::time::Duration;
#[cfg(not(target_family = "wasm"))]
pub use std::time::Instant;
