//! A rank's shard of a tensor, and the indices of its elements in the whole tensor.

use foretell_models::{SEQUENCE, Tensor, Zigzag, position_runs};
use foretell_program::{Coordinates, Placements, StageMesh};
use std::ops::Range;

/// The order of a whole tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ElementOrder {
    /// Row-major in the model's own dimensions.
    Own,
    /// The order of the public form, as in a file of weights.
    Public,
}

/// The elements of a tensor that a rank holds: a range of indices in every dimension, in row-major
/// order.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    /// The first index, by dimension.
    start: Vec<usize>,
    /// The number of indices, by dimension.
    local: Vec<usize>,
    /// The stride in the whole tensor, by dimension.
    strides: Vec<usize>,
    /// The dimensions in the order of the whole tensor, the slowest first.
    order: Vec<usize>,
    /// The dimension that runs over positions stored in a zigzag order, and that order.
    positions: Option<(usize, Zigzag)>,
}

/// Elements that are contiguous in the whole tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// Index of the first one in the whole tensor.
    pub(crate) whole: usize,
    /// Index of the first one in the shard.
    pub(crate) local: usize,
    /// The number of elements.
    pub(crate) count: usize,
    /// The distance between consecutive ones in the shard.
    pub(crate) stride: usize,
}

impl Shard {
    /// The shard of the rank at `coordinates`, of a whole tensor with its elements in `order`.
    pub(crate) fn new(
        tensor: &Tensor,
        placements: &Placements,
        mesh: &StageMesh,
        coordinates: Coordinates,
        order: ElementOrder,
    ) -> Self {
        let extents: Vec<usize> = tensor.dimensions.iter().map(|dimension| dimension.extent).collect();
        let order = match order {
            ElementOrder::Own => (0..extents.len()).collect(),
            ElementOrder::Public => tensor.public_order(),
        };
        let mut strides = vec![1; extents.len()];
        let mut stride = 1;
        for &dimension in order.iter().rev() {
            strides[dimension] = stride;
            stride *= extents[dimension];
        }
        let start = placements.local_start(&extents, mesh, coordinates);
        Self { start, local: placements.local_shape(&extents, mesh), strides, order, positions: None }
    }

    /// Returns the shard with its sequence dimension in `zigzag` order. Tensors without a sequence
    /// dimension of that many positions stay as they are.
    pub(crate) fn with_positions(mut self, tensor: &Tensor, zigzag: Option<Zigzag>) -> Self {
        let is_sequence = |order: &Zigzag| {
            tensor.dimensions.iter().position(|dimension| dimension.name == SEQUENCE && dimension.extent == order.positions())
        };
        self.positions = zigzag.and_then(|order| Some((is_sequence(&order)?, order)));
        self
    }

    /// Visits the elements with these indices in the shard, as lines.
    pub(crate) fn lines(&self, elements: Range<usize>, visit: &mut impl FnMut(Line)) {
        let mut blocks = Vec::new();
        split(elements, &self.local, &mut Vec::new(), &mut blocks);
        for block in &mut blocks {
            let mut start: Vec<usize> = self.start.iter().zip(&*block).map(|(start, block)| start + block.start).collect();
            let Some((dimension, order)) = self.positions else {
                self.lines_of_block(block, &start, visit);
                continue;
            };
            // Rows of consecutive positions are contiguous in the whole tensor.
            let rows = block[dimension].clone();
            let indices = start[dimension]..start[dimension] + rows.len();
            for run in position_runs(Some(order), indices) {
                block[dimension] = rows.start + run.start..rows.start + run.start + run.length;
                start[dimension] = run.position;
                self.lines_of_block(block, &start, visit);
            }
        }
    }

