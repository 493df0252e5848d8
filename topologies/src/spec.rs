//! The schema of a topology file. Scalars are kept as written, with their places; `assemble`
//! interprets them, and `file` writes a topology back in this form. It must not know units or the
//! library.

use crate::device::Architecture;
use crate::error::{TopologyError, TopologyProblem};
use crate::text::{At, Scalar};
use crate::yaml::read_yaml;
use foretell_units::diagnostic::Mistake;
use foretell_units::{DataType, SchemaVersion};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

mod network;

pub(crate) use network::{NetworkSpec, RouteSpec};

/// A topology as written in its own file, or in place in a plan file: `{base: dgx-a100-80g, nodes:
/// 16}`.
///
/// It can be part of any file that serde reads. [`TopologySpec::build`] interprets it. Errors have
/// line and column unless the text passed through one of serde's buffers (`untagged`, `flatten`);
/// [`TopologyReference`] avoids them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Topology")]
pub struct TopologySpec {
    /// The version of the file's format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) schema_version: Option<SchemaVersion>,
    /// The name. By default that of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    /// A library topology on which this one is based.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<At<String>>,
    /// Device kinds by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) devices: BTreeMap<String, At<DeviceSpec>>,
    /// The kinds of nodes, or the number of nodes of `base`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nodes: Option<At<NodesSpec>>,
    /// Rate of all NICs of a node together, one way. Replaces that of `base`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) inter_node_bandwidth: Option<At<Scalar>>,
    /// What joins the nodes: its kind, or a mapping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) network: Option<At<ShortOrFull<NetworkSpec>>>,
    /// The storage that all nodes read from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) storage: Option<At<StorageSpec>>,
    /// Time to restart a run after a failure, without reading the checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) restart_time: Option<At<Scalar>>,
    /// Whether the hosts are created on this machine, as network namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lab: Option<bool>,
    /// Remarks that commands print.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
}

