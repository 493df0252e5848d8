//! Bringing the operands of an operator into the placements in which it reads them: from the live
//! tensors, from the host, from the data set, by recomputation, or by conversion of another
//! variant.

use super::StageEmitter;
use super::convert::{Converter, Source};
use super::live::{ALL_MICRO_BATCHES, Variant};
use crate::placement::Placements;
use crate::program::{BufferId, BufferRole, Operation, Phase};
use foretell_models::{EXPERTS, InputKind, Role, TensorId};

impl StageEmitter<'_> {
    /// The buffer that holds a tensor in the placements `wanted`. If there is no such buffer, loads
    /// the tensor, copies it back from the host, recomputes it or converts another variant.
    pub(super) fn fetch(&mut self, tensor: TensorId, micro_batch: usize, wanted: Placements, phase: Phase) -> BufferId {
        let stage = self.stage;
        let description = stage.lowering.graph.tensor(tensor);
        let persistent = match description.role {
            Role::Parameter(_) => {
                let bucket = stage.state.bucket_of_parameter(&description.name);
                let gathered = bucket.and_then(|bucket| self.parameters.find(bucket, &description.name));
                gathered.or_else(|| self.persistent.find(&description.name))
            }
            Role::Running | Role::Constant(_) => self.persistent.find(&description.name),
            Role::Input(_)
            | Role::Activation
            | Role::OfParameter(_)
            | Role::ParameterGradient(_)
            | Role::Kept
            | Role::UnreadSum
            | Role::Sum => None,
        };
        if let Some(buffer) = persistent {
            let placements = stage.lowering.sharding.settled(tensor);
            if placements == wanted {
                return buffer;
            }
            return self.convert(tensor, micro_batch, Variant { placements, buffer }, wanted, phase).0;
        }
        if let Role::OfParameter(_) = description.role {
            return self.fetch_made_from_parameter(tensor, micro_batch, phase);
        }
        if let Role::Input(kind) = description.role
            && !self.live.contains(tensor, micro_batch)
        {
            self.load(tensor, kind, micro_batch);
        }
        self.offloaded.move_in(&mut self.list, stage, &mut self.live, (tensor, micro_batch));
        if !self.live.contains(tensor, micro_batch) {
            self.recompute(tensor, micro_batch);
        }
        if let Some(buffer) = self.live.find(tensor, micro_batch, wanted) {
            return buffer;
        }
        let Some(first) = self.live.first(tensor, micro_batch) else {
            unreachable!("a tensor is produced, loaded, received or recomputed before it is read")
        };
        let (buffer, source) = self.convert(tensor, micro_batch, first, wanted, phase);
        if source == Source::Overwritten {
            self.live.remove(tensor, micro_batch, first.buffer);
        }
        self.live.add(tensor, micro_batch, Variant { placements: wanted, buffer });
        buffer
    }

    /// The buffer of a tensor that is made from a parameter alone, made when first needed. All
    /// readers read it in the placements that its producer leaves.
    fn fetch_made_from_parameter(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase) -> BufferId {
        if !self.live.contains(tensor, ALL_MICRO_BATCHES)
            && let Some(producer) = self.stage.lowering.producers[tensor.0]
        {
            self.operator(producer, micro_batch, phase);
        }
        match self.live.first(tensor, ALL_MICRO_BATCHES) {
            Some(variant) => variant.buffer,
            None => unreachable!("its producer was just emitted"),
        }
    }

    /// Recomputes the block of a tensor, as far as its backward pass needs it.
    fn recompute(&mut self, tensor: TensorId, micro_batch: usize) {
        let stage = self.stage;
        let Some(producer) = stage.lowering.producers[tensor.0] else { return };
        for &id in stage.recomputation.of_block(stage.operator(producer).block) {
            let outputs = &stage.operator(id).outputs;
            let is_there = outputs
                .iter()
                .map(|output| output.tensor)
                .filter(|&output| stage.lowering.is_activation(output))
                .all(|tensor| self.live.contains(tensor, micro_batch) || self.offloaded.contains(tensor, micro_batch));
            if !is_there {
                self.operator(id, micro_batch, Phase::Recompute);
            }
        }
    }

    /// Loads the samples of a micro-batch.
    fn load(&mut self, tensor: TensorId, input: InputKind, micro_batch: usize) {
        let stage = self.stage;
        let placements = stage.lowering.sharding.settled(tensor);
        let buffer = self.live.new_variant(&mut self.list, stage, (tensor, micro_batch), placements);
        self.list.set_role(buffer, BufferRole::Input);
        let mesh = &stage.lowering.mesh;
        let samples = mesh.samples_at_once() / mesh.batch_parts();
        let order = stage.lowering.sharding.order_of_tensor(&stage.lowering.graph, tensor);
        let operation = Operation::Load { input, first_sample: stage.first_sample(micro_batch), samples, order };
        self.list.push(self.label(tensor, micro_batch, Phase::Forward), operation, &[], &[buffer]);
    }

    /// Reduces the partial sums that a producer left in a tensor, unless they may stay partial.
    pub(super) fn settle(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase) {
        let sharding = &self.stage.lowering.sharding;
        let (produced, settled) = (sharding.produced(tensor), sharding.settled(tensor));
        if produced != settled
            && let Some(variants) = self.live.take(tensor, micro_batch)
            && let Some(&first) = variants.first()
        {
            let (buffer, _) = self.convert(tensor, micro_batch, first, settled, phase);
            self.live.add(tensor, micro_batch, Variant { placements: settled, buffer });
        }
    }

    fn convert(
        &mut self,
        tensor: TensorId,
        micro_batch: usize,
        from: Variant,
        wanted: Placements,
        phase: Phase,
    ) -> (BufferId, Source) {
        let lowering = self.stage.lowering;
        let is_of_experts = lowering.graph.tensor(tensor).dimensions.iter().any(|dimension| dimension.name == EXPERTS);
        let label = self.label(tensor, micro_batch, phase);
        Converter { list: &mut self.list, mesh: &lowering.mesh, label, is_of_experts }.convert(from, wanted)
    }
}
