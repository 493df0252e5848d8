//! The layer of each aten operator.

use super::document::TracedOperator;
use super::names;
use super::translator::{Problem, Translator, problem};
use super::values::{Known, Sample, elements};
use crate::families::{NetworkOperation, NetworkWindow, NetworkWork};

impl Translator<'_> {
    /// The values that an operator makes, in order.
    ///
    /// # Errors
    /// The reason why the operator cannot be expressed.
    pub(super) fn translate(
        &mut self,
        operator: &TracedOperator,
        reads: &[Known],
        results: &[Sample],
    ) -> Result<Vec<Known>, Problem> {
        let layers = reads.iter().filter(|known| matches!(known, Known::Layer { .. })).count();
        let name = operator.short();
        let is_empty = results.first().is_none_or(|result| elements(&result.shape) == 0);
        if layers == 0 || is_empty || names::is_maker(name) {
            return Ok(results.iter().map(|result| Known::Constant { shape: result.shape.clone() }).collect());
        }
        // The operator has one result for each sample, so any of them stands for all samples.
        if operator.samples
            && let (Some(result), Some(Known::Layer { place, shared: false, .. })) = (results.first(), reads.first())
            && elements(self.shape_of(*place)) == elements(&result.shape)
        {
            let sample = Known::Layer { place: *place, shape: result.shape.clone(), shared: false, transposed: false };
            return Ok(vec![sample; results.len()]);
        }
        // Numbers without a dimension of samples are used as if they depended on nothing.
        let is_shared = reads.iter().all(|known| matches!(known, Known::Layer { shared: true, .. } | Known::Constant { .. }));
        if results.first().is_some_and(|result| result.shared) && !is_shared {
            self.notes.sum_over_samples(&operator.op);
            return Ok(results.iter().map(|result| Known::Constant { shape: result.shape.clone() }).collect());
        }
        // A cast of a parameter is what a run in another precision does anyway.
        if name == "_to_copy" && is_shared {
            return Ok(reads.iter().filter(|known| matches!(known, Known::Layer { .. })).take(1).cloned().collect());
        }
        if operator.view || matches!(name, "t" | "transpose" | "permute" | "view" | "_unsafe_view" | "detach" | "alias") {
            return self.views(operator, reads, results);
        }
        let of_parameters = reads.iter().filter(|known| matches!(known, Known::Layer { shared: true, .. }));
        if is_shared && let Some(Known::Layer { place, .. }) = of_parameters.max_by_key(|known| known.elements()) {
            self.notes.of_parameters();
            let alias =
                |result: &Sample| Known::Layer { place: *place, shape: result.shape.clone(), shared: true, transposed: false };
            return Ok(results.iter().map(alias).collect());
        }
        let Some((result, others)) = results.split_first() else { return Ok(Vec::new()) };
        let first = self.first(operator, reads, result)?;
        let mut made = vec![first];
        // Further results, such as the indices of maxima, are made by the layer of the first
        // result.
        for other in others {
            let Some(Known::Layer { place, shared, .. }) = made.first() else {
                made.push(Known::Constant { shape: other.shape.clone() });
                continue;
            };
            let (place, shared) = (*place, *shared);
            made.push(match elements(&other.shape) <= elements(self.shape_of(place)) && elements(&other.shape) > 0 {
                true => self.slice(operator, place, other, shared, ""),
                false => Known::Constant { shape: other.shape.clone() },
            });
        }
        Ok(made)
    }

    /// The first result of an operator that is not a view.
    fn first(&mut self, operator: &TracedOperator, reads: &[Known], result: &Sample) -> Result<Known, Problem> {
        let name = operator.short();
        let dtype = operator.results.first().map_or("f32", |value| value.dtype.as_str()).to_string();
        match name {
            "mm" | "bmm" | "addmm" | "baddbmm" | "linear" | "matmul" | "dot" | "mv" => {
                return self.product(operator, reads, result);
            }
            // The third operand has the number of rows of each expert.
            "_grouped_mm" | "grouped_mm" => return self.product(operator, reads.get(..2).unwrap_or(reads), result),
            "convolution" => return self.convolution(operator, reads, result),
            "_scaled_dot_product_flash_attention"
            | "_scaled_dot_product_efficient_attention"
            | "_scaled_dot_product_cudnn_attention" => {
                return self.attention(operator, reads, result);
            }
            "embedding" => return self.embedding(operator, reads, result, &dtype),
            "native_layer_norm" | "_fused_rms_norm" | "native_group_norm" | "native_batch_norm" | "_native_batch_norm_legit" => {
                return self.norm(operator, reads, result, &dtype);
            }
            "max_pool2d_with_indices" => {
                if let Some(pooled) = self.pool(operator, reads, result)? {
                    return Ok(pooled);
                }
            }
            _ => {}
        }
        let layers: Vec<&Known> = reads.iter().filter(|known| matches!(known, Known::Layer { .. })).collect();
        let kind = match names::work(name, layers.len()) {
            Some(kind) => kind,
            None => {
                self.notes.unknown(&operator.op, elements(&result.shape));
                if operator.flops > 0 {
                    return Err(Problem {
                        reason: format!("it has no mapping, and PyTorch counts {} FLOPs for it", operator.flops),
                        hint: "write it with products, convolutions or `scaled_dot_product_attention`",
                    });
                }
                NetworkWork::Function
            }
        };
        let mut places: Vec<usize> = layers.iter().filter_map(|known| place_of(known)).collect();
        if kind == NetworkWork::Move {
            // Samples that were split apart become one value again.
            places.dedup();
        }
        let operation = match (name, &places[..]) {
            ("relu", [_]) => Some(NetworkOperation::Relu),
            ("gelu", [_]) => Some(NetworkOperation::Gelu),
            _ => None,
        };
        if let Some(operation) = operation
            && let Some(known @ Known::Layer { shared: false, shape, .. }) = layers.first()
            && !shape.is_empty()
        {
            let shape = shape.clone();
            let read = self.shaped(known)?;
            let place = self.push(&self.title(operator), operation, vec![read], shape.clone(), false, "");
            return Ok(Known::Layer { place, shape, shared: false, transposed: false });
        }
        Ok(self.work(operator, kind, &places, result, &dtype))
    }

    /// Views: the same memory in other shapes, or parts of it.
    fn views(&mut self, operator: &TracedOperator, reads: &[Known], results: &[Sample]) -> Result<Vec<Known>, Problem> {
        let Some(Known::Layer { place, shape, shared, transposed }) = reads.first() else {
            return Ok(results.iter().map(|result| Known::Constant { shape: result.shape.clone() }).collect());
        };
        let (place, shared) = (*place, *shared);
        let exchanges = matches!(operator.short(), "t" | "transpose" | "permute" | "numpy_T" | "mT" | "adjoint");
        let view = |translator: &mut Self, (result, value): (&Sample, &super::document::TracedValue)| {
            let is_less = elements(&result.shape) < elements(shape);
            if is_less && !shared && elements(&result.shape) > 0 {
                return translator.slice(operator, place, result, shared, &value.dtype);
            }
            // Two transpositions cancel each other.
            let is_exchanged = exchanges && result.shape.len() == 2 && shape.len() == 2;
            let transposed = if is_exchanged { !transposed } else { *transposed };
            Known::Layer { place, shape: result.shape.clone(), shared, transposed }
        };
        Ok(results.iter().zip(&operator.results).map(|pair| view(self, pair)).collect())
    }

    /// Adds a view of a part.
    fn slice(&mut self, operator: &TracedOperator, place: usize, result: &Sample, shared: bool, dtype: &str) -> Known {
        let shape = if result.shape.is_empty() { vec![1] } else { result.shape.clone() };
        let place = self.push(&self.title(operator), NetworkOperation::Slice, vec![place], shape, shared, dtype);
        Known::Layer { place, shape: result.shape.clone(), shared, transposed: false }
    }

    fn embedding(&mut self, operator: &TracedOperator, reads: &[Known], result: &Sample, dtype: &str) -> Result<Known, Problem> {
        match reads {
            [Known::Layer { place: table, .. }, known @ Known::Layer { place: ids, shared: false, .. }]
                if self.is_parameter(*table) && self.is_integer(*ids) && self.shape_of(*table).len() == 2 =>
            {
                let (table, ids, rows) = (*table, *ids, self.shape_of(*table)[0]);
                self.look_up(ids, rows);
                let read = self.shaped(known)?;
                let place = self.push(
                    &self.title(operator),
                    NetworkOperation::Embedding,
                    vec![read, table],
                    result.shape.clone(),
                    false,
                    "",
                );
                Ok(Known::Layer { place, shape: result.shape.clone(), shared: false, transposed: false })
            }
            // Positions: every sample looks up the same rows.
            [table @ Known::Layer { place, shared: true, .. }, Known::Constant { .. }] => Ok(match table {
                Known::Layer { transposed, .. } => {
                    Known::Layer { place: *place, shape: result.shape.clone(), shared: true, transposed: *transposed }
                }
                Known::Constant { .. } => table.clone(),
            }),
            _ => {
                let places: Vec<usize> = reads.iter().filter_map(place_of).collect();
                Ok(self.work(operator, NetworkWork::Move, &places, result, dtype))
            }
        }
    }

    /// Norms over the last dimension, over an image's channels, or over other dimensions.
    fn norm(&mut self, operator: &TracedOperator, reads: &[Known], result: &Sample, dtype: &str) -> Result<Known, Problem> {
        let places: Vec<usize> = reads.iter().filter_map(place_of).collect();
        let x = reads.first().ok_or_else(|| problem("it reads nothing"))?;
        let last = x.shape().last().copied().unwrap_or(1);
        let own = |extent: usize, count: usize| {
            let parameters = &places[1..];
            parameters.len() == count
                && parameters.iter().all(|&place| self.is_parameter(place) && self.shape_of(place) == [extent])
        };
        let is_sample = matches!(x, Known::Layer { shared: false, .. }) && !x.shape().is_empty() && !places.is_empty();
        let operation = match operator.short() {
            "native_layer_norm" if is_sample && own(last, 2) => Some(NetworkOperation::LayerNorm),
            "_fused_rms_norm" if is_sample && own(last, 1) => Some(NetworkOperation::RmsNorm),
            "native_batch_norm" | "_native_batch_norm_legit" if is_sample && x.shape().len() == 3 && own(x.shape()[0], 2) => {
                Some(NetworkOperation::BatchNorm)
            }
            _ => None,
        };
        let Some(operation) = operation else {
            let mut reads = places;
            reads.truncate(crate::kernel::MOST_PLANNED_READS);
            return Ok(self.work(operator, NetworkWork::Norm, &reads, result, dtype));
        };
        let read = self.shaped(x)?;
        let shape = x.shape().to_vec();
        let reads = std::iter::once(read).chain(places[1..].iter().copied()).collect();
        let place = self.push(&self.title(operator), operation, reads, shape.clone(), false, "");
        Ok(Known::Layer { place, shape, shared: false, transposed: false })
    }

    /// Max-pooling over square windows. `None` for other poolings.
    fn pool(&mut self, operator: &TracedOperator, reads: &[Known], result: &Sample) -> Result<Option<Known>, Problem> {
        let Some(known @ Known::Layer { shape, shared: false, .. }) = reads.first() else { return Ok(None) };
        let one = |name: &str| operator.sizes(name).first().copied();
        let all = ["size", "stride", "padding", "dilation"].map(|name| operator.sizes(name));
        let is_square = all.iter().all(|sizes| sizes.windows(2).all(|pair| pair[0] == pair[1]));
        let Some(size) = one("size").filter(|&size| size > 0) else { return Ok(None) };
        let stride = one("stride").filter(|&stride| stride > 0).unwrap_or(size);
        let window = NetworkWindow { size, stride, padding: one("padding").unwrap_or(0) };
        let fits = match (&shape[..], &result.shape[..]) {
            (&[inputs, height, width], &[outputs, rows, columns]) => {
                inputs == outputs && [window.extent(height), window.extent(width)] == [Some(rows), Some(columns)]
            }
            _ => false,
        };
        if !fits || !is_square || one("dilation").unwrap_or(1) != 1 || window.padding >= size {
            return Ok(None);
        }
        let read = self.shaped(known)?;
        let place =
            self.push(&self.title(operator), NetworkOperation::MaxPool(window), vec![read], result.shape.clone(), false, "");
        Ok(Some(Known::Layer { place, shape: result.shape.clone(), shared: false, transposed: false }))
    }
}

fn place_of(known: &Known) -> Option<usize> {
    match known {
        Known::Layer { place, .. } => Some(*place),
        Known::Constant { .. } => None,
    }
}
