//! The choice of engines without a device: which calls are made, by a recording that knows the library's rules; and the library itself, where it
//! is there, for a device that is described.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test that fails may panic")]

mod library;
mod recording;

use super::api::{Attribute, AttributeValues, DescriptorKind, check_version};
use super::{ConvolutionPlanner, MAX_WORKSPACE, Note, PlanTarget};
use crate::backend::cuda::driver::CudaError;
use crate::backend::cuda::driver::{Convolution, ConvolutionKind, ConvolutionShape};
use crate::backend::cuda::driver::{DeviceAddress, StreamHandle};
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

/// ConvolutionPlanner of a library that has these engines, the fastest first, by its heuristics and to fall back to.
fn with_engines(heuristic: Vec<Engine>, fallback: Vec<Engine>) -> (Arc<RecordedCudnn>, ConvolutionPlanner) {
    let calls = Arc::new(RecordedCudnn::new(heuristic, fallback));
    let convolutions = ConvolutionPlanner { api: calls.clone(), target: PlanTarget::Device(5), plans: HashMap::new() };
    (calls, convolutions)
}

fn engine(workspace: i64) -> Engine {
    Engine { notes: vec![Note::CUDNN_NUMERICAL_NOTE_TENSOR_CORE as u32], workspace, is_prepared: true }
}

fn noted(note: u32) -> Engine {
    Engine { notes: vec![note], ..engine(0) }
}

#[test]
fn a_graph_says_what_the_window_is() {
    for (kind, operation) in [
        (ConvolutionKind::Forward, DescriptorKind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR),
        (ConvolutionKind::InputGradient, DescriptorKind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR),
        (ConvolutionKind::WeightGradient, DescriptorKind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR),
    ] {
        let (calls, mut convolutions) = with_engines(vec![engine(1)], vec![]);
        assert_eq!(convolutions.plan(&convolution(kind).shape()), Ok(1));
        assert_eq!(calls.made(operation), 1);
        let of = |attribute| calls.all_told(attribute);
        let integers = |values: [i64; 4]| AttributeValues::Integers(values.to_vec());
        assert_eq!(
            of(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS),
            [integers([2, 16, 9, 7]), integers([24, 16, 3, 3]), integers([2, 24, 5, 4])]
        );
        assert_eq!(
            of(Attribute::CUDNN_ATTR_TENSOR_STRIDES),
            [integers([9 * 7 * 16, 1, 7 * 16, 16]), integers([9 * 16, 1, 3 * 16, 16]), integers([5 * 4 * 24, 1, 4 * 24, 24])]
        );
        assert_eq!(
            of(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT),
            [16, 8, 16].map(|bytes| AttributeValues::Integers(vec![bytes]))
        );
        assert_eq!(of(Attribute::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES), [AttributeValues::Integers(vec![2, 2])]);
        for padding in [Attribute::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, Attribute::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS] {
            assert_eq!(of(padding), [AttributeValues::Integers(vec![1, 1])]);
        }
        assert_eq!(of(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE), [AttributeValues::Handle(5)]);
        assert_eq!(of(Attribute::CUDNN_ATTR_EXECUTION_PLAN_HANDLE), [AttributeValues::Handle(5)]);
    }
}

