//! Reads the sizes of several parallel axes, by the names of Accelerate's `ParallelismConfig`,
//! which the Trainer and Axolotl also have. It knows that FSDP shards parameters, and not how.

use super::stated::Stated;
use super::{FrameworkError, Surroundings};
use foretell_program::{ContextMethod, Layout};

/// How a file names the sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// `parallelism_config_tp_size` or, in a section of their own, `tp_size`.
    Accelerate,
    /// `tensor_parallel_size`, beside other settings.
    Axolotl,
}

/// The number of ranks over which a parameter is sharded, if several copies exist.
pub(super) type Shards = Option<usize>;

/// Reads the sizes of the axes into a layout of `ranks`. A missing size is 1, except that of
/// shards, which is the remaining ranks.
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
    let heads = read_heads(stated)?;
    let replicas = stated.size("dp_replicate_size")?.unwrap_or(1);
    layout.tensor = stated.size(tensor)?.unwrap_or(1);
    layout.context = stated.size(context)?.unwrap_or(1);
    if let Some((size, method)) = heads {
        if layout.context > 1 {
            return Err(FrameworkError::Form {
                reason: format!("two axes shard a sequence: {} and {}", stated.written(context), stated.written("sp_size")),
                hint: "keep one of them: a plan has one axis `context`".into(),
            });
        }
        (layout.context, layout.context_method) = (size, method);
    }
    layout.context_method = match (names, stated.text("cp_comm_strategy")?.as_deref()) {
        _ if layout.context == 1 => ContextMethod::Gather,
        _ if heads.is_some() => layout.context_method,
        // Axolotl's context parallelism is ring attention.
        (Names::Axolotl, _) | (Names::Accelerate, Some("alltoall")) => ContextMethod::Ring,
        (Names::Accelerate, None | Some("allgather")) => ContextMethod::Gather,
        (Names::Accelerate, Some(_)) => return Err(stated.unknown("cp_comm_strategy", "strategies: allgather, alltoall")),
    };
    stated.neutral(&["cp_backend", "sp_*", "cp_handler*", "tp_handler*", "ring_attn_func", "heads_k_stride"]);
    stated.neutral(&["sequence_parallel_mode", "ring_head_stride"]);
    let others = replicas.saturating_mul(layout.tensor).saturating_mul(layout.context);
    let stated_shards = stated.size(SHARDS)?;
    let shards = stated_shards.unwrap_or(ranks / others.max(1)).max(1);
    // Sharded parameters mean FSDP, except with Accelerate's `sp_size`, which only DeepSpeed has.
    // DeepSpeed's or FSDP's own section, read later, may state another stage.
    let is_of_deepspeed = heads.is_some() && names == Names::Accelerate;
    if stated_shards.is_some_and(|shards| shards > 1) && !is_of_deepspeed {
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

/// Names of the number of ranks that exchange parts of a sequence for heads (Ulysses):
/// Accelerate's, and those of scripts.
const OF_HEADS: [&str; 4] = ["sequence_parallel_size", "ulysses_sequence_parallel_size", "ulysses_parallel_size", "ulysses_size"];

/// Reads how many ranks share a sequence, by names other than those of ring attention, and their
/// method. `None` for one rank.
fn read_heads(stated: &mut Stated) -> Result<Option<(usize, ContextMethod)>, FrameworkError> {
    for name in OF_HEADS {
        stated.rename(name, "sp_size")?;
    }
    let method = match stated.text("sequence_parallel_mode")?.as_deref() {
        // Forks of LLaMA-Factory have both methods.
        None | Some("ulysses") => ContextMethod::AllToAll,
        Some("zigzag-ring" | "ring") => ContextMethod::Ring,
        Some(_) => return Err(stated.unknown("sequence_parallel_mode", "modes: ulysses, zigzag-ring")),
    };
    if let Some(backend) = stated.text("sp_backend")?.filter(|backend| backend != "deepspeed") {
        return Err(FrameworkError::Form {
            reason: format!("`sp_backend: {backend}`: of the ways to shard a sequence by heads, DeepSpeed's is planned"),
            hint: "write `sp_backend: deepspeed`, or `cp_size` in place of `sp_size` for attention that gathers".into(),
        });
    }
    let is_left_open = stated.is_on("sp_seq_length_is_variable")?;
    let size = stated.size("sp_size")?.filter(|&size| size > 1);
    if size.is_some() && is_left_open {
        stated.assume("`sp_seq_length_is_variable`: every sample is planned as long as `--sequence` says");
    }
    Ok(size.map(|size| (size, method)))
}

/// Puts the ranks of a parameter's shards into a layout whose stage of ZeRO is known.
pub(super) fn apply(shards: Shards, layout: &mut Layout) {
    match shards {
        Some(1) => layout.zero = 0,
        Some(shards) if layout.zero > 0 => layout.shard_group = Some(shards).filter(|&group| group != layout.data),
        _ => {}
    }
}
