//! The messages of an ONNX file (`onnx.proto3` of the ONNX project), as far as costs depend on
//! them. Weights of floating point are skipped: only their shapes count.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(super) struct ModelFile {
    #[prost(int64, tag = "1")]
    pub(super) ir_version: i64,
    #[prost(message, optional, tag = "7")]
    pub(super) graph: Option<GraphMessage>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct GraphMessage {
    #[prost(message, repeated, tag = "1")]
    pub(super) nodes: Vec<Node>,
    #[prost(message, repeated, tag = "5")]
    pub(super) initializers: Vec<TensorMessage>,
    #[prost(message, repeated, tag = "11")]
    pub(super) inputs: Vec<ValueInfo>,
    #[prost(message, repeated, tag = "12")]
    pub(super) outputs: Vec<ValueInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Node {
    #[prost(string, repeated, tag = "1")]
    pub(super) inputs: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(super) outputs: Vec<String>,
    #[prost(string, tag = "3")]
    pub(super) name: String,
    #[prost(string, tag = "4")]
    pub(super) operator: String,
    #[prost(message, repeated, tag = "5")]
    pub(super) attributes: Vec<Attribute>,
    #[prost(string, tag = "7")]
    pub(super) domain: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Attribute {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(float, tag = "2")]
    pub(super) float: f32,
    #[prost(int64, tag = "3")]
    pub(super) int: i64,
    #[prost(bytes = "vec", tag = "4")]
    pub(super) text: Vec<u8>,
    #[prost(message, optional, tag = "5")]
    pub(super) tensor: Option<TensorMessage>,
    #[prost(int64, repeated, tag = "8")]
    pub(super) ints: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorMessage {
    #[prost(int64, repeated, tag = "1")]
    pub(super) dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub(super) data_type: i32,
    #[prost(int64, repeated, tag = "7")]
    pub(super) int64_data: Vec<i64>,
    #[prost(int32, repeated, tag = "5")]
    pub(super) int32_data: Vec<i32>,
    #[prost(string, tag = "8")]
    pub(super) name: String,
    /// Views of the file: nothing is copied.
    #[prost(bytes = "bytes", tag = "9")]
    pub(super) raw_data: prost::bytes::Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ValueInfo {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, optional, tag = "2")]
    pub(super) kind: Option<TypeMessage>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TypeMessage {
    #[prost(message, optional, tag = "1")]
    pub(super) tensor: Option<TensorType>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorType {
    #[prost(int32, tag = "1")]
    pub(super) data_type: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) shape: Option<ShapeMessage>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ShapeMessage {
    #[prost(message, repeated, tag = "1")]
    pub(super) dims: Vec<DimensionMessage>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DimensionMessage {
    #[prost(int64, optional, tag = "1")]
    pub(super) value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub(super) name: Option<String>,
}

/// Numbers of ONNX's data types.
pub(super) const INT32: i32 = 6;
pub(super) const INT64: i32 = 7;
pub(super) const BOOL: i32 = 9;

impl TensorMessage {
    /// The dimensions. `None` if one is negative.
    pub(super) fn shape(&self) -> Option<Vec<usize>> {
        self.dims.iter().map(|&extent| usize::try_from(extent).ok()).collect()
    }

    /// Whether the elements are whole numbers.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self.data_type, INT32 | INT64 | BOOL)
    }

    /// The elements of a tensor of whole numbers. `None` if they are not in the file.
    pub(super) fn whole_numbers(&self) -> Option<Vec<i64>> {
        let count = self.shape()?.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent))?;
        let bytes = &self.raw_data;
        let numbers: Vec<i64> = match self.data_type {
            _ if !self.int64_data.is_empty() => self.int64_data.clone(),
            _ if !self.int32_data.is_empty() => self.int32_data.iter().map(|&number| i64::from(number)).collect(),
            INT64 => bytes.chunks_exact(8).filter_map(|eight| Some(i64::from_le_bytes(eight.try_into().ok()?))).collect(),
            INT32 => {
                bytes.chunks_exact(4).filter_map(|four| Some(i64::from(i32::from_le_bytes(four.try_into().ok()?)))).collect()
            }
            _ => bytes.iter().map(|&byte| i64::from(byte)).collect(),
        };
        (numbers.len() == count).then_some(numbers)
    }
}

impl Node {
    fn attribute(&self, name: &str) -> Option<&Attribute> {
        self.attributes.iter().find(|attribute| attribute.name == name)
    }

    /// A whole number.
    pub(super) fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).map_or(default, |attribute| attribute.int)
    }

    /// Whole numbers. `None` if there are none.
    pub(super) fn ints(&self, name: &str) -> Option<&[i64]> {
        self.attribute(name).map(|attribute| attribute.ints.as_slice())
    }

    /// A text. Empty if there is none.
    pub(super) fn text(&self, name: &str) -> &[u8] {
        self.attribute(name).map_or(&[], |attribute| &attribute.text)
    }

    /// A tensor.
    pub(super) fn tensor(&self, name: &str) -> Option<&TensorMessage> {
        self.attribute(name).and_then(|attribute| attribute.tensor.as_ref())
    }

    /// The node's name, or that of its result.
    pub(super) fn title(&self) -> &str {
        if self.name.is_empty() { self.outputs.first().map_or("", String::as_str) } else { &self.name }
    }
}
