//! Time of collectives under a software stack.

use super::category::Category;
use super::costs::GpuCosts;
use super::nccl::NodeSpread;
use super::workload::TrainedParameters;
use foretell_program::{Collective, CollectiveAlgorithm, CollectiveRole};
use foretell_units::Seconds;

impl GpuCosts<'_> {
    /// Returns the host time to launch a collective or a message.
    pub fn communication_launch(&self) -> Seconds {
        self.stack.host.host_launch * self.stack.launches(Category::Communication)
    }

    /// Returns the bytes that a collective sends over those in the Program. The Program's gradients
    /// are in single precision, and its parameters have the precision of activations.
    pub fn network_share(&self, kind: Collective, role: CollectiveRole) -> f64 {
        let communication = &self.stack.communication;
        let is_needless = match self.workload.trained {
            TrainedParameters::All => false,
            TrainedParameters::Adapters { beside_shards: true } => role == CollectiveRole::Gradients,
            // With adapters, only the small updated parameters would need to be gathered.
            TrainedParameters::Adapters { .. } => matches!(role, CollectiveRole::Gradients | CollectiveRole::Parameters),
        };
        match role {
            _ if is_needless => 0.0,
            CollectiveRole::Gradients if self.workload.has_no_master_copy => communication.gradient_bytes.min(2.0) / 4.0,
            CollectiveRole::Gradients => communication.gradient_bytes / 4.0,
            CollectiveRole::Parameters if communication.narrow_gather && self.format.is_cast() => 0.5,
            // The gathered tensor is the operand of a sequence-parallel product.
            CollectiveRole::Tensor if kind == Collective::AllGather && communication.narrow_operands && self.format.is_cast() => {
                self.format.bytes() / 2.0
            }
            CollectiveRole::Tensor | CollectiveRole::Parameters | CollectiveRole::Context | CollectiveRole::Expert => 1.0,
        }
    }

    /// Returns the bytes that a collective sends over those in the Program, for the group's member
    /// that receives the most.
    pub fn fullest_network_share(&self, kind: Collective, role: CollectiveRole, members: usize) -> f64 {
        let is_of_tokens = kind == Collective::AllToAll && role == CollectiveRole::Expert;
        let received = if is_of_tokens { self.workload.rows_over_slots_of(members) } else { 1.0 };
        self.network_share(kind, role) * received
    }

    /// Returns the time of a collective of `bytes` bytes in the Program.
    pub fn collective_time(
        &self,
        kind: Collective,
        role: CollectiveRole,
        group: &NodeSpread,
        bytes: f64,
        algorithm: CollectiveAlgorithm,
    ) -> Seconds {
        let share = self.fullest_network_share(kind, role, group.members);
        if share == 0.0 {
            return Seconds::ZERO;
        }
        let bytes = bytes * share;
        let communication = &self.stack.communication;
        match kind {
            Collective::AllToAll => {
                let copies = if communication.once_per_node { self.workload.experts_per_token } else { 1 };
                let nodes = self.workload.nodes_per_token;
                let factor = communication.communication * communication.expert_all_to_all;
                group.expert_all_to_all(bytes, (copies, nodes), self.cluster) * factor
            }
            kind => {
                let (time, _) = group.choose(kind, bytes, algorithm, self.cluster);
                time * communication.communication + self.wait_for_slowest(role, group)
            }
        }
    }

    /// Returns how long the ranks of a collective wait for the slowest of them.
    fn wait_for_slowest(&self, role: CollectiveRole, group: &NodeSpread) -> Seconds {
        match role {
            CollectiveRole::Tensor => self.stack.communication.tensor_wait * (group.members as f64).log2(),
            CollectiveRole::Context | CollectiveRole::Expert | CollectiveRole::Gradients | CollectiveRole::Parameters => {
                Seconds::ZERO
            }
        }
    }
}
