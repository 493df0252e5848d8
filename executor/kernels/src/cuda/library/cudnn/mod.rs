//! Convolutions by cuDNN 9's backend interface.
//! For each shape and alignment an engine is chosen once: the first that cuDNN's heuristics rank
//! and that is deterministic, sums in single precision, and needs no more workspace than
//! [`MAX_WORKSPACE`]. The caller provides the workspace at execution. This module must not know
//! Programs or buffers: a call has shapes and addresses.

mod api;
mod descriptor;
mod graph;
#[cfg(test)]
mod tests;

use super::{OLDEST_CUDNN, cudnn_version};
use crate::cuda::driver::{Convolution, ConvolutionKind, ConvolutionShape, CudaError, DeviceAddress, Library, StreamHandle};
use api::{Attribute, AttributeValues, CudnnApi, CudnnFailure, DescriptorKind, LoadedCudnn};
use cudarc::cudnn::sys::{cudnnBackendHeurMode_t, cudnnBackendNumericalNote_t as Note};
use descriptor::Descriptor;
use foretell_models::Window;
use foretell_units::DataType;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Limit on an engine's workspace, in bytes: the scratch memory of the fallback, matrix products
/// over windows.
const MAX_WORKSPACE: usize = 256 << 20;
/// Number of engine configurations tried from each of cuDNN's rankings, fastest first.
const MAX_CONFIGURATIONS: usize = 24;
/// Tensors of at least this many elements are refused here: engines with 32-bit indices are not
/// trusted to refuse them.
const ELEMENT_LIMIT: usize = 1 << 31;

/// Properties that rule an engine out: nondeterministic sums, sums or products in less precision
/// than the format, and transforms, whose errors exceed those of plain sums.
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

/// cuDNN on one device. Every method expects that the device's context is current.
///
/// `None` until the first use; then the planner, or the error that loading ended with. The error is
/// kept because looking for the library takes too long for every call.
#[derive(Default)]
pub(in crate::cuda) struct Cudnn(Mutex<Option<Result<ConvolutionPlanner, CudaError>>>);

impl Cudnn {
    /// Chooses an engine and returns the bytes of workspace that it needs.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] or [`CudaError::ConvolutionNotSupported`] if cuDNN cannot
    /// compute the convolution.
    pub(in crate::cuda) fn plan(&self, convolution: &Convolution) -> Result<usize, CudaError> {
        self.with_planner(|planner| planner.plan(&convolution.shape()))
    }

    /// Queues a convolution that was planned.
    ///
    /// # Safety
    /// As for [`Driver::convolve`](crate::cuda::driver::Driver::convolve).
    pub(in crate::cuda) unsafe fn convolve(
        &self,
        convolution: &Convolution,
        workspace: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.with_planner(|planner| unsafe { planner.convolve(convolution, workspace, stream) })
    }

    fn with_planner<T>(&self, run: impl FnOnce(&mut ConvolutionPlanner) -> Result<T, CudaError>) -> Result<T, CudaError> {
        let mut planner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match planner.get_or_insert_with(ConvolutionPlanner::for_device) {
            Ok(planner) => run(planner),
            Err(error) => Err(error.clone()),
        }
    }
}

/// Returns why cuDNN's parts, which are separate files, cannot be loaded; `None` if they can.
pub(super) fn load_error() -> Option<String> {
    load_parts().err().map(|failure| failure.to_string())
}

