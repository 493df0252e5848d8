//! A node of a trace and its encoding in the schema's fields.

use crate::wire::Message;

/// `NodeType` of the schema.
#[derive(Clone, Copy)]
pub(super) enum NodeType {
    Compute = 4,
    Send = 5,
    Receive = 6,
    Collective = 7,
}

/// The value of an attribute: a member of the schema's `oneof`.
pub(super) enum Value {
    Double(f64),
    Int32(u32),
    Int64(u64),
    Uint64(u64),
    Bool(bool),
    Text(String),
}

impl Value {
    /// Encodes an attribute with this value.
    pub(super) fn named(&self, name: &str) -> Message {
        let attribute = Message::default().text(1, name);
        match self {
            Value::Double(value) => attribute.double(3, *value),
            Value::Int32(value) => attribute.number(7, u64::from(*value)),
            Value::Int64(value) => attribute.number(9, *value),
            Value::Uint64(value) => attribute.number(13, *value),
            Value::Bool(value) => attribute.number(27, u64::from(*value)),
            Value::Text(value) => attribute.text(29, value),
        }
    }
}

/// Attributes of a node by name.
pub(super) type Attributes = Vec<(&'static str, Value)>;

/// A node of a trace.
pub(super) struct Node {
    /// Number of the node, from 1.
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) node_type: NodeType,
    /// Nodes of the previous instruction of the stream.
    pub(super) control: Vec<u64>,
    /// All nodes that this one waits for.
    pub(super) data: Vec<u64>,
    pub(super) start_microseconds: u64,
    /// 0 for communication: readers simulate it.
    pub(super) duration_microseconds: u64,
    pub(super) attributes: Attributes,
}

impl Node {
    /// Encodes the node.
    pub(super) fn message(&self) -> Message {
        let node = Message::default()
            .number(1, self.id)
            .text(2, &self.name)
            .number(3, self.node_type as u64)
            .numbers(4, &self.control)
            .numbers(5, &self.data)
            .number_unless_zero(6, self.start_microseconds)
            .number_unless_zero(7, self.duration_microseconds);
        self.attributes.iter().fold(node, |node, (name, value)| node.message(10, value.named(name)))
    }
}
