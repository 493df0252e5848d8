//! The start of every parameter: drawn for the whole tensor from a stream of its own, of which each rank keeps its share.
//! So a parameter starts the same in every layout.

use crate::arena::Arenas;
use crate::backend::cuda::DeviceAddress;
use crate::error::ExecutorError;
use crate::half::Half;
use foretell_models::{Graph, Initialisation, Role, Tensor};
use foretell_program::{Buffer, Coordinates, Initial, InitialShare, Placements, StageMesh, StageProgram};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};
use sha2::{Digest, Sha256};

/// Fills all parameters, their master copies and running statistics of a rank.
pub(crate) fn initialise(
    stage: &StageProgram,
    graph: &Graph,
    mesh: &StageMesh,
    coordinates: Coordinates,
    arenas: &Arenas,
    seed: u64,
) -> Result<(), ExecutorError> {
    let start = Start { graph, mesh, coordinates, seed };
    let places = stage.buffers.iter().filter_map(|buffer| Some((buffer, buffer.initial.as_deref()?, arenas.at(buffer)?)));
    let (far, near): (Vec<(&Buffer, &Initial, *mut u8)>, Vec<_>) =
        places.partition(|(buffer, ..)| arenas.of(buffer).driver().is_some());
    for (buffer, initial, place) in near {
        // SAFETY: the place lies inside its arena, is aligned and as long as the buffer, and nobody uses the arena yet.
        unsafe { start.fill(buffer, initial, place) };
    }
    let Some(driver) = arenas.driver() else { return Ok(()) };
    // A GPU's memory is filled from copies, in words, so that they are aligned. The processor's cores have nothing else to do: they make several
    // at once, each of which is drawn from a stream of its own.
    let stream = driver.create_stream()?;
    let at_once = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for some in far.chunks(at_once) {
        let mut copies: Vec<Vec<u32>> =
            some.iter().map(|(buffer, ..)| vec![0; (buffer.bytes.count() as usize).div_ceil(4)]).collect();
        std::thread::scope(|scope| {
            for (copy, &(buffer, initial, _)) in copies.iter_mut().zip(some) {
                let start = &start;
                // SAFETY: the copy is aligned and as long as the buffer.
                scope.spawn(move || unsafe { start.fill(buffer, initial, copy.as_mut_ptr().cast()) });
            }
        });
        for (copy, &(buffer, _, place)) in copies.iter().zip(some) {
            let bytes = buffer.bytes.count() as usize;
            // SAFETY: the place lies inside the arena, and the copy is as long and lives until the stream is done.
            unsafe { driver.copy_in(DeviceAddress::from_pointer(place), copy.as_ptr().cast(), bytes, stream) }?;
        }
        driver.synchronize(stream)?;
    }
    Ok(())
}

/// What the start of a rank's buffers follows from.
struct Start<'a> {
    graph: &'a Graph,
    mesh: &'a StageMesh,
    coordinates: Coordinates,
    seed: u64,
}

impl Start<'_> {
    /// Writes a buffer's first numbers.
    ///
    /// # Safety
    /// The place is aligned, as long as the buffer and nobody else's.
    unsafe fn fill(&self, buffer: &Buffer, initial: &Initial, place: *mut u8) {
        let Self { graph, mesh, coordinates, seed } = *self;
        let elements: usize = buffer.shape.iter().product();
        let half = Half::of(buffer.data_type);
        let mut widened = vec![0.0; if half.is_some() { elements } else { 0 }];
        let filled = match half {
            Some(_) => widened.as_mut_slice(),
            // SAFETY: the caller's promise: it holds that many `f32`s.
            None => unsafe { std::slice::from_raw_parts_mut(place.cast::<f32>(), elements) },
        };
        match initial {
            Initial::Share(share) => filled.copy_from_slice(&share_of(share, graph, mesh, coordinates, seed)),
            Initial::Bucket { members, axis } => {
                let first = axis.map_or(0, |axis| coordinates.along(axis) * elements);
                for (offset, share) in members {
                    let share = share_of(share, graph, mesh, coordinates, seed);
                    // What of it lies between the first and the last element of this part.
                    let (from, until) = ((*offset).max(first), (offset + share.len()).min(first + elements));
                    if from < until {
                        filled[from - first..until - first].copy_from_slice(&share[from - offset..until - offset]);
                    }
                }
            }
            Initial::Values(values) => filled[..values.len()].copy_from_slice(values),
        }
        if let Some(half) = half {
            // SAFETY: the caller's promise: it holds that many numbers of sixteen bits.
            half.narrow(unsafe { std::slice::from_raw_parts_mut(place.cast::<u16>(), elements) }, &widened);
        }
    }
}

/// The part of a tensor's start that a rank holds.
fn share_of(share: &InitialShare, graph: &Graph, mesh: &StageMesh, coordinates: Coordinates, seed: u64) -> Vec<f32> {
    let tensor = graph.tensor(share.tensor);
    let full: Vec<usize> = tensor.dimensions.iter().map(|one| one.extent).collect();
    let mut part = vec![0.0; share.placements.local_shape(&full, mesh).iter().product()];
    take_share(&values(tensor, seed), tensor, &share.placements, mesh, coordinates, &mut part);
    part
}

