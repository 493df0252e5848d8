//! The table of kernels: one function for each kernel, in files by kind.
//!
//! A function states the name, the sizes that the kernel's time depends on, the operands in the
//! order of an instruction, and the arithmetic. By default each operand crosses the memory boundary
//! once, and the arithmetic is one operation an element. Exceptions have their reason beside them:
//! an operand that moves more or less (`moving`) or is left out (`uncounted`), and `flops`.
//!
//! The functions are inlined into `Kernel::describe`, so that a caller that needs one fact does not
//! compute the others. It must not know devices, number formats' speed, or who computes a kernel.

#[rustfmt::skip]
pub(super) mod activations;
#[rustfmt::skip]
pub(super) mod attention;
#[rustfmt::skip]
pub(super) mod images;
#[rustfmt::skip]
pub(super) mod loss;
#[rustfmt::skip]
pub(super) mod mixtures;
#[rustfmt::skip]
pub(super) mod movement;
#[rustfmt::skip]
pub(super) mod norms;
#[rustfmt::skip]
pub(super) mod planned;
#[rustfmt::skip]
pub(super) mod products;
#[rustfmt::skip]
pub(super) mod recurrence;
#[rustfmt::skip]
pub(super) mod scan;
#[rustfmt::skip]
pub(super) mod sequences;
#[rustfmt::skip]
pub(super) mod training;

pub(super) use super::spec::{KernelFamily, KernelOperand, KernelSpec, indices, product, read, update, write};