#[test]
fn the_fastest_admissible_engine_that_can_be_prepared_is_taken() {
    let refused = || Engine { is_prepared: false, ..engine(3) };
    let greedy = || engine(MAX_WORKSPACE as i64 + 1);
    // A note that nobody knows yet forbids nothing.
    let (calls, mut convolutions) = with_engines(
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
    assert_eq!(convolutions.plan(&shape), Ok(131));
    assert_eq!(calls.prepared(), 3, "what is inadmissible is not prepared");
    // Where the heuristics have nothing, those to fall back to have something.
    let (_, mut convolutions) = with_engines(vec![refused(), greedy()], vec![noted(4), engine(9)]);
    assert_eq!(convolutions.plan(&shape), Ok(9));
}

#[test]
fn a_library_that_is_too_old_is_refused_before_it_is_asked_for_anything() {
    assert_eq!(check_version(90_000), Ok(()));
    let failure = check_version(8905).unwrap_err();
    assert_eq!(failure.to_string(), "checking its version: 8.9.5 is older than cuDNN 9");
}

#[test]
fn what_was_chosen_or_refused_is_remembered_by_shape() {
    for engines in [vec![engine(5)], vec![noted(Note::CUDNN_NUMERICAL_NOTE_FFT as u32)]] {
        let (calls, mut convolutions) = with_engines(engines, vec![]);
        let first = convolution(ConvolutionKind::Forward);
        let answer = convolutions.plan(&first.shape());
        assert_eq!(answer.is_ok(), calls.prepared() == 1);
        assert!(answer.is_ok() || matches!(answer, Err(CudaError::ConvolutionNotSupported { .. })), "{answer:?}");
        let calls_made = calls.count();
        // Other places, as well aligned.
        let moved = Convolution { image: DeviceAddress(1 << 20), ..first };
        assert_eq!(convolutions.plan(&moved.shape()), answer);
        assert_eq!(calls.count(), calls_made, "nothing is asked twice");
        // Worse aligned, another one.
        let _ = convolutions.plan(&Convolution { image: DeviceAddress(4100), ..first }.shape());
        assert!(calls.count() > calls_made);
    }
}

#[test]
fn a_convolution_is_executed_at_its_addresses_and_makes_nothing_else() {
    let (calls, mut convolutions) = with_engines(vec![engine(64)], vec![]);
    let convolution = convolution(ConvolutionKind::InputGradient);
    // SAFETY: the recording touches no memory.
    let unplanned = unsafe { convolutions.convolve(&convolution, DeviceAddress(256), STREAM) };
    assert!(matches!(unplanned, Err(CudaError::Call { .. })), "{unplanned:?}");
    convolutions.plan(&convolution.shape()).unwrap();
    let before = calls.alive();
    for _ in 0..2 {
        // SAFETY: as above.
        unsafe { convolutions.convolve(&convolution, DeviceAddress(256), STREAM) }.unwrap();
        assert_eq!(calls.alive(), before, "the pack of addresses is given back");
    }
    assert_eq!(calls.made(DescriptorKind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR), 2);
    assert_eq!(calls.made(DescriptorKind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR), 1);
    let addresses = AttributeValues::Pointers(vec![4096, 8200, 16384]);
    assert_eq!(calls.all_told(Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS), [addresses.clone(), addresses]);
    assert_eq!(
        calls.all_told(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE),
        [256, 256].map(|at| AttributeValues::Pointers(vec![at]))
    );
    assert_eq!(calls.executed(), [77, 77]);
    drop(convolutions);
    assert_eq!(calls.alive(), 0, "all descriptors are given back");
}

#[test]
fn a_plan_that_never_ran_is_given_up_where_it_fails_and_one_that_did_is_an_error() {
    let convolution = convolution(ConvolutionKind::Forward);
    for has_run in [false, true] {
        let (calls, mut convolutions) = with_engines(vec![engine(0)], vec![]);
        convolutions.plan(&convolution.shape()).unwrap();
        // SAFETY: the recording touches no memory.
        let run =
            |convolutions: &mut ConvolutionPlanner| unsafe { convolutions.convolve(&convolution, DeviceAddress(0), STREAM) };
        if has_run {
            run(&mut convolutions).unwrap();
        }
        calls.fail_executions();
        let failed = run(&mut convolutions);
        assert_eq!(matches!(failed, Err(CudaError::Call { .. })), has_run, "{failed:?}");
        assert_eq!(convolutions.plan(&convolution.shape()).is_ok(), has_run);
    }
}

#[test]
fn tensors_of_more_elements_than_thirty_two_bits_count_are_not_the_librarys() {
    let (calls, mut convolutions) = with_engines(vec![engine(0)], vec![]);
    let large = Window { batch: 1 << 24, ..WINDOW };
    let shape = ConvolutionShape { window: large, ..convolution(ConvolutionKind::Forward).shape() };
    assert!(matches!(convolutions.plan(&shape), Err(CudaError::ConvolutionNotSupported { .. })));
    assert_eq!(calls.count(), 0);
}
