//! This machine's GPUs as NVIDIA's management library (NVML, `libnvidia-ml.so.1`, which the driver brings) has them, for the topology `local-gpus`.
//! Loaded when it is asked for: no CUDA, no context, no memory of a GPU is taken. The declarations are those of `nvml.h`.

use crate::loading;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::Path;
use thiserror::Error;

/// The library, as the driver installs it.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// The most NVLinks that a GPU has (`NVML_NVLINK_MAX_LINKS`).
const MOST_LINKS: c_uint = 18;
/// `NVML_NVLINK_DEVICE_TYPE_SWITCH`.
const SWITCH: c_uint = 2;

/// Why GPUs cannot be listed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NvmlError {
    /// The library cannot be loaded.
    #[error("NVML ({LIBRARY}) cannot be loaded: {reason}; hint: install NVIDIA's driver, or say the topology in a file")]
    Missing {
        /// What the loader says.
        reason: String,
    },
    /// It has no such function: it is older than 2019.
    #[error("NVML has no `{function}`; hint: install a newer driver of NVIDIA's")]
    Old {
        /// Which.
        function: &'static str,
    },
    /// A call failed.
    #[error("NVML's `{function}` failed: {reason}")]
    Call {
        /// Which.
        function: &'static str,
        /// What NVML says of it.
        reason: String,
    },
}

/// What NVML says of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// As its maker calls it.
    pub name: String,
    /// Its PCI device number, as `lspci -n` has it after the vendor's.
    pub pci_device: u16,
    /// Bytes of its memory.
    pub memory: u64,
    /// Generation and lanes of the PCIe that it and its slot can both have.
    pub pcie: Option<(u32, u32)>,
    /// NVLinks that are up.
    pub links: usize,
    /// Those of them that lead into a switch.
    pub links_into_switches: usize,
    /// Their generation, where there are any.
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

/// The library, loaded and started until it goes out of scope.
struct Nvml(Library);

/// All GPUs of this machine, in NVML's order, which is that of the PCI bus.
///
/// # Errors
/// [`NvmlError`]: no driver is there, or it does not answer.
pub fn gpus() -> Result<Vec<GpuFacts>, NvmlError> {
    Nvml::open(Path::new(LIBRARY))?.gpus()
}

