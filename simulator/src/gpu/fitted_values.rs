//! Access by name to the values of a profile that a fit may change and that `profiles/fitted.yaml`
//! lists.
//!
//! The name is relative to a profile: `elementwise` of a stack, `product:fp16` of a device, or
//! `latency_scale` of the network. Every value is a positive number.

use super::category::Category;
use super::cluster::Cluster;
use super::device::GpuProfile;
use super::format::ProductFormat;
use super::link::NetworkProfile;
use super::stack::{AttentionKind, StackProfile};
use foretell_units::{Bytes, Seconds};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as NameError, StrDeserializer};

/// Parses a name as the profile files spell it.
fn parse<T: for<'a> Deserialize<'a>>(name: &str) -> Option<T> {
    let deserializer: StrDeserializer<'_, NameError> = name.into_deserializer();
    T::deserialize(deserializer).ok()
}

/// A value of a stack: its name, how to read it, and how to set it.
type StackValue = (&'static str, fn(&StackProfile) -> f64, fn(&mut StackProfile, f64));

/// The values of a stack with a plain name.
const STACK_VALUES: [StackValue; 25] = [
    ("product_scale", |stack| stack.products.product_scale, |stack, value| stack.products.product_scale = value),
    ("scaled_by_row", |stack| stack.products.scaled_by_row, |stack, value| stack.products.scaled_by_row = value),
    ("expert_product", |stack| stack.products.expert_product, |stack, value| stack.products.expert_product = value),
    ("cast_bytes", |stack| stack.products.cast_bytes, |stack, value| stack.products.cast_bytes = value),
    ("attention", attention, set_attention),
    ("elementwise", |stack| stack.memory_bound.elementwise, |stack, value| stack.memory_bound.elementwise = value),
    ("host_launch", |stack| stack.host.host_launch.value(), |stack, value| stack.host.host_launch = Seconds::new(value)),
    ("backward_launch", |stack| stack.host.backward_launch, |stack, value| stack.host.backward_launch = value),
    (
        "micro_batch_overhead",
        |stack| stack.host.micro_batch_overhead.value(),
        |stack, value| stack.host.micro_batch_overhead = Seconds::new(value),
    ),
    ("step_overhead", |stack| stack.host.step_overhead.value(), |stack, value| stack.host.step_overhead = Seconds::new(value)),
    ("communication", |stack| stack.communication.communication, |stack, value| stack.communication.communication = value),
    ("exchange", |stack| stack.communication.expert_all_to_all, |stack, value| stack.communication.expert_all_to_all = value),
    (
        "tensor_wait",
        |stack| stack.communication.tensor_wait.value(),
        |stack, value| stack.communication.tensor_wait = Seconds::new(value),
    ),
    (
        "compute_slowdown",
        |stack| stack.communication.compute_slowdown,
        |stack, value| stack.communication.compute_slowdown = value,
    ),
    ("gradient_bytes", |stack| stack.communication.gradient_bytes, |stack, value| stack.communication.gradient_bytes = value),
    ("message_scale", |stack| stack.communication.message_scale, |stack, value| stack.communication.message_scale = value),
    (
        "partitioned_message",
        |stack| stack.communication.partitioned_message.value(),
        |stack, value| stack.communication.partitioned_message = Seconds::new(value),
    ),
    ("memory_parameter", |stack| stack.memory.parameter, |stack, value| stack.memory.parameter = value),
    ("memory_gradient", |stack| stack.memory.gradient, |stack, value| stack.memory.gradient = value),
    ("memory_optimizer", |stack| stack.memory.optimizer, |stack, value| stack.memory.optimizer = value),
    ("memory_activations", |stack| stack.memory.activations, |stack, value| stack.memory.activations = value),
    ("memory_score", |stack| stack.memory.score, |stack, value| stack.memory.score = value),
    ("memory_logit", |stack| stack.memory.logit, |stack, value| stack.memory.logit = value),
    ("memory_buffers", |stack| stack.memory.buffers.value(), |stack, value| stack.memory.buffers = bytes(value)),
    ("memory_context", |stack| stack.memory.context.value(), |stack, value| stack.memory.context = bytes(value)),
];

fn bytes(value: f64) -> Bytes {
    Bytes::new(value.max(0.0) as u64)
}

/// Returns the efficiency of fused attention, or the bytes that unfused attention moves forward.
fn attention(stack: &StackProfile) -> f64 {
    match stack.attention {
        AttentionKind::Fused { scale, .. } => scale,
        AttentionKind::Unfused { forward_bytes, .. } => forward_bytes,
    }
}

/// Sets the value that [`attention`] returns. The bytes moved backward change in proportion.
fn set_attention(stack: &mut StackProfile, value: f64) {
    match &mut stack.attention {
        AttentionKind::Fused { scale, .. } => *scale = value,
        AttentionKind::Unfused { forward_bytes, backward_bytes, .. } => {
            *backward_bytes *= value / *forward_bytes;
            *forward_bytes = value;
        }
    }
}

impl StackProfile {
    /// Returns a value by name, or `None` if no value has that name.
    pub fn value(&self, name: &str) -> Option<f64> {
        Some(match name.split_once(':') {
            Some(("product", device)) => self.products.product.get(device).copied().unwrap_or(1.0),
            Some(("format", format)) => self.format_share(parse(format)?),
            Some(("traffic", category)) => self.traffic_share(parse(category)?),
            Some(("launches", category)) => self.launches(parse(category)?),
            Some(_) => return None,
            None => {
                let (_, read, _) = STACK_VALUES.iter().find(|(known, ..)| *known == name)?;
                read(self)
            }
        })
    }

    /// Sets a value by name. Returns `false` if no value has that name.
    pub fn set_value(&mut self, name: &str, value: f64) -> bool {
        self.try_set(name, value).is_some()
    }

    fn try_set(&mut self, name: &str, value: f64) -> Option<()> {
        match name.split_once(':') {
            Some(("product", device)) => {
                self.products.product.insert(device.into(), value);
            }
            Some(("format", format)) => {
                self.products.format.insert(parse::<ProductFormat>(format)?, value);
            }
            Some(("traffic", category)) => {
                self.memory_bound.traffic.insert(parse::<Category>(category)?, value);
            }
            Some(("launches", category)) => {
                self.host.launches.insert(parse::<Category>(category)?, value);
            }
            Some(_) => return None,
            None => {
                let (_, _, set) = STACK_VALUES.iter().find(|(known, ..)| *known == name)?;
                set(self, value);
            }
        }
        Some(())
    }
}

impl GpuProfile {
    /// Returns a value by name, or `None` if no value has that name.
    pub fn value(&self, name: &str) -> Option<f64> {
        match name.split_once(':') {
            Some(("product", format)) => self.product.get(&parse(format)?).copied(),
            Some(_) => None,
            None => match name {
                "memory_efficiency" => Some(self.memory_efficiency),
                "attention" => Some(self.attention[0]),
                _ => None,
            },
        }
    }

    /// Sets a value by name. Returns `false` if no value has that name.
    ///
    /// `attention` is the forward efficiency. The backward one changes in proportion.
    pub fn set_value(&mut self, name: &str, value: f64) -> bool {
        if self.value(name).is_none() {
            return false;
        }
        match name.split_once(':') {
            Some((_, format)) => {
                parse(format).map(|format: ProductFormat| self.product.insert(format, value));
            }
            None if name == "memory_efficiency" => self.memory_efficiency = value,
            None => {
                self.attention[1] *= value / self.attention[0];
                self.attention[0] = value;
            }
        }
        true
    }
}

impl Cluster {
    /// Returns a value of the network by name, or `None` if no value has that name.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.network.value(name)
    }

    /// Sets a value of the network by name. Returns `false` if no value has that name.
    pub fn set_value(&mut self, name: &str, value: f64) -> bool {
        self.network.set_value(name, value)
    }
}

