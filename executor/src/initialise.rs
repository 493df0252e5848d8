//! Initial parameters, master copies and running statistics.
//!
//! They come from a checkpoint or a file of weights as far as it has them. Otherwise
//! each tensor's values are drawn from a random stream of its own, for the whole tensor; a rank
//! keeps its shard. So a parameter starts with the same values in every layout.

use crate::arena::Arenas;
use crate::backend::cuda::DeviceAddress;
use crate::checkpoint::StateSource;
use crate::error::ExecutorError;
use crate::half::SixteenBits;
use crate::state::{ElementOrder, Line, Piece, RankState};
use foretell_models::{Initialisation, Role, Tensor};
use foretell_program::{Buffer, StateContents, StateValue};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};
use sha2::{Digest, Sha256};

/// Fills every buffer of a rank's state: from `source` as far as it has values, else with initial
/// values that depend on the seed.
pub(crate) fn initialise(state: &RankState<'_>, arenas: &Arenas, source: &StateSource, seed: u64) -> Result<(), ExecutorError> {
    let initialiser = Initialiser { state, source, seed };
    let buffers = state.list.buffers.iter();
    let places = buffers.filter_map(|buffer| Some((buffer, buffer.state.as_deref()?, arenas.at(buffer)?)));
    let (on_device, on_host): (Vec<(&Buffer, &StateContents, *mut u8)>, Vec<_>) =
        places.partition(|(buffer, ..)| arenas.of(buffer).driver().is_some());
    for (buffer, contents, place) in on_host {
        // SAFETY: the place lies in its arena, is aligned and as long as the buffer, and the arena
        // is not in use yet.
        unsafe { initialiser.fill(buffer, contents, place) }?;
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
            let threads: Vec<_> = copies
                .iter_mut()
                .zip(group)
                .map(|(copy, target)| {
                    let (initialiser, buffer, contents) = (&initialiser, target.0, target.1);
                    // SAFETY: the copy is aligned and as long as the buffer.
                    scope.spawn(move || unsafe { initialiser.fill(buffer, contents, copy.as_mut_ptr().cast()) })
                })
                .collect();
            threads.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|panic| Err(ExecutorError::panicked("initialising", panic.as_ref())))
            })
        })?;
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

/// The inputs that determine the state with which a rank starts.
struct Initialiser<'a> {
    state: &'a RankState<'a>,
    source: &'a StateSource,
    seed: u64,
}

impl Initialiser<'_> {
    /// Writes the first values of a buffer to `place`, in the buffer's data type.
    ///
    /// # Safety
    /// The place is aligned, as long as the buffer, zeroed, and not in use elsewhere.
    unsafe fn fill(&self, buffer: &Buffer, contents: &StateContents, place: *mut u8) -> Result<(), ExecutorError> {
        let elements: usize = buffer.shape.iter().product();
        let half = SixteenBits::of(buffer.data_type);
        let mut widened = vec![0.0; if half.is_some() { elements } else { 0 }];
        let values = match half {
            Some(_) => widened.as_mut_slice(),
            // SAFETY: the caller's promise: the place holds that many `f32`s.
            None => unsafe { std::slice::from_raw_parts_mut(place.cast::<f32>(), elements) },
        };
        match contents {
            StateContents::Tensors { .. } => {
                for piece in self.state.pieces(buffer) {
                    self.fill_piece(&piece, values)?;
                }
            }
            StateContents::Control(initial) => self.source.control(initial, values),
            StateContents::Constant(given) => values[..given.len()].copy_from_slice(given),
        }
        if let Some(half) = half {
            // SAFETY: the caller's promise: the place holds that many 16-bit numbers.
            half.narrow(unsafe { std::slice::from_raw_parts_mut(place.cast::<u16>(), elements) }, &widened);
        }
        Ok(())
    }

    /// Writes the first values of a piece into its buffer. From a file it reads only the piece.
    fn fill_piece(&self, piece: &Piece<'_>, buffer: &mut [f32]) -> Result<(), ExecutorError> {
        let tensor = self.state.graph.tensor(piece.tensor);
        let place_of = |line: &Line| piece.place + line.local - piece.elements.start;
        if let Some(stored) = self.source.stored(tensor, piece.value, piece.replica)? {
            let (mut result, mut apart) = (Ok(()), Vec::new());
            self.state.shard(piece, ElementOrder::Public).lines(piece.elements.clone(), &mut |line| {
                let places = &mut buffer[place_of(&line)..];
                if result.is_err() {
                    return;
                }
                if line.stride == 1 {
                    result = stored.read(line.whole, &mut places[..line.count]);
                } else {
                    apart.resize(line.count, 0.0);
                    result = stored.read(line.whole, &mut apart);
                    places.iter_mut().step_by(line.stride).zip(&apart).for_each(|(place, &value)| *place = value);
                }
            });
            return Ok(result?);
        }
        // Optimizer states, outer velocities and residuals start as zeros.
        if matches!(piece.value, StateValue::Optimizer(_) | StateValue::OuterVelocity | StateValue::Residual) {
            return Ok(());
        }
        let whole = whole_tensor(tensor, self.seed);
        self.state.shard(piece, ElementOrder::Own).lines(piece.elements.clone(), &mut |line| {
            let places = buffer[place_of(&line)..].iter_mut().step_by(line.stride);
            places.zip(&whole[line.whole..line.whole + line.count]).for_each(|(place, &value)| *place = value);
        });
        Ok(())
    }
}

