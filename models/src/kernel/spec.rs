//! Descriptions of kernels, and the facts that follow from them: operand sizes, traffic,
//! arithmetic.
//!
//! [`table`](super::table) states a [`KernelSpec`] for each kernel. Everything else about operands
//! and costs is derived here, so that no fact about a kernel is stated twice. Building a
//! description does not allocate.

use crate::storage::Storage;
use foretell_units::{Bytes, DataType, Flops};

/// The most operands that a kernel reads, and the most that it writes.
pub const MOST_OPERANDS: usize = 8;

/// The most operands that a kernel reads and writes together (a gradient of attention).
const MOST_ON_BOTH_SIDES: usize = 11;

/// The most sizes of a kernel.
const MOST_SIZES: usize = 7;

/// A description of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelSpec {
    /// Name in reports and profiles.
    pub name: &'static str,
    /// Kind of work.
    pub family: KernelFamily,
    /// Sizes that the kernel's time depends on. Kernels with fewer sizes have 1 in the other
    /// places.
    pub sizes: [usize; MOST_SIZES],
    /// Properties that the kernel's time depends on, such as whether a bias is added. Their meaning
    /// depends on the kernel.
    pub flags: [bool; 4],
    /// Operands that are read, then operands that are written, in the order of an instruction.
    /// Those that the kernel's properties rule out are marked so.
    pub(super) operands: [KernelOperand; MOST_ON_BOTH_SIDES],
    /// Elements that cross the memory boundary.
    pub(super) traffic: Traffic,
    /// Floating-point operations. `None`: one for each element of the largest kind of traffic.
    pub(super) flops: Option<f64>,
    /// Floating-point operations that are fused with a product: an activation, its slope, a bias's
    /// gradient. Adding a bias and a ReLU do not count: they are one operation on a sum of many.
    pub(super) fused_flops: f64,
    /// Floating-point operations that count for model FLOPs utilisation. `None`: those of `flops`
    /// if the kernel is a matrix product, else none.
    pub(super) model_flops: Option<f64>,
    /// Whether the first write may have the memory of the first read.
    pub may_work_in_place: bool,
    /// Whether the kernel only moves numbers. Its operands may then be stored in single precision
    /// in any run, though they are described as [`Storage::Precision`].
    pub moves_any_width: bool,
}

/// Kind of work of a kernel, as far as devices and software stacks treat kinds differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelFamily {
    /// Matrix products, also of experts and of recurrent layers.
    Product,
    /// Convolutions.
    Convolution,
    /// Attention.
    Attention,
    /// Additions of a bias.
    Bias,
    /// Sums of a gradient over rows, for a bias.
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
    /// Optimizer updates.
    Optimizer,
    /// Work on whole buckets of gradients: norms, zeroing, narrowing.
    Bucket,
    /// Pooling, scaling, quantisation, and columns for another mesh.
    Other,
}

/// A description of one operand of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelOperand {
    /// Name in the kernel's formula, such as `x`, `dy` or `bias`.
    pub role: &'static str,
    /// Number of elements.
    pub elements: usize,
    /// How the elements are stored.
    pub storage: Storage,
    /// For an operand of indices: the bound that all of them are below. 0 for other operands, and
    /// if the kernel only checks the sign.
    pub index_limit: usize,
    /// Elements that cross the memory boundary, each counted as often as it does.
    moved: usize,
    access: Access,
    presence: Presence,
}

/// How a kernel uses an operand. An operand that is updated in place is a write.
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
    /// If the instruction wants it. Only the last write of a kernel can be optional.
    Optional,
    /// Always, as the parameter that an optimizer updates. Its traffic is that of the numbers in
    /// single precision which the update reads and writes: the parameter itself, or in mixed
    /// precision its master copy. In mixed precision the parameter is written besides.
    Updated,
    /// In mixed precision, as the master copy of the [`Presence::Updated`] parameter. Its traffic
    /// is counted there.
    MasterCopy,
}

/// Describes an operand that is read.
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

/// Describes an operand that is written.
#[inline(always)]
pub(super) fn write(role: &'static str, elements: usize) -> KernelOperand {
    KernelOperand { access: Access::Write, ..read(role, elements) }
}

/// Describes an operand in single precision that is read and written in place.
#[inline(always)]
pub(super) fn update(role: &'static str, elements: usize) -> KernelOperand {
    write(role, elements).single().moving(2 * elements)
}

