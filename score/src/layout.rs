//! The layout of a row's run, from columns that use Megatron's conventions.

use crate::names::has_word;
use crate::refusal::Refusal;
use crate::row::Row;
use foretell_models::{Bert, Gpt, Llama, Model, Moe};
use foretell_program::{Layout, Offload, Recompute, Schedule};
use foretell_simulator::gpu::StackProfile;

/// Returns the layout of a row's run on `devices` devices. Adds a sentence to `assumptions` for
/// each choice that the row does not state.
///
/// # Errors
/// [`Refusal`] if sizes contradict each other or the batch is not stated.
pub(crate) fn layout(row: &Row, stack: &StackProfile, devices: usize, assumptions: &mut Vec<String>) -> Result<Layout, Refusal> {
    let size = |column| row.count(column).unwrap_or(1);
    let (tensor, pipeline) = (size("tp"), size("pp"));
    let mut context = size("cp");
    let is_stated = ["dp", "tp", "pp", "cp"].iter().any(|column| row.count(column).is_some());
    if let (false, Some(batch)) = (is_stated, row.count("gbs"))
        && devices > batch
        && devices.is_multiple_of(batch)
    {
        assumptions.push(format!("each sequence is assumed to be sharded over {} devices", devices / batch));
        context = devices / batch;
    }
    let replica = tensor * pipeline * context;
    let data = match row.count("dp") {
        Some(data) => data,
        None if devices.is_multiple_of(replica) => devices / replica,
        None => return Err(Refusal(format!("{devices} devices are not a multiple of tp x pp x cp = {replica}"))),
    };
    if data * replica != devices {
        return Err(Refusal(format!("dp {data} x tp {tensor} x pp {pipeline} x cp {context} is not {devices} devices")));
    }
    let (expert, expert_tensor) = expert_sizes(row, stack, data, tensor, assumptions)?;
    let virtual_stages = if pipeline > 1 { size("vpp") } else { 1 };
    // Megatron's lineage can interleave, so a missing value tells less there than elsewhere.
    if pipeline > 1 && row.count("vpp").is_none() && stack.defaults.sequence_parallel {
        assumptions.push("virtual stages are not stated; assumed 1, the default of Megatron's lineage".into());
    }
    let zero = match row.zero.chars().next() {
        // In a pipeline, FSDP2 keeps gathered parameters and reduces gradients after the last
        // micro-batch only (PyTorch's `PipelineStage`). It communicates what ZeRO 1 does.
        Some('3') if pipeline > 1 => 1,
        Some(digit @ '0'..='3') if data * context > 1 || digit == '3' => digit as usize - '0' as usize,
        None | Some('0'..='3') => 0,
        Some(_) => {
            assumptions.push(format!("sharding `{}` is not known; assumed that nothing is sharded", row.zero));
            0
        }
    };
    let recompute = match row.recompute.to_lowercase() {
        text if text.starts_with("full") => Recompute::Full,
        text if text.starts_with("selective") => stack.defaults.selective.clone(),
        text if text.starts_with("none") => Recompute::None,
        text if text.is_empty() || text == "unknown" => stack.defaults.recompute.clone(),
        text => {
            assumptions.push(format!("recomputation `{text}` is not known; assumed the stack's usual one"));
            stack.defaults.recompute.clone()
        }
    };
    let sequence_parallel = tensor > 1 && row.number("sp").map_or(stack.defaults.sequence_parallel, |value| value != 0.0);
    let micro_batch = match (row.count("mbs"), row.count("gbs"), row.count("ga")) {
        (Some(size), _, _) => size,
        // Megatron's lineage uses micro-batches of one sequence by default.
        (None, Some(batch), None) if stack.defaults.sequence_parallel && batch.is_multiple_of(data) && batch > data => {
            assumptions.push("the micro-batch is not stated; assumed 1, as Megatron's examples have it".into());
            1
        }
        (None, Some(batch), steps) if batch.is_multiple_of(data * steps.unwrap_or(1)) => {
            if steps.is_none() {
                assumptions
                    .push("the micro-batch is not stated; assumed a rank's whole batch, the default of its framework".into());
            }
            batch / data / steps.unwrap_or(1)
        }
        (None, Some(batch), Some(_)) if batch.is_multiple_of(data) => batch / data,
        _ => return Err(Refusal("neither a micro-batch nor a global batch divisible by dp is stated".into())),
    };
    Ok(Layout {
        data: data / expert,
        tensor,
        pipeline,
        context,
        expert,
        expert_tensor,
        sequence_parallel,
        virtual_stages,
        schedule: if virtual_stages > 1 { Schedule::Interleaved } else { Schedule::OneForwardOneBackward },
        zero,
        recompute,
        micro_batch,
        offload: offload(row)?,
        bucket: stack.defaults.bucket,
        ..Layout::default()
    })
}

/// Returns what the row keeps in host memory.
fn offload(row: &Row) -> Result<Offload, Refusal> {
    let stated = row.cells.get("offload").map_or("", String::as_str);
    match stated {
        "" | "none" => Ok(Offload::None),
        "checkpoints" | "activations" => Ok(Offload::Activations),
        "optimizer" => Ok(Offload::Optimizer),
        "parameters, optimizer" => Ok(Offload::State),
        other => Err(Refusal(format!("offloading `{other}` to hosts is not modelled"))),
    }
}

