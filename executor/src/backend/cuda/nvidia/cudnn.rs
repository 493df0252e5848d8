//! Convolutions by cuDNN: which engine, chosen once for sizes and alignment by the library's own heuristics among those that give the same bits
//! twice and sum in single precision; its plan; and its execution in memory that the caller has.

mod calls;
mod descriptor;
mod graph;
#[cfg(test)]
mod tests;

use super::NvidiaDriver;
use crate::backend::cuda::convolutions::{Convolution, ConvolutionKind, ConvolutionShape};
use crate::backend::cuda::driver::{DeviceAddress, StreamHandle};
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::libraries::Library;
use calls::{Attribute, Calls, DescriptorKind, Failure, Loaded, Values};
use cudarc::cudnn::sys::{cudnnBackendHeurMode_t, cudnnBackendNumericalNote_t as Note};
use descriptor::Descriptor;
use foretell_models::Window;
use foretell_units::DataType;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The most memory that an engine may work in: what our own way takes at most, too.
const MOST_WORKSPACE: usize = 256 << 20;
/// Configurations that are looked at of each kind of heuristics, the fastest first.
const MOST_CONFIGURATIONS: usize = 24;
/// Elements of a tensor from which on engines that count in thirty-two bits are not trusted to refuse.
const MOST_ELEMENTS: usize = 1 << 31;

/// What engines must not do: sum in another order from run to run, sum or multiply in less than the format asks for, or go by way of
/// transforms, whose errors are larger than those of sums.
const INADMISSIBLE: [Note; 8] = [
    Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC,
    Note::CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
    Note::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS,
    Note::CUDNN_NUMERICAL_NOTE_FFT,
    Note::CUDNN_NUMERICAL_NOTE_WINOGRAD,
    Note::CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4,
    Note::CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6,
    Note::CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13,
];

/// The library as one device has it, if it was asked for; what it said where it does not work.
#[derive(Default)]
pub(super) struct Cudnn(Mutex<Option<Result<Convolutions, CudaError>>>);

impl Cudnn {
    /// Bytes of memory that a convolution works in.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] and [`CudaError::ConvolutionNotSupported`]: it is to be made some other way.
    pub(super) fn plan(&self, driver: &NvidiaDriver, convolution: &Convolution) -> Result<usize, CudaError> {
        self.with(driver, |convolutions| convolutions.plan(&convolution.shape()))
    }

    /// Queues it.
    ///
    /// # Safety
    /// As for [`super::Driver::convolve`].
    pub(super) unsafe fn convolve(
        &self,
        driver: &NvidiaDriver,
        convolution: &Convolution,
        workspace: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.with(driver, |convolutions| unsafe { convolutions.convolve(convolution, workspace, stream) })
    }

    fn with<T>(
        &self,
        driver: &NvidiaDriver,
        run: impl FnOnce(&mut Convolutions) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        driver.enter()?;
        let mut library = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Looking for it takes too long for every call.
        match library.get_or_insert_with(Convolutions::for_device) {
            Ok(convolutions) => run(convolutions),
            Err(error) => Err(error.clone()),
        }
    }
}

/// Whether the library's parts, which are files of their own, can be loaded: what it says if they cannot.
pub(in crate::backend::cuda) fn fault() -> Option<String> {
    looked_at().err().map(|failure| failure.to_string())
}