    /// Visits the elements of a block, line by line in the order of the whole tensor. `start` has
    /// the block's first index in the whole tensor, by dimension.
    fn lines_of_block(&self, block: &[Range<usize>], start: &[usize], visit: &mut impl FnMut(Line)) {
        let mut local_strides = vec![1; self.local.len()];
        for dimension in (1..self.local.len()).rev() {
            local_strides[dimension - 1] = local_strides[dimension] * self.local[dimension];
        }
        let first = |strides: &[usize], start: &dyn Fn(usize) -> usize| -> usize {
            (0..block.len()).map(|dimension| start(dimension) * strides[dimension]).sum()
        };
        let mut local = first(&local_strides, &|dimension| block[dimension].start);
        let mut whole = first(&self.strides, &|dimension| start[dimension]);
        // The fastest dimension forms the line. Slower dimensions lengthen it as long as it
        // continues both in the whole tensor and in the shard.
        let mut outer = self.order.as_slice();
        let (mut count, mut stride) = (1, 1);
        while let Some((&dimension, slower)) = outer.split_last() {
            let continues = count == 1 || local_strides[dimension] == count * stride;
            if self.strides[dimension] != count || !continues {
                break;
            }
            if count == 1 {
                stride = local_strides[dimension];
            }
            count *= block[dimension].len();
            outer = slower;
        }
        let mut position = vec![0; outer.len()];
        loop {
            visit(Line { whole, local, count, stride });
            let mut place = outer.len();
            loop {
                let Some(next) = place.checked_sub(1) else { return };
                place = next;
                let dimension = outer[place];
                position[place] += 1;
                local += local_strides[dimension];
                whole += self.strides[dimension];
                if position[place] < block[dimension].len() {
                    break;
                }
                local -= position[place] * local_strides[dimension];
                whole -= position[place] * self.strides[dimension];
                position[place] = 0;
            }
        }
    }
}

/// Splits a range of the elements of a row-major shape into blocks: a range of indices in every
/// dimension. `before` has the ranges of the slower dimensions.
fn split(elements: Range<usize>, shape: &[usize], before: &mut Vec<Range<usize>>, blocks: &mut Vec<Vec<Range<usize>>>) {
    if elements.is_empty() {
        return;
    }
    let Some((_, rest)) = shape.split_first() else {
        blocks.push(before.clone());
        return;
    };
    let row: usize = rest.iter().product();
    let first_whole = elements.start.div_ceil(row);
    let after_whole = elements.end / row;
    let mut part = |rows: Range<usize>, elements: Range<usize>, blocks: &mut Vec<Vec<Range<usize>>>| {
        before.push(rows);
        split(elements, rest, before, blocks);
        before.pop();
    };
    if first_whole > after_whole {
        // Both ends are inside one row.
        let start = after_whole * row;
        part(after_whole..after_whole + 1, elements.start - start..elements.end - start, blocks);
        return;
    }
    if elements.start < first_whole * row {
        let start = (first_whole - 1) * row;
        part(first_whole - 1..first_whole, elements.start - start..row, blocks);
    }
    if first_whole < after_whole {
        part(first_whole..after_whole, 0..row, blocks);
    }
    part(after_whole..after_whole + 1, 0..elements.end - after_whole * row, blocks);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lines_visit_each_element_once_at_its_place_in_the_whole(
            extents in proptest::collection::vec(1usize..9, 0..5),
            seed in any::<u64>(),
            cut in any::<bool>(),
        ) {
            let mut state = seed;
            let mut random = |below: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % below.max(1)
            };
            let mut order: Vec<usize> = (0..extents.len()).collect();
            for place in (1..order.len()).rev() {
                order.swap(place, random(place + 1));
            }
            let local: Vec<usize> = extents.iter().map(|&extent| if cut { 1 + random(extent) } else { extent }).collect();
            let start: Vec<usize> = extents.iter().zip(&local).map(|(extent, local)| random(extent - local + 1)).collect();
            let mut strides = vec![1; extents.len()];
            let mut stride = 1;
            for &dimension in order.iter().rev() {
                strides[dimension] = stride;
                stride *= extents[dimension];
            }
            // The first dimension may be one of positions.
            let ranks = 2 + random(2);
            let positions = extents.first().and_then(|&extent| Some((0, Zigzag::new(ranks, extent)?)));
            let position = |dimension: usize, index: usize| match positions {
                Some((0, zigzag)) if dimension == 0 => zigzag.position(index),
                _ => index,
            };
            let shard = Shard { start: start.clone(), local: local.clone(), strides: strides.clone(), order, positions };
            let elements: usize = shard.local.iter().product();
            let from = random(elements + 1);
            let until = from + random(elements - from + 1);
            let mut found = vec![None; elements];
            shard.lines(from..until, &mut |line| {
                for index in 0..line.count {
                    let place = &mut found[line.local + index * line.stride];
                    assert_eq!(*place, None, "an element is visited twice");
                    *place = Some(line.whole + index);
                }
            });
            for (number, place) in found.into_iter().enumerate() {
                let mut rest = number;
                let mut expected = 0;
                for dimension in (0..local.len()).rev() {
                    expected += position(dimension, start[dimension] + rest % local[dimension]) * strides[dimension];
                    rest /= local[dimension];
                }
                prop_assert_eq!(place, (from..until).contains(&number).then_some(expected));
            }
        }
    }
}
