//! Initial parameters, master copies and running statistics.
//!
//! Each tensor's values are drawn from a random stream of its own, for the whole tensor; a rank
//! keeps its shard. So a parameter starts with the same values in every layout.

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

/// Fills every buffer of a rank that has initial values.
pub(crate) fn initialise(
    stage: &StageProgram,
    graph: &Graph,
    mesh: &StageMesh,
    coordinates: Coordinates,
    arenas: &Arenas,
    seed: u64,
) -> Result<(), ExecutorError> {
    let initialiser = Initialiser { graph, mesh, coordinates, seed };
    let places = stage.buffers.iter().filter_map(|buffer| Some((buffer, buffer.initial.as_deref()?, arenas.at(buffer)?)));
    let (on_device, on_host): (Vec<(&Buffer, &Initial, *mut u8)>, Vec<_>) =
        places.partition(|(buffer, ..)| arenas.of(buffer).driver().is_some());
    for (buffer, initial, place) in on_host {
        // SAFETY: the place lies in its arena, is aligned and as long as the buffer. The arena is
        // not in use yet.
        unsafe { initialiser.fill(buffer, initial, place) };
    }
    let Some(driver) = arenas.driver() else { return Ok(()) };
    // GPU memory is filled from copies on the host, one per core at a time. They are vectors of
    // words, for their alignment.
    let stream = driver.create_stream()?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for group in on_device.chunks(cores) {
        let mut copies: Vec<Vec<u32>> =
            group.iter().map(|(buffer, ..)| vec![0; (buffer.bytes.count() as usize).div_ceil(4)]).collect();
        std::thread::scope(|scope| {
            for (copy, &(buffer, initial, _)) in copies.iter_mut().zip(group) {
                let initialiser = &initialiser;
                // SAFETY: the copy is aligned and as long as the buffer.
                scope.spawn(move || unsafe { initialiser.fill(buffer, initial, copy.as_mut_ptr().cast()) });
            }
        });
        for (copy, &(buffer, _, place)) in copies.iter().zip(group) {
            let bytes = buffer.bytes.count() as usize;
            // SAFETY: the place lies in the arena. The copy is as long, and lives until the stream
            // is done.
            unsafe { driver.copy_in(DeviceAddress::from_pointer(place), copy.as_ptr().cast(), bytes, stream) }?;
        }
        driver.synchronize(stream)?;
    }
    Ok(())
}

/// The inputs that determine the initial values of a rank.
struct Initialiser<'a> {
    graph: &'a Graph,
    mesh: &'a StageMesh,
    coordinates: Coordinates,
    seed: u64,
}

impl Initialiser<'_> {
    /// Writes the initial values of a buffer to `place`, in the buffer's data type.
    ///
    /// # Safety
    /// The place is aligned, as long as the buffer, and not in use elsewhere.
    unsafe fn fill(&self, buffer: &Buffer, initial: &Initial, place: *mut u8) {
        let elements: usize = buffer.shape.iter().product();
        let half = Half::of(buffer.data_type);
        let mut widened = vec![0.0; if half.is_some() { elements } else { 0 }];
        let values = match half {
            Some(_) => widened.as_mut_slice(),
            // SAFETY: the caller's promise: the place holds that many `f32`s.
            None => unsafe { std::slice::from_raw_parts_mut(place.cast::<f32>(), elements) },
        };
        match initial {
            Initial::Share(shard) => values.copy_from_slice(&self.shard(shard)),
            Initial::Bucket { members, axis } => {
                let first = axis.map_or(0, |axis| self.coordinates.along(axis) * elements);
                for (offset, shard) in members {
                    let shard = self.shard(shard);
                    // The elements of the shard that lie in this rank's part of the bucket.
                    let (from, until) = ((*offset).max(first), (offset + shard.len()).min(first + elements));
                    if from < until {
                        values[from - first..until - first].copy_from_slice(&shard[from - offset..until - offset]);
                    }
                }
            }
            Initial::Values(given) => values[..given.len()].copy_from_slice(given),
        }
        if let Some(half) = half {
            // SAFETY: the caller's promise: the place holds that many 16-bit numbers.
            half.narrow(unsafe { std::slice::from_raw_parts_mut(place.cast::<u16>(), elements) }, &widened);
        }
    }

    /// The rank's shard of a tensor's initial values.
    fn shard(&self, shard: &InitialShare) -> Vec<f32> {
        let tensor = self.graph.tensor(shard.tensor);
        let extents: Vec<usize> = tensor.dimensions.iter().map(|one| one.extent).collect();
        let mut values = vec![0.0; shard.placements.local_shape(&extents, self.mesh).iter().product()];
        copy_shard(&whole_tensor(tensor, self.seed), &extents, &shard.placements, self.mesh, self.coordinates, &mut values);
        values
    }
}

