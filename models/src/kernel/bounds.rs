//! The sizes that a kernel from a file may have. Descriptions multiply sizes as whole numbers,
//! which must not overflow. It must not know the descriptions, which would overflow first.

use super::Kernel;
use serde_json::Value;

/// The most elements of an operand, and the largest size. A description counts at most 11 operands,
/// each at most 20 times and in 4 bytes: less than 2^64 in all. The largest product of a model of
/// today has operands of 2^40 elements.
const MOST_ELEMENTS: f64 = (1u64 << 53) as f64;

impl Kernel {
    /// Whether the kernel's elements and bytes can be counted: its description exists, and no
    /// number in it overflows. Ask this of a kernel from a file before anything else.
    pub fn is_countable(&self) -> bool {
        let sizes = |kernel: &Kernel| numbers(&serde_json::to_value(kernel).expect("invariant: a kernel can be written"));
        let is_small = sizes(self).into_iter().all(|size| size <= MOST_ELEMENTS);
        is_small && self.most_elements(&sizes) <= MOST_ELEMENTS
    }

    /// An upper bound on the elements of each operand, in real numbers.
    fn most_elements(&self, sizes: &impl Fn(&Kernel) -> Vec<f64>) -> f64 {
        match *self {
            Kernel::Attention(attention) | Kernel::AttentionGradient(attention) => {
                let positions = attention.queries.max(attention.keys);
                let features = attention.head_dimension.max(attention.value_features());
                let buckets = attention.relative.map_or(1, |relative| relative.buckets);
                let heads = product(&[attention.key_heads, attention.group]);
                heads * product(&[attention.batch, positions, features]).max(product(&[buckets]))
            }
            Kernel::Rope(rope) | Kernel::RopeGradient(rope) => {
                product(&[rope.batch, rope.positions, rope.heads, rope.head_dimension])
            }
            Kernel::Convolution(window)
            | Kernel::ConvolutionInputGradient(window)
            | Kernel::ConvolutionWeightGradient(window)
            | Kernel::MaxPool(window)
            | Kernel::MaxPoolGradient(window) => {
                let extent = |extent: usize| product(&[extent]) + 2.0 * window.padding as f64 + 1.0;
                let images = product(&[window.batch]) * extent(window.height) * extent(window.width);
                let channels = window.in_channels.max(window.out_channels);
                let weight = product(&[window.in_channels, window.out_channels, window.size, window.size]);
                weight.max(images * product(&[channels]))
            }
            Kernel::Lstm(layer) | Kernel::LstmGradient { sizes: layer, .. } | Kernel::LstmWeightGradient(layer) => {
                product(&[layer.hidden]) * product(&[layer.hidden]).max(product(&[layer.batch, layer.sequence]))
            }
            Kernel::Scan(scan) | Kernel::ScanGradient(scan) => {
                let features = scan.key_dimension.max(scan.value_dimension);
                product(&[scan.batch, scan.positions, scan.key_heads, scan.group]) * (product(&[features]) + 1.0)
            }
            // Its numbers are elements.
            Kernel::Planned(_) => 1.0,
            // Without parts there is no message.
            Kernel::Compress { parts: 0, .. } => f64::INFINITY,
            // A message has whole chunks, whose bytes are counted.
            Kernel::Compress { elements, parts, .. } => 1024.0 * (product(&[elements]) + product(&[parts])),
            Kernel::Decompress { elements, sources, .. } => 1024.0 * product(&[elements, sources]),
            // No operand of another kernel has more than three dimensions.
            kernel => {
                let mut sizes = sizes(&kernel.without_constants());
                sizes.sort_by(|one, other| other.total_cmp(one));
                sizes.iter().take(3).map(|size| size.max(1.0)).product()
            }
        }
    }
}

/// The product of extents in real numbers, with those of 0 as 1.
fn product(extents: &[usize]) -> f64 {
    extents.iter().map(|&extent| extent.max(1) as f64).product()
}

/// All numbers in a value.
fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Number(number) => number.as_f64().into_iter().collect(),
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        Value::Object(fields) => fields.values().flat_map(numbers).collect(),
        Value::Null | Value::Bool(_) | Value::String(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use crate::Kernel;
    use foretell_units::DataType;

    fn read(text: &str) -> Kernel {
        serde_json::from_str(text).expect("a kernel")
    }

    #[test]
    fn kernels_whose_elements_overflow_are_told_apart() {
        for text in [
            r#"{"matmul": {"rows": 18446744073709551615, "columns": 2, "contracted": 3, "weight": "out_in", "bias": true, "activation": "none"}}"#,
            r#"{"cross_entropy": {"rows": 18446744073709551615, "classes": 10}}"#,
            r#"{"bias_add": {"rows": 4294967296, "columns": 4294967296}}"#,
            r#"{"lstm": {"batch": 1, "sequence": 1, "hidden": 4294967296, "initial": false}}"#,
            r#"{"compress": {"elements": 8, "parts": 0, "format": "int8", "feedback": false}}"#,
            r#"{"relu": {"elements": 9223372036854775808}}"#,
        ] {
            assert!(!read(text).is_countable(), "{text}");
        }
    }

    #[test]
    fn kernels_of_large_models_are_countable() {
        for text in [
            // A million tokens over a vocabulary of a quarter of a million.
            r#"{"matmul": {"rows": 1048576, "columns": 262144, "contracted": 16384, "weight": "out_in", "bias": true, "activation": "none"}}"#,
            r#"{"cross_entropy_gradient": {"rows": 1048576, "classes": 262144, "normalizer": 67108864, "parts": 8, "scaled": true}}"#,
            r#"{"convolution": {"batch": 1024, "height": 224, "width": 224, "in_channels": 2048, "out_channels": 2048, "size": 3, "stride": 1, "padding": 1}}"#,
            r#"{"adam_w": {"elements": 1000000000000, "controlled": true}}"#,
        ] {
            let kernel = read(text);
            assert!(kernel.is_countable() && kernel.bytes(DataType::Bf16).count() > 0, "{text}");
        }
    }
}
