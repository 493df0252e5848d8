//! Stages of Megatron's pipelines, read from its arguments. Megatron gives every chunk the same
//! number of layers, except where arguments give the first or the last stage another number; it
//! refuses numbers that do not divide.

use super::super::FrameworkError;
use super::super::stated::Stated;
use foretell_program::{Layout, Schedule};

/// The error for arguments that contradict each other.
pub(super) fn impossible(reason: String, hint: &str) -> FrameworkError {
    FrameworkError::Form { reason, hint: hint.into() }
}

/// Reads the chunks of the pipeline.
pub(super) fn read_chunks(stated: &mut Stated, layout: &mut Layout) -> Result<(), FrameworkError> {
    let layers = stated.count("num-layers")?;
    let stages = layout.pipeline;
    stated.rename("num-layers-in-first-pipeline-stage", "decoder-first-pipeline-num-layers")?;
    stated.rename("num-layers-in-last-pipeline-stage", "decoder-last-pipeline-num-layers")?;
    let per_chunk = stated.size("num-layers-per-virtual-pipeline-stage")?;
    let virtual_stages = stated.size("num-virtual-stages-per-pipeline-rank")?;
    let first = stated.size("decoder-first-pipeline-num-layers")?;
    let last = stated.size("decoder-last-pipeline-num-layers")?;
    let counted = Counted {
        embedding: stated.is_on("account-for-embedding-in-pipeline-split")?,
        loss: stated.is_on("account-for-loss-in-pipeline-split")?,
    };
    if let Some(list) = stated.text("num-layer-list")? {
        // MindSpeed's setting.
        if first.or(last).or(per_chunk).or(virtual_stages).is_some() || counted.any() {
            let reason = "`--num-layer-list` beside another choice of the stages' layers".into();
            return Err(impossible(reason, "keep one of them"));
        }
        let counts = list.split(',').map(|count| count.trim().parse::<usize>().ok().filter(|count| *count > 0));
        let cuts = counts.collect::<Option<Vec<usize>>>().unwrap_or_default();
        let total = cuts.iter().try_fold(0usize, |total, count| total.checked_add(*count));
        if cuts.len() != stages || layers.is_some_and(|layers| total != Some(layers)) {
            let reason = format!("`--num-layer-list {list}` does not give {stages} stages all layers");
            return Err(impossible(reason, "write the number of layers of each stage, with commas between them"));
        }
        (layout.virtual_stages, layout.cuts) = (1, Some(cuts));
    } else if let Some(text) = stated.text("pipeline-model-parallel-layout")? {
        if first.or(last).is_some() || counted.any() {
            let reason = "`--pipeline-model-parallel-layout` beside another choice of the stages' layers".into();
            return Err(impossible(reason, "keep one of them, as Megatron demands"));
        }
        let cuts = read_layout(&text)?;
        if !cuts.len().is_multiple_of(stages) {
            return Err(impossible(format!("{} chunks for {stages} stages", cuts.len()), "give every stage as many chunks"));
        }
        layout.virtual_stages = cuts.len() / stages;
        layout.cuts = Some(cuts);
    } else if stages > 1 {
        if per_chunk.is_some() && virtual_stages.is_some() {
            let reason = "`--num-layers-per-virtual-pipeline-stage` beside `--num-virtual-stages-per-pipeline-rank`".into();
            return Err(impossible(reason, "keep one of them, as Megatron demands"));
        }
        let Some(layers) = layers else {
            layout.virtual_stages = virtual_stages.unwrap_or(1);
            if per_chunk.is_some() {
                let reason = "`--num-layers-per-virtual-pipeline-stage` without `--num-layers`".into();
                return Err(impossible(reason, "add `--num-layers`: the number of chunks follows from it"));
            }
            return interleave(layout);
        };
        let of_stages = layers_of_stages(layers, stages, [first, last], counted)?;
        let per_stage = of_stages.iter().copied().max().unwrap_or(1);
        layout.virtual_stages = match (per_chunk, virtual_stages) {
            (Some(per_chunk), _) if !per_stage.is_multiple_of(per_chunk) => {
                let reason = format!("{per_stage} layers of a stage are no multiple of {per_chunk} layers of a chunk");
                return Err(impossible(
                    reason,
                    "choose `--num-layers-per-virtual-pipeline-stage` that divides them, as Megatron demands",
                ));
            }
            (Some(per_chunk), _) => per_stage / per_chunk,
            (None, virtual_stages) => virtual_stages.unwrap_or(1),
        };
        layout.cuts = Some(cuts(&of_stages, layout.virtual_stages, counted)?);
    }
    interleave(layout)
}

fn interleave(layout: &mut Layout) -> Result<(), FrameworkError> {
    if layout.virtual_stages > 1 {
        layout.schedule = Schedule::Interleaved;
    }
    Ok(())
}

/// Which parts at the ends of a pipeline count as layers.
#[derive(Clone, Copy)]
struct Counted {
    embedding: bool,
    loss: bool,
}

