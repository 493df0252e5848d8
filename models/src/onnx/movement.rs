//! Operators that move numbers or change shapes: most make a layer of results, and other shapes of
//! weights and constants.

use super::messages::Node;
use super::shapes::{
    axes, broadcast, layer_of, of_one_sample, place, reshaped, shown, sliced, squeezed, unsqueezed, without_mark,
};
use super::translator::Translator;
use super::values::{BATCH_MARK, Known};
use crate::families::NetworkOperation;

impl Translator {
    /// Operators that move numbers or change shapes.
    pub(super) fn moved(&mut self, node: &Node, inputs: &[Known]) -> Result<Known, String> {
        let x = inputs.first().ok_or("it has no input")?;
        let own = x.dimensions();
        let unknown = || "its shape is not known".to_string();
        let numbers = |index: usize| inputs.get(index).and_then(Known::numbers);
        match node.operator.as_str() {
            "Reshape" => {
                let target = numbers(1).ok_or_else(unknown)?;
                let reason = || format!("{} cannot have the shape {}", shown(&own), shown(target));
                let dimensions = reshaped(&own, target, self.batch).ok_or_else(reason)?;
                self.in_shape(node, x, &dimensions)
            }
            "Flatten" => {
                let axis = place(node.int("axis", 1), own.len() + 1).ok_or("its axis does not exist")?;
                let product = |part: &[i64]| part.iter().try_fold(1i64, |product, &extent| product.checked_mul(extent));
                let (Some(before), Some(after)) = (product(&own[..axis]), product(&own[axis..])) else { return Err(unknown()) };
                self.in_shape(node, x, &[before, after])
            }
            "Squeeze" => {
                let dropped = axes(node, inputs, 1, own.len());
                self.in_shape(node, x, &squeezed(&own, dropped.as_deref()))
            }
            "Unsqueeze" => {
                let count = node.ints("axes").or_else(|| numbers(1)).map_or(0, <[i64]>::len);
                let added = axes(node, inputs, 1, own.len() + count).ok_or_else(unknown)?;
                self.in_shape(node, x, &unsqueezed(&own, &added).ok_or_else(unknown)?)
            }
            "Transpose" => {
                let listed = node.ints("perm").map(<[i64]>::to_vec);
                let order: Option<Vec<usize>> = match listed {
                    Some(order) => order.iter().map(|&axis| place(axis, own.len())).collect(),
                    None => Some((0..own.len()).rev().collect()),
                };
                let order = order.ok_or("its order does not exist")?;
                let dimensions: Vec<i64> = order.iter().map(|&axis| own[axis]).collect();
                match x {
                    Known::Layer { place, merged, .. } if order.first() == Some(&0) => {
                        let rest = order.iter().filter_map(|&axis| x.axis_of_sample(axis));
                        let order = if *merged { std::iter::once(0).chain(rest).collect() } else { rest.collect() };
                        self.layer(node.title(), NetworkOperation::Transpose { order }, &[*place])
                    }
                    other => other.with_dimensions(&dimensions).ok_or_else(|| "it moves the batch".into()),
                }
            }
            "Concat" => self.concatenated(node, inputs),
            "Gather" => self.gathered(node, inputs),
            // Of numbers that are the same in every sample.
            "GatherElements" => match (x, inputs.get(1)) {
                (Known::Constant { .. } | Known::Numbers { .. }, Some(Known::Constant { shape })) => {
                    Ok(Known::Constant { shape: shape.clone() })
                }
                _ => Err("it picks numbers of a result one by one".into()),
            },
            "Slice" => {
                let dimensions = self.slice(node, inputs)?;
                if let (Known::Numbers { values, .. }, Some(start)) = (x, numbers(1).and_then(|starts| starts.first())) {
                    // Bounds before the beginning count as it.
                    let start = if *start < 0 { start.saturating_add(values.len() as i64).max(0) } else { *start };
                    let start = usize::try_from(start).unwrap_or(values.len());
                    let kept = usize::try_from(dimensions.first().copied().unwrap_or(0)).unwrap_or(0);
                    let values = values.iter().skip(start).take(kept).copied().collect();
                    return Ok(Known::Numbers { values, is_scalar: false });
                }
                self.taken(node, x, &dimensions)
            }
            "Expand" => {
                let target = numbers(1).ok_or_else(unknown)?;
                let dimensions = broadcast(&own, target).ok_or("its shape does not fit")?;
                match x {
                    Known::Layer { .. } if dimensions == own => Ok(x.clone()),
                    Known::Layer { .. } => self.taken(node, x, &dimensions),
                    // The same weight for every sample.
                    other => other.with_dimensions(&without_mark(&dimensions)).ok_or_else(unknown),
                }
            }
            "Tile" => {
                let times = numbers(1).filter(|times| times.len() == own.len()).ok_or_else(unknown)?;
                let dimensions: Option<Vec<i64>> = own.iter().zip(times).map(|(&one, &times)| one.checked_mul(times)).collect();
                self.taken(node, x, &dimensions.ok_or_else(unknown)?)
            }
            "Pad" => {
                let pads = node.ints("pads").or_else(|| numbers(1)).filter(|pads| pads.len() == 2 * own.len());
                let pads = pads.ok_or_else(unknown)?;
                let padded = |(axis, one): (usize, &i64)| one.checked_add(pads[axis])?.checked_add(pads[axis + own.len()]);
                let dimensions = own.iter().enumerate().map(padded).collect::<Option<Vec<i64>>>().ok_or_else(unknown)?;
                if dimensions == own { Ok(x.clone()) } else { self.taken(node, x, &dimensions) }
            }
            "Resize" | "Upsample" => {
                let sizes = numbers(3).filter(|sizes| sizes.len() == own.len());
                let sizes = sizes.ok_or("only a `Resize` to stated sizes is understood")?;
                let dimensions = [&own[..1], &sizes[1..]].concat();
                self.taken(node, x, &dimensions)
            }
            other => Err(format!("`{other}` is not understood")),
        }
    }

