//! Accelerate's configuration that launches a Trainer's script: it states the layout, and the
//! script's arguments state everything else.

use super::super::hf_stack::VersionSource;
use super::super::stated::{Stated, object_of};
use super::super::{FrameworkError, ImportedPlan, Surroundings, accelerate};
use super::accelerate_launch::AccelerateLaunch;
use foretell_program::{ContextMethod, Layout, Plan, Recompute};
use foretell_units::DataType;
use serde_json::{Map, Value};

/// The plan that a launch's configuration states, and whether DeepSpeed shards it.
pub(super) struct Launched {
    imported: ImportedPlan,
    is_deepspeed: bool,
    is_fsdp: bool,
    /// FSDP's version, if the configuration states one.
    version: Option<usize>,
}

impl Launched {
    /// Where FSDP's version comes from.
    pub(super) fn version_source(&self) -> VersionSource {
        if self.version.is_some() { VersionSource::File } else { VersionSource::Launcher }
    }
}

/// Reads the launch's configuration. Its precision counts if the arguments state none.
pub(super) fn follow(
    launch: &AccelerateLaunch,
    stated: &mut Stated,
    surroundings: &Surroundings<'_>,
) -> Result<Launched, FrameworkError> {
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
    let text = launch.text(of_file);
    let settings = object_of(&text, "Accelerate's configuration")?;
    let kind = settings.get("distributed_type").and_then(Value::as_str).map(str::to_ascii_uppercase);
    let (is_deepspeed, is_fsdp) = (kind.as_deref() == Some("DEEPSPEED"), kind.as_deref() == Some("FSDP"));
    let version = settings.get("fsdp_config").and_then(version_in);
    let mut launched = accelerate::import(&text, surroundings)?;
    if !stated.has("bf16") && !stated.has("fp16") {
        match launched.plan.precision {
            DataType::Bf16 => stated.provide("bf16", Value::Bool(true)),
            DataType::Fp16 => stated.provide("fp16", Value::Bool(true)),
            // A Trainer has no argument for fp8.
            DataType::Fp8 => launched.unread.push("mixed_precision".into()),
            DataType::Fp32 | DataType::Tf32 => {}
            DataType::Fp64 | DataType::Int8 | DataType::Int32 => unreachable!("invariant: Accelerate has no such precision"),
        }
    }
    Ok(Launched { imported: launched, is_deepspeed, is_fsdp, version })
}

/// FSDP's version in a section `fsdp_config`, which has been read as sound.
fn version_in(config: &Value) -> Option<usize> {
    let value = ["fsdp_version", "version"].iter().find_map(|name| config.get(name))?;
    let number = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok())?;
    Some(number as usize)
}

/// Puts the launch's layout into the arguments' plan, which may state FSDP's version without
/// sharding anything. Returns whether DeepSpeed shards it.
pub(super) fn put(
    launched: Launched,
    stated: &mut Stated,
    plan: &mut Plan,
    version: Option<usize>,
) -> Result<bool, FrameworkError> {
    if plan.layout.zero > 0 {
        return Err(FrameworkError::Form {
            reason: "`fsdp` beside the launch's own sharding".into(),
            hint: "keep one of them".into(),
        });
    }
    let Launched { imported: launched, is_deepspeed, is_fsdp, version: of_launch } = launched;
    // `accelerate launch` takes the first version where a file states none.
    let launched_version = of_launch.unwrap_or(1);
    if let Some(version) = version.filter(|version| is_fsdp && *version != launched_version) {
        return Err(FrameworkError::Form {
            reason: format!("the arguments state version {version} of FSDP, and the launch has version {launched_version}"),
            hint: "write one version in both, as `fsdp_version` in the launch's `fsdp_config`".into(),
        });
    }
    let own = plan.layout.clone();
    let steps = plan.global_batch / own.micro_batch.saturating_mul(own.data).max(1);
    let (others, launched_others) = ([own.tensor, own.context], [launched.plan.layout.tensor, launched.plan.layout.context]);
    let mut layout = launched.plan.layout;
    if others != [1, 1] && others != launched_others {
        // The script shards sequences by heads itself.
        let is_by_heads = own.context_method == ContextMethod::AllToAll && others[0] == 1 && launched_others == [1, 1];
        if !is_by_heads || !layout.data.is_multiple_of(own.context) {
            return Err(FrameworkError::Form {
                reason: format!(
                    "the arguments say `tensor` {} and `context` {}, and the launch's configuration {} and {}",
                    others[0], others[1], launched_others[0], launched_others[1]
                ),
                hint: "write the sizes of parallelism in one of the two files".into(),
            });
        }
        layout.data /= own.context;
        (layout.context, layout.context_method) = (own.context, own.context_method);
    }
    let recompute = if layout.recompute == Recompute::Full { Recompute::Full } else { own.recompute };
    plan.stack = launched.plan.stack;
    plan.layout = Layout { micro_batch: own.micro_batch, recompute, ..layout };
    plan.global_batch = own.micro_batch.saturating_mul(steps).saturating_mul(plan.layout.data);
    if launched.states_bucket {
        stated.state_bucket();
    }
    stated.absorb_others(launched.unread, launched.without_effect);
    Ok(is_deepspeed)
}
