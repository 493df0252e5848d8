//! Access by name to the profile values that measured runs determine: those that a fit multiplies
//! by factors, which `profiles/fitted.yaml` lists.
//!
//! The name is relative to a profile: `elementwise` of a stack, `product` of a device, or
//! `latency_scale` of the network. Every value is a positive number, within bounds that physics
//! sets.

use super::category::Category;
use super::device::GpuProfile;
use super::link::NetworkProfile;
use super::stack::{AttentionKind, StackProfile};
use foretell_units::{Bytes, Seconds};

/// Smallest and largest admissible value.
type Bounds = [f64; 2];

/// Bounds of a share of a peak, or of a rate.
const SHARE: Bounds = [0.05, 1.0];

/// Bounds of the bytes that a framework holds in addition to the Program's, over the prior.
const ANY: Bounds = [0.0, f64::INFINITY];

/// A value of a stack: its name, its bounds, and a reference to it. `None` if the stack has no such
/// value.
type StackValue = (&'static str, Bounds, fn(&mut StackProfile) -> Option<Value<'_>>);

/// A reference to a value.
enum Value<'a> {
    Number(&'a mut f64),
    Time(&'a mut Seconds),
    Size(&'a mut Bytes),
    /// Two numbers that change in proportion; the first one counts.
    Pair(&'a mut f64, &'a mut f64),
}

/// The values of stacks.
const STACK_VALUES: [StackValue; 14] = [
    // A stack's kernels are those of the device's libraries, or slower ones.
    ("product_scale", [0.5, 1.2], |stack| Some(Value::Number(&mut stack.products.product_scale))),
    ("expert_product", [0.3, 1.2], |stack| Some(Value::Number(&mut stack.products.expert_product))),
    ("cast_bytes", [0.5, 6.0], |stack| Some(Value::Number(&mut stack.products.cast_bytes))),
    ("fused_attention", [0.3, 1.7], |stack| match &mut stack.attention {
        AttentionKind::Fused { scale } => Some(Value::Number(scale)),
        AttentionKind::Unfused { .. } => None,
    }),
    // At least the scores are written and read once, in two bytes.
    ("unfused_attention", [4.0, 80.0], |stack| match &mut stack.attention {
        AttentionKind::Unfused { forward_bytes, backward_bytes, .. } => Some(Value::Pair(forward_bytes, backward_bytes)),
        AttentionKind::Fused { .. } => None,
    }),
    // Fusions that are not listed halve the traffic at best.
    ("elementwise", [0.5, 3.0], |stack| Some(Value::Number(&mut stack.memory_bound.elementwise))),
    ("routing_traffic", [0.5, 16.0], |stack| {
        Some(Value::Number(stack.memory_bound.traffic.entry(Category::Routing).or_insert(1.0)))
    }),
    ("host_launch", [0.3e-6, 60e-6], |stack| Some(Value::Time(&mut stack.host.host_launch))),
    ("step_overhead", [0.1e-3, 0.1], |stack| Some(Value::Time(&mut stack.host.step_overhead))),
    // The links' rates are measured ones, so collectives are hardly faster.
    ("communication", [0.8, 2.5], |stack| Some(Value::Number(&mut stack.communication.communication))),
    ("exchange", [0.6, 3.0], |stack| Some(Value::Number(&mut stack.communication.expert_all_to_all))),
    ("memory_activations", [0.5, 2.5], |stack| Some(Value::Number(&mut stack.memory.activations))),
    ("memory_logit", ANY, |stack| Some(Value::Number(&mut stack.memory.logit))),
    ("memory_buffers", ANY, |stack| Some(Value::Size(&mut stack.memory.buffers))),
];

impl StackProfile {
    /// Multiplies a value by its name, and keeps it within its bounds. A value that the stack has
    /// not, such as the efficiency of attention that is not fused, stays so. Returns `false` if no
    /// value has that name.
    pub fn scale(&mut self, name: &str, factor: f64) -> bool {
        let Some((_, [least, most], find)) = STACK_VALUES.iter().find(|(known, ..)| *known == name) else { return false };
        // A prior outside of the bounds stays as it is.
        let scaled = |value: f64| (value * factor).clamp(least.min(value), most.max(value));
        match find(self) {
            Some(Value::Number(value)) => *value = scaled(*value),
            Some(Value::Time(value)) => *value = Seconds::new(scaled(value.value())),
            Some(Value::Size(value)) => *value = Bytes::new(scaled(value.value()) as u64),
            Some(Value::Pair(value, other)) => {
                let found = scaled(*value);
                *other *= found / *value;
                *value = found;
            }
            None => {}
        }
        true
    }

    /// Returns whether the stack has a value of this name that factors can move.
    pub fn has_value(&self, name: &str) -> bool {
        let Some((.., find)) = STACK_VALUES.iter().find(|(known, ..)| *known == name) else { return false };
        match find(&mut self.clone()) {
            Some(Value::Number(value) | Value::Pair(value, _)) => *value > 0.0,
            Some(Value::Time(value)) => value.value() > 0.0,
            Some(Value::Size(value)) => value.value() > 0.0,
            None => false,
        }
    }
}

impl GpuProfile {
    /// Multiplies a value by its name, and keeps it within its bounds: `product`, the share of the
    /// peak that products of every format reach, or `attention`. Returns `false` if no value has
    /// that name.
    pub fn scale_value(&mut self, name: &str, factor: f64) -> bool {
        let scale = |value: &mut f64| *value = (*value * factor).clamp(SHARE[0], SHARE[1]);
        match name {
            "product" => self.product.values_mut().for_each(scale),
            "attention" => self.attention.iter_mut().for_each(scale),
            _ => return false,
        }
        true
    }
}

impl NetworkProfile {
    /// Multiplies a value by its name, and keeps it within its bounds. Returns `false` if no value
    /// has that name.
    pub fn scale_value(&mut self, name: &str, factor: f64) -> bool {
        match name {
            "efficiency" => self.efficiency = (self.efficiency * factor).clamp(SHARE[0], SHARE[1]),
            "latency_scale" => self.latency_scale *= factor,
            _ => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::STACK_VALUES;
    use crate::gpu::{Factors, ProductFormat, Profiles};
    use std::collections::BTreeMap;

    #[test]
    fn values_are_scaled_within_bounds_and_unknown_names_are_refused() {
        let profiles = Profiles::priors().expect("readable");
        let prior = profiles.stack("nanotron").expect("known");
        let mut stack = prior.clone();
        assert!(stack.scale("elementwise", 1.1) && stack.memory_bound.elementwise == 1.1 * prior.memory_bound.elementwise);
        assert!(stack.scale("elementwise", 100.0) && stack.memory_bound.elementwise == 3.0);
        assert!(stack.scale("host_launch", 2.0) && stack.host.host_launch == prior.host.host_launch * 2.0);
        // Its attention is fused.
        assert!(stack.scale("unfused_attention", 2.0) && stack.attention == prior.attention);
        assert!(stack.has_value("fused_attention") && !stack.has_value("unfused_attention"));
        for (name, ..) in STACK_VALUES {
            assert!(stack.scale(name, 1.5), "{name}");
        }
        assert!(!stack.scale("hair", 1.0) && !stack.has_value("hair"));
        let mut gpu = profiles.gpu("t4").expect("known").clone();
        let share = gpu.attention[1] / gpu.attention[0];
        let product = gpu.product_efficiency(ProductFormat::Fp16);
        assert!(gpu.scale_value("attention", 0.9) && gpu.scale_value("product", 0.5) && !gpu.scale_value("hair", 0.3));
        assert!((gpu.attention[1] / gpu.attention[0] - share).abs() < 1e-12);
        assert_eq!(gpu.product_efficiency(ProductFormat::Fp16), 0.5 * product);
        assert!(gpu.scale_value("product", 100.0) && gpu.product_efficiency(ProductFormat::Fp16) == 1.0);
    }

    #[test]
    fn factors_of_all_levels_multiply() {
        let profiles = Profiles::priors().expect("readable");
        let prior = profiles.stack("nemo").expect("known");
        let one = |factor: f64| BTreeMap::from([("elementwise".to_string(), factor)]);
        let factors = Factors {
            every_stack: one(1.1),
            families: BTreeMap::from([(prior.family.clone(), one(0.9)), ("other".into(), one(5.0))]),
            stacks: BTreeMap::from([("nemo".into(), one(1.2)), ("fsdp".into(), one(5.0))]),
            ..Factors::default()
        };
        assert_eq!(factors.count(), 5);
        let mut stack = prior.clone();
        factors.apply_to_stack("nemo", &mut stack).expect("known names");
        assert!((stack.memory_bound.elementwise / prior.memory_bound.elementwise - 1.1 * 0.9 * 1.2).abs() < 1e-12);
        let wrong = Factors { every_stack: BTreeMap::from([("hair".into(), 1.0)]), ..Factors::default() };
        assert_eq!(wrong.apply_to_stack("nemo", &mut stack), Err("hair".into()));
    }
}
