//! Accelerate's configuration as the launch of a Trainer's script states it: the layout is there,
//! and all else in the script's arguments.

use super::super::stated::{Stated, object_of};
use super::super::{FrameworkError, ImportedPlan, Surroundings, accelerate};
use super::accelerate_launch::AccelerateLaunch;
use foretell_program::{Layout, Plan, Recompute};
use foretell_units::DataType;
use serde_json::{Map, Value};

/// Reads the launch's configuration, and states its precision where the arguments state none.
pub(super) fn follow(
    launch: &AccelerateLaunch,
    stated: &mut Stated,
    surroundings: &Surroundings<'_>,
) -> Result<ImportedPlan, FrameworkError> {
    let mut of_file = Map::new();
    if let Some(file) = &launch.file {
        let Some(text) = (surroundings.file)(file) else {
            return Err(FrameworkError::Form {
                reason: format!(
                    "the layout of the launch is in `--config_file {file}`, and there is no such file beside this one"
                ),
                hint: "put it there, or leave `--config_file` out of the script to plan its arguments alone".into(),
            });
        };
        of_file = object_of(&text, "Accelerate's configuration, which `accelerate config` writes")?;
    }
    let launched = accelerate::import(&launch.text(of_file), surroundings)?;
    if !stated.has("bf16") && !stated.has("fp16") {
        match launched.plan.precision {
            DataType::Bf16 => stated.provide("bf16", Value::Bool(true)),
            DataType::Fp16 => stated.provide("fp16", Value::Bool(true)),
            _ => {}
        }
    }
    Ok(launched)
}

/// Puts the launch's layout into the plan of the arguments. Returns whether DeepSpeed shards it.
pub(super) fn put(launched: ImportedPlan, stated: &mut Stated, plan: &mut Plan) -> Result<bool, FrameworkError> {
    if plan.layout.zero > 0 {
        return Err(FrameworkError::Form {
            reason: "`fsdp` beside the launch's own sharding".into(),
            hint: "keep one of them".into(),
        });
    }
    let is_deepspeed = launched.plan.stack.name() == "hf-deepspeed";
    let own = plan.layout.clone();
    let steps = plan.global_batch / own.micro_batch.saturating_mul(own.data).max(1);
    let recompute = if launched.plan.layout.recompute == Recompute::Full { Recompute::Full } else { own.recompute };
    plan.layout = Layout { micro_batch: own.micro_batch, recompute, ..launched.plan.layout };
    plan.global_batch = own.micro_batch.saturating_mul(steps).saturating_mul(plan.layout.data);
    stated.absorb_others(launched.unread, launched.without_effect);
    Ok(is_deepspeed)
}
