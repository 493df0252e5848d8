//! The description of a kernel, and what follows from it: operand sizes, traffic, arithmetic.
//!
//! [`table`](super::table) states a [`KernelSpec`] for each kernel. Everything else about operands and costs is derived here, so
//! that no fact about a kernel stands twice. A description is built without an allocation.

use crate::storage::Storage;
use foretell_units::{Bytes, DataType, Flops};

/// The most operands of a kernel on each side: a [`Kernel::Split`](super::Kernel::Split) writes eight.
pub const MOST_OPERANDS: usize = 8;

/// The most operands of a kernel on both sides: a gradient of attention reads seven and writes four.
const MOST_OF_BOTH_SIDES: usize = 11;

/// The most sizes of a kernel.
const MOST_SIZES: usize = 7;

/// A kernel's description.
#[derive(Clone, Copy, Debug)]
pub struct KernelSpec {
    /// The name in reports and profiles.
    pub name: &'static str,
    /// What kind of work it is.
    pub family: KernelFamily,
    /// The sizes that its time depends on; unused ones are 1.
    pub sizes: [usize; MOST_SIZES],
    /// Properties beside the sizes that its time depends on, such as whether a bias is added.
    pub flags: [bool; 4],
    /// The operands, each side in the order in which an instruction lists them.
    pub(super) operands: [KernelOperand; MOST_OF_BOTH_SIDES],
    /// Floating-point operations. `None`: one for each element of the larger side.
    pub(super) flops: Option<f64>,
    /// Floating-point operations of what is fused with a product: an activation, its slope, a bias's gradient. Bias additions and
    /// ReLUs are not counted: they are one operation on a sum of many.
    pub(super) fused_flops: f64,
    /// Operations that count for model FLOPs utilisation, where these differ from `flops` of a matrix product.
    pub(super) model_flops: Option<f64>,
    /// Whether the first write may be the first read's memory.
    pub works_in_place: bool,
    /// Whether it only moves numbers, so that its operands may be stored in the run's precision or in single precision.
    pub moves_any_width: bool,
}

/// The kind of work a kernel does, as far as devices and software stacks treat kinds differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelFamily {
    /// Products of matrices, also for each expert or step of a recurrence.
    Product,
    /// Convolutions.
    Convolution,
    /// Attention.
    Attention,
    /// Addition of a bias.
    Bias,
    /// The sum of a gradient over rows, for a bias.
    BiasGradient,
    /// GELU, SiLU, ReLU and their gradients.
    Activation,
    /// Residual additions and dropout.
    Residual,
    /// Norms and their gradients.
    Norm,
    /// Rotary position embedding.
    Rope,
    /// Splits, joins and changes of order.
    Rearrangement,
    /// Embedding look-ups.
    Embedding,
    /// Cross-entropy.
    Loss,
    /// Routing of tokens to experts and back.
    Routing,
    /// Updates of parameters.
    Optimizer,
    /// Work on whole buckets of gradients: norms, zeroing, narrowing.
    Bucket,
    /// Pooling, scaling, quantisation, and slices for another mesh.
    Other,
}

/// A description of one operand of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelOperand {
    /// What it is in the kernel's formula: `x`, `dy`, `bias`.
    pub role: &'static str,
    /// Its elements.
    pub elements: usize,
    /// How they are stored.
    pub storage: Storage,
    /// Of an operand of integers: each is an index below this. 0 for other operands, and where it does not matter.
    pub index_limit: usize,
    /// Elements that cross the memory boundary, each as often as it does.
    moved: usize,
    access: Access,
    presence: Presence,
}

/// How a kernel uses an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// When a call lists an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    /// Never: the kernel's properties rule it out.
    Never,
    /// Always.
    Always,
    /// When the instruction wants it. Only the last write is optional.
    Optional,
    /// Always, as the parameter that an optimizer updates. The update reads and writes numbers of single precision: the parameter
    /// itself in single precision, else its master copy, of which the parameter is then the rounded value.
    Updated,
    /// In a precision narrower than single: the master copy of the parameter that is [`Presence::Updated`], which counts its traffic.
    MasterCopy,
}

