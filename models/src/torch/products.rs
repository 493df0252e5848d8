//! Products, convolutions and attention.

use super::document::TracedOperator;
use super::translator::{Problem, Translator, problem};
use super::values::{Known, Sample};
use crate::families::{NetworkOperation, NetworkWindow, NetworkWork};

impl Translator<'_> {
    /// A product of two matrices, or a batch of them. With three operands, the first is a bias.
    pub(super) fn product(&mut self, operator: &TracedOperator, reads: &[Known], result: &Sample) -> Result<Known, Problem> {
        let (bias, [left, right]) = match reads {
            [left, right] => (None, [left, right]),
            // A matrix times itself.
            [both] => (None, [both, both]),
            [bias, left, right] => (Some(bias), [left, right]),
            _ => return Err(problem(format!("a product has {} operands", reads.len()))),
        };
        let product = match (left, right) {
            (Known::Layer { shared: false, shape, .. }, Known::Layer { place, shape: weight, transposed, .. })
                if self.is_parameter(*place) && is_matrix_of(self.shape_of(*place), weight, *transposed) && !shape.is_empty() =>
            {
                let (weight_place, transposed) = (*place, *transposed);
                let outputs = weight.last().copied().unwrap_or(1);
                let fits = weight.first() == shape.last();
                if !fits {
                    return Err(problem(format!("a result of shape {shape:?} and a weight {weight:?} have no product")));
                }
                let own = [&shape[..shape.len() - 1], &[outputs]].concat();
                let x = self.shaped(left)?;
                let operation = NetworkOperation::Product { transposed };
                let place = self.push(&self.title(operator), operation, vec![x, weight_place], own, false, "");
                Known::Layer { place, shape: result.shape.clone(), shared: false, transposed: false }
            }
            (Known::Layer { .. }, Known::Layer { .. }) => self.general_product(operator, [left, right], result)?,
            // One operand is a constant: a rotation, a mask, an average.
            (known @ Known::Layer { .. }, _) | (_, known @ Known::Layer { .. }) => {
                let place = self.shaped(known)?;
                self.work(operator, NetworkWork::Sum, &[place], result, "")
            }
            _ => Known::Constant { shape: result.shape.clone() },
        };
        match (bias, &product) {
            (Some(Known::Layer { place: bias, .. }), Known::Layer { place, shape, shared: false, .. })
                if self.is_parameter(*bias) && shape.last().is_some_and(|last| self.shape_of(*bias) == [*last]) =>
            {
                let name = format!("{}.bias", self.title(operator));
                let shape = shape.clone();
                let x = if self.shape_of(*place) == shape { *place } else { self.shaped(&product)? };
                let place = self.push(&name, NetworkOperation::Bias, vec![x, *bias], shape.clone(), false, "");
                Ok(Known::Layer { place, shape, shared: false, transposed: false })
            }
            (Some(Known::Layer { place: bias, .. }), Known::Layer { place, .. }) => {
                Ok(self.work(operator, NetworkWork::Sum, &[*place, *bias], result, ""))
            }
            _ => Ok(product),
        }
    }

    /// A product of two results, or of a parameter that is not used in its own shape.
    fn general_product(
        &mut self,
        operator: &TracedOperator,
        [left, right]: [&Known; 2],
        result: &Sample,
    ) -> Result<Known, Problem> {
        let (Known::Layer { place: one, .. }, Known::Layer { place: other, .. }) = (left, right) else {
            return Err(problem("a product of constants"));
        };
        let contracted = left.shape().last().copied().unwrap_or(1).max(1);
        if result.shared && !(self.is_shared(*one) && self.is_shared(*other)) {
            return Err(problem("it sums over the samples of the batch"));
        }
        let steps = super::values::elements(&result.shape).saturating_mul(contracted);
        Ok(self.product_of(operator, [*one, *other], steps, NetworkWork::MatrixProduct, result))
    }

    /// Adds a product or a convolution whose cost follows from its multiply-adds.
    fn product_of(
        &mut self,
        operator: &TracedOperator,
        reads: [usize; 2],
        steps: usize,
        kind: NetworkWork,
        result: &Sample,
    ) -> Known {
        let shared = reads.iter().all(|&read| self.is_shared(read));
        let shape = if result.shape.is_empty() { vec![1] } else { result.shape.clone() };
        let operation = NetworkOperation::Work { kind, steps: steps.max(1) };
        let place = self.push(&self.title(operator), operation, reads.to_vec(), shape, shared, "");
        Known::Layer { place, shape: result.shape.clone(), shared, transposed: false }
    }

    /// A convolution of any number of dimensions.
    pub(super) fn convolution(&mut self, operator: &TracedOperator, reads: &[Known], result: &Sample) -> Result<Known, Problem> {
        let [x, weight, bias @ ..] = reads else { return Err(problem("a convolution has no weight")) };
        let (Known::Layer { shape: image, .. }, Known::Layer { place: weight_place, shape: kernel, .. }) = (x, weight) else {
            return Err(problem("an operand depends on no parameter and no input"));
        };
        let [first, second, window @ ..] = &kernel[..] else { return Err(problem("its weight has no window")) };
        let groups = operator.sizes("groups").first().copied().unwrap_or(1).max(1);
        let transposed = operator.switch("transposed");
        let [stride, padding, dilation] = ["stride", "padding", "dilation"].map(|name| operator.sizes(name));
        let same = |sizes: &[usize]| sizes.first().copied().filter(|first| sizes.iter().all(|size| size == first));
        let square = match (window, &image[..], &result.shape[..]) {
            (&[rows, columns], &[_, _, _], &[channels, _, _])
                if rows == columns && groups == 1 && !transposed && same(&dilation) == Some(1) && channels == *first =>
            {
                same(&stride).filter(|&stride| stride > 0).zip(same(&padding)).map(|(stride, padding)| NetworkWindow {
                    size: rows,
                    stride,
                    padding,
                })
            }
            _ => None,
        };
        let fits = |window: &NetworkWindow| {
            let extents = [1, 2].map(|axis| window.extent(image[axis]));
            extents == [Some(result.shape[1]), Some(result.shape[2])] && image[0] == *second
        };
        let own = self.is_parameter(*weight_place) && self.shape_of(*weight_place) == kernel;
        let made = match square.filter(|window| own && fits(window)) {
            Some(window) => {
                let x = self.shaped(x)?;
                let name = self.title(operator);
                let shape = result.shape.clone();
                let place =
                    self.push(&name, NetworkOperation::Convolution(window), vec![x, *weight_place], shape.clone(), false, "");
                Known::Layer { place, shape, shared: false, transposed: false }
            }
            None => {
                let window: usize = super::values::elements(window);
                let (positions, inner) = match transposed {
                    // Each element of the input is multiplied with the window of every output
                    // channel of its group.
                    true => (super::values::elements(image), second.saturating_mul(window)),
                    false => (super::values::elements(&result.shape), second.saturating_mul(window)),
                };
                let x = self.shaped(x)?;
                let weight = *weight_place;
                self.product_of(operator, [x, weight], positions.saturating_mul(inner), NetworkWork::Convolution, result)
            }
        };
        match (bias, &made) {
            ([Known::Layer { place: bias, .. }, ..], Known::Layer { place, .. }) => {
                Ok(self.work(operator, NetworkWork::Sum, &[*place, *bias], result, ""))
            }
            _ => Ok(made),
        }
    }

    /// Attention that is a single operator.
    pub(super) fn attention(&mut self, operator: &TracedOperator, reads: &[Known], result: &Sample) -> Result<Known, Problem> {
        let [q, k, v, ..] = reads else {
            return Err(problem("attention has fewer than three operands that differ"));
        };
        if reads.len() > 3 {
            self.notes.masks();
        }
        let place = [self.shaped(q)?, self.shaped(k)?, self.shaped(v)?];
        let ([heads, queries, _], [_, _, features]) = (three(q.shape())?, three(v.shape())?);
        three(k.shape())?;
        let operation = NetworkOperation::Attention { causal: operator.switch("causal") };
        let own = vec![heads, queries, features];
        if own != result.shape || place.iter().any(|&place| self.is_shared(place)) {
            return Err(problem(format!("attention of {:?} over {:?} has the shape {:?}", q.shape(), k.shape(), result.shape)));
        }
        let place = self.push(&self.title(operator), operation, place.to_vec(), own, false, "");
        Ok(Known::Layer { place, shape: result.shape.clone(), shared: false, transposed: false })
    }
}

/// Whether a parameter has the shape of the matrix that an operator reads.
fn is_matrix_of(own: &[usize], seen: &[usize], transposed: bool) -> bool {
    match (own, seen) {
        (&[rows, columns], &[first, second]) => [rows, columns] == if transposed { [second, first] } else { [first, second] },
        _ => false,
    }
}

fn three(shape: &[usize]) -> Result<[usize; 3], Problem> {
    shape.try_into().map_err(|_| problem(format!("attention reads {shape:?}, which are not heads, positions and features")))
}
