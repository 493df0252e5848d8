//! What-if questions: the same Program with devices, links or overheads scaled by a factor.
//!
//! Costs from a data sheet are computed from the scaled data sheet. Measured costs change by the
//! ratio of the data sheet's two answers, so a higher peak does not speed up a memory-bound kernel.
//! For measured communication the time of the smallest message scales with the latency, and the
//! rest with the bandwidth. This file must not know Programs.

use crate::cost::{CostModel, CostScale};
use foretell_topologies::{LinkScale, Topology, TopologyError};
use miette::Diagnostic;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// A quantity that a question can scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Quantity {
    Peak,
    MemoryBandwidth,
    DeviceSpeed,
    Bandwidth,
    IntraNodeBandwidth,
    InterNodeBandwidth,
    Latency,
    IntraNodeLatency,
    InterNodeLatency,
    Launch,
    Handoff,
    Step,
    ExchangeOverhead,
    Loading,
    Storage,
}

impl Quantity {
    /// Each quantity with its names, the usual one first, and its description.
    const NAMES: [(Self, &'static [&'static str], &'static str); 15] = [
        (Self::Peak, &["device.peak", "peak"], "peak arithmetic rate of devices, in every number format"),
        (Self::MemoryBandwidth, &["device.memory_bandwidth", "memory_bandwidth"], "memory bandwidth of devices"),
        (Self::DeviceSpeed, &["device.speed", "speed"], "speed of every kernel"),
        (Self::Bandwidth, &["bandwidth"], "bandwidth of all links"),
        (Self::IntraNodeBandwidth, &["intra_node.bandwidth"], "bandwidth between the devices of a node"),
        (Self::InterNodeBandwidth, &["inter_node.bandwidth"], "bandwidth of network interfaces and switch uplinks"),
        (Self::Latency, &["latency"], "latency of all links"),
        (Self::IntraNodeLatency, &["intra_node.latency"], "latency between the devices of a node"),
        (Self::InterNodeLatency, &["inter_node.latency"], "latency between nodes"),
        (Self::Launch, &["host.launch", "launch"], "time to launch a kernel"),
        (Self::Handoff, &["host.handoff", "handoff"], "delay from one stream to another"),
        (Self::Step, &["host.step"], "overhead of a step beside its instructions"),
        (Self::ExchangeOverhead, &["exchange.overhead"], "overhead of communication that was not measured, beyond its hops"),
        (Self::Loading, &["data.load", "load"], "time to load samples into a step"),
        (Self::Storage, &["storage.bandwidth"], "bandwidth of storage, if the plan says how samples are read"),
    ];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|row| row.0 == self).expect("invariant: every quantity has a name").1[0]
    }

    /// Whether a step still ends with a factor of 0.
    fn may_be_zero(self) -> bool {
        use Quantity::*;
        !matches!(self, Peak | MemoryBandwidth | DeviceSpeed | Bandwidth | IntraNodeBandwidth | InterNodeBandwidth | Storage)
    }
}

/// The reason that a text is not a valid question.
#[derive(Clone, Debug, PartialEq, Error, Diagnostic)]
pub enum WhatIfError {
    /// The text does not have the form of a question.
    #[error("`{0}` is no what-if question")]
    #[diagnostic(code(what_if::form), help("write a name, `*` or `/`, and a number, such as `inter_node.bandwidth*2`"))]
    Form(String),
    /// The name is unknown.
    #[error("there is no `{name}` to ask about")]
    #[diagnostic(code(what_if::unknown_name), help("there are {known}"))]
    UnknownName {
        /// The name.
        name: String,
        /// All known names.
        known: String,
    },
    /// The factor is 0 for a quantity without which a step never ends.
    #[error("`{quantity}` times {factor} leaves no cluster that works")]
    #[diagnostic(code(what_if::factor), help("use a factor above 0"))]
    Factor {
        /// The scaled quantity.
        quantity: &'static str,
        /// The factor.
        factor: f64,
    },
}

/// A question: one or more changes made together, such as `inter_node.bandwidth*2, latency/2`.
#[derive(Clone, Debug, PartialEq)]
pub struct WhatIf {
    changes: Vec<(Quantity, f64)>,
}

impl WhatIf {
    /// Returns the name and description of each quantity, for help texts.
    pub fn quantities() -> impl Iterator<Item = (&'static str, &'static str)> {
        Quantity::NAMES.iter().map(|(_, names, what)| (names[0], *what))
    }

    /// Returns the scaled topology.
    ///
    /// # Errors
    /// [`TopologyError`] if a scaled value is not valid, which does not happen for a valid
    /// topology.
    pub fn topology(&self, topology: &Topology) -> Result<Topology, TopologyError> {
        let scale = self.scale();
        let topology = topology.clone().with_storage_scaled(self.factor(Quantity::Storage))?;
        topology.with_links_scaled(&scale.links)?.with_devices_scaled(scale.peak, scale.memory_bandwidth)
    }

