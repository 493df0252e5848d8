//! The choice of engines without a device: against a stand-in that records calls and enforces
//! cuDNN's rules, and against cuDNN itself, if it can be loaded, for a described device.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test that fails may panic")]

mod library;
mod recording;

use super::api::{Attribute, AttributeValues, DescriptorKind, check_version};
use super::{ConvolutionPlanner, MAX_WORKSPACE, Note, PlanTarget};
use crate::cuda::driver::CudaError;
use crate::cuda::driver::{Convolution, ConvolutionKind, ConvolutionShape};
use crate::cuda::driver::{DeviceAddress, StreamHandle};
use foretell_models::Window;
use foretell_units::DataType;
use recording::{Engine, RecordedCudnn};
use std::collections::HashMap;
use std::sync::Arc;

const WINDOW: Window =
    Window { batch: 2, height: 9, width: 7, in_channels: 16, out_channels: 24, size: 3, stride: 2, padding: 1 };
const STREAM: StreamHandle = StreamHandle(77);

fn convolution(kind: ConvolutionKind) -> Convolution {
    let [image, weight, output] = [4096, 8192 + 8, 16384].map(DeviceAddress);
    Convolution { kind, window: WINDOW, format: DataType::Bf16, image, weight, output }
}

/// Creates a planner on a stand-in with these engines, fastest first, from cuDNN's two rankings.
fn planner_with_engines(heuristic: Vec<Engine>, fallback: Vec<Engine>) -> (Arc<RecordedCudnn>, ConvolutionPlanner) {
    let api = Arc::new(RecordedCudnn::new(heuristic, fallback));
    let planner = ConvolutionPlanner { api: api.clone(), target: PlanTarget::Device(5), plans: HashMap::new() };
    (api, planner)
}

fn engine(workspace: i64) -> Engine {
    Engine { notes: vec![Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE as u32], workspace, is_prepared: true }
}

fn noted(note: u32) -> Engine {
    Engine { notes: vec![note], ..engine(0) }
}

#[test]
fn a_graph_describes_the_window() {
    for (kind, operation) in [
        (ConvolutionKind::Forward, DescriptorKind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR),
        (ConvolutionKind::InputGradient, DescriptorKind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR),
        (ConvolutionKind::WeightGradient, DescriptorKind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR),
    ] {
        let (api, mut planner) = planner_with_engines(vec![engine(1)], vec![]);
        assert_eq!(planner.plan(&convolution(kind).shape()), Ok(1));
        assert_eq!(api.created(operation), 1);
        let all = |attribute| api.all_set(attribute);
        let integers = |values: [i64; 4]| AttributeValues::Integers(values.to_vec());
        assert_eq!(
            all(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS),
            [integers([2, 16, 9, 7]), integers([24, 16, 3, 3]), integers([2, 24, 5, 4])]
        );
        assert_eq!(
            all(Attribute::CUDNN_ATTR_TENSOR_STRIDES),
            [integers([9 * 7 * 16, 1, 7 * 16, 16]), integers([9 * 16, 1, 3 * 16, 16]), integers([5 * 4 * 24, 1, 4 * 24, 24])]
        );
        assert_eq!(
            all(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT),
            [16, 8, 16].map(|bytes| AttributeValues::Integers(vec![bytes]))
        );
        assert_eq!(all(Attribute::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES), [AttributeValues::Integers(vec![2, 2])]);
        for padding in [Attribute::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, Attribute::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS] {
            assert_eq!(all(padding), [AttributeValues::Integers(vec![1, 1])]);
        }
        assert_eq!(all(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE), [AttributeValues::Handle(5)]);
        assert_eq!(all(Attribute::CUDNN_ATTR_EXECUTION_PLAN_HANDLE), [AttributeValues::Handle(5)]);
    }
}

#[test]
fn the_fastest_admissible_engine_that_can_be_prepared_is_taken() {
    let refused = || Engine { is_prepared: false, ..engine(3) };
    let greedy = || engine(MAX_WORKSPACE as i64 + 1);
    // A note that the bindings do not know rules nothing out.
    let (api, mut planner) = planner_with_engines(
        vec![
            noted(Note::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC as u32),
            noted(Note::CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION as u32),
            noted(Note::CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4 as u32),
            refused(),
            greedy(),
            Engine { workspace: 131, ..noted(4000) },
            engine(7),
        ],
        vec![],
    );
    let shape = convolution(ConvolutionKind::Forward).shape();
    assert_eq!(planner.plan(&shape), Ok(131));
    assert_eq!(api.prepared(), 3, "an inadmissible engine is not prepared");
    // If no heuristic engine works, the fallback ranking is tried.
    let (_, mut planner) = planner_with_engines(vec![refused(), greedy()], vec![noted(4), engine(9)]);
    assert_eq!(planner.plan(&shape), Ok(9));
}