/// The topology in a plan file: a name or a path, or the topology itself.
#[derive(Debug, Clone, PartialEq)]
pub enum TopologyReference {
    /// A library name or a path.
    Named(String),
    /// The topology, written in place.
    InPlace(Box<TopologySpec>),
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Device")]
pub(crate) struct DeviceSpec {
    /// A library device on which this one is based.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<At<String>>,
    /// The family of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) architecture: Option<Architecture>,
    /// Memory, such as `80GiB`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory: Option<At<Scalar>>,
    /// Rate at which the memory is read or written, such as `2TB/s`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_bandwidth: Option<At<Scalar>>,
    /// Dense peak rate of each number format, such as `{bf16: 312TFLOP/s}`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) peak: BTreeMap<DataType, At<Scalar>>,
    /// Highest power, such as `400W`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) power: Option<At<Scalar>>,
    /// Power when idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle_power: Option<At<Scalar>>,
    /// Total rate of its links to other devices, one way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) link: Option<At<Scalar>>,
    /// Rate of copies to or from the host's memory, one way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host_link: Option<At<Scalar>>,
    /// Cores of a CPU device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cores: Option<At<Scalar>>,
    /// Share of its cores' time that the lab gives the device, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_quota: Option<At<Scalar>>,
    /// Source of the figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<String>,
}

/// All node groups, or the number of nodes of the base's group.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum NodesSpec {
    Count(Scalar),
    Groups(Vec<At<NodeSpec>>),
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Node")]
pub(crate) struct NodeSpec {
    /// The name of this kind of node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<At<String>>,
    /// Number of such nodes. By default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) count: Option<At<Scalar>>,
    /// The devices of a node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) devices: Option<At<NodeDevicesSpec>>,
    /// What joins the devices of a node: text such as `nvswitch-300GB/s`, or a mapping.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) link: Option<At<ShortOrFull<LinkSpec>>>,
    /// The NICs of a node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nics: Option<At<NicsSpec>>,
    /// Memory of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host_memory: Option<At<Scalar>>,
    /// Price of a node per hour, such as `98.32`, `$98.32` or `1,032.50 EUR`. All prices must have
    /// the same currency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) price_per_hour: Option<At<Scalar>>,
    /// Mean time between failures of one node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mean_time_between_failures: Option<At<Scalar>>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Storage")]
pub(crate) struct StorageSpec {
    /// Rate at which all nodes together read from or write to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bandwidth: Option<At<Scalar>>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NodeDevices")]
pub(crate) struct NodeDevicesSpec {
    /// A name in `devices`, or a library device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<At<String>>,
    /// Number of devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) count: Option<At<Scalar>>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Link")]
pub(crate) struct LinkSpec {
    /// `nvswitch`, `nvlink-mesh`, `pcie` or `shared-memory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<At<String>>,
    /// Rate of a device's link, one way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bandwidth: Option<At<Scalar>>,
    /// Latency of an empty message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latency: Option<At<Scalar>>,
    /// Devices per PCIe switch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) devices_per_switch: Option<At<Scalar>>,
    /// Rate of a PCIe switch's uplink.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uplink: Option<At<Scalar>>,
    /// PCIe switches per socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) switches_per_socket: Option<At<Scalar>>,
    /// Rate between sockets, one way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) socket_link: Option<At<Scalar>>,
    /// Number of NVLinks between each two devices, if pairs differ: a row for each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wires: Option<At<Vec<Vec<usize>>>>,
    /// Rate between two devices without such a link, one way. By default the rate of the device's
    /// PCIe slot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unlinked: Option<At<Scalar>>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Nics")]
pub(crate) struct NicsSpec {
    /// Number of NICs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) count: Option<At<Scalar>>,
    /// Rate of each NIC, one way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bandwidth: Option<At<Scalar>>,
}

/// A value in short form (a single word) or as a full mapping.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ShortOrFull<T> {
    Short(String),
    Full(T),
}

impl TopologySpec {
    /// Names the topology after its file (`clusters/lab.yaml` becomes `lab`) if it has no name.
    pub(crate) fn named_after(mut self, file_name: &str) -> Self {
        let stem = std::path::Path::new(file_name).file_stem().and_then(|stem| stem.to_str());
        self.name = self.name.or_else(|| stem.map(str::to_owned));
        self
    }
}

/// Parses the text of a topology file.
pub(crate) fn read(text: &str) -> Result<TopologySpec, TopologyError> {
    read_yaml(text).map_err(|error| {
        let Mistake { message, hint } = error.mistake;
        TopologyError::at(error.place, TopologyProblem::Syntax { message, hint })
    })
}

impl<'de> Deserialize<'de> for NodesSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = NodesSpec;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of nodes, or a number of them on a `base`,")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<NodesSpec, E> {
                Ok(NodesSpec::Count(text.into()))
            }
            fn visit_u64<E: de::Error>(self, count: u64) -> Result<NodesSpec, E> {
                Ok(NodesSpec::Count(count.into()))
            }
            fn visit_i64<E: de::Error>(self, count: i64) -> Result<NodesSpec, E> {
                Ok(NodesSpec::Count(count.into()))
            }
            fn visit_f64<E: de::Error>(self, count: f64) -> Result<NodesSpec, E> {
                Ok(NodesSpec::Count(count.into()))
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, list: A) -> Result<NodesSpec, A::Error> {
                Deserialize::deserialize(de::value::SeqAccessDeserializer::new(list)).map(NodesSpec::Groups)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl Serialize for NodesSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            NodesSpec::Count(count) => count.serialize(serializer),
            NodesSpec::Groups(groups) => groups.serialize(serializer),
        }
    }
}

// Not derived with `untagged`, which would lose the places of inner values.
impl<'de, T: Deserialize<'de>> Deserialize<'de> for ShortOrFull<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> de::Visitor<'de> for Visitor<T> {
            type Value = ShortOrFull<T>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a name or a mapping")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(ShortOrFull::Short(text.into()))
            }
            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(de::value::MapAccessDeserializer::new(map)).map(ShortOrFull::Full)
            }
        }
        deserializer.deserialize_any(Visitor(PhantomData))
    }
}

impl<T: Serialize> Serialize for ShortOrFull<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            ShortOrFull::Short(text) => serializer.serialize_str(text),
            ShortOrFull::Full(full) => full.serialize(serializer),
        }
    }
}

impl<T: JsonSchema> JsonSchema for ShortOrFull<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("NameOr{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"type": "string"}, generator.subschema_for::<T>()]})
    }

    fn inline_schema() -> bool {
        true
    }
}

impl JsonSchema for NodesSpec {
    fn schema_name() -> Cow<'static, str> {
        "Nodes".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"type": "integer", "minimum": 1}, generator.subschema_for::<Vec<NodeSpec>>()]})
    }

    fn inline_schema() -> bool {
        true
    }
}

impl JsonSchema for TopologyReference {
    fn schema_name() -> Cow<'static, str> {
        "TopologyReference".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        ShortOrFull::<TopologySpec>::json_schema(generator)
    }

    fn inline_schema() -> bool {
        true
    }
}

impl<'de> Deserialize<'de> for TopologyReference {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match ShortOrFull::<TopologySpec>::deserialize(deserializer)? {
            ShortOrFull::Short(name) => TopologyReference::Named(name),
            ShortOrFull::Full(spec) => TopologyReference::InPlace(Box::new(spec)),
        })
    }
}

impl Serialize for TopologyReference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            TopologyReference::Named(name) => serializer.serialize_str(name),
            TopologyReference::InPlace(spec) => spec.serialize(serializer),
        }
    }
}
