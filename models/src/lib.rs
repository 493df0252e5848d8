//! Models as graphs of operators with loop dimensions.