    /// The same numbers with other dimensions.
    fn in_shape(&mut self, node: &Node, x: &Known, dimensions: &[i64]) -> Result<Known, String> {
        match x {
            Known::Layer { .. } if dimensions == x.dimensions() => Ok(x.clone()),
            Known::Layer { place, .. } if dimensions.first().is_some_and(|first| first % BATCH_MARK == 0) => {
                let times = dimensions[0] / BATCH_MARK;
                let first = usize::try_from(times).ok().filter(|&times| times != 1);
                let shape = first.into_iter().chain(behind(dimensions)).collect();
                Ok(self.layer(node.title(), NetworkOperation::Reshape { shape }, &[*place])?.with_merged(times != 1))
            }
            Known::Layer { .. } => Err(format!("{} joins the samples of the batch", shown(dimensions))),
            other => other.with_dimensions(dimensions).ok_or_else(|| "its shape is not known".into()),
        }
    }

    /// Some of the numbers, or repeated numbers, with these dimensions.
    fn taken(&mut self, node: &Node, x: &Known, dimensions: &[i64]) -> Result<Known, String> {
        match x {
            Known::Layer { place, .. } if dimensions.first() == x.dimensions().first() => {
                let shape = x.sample_with(dimensions);
                self.layer(node.title(), NetworkOperation::Take { shape }, &[*place])
            }
            Known::Layer { .. } => Err("it takes some of the samples of the batch".into()),
            other => other.with_dimensions(dimensions).ok_or_else(|| "its shape is not known".into()),
        }
    }

    fn concatenated(&mut self, node: &Node, inputs: &[Known]) -> Result<Known, String> {
        let parts: Option<Vec<&[i64]>> = inputs.iter().map(Known::numbers).collect();
        if let Some(parts) = parts {
            return Ok(Known::Numbers { values: parts.concat(), is_scalar: false });
        }
        let reads: Vec<usize> =
            inputs.iter().filter_map(|input| if let Known::Layer { place, .. } = input { Some(*place) } else { None }).collect();
        let rank = inputs.iter().map(|input| input.dimensions().len()).max().unwrap_or(0);
        let axis = place(node.int("axis", 0), rank).ok_or("its axis does not exist")?;
        if reads.len() == inputs.len() {
            let axis = inputs[0].axis_of_sample(axis).ok_or("it joins samples")?;
            return self.layer(node.title(), NetworkOperation::Concatenate { axis }, &reads);
        }
        let mut dimensions = inputs.iter().map(Known::dimensions).find(|own| own.len() == rank).unwrap_or_default();
        if let Some(layer) = inputs.iter().find(|input| matches!(input, Known::Layer { .. })) {
            dimensions = layer.dimensions();
        }
        if axis >= dimensions.len() {
            return Err("its axis does not exist".into());
        }
        dimensions[axis] = inputs.iter().map(|input| input.dimensions().get(axis).copied().unwrap_or(1)).sum();
        let Some(&read) = reads.first() else {
            return inputs
                .first()
                .and_then(|first| first.with_dimensions(&dimensions))
                .ok_or_else(|| "its shape is not known".into());
        };
        // A learned row before the positions of a sample, and the like.
        if reads.len() > 1 || axis == 0 || inputs.iter().any(Known::is_merged) {
            return Err("it joins several results with a weight".into());
        }
        let wider = self.layer(
            &format!("{}.joined", node.title()),
            NetworkOperation::Take { shape: behind(&dimensions).collect() },
            &[read],
        )?;
        let weight = inputs.iter().find_map(|input| if let Known::Weight { shape } = input { Some(shape) } else { None });
        let (Some(weight), (read, shape)) = (weight, layer_of(&wider)?) else { return Ok(wider) };
        let mut weight = of_one_sample(weight, shape.len());
        // A row that stands in one place has as many numbers as one that is added to all.
        if let Some(extent) = weight.get_mut(axis - 1).filter(|extent| **extent != 1) {
            return Err(format!("a weight of {extent} places is joined, and one is understood"));
        }
        self.layer(node.title(), NetworkOperation::Shift { shape: weight }, &[read])
    }

