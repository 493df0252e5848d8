//! The live tensors: the buffers that hold each tensor of each micro-batch, one for each placement
//! that it currently has.

use super::list::ListBuilder;
use super::stage::Stage;
use crate::placement::Placements;
use crate::program::{BufferId, BufferRole};
use foretell_models::TensorId;
use rustc_hash::FxHashMap;

/// Stands for a micro-batch in keys of tensors that are the same for all micro-batches.
pub(super) const ALL_MICRO_BATCHES: usize = usize::MAX;

/// A buffer that holds a tensor in some placements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    pub(super) placements: Placements,
    pub(super) buffer: BufferId,
}

/// The variants of each tensor, keyed by tensor and micro-batch. The oldest variant comes first.
#[derive(Default)]
pub(super) struct LiveTensors {
    variants: FxHashMap<(TensorId, usize), Vec<Variant>>,
}

impl LiveTensors {
    pub(super) fn contains(&self, tensor: TensorId, micro_batch: usize) -> bool {
        self.variants.contains_key(&(tensor, micro_batch))
    }

    /// The oldest variant.
    pub(super) fn first(&self, tensor: TensorId, micro_batch: usize) -> Option<Variant> {
        self.variants.get(&(tensor, micro_batch))?.first().copied()
    }

    /// The buffer that holds a tensor in these placements.
    pub(super) fn find(&self, tensor: TensorId, micro_batch: usize, placements: Placements) -> Option<BufferId> {
        let variants = self.variants.get(&(tensor, micro_batch))?;
        variants.iter().find(|variant| variant.placements == placements).map(|variant| variant.buffer)
    }

    pub(super) fn add(&mut self, tensor: TensorId, micro_batch: usize, variant: Variant) {
        self.variants.entry((tensor, micro_batch)).or_default().push(variant);
    }

    /// Drops one variant, whose buffer was overwritten.
    pub(super) fn remove(&mut self, tensor: TensorId, micro_batch: usize, buffer: BufferId) {
        if let Some(variants) = self.variants.get_mut(&(tensor, micro_batch)) {
            variants.retain(|variant| variant.buffer != buffer);
        }
    }

    /// Removes all variants of a tensor, and returns them.
    pub(super) fn take(&mut self, tensor: TensorId, micro_batch: usize) -> Option<Vec<Variant>> {
        self.variants.remove(&(tensor, micro_batch))
    }

    /// Replaces all variants of a tensor.
    pub(super) fn replace(&mut self, tensor: TensorId, micro_batch: usize, variants: Vec<Variant>) {
        self.variants.insert((tensor, micro_batch), variants);
    }

    /// Adds a buffer for a tensor of a micro-batch, as a variant in these placements.
    pub(super) fn new_variant(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        (tensor, micro_batch): (TensorId, usize),
        placements: Placements,
    ) -> BufferId {
        let data_type = stage.lowering.graph.tensor(tensor).storage.data_type(stage.plan.storage());
        let shape = placements.local_shape(&stage.lowering.shape(tensor), &stage.lowering.mesh);
        let buffer = list.add_buffer(stage.name(tensor), BufferRole::Activation, shape, data_type);
        self.add(tensor, micro_batch, Variant { placements, buffer });
        buffer
    }

    /// Drops all tensors of a micro-batch.
    pub(super) fn forget_micro_batch(&mut self, micro_batch: usize) {
        self.variants.retain(|&(_, of), _| of != micro_batch);
    }

    /// Drops the tensors shared by all micro-batches for which `is_dropped` returns `true`.
    pub(super) fn forget_shared(&mut self, is_dropped: impl Fn(TensorId) -> bool) {
        self.variants.retain(|&(tensor, micro_batch), _| micro_batch != ALL_MICRO_BATCHES || !is_dropped(tensor));
    }

    /// Drops all but the smallest variants of every tensor of a micro-batch. A gathered sequence,
    /// for example, is gathered again when the backward pass needs it.
    pub(super) fn forget_larger_variants(&mut self, list: &ListBuilder, micro_batch: usize) {
        for (_, variants) in self.variants.iter_mut().filter(|((_, of), _)| *of == micro_batch) {
            retain_smallest(list, variants);
        }
    }
}

/// Keeps only the variants with the fewest bytes.
pub(super) fn retain_smallest(list: &ListBuilder, variants: &mut Vec<Variant>) {
    let bytes = |variant: &Variant| list.buffer(variant.buffer).bytes;
    if let Some(least) = variants.iter().map(bytes).min() {
        variants.retain(|variant| bytes(variant) == least);
    }
}