/// An operand that is read.
#[inline(always)]
pub(super) fn read(role: &'static str, elements: usize) -> KernelOperand {
    KernelOperand {
        role,
        elements,
        storage: Storage::Precision,
        index_limit: 0,
        moved: elements,
        access: Access::Read,
        presence: Presence::Always,
    }
}

/// An operand that is written.
#[inline(always)]
pub(super) fn write(role: &'static str, elements: usize) -> KernelOperand {
    KernelOperand { access: Access::Write, ..read(role, elements) }
}

/// An operand of single precision that is read and written in place.
#[inline(always)]
pub(super) fn update(role: &'static str, elements: usize) -> KernelOperand {
    write(role, elements).single().moving(2 * elements)
}

/// Operand of integers that is read.
#[inline(always)]
pub(super) fn indices(role: &'static str, elements: usize, limit: usize) -> KernelOperand {
    KernelOperand { storage: Storage::Integer, index_limit: limit, ..read(role, elements) }
}

impl KernelOperand {
    const NONE: Self = Self {
        role: "",
        elements: 0,
        storage: Storage::Precision,
        index_limit: 0,
        moved: 0,
        access: Access::Read,
        presence: Presence::Never,
    };

    /// Stored in single precision.
    #[inline(always)]
    pub(super) fn single(self) -> Self {
        Self { storage: Storage::Single, ..self }
    }

    /// Stored in eight bits.
    #[inline(always)]
    pub(super) fn eight_bits(self) -> Self {
        Self { storage: Storage::Eight, ..self }
    }

    /// Stored as integers.
    #[inline(always)]
    pub(super) fn integers(self) -> Self {
        Self { storage: Storage::Integer, ..self }
    }

    /// There only if `condition` holds.
    #[inline(always)]
    pub(super) fn when(self, condition: bool) -> Self {
        if condition { self } else { Self { presence: Presence::Never, ..self } }
    }

    /// There only where the instruction lists it.
    #[inline(always)]
    pub(super) fn optional(self) -> Self {
        Self { presence: Presence::Optional, ..self }
    }

    /// The parameter that an optimizer updates.
    #[inline(always)]
    pub(super) fn updated(self) -> Self {
        Self { presence: Presence::Updated, ..self }
    }

    /// The master copy of the parameter.
    #[inline(always)]
    pub(super) fn master_copy(self) -> Self {
        Self { presence: Presence::MasterCopy, ..self }
    }

    /// Moves `elements` over the memory boundary, more or fewer than it has.
    #[inline(always)]
    pub(super) fn moving(self, elements: usize) -> Self {
        Self { moved: elements, ..self }
    }

    /// Is left out of the traffic, being small beside the kernel's other operands.
    #[inline(always)]
    pub(super) fn uncounted(self) -> Self {
        self.moving(0)
    }

    /// Whether a call may leave it out.
    pub fn is_optional(&self) -> bool {
        self.presence == Presence::Optional
    }

    /// The number format in a run of `precision`.
    pub fn data_type(&self, precision: DataType) -> DataType {
        self.storage.data_type(precision)
    }

    /// The size in a run of `precision`.
    pub fn bytes(&self, precision: DataType) -> Bytes {
        self.data_type(precision).size() * self.elements as u64
    }
}

/// Elements that cross the memory boundary at least, whatever caches there are, by how they are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Elements in the precision of the run, read.
    pub read: usize,
    /// Elements in the precision of the run, written.
    pub written: usize,
    /// Elements of eight bits, read or written.
    pub eight: usize,
    /// Elements of four bytes in every precision (statistics, ids, gradients of parameters, optimizer state), read or written.
    pub single: usize,
    /// Elements in the precision of the run that are written only where that is narrower than single precision: parameters beside their
    /// master copies.
    pub narrowed: usize,
}

impl Traffic {
    /// The bytes in a run of `precision`.
    pub fn bytes(&self, precision: DataType) -> Bytes {
        let narrowed = if precision.has_master_copies() { self.narrowed } else { 0 };
        precision.size() * (self.read + self.written + narrowed) as u64 + Bytes::new(4 * self.single as u64 + self.eight as u64)
    }
}

