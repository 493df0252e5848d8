//! The table of kernels: one function for each kernel, in files by kind.
//!
//! A function states the name, the sizes that the kernel's time depends on, the operands in the
//! order of an instruction, and the arithmetic. By default each operand crosses the memory boundary
//! once, and the arithmetic is one operation an element. Exceptions have their reason beside them:
//! an operand that moves more or less (`moving`) or is left out (`uncounted`), and `flops`.
//!
//! The functions are inlined into [`Kernel::describe`](super::Kernel), so that a caller that needs
//! one fact does not compute the others.

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
