//! The interpreter of Programs that predicts.
