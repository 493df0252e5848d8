//! PyTorch's FSDP as Hugging Face's libraries configure it: the words of `fsdp`, and the settings
//! of `fsdp_config`, which Accelerate writes with a prefix.

use super::stated::Stated;
use super::{FrameworkError, Surroundings};
use foretell_program::{Layout, Offload, Recompute};
use serde_json::{Value, json};

/// Settings that change neither the time of a step nor its memory, or only the order of the same
/// operations.
const NEUTRAL: [&str; 14] = [
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "state_dict_type",
    "final_state_dict_type",
    "cpu_ram_efficient_loading",
    "xla*",
    "min_num_params",
    "backward_prefetch",
    "backward_prefetch_policy",
    "forward_prefetch",
    "limit_all_gathers",
    "sync_module_states",
    "use_orig_params",
    "ignored_modules",
];

/// How a job shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sharding {
    /// ZeRO's stage.
    pub(super) zero: usize,
    /// Whether shards stay within a node, so that each node has a copy.
    pub(super) is_hybrid: bool,
    /// Whether parameters and the optimizer's state are in host memory.
    pub(super) is_offloaded: bool,
}

impl Sharding {
    /// FSDP that frees parameters after the forward pass.
    pub(super) const FULL: Self = Self { zero: 3, is_hybrid: false, is_offloaded: false };

    /// Puts the sharding into a layout.
    pub(super) fn apply(self, layout: &mut Layout, devices_per_node: usize) -> Result<(), FrameworkError> {
        layout.zero = self.zero;
        if self.is_offloaded {
            put_offload(layout)?;
        }
        if self.is_hybrid && layout.data.is_multiple_of(devices_per_node) && layout.data > devices_per_node {
            layout.shard_group = Some(devices_per_node);
        }
        Ok(())
    }
}

/// Puts FSDP's offload to host memory into a layout.
fn put_offload(layout: &mut Layout) -> Result<(), FrameworkError> {
    if layout.zero == 3 && layout.offload.is_none() {
        layout.offload = Offload::State;
        return Ok(());
    }
    Err(FrameworkError::Form {
        reason: "FSDP's offload beside gradients alone that are sharded, or beside activations on the host: no plan has both"
            .into(),
        hint: "write `full_shard` (`reshard_after_forward: true`) without offloaded activations, or leave out the offload".into(),
    })
}

/// Reads a strategy by its name, or by its number in older files of Accelerate.
fn strategy(text: &str) -> Option<Sharding> {
    let (zero, is_hybrid) = match text.to_ascii_lowercase().as_str() {
        "full_shard" | "1" => (3, false),
        "shard_grad_op" | "2" => (2, false),
        "no_shard" | "3" => (0, false),
        "hybrid_shard" | "4" => (3, true),
        "hybrid_shard_zero2" | "5" => (2, true),
        _ => return None,
    };
    Some(Sharding { zero, is_hybrid, is_offloaded: false })
}

/// Reads a Trainer's `fsdp` and `fsdp_config`, which may name a file. Returns FSDP's version if one
/// is stated.
pub(super) fn read_trainer(
    stated: &mut Stated,
    surroundings: &Surroundings<'_>,
    layout: &mut Layout,
) -> Result<Option<usize>, FrameworkError> {
    let words = read_words(stated)?;
    let mut section = stated.section("fsdp_config");
    if let Some(path) = stated.text("fsdp_config")? {
        let Some(text) = (surroundings.file)(&path) else {
            return Err(FrameworkError::Form {
                reason: format!("`fsdp_config: {path}`: there is no such file beside this one"),
                hint: "put it there, or give its contents in its place".into(),
            });
        };
        section = Stated::parse(&text, "FSDP's settings as JSON")?;
    }
    let (account, in_section) = read_config(section, words, layout, surroundings.devices_per_node)?;
    stated.absorb(account);
    match (read_version(stated, "fsdp_version")?, in_section) {
        (Some(version), Some(other)) if version != other => Err(FrameworkError::Form {
            reason: format!("{} beside version {other} in `fsdp_config`", stated.written("fsdp_version")),
            hint: "keep one of them".into(),
        }),
        (version, in_section) => Ok(version.or(in_section)),
    }
}

/// Reads FSDP's version. PyTorch has two.
fn read_version(stated: &mut Stated, name: &str) -> Result<Option<usize>, FrameworkError> {
    let version = stated.size(name)?;
    if version.is_some_and(|version| version > 2) {
        return Err(stated.unknown(name, "versions of FSDP: 1, 2"));
    }
    Ok(version)
}

