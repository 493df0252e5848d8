//! The command line of Foretell.

fn main() {}
