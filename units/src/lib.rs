//! Quantities with their units.
//!
//! The nouns: [`Bytes`], [`Seconds`], [`Picoseconds`], [`BytesPerSecond`], [`Flops`], [`FlopsPerSecond`], [`Watts`], [`Joules`], and
//! [`DataType`], the format of a number.
//! A quantity is made from a number *and* a unit, is read from text such as `80GiB`, `25Gbit/s` or `5us`, and is printed the
//! way people say it. Only products and quotients that mean something physically are defined, so that a rate cannot be added
//! to a size. This crate knows nothing else of Foretell.
//!
//! ```
//! use foretell_units::{Bytes, BytesPerSecond};
//! let gradients: Bytes = "1GB".parse()?;
//! let link: BytesPerSecond = "200Gbit/s".parse()?;
//! assert_eq!((gradients / link).to_string(), "40 ms");
//! # Ok::<(), foretell_units::UnitError>(())
//! ```

mod data_type;
mod parse;
mod quantity;

pub use data_type::DataType;
pub use parse::UnitError;
pub use quantity::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Joules, Picoseconds, Seconds, Watts};
