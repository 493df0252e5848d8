//! torchtune's recipes: which one trains a plan, and the command that starts it.

use super::{FRAMEWORK, VERSION};
use crate::frameworks::{FrameworkError, Job};
use foretell_program::{Plan, Preference};

/// A recipe of torchtune.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recipe {
    name: &'static str,
    /// Whether `torchrun` starts the recipe. `tune run` refuses its flags for other recipes.
    is_distributed: bool,
}

impl Recipe {
    /// The recipe that trains a plan.
    pub(super) fn of(plan: &Plan, ranks: usize) -> Self {
        let has_adapters = plan.training.lora.is_some();
        let (name, is_distributed) = match (plan.workload.preference, has_adapters, ranks) {
            (None, true, 1) => ("lora_finetune_single_device", false),
            (None, true, _) => ("lora_finetune_distributed", true),
            (None, false, 1) => ("full_finetune_single_device", false),
            (None, false, _) => ("full_finetune_distributed", true),
            (Some(_), true, 1) => ("lora_dpo_single_device", false),
            (Some(_), true, _) => ("lora_dpo_distributed", true),
            // There is no recipe for one device, and this one accepts a single rank.
            (Some(_), false, _) => ("full_dpo_distributed", true),
        };
        Self { name, is_distributed }
    }

    /// The script that starts the recipe.
    pub(super) fn script(self, job: &Job<'_>) -> Result<String, FrameworkError> {
        let [nodes, per_node] = job.nodes()?;
        let Self { name, is_distributed } = self;
        let launch = match is_distributed {
            true => format!(
                "tune run --nnodes {nodes} --nproc_per_node {per_node} --rdzv_backend c10d \\\n  \
                 --rdzv_endpoint \"${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-29500}}\" \\\n  {name}"
            ),
            false => format!("tune run {name}"),
        };
        Ok(format!(
            "#!/bin/bash\n# {VERSION}, for {} on {nodes} nodes of {per_node} GPUs. Run it on each node with MASTER_ADDR set. The argument is the\n\
             # folder of the model's weights and tokenizer.\n\
             # Check `checkpointer` and `tokenizer` in torchtune.yaml first.\nset -e\n\
             here=$(dirname \"$(readlink -f \"$0\")\")\n\
             {launch} --config \"$here/torchtune.yaml\" model_dir=\"$1\" \"${{@:2}}\"\n",
            job.name
        ))
    }
}

/// Refuses preferences for which torchtune has no recipe.
pub(super) fn check(preference: Option<Preference>) -> Result<(), FrameworkError> {
    match preference {
        None | Some(Preference::Dpo) => Ok(()),
        Some(other) => Err(FrameworkError::Method {
            framework: FRAMEWORK,
            method: other.name(),
            reason: "its recipes train on preferences by `dpo` alone",
            hint: "export it `--to trl`, `axolotl` or `llama-factory`, or plan with `foretell plan --method dpo`",
        }),
    }
}
