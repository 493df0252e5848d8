//! The compiler of Programs. (draft)
#![allow(missing_docs)]
mod mesh;
mod placement;
mod plan;
mod profile;
mod program;
mod schedule;
mod timeline;
pub use mesh::*;
pub use placement::*;
pub use plan::*;
pub use profile::*;
pub use program::*;
pub use schedule::*;
pub use timeline::*;