    fn gathered(&mut self, node: &Node, inputs: &[Known]) -> Result<Known, String> {
        let [x, indices] = inputs else { return Err("it has two inputs".into()) };
        let own = x.dimensions();
        let axis = place(node.int("axis", 0), own.len()).ok_or("its axis does not exist")?;
        match (x, indices) {
            (Known::Numbers { values, .. }, Known::Numbers { values: chosen, is_scalar }) => {
                let values: Option<Vec<i64>> = chosen.iter().map(|&index| Some(values[place(index, values.len())?])).collect();
                Ok(Known::Numbers { values: values.ok_or("its index is out of range")?, is_scalar: *is_scalar })
            }
            (Known::Weight { shape }, Known::Layer { place, .. }) if axis == 0 => self.embedding(node.title(), shape, *place),
            // Token types, and other tokens beside the first: the same look-up.
            (Known::Weight { shape }, Known::Constant { shape: places }) if axis == 0 => match self.tokens() {
                Some(tokens) if places[..] != [1] && tokens.dimensions().len() == places.len() && shape.len() == 2 => {
                    let (read, _) = layer_of(&tokens)?;
                    self.embedding(node.title(), shape, read)
                }
                _ => Ok(Known::Weight { shape: [&places[..], &shape[1..]].concat() }),
            },
            (_, Known::Layer { .. }) => Err("it looks up in something else than a table of weights".into()),
            (x, indices) => {
                let dimensions = [&own[..axis], &indices.dimensions()[..], &own[axis + 1..]].concat();
                self.taken(node, x, &dimensions)
            }
        }
    }

    /// The dimensions of a slice.
    fn slice(&mut self, node: &Node, inputs: &[Known]) -> Result<Vec<i64>, String> {
        let mut dimensions = inputs.first().map(Known::dimensions).unwrap_or_default();
        let list = |name: &str, index: usize| node.ints(name).or_else(|| inputs.get(index).and_then(Known::numbers));
        let (Some(starts), Some(ends)) = (list("starts", 1), list("ends", 2)) else {
            return Err("its bounds are not known".into());
        };
        let all: Vec<i64> = (0..starts.len() as i64).collect();
        let places = list("axes", 3).unwrap_or(&all);
        let steps = list("steps", 4);
        for (index, &axis) in places.iter().enumerate() {
            let axis = place(axis, dimensions.len()).ok_or("its axis does not exist")?;
            let (Some(&start), Some(&end)) = (starts.get(index), ends.get(index)) else {
                return Err("its bounds are not known".into());
            };
            let step = steps.and_then(|steps| steps.get(index)).copied().unwrap_or(1);
            // The whole batch, however it is written.
            if dimensions[axis] != BATCH_MARK || start != 0 {
                dimensions[axis] = sliced(dimensions[axis], start, end, step).ok_or("its step is 0")?;
            }
        }
        Ok(dimensions)
    }

    pub(super) fn split(&mut self, node: &Node) -> Result<(), String> {
        let inputs = self.inputs(node)?;
        let x = inputs.first().ok_or("it has no input")?;
        let own = x.dimensions();
        let axis = place(node.int("axis", 0), own.len()).ok_or("its axis does not exist")?;
        let count = node.outputs.len().max(1) as i64;
        let part = (own[axis] + count - 1) / count;
        let sizes = node.ints("split").or_else(|| inputs.get(1).and_then(Known::numbers)).map(<[i64]>::to_vec);
        let equal = || (0..count).map(|index| part.min(own[axis] - index * part)).collect();
        for (index, size) in sizes.unwrap_or_else(equal).into_iter().enumerate() {
            let mut dimensions = own.clone();
            dimensions[axis] = size;
            let value = self.taken(node, x, &dimensions)?;
            self.made(node, index, value);
        }
        Ok(())
    }
}

/// The dimensions behind the batch.
fn behind(dimensions: &[i64]) -> impl Iterator<Item = usize> {
    dimensions.iter().skip(1).map(|&extent| usize::try_from(extent).unwrap_or(0))
}
