//! What each operator of ONNX becomes.

use super::messages::Node;
use super::shapes::{axes, broadcast, layer_of, of_one_sample, place, sliced, squeezed, without_batch};
use super::translator::Translator;
use super::values::Known;
use crate::families::{MOST, NetworkConvolution, NetworkOperation, NetworkPool};

/// Functions of each element.
const FUNCTIONS: [&str; 29] = [
    "Abs",
    "Ceil",
    "Celu",
    "Clip",
    "Cos",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "HardSigmoid",
    "HardSwish",
    "IsNaN",
    "LeakyRelu",
    "Log",
    "Mish",
    "Neg",
    "Not",
    "PRelu",
    "Reciprocal",
    "Round",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Swish",
    "Tanh",
];

/// Functions of two or three tensors, element by element.
const BINARY: [&str; 16] = [
    "Add",
    "And",
    "Div",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Max",
    "Min",
    "Mod",
    "Mul",
    "Or",
    "Pow",
    "Sub",
    "Where",
];

/// Statistics over dimensions.
const REDUCTIONS: [&str; 8] =
    ["ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"];

/// Other operators.
const OTHERS: [&str; 35] = [
    "AveragePool",
    "BatchNormalization",
    "Cast",
    "Concat",
    "Constant",
    "ConstantOfShape",
    "Conv",
    "Dropout",
    "Expand",
    "Flatten",
    "Gather",
    "GatherElements",
    "Gelu",
    "Gemm",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "Identity",
    "LayerNormalization",
    "LogSoftmax",
    "MatMul",
    "MaxPool",
    "Pad",
    "Range",
    "Relu",
    "Reshape",
    "Resize",
    "Shape",
    "Slice",
    "Softmax",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
    "Upsample",
];

/// Operators after which the first dimension may be another one.
const CHANGES: [&str; 6] = ["Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"];

/// Whether an operator is understood.
pub(super) fn is_known(operator: &str) -> bool {
    [&FUNCTIONS[..], &BINARY, &REDUCTIONS, &OTHERS].into_iter().flatten().any(|known| *known == operator)
}

impl Translator {
    /// Translates a node.
    ///
    /// # Errors
    /// What cannot be expressed.
    pub(super) fn node(&mut self, node: &Node) -> Result<(), String> {
        let operator = node.operator.as_str();
        if operator == "Constant" {
            let value = match node.tensor("value") {
                Some(tensor) => Known::of_tensor(tensor, false).ok_or("a dimension is negative")?,
                None => match node.ints("value_ints").or_else(|| node.ints("value_int")) {
                    Some([]) => Known::Numbers { values: vec![node.int("value_int", 0)], is_scalar: true },
                    Some(values) => Known::Numbers { values: values.to_vec(), is_scalar: false },
                    None => Known::Constant { shape: Vec::new() },
                },
            };
            self.made(node, 0, value);
            return Ok(());
        }
        if operator == "Split" {
            return self.split(node);
        }
        let inputs = self.inputs(node)?;
        let value = match operator {
            "Identity" | "Cast" => self.input(node, 0)?,
            "Dropout" => {
                self.note("no dropout is planned");
                self.input(node, 0)?
            }
            "Conv" => self.convolution(node)?,
            "Gemm" | "MatMul" => self.product(node)?,
            "BatchNormalization" => self.batch_norm(node)?,
            "LayerNormalization" => {
                let x = self.input(node, 0)?;
                let rank = x.dimensions().len();
                if place(node.int("axis", -1), rank) != rank.checked_sub(1) {
                    return Err("it norms more than the last dimension".into());
                }
                self.unary(node, &x, NetworkOperation::LayerNorm)?
            }
            "Relu" => self.unary(node, &self.input(node, 0)?, NetworkOperation::Relu)?,
            "Gelu" => self.unary(node, &self.input(node, 0)?, NetworkOperation::Gelu)?,
            "Softmax" | "LogSoftmax" => self.softmax(node)?,
            "MaxPool" | "AveragePool" => self.pool(node)?,
            "GlobalAveragePool" | "GlobalMaxPool" => {
                let (read, shape) = layer_of(&self.input(node, 0)?)?;
                self.layer(node.title(), NetworkOperation::GlobalAveragePool, &[read])?;
                let shape = vec![*shape.first().ok_or("it wants an image")?, 1, 1];
                let made = self.layers.len();
                self.layer(&format!("{}.shape", node.title()), NetworkOperation::Reshape { shape }, &[made])?
            }
            "Shape" => {
                let dimensions = self.input(node, 0)?.dimensions();
                let end = sliced(dimensions.len() as i64, node.int("start", 0), node.int("end", i64::MAX), 1).unwrap_or(0);
                let start = place(node.int("start", 0), dimensions.len()).unwrap_or(0);
                let values = dimensions.into_iter().skip(start).take(usize::try_from(end).unwrap_or(0)).collect();
                Known::Numbers { values, is_scalar: false }
            }
            "ConstantOfShape" | "Range" => match inputs.first().and_then(Known::numbers) {
                Some(numbers) if operator == "ConstantOfShape" => Known::Constant { shape: without_batch(numbers) },
                _ => range(&inputs),
            },
            _ if BINARY.contains(&operator) => self.binary(node, &inputs)?,
            _ if FUNCTIONS.contains(&operator) => self.unary(node, &self.input(node, 0)?, NetworkOperation::Function)?,
            _ if REDUCTIONS.contains(&operator) => self.reduce(node, &inputs)?,
            _ => self.moved(node, &inputs)?,
        };
        // Changes of shape know whether the batch is counted with another dimension.
        let keeps = !CHANGES.contains(&operator) && inputs.iter().any(Known::is_merged);
        self.made(node, 0, if keeps { value.with_merged(true) } else { value });
        Ok(())
    }