impl Counted {
    fn any(self) -> bool {
        self.embedding || self.loss
    }
}

/// The layers of each stage. The embedding and the loss count as layers if `counted` says so.
fn layers_of_stages(
    layers: usize,
    stages: usize,
    [first, last]: [Option<usize>; 2],
    counted: Counted,
) -> Result<Vec<usize>, FrameworkError> {
    let counted = layers.saturating_add(usize::from(counted.embedding)).saturating_add(usize::from(counted.loss));
    let stated = first.unwrap_or(0).saturating_add(last.unwrap_or(0));
    let others = stages.saturating_sub(usize::from(first.is_some()) + usize::from(last.is_some()));
    let rest = counted.checked_sub(stated);
    let each = match (rest, others) {
        (Some(0), 0) => 0,
        (Some(rest), others) if others > 0 && rest > 0 && rest.is_multiple_of(others) => rest / others,
        _ => {
            let reason = if first.or(last).is_some() {
                format!("{counted} layers less {stated} of the first and last stage cannot be divided by {others} other stages")
            } else {
                format!("{counted} layers cannot be divided by {stages} stages")
            };
            let hint = "choose numbers that divide, as Megatron demands, or give `--pipeline-model-parallel-layout`";
            return Err(impossible(reason, hint));
        }
    };
    let of_stage = |stage: usize| match stage {
        0 => first.unwrap_or(each),
        stage if stage + 1 == stages => last.unwrap_or(each),
        _ => each,
    };
    Ok((0..stages).map(of_stage).collect())
}

/// The blocks of each chunk, in the order of the layers. The embedding and the loss are blocks,
/// too.
fn cuts(of_stages: &[usize], virtual_stages: usize, counted: Counted) -> Result<Vec<usize>, FrameworkError> {
    if let Some(layers) = of_stages.iter().find(|layers| !layers.is_multiple_of(virtual_stages)) {
        let reason = format!("{layers} layers of a stage cannot be divided by {virtual_stages} chunks");
        return Err(impossible(reason, "choose numbers that divide, as Megatron demands"));
    }
    let chunks = of_stages.len().saturating_mul(virtual_stages);
    let [embedding, loss] = [counted.embedding, counted.loss].map(|is_counted| usize::from(!is_counted));
    let blocks = |chunk: usize| {
        let layers = of_stages[chunk % of_stages.len()] / virtual_stages;
        layers + if chunk == 0 { embedding } else { 0 } + if chunk + 1 == chunks { loss } else { 0 }
    };
    Ok((0..chunks).map(blocks).collect())
}

/// Reads Megatron's layout of a pipeline: the blocks of each chunk.
fn read_layout(text: &str) -> Result<Vec<usize>, FrameworkError> {
    let wrong = |reason: String| FrameworkError::Form {
        reason: format!("`--pipeline-model-parallel-layout {text}`: {reason}"),
        hint: "write chunks of E, t, L and their numbers, such as `Et*3|t*4|t*3L`".into(),
    };
    repeated(&text.replace([',', ' '], ""))
        .ok_or_else(|| wrong("a bracket is not closed, or repeated too often".into()))?
        .split('|')
        .map(|chunk| {
            let mut blocks = 0usize;
            let mut rest = chunk;
            while let Some(letter) = rest.chars().next() {
                rest = rest.get(letter.len_utf8()..).unwrap_or_default();
                if !matches!(letter, 'E' | 't' | 'L') {
                    return Err(wrong(format!("`{letter}` is no block that we know")));
                }
                let mut count = 1;
                if let Some(number) = rest.strip_prefix('*') {
                    let digits = number.len() - number.trim_start_matches(|word: char| word.is_ascii_digit()).len();
                    count = number
                        .get(..digits)
                        .and_then(|digits| digits.parse().ok())
                        .ok_or_else(|| wrong("`*` needs a number".into()))?;
                    rest = number.get(digits..).unwrap_or_default();
                }
                blocks = blocks.saturating_add(count);
            }
            Ok(blocks)
        })
        .collect()
}

/// The layout with its repetitions written out: `(tt|)*2` becomes `tt|tt|`. `None` if a bracket is
/// not closed.
fn repeated(text: &str) -> Option<String> {
    // Longer than the layout of any model.
    const LONGEST: usize = 1 << 16;
    let Some(close) = text.find(')') else { return (!text.contains('(')).then(|| text.into()) };
    let open = text.get(..close)?.rfind('(')?;
    let (inner, rest) = (text.get(open + 1..close)?, text.get(close + 1..)?);
    let (times, rest) = match rest.strip_prefix('*') {
        None => (1, rest),
        Some(number) => {
            let digits = number.len() - number.trim_start_matches(|word: char| word.is_ascii_digit()).len();
            (number.get(..digits)?.parse::<usize>().ok()?, number.get(digits..)?)
        }
    };
    if inner.len().checked_mul(times)? > LONGEST || text.len() > LONGEST {
        return None;
    }
    repeated(&format!("{}{}{rest}", text.get(..open)?, inner.repeat(times)))
}
