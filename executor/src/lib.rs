//! The interpreter of Programs that trains.
