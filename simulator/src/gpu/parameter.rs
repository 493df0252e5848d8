//! The values of profiles that measured runs determine, by name: what a fit changes, and what `profiles/fitted.yaml` says of it.
//!
//! A value is named by whose it is and what it is: `stack nanotron elementwise`, `device t4 product:fp16`, `network latency_scale`. Each is a
//! positive number. A fit that leaves a value out leaves what the other profile files assume.

use super::format::ProductFormat;
use super::profile::{Cluster, GpuKind};
use super::stack::{AttentionKind, Category, StackKind};
use foretell_units::{Bytes, Seconds};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as NameError, StrDeserializer};

/// What is read from its name as the profile files spell it.
fn spelled<T: for<'a> Deserialize<'a>>(name: &str) -> Option<T> {
    let deserializer: StrDeserializer<'_, NameError> = name.into_deserializer();
    T::deserialize(deserializer).ok()
}

impl StackKind {
    /// A value by name; `None` where there is none of that name.
    pub fn value(&self, name: &str) -> Option<f64> {
        Some(match name.split_once(':') {
            Some(("product", device)) => self.product.get(device).copied().unwrap_or(1.0),
            Some(("format", format)) => self.format_of(spelled(format)?),
            Some(("traffic", kind)) => self.traffic_of(spelled(kind)?),
            Some(("launches", kind)) => self.launches_of(spelled(kind)?),
            Some(_) => return None,
            None => match name {
                "product_scale" => self.product_scale,
                "attention" => match self.attention {
                    AttentionKind::Fused { scale } => scale,
                    AttentionKind::Unfused { forward_bytes, .. } => forward_bytes,
                },
                "elementwise" => self.elementwise,
                "communication" => self.communication,
                "host_launch" => self.host_launch.value(),
                "backward_launch" => self.backward_launch,
                "micro_batch_overhead" => self.micro_batch_overhead.value(),
                "step_overhead" => self.step_overhead.value(),
                "tensor_wait" => self.tensor_wait.value(),
                "compute_slowdown" => self.compute_slowdown,
                "cast_bytes" => self.cast_bytes,
                "scaled_by_row" => self.scaled_by_row,
                "gradient_bytes" => self.gradient_bytes,
                "message_scale" => self.message_scale,
                "partitioned_message" => self.partitioned_message.value(),
                "memory_logit" => self.memory.logit,
                "expert_product" => self.expert_product,
                "exchange" => self.exchange,
                "memory_parameter" => self.memory.parameter,
                "memory_gradient" => self.memory.gradient,
                "memory_optimizer" => self.memory.optimizer,
                "memory_activations" => self.memory.activations,
                "memory_score" => self.memory.score,
                "memory_buffers" => self.memory.buffers.value(),
                "memory_context" => self.memory.context.value(),
                _ => return None,
            },
        })
    }

