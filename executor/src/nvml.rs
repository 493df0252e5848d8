//! This machine's GPUs and network ports, from which the topology `local-gpus` is discovered.
//!
//! The GPUs are described by NVML, NVIDIA's management library, which comes with the driver. It is
//! loaded when it is asked for, and needs neither CUDA nor GPU memory. Declarations are those of
//! `nvml.h`.

use crate::loading;
use libloading::Library;
use miette::Diagnostic;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::Path;
use thiserror::Error;

/// The library's name, as the driver installs it.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// The most NVLinks that a GPU has (`NVML_NVLINK_MAX_LINKS`).
const MAX_LINKS: c_uint = 18;
/// `NVML_NVLINK_DEVICE_TYPE_SWITCH`.
const SWITCH: c_uint = 2;

/// The reason why GPUs cannot be listed.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum NvmlError {
    /// The library cannot be loaded.
    #[error("NVML ({LIBRARY}) cannot be loaded: {reason}")]
    #[diagnostic(code(nvml::missing), help("install NVIDIA's driver, or describe the topology in a file"))]
    Missing {
        /// The loader's message.
        reason: String,
    },
    /// The library lacks a function: it is older than 2019.
    #[error("NVML has no `{function}`")]
    #[diagnostic(code(nvml::old), help("install a newer NVIDIA driver"))]
    Old {
        /// The function.
        function: &'static str,
    },
    /// A call failed.
    #[error("NVML's `{function}` failed: {reason}")]
    #[diagnostic(code(nvml::call))]
    Call {
        /// The function.
        function: &'static str,
        /// NVML's message.
        reason: String,
    },
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// The product name.
    pub name: String,
    /// The PCI device ID: the second number that `lspci -n` prints.
    pub pci_device: u16,
    /// The memory's size, in bytes.
    pub memory: u64,
    /// PCIe generation and number of lanes, the most that both the GPU and its slot support.
    pub pcie: Option<(u32, u32)>,
    /// The number of NVLinks that are up.
    pub links: usize,
    /// The number of NVLinks that are up and lead to a switch.
    pub links_into_switches: usize,
    /// The NVLinks' generation; `None` if no link is up.
    pub link_generation: Option<u32>,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

type Device = *mut c_void;

/// The library, loaded and initialised. Dropping it shuts it down.
struct Nvml(Library);

/// All GPUs of this machine, in NVML's order: that of the PCI bus.
///
/// # Errors
/// [`NvmlError`] if there is no driver, or a call fails.
pub fn gpus() -> Result<Vec<GpuFacts>, NvmlError> {
    Nvml::open(Path::new(LIBRARY))?.gpus()
}

/// The rates of this machine's active InfiniBand and RoCE ports, as Linux writes them:
/// `400 Gb/sec (4X NDR)`.
pub fn port_rates() -> Vec<String> {
    let folders = |path: &Path| -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let ports = folders(Path::new("/sys/class/infiniband")).into_iter().flat_map(|nic| folders(&nic.join("ports")));
    let text = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    ports
        .filter(|port| text(port.join("state")).contains("ACTIVE"))
        .map(|port| text(port.join("rate")).trim().to_owned())
        .collect()
}

