//! Whether the shapes of a layer fit what it reads: everything that building a graph relies on.

use super::{NetworkLayer, NetworkOperation, NetworkWork};
use crate::kernel::MOST_PLANNED_READS;

/// The most multiply-adds of a layer for one sample.
const MOST_STEPS: usize = 1 << 56;

/// What a layer reads.
pub(super) struct Read<'a> {
    /// The shape of a sample, or of all of them if it is shared.
    pub(super) shape: &'a [usize],
    pub(super) shared: bool,
    pub(super) is_parameter: bool,
}

fn elements(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// Refuses a layer that does not fit what it reads. `is_integer`: whether its first operand
/// consists of integers.
pub(super) fn check(layer: &NetworkLayer, reads: &[Read<'_>], is_integer: bool) -> Result<(), String> {
    let (shape, operation) = (&layer.shape[..], layer.operation);
    let wanted = match operation {
        NetworkOperation::Parameter => 0..=0,
        NetworkOperation::Product { .. }
        | NetworkOperation::Bias
        | NetworkOperation::Convolution(_)
        | NetworkOperation::RmsNorm
        | NetworkOperation::Embedding => 2..=2,
        NetworkOperation::Attention { .. } | NetworkOperation::LayerNorm | NetworkOperation::BatchNorm => 3..=3,
        NetworkOperation::Work { .. } => 1..=MOST_PLANNED_READS,
        NetworkOperation::View
        | NetworkOperation::Slice
        | NetworkOperation::MaxPool { .. }
        | NetworkOperation::Relu
        | NetworkOperation::Gelu
        | NetworkOperation::Loss => 1..=1,
    };
    if !wanted.contains(&reads.len()) {
        return Err(format!("it reads {} tensors", reads.len()));
    }
    if layer.shared != (operation == NetworkOperation::Parameter || reads.iter().all(|read| read.shared)) {
        return Err("`shared` does not say whether it reads something that each sample has".into());
    }
    let views = matches!(operation, NetworkOperation::Parameter | NetworkOperation::View | NetworkOperation::Slice);
    if layer.shared && !views {
        return Err("it works on parameters alone".into());
    }
    let Some(x) = reads.first() else {
        return if shape.is_empty() { Err("a parameter has a dimension".into()) } else { Ok(()) };
    };
    let has_parameters = |shapes: &[Vec<usize>]| {
        let fits = |(read, shape): (&Read<'_>, &Vec<usize>)| read.is_parameter && read.shape == &shape[..];
        !x.shared && reads[1..].iter().zip(shapes).all(fits)
    };
    let last = x.shape.last().copied().unwrap_or(1);
    let with_last = |extent: usize| [&x.shape[..x.shape.len().saturating_sub(1)], &[extent]].concat();
    let fits = match operation {
        NetworkOperation::Parameter => true,
        NetworkOperation::View => elements(x.shape) == elements(shape),
        NetworkOperation::Slice => elements(x.shape) >= elements(shape),
        NetworkOperation::Product { transposed } => {
            let outputs = shape.last().copied().unwrap_or(1);
            let weight = if transposed { vec![outputs, last] } else { vec![last, outputs] };
            !x.shape.is_empty() && has_parameters(&[weight]) && shape == with_last(outputs)
        }
        NetworkOperation::Bias => !x.shape.is_empty() && shape == x.shape && has_parameters(&[vec![last]]),
        NetworkOperation::Convolution(window) => match (x.shape, shape) {
            (&[inputs, height, width], &[outputs, rows, columns]) => {
                has_parameters(&[vec![outputs, inputs, window.size, window.size]])
                    && [window.extent(height), window.extent(width)] == [Some(rows), Some(columns)]
            }
            _ => false,
        },
        NetworkOperation::MaxPool(window) => match (x.shape, shape) {
            (&[inputs, height, width], &[outputs, rows, columns]) => {
                inputs == outputs
                    && window.padding < window.size
                    && !x.shared
                    && [window.extent(height), window.extent(width)] == [Some(rows), Some(columns)]
            }
            _ => false,
        },
        NetworkOperation::Attention { .. } => match (x.shape, reads[1].shape, reads[2].shape, shape) {
            (&[heads, queries, features], &[groups, keys, own], &[value_groups, values, value_features], result) => {
                own == features
                    && [value_groups, values] == [groups, keys]
                    && heads.is_multiple_of(groups)
                    && result == [heads, queries, value_features]
                    && reads.iter().all(|read| !read.shared)
            }
            _ => false,
        },
        NetworkOperation::LayerNorm => shape == x.shape && !shape.is_empty() && has_parameters(&[vec![last], vec![last]]),
        NetworkOperation::RmsNorm => shape == x.shape && !shape.is_empty() && has_parameters(&[vec![last]]),
        NetworkOperation::BatchNorm => {
            let channels = x.shape.first().copied().unwrap_or(1);
            shape == x.shape && shape.len() == 3 && has_parameters(&[vec![channels], vec![channels]])
        }
        NetworkOperation::Embedding => {
            let features = shape.last().copied().unwrap_or(1);
            let table = &reads[1];
            table.is_parameter
                && table.shape.len() == 2
                && table.shape[1] == features
                && !x.shared
                && is_integer
                && shape == [x.shape, &[features]].concat()
        }
        NetworkOperation::Relu | NetworkOperation::Gelu => shape == x.shape,
        NetworkOperation::Work { kind, steps } => {
            let is_product = matches!(kind, NetworkWork::MatrixProduct | NetworkWork::Convolution);
            steps <= MOST_STEPS && is_product == (steps > 0) && (!is_product || reads.len() == 2)
        }
        NetworkOperation::Loss => !x.shape.is_empty() && !x.shared && !x.is_parameter,
    };
    if fits {
        return Ok(());
    }
    let shown: Vec<&[usize]> = reads.iter().map(|read| read.shape).collect();
    Err(format!("operands {shown:?} and the result {shape:?} do not fit the operation"))
}
