//! How a row's run is laid out: which ranks do what, as Megatron's columns say it.

use crate::row::Row;
use crate::run::Refusal;
use foretell_models::Model;
use foretell_program::{Layout, Recompute, Schedule};
use foretell_simulator::gpu::StackKind;

/// The layout of a row's run on so many devices.
///
/// # Errors
/// [`Refusal`] where sizes contradict each other, or the batch is not stated.
pub(crate) fn layout(row: &Row, stack: &StackKind, devices: usize, stand_ins: &mut Vec<String>) -> Result<Layout, Refusal> {
    let size = |column| row.count(column).unwrap_or(1);
    let (tensor, pipeline) = (size("tp"), size("pp"));
    let mut context = size("cp");
    let is_stated = ["dp", "tp", "pp", "cp"].iter().any(|column| row.count(column).is_some());
    // Sharded over all devices with less than a sequence for each: several share one.
    if let (false, Some(batch)) = (is_stated, row.count("gbs"))
        && devices > batch
        && devices.is_multiple_of(batch)
    {
        stand_ins.push("sequences are taken to be shared by as many devices as there are too many for the batch".into());
        context = devices / batch;
    }
    let replica = tensor * pipeline * context;
    let data = match row.count("dp") {
        Some(data) => data,
        None if devices.is_multiple_of(replica) => devices / replica,
        None => return Err(Refusal(format!("{devices} devices are no multiple of tp x pp x cp = {replica}"))),
    };
    if data * replica != devices {
        return Err(Refusal(format!("dp {data} x tp {tensor} x pp {pipeline} x cp {context} are not the {devices} devices")));
    }
    let (expert, expert_tensor) = experts(row, stack, data, tensor, stand_ins)?;
    let virtual_stages = if pipeline > 1 { size("vpp") } else { 1 };
    let zero = match row.zero.chars().next() {
        // In a pipeline FSDP2 keeps what it has gathered, and sums gradients over ranks with the last micro-batch only (PyTorch's
        // `PipelineStage`): what it communicates is what ZeRO 1 does.
        Some('3') if pipeline > 1 => 1,
        Some(digit @ '0'..='3') if data > 1 || digit == '3' => digit as usize - '0' as usize,
        _ => 0,
    };
    let recompute = match row.recompute.to_lowercase() {
        _ if stack.recomputes_as_known => stack.recompute.clone(),
        text if text.starts_with("full") => Recompute::Full,
        text if text.starts_with("selective") => stack.selective.clone(),
        text if text.starts_with("none") => Recompute::None,
        _ => stack.recompute.clone(),
    };
    let sequence_parallel = tensor > 1 && row.number("sp").map_or(stack.sequence_parallel, |value| value != 0.0);
    let micro_batch = match (row.count("mbs"), row.count("gbs"), row.count("ga")) {
        (Some(size), _, _) => size,
        (None, Some(batch), steps) if batch.is_multiple_of(data * steps.unwrap_or(1)) => batch / data / steps.unwrap_or(1),
        (None, Some(batch), Some(_)) if batch.is_multiple_of(data) => batch / data,
        _ => return Err(Refusal("neither the micro-batch nor a global batch that the ranks share evenly is stated".into())),
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
        bucket: stack.bucket,
        ..Layout::default()
    })
}

/// Whether a row says what is computed again.
pub(crate) fn states_recompute(row: &Row) -> bool {
    ["full", "selective", "none"].iter().any(|word| row.recompute.to_lowercase().starts_with(word))
}

/// The ranks that share out experts as the compiler counts them, and how far `tensor` cuts one. Megatron's expert-parallel ranks are of `dp`, or where one expert is not cut
/// of `dp` and `tp` together.
fn experts(
    row: &Row,
    stack: &StackKind,
    data: usize,
    tensor: usize,
    stand_ins: &mut Vec<String>,
) -> Result<(usize, Option<usize>), Refusal> {
    let experts = match (row.count("experts"), row.count("ep")) {
        (None, _) => 1,
        (_, Some(ranks)) => ranks,
        // DeepEP is for experts that are shared out: over as many ranks as share them evenly, 64 at most, as AutoModel's examples have it.
        (Some(experts), None) if row.notes.contains("DeepEP") => {
            let divides = |ranks: &usize| data.is_multiple_of(*ranks) && experts.is_multiple_of(*ranks);
            let ranks = (1..=64).rev().find(divides).unwrap_or(1);
            stand_ins.push(format!("experts are taken to be shared out over {ranks} ranks"));
            ranks
        }
        _ => 1,
    };
    let spreads = experts.is_multiple_of(tensor) && data.is_multiple_of(experts / tensor);
    if tensor > 1 && experts > 1 && spreads && (stack.whole_experts || !data.is_multiple_of(experts)) {
        return Ok((experts / tensor, Some(1)));
    }
    if !data.is_multiple_of(experts) {
        return Err(Refusal(format!("ep {experts} divides neither dp {data} nor dp x tp {}", data * tensor)));
    }
    if tensor > 1 && experts > 1 {
        stand_ins.push("whether `tp` cuts experts is not stated".into());
    }
    Ok((experts, None))
}

/// Layers of each chunk as Megatron cuts: as many in each, the embedding with the first and the head with the last; where that does not
/// divide, both counted as layers. What the row's notes say of its stages counts before.
pub(crate) fn cuts(row: &Row, layout: &Layout, model: &Model) -> Option<Vec<usize>> {
    let chunks = layout.pipeline * layout.virtual_stages;
    let layers = match *model {
        Model::Gpt { layers, .. } | Model::Llama { layers, .. } | Model::Moe { layers, .. } | Model::Bert { layers, .. } => {
            layers
        }
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

/// `layers per stage [7, 9, 9, 9]`, embedding and head counted; or `stage boundaries [0, 7, 14, 20, 30]`, where DeepSpeed's Megatron has three
/// more entries before the layers and three after them (a cast, the embedding, a transposition; a transposition, the norm, the head).
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
    // Blocks before a boundary: the embedding, the layers, the head.
    let blocks = |boundary: usize| match boundary {
        0 => 0,
        end if end == layers + 6 => layers + 2,
        boundary => (boundary.saturating_sub(3)).min(layers) + 1,
    };
    Some(boundaries.windows(2).map(|pair| blocks(pair[1]).saturating_sub(blocks(pair[0]))).collect())
}