/// Rates of this machine's InfiniBand and RoCE ports that are up, as Linux writes them: `400 Gb/sec (4X NDR)`.
pub fn port_rates() -> Vec<String> {
    let folders = |path: &Path| -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut all: Vec<_> = entries.map(|entry| entry.path()).collect();
        all.sort();
        all
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
        // SAFETY: so `nvml.h` declares it.
        let start: unsafe extern "C" fn() -> c_int = unsafe { library.function("nvmlInit_v2") }?;
        // SAFETY: as above.
        library.done("nvmlInit_v2", unsafe { start() })?;
        Ok(library)
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `nvml.h` declares it to be of the type `F`.
    unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, NvmlError> {
        // SAFETY: the caller's promise.
        unsafe { loading::function(&self.0, name) }.ok_or(NvmlError::Old { function: name })
    }

    fn done(&self, function: &'static str, status: c_int) -> Result<(), NvmlError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: so `nvml.h` declares it.
        let words = unsafe { self.function::<unsafe extern "C" fn(c_int) -> *const c_char>("nvmlErrorString") }.map(|words| {
            // SAFETY: the library has a text of its own for every status.
            unsafe { CStr::from_ptr(words(status)) }.to_string_lossy().into_owned()
        });
        Err(NvmlError::Call { function, reason: words.unwrap_or_else(|_| format!("status {status}")) })
    }

    fn gpus(&self) -> Result<Vec<GpuFacts>, NvmlError> {
        // SAFETY: so `nvml.h` declares it, here and below.
        let count: unsafe extern "C" fn(*mut c_uint) -> c_int = unsafe { self.function("nvmlDeviceGetCount_v2") }?;
        // SAFETY: as above.
        let by_index: unsafe extern "C" fn(c_uint, *mut Device) -> c_int =
            unsafe { self.function("nvmlDeviceGetHandleByIndex_v2") }?;
        let mut all = 0;
        // SAFETY: the place is valid.
        self.done("nvmlDeviceGetCount_v2", unsafe { count(&mut all) })?;
        (0..all)
            .map(|index| {
                let mut device = std::ptr::null_mut();
                // SAFETY: the place is valid.
                self.done("nvmlDeviceGetHandleByIndex_v2", unsafe { by_index(index, &mut device) })?;
                self.facts(device)
            })
            .collect()
    }

    fn facts(&self, device: Device) -> Result<GpuFacts, NvmlError> {
        // SAFETY: so `nvml.h` declares it, here and below.
        let name_of: unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int = unsafe { self.function("nvmlDeviceGetName") }?;
        // SAFETY: as above.
        let memory_of: unsafe extern "C" fn(Device, *mut Memory) -> c_int = unsafe { self.function("nvmlDeviceGetMemoryInfo") }?;
        // SAFETY: as above.
        let pci_of: unsafe extern "C" fn(Device, *mut PciInfo) -> c_int = unsafe { self.function("nvmlDeviceGetPciInfo_v3") }?;
        // `NVML_DEVICE_NAME_V2_BUFFER_SIZE`.
        let mut name: [c_char; 96] = [0; 96];
        // SAFETY: the place is as long as is said, here and below valid, and the device was given by the library.
        self.done("nvmlDeviceGetName", unsafe { name_of(device, name.as_mut_ptr(), name.len() as c_uint) })?;
        let bytes: Vec<u8> = name.iter().map(|&one| one as u8).take_while(|&one| one != 0).collect();
        let mut memory = Memory::default();
        // SAFETY: as above.
        self.done("nvmlDeviceGetMemoryInfo", unsafe { memory_of(device, &mut memory) })?;
        // SAFETY: zeros are numbers and empty texts.
        let mut pci: PciInfo = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        self.done("nvmlDeviceGetPciInfo_v3", unsafe { pci_of(device, &mut pci) })?;
        // SAFETY: `nvml.h` declares these so.
        let number = |function| unsafe { self.number(function, device) };
        // SAFETY: as above.
        let of_link = |function, link| unsafe { self.number_of_link(function, device, link) };
        let pcie = number("nvmlDeviceGetMaxPcieLinkGeneration").zip(number("nvmlDeviceGetMaxPcieLinkWidth"));
        let up: Vec<c_uint> = (0..MOST_LINKS).filter(|&link| of_link("nvmlDeviceGetNvLinkState", link) == Some(1)).collect();
        let into_switch = |link: &&c_uint| of_link("nvmlDeviceGetNvLinkRemoteDeviceType", **link) == Some(SWITCH);
        Ok(GpuFacts {
            name: String::from_utf8_lossy(&bytes).into_owned(),
            // The vendor's number is the lower half.
            pci_device: (pci.pci_device_id >> 16) as u16,
            memory: memory.total,
            pcie,
            links: up.len(),
            links_into_switches: up.iter().filter(into_switch).count(),
            link_generation: up.first().and_then(|&link| of_link("nvmlDeviceGetNvLinkVersion", link)),
        })
    }

    /// A number of a device; none where this device or library does not know it.
    ///
    /// # Safety
    /// `nvml.h` declares the function to be given a device and a place for a number, and no more.
    unsafe fn number(&self, function: &'static str, device: Device) -> Option<u32> {
        // SAFETY: the caller's promise.
        let asked: unsafe extern "C" fn(Device, *mut c_uint) -> c_int = unsafe { self.function(function) }.ok()?;
        let mut number = 0;
        // SAFETY: the place is valid, and the device was given by the library.
        (unsafe { asked(device, &mut number) } == 0).then_some(number)
    }

    /// The same of one of its NVLinks.
    ///
    /// # Safety
    /// As for [`Nvml::number`], with a link's number between the two.
    unsafe fn number_of_link(&self, function: &'static str, device: Device, link: c_uint) -> Option<u32> {
        // SAFETY: the caller's promise.
        let asked: unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int = unsafe { self.function(function) }.ok()?;
        let mut number = 0;
        // SAFETY: the place is valid, and the device was given by the library.
        (unsafe { asked(device, link, &mut number) } == 0).then_some(number)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: so `nvml.h` declares it.
        if let Ok(end) = unsafe { self.function::<unsafe extern "C" fn() -> c_int>("nvmlShutdown") } {
            // SAFETY: the library was started, and nothing of it is used after this.
            let _ = unsafe { end() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::tests::emulator::has_compiled;
    use std::process::Command;

    /// The library's functions as `nvml.h` declares them, of a machine with two GPUs, of which one has lost a link.
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

    /// The stand-in, compiled; none where there is no compiler, which is then said.
    fn stand_in(folder: &Path, fault: i32) -> Option<std::path::PathBuf> {
        let (source, library) = (folder.join("nvml.cpp"), folder.join(format!("nvml-{fault}.so")));
        std::fs::write(&source, STAND_IN).expect("the folder can be written to");
        let mut compiler = Command::new("g++");
        compiler.args(["-shared", "-fPIC", "-w"]).arg(format!("-DFAULT={fault}")).arg(&source).arg("-o").arg(&library);
        has_compiled(&mut compiler).then_some(library)
    }

    #[test]
    fn gpus_are_as_the_library_says_and_what_fails_is_named() {
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
        let lame = GpuFacts { links: 17, links_into_switches: 17, ..whole.clone() };
        assert_eq!(Nvml::open(&library).and_then(|library| library.gpus()), Ok(vec![whole, lame]));
        let failing = stand_in(folder.path(), 3).expect("it was compiled before");
        let error = Nvml::open(&failing).and_then(|library| library.gpus()).expect_err("memory cannot be asked for");
        assert_eq!(error.to_string(), "NVML's `nvmlDeviceGetMemoryInfo` failed: Not Supported");
    }

    #[test]
    fn a_library_that_is_not_there_is_said_to_be_missing() {
        let missing = Nvml::open(Path::new("/nowhere/libnvidia-ml.so.1")).err().expect("it is not there");
        assert!(missing.to_string().contains("hint: install NVIDIA's driver"), "{missing}");
    }
}
