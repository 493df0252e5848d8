//! The software stack that a search assumes if `--stack` names none. It knows models and clusters,
//! and no layout.

use foretell_models::Model;
use foretell_topologies::{Architecture, Topology};

/// What is known of a job's trainer if none is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trainer {
    /// Foretell's executor: it trains next, or only it can do what is asked.
    Ours,
    /// A framework that many people use, if the cluster is one that frameworks train on.
    Framework,
}

impl Trainer {
    /// Name of the software stack that usually trains such a model on such a cluster.
    ///
    /// Clusters of one kind of GPU get `megatron-core` for transformers and `ddp` for other models,
    /// (`hf-trainer` where a trained model is trained further), those of one kind of TPU
    /// `maxtext-tpu` for transformers. All other jobs get Foretell's own executor: frameworks give
    /// every rank the same work, and on `local-gpus` and CPUs Foretell itself trains.
    pub fn usual_stack(self, model: &Model, topology: &Topology, is_here: bool, is_fine_tuning: bool) -> &'static str {
        let groups = topology.node_groups();
        let kind = groups[0].kind;
        if self == Self::Ours || is_here || groups.iter().any(|group| group.kind != kind) {
            return "foretell";
        }
        match (topology.device_kinds()[kind].architecture, model.is_transformer()) {
            (Architecture::Gpu, true) if is_fine_tuning => "hf-trainer",
            (Architecture::Gpu, true) => "megatron-core",
            (Architecture::Gpu, false) => "ddp",
            (Architecture::Tpu, true) => "maxtext-tpu",
            _ => "foretell",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_of_one_kind_get_a_framework_and_all_else_our_executor() {
        let [gpt, resnet] = ["gpt2", "resnet50"].map(|name| Model::named(name).expect("it is in the zoo"));
        let [gpus, tpus, lab] =
            ["dgx-a100-80g", "tpu-v5p", "lab-4x1g-200m"].map(|name| Topology::library(name).expect("it is in the library"));
        let usual = |trainer: Trainer, model, topology| trainer.usual_stack(model, topology, false, false);
        assert_eq!(usual(Trainer::Framework, &gpt, &gpus), "megatron-core");
        assert_eq!(usual(Trainer::Framework, &resnet, &gpus), "ddp");
        assert_eq!(usual(Trainer::Framework, &gpt, &tpus), "maxtext-tpu");
        assert_eq!(usual(Trainer::Framework, &resnet, &tpus), "foretell");
        assert_eq!(usual(Trainer::Framework, &gpt, &lab), "foretell");
        assert_eq!(usual(Trainer::Ours, &gpt, &gpus), "foretell");
        assert_eq!(Trainer::Framework.usual_stack(&gpt, &gpus, false, true), "hf-trainer");
        assert_eq!(Trainer::Ours.usual_stack(&gpt, &gpus, false, true), "foretell");
        assert_eq!(Trainer::Framework.usual_stack(&gpt, &gpus, true, false), "foretell");
        let node = |kind: &str| format!("  - {{count: 1, devices: {{kind: {kind}, count: 4}}, link: nvswitch-150GB/s}}\n");
        let mixed = format!("name: mixed\nnodes:\n{}{}", node("a100-sxm-80g"), node("h100-sxm-80g"));
        let mixed = Topology::from_yaml(&mixed, "mixed.yaml").expect("it is well formed");
        assert_eq!(usual(Trainer::Framework, &gpt, &mixed), "foretell");
    }
}
