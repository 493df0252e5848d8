//! What a rank holds and does around the parts of a table, whatever shards its parameters.

use super::{Emitter, ParameterOf, RankEvent};

/// The state of a rank. [`super::TracedJob::emit`] calls these in the order of a training step.
pub(super) trait RankState {
    /// A micro-batch begins.
    fn before_forward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>);

    /// The forward pass of a micro-batch has ended.
    fn before_backward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>);

    /// A layer's pass begins.
    fn begin_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, layer: usize, backward: bool);

    /// A layer's pass ends.
    fn end_layer<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, layer: usize, backward: bool);

    /// Allocation `id` is now the complete gradient of a parameter.
    fn gradient<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>, parameter: ParameterOf, id: u64);

    /// The backward pass of a micro-batch has ended.
    fn after_backward<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>);

    /// Updates parameters after the last micro-batch, and drops gradients.
    fn update<'a, V: FnMut(RankEvent<'a>)>(&mut self, emitter: &mut Emitter<'a, V>);
}
