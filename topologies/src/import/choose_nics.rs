//! Chooses the NICs of a machine that belong to the training network. Hosts also have ports for
//! storage and management, and virtual functions of the chosen ports.

/// A NIC as a tool lists it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Nic {
    /// Its name.
    pub(super) name: String,
    /// Rate in Gbit/s. `None` if it is not stated.
    pub(super) rate: Option<f64>,
    /// Whether it shares a PCIe switch with a GPU. `None` if that is not stated.
    pub(super) is_beside_gpu: Option<bool>,
    /// Whether it is a virtual function of another NIC.
    pub(super) is_virtual: bool,
}

/// The chosen NICs, and the rate of each.
pub(super) struct Chosen {
    pub(super) count: usize,
    /// Rate in Gbit/s.
    pub(super) rate: Option<f64>,
    /// A note on NICs that were left out.
    pub(super) note: Option<String>,
}

/// Chooses the physical NICs (if any), of these the ones beside a GPU (if any), and of these the
/// fastest.
pub(super) fn choose(nics: &[Nic]) -> Chosen {
    let narrowed = |nics: Vec<&'_ Nic>, keep: &dyn Fn(&Nic) -> bool| -> Vec<usize> {
        let kept: Vec<usize> = (0..nics.len()).filter(|&index| nics.get(index).is_some_and(|nic| keep(nic))).collect();
        if kept.is_empty() { (0..nics.len()).collect() } else { kept }
    };
    let mut chosen: Vec<&Nic> = nics.iter().collect();
    let mut keep = |test: &dyn Fn(&Nic) -> bool| {
        let kept = narrowed(chosen.clone(), test);
        chosen = kept.into_iter().filter_map(|index| chosen.get(index).copied()).collect();
        chosen.iter().filter_map(|nic| nic.rate).reduce(f64::max)
    };
    keep(&|nic| !nic.is_virtual);
    let fastest = keep(&|nic| nic.is_beside_gpu == Some(true));
    let rate = keep(&|nic| nic.rate == fastest);
    let others: Vec<&str> = nics.iter().filter(|nic| !chosen.contains(nic)).map(|nic| nic.name.as_str()).collect();
    let note = (!others.is_empty()).then(|| {
        format!(
            "NICs left out of the training network, as they are slower than others, virtual, or beside no GPU: {}",
            others.join(", ")
        )
    });
    Chosen { count: chosen.len(), rate, note }
}
