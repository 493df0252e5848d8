//! The interpreter of Programs that trains.
pub mod backend;
pub mod data;
pub mod transport;