/// Returns whether the row states its recomputation.
pub(crate) fn states_recompute(row: &Row) -> bool {
    ["full", "selective", "none"].iter().any(|word| row.recompute.to_lowercase().starts_with(word))
}

/// Returns the layout's `expert` and `expert_tensor`.
///
/// Megatron's expert-parallel size divides `dp`, or `dp` x `tp` if each expert is whole on its
/// rank.
fn expert_sizes(
    row: &Row,
    stack: &StackProfile,
    data: usize,
    tensor: usize,
    assumptions: &mut Vec<String>,
) -> Result<(usize, Option<usize>), Refusal> {
    let expert_parallel = match (row.count("experts"), row.count("ep")) {
        (None, _) => 1,
        (_, Some(ranks)) => ranks,
        // DeepEP implies expert parallelism. AutoModel's examples use the largest number of ranks,
        // 64 at most, that divides the experts and the data-parallel ranks.
        (Some(experts), None) if row.notes.contains("DeepEP") => {
            let divides = |ranks: &usize| data.is_multiple_of(*ranks) && experts.is_multiple_of(*ranks);
            let ranks = (1..=64).rev().find(divides).unwrap_or(1);
            assumptions.push(format!("experts are assumed to be sharded over {ranks} ranks"));
            ranks
        }
        _ => 1,
    };
    let may_be_whole = expert_parallel.is_multiple_of(tensor) && data.is_multiple_of(expert_parallel / tensor);
    let must_be_whole = !data.is_multiple_of(expert_parallel);
    // These frameworks' scripts pass an expert tensor parallel size of 1 by default.
    let passes_one = ["pai-megatron", "ms-swift"].into_iter().any(|word| has_word(&row.framework, word));
    if tensor > 1 && expert_parallel > 1 && may_be_whole && (stack.defaults.whole_experts || must_be_whole || passes_one) {
        if passes_one {
            assumptions.push("each expert is assumed to be whole on its rank".into());
        }
        return Ok((expert_parallel / tensor, Some(1)));
    }
    if must_be_whole {
        return Err(Refusal(format!("ep {expert_parallel} divides neither dp {data} nor dp x tp {}", data * tensor)));
    }
    if tensor > 1 && expert_parallel > 1 {
        assumptions.push("`tp` is assumed to shard each expert".into());
    }
    Ok((expert_parallel, None))
}

/// Returns the blocks of each chunk, with the embedding and the head counted as blocks. `None`
/// leaves the cuts to the compiler.
///
/// Cuts in the row's notes come first. Otherwise this follows Megatron: equal layers per chunk, the
/// embedding with the first chunk and the head with the last. If the layers do not divide evenly,
/// the embedding and the head count as layers.
pub(crate) fn cuts(row: &Row, layout: &Layout, model: &Model) -> Option<Vec<usize>> {
    let chunks = layout.pipeline * layout.virtual_stages;
    let layers = match *model {
        Model::Gpt(Gpt { layers, .. })
        | Model::Llama(Llama { layers, .. })
        | Model::Moe(Moe { layers, .. })
        | Model::Bert(Bert { layers, .. }) => layers,
        _ => return None,
    };
    if chunks < 2 {
        return None;
    }
    if let Some(stated) = stated_cuts(&row.notes, layers).filter(|cuts| cuts.len() == chunks && !cuts.contains(&0)) {
        return Some(stated);
    }
    if layers.is_multiple_of(chunks) {
        let mut cuts = vec![layers / chunks; chunks];
        *cuts.first_mut()? += 1;
        *cuts.last_mut()? += 1;
        return Some(cuts);
    }
    (layers + 2).is_multiple_of(chunks).then(|| vec![(layers + 2) / chunks; chunks])
}

/// Returns the blocks of each stage that a row's notes state, with the embedding and the head
/// counted as blocks.
///
/// Notes state cuts in one of two forms: `layers per stage [7, 9, 9, 9]`, where the embedding and
/// the head count, or `stage boundaries [0, 7, 14, 20, 30]`. Boundaries count the modules of
/// DeepSpeed's Megatron, which has six besides the layers: a cast, the embedding and a
/// transposition before them, and a transposition, the norm and the head after them.
pub(crate) fn stated_cuts(notes: &str, layers: usize) -> Option<Vec<usize>> {
    let numbers = |label: &str| -> Option<Vec<usize>> {
        let rest = notes.split_once(label)?.1.split_once('[')?.1.split_once(']')?.0;
        rest.split(',').map(|number| number.trim().parse().ok()).collect()
    };
    if let Some(stages) = numbers("layers per stage") {
        return (stages.iter().sum::<usize>() == layers + 2).then_some(stages);
    }
    let boundaries = numbers("stage boundaries")?;
    if *boundaries.last()? != layers + 6 {
        return None;
    }
    let blocks_before = |boundary: usize| match boundary {
        0 => 0,
        end if end == layers + 6 => layers + 2,
        boundary => (boundary.saturating_sub(3)).min(layers) + 1,
    };
    Some(boundaries.windows(2).map(|pair| blocks_before(pair[1]).saturating_sub(blocks_before(pair[0]))).collect())
}
