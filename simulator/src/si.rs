//! Serialises quantities as plain numbers in SI base units, as in the JSON output of the command
//! line. (In files that people write, quantities carry their unit as text.)

use foretell_program::Footprint;
use foretell_units::{Bytes, FlopsPerSecond, Seconds};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A quantity that is serialised as one number.
pub(crate) trait Number: Sized {
    fn number(&self) -> f64;
    fn of(number: f64) -> Self;
}

impl Number for Seconds {
    fn number(&self) -> f64 {
        self.value()
    }
    fn of(number: f64) -> Self {
        Seconds::new(number)
    }
}

impl Number for FlopsPerSecond {
    fn number(&self) -> f64 {
        self.value()
    }
    fn of(number: f64) -> Self {
        FlopsPerSecond::new(number)
    }
}

pub(crate) fn serialize<T: Number, S: Serializer>(quantity: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(quantity.number())
}

pub(crate) fn deserialize<'de, T: Number, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    f64::deserialize(deserializer).map(T::of)
}

/// Serialises a list of sizes as whole numbers of bytes.
pub(crate) mod sizes {
    use super::{Bytes, Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(sizes: &[Bytes], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(sizes.iter().map(|size| size.count()))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Bytes>, D::Error> {
        Ok(Vec::<u64>::deserialize(deserializer)?.into_iter().map(Bytes::new).collect())
    }
}

/// Serialises memory by component for each stage, as whole numbers of bytes.
pub(crate) mod footprints {
    use super::{Bytes, Deserialize, Deserializer, Footprint, Serialize, Serializer};
    use schemars::JsonSchema;

    /// The memory of a device by component, in bytes.
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[schemars(rename = "Footprint")]
    pub(crate) struct Parts {
        /// Parameters, both kept and gathered ones.
        parameters: u64,
        /// Gradients of parameters.
        gradients: u64,
        /// Moments, velocities and single-precision copies of parameters.
        optimizer_state: u64,
        /// Results of operators that other operators read, and samples.
        activations: u64,
        /// Buffers of communication and rearrangement, sums, and running statistics.
        workspace: u64,
        /// Memory that is allocated but not in use.
        unused: u64,
        /// Memory of a framework outside its allocator.
        #[serde(default)]
        context: u64,
    }

    pub(crate) fn serialize<S: Serializer>(footprints: &[Footprint], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(footprints.iter().map(|footprint| Parts {
            parameters: footprint.parameters.count(),
            gradients: footprint.gradients.count(),
            optimizer_state: footprint.optimizer_state.count(),
            activations: footprint.activations.count(),
            workspace: footprint.workspace.count(),
            unused: footprint.unused.count(),
            context: footprint.context.count(),
        }))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Footprint>, D::Error> {
        let footprint = |parts: Parts| Footprint {
            parameters: Bytes::new(parts.parameters),
            gradients: Bytes::new(parts.gradients),
            optimizer_state: Bytes::new(parts.optimizer_state),
            activations: Bytes::new(parts.activations),
            workspace: Bytes::new(parts.workspace),
            unused: Bytes::new(parts.unused),
            context: Bytes::new(parts.context),
        };
        Ok(Vec::<Parts>::deserialize(deserializer)?.into_iter().map(footprint).collect())
    }
}