impl NetworkProfile {
    /// Returns a value by name, or `None` if no value has that name.
    pub(super) fn value(&self, name: &str) -> Option<f64> {
        Some(match name {
            "efficiency" => self.efficiency,
            "latency_scale" => self.latency_scale,
            _ => return None,
        })
    }

    /// Sets a value by name. Returns `false` if no value has that name.
    pub(super) fn set_value(&mut self, name: &str, value: f64) -> bool {
        match name {
            "efficiency" => self.efficiency = value,
            "latency_scale" => self.latency_scale = value,
            _ => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use crate::gpu::Profiles;

    #[test]
    fn values_read_back_as_set_and_unknown_names_are_refused() {
        let profiles = Profiles::library().expect("readable");
        let mut stack = profiles.stack("nanotron").expect("known").clone();
        for name in
            ["product_scale", "product:t4", "format:fp8", "traffic:norm", "launches:exchange", "attention", "memory_context"]
        {
            assert!(stack.set_value(name, 3.0), "{name}");
            assert_eq!(stack.value(name), Some(3.0), "{name}");
        }
        for (name, ..) in super::STACK_VALUES {
            assert!(stack.set_value(name, 5.0), "{name}");
            assert_eq!(stack.value(name), Some(5.0), "{name}");
        }
        assert!(!stack.set_value("hair", 1.0) && !stack.set_value("traffic:hair", 1.0) && !stack.set_value("hair:norm", 1.0));
        let mut gpu = profiles.gpu("t4").expect("known").clone();
        let share = gpu.attention[1] / gpu.attention[0];
        assert!(gpu.set_value("attention", 0.3) && gpu.set_value("product:fp16", 0.3) && !gpu.set_value("product:nvfp4", 0.3));
        assert!((gpu.attention[1] / 0.3 - share).abs() < 1e-12 && gpu.value("product:fp16") == Some(0.3));
    }
}
