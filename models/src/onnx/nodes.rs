//! What each operator of ONNX becomes.

use super::batch::BatchPlace;
use super::images::image_of;
use super::messages::Node;
use super::numbers::{arithmetic, chosen, range, repeated};
use super::shapes::{axes, beside_sample, broadcast, place, shown, sliced, squeezed, without_batch};
use super::translator::Translator;
use super::values::Known;
use crate::families::NetworkOperation;

/// Functions of each element.
const FUNCTIONS: [&str; 31] = [
    "Abs",
    "Ceil",
    "Celu",
    "Clip",
    "Cos",
    "CumSum",
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
    "Trilu",
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
const OTHERS: [&str; 36] = [
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
    "GatherND",
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
                Some(tensor) => Known::of_tensor(tensor, self.is_weight(node)).ok_or("a dimension is negative")?,
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
                within_sample(&x, rank - 1)?;
                self.unary(node, &x, NetworkOperation::LayerNorm)?
            }
            "Relu" => self.unary(node, &self.input(node, 0)?, NetworkOperation::Relu)?,
            "Gelu" => self.unary(node, &self.input(node, 0)?, NetworkOperation::Gelu)?,
            "Softmax" | "LogSoftmax" => self.softmax(node)?,
            "MaxPool" | "AveragePool" => self.pool(node)?,
            "GlobalAveragePool" | "GlobalMaxPool" => {
                let (read, shape) = image_of(&self.input(node, 0)?)?;
                self.layer(node.title(), NetworkOperation::GlobalAveragePool, &[read], BatchPlace::FIRST)?;
                let shape = vec![*shape.first().ok_or("it wants an image")?, 1, 1];
                let made = self.layers.len();
                let title = format!("{}.shape", node.title());
                self.layer(&title, NetworkOperation::Reshape { shape }, &[made], BatchPlace::FIRST)?
            }
            "Shape" => {
                let dimensions = self.input(node, 0)?.dimensions();
                let end = sliced(dimensions.len() as i64, node.int("start", 0), node.int("end", i64::MAX), 1);
                let end = end.expect("invariant: the step is not 0");
                let start = place(node.int("start", 0), dimensions.len()).unwrap_or(0);
                let values = dimensions.into_iter().skip(start).take(usize::try_from(end).unwrap_or(0)).collect();
                Known::Numbers { values, is_scalar: false }
            }
            "ConstantOfShape" => repeated(node, &inputs),
            "Range" => range(&inputs)?,
            _ if BINARY.contains(&operator) => self.binary(node, &inputs)?,
            _ if FUNCTIONS.contains(&operator) => self.unary(node, &self.input(node, 0)?, NetworkOperation::Function)?,
            _ if REDUCTIONS.contains(&operator) => self.reduce(node, &inputs)?,
            _ => self.moved(node, &inputs)?,
        };
        self.made(node, 0, value);
        Ok(())
    }

    /// A function of each element. For shape numbers, only sign and rounding are computed.
    fn unary(&mut self, node: &Node, x: &Known, operation: NetworkOperation) -> Result<Known, String> {
        match x {
            Known::Layer { place, batch, .. } => self.layer(node.title(), operation, &[*place], *batch),
            Known::Numbers { values, is_scalar } => Ok(match node.operator.as_str() {
                "Neg" => {
                    Known::Numbers { values: values.iter().map(|value| value.saturating_neg()).collect(), is_scalar: *is_scalar }
                }
                "Ceil" | "Floor" | "Round" => x.clone(),
                _ => Known::Constant { shape: without_batch(&x.dimensions()) },
            }),
            other => Ok(other.clone()),
        }
    }

    fn softmax(&mut self, node: &Node) -> Result<Known, String> {
        let x = self.input(node, 0)?;
        let rank = x.dimensions().len();
        let axis = place(node.int("axis", -1), rank).ok_or("its axis does not exist")?;
        within_sample(&x, axis)?;
        let is_last = axis + 1 == rank || (axis == 1 && rank == 4);
        self.unary(node, &x, if is_last { NetworkOperation::Softmax } else { NetworkOperation::Function })
    }

    /// A product with a weight, or of two results.
    fn product(&mut self, node: &Node) -> Result<Known, String> {
        let (left, right) = (self.input(node, 0)?, self.input(node, 1)?);
        if node.int("transA", 0) != 0 {
            return Err("its first operand is transposed".into());
        }
        let Known::Layer { place: read, shape, batch } = left else {
            return Err("its first operand is not the result of a layer".into());
        };
        let rank = shape.len() + 1 - batch.merged();
        match right {
            Known::Weight { shape: weight } => {
                let [rows, columns] = *weight else { return Err("its weight is no matrix".into()) };
                let [inputs, features] = if node.int("transB", 0) != 0 { [columns, rows] } else { [rows, columns] };
                if shape.last() != Some(&inputs) || batch.axis + 1 == rank {
                    return Err(format!(
                        "{} and a weight of {inputs} rows have no product",
                        shown(&self.input(node, 0)?.dimensions())
                    ));
                }
                let bias = matches!(self.inputs(node)?.get(2), Some(Known::Weight { .. }));
                self.layer(node.title(), NetworkOperation::Linear { features, bias }, &[read], batch)
            }
            Known::Layer { place: other, batch: own, .. } => {
                if own != batch || batch.axis + 2 >= rank {
                    return Err("it multiplies numbers of several samples".into());
                }
                self.layer(node.title(), NetworkOperation::MatrixProduct, &[read, other], batch)
            }
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
        if node.operator == "Where"
            && let [condition, yes, no] = inputs
            && let (Some(condition), Some(yes), Some(no)) = (condition.numbers(), yes.numbers(), no.numbers())
            && let Some(values) = chosen(condition, yes, no)
        {
            let is_scalar = inputs.iter().all(|input| input.dimensions().is_empty());
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
            (Known::Layer { place, batch, .. }, Known::Layer { place: read, batch: second, .. }) => {
                // Dimensions are aligned from the last one (broadcasting).
                let wider = if second.axis > batch.axis { second } else { batch };
                let ranks = [one.dimensions().len(), other.dimensions().len()];
                let is_same =
                    (batch.before, batch.after, second.axis + ranks[0]) == (second.before, second.after, batch.axis + ranks[1]);
                if !is_same {
                    return Err("its operands have the batch in different places".into());
                }
                self.layer(node.title(), operation.clone(), &[*place, *read], *wider)
            }
            (layer @ Known::Layer { place, batch, .. }, Known::Weight { shape: weight })
            | (Known::Weight { shape: weight }, layer @ Known::Layer { place, batch, .. }) => {
                let rank = layer.dimensions().len();
                let shape =
                    beside_sample(weight, rank, *batch, self.batch).ok_or("its weight is not the same for every sample")?;
                if is_table(&shape) {
                    self.note(
                        "weights over the last two dimensions that are the same for all heads or channels \
                         are taken for masks or rotations, not trained weights",
                    );
                    return self.layer(node.title(), NetworkOperation::Function, &[*place], *batch);
                }
                let with_weight = if is_sum { NetworkOperation::Shift { shape } } else { NetworkOperation::Weigh { shape } };
                let batch = BatchPlace { axis: batch.axis + weight.len().saturating_sub(rank), ..*batch };
                self.layer(node.title(), with_weight, &[*place], batch)
            }
            // A scale, a mask: it costs what a function of the result costs.
            (layer @ Known::Layer { place, shape, batch }, constant)
            | (constant, layer @ Known::Layer { place, shape, batch }) => {
                let own = without_batch(&constant.dimensions());
                let beside = beside_sample(&own, layer.dimensions().len(), *batch, self.batch);
                let fits = beside.and_then(|beside| {
                    let extents = |shape: &[usize]| shape.iter().map(|&extent| extent as i64).collect::<Vec<_>>();
                    broadcast(&extents(shape), &extents(&beside)).filter(|both| *both == extents(shape))
                });
                fits.ok_or("a constant is wider than the result that it is combined with")?;
                self.layer(node.title(), NetworkOperation::Function, &[*place], *batch)
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
        let (Known::Layer { place: read, shape, batch }, Some(counted)) = (x, batch_extent(x)) else {
            return x.with_dimensions(&dimensions).ok_or_else(|| "its shape is not known".into());
        };
        if reduced.contains(&batch.axis) {
            return Err("it reduces over the samples of the batch".into());
        }
        let axis = dimensions.iter().position(|&extent| extent == counted).expect("invariant: the batch is not reduced");
        let place = BatchPlace { axis, ..*batch };
        let result = place.sample(&dimensions);
        if shape.len() == 3 && reduced == [2, 3] && *batch == BatchPlace::FIRST && node.operator == "ReduceMean" {
            let mean = self.layer(node.title(), NetworkOperation::GlobalAveragePool, &[*read], place)?;
            let (read, own) = image_of(&mean)?;
            if own == result {
                return Ok(mean);
            }
            return self.layer(&format!("{}.shape", node.title()), NetworkOperation::Reshape { shape: result }, &[read], place);
        }
        let result = if result.is_empty() { vec![1] } else { result };
        self.layer(node.title(), NetworkOperation::Statistic { shape: result }, &[*read], place)
    }
}

/// Whether a weight that is combined with each element is a table over the last two dimensions.
/// Masks and rotary angles have this form. A trained weight of this form would be mistaken for one.
fn is_table(shape: &[usize]) -> bool {
    let [others @ .., rows, columns] = shape else { return false };
    !others.is_empty() && others.iter().all(|&extent| extent == 1) && *rows > 1 && *columns > 1
}

/// Refuses an operator that works along a dimension if that is the batch.
fn within_sample(x: &Known, axis: usize) -> Result<(), String> {
    match x.batch_and_sizes() {
        Some((batch, _)) if batch.axis == axis => Err("it works on numbers of several samples".into()),
        _ => Ok(()),
    }
}

/// The extent of the dimension that counts a result's samples.
fn batch_extent(value: &Known) -> Option<i64> {
    let (batch, _) = value.batch_and_sizes()?;
    value.dimensions().get(batch.axis).copied()
}
