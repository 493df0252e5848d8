//! The table of kernels: one function a kernel, one file a family.
//!
//! A function states the kernel's name, the sizes its time depends on, its operands in the order in which an instruction lists them,
//! and its arithmetic. Traffic is the sum of the operands. Where it is not, the operand says so (`moving`, `uncounted`) with the reason
//! beside it.

pub(super) mod activations;
pub(super) mod attention;
pub(super) mod images;
pub(super) mod loss;
pub(super) mod mixtures;
pub(super) mod movement;
pub(super) mod norms;
pub(super) mod products;
pub(super) mod recurrence;
pub(super) mod sequences;
pub(super) mod training;

pub(super) use super::spec::{KernelFamily, KernelOperand, KernelSpec, indices, product, read, update, write};