impl Nvml {
    fn open(path: &Path) -> Result<Self, NvmlError> {
        // SAFETY: NVML only sets up its own state when it is loaded.
        let library = unsafe { loading::open(path.as_os_str()) }.map(Self).map_err(|reason| NvmlError::Missing { reason })?;
        // SAFETY: `nvml.h` declares this type.
        let start: unsafe extern "C" fn() -> c_int = unsafe { library.function("nvmlInit_v2") }?;
        // SAFETY: as above.
        library.check("nvmlInit_v2", unsafe { start() })?;
        Ok(library)
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `nvml.h` declares the function with type `F`.
    unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, NvmlError> {
        // SAFETY: the caller's promise.
        unsafe { loading::function(&self.0, name) }.ok_or(NvmlError::Old { function: name })
    }

    /// Turns a function's status into a result.
    fn check(&self, function: &'static str, status: c_int) -> Result<(), NvmlError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: `nvml.h` declares this type.
        let text = unsafe { self.function::<unsafe extern "C" fn(c_int) -> *const c_char>("nvmlErrorString") }.map(|text| {
            // SAFETY: the library returns a static text for every status.
            unsafe { CStr::from_ptr(text(status)) }.to_string_lossy().into_owned()
        });
        Err(NvmlError::Call { function, reason: text.unwrap_or_else(|_| format!("status {status}")) })
    }

    fn gpus(&self) -> Result<Vec<GpuFacts>, NvmlError> {
        // SAFETY: `nvml.h` declares these types.
        let count: unsafe extern "C" fn(*mut c_uint) -> c_int = unsafe { self.function("nvmlDeviceGetCount_v2") }?;
        // SAFETY: as above.
        let by_index: unsafe extern "C" fn(c_uint, *mut Device) -> c_int =
            unsafe { self.function("nvmlDeviceGetHandleByIndex_v2") }?;
        let mut number_of_gpus = 0;
        // SAFETY: the pointer is valid.
        self.check("nvmlDeviceGetCount_v2", unsafe { count(&mut number_of_gpus) })?;
        (0..number_of_gpus)
            .map(|index| {
                let mut device = std::ptr::null_mut();
                // SAFETY: the pointer is valid.
                self.check("nvmlDeviceGetHandleByIndex_v2", unsafe { by_index(index, &mut device) })?;
                self.facts(device)
            })
            .collect()
    }

    fn facts(&self, device: Device) -> Result<GpuFacts, NvmlError> {
        // SAFETY: `nvml.h` declares these types.
        let name_of: unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int = unsafe { self.function("nvmlDeviceGetName") }?;
        // SAFETY: as above.
        let memory_of: unsafe extern "C" fn(Device, *mut Memory) -> c_int = unsafe { self.function("nvmlDeviceGetMemoryInfo") }?;
        // SAFETY: as above.
        let pci_of: unsafe extern "C" fn(Device, *mut PciInfo) -> c_int = unsafe { self.function("nvmlDeviceGetPciInfo_v3") }?;
        // `NVML_DEVICE_NAME_V2_BUFFER_SIZE`.
        let mut name: [c_char; 96] = [0; 96];
        // SAFETY: the buffer has the stated length, and NVML returned the device.
        self.check("nvmlDeviceGetName", unsafe { name_of(device, name.as_mut_ptr(), name.len() as c_uint) })?;
        let bytes: Vec<u8> = name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
        let mut memory = Memory::default();
        // SAFETY: the pointer is valid, and NVML returned the device.
        self.check("nvmlDeviceGetMemoryInfo", unsafe { memory_of(device, &mut memory) })?;
        // SAFETY: zeros are valid numbers and texts.
        let mut pci: PciInfo = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        self.check("nvmlDeviceGetPciInfo_v3", unsafe { pci_of(device, &mut pci) })?;
        // SAFETY: `nvml.h` declares the functions below with this type.
        let property = |function| unsafe { self.property(function, device) };
        // SAFETY: as above.
        let link_property = |function, link| unsafe { self.link_property(function, device, link) };
        let pcie = property("nvmlDeviceGetMaxPcieLinkGeneration").zip(property("nvmlDeviceGetMaxPcieLinkWidth"));
        let up: Vec<c_uint> = (0..MAX_LINKS).filter(|&link| link_property("nvmlDeviceGetNvLinkState", link) == Some(1)).collect();
        let into_switch = |link: &&c_uint| link_property("nvmlDeviceGetNvLinkRemoteDeviceType", **link) == Some(SWITCH);
        Ok(GpuFacts {
            name: String::from_utf8_lossy(&bytes).into_owned(),
            // The lower half is the vendor's ID.
            pci_device: (pci.pci_device_id >> 16) as u16,
            memory: memory.total,
            pcie,
            links: up.len(),
            links_into_switches: up.iter().filter(into_switch).count(),
            link_generation: up.first().and_then(|&link| link_property("nvmlDeviceGetNvLinkVersion", link)),
        })
    }

    /// A property of a device; `None` if the device or the library does not have it.
    ///
    /// # Safety
    /// `nvml.h` declares the function with two parameters: a device and a pointer to the result.
    unsafe fn property(&self, function: &'static str, device: Device) -> Option<u32> {
        // SAFETY: the caller's promise.
        let query: unsafe extern "C" fn(Device, *mut c_uint) -> c_int = unsafe { self.function(function) }.ok()?;
        let mut value = 0;
        // SAFETY: the pointer is valid, and NVML returned the device.
        (unsafe { query(device, &mut value) } == 0).then_some(value)
    }

    /// A property of one of a device's NVLinks; `None` if the device or the library does not have
    /// it.
    ///
    /// # Safety
    /// `nvml.h` declares the function with three parameters: a device, a link's index and a pointer
    /// to the result.
    unsafe fn link_property(&self, function: &'static str, device: Device, link: c_uint) -> Option<u32> {
        // SAFETY: the caller's promise.
        let query: unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int = unsafe { self.function(function) }.ok()?;
        let mut value = 0;
        // SAFETY: the pointer is valid, and NVML returned the device.
        (unsafe { query(device, link, &mut value) } == 0).then_some(value)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: `nvml.h` declares this type.
        if let Ok(shutdown) = unsafe { self.function::<unsafe extern "C" fn() -> c_int>("nvmlShutdown") } {
            // SAFETY: the library is initialised, and not used after this.
            let _ = unsafe { shutdown() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::tests::emulator::has_compiled;
    use foretell_units::diagnostic::one_line;
    use std::process::Command;

    /// A stand-in for the library, on a machine with two GPUs. One of them has lost a link.
    const STAND_IN: &str = r#"
#include <cstdio>
#include <cstring>
typedef struct { int index; } *device_t;
static struct { int index; } devices[2] = {{0}, {1}};
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
extern "C" {
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 3 ? "Not Supported" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) { *device = (device_t)&devices[index]; return 0; }
int nvmlDeviceGetName(device_t, char *name, unsigned length) { std::snprintf(name, length, "NVIDIA H200"); return 0; }
int nvmlDeviceGetMemoryInfo(device_t, memory_t *memory) { memory->total = 150754820096ull; return FAULT; }
int nvmlDeviceGetPciInfo_v3(device_t, pci_t *pci) { std::memset(pci, 7, sizeof *pci); pci->id = 0x233510DE; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(device_t, unsigned *number) { *number = 5; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(device_t, unsigned *number) { *number = 16; return 0; }
int nvmlDeviceGetNvLinkState(device_t device, unsigned link, unsigned *up) { *up = link < 18u - device->index; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(device_t, unsigned, unsigned *type) { *type = 2; return 0; }
int nvmlDeviceGetNvLinkVersion(device_t, unsigned, unsigned *version) { *version = 4; return 0; }
}
"#;

    /// Compiles the stand-in; `None`, with a note on standard error, if there is no compiler.
    fn stand_in(folder: &Path, fault: i32) -> Option<std::path::PathBuf> {
        let (source, library) = (folder.join("nvml.cpp"), folder.join(format!("nvml-{fault}.so")));
        std::fs::write(&source, STAND_IN).expect("a writable folder");
        let mut compiler = Command::new("g++");
        compiler.args(["-shared", "-fPIC", "-w"]).arg(format!("-DFAULT={fault}")).arg(&source).arg("-o").arg(&library);
        has_compiled(&mut compiler).then_some(library)
    }

    #[test]
    fn gpus_are_described_and_a_failing_call_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let Some(library) = stand_in(folder.path(), 0) else { return };
        let whole = GpuFacts {
            name: "NVIDIA H200".into(),
            pci_device: 0x2335,
            memory: 150_754_820_096,
            pcie: Some((5, 16)),
            links: 18,
            links_into_switches: 18,
            link_generation: Some(4),
        };
        let degraded = GpuFacts { links: 17, links_into_switches: 17, ..whole.clone() };
        assert_eq!(Nvml::open(&library).and_then(|library| library.gpus()), Ok(vec![whole, degraded]));
        let failing = stand_in(folder.path(), 3).expect("there is a compiler");
        let error = Nvml::open(&failing).and_then(|library| library.gpus()).expect_err("memory cannot be queried");
        assert_eq!(one_line(&error), "NVML's `nvmlDeviceGetMemoryInfo` failed: Not Supported");
    }

    #[test]
    fn a_missing_library_is_reported_with_a_hint() {
        let missing = Nvml::open(Path::new("/nowhere/libnvidia-ml.so.1")).err().expect("no such file");
        assert!(one_line(&missing).contains("hint: install NVIDIA's driver"), "{missing}");
    }
}