/// Loads cuDNN's parts: building a graph and a heuristics descriptor for it makes cuDNN open them.
fn load_parts() -> Result<(), CudnnFailure> {
    let api: Arc<dyn CudnnApi> = Arc::new(LoadedCudnn::without_device()?);
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
    let graph = graph::build(&api, &shape, 0)?;
    Descriptor::new(&api, DescriptorKind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
        .with_borrowed(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &graph)?;
    Ok(())
}

/// Converts a failure to the error that makes the caller compute the convolution another way.
fn not_supported(failure: &CudnnFailure) -> CudaError {
    CudaError::ConvolutionNotSupported { reason: failure.to_string() }
}

/// The device that plans are made for.
#[derive(Debug)]
enum PlanTarget {
    /// The device of cuDNN's handle.
    Device(u64),
    /// A device that is described by its properties, for tests.
    #[cfg(test)]
    Described(Descriptor),
}

/// An engine that is ready to run, and the graph that it was made from.
#[derive(Debug)]
struct EnginePlan {
    plan: Descriptor,
    _graph: Descriptor,
    workspace: usize,
    has_run: bool,
}

/// The plans that were made for each shape, or why there is none.
struct ConvolutionPlanner {
    api: Arc<dyn CudnnApi>,
    target: PlanTarget,
    plans: HashMap<ConvolutionShape, Result<EnginePlan, CudnnFailure>>,
}

impl ConvolutionPlanner {
    /// Creates a planner for the current device.
    fn for_device() -> Result<Self, CudaError> {
        if !Library::Cudnn.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::Cudnn });
        }
        let loaded = LoadedCudnn::for_device().map_err(|failure| not_supported(&failure))?;
        let target = PlanTarget::Device(loaded.handle());
        Ok(Self { api: Arc::new(loaded), target, plans: HashMap::new() })
    }

    /// Returns the workspace of the shape's plan, after making the plan if it is new.
    fn plan(&mut self, shape: &ConvolutionShape) -> Result<usize, CudaError> {
        if !self.plans.contains_key(shape) {
            let made = self.make_plan(shape);
            self.plans.insert(*shape, made);
        }
        match self.plans.get(shape) {
            Some(Ok(plan)) => Ok(plan.workspace),
            Some(Err(failure)) => Err(not_supported(failure)),
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
        let entry = self.plans.get_mut(&convolution.shape()).ok_or_else(unplanned)?;
        let plan = match entry {
            Ok(plan) => plan,
            Err(failure) => return Err(not_supported(failure)),
        };
        let addresses = [convolution.image, convolution.weight, convolution.output].map(|address| address.0);
        let pack = Descriptor::new(&self.api, DescriptorKind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)
            .and_then(|pack| {
                pack.with(Attribute::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, AttributeValues::Integers(graph::TENSOR_IDS.to_vec()))
            })
            .and_then(|pack| {
                pack.with(Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, AttributeValues::Pointers(addresses.to_vec()))
            })
            .and_then(|pack| {
                pack.with(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, AttributeValues::Pointers(vec![workspace.0]))
            })
            .and_then(Descriptor::finalized);
        // SAFETY: the caller's promise.
        let executed = pack.and_then(|pack| unsafe { self.api.execute(plan.plan.raw(), pack.raw(), stream.0) });
        match executed {
            Ok(()) => {
                plan.has_run = true;
                Ok(())
            }
            // An engine that has never run may not work on this device after all. The shape is
            // refused from now on.
            Err(failure) if !plan.has_run => {
                let error = not_supported(&failure);
                *entry = Err(failure);
                Err(error)
            }
            Err(failure) => Err(CudaError::Call { action: CONVOLVING, reason: failure.to_string() }),
        }
    }

    /// Returns a plan for the first ranked engine that is admissible and can be prepared.
    fn make_plan(&self, shape: &ConvolutionShape) -> Result<EnginePlan, CudnnFailure> {
        let window = &shape.window;
        let elements = [window.input_elements(), window.weight_elements(), window.output_elements()];
        if elements.iter().any(|&elements| elements >= ELEMENT_LIMIT) {
            return Err(CudnnFailure { call: "checking sizes", reason: "a tensor has 2^31 elements or more".into() });
        }
        let handle = match &self.target {
            PlanTarget::Device(handle) => *handle,
            #[cfg(test)]
            PlanTarget::Described(_) => 0,
        };
        let graph = graph::build(&self.api, shape, handle)?;
        let mut last = CudnnFailure { call: "choosing an engine", reason: "no engine is admissible".into() };
        for mode in [cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A, cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_FALLBACK] {
            let ranked = match self.ranked(&graph, mode) {
                Ok(ranked) => ranked,
                Err(failure) => {
                    last = failure;
                    continue;
                }
            };
            for configuration in ranked {
                match self.prepare(configuration) {
                    Ok(Some((plan, workspace))) => return Ok(EnginePlan { plan, _graph: graph, workspace, has_run: false }),
                    Ok(None) => {}
                    Err(failure) => last = failure,
                }
            }
        }
        Err(last)
    }

    /// Returns engine configurations as cuDNN's heuristics rank them, fastest first.
    fn ranked(&self, graph: &Descriptor, mode: cudnnBackendHeurMode_t) -> Result<Vec<Descriptor>, CudnnFailure> {
        let heuristics = Descriptor::new(&self.api, DescriptorKind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .with_borrowed(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)?
            .with(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, AttributeValues::HeuristicMode(mode))?;
        let heuristics = match &self.target {
            PlanTarget::Device(_) => heuristics,
            #[cfg(test)]
            PlanTarget::Described(device) => heuristics.with_borrowed(Attribute::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device)?,
        };
        let kind = DescriptorKind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
        heuristics.finalized()?.descriptors(Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS, kind, MAX_CONFIGURATIONS)
    }

    /// Returns a configuration's plan and its workspace; `None` if the workspace is too large or
    /// the engine is not admissible.
    fn prepare(&self, configuration: Descriptor) -> Result<Option<(Descriptor, usize)>, CudnnFailure> {
        let kind = DescriptorKind::CUDNN_BACKEND_ENGINE_DESCRIPTOR;
        let engines = configuration.descriptors(Attribute::CUDNN_ATTR_ENGINECFG_ENGINE, kind, 1)?;
        let Some(engine) = engines.first() else { return Ok(None) };
        let notes = self.api.numerical_notes(engine.raw())?;
        if INADMISSIBLE.iter().any(|&note| notes.contains(&(note as u32))) {
            return Ok(None);
        }
        let plan = Descriptor::new(&self.api, DescriptorKind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
            .with_part(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)?;
        let plan = match &self.target {
            PlanTarget::Device(handle) => {
                plan.with(Attribute::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, AttributeValues::Handle(*handle))?
            }
            #[cfg(test)]
            PlanTarget::Described(device) => plan.with_borrowed(Attribute::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device)?,
        };
        let plan = plan.finalized()?;
        let workspace = plan.integer(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
        let workspace = usize::try_from(workspace).unwrap_or(usize::MAX);
        Ok((workspace <= MAX_WORKSPACE).then_some((plan, workspace)))
    }
}

const CONVOLVING: &str = "a convolution by cuDNN";

/// The error of a convolution that was queued without a plan: a bug of Foretell.
fn unplanned() -> CudaError {
    CudaError::Call { action: CONVOLVING, reason: "it was not planned".into() }
}
