//! Operators that move numbers or change shapes: most make a layer of results, and other shapes of
//! weights and constants.

use super::batch::{BATCH_MARK, BatchPlace, is_batch, product};
use super::messages::Node;
use super::shapes::{
    axes, beside_sample, broadcast, place, reshaped, reshaped_layer, shown, sliced, squeezed, unsqueezed, without_batch,
    without_mark,
};
use super::translator::Translator;
use super::values::{Known, MOST_NUMBERS};
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
                let dimensions = match x.batch_and_sizes() {
                    Some((_, sizes)) => reshaped_layer(&own, target, sizes, self.batch),
                    None => reshaped(&own, &without_mark(target)),
                };
                let reason = || format!("{} cannot have the shape {}", shown(&own), shown(target));
                self.in_shape(node, x, &dimensions.ok_or_else(reason)?)
            }
            "Flatten" => {
                let axis = place(node.int("axis", 1), own.len() + 1).ok_or("its axis does not exist")?;
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
                let is_permutation = |order: &Vec<usize>| {
                    let mut sorted = order.clone();
                    sorted.sort_unstable();
                    sorted.into_iter().eq(0..own.len())
                };
                let order = order.filter(is_permutation).ok_or("its order does not exist")?;
                let dimensions: Vec<i64> = order.iter().map(|&axis| own[axis]).collect();
                match x {
                    Known::Layer { place, shape, batch } => {
                        let moved = order.iter().position(|&axis| axis == batch.axis);
                        let moved = moved.expect("invariant: an order has every axis");
                        let moved = BatchPlace { axis: moved, ..*batch };
                        let order: Vec<usize> = order.iter().flat_map(|&axis| batch.axes_of_sample(axis)).collect();
                        // Only the batch moves, and layers have it first.
                        if order.iter().copied().eq(0..shape.len()) {
                            return Ok(Known::Layer { place: *place, shape: shape.clone(), batch: moved });
                        }
                        self.layer(node.title(), NetworkOperation::Transpose { order }, &[*place], moved)
                    }
                    other => other.with_dimensions(&dimensions).ok_or_else(|| "its shape is not known".into()),
                }
            }
            "Concat" => self.concatenated(node, inputs),
            "Gather" => self.gathered(node, inputs),
            // Of numbers that are the same in every sample.
            "GatherElements" => match (x, inputs.get(1)) {
                (Known::Constant { .. } | Known::Numbers { .. }, Some(Known::Constant { shape })) => {
                    Ok(Known::Constant { shape: shape.clone() })
                }
                // Looks up one number of a table for each token.
                (Known::Constant { .. } | Known::Numbers { .. }, Some(Known::Layer { place, batch, .. })) => {
                    self.layer(node.title(), NetworkOperation::Function, &[*place], *batch)
                }
                _ => Err("it picks numbers of a result one by one".into()),
            },
            "GatherND" => match (x, inputs.get(1).map(Known::dimensions)) {
                (Known::Constant { .. } | Known::Numbers { .. }, Some(places)) if node.int("batch_dims", 0) == 0 => {
                    let (&depth, places) = places.split_last().ok_or_else(unknown)?;
                    let rest = usize::try_from(depth).ok().and_then(|depth| own.get(depth..)).ok_or_else(unknown)?;
                    Ok(Known::Constant { shape: without_batch(&[places, rest].concat()) })
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
                    let step = node.ints("steps").or_else(|| numbers(4)).and_then(|steps| steps.first()).copied().unwrap_or(1);
                    let size = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX).max(1);
                    let values = match step < 0 {
                        true => values.iter().take(start.saturating_add(1)).rev().step_by(size).take(kept).copied().collect(),
                        false => values.iter().skip(start).step_by(size).take(kept).copied().collect(),
                    };
                    return Ok(Known::Numbers { values, is_scalar: false });
                }
                self.taken(node, x, &dimensions)
            }
            "Expand" => {
                let target = with_own_batch(x, numbers(1).ok_or_else(unknown)?, self.batch);
                let dimensions = broadcast(&own, &target).ok_or("its shape does not fit")?;
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
                let sizes = numbers(3).filter(|sizes| sizes.len() == own.len() && !own.is_empty());
                let sizes = sizes.ok_or("only a `Resize` to stated sizes is understood")?;
                let dimensions = [&own[..1], &sizes[1..]].concat();
                self.taken(node, x, &dimensions)
            }
            other => Err(format!("`{other}` is not understood")),
        }
    }

    /// The same numbers with other dimensions.
    fn in_shape(&mut self, node: &Node, x: &Known, dimensions: &[i64]) -> Result<Known, String> {
        let unknown = || "its shape is not known".to_string();
        let (Known::Layer { place, shape, .. }, Some((_, sizes))) = (x, x.batch_and_sizes()) else {
            return x.with_dimensions(dimensions).ok_or_else(unknown);
        };
        let joins = || format!("{} joins the samples of the batch", shown(dimensions));
        let batch = BatchPlace::among(dimensions, sizes).ok_or_else(joins)?;
        let sample = batch.sample(dimensions);
        if sample == *shape {
            return Ok(Known::Layer { place: *place, shape: sample, batch });
        }
        self.layer(node.title(), NetworkOperation::Reshape { shape: sample }, &[*place], batch)
    }

    /// Some of the numbers, or repeated numbers, with these dimensions.
    fn taken(&mut self, node: &Node, x: &Known, dimensions: &[i64]) -> Result<Known, String> {
        let Known::Layer { place, batch, .. } = x else {
            return x.with_dimensions(dimensions).ok_or_else(|| "its shape is not known".into());
        };
        let counted = x.dimensions().get(batch.axis).copied();
        let axis = dimensions.iter().position(|&extent| is_batch(extent) && Some(extent) == counted);
        let batch = BatchPlace { axis: axis.ok_or("it takes some of the samples of the batch")?, ..*batch };
        let shape = batch.sample(dimensions);
        self.layer(node.title(), NetworkOperation::Take { shape }, &[*place], batch)
    }

    fn concatenated(&mut self, node: &Node, inputs: &[Known]) -> Result<Known, String> {
        let parts: Option<Vec<&[i64]>> = inputs.iter().map(Known::numbers).collect();
        if let Some(parts) = parts {
            let count: usize = parts.iter().map(|part| part.len()).sum();
            if count > MOST_NUMBERS as usize {
                return Ok(Known::Constant { shape: vec![count] });
            }
            return Ok(Known::Numbers { values: parts.concat(), is_scalar: false });
        }
        let rank = inputs.iter().map(|input| input.dimensions().len()).max().unwrap_or(0);
        let axis = place(node.int("axis", 0), rank).ok_or("its axis does not exist")?;
        let Some((batch, _)) = inputs.iter().find_map(Known::batch_and_sizes) else {
            let mut dimensions = inputs.iter().map(Known::dimensions).find(|own| own.len() == rank).unwrap_or_default();
            dimensions[axis] = joined_extent(inputs, axis).ok_or("its size is not known")?;
            let joined = inputs.first().and_then(|first| first.with_dimensions(&dimensions));
            return joined.ok_or_else(|| "its shape is not known".into());
        };
        let mut reads = Vec::new();
        for input in inputs {
            if let Known::Layer { place, batch: own, .. } = input {
                reads.push(*place);
                if *own != batch {
                    return Err("it joins results that have the batch in different places".into());
                }
            }
        }
        if axis == batch.axis {
            return Err("it joins samples".into());
        }
        let own_axis = batch.axes_of_sample(axis).start;
        if reads.len() == inputs.len() {
            return self.layer(node.title(), NetworkOperation::Concatenate { axis: own_axis }, &reads, batch);
        }
        // A learned row before the positions of a sample, and the like.
        let (Some(Known::Layer { shape, .. }), [read]) =
            (inputs.iter().find(|input| matches!(input, Known::Layer { .. })), &reads[..])
        else {
            return Err("it joins several results with a weight".into());
        };
        let mut wider = shape.clone();
        let extent = joined_extent(inputs, axis).and_then(|extent| usize::try_from(extent).ok());
        *wider.get_mut(own_axis).ok_or("its axis does not exist")? = extent.ok_or("its size is not known")?;
        let title = format!("{}.joined", node.title());
        let wider = self.layer(&title, NetworkOperation::Take { shape: wider }, &[*read], batch)?;
        let weight = inputs.iter().find_map(|input| if let Known::Weight { shape } = input { Some(shape) } else { None });
        let (Some(weight), Known::Layer { place: read, .. }) = (weight, &wider) else { return Ok(wider) };
        let weight = beside_sample(weight, rank, batch, self.batch).ok_or("its weight is not the same for every sample")?;
        // A row that stands in one place has as many numbers as one that is added to all.
        if let Some(extent) = weight.get(own_axis).filter(|extent| **extent != 1) {
            return Err(format!("a weight of {extent} places is joined, and one is understood"));
        }
        self.layer(node.title(), NetworkOperation::Shift { shape: weight }, &[*read], batch)
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
            (Known::Weight { shape }, Known::Layer { place, batch, .. }) if axis == 0 => {
                self.embedding(node.title(), shape, *place, *batch)
            }
            // Token types, and other tokens beside the first: the same look-up.
            (Known::Weight { shape }, Known::Constant { shape: places }) if axis == 0 => match self.tokens() {
                Some(Known::Layer { place, shape: own, batch })
                    if places[..] != [1] && own.len() + 1 == places.len() && shape.len() == 2 =>
                {
                    self.embedding(node.title(), shape, place, batch)
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
        let part = own[axis].checked_add(count - 1).ok_or("its size is not known")? / count;
        let sizes = node.ints("split").or_else(|| inputs.get(1).and_then(Known::numbers)).map(<[i64]>::to_vec);
        let equal = || (0..count).map(|index| part.min(own[axis].saturating_sub(index.saturating_mul(part)))).collect();
        for (index, size) in sizes.unwrap_or_else(equal).into_iter().enumerate() {
            let mut dimensions = own.clone();
            dimensions[axis] = size;
            let value = self.taken(node, x, &dimensions)?;
            self.made(node, index, value);
        }
        Ok(())
    }
}

/// Extent of `axis` after concatenation.
fn joined_extent(inputs: &[Known], axis: usize) -> Option<i64> {
    let mut extents = inputs.iter().map(|input| input.dimensions().get(axis).copied().unwrap_or(1));
    extents.try_fold(0i64, i64::checked_add)
}

/// `Expand`'s target, with the stated batch replaced by the mark.
fn with_own_batch(x: &Known, target: &[i64], batch: Option<i64>) -> Vec<i64> {
    let (own, mut target) = (x.dimensions(), target.to_vec());
    if let (Some((place, _)), Some(batch)) = (x.batch_and_sizes(), batch)
        && let Some(&counted) = own.get(place.axis)
        && let Some(extent) = (place.axis + target.len()).checked_sub(own.len()).and_then(|axis| target.get_mut(axis))
        && (counted / BATCH_MARK).checked_mul(batch) == Some(*extent)
    {
        *extent = counted;
    }
    target
}
