//! Rates of links between GPUs, by the device's generation.

use crate::device::DeviceKind;

/// Rate of one link in bytes per second, one way, by the first part of the device's name.
///
/// Data sheets state both directions together. NVIDIA: NVLink 1 (P100) has 40 GB/s per link, NVLink
/// 2 to 4 (V100, A100, H100, H200) 50, NVLink 5 (B200, GB200) 100, and the bridges of GA102 cards
/// (RTX 3090, A6000, A5000, A40) 112.5 over 4 links. AMD: a link of an MI200 has 100 GB/s, of an
/// MI300X 128, of an MI355X 153.
const RATES: [(&str, f64); 13] = [
    ("p100", 20e9),
    ("b200", 50e9),
    ("b300", 50e9),
    ("gb200", 50e9),
    ("gb300", 50e9),
    ("rtx-3090", 14.0625e9),
    ("rtx-a", 14.0625e9),
    ("a40", 14.0625e9),
    ("mi100", 46e9),
    ("mi2", 50e9),
    ("mi300", 64e9),
    ("mi325", 64e9),
    ("mi35", 76.5e9),
];

/// Rate of a PCIe lane in GB/s, one way, by generation from 1 (PCI-SIG: 2.5 to 64 GT/s, without the
/// encoding's overhead).
pub(super) const OF_A_LANE: [f64; 6] = [0.25, 0.5, 0.985, 1.969, 3.938, 7.563];

/// Rate of one NVLink of all other devices, in bytes per second, one way.
const USUAL: f64 = 25e9;

/// Rate of one link of a device, one way, in bytes per second.
pub(super) fn link_rate(kind: &DeviceKind) -> f64 {
    let name = kind.base.as_deref().unwrap_or(&kind.name);
    // A name must not match a longer one that continues with a digit: `a40` is not `a400`.
    let is_meant = |begin: &str| {
        name == begin || name.strip_prefix(begin).is_some_and(|rest| begin.ends_with('a') || !rest.starts_with('0'))
    };
    RATES.iter().find(|(begin, _)| is_meant(begin)).map_or(USUAL, |(_, rate)| *rate)
}

/// Number of a device's links, if it has any.
pub(super) fn links_of(kind: &DeviceKind) -> Option<usize> {
    kind.link.map(|total| (total.value() / link_rate(kind)).round() as usize)
}

/// Number of other devices to which a device has links: one link each. 7 on AMD's boards of eight
/// (MI300X data sheet).
pub(super) fn peers_of(kind: &DeviceKind) -> usize {
    links_of(kind).unwrap_or(1).max(1)
}