/// All initial values of a tensor.
fn whole_tensor(tensor: &Tensor, seed: u64) -> Vec<f32> {
    let elements = tensor.elements();
    let mut random = random_stream(seed, &tensor.name);
    let initialisation = match &tensor.role {
        Role::Parameter(parameter) => parameter.initialisation,
        _ => {
            // Running statistics: all means (0), then all variances (1).
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

/// The random stream of a tensor, which depends only on the seed and the tensor's name.
fn random_stream(seed: u64, name: &str) -> ChaCha8Rng {
    let digest = Sha256::new().chain_update(b"parameter").chain_update(seed.to_le_bytes()).chain_update(name).finalize();
    ChaCha8Rng::from_seed(digest.into())
}

/// Copies a rank's shard out of a whole tensor with these extents, row by row of the last
/// dimension.
fn copy_shard(
    whole: &[f32],
    extents: &[usize],
    placements: &Placements,
    mesh: &StageMesh,
    coordinates: Coordinates,
    shard: &mut [f32],
) {
    let local = placements.local_shape(extents, mesh);
    let start = placements.local_start(extents, mesh, coordinates);
    let row_length = local.last().copied().unwrap_or(1);
    for (row, values) in shard.chunks_mut(row_length.max(1)).enumerate() {
        // `remaining` holds the row's indices in the dimensions not yet handled, the last fastest.
        let mut remaining = row;
        let mut position = start.last().copied().unwrap_or(0);
        let mut stride = extents.last().copied().unwrap_or(1);
        for dimension in (0..extents.len().saturating_sub(1)).rev() {
            position += (start[dimension] + remaining % local[dimension]) * stride;
            remaining /= local[dimension];
            stride *= extents[dimension];
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

    /// The contents of a buffer.
    fn bits<T: Copy>(arenas: &Arenas, buffer: &Buffer) -> Vec<T> {
        let pointer = arenas.at(buffer).expect("a buffer lies in its arena").cast::<T>();
        // SAFETY: the place lies in the arena and is aligned; no thread runs.
        unsafe { std::slice::from_raw_parts(pointer, buffer.shape.iter().product()) }.to_vec()
    }

    #[test]
    fn half_precision_parameters_are_their_rounded_fp32_master_copies() {
        let model = Model::Mlp(Mlp { widths: vec![12, 8, 6] });
        let started = |precision: DataType, offload: Offload| {
            let plan = Plan { precision, ..Plan::new(Layout { tensor: 2, offload, ..Layout::default() }, 4) };
            let compiled = compile(&model, "mlp", &plan).expect("the plan compiles");
            let graph = model.graph("mlp", &GraphOptions::ONE).expect("a valid model");
            let (mesh, stage) = (&compiled.training.mesh, compiled.training.list_of(Rank(1)).clone());
            let arena = Arenas::new(stage.arena, stage.host_arena, None).expect("a small arena");
            initialise(&stage, &graph, mesh.stage(0), mesh.coordinates(Rank(1)), &arena, 3)
                .expect("the parameters are initialised");
            (stage, arena)
        };
        let (single, single_arena) = started(DataType::Fp32, Offload::None);
        let formats = [(DataType::Bf16, Half::Bf16), (DataType::Fp16, Half::Fp16)].into_iter();
        for ((precision, half), offload) in formats.flat_map(|format| Offload::ALL.map(|offload| (format, offload))) {
            let (mixed, arena) = started(precision, offload);
            let roots = |stage: &StageProgram, role| -> Vec<Buffer> {
                let is_root = |buffer: &&Buffer| buffer.role == role && buffer.parent.is_none() && buffer.persistent;
                stage.buffers.iter().filter(is_root).cloned().collect()
            };
            let expected = roots(&single, BufferRole::Parameter);
            let (parameters, states) = (roots(&mixed, BufferRole::Parameter), roots(&mixed, BufferRole::OptimizerState));
            // Per bucket a velocity, then a master copy. The loss scale's state has another name.
            let states: Vec<_> = states.into_iter().filter(|one| one.name.starts_with("optimizer state")).collect();
            assert_eq!((parameters.len(), states.len()), (expected.len(), 2 * expected.len()));
            for (index, expected) in expected.iter().enumerate() {
                let masters: Vec<u32> = bits(&arena, &states[2 * index + 1]);
                assert_eq!(masters, bits::<u32>(&single_arena, expected), "{}", expected.name);
                assert!(masters.iter().any(|&bits| bits != 0), "weights start at zero");
                let nearest: Vec<u16> = masters.iter().map(|&bits| half.nearest(f32::from_bits(bits))).collect();
                assert_eq!(nearest, bits::<u16>(&arena, &parameters[index]), "{} in {precision}", expected.name);
            }
        }
    }
}