/// All values of a tensor as it starts.
fn values(tensor: &Tensor, seed: u64) -> Vec<f32> {
    let elements = tensor.elements();
    let mut random = stream(seed, &tensor.name);
    let initialisation = match &tensor.role {
        Role::Parameter(parameter) => parameter.initialisation,
        _ => {
            // Running statistics: mean 0, variance 1.
            let mut moments = vec![0.0; elements];
            moments[elements / 2..].fill(1.0);
            return moments;
        }
    };
    match initialisation {
        Initialisation::Zeros => vec![0.0; elements],
        Initialisation::Ones => vec![1.0; elements],
        Initialisation::Normal(deviation) => match Normal::new(0.0, deviation as f32) {
            Ok(normal) => (0..elements).map(|_| normal.sample(&mut random)).collect(),
            Err(_) => vec![0.0; elements],
        },
        Initialisation::Uniform(bound) => match Uniform::new(-bound as f32, bound as f32) {
            Ok(uniform) => (0..elements).map(|_| uniform.sample(&mut random)).collect(),
            Err(_) => vec![0.0; elements],
        },
    }
}

/// A random stream of its own for each name.
fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let digest = Sha256::new().chain_update(b"parameter").chain_update(seed.to_le_bytes()).chain_update(name).finalize();
    ChaCha8Rng::from_seed(digest.into())
}

/// Copies the part of a tensor that a rank holds.
fn take_share(
    whole: &[f32],
    tensor: &Tensor,
    placements: &Placements,
    mesh: &StageMesh,
    coordinates: Coordinates,
    share: &mut [f32],
) {
    let full: Vec<usize> = tensor.dimensions.iter().map(|one| one.extent).collect();
    let local = placements.local_shape(&full, mesh);
    let start = placements.local_start(&full, mesh, coordinates);
    // Row by row of the last dimension: a multi-index over the others.
    let row = local.last().copied().unwrap_or(1);
    for (number, values) in share.chunks_mut(row.max(1)).enumerate() {
        let mut rest = number;
        let mut position = start.last().copied().unwrap_or(0);
        let mut stride = full.last().copied().unwrap_or(1);
        for dimension in (0..full.len().saturating_sub(1)).rev() {
            position += (start[dimension] + rest % local[dimension]) * stride;
            rest /= local[dimension];
            stride *= full[dimension];
        }
        values.copy_from_slice(&whole[position..position + values.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::{GraphOptions, Mlp, Model};
    use foretell_program::{BufferRole, Layout, Offload, Plan, Rank, compile};
    use foretell_units::DataType;

    /// A buffer's numbers as they lie in the arena.
    fn bits<T: Copy>(arenas: &Arenas, buffer: &foretell_program::Buffer) -> Vec<T> {
        let pointer = arenas.at(buffer).expect("it lies in the arena").cast::<T>();
        // SAFETY: the place lies inside the arena and is aligned; no thread runs.
        unsafe { std::slice::from_raw_parts(pointer, buffer.shape.iter().product()) }.to_vec()
    }

    #[test]
    fn parameters_are_the_nearest_to_their_master_copies_which_start_as_in_single_precision() {
        let model = Model::Mlp(Mlp { widths: vec![12, 8, 6] });
        let started = |precision: DataType, offload: Offload| {
            let plan = Plan { precision, ..Plan::new(Layout { tensor: 2, offload, ..Layout::default() }, 4) };
            let compiled = compile(&model, "mlp", &plan).expect("it can be laid out");
            let graph = model.graph("mlp", &GraphOptions::ONE).expect("it is a model");
            let (mesh, stage) = (&compiled.training.mesh, compiled.training.list_of(Rank(1)).clone());
            let arena = Arenas::new(stage.arena, stage.host_arena, None).expect("a small arena");
            initialise(&stage, &graph, mesh.stage(0), mesh.coordinates(Rank(1)), &arena, 3).expect("it is filled");
            (stage, arena)
        };
        let (single, single_arena) = started(DataType::Fp32, Offload::None);
        let formats = [(DataType::Bf16, Half::Bf16), (DataType::Fp16, Half::Fp16)].into_iter();
        for ((precision, half), offload) in formats.flat_map(|format| Offload::ALL.map(|offload| (format, offload))) {
            let (mixed, arena) = started(precision, offload);
            let roots = |stage: &StageProgram, role| -> Vec<foretell_program::Buffer> {
                let own =
                    |buffer: &&foretell_program::Buffer| buffer.role == role && buffer.parent.is_none() && buffer.persistent;
                stage.buffers.iter().filter(own).cloned().collect()
            };
            let expected = roots(&single, BufferRole::Parameter);
            let (parameters, states) = (roots(&mixed, BufferRole::Parameter), roots(&mixed, BufferRole::OptimizerState));
            // One velocity a bucket, and one master copy after it; what controls the loss scale is none of theirs.
            let states: Vec<_> = states.into_iter().filter(|one| one.name.starts_with("optimizer state")).collect();
            assert_eq!((parameters.len(), states.len()), (expected.len(), 2 * expected.len()));
            for (index, expected) in expected.iter().enumerate() {
                let masters: Vec<u32> = bits(&arena, &states[2 * index + 1]);
                assert_eq!(masters, bits::<u32>(&single_arena, expected), "{}", expected.name);
                assert!(masters.iter().any(|&bits| bits != 0), "weights do not start at zero");
                let nearest: Vec<u16> = masters.iter().map(|&bits| half.nearest(f32::from_bits(bits))).collect();
                assert_eq!(nearest, bits::<u16>(&arena, &parameters[index]), "{} in {precision}", expected.name);
            }
        }
    }
}
