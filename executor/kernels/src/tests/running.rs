//! Running a kernel on a backend: numbers in double precision in and out, stored between as the
//! kernel has them.

use super::{PARAMETERS, Tensor};
use crate::half::SixteenBits;
use crate::{Backend, CpuBackend, KernelCall, Operand, operand_types};
use foretell_models::Kernel;
use foretell_units::DataType;

/// Runs the kernel on this machine's backend. With `share_first` the first write is the first
/// read's memory.
pub(super) fn run(
    kernel: &Kernel,
    reads: &[Tensor],
    before: &[Tensor],
    accumulate: bool,
    share_first: bool,
    group_index: usize,
) -> Vec<Tensor> {
    run_on(&mut CpuBackend::new(), kernel, reads, before, accumulate, share_first, group_index)
}

pub(super) fn run_on(
    backend: &mut dyn Backend,
    kernel: &Kernel,
    reads: &[Tensor],
    before: &[Tensor],
    accumulate: bool,
    share_first: bool,
    group_index: usize,
) -> Vec<Tensor> {
    run_in(backend, DataType::Fp32, kernel, reads, before, accumulate, share_first, group_index)
}

/// Runs the kernel in a precision; the operands are stored as it says.
#[allow(clippy::too_many_arguments)]
pub(super) fn run_in(
    backend: &mut dyn Backend,
    precision: DataType,
    kernel: &Kernel,
    reads: &[Tensor],
    before: &[Tensor],
    accumulate: bool,
    share_first: bool,
    group_index: usize,
) -> Vec<Tensor> {
    let types = operand_types(kernel, precision);
    let types: Vec<DataType> = types.reads[..reads.len()].iter().chain(&types.writes).copied().collect();
    let to_bytes = |data_type: DataType, x: f64| match (SixteenBits::of(data_type), data_type) {
        (Some(half), _) => half.nearest(x as f32).to_le_bytes().to_vec(),
        (None, DataType::Fp8 | DataType::Int8) => vec![x as u8],
        (None, DataType::Int32) => (x as i32).to_le_bytes().to_vec(),
        _ => (x as f32).to_le_bytes().to_vec(),
    };
    // In packs, so that they are aligned as an arena's are.
    let mut memory: Vec<(Vec<u128>, usize)> = Vec::new();
    for (tensor, &data_type) in reads.iter().chain(before).zip(&types) {
        let bytes: Vec<u8> = tensor.iter().flat_map(|&x| to_bytes(data_type, x)).collect();
        let pack = |bytes: &[u8]| bytes.iter().rev().fold(0, |pack, &byte| pack << 8 | u128::from(byte));
        memory.push((bytes.chunks(16).map(pack).collect(), bytes.len()));
    }
    let mut all: Vec<Operand> =
        memory.iter_mut().map(|(memory, bytes)| Operand { pointer: memory.as_mut_ptr().cast(), bytes: *bytes }).collect();
    if share_first {
        all[reads.len()] = all[0];
    }
    let (read, written) = all.split_at(reads.len());
    let call = KernelCall {
        kernel,
        reads: read,
        writes: written,
        accumulate,
        hyperparameters: &PARAMETERS,
        group_index,
        samples_before: 0,
        precision,
    };
    // SAFETY: the operands are vectors that live until the end; at most the first write is the
    // first read.
    unsafe { backend.run(&call) }.unwrap();
    if share_first {
        memory[reads.len()] = memory[0].clone();
    }
    memory[reads.len()..]
        .iter()
        .zip(&types[reads.len()..])
        .map(|((memory, length), &data_type)| {
            let bytes: Vec<u8> = memory.iter().flat_map(|pack| pack.to_le_bytes()).take(*length).collect();
            match (SixteenBits::of(data_type), data_type) {
                (Some(half), _) => {
                    bytes.as_chunks::<2>().0.iter().map(|&bits| f64::from(half.to_single(u16::from_le_bytes(bits)))).collect()
                }
                (None, DataType::Fp8 | DataType::Int8) => bytes.iter().map(|&code| f64::from(code)).collect(),
                (None, DataType::Int32) => {
                    bytes.as_chunks::<4>().0.iter().map(|&bits| f64::from(i32::from_le_bytes(bits))).collect()
                }
                _ => bytes.as_chunks::<4>().0.iter().map(|&bits| f64::from(f32::from_le_bytes(bits))).collect(),
            }
        })
        .collect()
}