/// Describes an operand of indices below `limit` that is read.
#[inline(always)]
pub(super) fn indices(role: &'static str, elements: usize, limit: usize) -> KernelOperand {
    KernelOperand { index_limit: limit, ..read(role, elements).integers() }
}

impl KernelOperand {
    /// An unused slot of the list of operands.
    const NONE: Self = Self {
        role: "",
        elements: 0,
        storage: Storage::Precision,
        index_limit: 0,
        moved: 0,
        access: Access::Read,
        presence: Presence::Never,
    };

    /// The operand, stored in single precision.
    #[inline(always)]
    pub(super) fn single(self) -> Self {
        Self { storage: Storage::Single, ..self }
    }

    /// The operand, stored in eight bits.
    #[inline(always)]
    pub(super) fn eight_bits(self) -> Self {
        Self { storage: Storage::Eight, ..self }
    }

    /// The operand, a message of compressed numbers, counted in bytes.
    #[inline(always)]
    pub(super) fn bytes_of_message(self) -> Self {
        Self { storage: Storage::Message, ..self }
    }

    /// The operand, stored as integers.
    #[inline(always)]
    pub(super) fn integers(self) -> Self {
        Self { storage: Storage::Integer, ..self }
    }

    /// The operand, left out unless `condition` holds.
    #[inline(always)]
    pub(super) fn when(self, condition: bool) -> Self {
        if condition { self } else { Self { presence: Presence::Never, ..self } }
    }

    /// The operand, listed only if the instruction wants it.
    #[inline(always)]
    pub(super) fn optional(self) -> Self {
        Self { presence: Presence::Optional, ..self }
    }

    /// The operand as the parameter that an optimizer updates.
    #[inline(always)]
    pub(super) fn updated(self) -> Self {
        Self { presence: Presence::Updated, ..self }
    }

    /// The operand as the master copy of the parameter that an optimizer updates.
    #[inline(always)]
    pub(super) fn master_copy(self) -> Self {
        Self { presence: Presence::MasterCopy, ..self.single() }
    }

    /// The operand, of which `elements` cross the memory boundary instead of each element once.
    #[inline(always)]
    pub(super) fn moving(self, elements: usize) -> Self {
        Self { moved: elements, ..self }
    }

    /// The operand, left out of the traffic because it is small compared with the others.
    #[inline(always)]
    pub(super) fn uncounted(self) -> Self {
        self.moving(0)
    }

    /// Whether a call may leave the operand out.
    pub fn is_optional(&self) -> bool {
        self.presence == Presence::Optional
    }

    /// Returns the number format in a run of `precision`.
    pub fn data_type(&self, precision: DataType) -> DataType {
        self.storage.data_type(precision)
    }

    /// Returns the size in a run of `precision`.
    pub fn bytes(&self, precision: DataType) -> Bytes {
        self.data_type(precision).size() * self.elements as u64
    }
}

/// Elements that cross the memory boundary whatever caches there are, by how they are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Elements in the precision of the run, read.
    pub read: usize,
    /// Elements in the precision of the run, written.
    pub written: usize,
    /// Elements of eight bits, read or written.
    pub eight: usize,
    /// Elements of four bytes in every run (statistics, indices, gradients of parameters, optimizer
    /// state), read or written.
    pub single: usize,
    /// Elements in the precision of the run that are written only in mixed precision: parameters
    /// that have a master copy.
    pub narrowed: usize,
}

impl Traffic {
    /// Returns the elements of one operand. A value rather than additions in place, which the
    /// optimiser would not resolve for the operands of a known kernel.
    #[inline(always)]
    fn of(operand: &KernelOperand) -> Self {
        let (elements, moved) = (operand.elements, operand.moved);
        match (operand.presence, operand.storage, operand.access) {
            (Presence::Updated, ..) => Self { single: 2 * elements, narrowed: elements, ..Self::default() },
            (Presence::MasterCopy | Presence::Never, ..) => Self::default(),
            (_, Storage::Precision, Access::Read) => Self { read: moved, ..Self::default() },
            (_, Storage::Precision, Access::Write) => Self { written: moved, ..Self::default() },
            (_, Storage::Eight | Storage::Message, _) => Self { eight: moved, ..Self::default() },
            (_, Storage::Single | Storage::Integer, _) => Self { single: moved, ..Self::default() },
        }
    }

    /// Adds the elements of another operand.
    #[inline(always)]
    fn add(&mut self, other: Self) {
        self.read += other.read;
        self.written += other.written;
        self.eight += other.eight;
        self.single += other.single;
        self.narrowed += other.narrowed;
    }

