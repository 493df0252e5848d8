//! Durations from data sheets alone: the roofline (Williams, Waterman and Patterson 2009) with an
//! assumed efficiency. Used for kernels without samples. Every figure here is an assumption that a
//! calibration replaces.

use super::estimate::Estimate;
use super::parameters::{HostWaits, Parameters};
use foretell_models::{Kernel, KernelFamily};
use foretell_topologies::{Architecture, DeviceKind};
use foretell_units::{Bytes, DataType, Flops, Seconds};

/// The efficiency of a processor relative to its data sheet.
#[derive(Clone, Copy)]
struct Efficiency {
    /// The share of the peak that large matrix products reach.
    product: f64,
    /// The share of the peak that convolutions reach.
    convolution: f64,
    /// The share of the peak that attention reaches.
    attention: f64,
    /// The share of the single-precision peak that all other kernels reach. They use no fused
    /// multiply-adds and no tensor cores.
    elementwise: f64,
    /// The share of the memory bandwidth that kernels reach.
    memory: f64,
    /// The time of the smallest kernel.
    launch: Seconds,
    /// The time that a matrix product loses at its start, until every unit has work, and at its
    /// end.
    ramp: Seconds,
}

/// The assumed efficiency of a GPU.
///
/// - Products: cuBLAS reaches 0.6 to 0.8 of the dense peak of an A100 or H100 on large bf16
///   matrices. cuDNN reaches somewhat less on convolutions of ResNet's sizes. FlashAttention-2
///   reaches 0.4 to 0.6 (Dao 2023, figure 4).
/// - Memory: kernels like STREAM reach 0.8 to 0.9 of the HBM bandwidth, fused and strided ones
///   less.
/// - Launch: about 4 us between consecutive kernels of a CUDA stream.
/// - Ramp: a 1024 x 1024 x 1024 bf16 product takes about 18 us on an A100, which this value
///   reproduces.
const GPU: Efficiency = Efficiency {
    product: 0.65,
    convolution: 0.5,
    attention: 0.45,
    elementwise: 0.5,
    memory: 0.75,
    launch: Seconds::new(4e-6),
    ramp: Seconds::new(3e-6),
};

/// The assumed efficiency of a CPU. Products run from a core's caches at about 0.8 of the fused
/// multiply-add peak. Convolutions lose some of that rate to gathering their windows.
/// Transcendental functions cost about ten operations each. All cores share the memory. A call and
/// its loop set-up take a fraction of a microsecond.
const CPU: Efficiency = Efficiency {
    product: 0.8,
    convolution: 0.65,
    attention: 0.5,
    elementwise: 0.1,
    memory: 0.6,
    launch: Seconds::new(0.3e-6),
    ramp: Seconds::ZERO,
};

fn efficiency(architecture: Architecture) -> &'static Efficiency {
    match architecture {
        Architecture::Cpu => &CPU,
        // The figures of a GPU stand in for a TPU. A TPU's compiler fuses more, but no figures per
        // kernel are published.
        Architecture::Gpu | Architecture::Tpu => &GPU,
    }
}

/// Returns the launch overhead, which [`kernel_time`] includes.
pub(crate) fn launch(architecture: Architecture) -> Seconds {
    efficiency(architecture).launch
}

/// Returns the duration of a kernel by the data sheet of the device.
pub(crate) fn kernel_time(kernel: &Kernel, accumulate: bool, precision: DataType, kind: &DeviceKind) -> Seconds {
    kernel_time_at(efficiency(kind.architecture), kernel, accumulate, precision, kind)
}

/// Returns a lower bound on the duration of all kernels that together do a kernel's work: its
/// arithmetic and its traffic, without launches.
pub(crate) fn least_total_time(kernel: &Kernel, accumulate: bool, precision: DataType, kind: &DeviceKind) -> Seconds {
    let whole = Efficiency { launch: Seconds::ZERO, ramp: Seconds::ZERO, ..*efficiency(kind.architecture) };
    kernel_time_at(&whole, kernel, accumulate, precision, kind)
}

fn kernel_time_at(efficiency: &Efficiency, kernel: &Kernel, accumulate: bool, precision: DataType, kind: &DeviceKind) -> Seconds {
    let spec = kernel.spec();
    let (share, format) = match spec.family {
        KernelFamily::Attention => (efficiency.attention, precision),
        KernelFamily::Convolution => (efficiency.convolution, precision),
        KernelFamily::Product => (efficiency.product, spec.format(precision)),
        _ => (efficiency.elementwise, DataType::Fp32),
    };
    let peak = kind.peak_rate(format).or_else(|| kind.peak_rate(DataType::Fp32)).or_else(|| kind.peak.values().copied().next());
    // The products of a recurrence run one after the other.
    let products = match kernel {
        Kernel::Lstm(sizes) | Kernel::LstmGradient { sizes, .. } => sizes.sequence,
        // A step of ring attention that sees no keys has no product.
        _ => usize::from(spec.is_matrix_product() && spec.flops() > Flops::ZERO),
    };
    let ramp = efficiency.ramp * products as f64;
    let single = kind.peak_rate(DataType::Fp32).or(peak);
    let fused = single.map_or(Seconds::ZERO, |peak| spec.fused_flops() / (peak * efficiency.elementwise));
    let arithmetic = peak.map_or(Seconds::ZERO, |peak| (spec.flops() / (peak * share)) + ramp) + fused;
    let traffic = spec.traffic();
    let mut bytes = traffic.bytes(precision);
    if accumulate {
        // Accumulation also reads the sum. Gradients of parameters are in single precision.
        bytes += Bytes::new(4 * traffic.single as u64);
    }
    arithmetic.max(bytes / (kind.memory_bandwidth * efficiency.memory)) + efficiency.launch
}

/// Returns the costs of a device kind apart from its kernels. They are used if no profile states
/// them.
///
/// - GPU: a CUDA event from stream to stream takes about 2 us. The launch and set-up of a
///   collective take about 6 us (NCCL's latency floor beyond the hops). NCCL's channels use 16 of
///   132 multiprocessors.
/// - CPU: the wake-up of a thread takes about 5 us. Communication runs on the core that computes.
pub(crate) fn parameters(architecture: Architecture) -> Parameters {
    let assumed = |seconds: f64| Estimate::assumed(Seconds::new(seconds));
    match architecture {
        Architecture::Cpu => Parameters {
            instruction_overhead: assumed(0.2e-6),
            stream_handoff: assumed(5e-6),
            launch: Seconds::ZERO,
            step_overhead: assumed(50e-6),
            micro_batch_overhead: Seconds::ZERO,
            exchange_overhead: Seconds::new(3e-6),
            has_trees: false,
            load_seconds_per_byte: Seconds::new(1e-9),
            communication_share: 1.0,
            copy_share: 1.0,
            communication_growth: None,
            host_waits: HostWaits::default(),
            interruption: Seconds::new(10e-6),
        },
        Architecture::Gpu | Architecture::Tpu => Parameters {
            instruction_overhead: assumed(0.0),
            stream_handoff: assumed(2e-6),
            // The kernel times already include launches.
            launch: Seconds::ZERO,
            step_overhead: assumed(100e-6),
            micro_batch_overhead: Seconds::ZERO,
            exchange_overhead: Seconds::new(6e-6),
            has_trees: true,
            load_seconds_per_byte: Seconds::new(0.1e-9),
            communication_share: 0.12,
            copy_share: 0.0,
            communication_growth: None,
            host_waits: HostWaits::default(),
            interruption: Seconds::ZERO,
        },
    }
}