#[test]
fn a_cudnn_before_version_9_is_refused_before_any_other_call() {
    assert_eq!(check_version(90_000), Ok(()));
    let failure = check_version(8905).unwrap_err();
    assert_eq!(failure.to_string(), "checking its version: 8.9.5 is older than cuDNN 9");
}

#[test]
fn choices_and_refusals_are_kept_by_shape_and_alignment() {
    for engines in [vec![engine(5)], vec![noted(Note::CUDNN_NUMERICAL_NOTE_FFT as u32)]] {
        let (api, mut planner) = planner_with_engines(engines, vec![]);
        let first = convolution(ConvolutionKind::Forward);
        let answer = planner.plan(&first.shape());
        assert_eq!(answer.is_ok(), api.prepared() == 1);
        assert!(answer.is_ok() || matches!(answer, Err(CudaError::ConvolutionNotSupported { .. })), "{answer:?}");
        let calls_before = api.count();
        // Another address of equal alignment.
        let moved = Convolution { image: DeviceAddress(1 << 20), ..first };
        assert_eq!(planner.plan(&moved.shape()), answer);
        assert_eq!(api.count(), calls_before, "nothing is asked again");
        // An address of worse alignment is another shape.
        let _ = planner.plan(&Convolution { image: DeviceAddress(4100), ..first }.shape());
        assert!(api.count() > calls_before);
    }
}

#[test]
fn a_convolution_runs_at_its_addresses_and_leaks_no_descriptor() {
    let (api, mut planner) = planner_with_engines(vec![engine(64)], vec![]);
    let convolution = convolution(ConvolutionKind::InputGradient);
    // SAFETY: the stand-in accesses no memory.
    let unplanned = unsafe { planner.convolve(&convolution, DeviceAddress(256), STREAM) };
    assert!(matches!(unplanned, Err(CudaError::Call { .. })), "{unplanned:?}");
    planner.plan(&convolution.shape()).unwrap();
    let before = api.alive();
    for _ in 0..2 {
        // SAFETY: as above.
        unsafe { planner.convolve(&convolution, DeviceAddress(256), STREAM) }.unwrap();
        assert_eq!(api.alive(), before, "the variant pack is destroyed");
    }
    assert_eq!(api.created(DescriptorKind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR), 2);
    assert_eq!(api.created(DescriptorKind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR), 1);
    let addresses = AttributeValues::Pointers(vec![4096, 8200, 16384]);
    assert_eq!(api.all_set(Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS), [addresses.clone(), addresses]);
    assert_eq!(
        api.all_set(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE),
        [256, 256].map(|at| AttributeValues::Pointers(vec![at]))
    );
    assert_eq!(api.executed(), [77, 77]);
    drop(planner);
    assert_eq!(api.alive(), 0, "all descriptors are destroyed");
}

#[test]
fn a_failing_plan_is_dropped_if_it_never_ran_and_else_is_an_error() {
    let convolution = convolution(ConvolutionKind::Forward);
    for has_run in [false, true] {
        let (api, mut planner) = planner_with_engines(vec![engine(0)], vec![]);
        planner.plan(&convolution.shape()).unwrap();
        // SAFETY: the stand-in accesses no memory.
        let run = |planner: &mut ConvolutionPlanner| unsafe { planner.convolve(&convolution, DeviceAddress(0), STREAM) };
        if has_run {
            run(&mut planner).unwrap();
        }
        api.fail_executions();
        let failed = run(&mut planner);
        assert_eq!(matches!(failed, Err(CudaError::Call { .. })), has_run, "{failed:?}");
        assert_eq!(planner.plan(&convolution.shape()).is_ok(), has_run);
    }
}

#[test]
fn tensors_of_two_to_the_31_elements_are_not_asked_of_cudnn() {
    let (api, mut planner) = planner_with_engines(vec![engine(0)], vec![]);
    let large = Window { batch: 1 << 24, ..WINDOW };
    let shape = ConvolutionShape { window: large, ..convolution(ConvolutionKind::Forward).shape() };
    assert!(matches!(planner.plan(&shape), Err(CudaError::ConvolutionNotSupported { .. })));
    assert_eq!(api.count(), 0);
}
