//! cuDNN itself, if it can be loaded.
//!
//! Descriptors and graphs need no device. Heuristics and plans need only a description of one
//! (cuDNN 9.8, "deviceless ahead-of-time compilation"). cuDNN is linked with libcuda; a stand-in
//! without devices takes its place.

use crate::cuda::driver::Library;
use crate::cuda::driver::{ConvolutionKind, ConvolutionShape};
use crate::cuda::library::cudnn::api::{Attribute, AttributeValues, CudnnApi, DescriptorKind, LoadedCudnn};
use crate::cuda::library::cudnn::descriptor::Descriptor;
use crate::cuda::library::cudnn::{ConvolutionPlanner, MAX_WORKSPACE, PlanTarget, graph};
use foretell_models::Window;
use foretell_units::DataType;
use std::collections::HashMap;
use std::ffi::CString;
use std::process::Command;
use std::sync::Arc;

/// Environment variable that makes tests fail, instead of being skipped, if cuDNN is missing.
const REQUIRED: &str = "FORETELL_REQUIRE_CUDNN";

/// An H200 in the format of `CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION` (9.19, 9.28). The figures
/// are from NVIDIA's data sheet, and the CUDA C++ Programming Guide's table of compute
/// capabilities.
const H200: &str = r#"{"version": 1, "deviceName": "NVIDIA H200", "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000,
"driverVersion": 13000, "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
"multiProcessorCount": 132, "smCountOrigin": 1, "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
"oversizedSharedMemoryPerBlock": 0, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32,
"maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "totalGlobalMem": 150754820096, "pciDeviceId": 0, "isTccDriver": 0,
"supportCoopLaunch": 1, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "memoryBusWidth": 6144, "l2CacheSize": 62914560}"#;

/// A driver without devices, with the functions that cuDNN's files are linked with.
const NO_DEVICE: &str = r#"extern "C" {
int cuGetErrorString(int, const char **text) { *text = "no device"; return 0; }
int cuModuleGetFunction() { return 100; }
int cuModuleLoadData() { return 100; }
int cuModuleUnload() { return 100; }
int cuTensorMapEncodeIm2col() { return 100; }
int cuTensorMapEncodeTiled() { return 100; }
}"#;

/// Loads cuDNN. `None`, with a note, if it cannot be loaded.
fn load_cudnn() -> Option<Arc<dyn CudnnApi>> {
    if !Library::Cudnn.is_present() {
        assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set, and cuDNN cannot be loaded");
        eprintln!("skipped: cuDNN cannot be loaded ({})", Library::Cudnn.hint());
        return None;
    }
    match LoadedCudnn::without_device() {
        Ok(loaded) => Some(Arc::new(loaded)),
        Err(failure) => {
            assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set, and {failure}");
            eprintln!("skipped: {failure}");
            None
        }
    }
}

/// Loads a stand-in under libcuda's soname, if there is no libcuda.
fn load_driver_or_stand_in() {
    if Library::Driver.is_present() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [source, object] = ["cuda.cpp", "libcuda.so.1"].map(|name| folder.path().join(name));
    std::fs::write(&source, NO_DEVICE).unwrap();
    let compiled = Command::new("g++")
        .args(["-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .args([&object, &source])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let path = CString::new(object.to_str().unwrap()).unwrap();
    // SAFETY: the library was just compiled, and has no initialisers. Loading it globally lets
    // cuDNN find it by its soname.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null());
}

/// ResNet-50's convolutions of 64 images, without the pointwise ones.
fn windows() -> impl Iterator<Item = Window> {
    // Height, input channels, output channels, size, stride, padding.
    let all = [
        [224, 3, 64, 7, 2, 3],
        [56, 64, 64, 3, 1, 1],
        [56, 128, 128, 3, 2, 1],
        [56, 256, 512, 1, 2, 0],
        [28, 128, 128, 3, 1, 1],
        [28, 256, 256, 3, 2, 1],
        [14, 256, 256, 3, 1, 1],
        [14, 512, 512, 3, 2, 1],
        [14, 1024, 2048, 1, 2, 0],
        [7, 512, 512, 3, 1, 1],
    ];
    all.into_iter().map(|[height, in_channels, out_channels, size, stride, padding]| Window {
        batch: 64,
        height,
        width: height,
        in_channels,
        out_channels,
        size,
        stride,
        padding,
    })
}

/// The convolutions that the backend asks for over a window.
fn shapes(window: Window) -> Vec<ConvolutionShape> {
    let shape = |kind, format| ConvolutionShape { kind, window, format, alignments: [16; 3] };
    let mut all = Vec::new();
    for format in [DataType::Bf16, DataType::Fp16, DataType::Tf32] {
        all.push(shape(ConvolutionKind::Forward, format));
        all.push(shape(ConvolutionKind::InputGradient, format));
    }
    if window.in_channels.is_multiple_of(4) {
        all.push(shape(ConvolutionKind::WeightGradient, DataType::Tf32));
    }
    all
}

#[test]
fn cudnn_accepts_every_graph_without_a_device() {
    let Some(api) = load_cudnn() else { return };
    for shape in windows().flat_map(shapes) {
        let graph_or_failure = graph::build(&api, &shape, 0);
        assert!(graph_or_failure.is_ok(), "{shape:?}: {graph_or_failure:?}");
    }
    // It refuses an invalid graph, so its acceptance means something.
    let outside =
        Window { padding: 0, size: 3, height: 3, width: 3, in_channels: 8, out_channels: 8, ..windows().next().unwrap() };
    let mut shape = shapes(outside)[0];
    assert!(graph::build(&api, &shape, 0).is_ok());
    shape.alignments[0] = 3;
    assert!(graph::build(&api, &shape, 0).is_err(), "an alignment that is not a power of two");
}

#[test]
fn cudnn_has_engines_for_resnet_50_on_an_h200() {
    let Some(api) = load_cudnn() else { return };
    load_driver_or_stand_in();
    let mut text = H200.as_bytes().to_vec();
    text.push(0);
    let device = Descriptor::new(&api, DescriptorKind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)
        .and_then(|device| device.with(Attribute::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, AttributeValues::Text(text)))
        .and_then(Descriptor::finalized)
        .unwrap_or_else(|failure| panic!("{failure}"));
    let mut planner = ConvolutionPlanner { api, target: PlanTarget::Described(device), plans: HashMap::new() };
    for shape in windows().flat_map(shapes) {
        let workspace = planner.plan(&shape).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
        let Window { height, in_channels, out_channels, size, stride, .. } = shape.window;
        let (kind, format) = (shape.kind, shape.format);
        println!(
            "{kind:?} {format} {height}: {in_channels} to {out_channels}, {size} by {size}, stride {stride}: {workspace} bytes of workspace"
        );
        assert!(workspace <= MAX_WORKSPACE);
    }
}