    /// Sets a value by name. False where there is none of that name.
    pub fn set_value(&mut self, name: &str, value: f64) -> bool {
        if self.value(name).is_none() {
            return false;
        }
        match name.split_once(':') {
            Some(("product", device)) => {
                self.product.insert(device.into(), value);
            }
            Some(("format", format)) => {
                spelled(format).map(|format: ProductFormat| self.format.insert(format, value));
            }
            Some(("traffic", kind)) => {
                spelled(kind).map(|kind: Category| self.traffic.insert(kind, value));
            }
            Some(("launches", kind)) => {
                spelled(kind).map(|kind: Category| self.launches.insert(kind, value));
            }
            Some(_) => return false,
            None => match name {
                "product_scale" => self.product_scale = value,
                "attention" => match &mut self.attention {
                    AttentionKind::Fused { scale } => *scale = value,
                    AttentionKind::Unfused { forward_bytes, backward_bytes, .. } => {
                        *backward_bytes *= value / *forward_bytes;
                        *forward_bytes = value;
                    }
                },
                "elementwise" => self.elementwise = value,
                "communication" => self.communication = value,
                "host_launch" => self.host_launch = Seconds::new(value),
                "backward_launch" => self.backward_launch = value,
                "micro_batch_overhead" => self.micro_batch_overhead = Seconds::new(value),
                "step_overhead" => self.step_overhead = Seconds::new(value),
                "tensor_wait" => self.tensor_wait = Seconds::new(value),
                "compute_slowdown" => self.compute_slowdown = value,
                "cast_bytes" => self.cast_bytes = value,
                "scaled_by_row" => self.scaled_by_row = value,
                "gradient_bytes" => self.gradient_bytes = value,
                "message_scale" => self.message_scale = value,
                "partitioned_message" => self.partitioned_message = Seconds::new(value),
                "memory_logit" => self.memory.logit = value,
                "expert_product" => self.expert_product = value,
                "exchange" => self.exchange = value,
                "memory_parameter" => self.memory.parameter = value,
                "memory_gradient" => self.memory.gradient = value,
                "memory_optimizer" => self.memory.optimizer = value,
                "memory_activations" => self.memory.activations = value,
                "memory_score" => self.memory.score = value,
                "memory_buffers" => self.memory.buffers = Bytes::new(value.max(0.0) as u64),
                "memory_context" => self.memory.context = Bytes::new(value.max(0.0) as u64),
                _ => return false,
            },
        }
        true
    }
}

impl GpuKind {
    /// A value by name; `None` where there is none of that name.
    pub fn value(&self, name: &str) -> Option<f64> {
        match name.split_once(':') {
            Some(("product", format)) => self.product.get(&spelled(format)?).copied(),
            Some(_) => None,
            None => match name {
                "memory_efficiency" => Some(self.memory_efficiency),
                "attention" => Some(self.attention[0]),
                _ => None,
            },
        }
    }

    /// Sets a value by name. False where there is none of that name.
    pub fn set_value(&mut self, name: &str, value: f64) -> bool {
        if self.value(name).is_none() {
            return false;
        }
        match name.split_once(':') {
            Some((_, format)) => {
                spelled(format).map(|format: ProductFormat| self.product.insert(format, value));
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
    /// A value of the network or of the link by name; `None` where there is none of that name.
    pub fn value(&self, name: &str) -> Option<f64> {
        Some(match name {
            "efficiency" => self.network.efficiency,
            "latency_scale" => self.network.latency_scale,
            _ => return None,
        })
    }

    /// Sets a value by name. False where there is none of that name.
    pub fn set_value(&mut self, name: &str, value: f64) -> bool {
        match name {
            "efficiency" => self.network.efficiency = value,
            "latency_scale" => self.network.latency_scale = value,
            _ => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use crate::gpu::Profiles;

    #[test]
    fn what_is_set_is_what_is_said_and_other_names_are_refused() {
        let profiles = Profiles::library().expect("readable");
        let mut stack = profiles.stack("nanotron").expect("known").clone();
        for name in
            ["product_scale", "product:t4", "format:fp8", "traffic:norm", "launches:exchange", "attention", "memory_context"]
        {
            assert!(stack.set_value(name, 3.0), "{name}");
            assert_eq!(stack.value(name), Some(3.0), "{name}");
        }
        assert!(!stack.set_value("hair", 1.0) && !stack.set_value("traffic:hair", 1.0) && !stack.set_value("hair:norm", 1.0));
        let mut gpu = profiles.gpu("t4").expect("known").clone();
        let share = gpu.attention[1] / gpu.attention[0];
        assert!(gpu.set_value("attention", 0.3) && gpu.set_value("product:fp16", 0.3) && !gpu.set_value("product:nvfp4", 0.3));
        assert!((gpu.attention[1] / 0.3 - share).abs() < 1e-12 && gpu.value("product:fp16") == Some(0.3));
    }
}
