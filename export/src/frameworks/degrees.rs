//! Parallelism over several axes in the words of Accelerate's `ParallelismConfig`, which the
//! Trainer and Axolotl have too. It knows that FSDP shards parameters, and not how.

use super::stated::Stated;
use super::{FrameworkError, Surroundings};
use foretell_program::{ContextMethod, Layout};

/// How a file names the sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// `parallelism_config_tp_size` or `tp_size`, in a section of their own.
    Accelerate,
    /// `tensor_parallel_size`, beside other settings.
    Axolotl,
}

/// The ranks that share the shards of a parameter, if there are copies of them.
pub(super) type Shards = Option<usize>;

/// Reads the sizes of the axes into a layout of `ranks`. Each size that is not stated is 1, but
/// that of shards, which has the remaining ranks.
pub(super) fn read(
    stated: &mut Stated,
    names: Names,
    surroundings: &Surroundings<'_>,
    layout: &mut Layout,
) -> Result<Shards, FrameworkError> {
    const SHARDS: &str = "dp_shard_size";
    let Surroundings { ranks, devices_per_node, device, .. } = *surroundings;
    let [tensor, context] = match names {
        Names::Accelerate => ["tp_size", "cp_size"],
        Names::Axolotl => ["tensor_parallel_size", "context_parallel_size"],
    };
    for name in [SHARDS, "dp_replicate_size", tensor, context, "sp_size", "cp_comm_strategy", "cp_backend", "sp_backend"] {
        stated.rename(&format!("parallelism_config_{name}"), name)?;
    }
    for name in ["sp_seq_length_is_variable", "sp_attn_implementation", "sp_seq_length"] {
        stated.rename(&format!("parallelism_config_{name}"), name)?;
    }
    stated.rename("sequence_parallel_degree", context)?;
    if let Some(size) = stated.size("sp_size")?.filter(|&size| size > 1) {
        return Err(FrameworkError::Form {
            reason: format!("`sp_size: {size}`: Ulysses' exchange of heads is not planned"),
            hint: format!("write `{context}: {size}` in its place, or leave it out of the file"),
        });
    }
    let replicas = stated.size("dp_replicate_size")?.unwrap_or(1);
    layout.tensor = stated.size(tensor)?.unwrap_or(1);
    layout.context = stated.size(context)?.unwrap_or(1);
    layout.context_method = match (names, stated.text("cp_comm_strategy")?.as_deref()) {
        _ if layout.context == 1 => ContextMethod::Gather,
        // Axolotl's attention is a ring.
        (Names::Axolotl, _) | (Names::Accelerate, Some("alltoall")) => ContextMethod::Ring,
        (Names::Accelerate, None | Some("allgather")) => ContextMethod::Gather,
        (Names::Accelerate, Some(_)) => return Err(stated.unknown("cp_comm_strategy", "strategies: allgather, alltoall")),
    };
    stated.neutral(&["cp_backend", "sp_*", "cp_handler*", "tp_handler*", "ring_attn_func", "heads_k_stride"]);
    let others = replicas.saturating_mul(layout.tensor).saturating_mul(layout.context);
    let stated_shards = stated.size(SHARDS)?;
    let shards = stated_shards.unwrap_or(ranks / others.max(1)).max(1);
    // Shards of parameters are FSDP's. Its own section, read later, may say another stage.
    if stated_shards.is_some_and(|shards| shards > 1) {
        layout.zero = 3;
    }
    let product = others.saturating_mul(shards);
    if product != ranks {
        return Err(FrameworkError::Form {
            reason: format!("the sizes of parallelism make {product} ranks, and the topology has {ranks} devices"),
            hint: match product.is_multiple_of(devices_per_node) && product > devices_per_node {
                true => format!("say `--topology {}x{devices_per_node}x{device}`", product / devices_per_node),
                false => format!("say `--topology {product}x{device}`"),
            },
        });
    }
    layout.data = replicas * shards;
    Ok(Some(shards).filter(|_| replicas > 1))
}

/// Puts the shards of a parameter into a layout whose stage of ZeRO is known.
pub(super) fn apply(shards: Shards, layout: &mut Layout) {
    match shards {
        Some(1) => layout.zero = 0,
        Some(shards) if layout.zero > 0 => layout.shard_group = Some(shards).filter(|&group| group != layout.data),
        _ => {}
    }
}