    /// A function of each element. Numbers without layers stay what they are.
    fn unary(&mut self, node: &Node, x: &Known, operation: NetworkOperation) -> Result<Known, String> {
        match x {
            Known::Layer { place, .. } => self.layer(node.title(), operation, &[*place]),
            Known::Numbers { .. } => x.with_dimensions(&x.dimensions()).ok_or_else(|| "its shape is not known".into()),
            other => Ok(other.clone()),
        }
    }

    fn softmax(&mut self, node: &Node) -> Result<Known, String> {
        let x = self.input(node, 0)?;
        let rank = x.dimensions().len();
        let axis = place(node.int("axis", -1), rank).ok_or("its axis does not exist")?;
        let is_last = axis + 1 == rank || (axis == 1 && rank == 4);
        self.unary(node, &x, if is_last { NetworkOperation::Softmax } else { NetworkOperation::Function })
    }

    fn convolution(&mut self, node: &Node) -> Result<Known, String> {
        let (read, shape) = layer_of(&self.input(node, 0)?)?;
        let Known::Weight { shape: weight } = self.input(node, 1)? else { return Err("its weight is no parameter".into()) };
        let (&[channels, _, rows, columns], &[_, height, width]) = (&weight[..], &shape[..]) else {
            return Err("only convolutions of two dimensions are understood".into());
        };
        let pool = window(node, [rows, columns], [height, width])?;
        let groups = usize::try_from(node.int("group", 1)).map_err(|_| "its groups are negative")?;
        let bias = node.inputs.get(2).is_some_and(|name| !name.is_empty());
        let convolution = NetworkConvolution { channels, pool, groups, bias };
        self.layer(node.title(), NetworkOperation::Convolution(convolution), &[read])
    }

    fn pool(&mut self, node: &Node) -> Result<Known, String> {
        let (read, shape) = layer_of(&self.input(node, 0)?)?;
        let (Some(&[rows, columns]), &[_, height, width]) = (node.ints("kernel_shape"), &shape[..]) else {
            return Err("only poolings of two dimensions are understood".into());
        };
        let size = [rows, columns].map(|extent| usize::try_from(extent).unwrap_or(0));
        let pool = NetworkPool { partial: node.int("ceil_mode", 0) == 1, ..window(node, size, [height, width])? };
        let is_maximum = node.operator == "MaxPool";
        self.layer(
            node.title(),
            if is_maximum { NetworkOperation::MaxPool(pool) } else { NetworkOperation::AveragePool(pool) },
            &[read],
        )
    }

    fn batch_norm(&mut self, node: &Node) -> Result<Known, String> {
        let (read, shape) = layer_of(&self.input(node, 0)?)?;
        match *shape {
            [_, _, _] => self.layer(node.title(), NetworkOperation::BatchNorm, &[read]),
            [features] => {
                let image = NetworkOperation::Reshape { shape: vec![features, 1, 1] };
                let (read, _) = layer_of(&self.layer(&format!("{}.image", node.title()), image, &[read])?)?;
                let (read, _) = layer_of(&self.layer(node.title(), NetworkOperation::BatchNorm, &[read])?)?;
                let vector = NetworkOperation::Reshape { shape: vec![features] };
                self.layer(&format!("{}.vector", node.title()), vector, &[read])
            }
            _ => Err("batch norm is understood for images and vectors".into()),
        }
    }