/// All initial values of a tensor.
fn whole_tensor(tensor: &Tensor, seed: u64) -> Vec<f32> {
    let elements = tensor.elements();
    let mut random = random_stream(seed, &tensor.name);
    let initialisation = match &tensor.role {
        Role::Parameter(parameter) => parameter.initialisation,
        Role::Running => {
            // Running statistics: all means (0), then all variances (1).
            let mut moments = vec![0.0; elements];
            moments[elements / 2..].fill(1.0);
            return moments;
        }
        role => unreachable!("invariant: only parameters and running statistics have first values, not {role:?}"),
    };
    match initialisation {
        Initialisation::Zeros => vec![0.0; elements],
        Initialisation::Ones => vec![1.0; elements],
        Initialisation::Normal(deviation) => {
            let normal = Normal::new(0.0, deviation as f32).expect("invariant: a deviation is finite");
            (0..elements).map(|_| normal.sample(&mut random)).collect()
        }
        Initialisation::Uniform(bound) => {
            let uniform = Uniform::new(-bound as f32, bound as f32).expect("invariant: a bound is above zero");
            (0..elements).map(|_| uniform.sample(&mut random)).collect()
        }
    }
}

/// The random stream of a tensor, which depends only on the seed and the tensor's name.
fn random_stream(seed: u64, name: &str) -> ChaCha8Rng {
    let digest = Sha256::new().chain_update(b"parameter").chain_update(seed.to_le_bytes()).chain_update(name).finalize();
    ChaCha8Rng::from_seed(digest.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::{GraphOptions, Mlp, Model};
    use foretell_program::{BufferRole, Layout, Offload, Plan, Rank, StageProgram, compile};
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
            let stage = compiled.training.list_of(Rank(1)).clone();
            let arena = Arenas::new(stage.arena, stage.host_arena, None).expect("a small arena");
            let state = RankState::new(&compiled.training, &graph, Rank(1));
            let source = StateSource::fresh();
            initialise(&state, &arena, &source, 3).expect("the parameters are initialised");
            (stage, arena)
        };
        let (single, single_arena) = started(DataType::Fp32, Offload::None);
        let of_programs = Offload::ALL.into_iter().filter(|offload| *offload != Offload::State);
        let formats = [(DataType::Bf16, SixteenBits::Bf16), (DataType::Fp16, SixteenBits::Fp16)].into_iter();
        for ((precision, half), offload) in formats.flat_map(|format| of_programs.clone().map(move |offload| (format, offload))) {
            let (mixed, arena) = started(precision, offload);
            let roots = |stage: &StageProgram, role| -> Vec<Buffer> {
                let is_root = |buffer: &&Buffer| buffer.role == role && buffer.parent.is_none() && buffer.persistent;
                stage.buffers.iter().filter(is_root).cloned().collect()
            };
            let expected = roots(&single, BufferRole::Parameter);
            let (parameters, states) = (roots(&mixed, BufferRole::Parameter), roots(&mixed, BufferRole::OptimizerState));
            // Per bucket a velocity, then a master copy. The loss scale's state has another name.
            let states: Vec<_> = states.into_iter().filter(|state| state.name.starts_with("optimizer state")).collect();
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
