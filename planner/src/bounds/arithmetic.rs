//! The cheapest bound: a layout takes at least as long as its matrix products at the devices' best
//! rate. It excludes most layouts that leave devices idle.
//!
//! It counts the products of a step, and does not look at a layout's Program.

use super::bound::seconds;
use crate::space::{Request, inner_ranks, world_size};
use foretell_models::{Graph, Kernel, Pass, differentiate};
use foretell_program::Layout;
use foretell_units::Seconds;

/// The matrix products of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arithmetic {
    /// FLOPs of the products of one sample.
    all: f64,
    /// The part of `all` that runs in sequence: forward to the loss, and the gradients of inputs
    /// back to the first block.
    in_sequence: f64,
    /// FLOPs of the fastest device per picosecond; infinite if the rate of any device kind is
    /// unknown.
    rate: f64,
}

impl Arithmetic {
    /// Counts the products of a graph of one sample, on devices of these kinds of the topology.
    pub(super) fn new(request: &Request<'_>, graph: &Graph, kinds: &[usize]) -> Self {
        let (mut all, mut in_sequence) = (0.0, 0.0);
        for operator in &differentiate(graph, 1, |name| request.base.training.is_frozen(name)).operators {
            let kernel = operator.kernel(&operator.extents());
            if is_product(&kernel) {
                all += kernel.flops().value();
                in_sequence += if operator.pass == Pass::WeightGradient { 0.0 } else { kernel.flops().value() };
            }
        }
        let fastest = |&kind: &usize| request.costs.fastest_products(kind).map_or(f64::INFINITY, |rate| rate.value() * 1e-12);
        Self { all, in_sequence, rate: kinds.iter().map(fastest).fold(0.0, f64::max) }
    }

    /// Returns a lower bound on the step time of every layout on `devices` devices.
    pub(super) fn least_time_on(&self, devices: usize, global_batch: usize) -> Seconds {
        seconds(self.all * global_batch as f64 / devices.max(1) as f64 / self.rate)
    }

    /// Returns a lower bound on the step time of every layout with this mesh and micro-batch.
    ///
    /// The busiest rank does at least the average work of all ranks. And each micro-batch goes
    /// through all blocks and back, where only the ranks of one stage share the work.
    pub(super) fn least_time(&self, layout: &Layout, global_batch: usize) -> Seconds {
        let Self { all, in_sequence, rate } = self;
        let average = all * global_batch as f64 / world_size(layout) as f64;
        let has_one_mesh = layout.stages.is_none() && layout.shares.is_none();
        let micro_batch = layout.micro_batch as f64;
        let of_micro_batch = if has_one_mesh { in_sequence * micro_batch / inner_ranks(layout) as f64 } else { 0.0 };
        seconds(average.max(of_micro_batch) / rate)
    }
}

/// Returns `true` for kernels that run at the rate of plain matrix products.
fn is_product(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Matmul { .. } | Kernel::MatmulInputGradient { .. } | Kernel::MatmulWeightGradient { .. })
}

#[cfg(test)]
mod tests {
    use crate::bounds::Bounds;
    use crate::space::{Family, Request};
    use foretell_models::{DropoutRate, Gpt, Model};
    use foretell_program::{Layout, Plan};
    use foretell_simulator::CostModel;
    use foretell_topologies::Topology;
    use foretell_units::{Bytes, DataType, Seconds};

    #[test]
    fn large_products_take_most_of_the_bound_and_never_more() {
        let none = DropoutRate::NONE;
        let model = Model::Gpt(Gpt {
            layers: 8,
            hidden: 8192,
            heads: 64,
            ffn: None,
            vocab: 8192,
            sequence: 512,
            tied_embeddings: false,
            dropout: none,
            attention_dropout: none,
        });
        let topology = Topology::library("dgx-h100").expect("it is in the library");
        for precision in [DataType::Bf16, DataType::Fp32, DataType::Fp8] {
            let costs =
                CostModel::new(None, &topology).with_stack(&topology, "foretell", precision).expect("the library knows it");
            let base = Plan { precision, ..Plan::new(Layout::default(), 64) };
            let request = Request::new(&model, "model", &topology, &costs, &base);
            let mut bounds = Bounds::new(&request).expect("it is sound");
            bounds.memory_limit = Bytes::new(u64::MAX);
            // One rank; several ranks that divide all work; and pipelines with few micro-batches,
            // where the chain through all blocks counts.
            for (pipeline, data, tensor, micro_batch, share) in
                [(1, 1, 1, 8, 0.6), (1, 2, 4, 8, 0.5), (4, 1, 1, 8, 0.35), (4, 1, 1, 64, 0.4)]
            {
                let layout = Layout { pipeline, data, tensor, micro_batch, ..Layout::default() };
                let family = Family { layout, micro_batches: 64 / data / micro_batch };
                let bound = bounds.family(&family, None).expect("it divides the model").time.expect("memory is unlimited");
                let arithmetic = bounds.arithmetic_time(&family.layout);
                let is_near = (share..=1.0).contains(&(arithmetic / bound));
                assert!(is_near, "{precision} {pipeline} {data} {tensor}: {arithmetic} beside {bound}");
            }
        }
    }

    #[test]
    fn the_bound_is_zero_where_no_rate_of_products_is_known() {
        let topology = Topology::library("dgx-h100").expect("it is in the library");
        let (model, costs) = (Model::named("mlp").expect("in the zoo"), CostModel::new(None, &topology));
        let base = Plan::new(Layout::default(), 64);
        let request = Request::new(&model, "model", &topology, &costs, &base);
        let bounds = Bounds::new(&request).expect("it is sound");
        assert_eq!(bounds.arithmetic_time(&Layout::default()), Seconds::ZERO);
    }
}