    /// Returns the bytes in a run of `precision`.
    pub fn bytes(&self, precision: DataType) -> Bytes {
        let narrowed = if precision.has_master_copies() { self.narrowed } else { 0 };
        precision.size() * (self.read + self.written + narrowed) as u64 + Bytes::new(4 * self.single as u64 + self.eight as u64)
    }
}

impl KernelSpec {
    /// Describes a kernel without flags, of default arithmetic, that does not work in place.
    #[inline(always)]
    pub(super) fn new<const SIZES: usize, const OPERANDS: usize>(
        name: &'static str,
        family: KernelFamily,
        sizes: [usize; SIZES],
        operands: [KernelOperand; OPERANDS],
    ) -> Self {
        const { assert!(SIZES <= MOST_SIZES && OPERANDS <= MOST_ON_BOTH_SIDES) };
        let mut traffic = Traffic::default();
        for operand in &operands {
            traffic.add(Traffic::of(operand));
        }
        let mut spec = Self {
            name,
            family,
            sizes: [1; MOST_SIZES],
            flags: [false; 4],
            operands: [KernelOperand::NONE; MOST_ON_BOTH_SIDES],
            traffic,
            flops: None,
            fused_flops: 0.0,
            model_flops: None,
            may_work_in_place: false,
            moves_any_width: false,
        };
        // The optimiser drops copies of a known length if the caller does not need them, but not
        // loops.
        spec.sizes[..SIZES].copy_from_slice(&sizes);
        spec.operands[..OPERANDS].copy_from_slice(&operands);
        spec
    }

    /// Returns the operands that are read, in the order of an instruction.
    pub fn reads(&self) -> impl Iterator<Item = &KernelOperand> + Clone {
        self.operands.iter().filter(|operand| operand.access == Access::Read && operand.presence != Presence::Never)
    }

    /// Returns the operands that are written in a run of `precision`, in the order of an
    /// instruction.
    pub fn writes(&self, precision: DataType) -> impl Iterator<Item = &KernelOperand> + Clone {
        let is_listed = move |operand: &KernelOperand| match operand.presence {
            Presence::Never => false,
            Presence::MasterCopy => precision.has_master_copies(),
            Presence::Always | Presence::Optional | Presence::Updated => true,
        };
        self.operands.iter().filter(move |operand| operand.access == Access::Write && is_listed(operand))
    }

    /// Returns the elements that cross the memory boundary.
    #[inline(always)]
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Whether most of the time goes into matrix products, which run at a device's peak rate,
    /// rather than into memory traffic.
    #[inline(always)]
    pub fn is_matrix_product(&self) -> bool {
        matches!(self.family, KernelFamily::Product | KernelFamily::Convolution | KernelFamily::Attention)
    }

    /// Returns the number format in which a matrix product multiplies in a run of `precision`:
    /// `precision` itself, except for products of eight bits.
    pub fn format(&self, precision: DataType) -> DataType {
        let has_eight_bits = self.reads().next().is_some_and(|operand| operand.storage == Storage::Eight);
        if has_eight_bits { DataType::Fp8 } else { precision }
    }

    /// Returns the floating-point operations, except those that are fused with a product. A
    /// multiply-add is two operations.
    #[inline(always)]
    pub fn flops(&self) -> Flops {
        Flops::new(self.flops.unwrap_or_else(|| {
            let Traffic { read, written, single, .. } = self.traffic();
            read.max(written).max(single) as f64
        }))
    }

    /// Returns the floating-point operations that are fused with a product, beside the product's
    /// own.
    pub fn fused_flops(&self) -> Flops {
        Flops::new(self.fused_flops)
    }

    /// Returns the floating-point operations that count for model FLOPs utilisation: those of
    /// matrix products, with attention in full and without recomputation. Megatron-LM and PaLM
    /// count so (Chowdhery et al. 2022, appendix B).
    #[inline(always)]
    pub fn model_flops(&self) -> Flops {
        match self.model_flops {
            Some(flops) => Flops::new(flops),
            None if self.is_matrix_product() => self.flops(),
            None => Flops::ZERO,
        }
    }
}

/// The product of extents as a real number: for a matrix product it may exceed a `usize`.
pub(super) fn product(extents: &[usize]) -> f64 {
    extents.iter().map(|&extent| extent as f64).product()
}