    /// A product with a weight, or of two results.
    fn product(&mut self, node: &Node) -> Result<Known, String> {
        let (left, right) = (self.input(node, 0)?, self.input(node, 1)?);
        if node.int("transA", 0) != 0 {
            return Err("its first operand is transposed".into());
        }
        let (read, shape) = layer_of(&left)?;
        match right {
            Known::Weight { shape: weight } => {
                let [rows, columns] = *weight else { return Err("its weight is no matrix".into()) };
                let [inputs, features] = if node.int("transB", 0) != 0 { [columns, rows] } else { [rows, columns] };
                if shape.last() != Some(&inputs) {
                    return Err(format!("{shape:?} and a weight of {inputs} rows have no product"));
                }
                let bias = matches!(self.inputs(node)?.get(2), Some(Known::Weight { .. }));
                self.layer(node.title(), NetworkOperation::Linear { features, bias }, &[read])
            }
            Known::Layer { place: other, .. } => self.layer(node.title(), NetworkOperation::MatrixProduct, &[read, other]),
            _ => Err("its second operand is neither a weight nor a result".into()),
        }
    }

    fn binary(&mut self, node: &Node, inputs: &[Known]) -> Result<Known, String> {
        if let [left, right] = inputs
            && let (Some(left_numbers), Some(right_numbers)) = (left.numbers(), right.numbers())
            && let Some(values) = arithmetic(&node.operator, left_numbers, right_numbers)
        {
            let is_scalar = left.dimensions().is_empty() && right.dimensions().is_empty();
            return Ok(Known::Numbers { values, is_scalar });
        }
        let is_sum = matches!(node.operator.as_str(), "Add" | "Sub" | "Where" | "Max" | "Min");
        let operation = if is_sum { NetworkOperation::Add } else { NetworkOperation::Multiply };
        let mut result: Option<Known> = None;
        for next in inputs {
            result = Some(match result {
                None => next.clone(),
                Some(first) => self.combined(node, is_sum, &operation, first, next)?,
            });
        }
        result.ok_or_else(|| "it has no inputs".into())
    }

    /// The sum or product of two tensors.
    fn combined(
        &mut self,
        node: &Node,
        is_sum: bool,
        operation: &NetworkOperation,
        one: Known,
        other: &Known,
    ) -> Result<Known, String> {
        match (&one, other) {
            (Known::Layer { place, .. }, Known::Layer { place: other, .. }) => {
                self.layer(node.title(), operation.clone(), &[*place, *other])
            }
            (Known::Layer { place, shape, .. }, Known::Weight { shape: weight })
            | (Known::Weight { shape: weight }, Known::Layer { place, shape, .. }) => {
                let shape = of_one_sample(weight, shape.len());
                let with_weight = if is_sum { NetworkOperation::Shift { shape } } else { NetworkOperation::Weigh { shape } };
                self.layer(node.title(), with_weight, &[*place])
            }
            // A scale, a mask: it costs what a function of the result costs.
            (Known::Layer { place, .. }, _) | (_, Known::Layer { place, .. }) => {
                let merged = one.is_merged() || other.is_merged();
                let wider = self.layer(node.title(), NetworkOperation::Function, &[*place])?.with_merged(merged);
                let fits = broadcast(&one.dimensions(), &other.dimensions()).is_some_and(|both| both == wider.dimensions());
                if fits { Ok(wider) } else { Err("a constant is wider than the result that it is combined with".into()) }
            }
            (Known::Weight { .. }, _) => Ok(one),
            (_, Known::Weight { .. }) => Ok(other.clone()),
            _ => {
                let both = broadcast(&one.dimensions(), &other.dimensions()).ok_or("its operands do not fit each other")?;
                Ok(Known::Constant { shape: without_batch(&both) })
            }
        }
    }