impl KernelSpec {
    /// A kernel that does one operation an element.
    #[inline(always)]
    pub(super) fn new<const SIZES: usize, const OPERANDS: usize>(
        name: &'static str,
        family: KernelFamily,
        sizes: [usize; SIZES],
        operands: [KernelOperand; OPERANDS],
    ) -> Self {
        const { assert!(SIZES <= MOST_SIZES && OPERANDS <= MOST_OF_BOTH_SIDES) };
        let mut spec = Self {
            name,
            family,
            sizes: [1; MOST_SIZES],
            flags: [false; 4],
            operands: [KernelOperand::NONE; MOST_OF_BOTH_SIDES],
            flops: None,
            fused_flops: 0.0,
            model_flops: None,
            works_in_place: false,
            moves_any_width: false,
        };
        for (place, size) in spec.sizes.iter_mut().zip(sizes) {
            *place = size;
        }
        for (place, operand) in spec.operands.iter_mut().zip(operands) {
            *place = operand;
        }
        spec
    }

    /// The operands that it reads, in the order in which an instruction lists them.
    pub fn reads(&self) -> impl Iterator<Item = &KernelOperand> + Clone {
        self.operands.iter().filter(|operand| operand.access == Access::Read && operand.presence != Presence::Never)
    }

    /// The operands that it writes in a run of `precision`, in the order in which an instruction lists them.
    pub fn writes(&self, precision: DataType) -> impl Iterator<Item = &KernelOperand> + Clone {
        let is_listed = move |operand: &KernelOperand| match operand.presence {
            Presence::Never => false,
            Presence::MasterCopy => precision.has_master_copies(),
            Presence::Always | Presence::Optional | Presence::Updated => true,
        };
        self.operands.iter().filter(move |operand| operand.access == Access::Write && is_listed(operand))
    }

    /// The elements that cross the memory boundary at least once.
    pub fn traffic(&self) -> Traffic {
        let mut traffic = Traffic::default();
        for operand in &self.operands {
            match (operand.presence, operand.storage, operand.access) {
                (Presence::Updated, ..) => {
                    traffic.single += 2 * operand.elements;
                    traffic.narrowed += operand.elements;
                }
                (Presence::MasterCopy | Presence::Never, ..) => {}
                (_, Storage::Precision, Access::Read) => traffic.read += operand.moved,
                (_, Storage::Precision, Access::Write) => traffic.written += operand.moved,
                (_, Storage::Eight, _) => traffic.eight += operand.moved,
                (_, Storage::Single | Storage::Integer, _) => traffic.single += operand.moved,
            }
        }
        traffic
    }

    /// Whether the time goes into matrix products, which run at a device's peak, rather than into moving memory.
    pub fn is_matrix_product(&self) -> bool {
        matches!(self.family, KernelFamily::Product | KernelFamily::Convolution | KernelFamily::Attention)
    }

    /// The number format in which it multiplies in a run of `precision`: that, but for operands of eight bits.
    pub fn format(&self, precision: DataType) -> DataType {
        let has_eight_bits = self.reads().next().is_some_and(|operand| operand.storage == Storage::Eight);
        if has_eight_bits { DataType::Fp8 } else { precision }
    }

    /// The arithmetic that it does. A multiply-add is two operations.
    pub fn flops(&self) -> Flops {
        Flops::new(self.flops.unwrap_or_else(|| {
            let Traffic { read, written, single, .. } = self.traffic();
            read.max(written).max(single) as f64
        }))
    }

    /// The arithmetic of what is fused with a product, beside the product's own.
    pub fn fused_flops(&self) -> Flops {
        Flops::new(self.fused_flops)
    }

    /// The arithmetic that counts for model FLOPs utilisation: matrix products only, attention in full and without recomputation, as
    /// Megatron-LM and PaLM count it (Chowdhery et al. 2022, appendix B).
    pub fn model_flops(&self) -> Flops {
        match self.model_flops {
            Some(flops) => Flops::new(flops),
            None if self.is_matrix_product() => self.flops(),
            None => Flops::ZERO,
        }
    }
}

/// The product of extents, as a real number: of a matrix product it may exceed what a `usize` holds.
pub(super) fn product(extents: &[usize]) -> f64 {
    extents.iter().map(|&extent| extent as f64).product()
}
