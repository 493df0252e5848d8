//! The kernels' sources, and their compilation by NVRTC. Nothing here knows how a kernel is
//! launched, or what its operands mean.

mod compiler;

use foretell_units::DataType;

/// A source file of kernels.
#[derive(Debug)]
pub struct KernelSource {
    pub file: &'static str,
    pub text: &'static str,
    /// Texts of the headers that precede it, after [`COMMON`].
    pub headers: &'static [&'static str],
}

/// The header that precedes every source file.
pub const COMMON: &str = include_str!("common.cuh");
/// Shared by the files of attention kernels.
const ATTENTION: &str = include_str!("attention.cuh");
/// Attention without tensor cores, in either order of positions.
const ATTENTION_KERNELS: &str = include_str!("attention_kernels.cuh");
/// Attention on tensor cores, in either order of positions.
const ATTENTION_TENSOR_KERNELS: &str = include_str!("attention_tensor_kernels.cuh");
/// Products of one warp on tensor cores.
const TENSOR: &str = include_str!("tensor.cuh");

macro_rules! source {
    ($file:literal $(, $headers:expr)*) => {
        KernelSource { file: $file, text: include_str!($file), headers: &[$($headers),*] }
    };
}

/// All source files.
pub const SOURCES: &[KernelSource] = &[
    source!("attention.cu", ATTENTION, ATTENTION_KERNELS),
    source!("attention_tensor.cu", ATTENTION, TENSOR, ATTENTION_TENSOR_KERNELS),
    source!("attention_tensor_zigzag.cu", ATTENTION, TENSOR, ATTENTION_TENSOR_KERNELS),
    source!("attention_zigzag.cu", ATTENTION, ATTENTION_KERNELS),
    source!("compression.cu"),
    source!("cross_entropy.cu"),
    source!("elementwise.cu"),
    source!("fp8.cu"),
    source!("images.cu"),
    source!("lstm.cu"),
    source!("mixture.cu"),
    source!("movement.cu"),
    source!("norms.cu"),
    source!("optimizers.cu"),
    source!("product.cu"),
    source!("rope.cu"),
    source!("sums.cu"),
];

impl KernelSource {
    /// Returns the file that defines a kernel.
    pub fn of(function: &str) -> Option<&'static Self> {
        let definition = format!("KERNEL({function})");
        SOURCES.iter().find(|source| source.text.contains(&definition))
    }

    /// Lists the file's kernels.
    #[cfg(test)]
    pub fn kernels(&self) -> impl Iterator<Item = &'static str> + use<> {
        let name = |line: &'static str| line.trim_start_matches("TENSOR_").strip_prefix("KERNEL(")?.split(')').next();
        self.text.lines().filter_map(name)
    }

    /// Returns `true` if the file compiles only in 16-bit precisions, as kernels on tensor cores
    /// do.
    #[cfg(test)]
    pub fn needs_half(&self) -> bool {
        self.text.contains("TENSOR_KERNEL(")
    }
}

/// Returns the value of the macro `PRECISION` for a format.
pub fn precision_number(precision: DataType) -> u32 {
    match precision {
        DataType::Bf16 => 1,
        DataType::Fp16 => 2,
        DataType::Fp32 | DataType::Tf32 => 0,
        other => unreachable!("invariant: no kernel runs in {other}"),
    }
}