/// Makes a graph and asks for heuristics of it, which loads the parts.
fn looked_at() -> Result<(), Failure> {
    let calls: Arc<dyn Calls> = Arc::new(Loaded::without_device()?);
    let (size, channels) = (3, 8);
    let window = Window {
        batch: 1,
        height: size,
        width: size,
        in_channels: channels,
        out_channels: channels,
        size,
        stride: 1,
        padding: 1,
    };
    let shape = ConvolutionShape { kind: ConvolutionKind::Forward, window, format: DataType::Bf16, alignments: [16; 3] };
    let graph = graph::graph_of(&calls, &shape, 0)?;
    Descriptor::new(&calls, DescriptorKind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
        .with_other(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &graph)?;
    Ok(())
}

/// A refusal, from which the caller goes on some other way.
fn refused(failure: &Failure) -> CudaError {
    CudaError::ConvolutionNotSupported { reason: failure.to_string() }
}

/// What plans are made for.
#[derive(Debug)]
enum Target {
    /// The device of the library's handle.
    Device(u64),
    /// One that is described only.
    #[cfg(test)]
    Described(Descriptor),
}

/// An engine, ready to run, and the graph that it was made of.
#[derive(Debug)]
struct Plan {
    plan: Descriptor,
    _graph: Descriptor,
    workspace: usize,
    has_run: bool,
}

/// What the library chose for convolutions that were asked for before; why not, where it has nothing.
struct Convolutions {
    calls: Arc<dyn Calls>,
    target: Target,
    plans: HashMap<ConvolutionShape, Result<Plan, Failure>>,
}

impl Convolutions {
    /// For the current device.
    fn for_device() -> Result<Self, CudaError> {
        if !Library::Cudnn.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Cudnn });
        }
        let loaded = Loaded::for_device().map_err(|failure| refused(&failure))?;
        let target = Target::Device(loaded.handle());
        Ok(Self { calls: Arc::new(loaded), target, plans: HashMap::new() })
    }

    /// Bytes that its plan works in; it is made if it is not there.
    fn plan(&mut self, shape: &ConvolutionShape) -> Result<usize, CudaError> {
        if !self.plans.contains_key(shape) {
            let made = self.make(shape);
            self.plans.insert(*shape, made);
        }
        match self.plans.get(shape) {
            Some(Ok(plan)) => Ok(plan.workspace),
            Some(Err(failure)) => Err(refused(failure)),
            None => Err(unplanned()),
        }
    }

    /// Queues a convolution that was planned.
    unsafe fn convolve(
        &mut self,
        convolution: &Convolution,
        workspace: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        let place = self.plans.get_mut(&convolution.shape()).ok_or_else(unplanned)?;
        let plan = match place {
            Ok(plan) => plan,
            Err(failure) => return Err(refused(failure)),
        };
        let addresses = [convolution.image, convolution.weight, convolution.response].map(|address| address.0);
        let pack = Descriptor::new(&self.calls, DescriptorKind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)
            .and_then(|pack| {
                pack.with(Attribute::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Values::Integers(graph::IDENTITIES.to_vec()))
            })
            .and_then(|pack| pack.with(Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Values::Pointers(addresses.to_vec())))
            .and_then(|pack| pack.with(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, Values::Pointers(vec![workspace.0])))
            .and_then(Descriptor::finalized);
        // SAFETY: the caller's promise.
        let done = pack.and_then(|pack| unsafe { self.calls.execute(plan.plan.raw(), pack.raw(), stream.0) });
        match done {
            Ok(()) => {
                plan.has_run = true;
                Ok(())
            }
            // What has never run may be more than this device does after all: from now on it is made some other way.
            Err(failure) if !plan.has_run => {
                let told = refused(&failure);
                *place = Err(failure);
                Err(told)
            }
            Err(failure) => Err(CudaError::Call { doing: "making a convolution", reason: failure.to_string() }),
        }
    }

    /// The first of the library's ways, the fastest first, that is admissible and can be prepared.
    fn make(&self, shape: &ConvolutionShape) -> Result<Plan, Failure> {
        let window = &shape.window;
        if [window.input_elements(), window.weight_elements(), window.output_elements()].into_iter().max() >= Some(MOST_ELEMENTS)
        {
            return Err(Failure { doing: "looking at sizes", reason: "a tensor has 2^31 elements or more".into() });
        }
        let handle = match &self.target {
            Target::Device(handle) => *handle,
            #[cfg(test)]
            Target::Described(_) => 0,
        };
        let graph = graph::graph_of(&self.calls, shape, handle)?;
        let mut last = Failure { doing: "choosing an engine", reason: "the library has none that is admissible".into() };
        for mode in [cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A, cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_FALLBACK] {
            let ranked = match self.ranked(&graph, mode) {
                Ok(ranked) => ranked,
                Err(failure) => {
                    last = failure;
                    continue;
                }
            };
            for configuration in ranked {
                match self.prepared(configuration) {
                    Ok(Some((plan, workspace))) => return Ok(Plan { plan, _graph: graph, workspace, has_run: false }),
                    Ok(None) => {}
                    Err(failure) => last = failure,
                }
            }
        }
        Err(last)
    }

    /// Configurations of engines, the fastest first by the library's heuristics.
    fn ranked(&self, graph: &Descriptor, mode: cudnnBackendHeurMode_t) -> Result<Vec<Descriptor>, Failure> {
        let heuristics = Descriptor::new(&self.calls, DescriptorKind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .with_other(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)?
            .with(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, Values::HeuristicMode(mode))?;
        let heuristics = match &self.target {
            Target::Device(_) => heuristics,
            #[cfg(test)]
            Target::Described(device) => heuristics.with_other(Attribute::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device)?,
        };
        let kind = DescriptorKind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
        heuristics.finalized()?.all(Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS, kind, MOST_CONFIGURATIONS)
    }

    /// The plan of a configuration and the memory that it works in; none where that is too much, or the engine is not admissible.
    fn prepared(&self, configuration: Descriptor) -> Result<Option<(Descriptor, usize)>, Failure> {
        let kind = DescriptorKind::CUDNN_BACKEND_ENGINE_DESCRIPTOR;
        let engines = configuration.all(Attribute::CUDNN_ATTR_ENGINECFG_ENGINE, kind, 1)?;
        let Some(engine) = engines.first() else { return Ok(None) };
        let notes = self.calls.numerical_notes(engine.raw())?;
        if INADMISSIBLE.iter().any(|&note| notes.contains(&(note as u32))) {
            return Ok(None);
        }
        let plan = Descriptor::new(&self.calls, DescriptorKind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
            .with_part(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)?;
        let plan = match &self.target {
            Target::Device(handle) => plan.with(Attribute::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Values::Handle(*handle))?,
            #[cfg(test)]
            Target::Described(device) => plan.with_other(Attribute::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device)?,
        };
        let plan = plan.finalized()?;
        let workspace = plan.integer(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
        let workspace = usize::try_from(workspace).unwrap_or(usize::MAX);
        Ok((workspace <= MOST_WORKSPACE).then_some((plan, workspace)))
    }
}

/// Of a convolution that nobody asked for: a fault of ours.
fn unplanned() -> CudaError {
    CudaError::Call { doing: "making a convolution", reason: "it was not planned".into() }
}
