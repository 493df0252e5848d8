//! The search over parallelism layouts.