/// Reads the words of a Trainer's `fsdp`: a text, a list, or a switch. `None` if it is off.
fn read_words(stated: &mut Stated) -> Result<Option<Sharding>, FrameworkError> {
    let words: Vec<String> = match stated.take("fsdp") {
        None if is_implied(stated) => return Ok(Some(Sharding::FULL)),
        None | Some(Value::Bool(false)) => return Ok(None),
        Some(Value::Bool(true)) => return Ok(Some(Sharding::FULL)),
        Some(Value::String(text)) => text.split_whitespace().map(String::from).collect(),
        Some(Value::Array(list)) => {
            list.iter().map(|word| word.as_str().map_or_else(|| word.to_string(), String::from)).collect()
        }
        Some(_) => return Err(stated.wrong("fsdp", "a list of words")),
    };
    let mut found = None;
    let mut is_offloaded = false;
    for word in words {
        match (word.as_str(), strategy(&word)) {
            ("true", _) => found = Some(Sharding::FULL),
            ("auto_wrap" | "false", _) => {}
            (_, Some(sharding)) => found = Some(sharding),
            ("offload", None) => is_offloaded = true,
            _ => {
                return Err(stated.unknown(
                    "fsdp",
                    "words: full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2, no_shard, auto_wrap, offload",
                ));
            }
        }
    }
    Ok(found.or(is_offloaded.then_some(Sharding::FULL)).map(|found| Sharding { is_offloaded, ..found }))
}

/// Whether a file requests FSDP2 without the setting `fsdp`, as Axolotl's files may.
fn is_implied(stated: &Stated) -> bool {
    let names = ["fsdp_version", "fsdp_config.reshard_after_forward", "fsdp_config.auto_wrap_policy"];
    let older = ["fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_version"];
    names.iter().chain(&older).any(|name| stated.has(name))
}

/// Reads a section `fsdp_config`, including what is recomputed, and FSDP's version if it states
/// one. `words` is the value of `fsdp`, if the caller has one.
pub(super) fn read_config(
    mut section: Stated,
    words: Option<Sharding>,
    layout: &mut Layout,
    devices_per_node: usize,
) -> Result<(super::stated::Account, Option<usize>), FrameworkError> {
    for name in CONFIGURED {
        section.rename(&format!("fsdp_{name}"), name)?;
    }
    section.rename("cpu_offload", "offload_params")?;
    let is_offloaded = section.is_on("offload_params")?;
    section.refuse(&["activation_cpu_offload"], "write `activation_offloading` in its place")?;
    section.usual("mixed_precision_policy", &json!("bf16"));
    // A switch in FSDP2, and the name of a strategy in older files.
    let reshards = section.take("reshard_after_forward");
    let text = reshards.as_ref().map(|value| value.as_str().map_or_else(|| value.to_string(), String::from));
    let from_switch = match text.as_deref() {
        None => None,
        Some(text) if text.eq_ignore_ascii_case("true") => Some(Sharding::FULL),
        Some(text) if text.eq_ignore_ascii_case("false") => Some(Sharding { zero: 2, ..Sharding::FULL }),
        Some(text) => Some(strategy(text).ok_or_else(|| section.wrong("reshard_after_forward", "true or false"))?),
    };
    let named = section.take("sharding_strategy").map(|value| value.as_str().map_or_else(|| value.to_string(), String::from));
    let from_name = match named {
        None => None,
        Some(text) => Some(strategy(&text).ok_or_else(|| {
            section.unknown("sharding_strategy", "strategies: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD")
        })?),
    };
    let recomputes = section.is_on("activation_checkpointing")?;
    section.neutral(&NEUTRAL);
    let version = read_version(&mut section, "version")?;
    if let Some(words) = words {
        let sharding = match from_switch {
            Some(switch) if words.zero > 0 => Sharding { zero: switch.zero, ..words },
            _ => words,
        };
        let sharding = from_name.map_or(sharding, |named| Sharding { is_offloaded: sharding.is_offloaded, ..named });
        let is_offloaded = sharding.is_offloaded || (is_offloaded && sharding.zero > 0);
        Sharding { is_offloaded, ..sharding }.apply(layout, devices_per_node)?;
        if recomputes && layout.zero > 0 {
            layout.recompute = Recompute::Full;
        }
    }
    Ok((section.finish()?, version))
}

/// Settings whose names Accelerate begins with `fsdp_`.
const CONFIGURED: [&str; 19] = [
    "version",
    "reshard_after_forward",
    "sharding_strategy",
    "offload_params",
    "activation_checkpointing",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "state_dict_type",
    "final_state_dict_type",
    "cpu_ram_efficient_loading",
    "min_num_params",
    "backward_prefetch",
    "backward_prefetch_policy",
    "forward_prefetch",
    "sync_module_states",
    "use_orig_params",
    "cpu_offload",
    "limit_all_gathers",
    "mixed_precision_policy",
];
