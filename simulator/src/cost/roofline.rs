//! Durations from data sheets alone: the roofline (Williams, Waterman and Patterson 2009) with a
//! stated efficiency, for what nobody has measured. Every figure here is an assumption; a
//! calibration replaces it.

use super::estimate::Estimate;
use super::parameters::{HostWaits, Parameters};
use foretell_models::{Kernel, KernelFamily};
use foretell_topologies::{Architecture, DeviceKind};
use foretell_units::{Bytes, DataType, Flops, Seconds};

/// What a kind of processor makes of its data sheet.
struct Efficiency {
    /// Of the peak, for matrix products that are large enough.
    product: f64,
    /// Of the peak, for convolutions.
    convolution: f64,
    /// Of the peak, for attention.
    attention: f64,
    /// Of the single-precision peak, for everything else, which has no fused multiply-adds and no
    /// tensor cores.
    elementwise: f64,
    /// Of the memory bandwidth.
    memory: f64,
    /// What a kernel takes however small it is.
    launch: Seconds,
    /// What a matrix product loses until every unit has work, and again at the end.
    ramp: Seconds,
}

/// Products: cuBLAS reaches 0.6 to 0.8 of an A100's or H100's dense peak on large bf16 matrices;
/// cuDNN somewhat less with convolutions of ResNet's sizes; FlashAttention-2 0.4 to 0.6 (Dao 2023,
/// figure 4). Memory: STREAM-like kernels reach 0.8 to 0.9 of HBM's figure, fused and strided ones
/// less. Launch: about 4 us between back-to-back kernels of a stream on CUDA. Ramp: fits that a
/// 1024 x 1024 x 1024 bf16 product takes about 18 us on an A100.
const GPU: Efficiency = Efficiency {
    product: 0.65,
    convolution: 0.5,
    attention: 0.45,
    elementwise: 0.5,
    memory: 0.75,
    launch: Seconds::new(4e-6),
    ramp: Seconds::new(3e-6),
};

/// A core's products run from its caches at about 0.8 of the fused multiply-add peak; convolutions
/// lose some to gathering their windows. Transcendental functions cost some ten operations each.
/// Memory is shared by all cores. A call and the set-up of the loops is a fraction of a
/// microsecond.
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
        // A TPU's compiler fuses more, but no kernel-level figures are at hand; it is taken as a
        // GPU.
        Architecture::Gpu | Architecture::Tpu => &GPU,
    }
}

/// What of a kernel's duration is its launch.
pub(crate) fn launch(architecture: Architecture) -> Seconds {
    efficiency(architecture).launch
}

/// A kernel's duration by the data sheet of the device.
pub(crate) fn kernel_time(kernel: &Kernel, accumulate: bool, precision: DataType, kind: &DeviceKind) -> Seconds {
    let efficiency = efficiency(kind.architecture);
    let spec = kernel.spec();
    let (share, format) = match spec.family {
        KernelFamily::Attention => (efficiency.attention, precision),
        KernelFamily::Convolution => (efficiency.convolution, precision),
        KernelFamily::Product => (efficiency.product, spec.format(precision)),
        _ => (efficiency.elementwise, DataType::Fp32),
    };
    let peak = kind.peak_rate(format).or_else(|| kind.peak_rate(DataType::Fp32)).or_else(|| kind.peak.values().copied().next());
    // The products of a recurrence wait for each other.
    let products = match kernel {
        Kernel::Lstm(sizes) | Kernel::LstmGradient { sizes, .. } => sizes.sequence,
        // A step of a ring that sees no keys makes no product.
        _ => usize::from(spec.is_matrix_product() && spec.flops() > Flops::ZERO),
    };
    let ramp = efficiency.ramp * products as f64;
    let single = kind.peak_rate(DataType::Fp32).or(peak);
    let fused = single.map_or(Seconds::ZERO, |peak| spec.fused_flops() / (peak * efficiency.elementwise));
    let arithmetic = peak.map_or(Seconds::ZERO, |peak| (spec.flops() / (peak * share)) + ramp) + fused;
    let traffic = spec.traffic();
    let mut bytes = traffic.bytes(precision);
    if accumulate {
        // What is added to is read as well; gradients of parameters are single precision.
        bytes += Bytes::new(4 * traffic.single as u64);
    }
    arithmetic.max(bytes / (kind.memory_bandwidth * efficiency.memory)) + efficiency.launch
}

/// What else a kind of device costs, where no profile says. GPU: CUDA event from stream to stream
/// about 2 us, a collective's launch and set-up about 6 us (NCCL's latency floor beyond the hops),
/// 16 of 132 multiprocessors for NCCL's channels. CPU: a thread's wake-up about 5 us; communication
/// runs on the core that computes.
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
            // The samples' own launches are among their times.
            launch: Seconds::ZERO,
            step_overhead: assumed(100e-6),
            micro_batch_overhead: Seconds::ZERO,
            exchange_overhead: Seconds::new(6e-6),
            load_seconds_per_byte: Seconds::new(0.1e-9),
            communication_share: 0.12,
            copy_share: 0.0,
            communication_growth: None,
            host_waits: HostWaits::default(),
            interruption: Seconds::ZERO,
        },
    }
}
