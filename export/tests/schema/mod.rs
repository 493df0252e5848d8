//! The messages of the schema that traces use, declared for prost: an implementation of the wire
//! format other than the one that writes the traces.

// The test and the example each use only a part.
#![allow(dead_code, clippy::panic)]

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub struct GlobalMetadata {
    #[prost(string, tag = "1")]
    pub version: String,
    #[prost(message, repeated, tag = "2")]
    pub attr: Vec<Attribute>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Attribute {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(oneof = "Value", tags = "3, 7, 9, 13, 27, 29")]
    pub value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Value {
    #[prost(double, tag = "3")]
    Double(f64),
    #[prost(int32, tag = "7")]
    Int32(i32),
    #[prost(int64, tag = "9")]
    Int64(i64),
    #[prost(uint64, tag = "13")]
    Uint64(u64),
    #[prost(bool, tag = "27")]
    Bool(bool),
    #[prost(string, tag = "29")]
    Text(String),
}

#[derive(Clone, PartialEq, Message)]
pub struct Node {
    #[prost(uint64, tag = "1")]
    pub id: u64,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(int32, tag = "3")]
    pub node_type: i32,
    #[prost(uint64, repeated, tag = "4")]
    pub ctrl_deps: Vec<u64>,
    #[prost(uint64, repeated, tag = "5")]
    pub data_deps: Vec<u64>,
    #[prost(uint64, tag = "6")]
    pub start_time_micros: u64,
    #[prost(uint64, tag = "7")]
    pub duration_micros: u64,
    #[prost(message, repeated, tag = "10")]
    pub attr: Vec<Attribute>,
}

pub const COMPUTE: i32 = 4;
pub const SEND: i32 = 5;
pub const RECEIVE: i32 = 6;
pub const COLLECTIVE: i32 = 7;

impl Node {
    pub fn get(&self, name: &str) -> &Value {
        let attribute =
            self.attr.iter().find(|attribute| attribute.name == name).unwrap_or_else(|| panic!("no `{name}` in {self:?}"));
        attribute.value.as_ref().expect("a value, also if it is 0")
    }

    pub fn number(&self, name: &str) -> u64 {
        match self.get(name) {
            Value::Int32(value) => *value as u64,
            Value::Int64(value) => *value as u64,
            Value::Uint64(value) => *value,
            Value::Bool(value) => u64::from(*value),
            other => panic!("{other:?}"),
        }
    }

    pub fn communicator(&self) -> usize {
        match self.get("pg_name") {
            Value::Text(name) => name.parse().expect("ASTRA-sim reads the name as a number"),
            other => panic!("{other:?}"),
        }
    }
}

pub fn read(mut file: &[u8]) -> Vec<Node> {
    let metadata = GlobalMetadata::decode_length_delimited(&mut file).expect("the metadata come first");
    assert!(!metadata.version.is_empty());
    let mut nodes = Vec::new();
    while !file.is_empty() {
        nodes.push(Node::decode_length_delimited(&mut file).expect("a node"));
    }
    nodes
}
