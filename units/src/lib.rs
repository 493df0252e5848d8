//! Quantities with units, their medians, number formats, and hints about misspelt names.
//!
//! The nouns: [`Bytes`], [`Seconds`], [`Picoseconds`], [`BytesPerSecond`], [`Flops`],
//! [`FlopsPerSecond`], [`Watts`] and [`Joules`] are quantities. [`DataType`] is the format of a
//! number. [`count`] and [`Price`] read numbers with separators. [`SchemaVersion`] is the version
//! of a file's form. [`suggest`] lists the names that someone may have meant. [`median`] and
//! [`quantile_place`] evaluate measured values.
//!
//! The flow: a quantity is read from a number *and* a unit (`80GiB`, `25Gbit/s`, `5us`), used in
//! computations, and printed in the unit that people would choose. Only products and quotients with
//! a physical meaning are defined, so that adding a rate to a size does not compile.
//!
//! This crate knows nothing else of Foretell.
//!
//! ```
//! use foretell_units::{Bytes, BytesPerSecond};
//! let gradients: Bytes = "1GB".parse()?;
//! let link: BytesPerSecond = "200Gbit/s".parse()?;
//! assert_eq!((gradients / link).to_string(), "40 ms");
//! # Ok::<(), foretell_units::UnitError>(())
//! ```

mod data_type;
pub mod diagnostic;
mod number;
mod order_statistics;
mod parse;
mod quantity;
mod schema_version;
mod separators;
mod suggestion;

pub use data_type::DataType;
pub use number::{Price, count};
pub use order_statistics::{interpolated_quantile, median, middles, quantile_place, weighted_quantile};
pub use parse::UnitError;
pub use quantity::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Joules, Picoseconds, Seconds, Watts};
pub use schema_version::SchemaVersion;
pub use suggestion::suggest;
