//! The sentence of a plan's answer on devices that it leaves idle: how many of each kind, and how
//! much time they would save.

use foretell_planner::{Candidate, Search};
use foretell_topologies::{DeviceId, Topology};
use std::ops::Range;

/// Names the `idle` devices of the best layout of a search, their share of all devices' arithmetic,
/// and the steps of the best layouts that use them, kind by kind.
pub fn idle_devices(best: &Candidate, search: &Search, topology: &Topology, idle: Range<usize>) -> String {
    // The idle kinds in the order of the devices, each with the index after its last device.
    let mut kinds: Vec<(&str, usize, usize)> = Vec::new();
    for device in idle.clone() {
        let name = topology.device_kind(DeviceId(device)).name.as_str();
        match kinds.iter_mut().find(|(other, ..)| *other == name) {
            Some((_, count, end)) => (*count, *end) = (*count + 1, device + 1),
            None => kinds.push((name, 1, device + 1)),
        }
    }
    let peak =
        |device: usize| topology.device_kind(DeviceId(device)).peak_rate(best.plan.precision).map_or(0.0, |rate| rate.value());
    let (all, unused): (f64, f64) = ((0..idle.end).map(peak).sum(), idle.clone().map(peak).sum());
    let share = unused / all.max(f64::MIN_POSITIVE) * 100.0;
    let counts: Vec<String> = kinds.iter().map(|(name, count, _)| format!("{count} of `{name}`")).collect();
    let mut before = idle.start;
    let mut worth = Vec::new();
    for &(name, _, end) in kinds.iter().rev().skip(1).rev() {
        let found = search.seconds_by_devices.range(before + 1..=end.max(before + 1)).map(|(_, seconds)| *seconds);
        if let Some(seconds) = found.reduce(f64::min) {
            // The answer may use a part of the first idle kind.
            let is_in_use = before == idle.start && before > 0 && topology.device_kind(DeviceId(before - 1)).name == name;
            let what = if is_in_use { "uses more of" } else { "also uses" };
            worth.push(format!("the best layout found that {what} `{name}` takes {}", beside(seconds, search.best_seconds)));
        }
        before = end.max(before);
    }
    worth.push(match search.all_devices_seconds.map(|seconds| seconds / search.best_seconds) {
        Some(share) if share < 1.0 => {
            format!("the best layout found on all devices takes {}, but the objective prefers this one", beside(share, 1.0))
        }
        Some(share) => format!("the best layout found on all devices takes {}", beside(share, 1.0)),
        // Under other objectives, such as energy, times were not recorded.
        None if search.seconds_by_devices.is_empty() => "the objective prefers this layout".into(),
        None => "no layout on all devices is known to fit".into(),
    });
    format!(
        "{} {} idle ({}), {share:.1} % of the arithmetic: {}",
        idle.len(),
        if idle.len() == 1 { "device stays" } else { "devices stay" },
        counts.join(", "),
        worth.join("; ")
    )
}

/// States by how much one time is longer or shorter than another.
fn beside(seconds: f64, best: f64) -> String {
    let longer = (seconds / best - 1.0) * 100.0;
    if longer < 0.0 { format!("{:.1} % less time", -longer) } else { format!("{longer:.1} % longer") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_planner::{Request, plan};
    use foretell_program::{Layout, Plan};
    use foretell_simulator::CostModel;
    use foretell_units::DataType;

    #[test]
    fn each_idle_kind_has_its_own_worth() {
        let text = "name: three\ndevices:\n  a: {base: a100-sxm-80g}\n  b: {base: v100-sxm-32g}\n  c: {base: t4}\nnodes:\n  \
                    - {name: a, count: 1, devices: {kind: a, count: 2}, link: nvswitch-300GB/s, nics: {count: 1, bandwidth: 1Gbit/s}}\n  \
                    - {name: b, count: 1, devices: {kind: b, count: 2}, link: nvswitch-150GB/s, nics: {count: 1, bandwidth: 1Gbit/s}}\n  \
                    - {name: c, count: 1, devices: {kind: c, count: 2}, link: nvswitch-150GB/s, nics: {count: 1, bandwidth: 1Gbit/s}}\n\
                    network: {kind: switch, latency: 5us}\n";
        let topology = Topology::from_yaml(text, "three.yaml").expect("it is sound");
        let model = foretell_models::Model::named("mlp").expect("in the zoo");
        let costs = CostModel::new(None, &topology);
        let base = Plan { precision: DataType::Fp16, ..Plan::new(Layout::default(), 8) };
        let request = Request { devices: 2, ..Request::new(&model, "mlp", &topology, &costs, &base) };
        let mut planned = plan(&request).expect("it fits");
        let best = planned.candidates.swap_remove(0);
        let search = Search {
            best_seconds: 1.0,
            all_devices_seconds: Some(1.5),
            seconds_by_devices: [(2, 1.0), (3, 1.3), (4, 1.2), (6, 1.5)].into(),
            ..planned.search
        };
        let said = idle_devices(&best, &search, &topology, 2..6);
        assert!(said.starts_with("4 devices stay idle (2 of `b`, 2 of `c`), "), "{said}");
        let worth = "the best layout found that also uses `b` takes 20.0 % longer; the best layout found on all devices takes 50.0 % longer";
        assert!(said.ends_with(worth), "{said}");
        let said = idle_devices(&best, &search, &topology, 4..6);
        assert!(said.starts_with("2 devices stay idle (2 of `c`), ") && !said.contains("also uses"), "{said}");
        let search = Search { all_devices_seconds: None, seconds_by_devices: [(2, 1.0)].into(), ..search };
        assert!(idle_devices(&best, &search, &topology, 2..6).ends_with(": no layout on all devices is known to fit"));
    }
}