    /// Returns the scaled costs. `costs` are those of the unscaled topology.
    pub fn costs(&self, costs: &CostModel) -> CostModel {
        let mut costs = costs.clone();
        costs.rescale(self.scale());
        let factor = |quantity| self.factor(quantity);
        for kind in 0..costs.kind_count() {
            let parameters = costs.parameters_mut(kind);
            parameters.instruction_overhead = parameters.instruction_overhead.times(factor(Quantity::Launch));
            parameters.launch = parameters.launch * factor(Quantity::Launch);
            parameters.stream_handoff = parameters.stream_handoff.times(factor(Quantity::Handoff));
            parameters.step_overhead = parameters.step_overhead.times(factor(Quantity::Step));
            parameters.exchange_overhead = parameters.exchange_overhead * factor(Quantity::ExchangeOverhead);
            parameters.load_seconds_per_byte = parameters.load_seconds_per_byte * factor(Quantity::Loading);
        }
        costs
    }

    fn scale(&self) -> CostScale {
        use Quantity::*;
        let factor = |quantity| self.factor(quantity);
        CostScale {
            peak: factor(Peak),
            memory_bandwidth: factor(MemoryBandwidth),
            speed: factor(DeviceSpeed),
            launch: factor(Launch),
            exchange_overhead: factor(ExchangeOverhead),
            links: LinkScale {
                intra_node_bandwidth: factor(Bandwidth) * factor(IntraNodeBandwidth),
                inter_node_bandwidth: factor(Bandwidth) * factor(InterNodeBandwidth),
                intra_node_latency: factor(Latency) * factor(IntraNodeLatency),
                inter_node_latency: factor(Latency) * factor(InterNodeLatency),
            },
        }
    }

    /// Returns the product of all factors given for a quantity; 1 if there is none.
    fn factor(&self, wanted: Quantity) -> f64 {
        self.changes.iter().filter(|(quantity, _)| *quantity == wanted).map(|(_, factor)| factor).product()
    }
}

impl FromStr for WhatIf {
    type Err = WhatIfError;

    fn from_str(text: &str) -> Result<Self, WhatIfError> {
        let changes = text.split(',').map(|text| change(text.trim())).collect::<Result<_, _>>()?;
        Ok(Self { changes })
    }
}

fn change(text: &str) -> Result<(Quantity, f64), WhatIfError> {
    let form = || WhatIfError::Form(text.into());
    let sign = text.find(['*', '/']).ok_or_else(form)?;
    let (name, rest) = (text[..sign].trim(), &text[sign..]);
    let (is_product, number) = (rest.starts_with('*'), rest[1..].trim());
    let number: f64 = number.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0).ok_or_else(form)?;
    let known = Quantity::NAMES.iter().find(|(_, names, _)| names.contains(&name));
    let &(quantity, _, _) = known.ok_or_else(|| {
        let known: Vec<String> = WhatIf::quantities().map(|(name, _)| format!("`{name}`")).collect();
        WhatIfError::UnknownName { name: name.into(), known: known.join(", ") }
    })?;
    let factor = if is_product { number } else { 1.0 / number };
    if !factor.is_finite() || (factor == 0.0 && !quantity.may_be_zero()) {
        return Err(WhatIfError::Factor { quantity: quantity.name(), factor });
    }
    Ok((quantity, factor))
}

impl fmt::Display for WhatIf {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (quantity, factor)) in self.changes.iter().enumerate() {
            let separator = if place > 0 { ", " } else { "" };
            // Prints `/3` rather than `*0.3333333333333333`.
            let divisor = (1.0 / factor).round();
            if *factor < 1.0 && *factor > 0.0 && (divisor * factor - 1.0).abs() < 1e-12 {
                write!(formatter, "{separator}{}/{divisor}", quantity.name())?;
            } else {
                write!(formatter, "{separator}{}*{factor}", quantity.name())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_units::diagnostic::one_line;

    fn shown(text: &str) -> String {
        text.parse::<WhatIf>().map_or_else(|error| one_line(&error), |what_if| what_if.to_string())
    }

    #[test]
    fn questions_may_have_spaces_and_short_names() {
        assert_eq!(shown("inter_node.bandwidth*2"), "inter_node.bandwidth*2");
        assert_eq!(shown(" latency / 3 ,memory_bandwidth * 1.5"), "latency/3, device.memory_bandwidth*1.5");
        assert_eq!(shown("host.launch*0"), "host.launch*0");
    }

    #[test]
    fn an_invalid_question_gets_an_error_with_a_hint() {
        assert!(shown("warp*2").starts_with("there is no `warp` to ask about; hint: there are `device.peak`, "));
        assert!(shown("latency").contains("write a name, `*` or `/`, and a number"));
        assert!(shown("latency*-1").contains("no what-if question"));
        assert!(shown("latency*NaN").contains("no what-if question"));
        assert!(shown("bandwidth*0").contains("above 0"));
        assert!(shown("bandwidth/0").contains("above 0"));
    }

    #[test]
    fn every_quantity_has_distinct_names() {
        let names: Vec<&str> = Quantity::NAMES.iter().flat_map(|row| row.1.iter().copied()).collect();
        let mut distinct = names.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), names.len());
        assert_eq!(Quantity::NAMES.map(|row| row.0.name()).len(), 15);
    }
}