    fn reduce(&mut self, node: &Node, inputs: &[Known]) -> Result<Known, String> {
        let x = inputs.first().ok_or("it has no input")?;
        let own = x.dimensions();
        let reduced = axes(node, inputs, 1, own.len()).unwrap_or_else(|| (0..own.len()).collect());
        let keeps = node.int("keepdims", 1) == 1;
        let mut dimensions = own.clone();
        reduced.iter().for_each(|&axis| dimensions[axis] = 1);
        if !keeps {
            dimensions = squeezed(&dimensions, Some(&reduced));
        }
        let (read, shape) = match x {
            Known::Layer { place, shape, .. } => (*place, shape),
            other => return other.with_dimensions(&dimensions).ok_or_else(|| "its shape is not known".into()),
        };
        if reduced.contains(&0) {
            return Err("it reduces over the samples of the batch".into());
        }
        let result = x.sample_with(&dimensions);
        if shape.len() == 3 && reduced == [2, 3] && node.operator == "ReduceMean" {
            let mean = self.layer(node.title(), NetworkOperation::GlobalAveragePool, &[read])?;
            let (read, own) = layer_of(&mean)?;
            if own == result {
                return Ok(mean);
            }
            return self.layer(&format!("{}.shape", node.title()), NetworkOperation::Reshape { shape: result }, &[read]);
        }
        let result = if result.is_empty() { vec![1] } else { result };
        self.layer(node.title(), NetworkOperation::Statistic { shape: result }, &[read])
    }
}

/// The window of a convolution or a pooling over an image.
fn window(node: &Node, size: [usize; 2], image: [usize; 2]) -> Result<NetworkPool, String> {
    let is_extent = |extent: i64| (1..=MOST as i64).contains(&extent);
    let two = |name: &str, default: usize| -> Result<[usize; 2], String> {
        match node.ints(name) {
            None => Ok([default, default]),
            Some(&[rows, columns]) if is_extent(rows) && is_extent(columns) => Ok([rows, columns].map(|extent| extent as usize)),
            Some(other) => Err(format!("`{name}` is {other:?}")),
        }
    };
    let (stride, dilation) = (two("strides", 1)?, two("dilations", 1)?);
    let stated = match node.ints("pads") {
        None => Some([0; 4]),
        Some(pads) => <[i64; 4]>::try_from(pads).ok().and_then(|pads| {
            let pads = pads.map(|pad| usize::try_from(pad).ok());
            Some([pads[0]?, pads[1]?, pads[2]?, pads[3]?])
        }),
    };
    let stated = stated.ok_or("its padding is not that of an image")?;
    let padding = match node.text("auto_pad") {
        b"" | b"NOTSET" => stated,
        b"VALID" => [0; 4],
        kind => {
            let total = [0, 1].map(|axis: usize| {
                let window = dilation[axis].saturating_mul(size[axis].saturating_sub(1)).saturating_add(1);
                let last = image[axis].div_ceil(stride[axis]).saturating_sub(1) * stride[axis];
                last.saturating_add(window).saturating_sub(image[axis])
            });
            let [less, more] = [total.map(|total| total / 2), total.map(|total| total.div_ceil(2))];
            let [before, after] = if kind == b"SAME_LOWER" { [more, less] } else { [less, more] };
            [before[0], before[1], after[0], after[1]]
        }
    };
    Ok(NetworkPool { size, stride, padding, dilation, partial: false })
}

/// Arithmetic of the whole numbers that make shapes. `None` if it is no arithmetic.
fn arithmetic(operator: &str, left: &[i64], right: &[i64]) -> Option<Vec<i64>> {
    let function: fn(i64, i64) -> Option<i64> = match operator {
        "Add" => i64::checked_add,
        "Sub" => i64::checked_sub,
        "Mul" => i64::checked_mul,
        "Div" => i64::checked_div,
        "Mod" => i64::checked_rem,
        "Max" => |one, other| Some(one.max(other)),
        "Min" => |one, other| Some(one.min(other)),
        "Equal" => |one, other| Some(i64::from(one == other)),
        _ => return None,
    };
    let count = left.len().max(right.len());
    let at =
        |numbers: &[i64], index: usize| if numbers.len() == 1 { numbers.first().copied() } else { numbers.get(index).copied() };
    (0..count).map(|index| function(at(left, index)?, at(right, index)?)).collect()
}

/// The numbers from the first input to the second by the third.
fn range(inputs: &[Known]) -> Known {
    let one = |index: usize| inputs.get(index).and_then(Known::numbers).and_then(|numbers| numbers.first().copied());
    let (Some(start), Some(end), Some(step)) = (one(0), one(1), one(2)) else { return Known::Constant { shape: vec![1] } };
    let count = sliced(i64::MAX, start, end, step).unwrap_or(0);
    Known::Constant { shape: vec![usize::try_from(count).unwrap_or(0)] }
}
