//! DeepSpeed's configurations that Axolotl and LLaMA-Factory publish with their examples, as far as
//! they decide a plan. Jobs name these files, which are often not at hand.

use serde_json::{Value, json};

/// A published configuration.
struct Published {
    /// The end of its path.
    path: &'static str,
    /// The stage of ZeRO.
    stage: u8,
    /// What is kept in host memory.
    offload: Offloaded,
    /// Elements that are reduced together, if stated.
    bucket: Option<u64>,
}

/// What a configuration keeps in host memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Offloaded {
    Nothing,
    Optimizer,
    Parameters,
    All,
}

const fn published(path: &'static str, stage: u8, offload: Offloaded, bucket: Option<u64>) -> Published {
    Published { path, stage, offload, bucket }
}

/// LLaMA-Factory's bucket below stage 3.
const LARGE: Option<u64> = Some(500_000_000);

/// The configurations of Axolotl 0.19 and LLaMA-Factory 0.9.5.
const PUBLISHED: [Published; 12] = [
    published("deepspeed_configs/zero1.json", 1, Offloaded::Nothing, None),
    published("deepspeed_configs/zero1_torch_compile.json", 1, Offloaded::Nothing, None),
    published("deepspeed_configs/zero2.json", 2, Offloaded::Optimizer, None),
    published("deepspeed_configs/zero3.json", 3, Offloaded::Nothing, None),
    published("deepspeed_configs/zero3_bf16.json", 3, Offloaded::Nothing, None),
    published("deepspeed_configs/zero3_bf16_cpuoffload_all.json", 3, Offloaded::All, None),
    published("deepspeed_configs/zero3_bf16_cpuoffload_params.json", 3, Offloaded::Parameters, None),
    published("examples/deepspeed/ds_z0_config.json", 0, Offloaded::Nothing, LARGE),
    published("examples/deepspeed/ds_z2_config.json", 2, Offloaded::Nothing, LARGE),
    published("examples/deepspeed/ds_z2_offload_config.json", 2, Offloaded::Optimizer, LARGE),
    published("examples/deepspeed/ds_z3_config.json", 3, Offloaded::Nothing, None),
    published("examples/deepspeed/ds_z3_offload_config.json", 3, Offloaded::All, None),
];

/// A configuration of DeepSpeed with this ZeRO section, which leaves the rest to the Trainer.
pub(super) fn configuration(zero: Value) -> Value {
    json!({
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    })
}

/// The configuration that a path names, and a sentence about it.
pub(super) fn of_path(path: &str) -> Option<(Value, String)> {
    let found = PUBLISHED.iter().find(|published| {
        path == published.path || path.strip_suffix(published.path).is_some_and(|before| before.ends_with('/'))
    })?;
    let device = |is_host: bool| if is_host { "cpu" } else { "none" };
    let mut zero = json!({
        "stage": found.stage,
        "offload_optimizer": {"device": device(matches!(found.offload, Offloaded::Optimizer | Offloaded::All))},
        "offload_param": {"device": device(matches!(found.offload, Offloaded::Parameters | Offloaded::All))},
    });
    if let Some(bucket) = found.bucket {
        zero["reduce_bucket_size"] = json!(bucket);
    }
    let configuration = configuration(zero);
    let hosts = match found.offload {
        Offloaded::Nothing => "nothing",
        Offloaded::Optimizer => "the optimizer's state",
        Offloaded::Parameters => "the parameters",
        Offloaded::All => "parameters and the optimizer's state",
    };
    let sentence = format!(
        "`deepspeed: {path}` is taken as it is published (ZeRO {}, {hosts} in host memory): there is no such file beside this one",
        found.stage
    );
    Some((configuration, sentence))
}
