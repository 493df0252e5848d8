//! Cutting the model into chunks of consecutive blocks, and the stage of each chunk. A stage has
//! one chunk, or several in schedules with virtual stages.

use crate::plan::{Plan, PlanError};
use crate::schedule::StagePass;
use foretell_models::{Graph, Operator, Pass};

/// The stage and the chunk of each block of a model.
#[derive(Clone, Debug)]
pub(super) struct Cuts {
    /// The number of stages.
    pub(super) stages: usize,
    /// The number of chunks of each stage.
    pub(super) chunks: usize,
    /// The stage of each block.
    pub(super) stage_of_block: Vec<usize>,
    /// The chunk of each block, counted within its stage.
    pub(super) chunk_of_block: Vec<usize>,
    /// Whether the schedule runs the gradients of inputs and of weights as separate passes.
    splits_backward: bool,
}

/// A pass through a chunk: the chunk, counted within its stage, and the pass.
pub(super) type ChunkPass = (usize, StagePass);

impl Cuts {
    /// Cuts a model as its plan says, and places the chunks as its schedule says.
    pub(super) fn new(graph: &Graph, plan: &Plan) -> Result<Self, PlanError> {
        let (stages, chunks, schedule) = (plan.layout.pipeline, plan.layout.virtual_stages, plan.layout.schedule);
        let blocks = blocks_of_chunks(graph, plan)?.into_iter().enumerate();
        let places: Vec<(usize, usize)> =
            blocks.flat_map(|(position, blocks)| std::iter::repeat_n(schedule.place(stages, position), blocks)).collect();
        let (stage_of_block, chunk_of_block) = places.into_iter().unzip();
        Ok(Self { stages, chunks, stage_of_block, chunk_of_block, splits_backward: schedule.splits_backward() })
    }

    /// The stage of an operator.
    pub(super) fn stage(&self, operator: &Operator) -> usize {
        self.stage_of_block[operator.block]
    }

    /// The chunk of an operator, and the kinds of passes of its stage that run it. A schedule that
    /// splits backward passes may do so for some micro-batches only.
    pub(super) fn chunk_passes(&self, operator: &Operator) -> impl Iterator<Item = ChunkPass> + use<> {
        let chunk = self.chunk_of_block[operator.block];
        let passes = match operator.pass {
            Pass::Forward => [Some(StagePass::Forward), None],
            Pass::InputGradient if self.splits_backward => [Some(StagePass::InputGradient), Some(StagePass::Backward)],
            Pass::WeightGradient if self.splits_backward => [Some(StagePass::WeightGradient), Some(StagePass::Backward)],
            Pass::InputGradient | Pass::WeightGradient => [Some(StagePass::Backward), None],
        };
        passes.into_iter().flatten().map(move |pass| (chunk, pass))
    }
}

/// The number of blocks of each chunk, in the model's order: the plan's `cuts`, or chunks of
/// arithmetic as equal as cuts between blocks allow.
fn blocks_of_chunks(graph: &Graph, plan: &Plan) -> Result<Vec<usize>, PlanError> {
    let (stages, chunks) = (plan.layout.pipeline, plan.layout.virtual_stages);
    let blocks = graph.blocks.len();
    if stages > blocks {
        return Err(PlanError::Invalid {
            field: "pipeline",
            reason: format!("{stages} stages, but `{}` can be cut into {blocks} at most", graph.name),
            hint: format!("use `pipeline: {blocks}` or less"),
        });
    }
    let Some(positions) = stages.checked_mul(chunks).filter(|&positions| positions <= blocks) else {
        return Err(PlanError::Invalid {
            field: "virtual_stages",
            reason: format!("{chunks} chunks for each of {stages} stages, but `{}` can be cut into {blocks} at most", graph.name),
            hint: format!("use `virtual_stages: {}` or less, or fewer stages", blocks / stages),
        });
    };
    let (one, many) = if chunks == 1 { ("stage", "stages") } else { ("chunk", "chunks") };
    if let Some(cuts) = &plan.layout.cuts {
        if cuts.len() != positions
            || cuts.contains(&0)
            || cuts.iter().try_fold(0usize, |sum, &count| sum.checked_add(count)) != Some(blocks)
        {
            return Err(PlanError::Invalid {
                field: "cuts",
                reason: format!("{cuts:?} does not divide {blocks} blocks among {positions} {many}"),
                hint: format!(
                    "give one positive number for each {one}, in the model's order, with the number of blocks as their sum"
                ),
            });
        }
        return Ok(cuts.clone());
    }
    Ok(usual_cuts(&work_of_blocks(graph), stages, chunks))
}

/// The arithmetic of each block of a graph.
pub fn work_of_blocks(graph: &Graph) -> Vec<f64> {
    let mut work = vec![0.0; graph.blocks.len()];
    for operator in &graph.operators {
        work[operator.block] += operator.kernel(&operator.extents()).flops().value();
    }
    work
}

/// The number of blocks of each chunk for plans without `cuts`: as even as cuts between blocks
/// allow.
///
/// `work` is the arithmetic of each block; there are at least `stages * chunks` blocks. The result
/// has one number for each chunk, in the model's order.
pub fn usual_cuts(work: &[f64], stages: usize, chunks: usize) -> Vec<usize> {
    let work = whole_shares(work);
    let cuts = even_cuts(&work, stages * chunks);
    // A stage with several chunks takes the sum of their times, so all chunks should be even; a
    // small largest chunk is not enough.
    if chunks > 1 { levelled(&work, &cuts) } else { cuts }
}

/// Scales amounts to whole numbers of at most 65,536, for which squared sums over a thousand blocks
/// are exact. Otherwise rounding would choose among equally good cuts, differently for each
/// micro-batch size.
fn whole_shares(amounts: &[f64]) -> Vec<f64> {
    const PARTS: f64 = 65_536.0;
    let largest = amounts.iter().copied().fold(0.0, f64::max);
    if largest > 0.0 { amounts.iter().map(|amount| (amount / largest * PARTS).round()).collect() } else { amounts.to_vec() }
}

/// Cuts `work` into `stages` runs so that the largest sum of a run is as small as possible.
fn even_cuts(work: &[f64], stages: usize) -> Vec<usize> {
    cuts_by_speed(work, &vec![1.0; stages])
}

/// Cuts blocks into one run for each stage so that the slowest stage takes as little time as
/// possible.
///
/// `work` is the arithmetic of each block, `speeds` the arithmetic of each stage per unit of time.
/// There are at least as many blocks as stages, and every stage gets at least one block. Exact, by
/// dynamic programming over prefixes.
pub fn cuts_by_speed(work: &[f64], speeds: &[f64]) -> Vec<usize> {
    let (blocks, stages) = (work.len(), speeds.len());
    let prefix = prefix_sums(work);
    // best[end]: the smallest possible time of the slowest stage so far, over the first `end`
    // blocks. starts[stage][end]: the first block of the last of these stages.
    let mut best: Vec<f64> = prefix.iter().map(|sum| sum / speeds.first().copied().unwrap_or(1.0)).collect();
    let mut starts = vec![vec![0u32; blocks + 1]];
    for (stage, speed) in speeds.iter().enumerate().skip(1) {
        let mut largest = vec![f64::INFINITY; blocks + 1];
        let mut began = vec![0u32; blocks + 1];
        for end in stage + 1..=blocks {
            let last = |start: usize| (prefix[end] - prefix[start]) / speed;
            // A later start gives the last stage less work and those before it more: the optimum is
            // where the two times cross.
            let crossing = first_where(stage..end, |start| best[start] >= last(start));
            let start = match crossing {
                Some(crossing) if crossing == stage || best[crossing] < last(crossing - 1) => crossing,
                _ => {
                    let least = last(crossing.unwrap_or(end) - 1);
                    first_where(stage..end, |start| last(start) <= least).unwrap_or(stage)
                }
            };
            largest[end] = best[start].max(last(start));
            began[end] = start as u32;
        }
        best = largest;
        starts.push(began);
    }
    let mut cuts = vec![0; stages];
    let mut end = blocks;
    for stage in (0..stages).rev() {
        let start = starts[stage][end] as usize;
        cuts[stage] = end - start;
        end = start;
    }
    cuts
}

/// The sums of the first n amounts, for every n from 0 on.
fn prefix_sums(amounts: &[f64]) -> Vec<f64> {
    let sums = amounts.iter().scan(0.0, |sum, amount| {
        *sum += amount;
        Some(*sum)
    });
    std::iter::once(0.0).chain(sums).collect()
}

/// The cuts with the smallest sum of squared run sums, among all cuts whose largest run sum is at
/// most that of `cuts`.
fn levelled(work: &[f64], cuts: &[usize]) -> Vec<usize> {
    let blocks = work.len();
    let prefix = prefix_sums(work);
    let mut end = 0;
    let sums = cuts.iter().map(|&cut| {
        end += cut;
        prefix[end] - prefix[end - cut]
    });
    let most = sums.fold(0.0, f64::max);
    // best[end]: the smallest sum of squares of the runs so far, over the first `end` blocks.
    let mut best = vec![f64::INFINITY; blocks + 1];
    best[0] = 0.0;
    let mut starts: Vec<Vec<usize>> = Vec::with_capacity(cuts.len());
    for _ in cuts {
        let mut least = vec![f64::INFINITY; blocks + 1];
        let mut began = vec![0; blocks + 1];
        for end in 1..=blocks {
            for start in (0..end).rev() {
                let last = prefix[end] - prefix[start];
                if last > most {
                    break;
                }
                let squares = best[start] + last * last;
                if squares < least[end] {
                    (least[end], began[end]) = (squares, start);
                }
            }
        }
        best = least;
        starts.push(began);
    }
    let mut end = blocks;
    let mut levelled: Vec<usize> = starts
        .iter()
        .rev()
        .map(|began| {
            let cut = end - began[end];
            end = began[end];
            cut
        })
        .collect();
    levelled.reverse();
    levelled
}

/// The first value of `range` at which `holds` is true, by bisection. Once true, `holds` stays
/// true.
fn first_where(range: std::ops::Range<usize>, holds: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut from, mut until) = (range.start, range.end);
    while from < until {
        let middle = from.midpoint(until);
        if holds(middle) {
            until = middle;
        } else {
            from = middle + 1;
        }
    }
    (from < range.end).then_some(from)
}

#[cfg(test)]
mod tests {
    use super::{cuts_by_speed, even_cuts, levelled, usual_cuts};

    #[test]
    fn usual_cuts_do_not_depend_on_the_size_of_a_micro_batch() {
        // Nine layers over six chunks: ten pairs of the first five chunks are equally good.
        for scale in [1.0, 3.0, 7.0, 1e-3, 1.1e13] {
            let layer = 412_316_860_416.0 * scale;
            let mut work = vec![layer; 11];
            (work[0], work[10]) = (0.0, 17_179_869_184.0 * scale);
            assert_eq!(usual_cuts(&work, 3, 2), usual_cuts(&work.iter().map(|amount| amount / scale).collect::<Vec<_>>(), 3, 2));
            assert_eq!(usual_cuts(&work, 3, 2), [3, 2, 2, 1, 1, 2], "{scale}");
        }
    }

    #[test]
    fn even_cuts_minimise_the_largest_run() {
        assert_eq!(even_cuts(&[1.0, 1.0, 1.0, 3.0], 2), [3, 1]);
        assert_eq!(even_cuts(&[5.0, 1.0, 1.0, 1.0, 1.0, 5.0], 3), [1, 4, 1]);
        assert_eq!(even_cuts(&[0.0, 0.0, 0.0], 3), [1, 1, 1], "every stage has a block, even if blocks have no work");
    }

    #[test]
    fn slower_stages_get_fewer_blocks() {
        assert_eq!(cuts_by_speed(&[1.0; 12], &[2.0, 2.0, 1.0, 1.0]), [4, 4, 2, 2]);
        assert_eq!(cuts_by_speed(&[1.0, 1.0, 1.0, 1.0, 6.0], &[1.0, 3.0]), [2, 3]);
        let longest = |first: usize| (first as f64).max((7 - first) as f64 / 2.5);
        let least = (1..7).map(longest).fold(f64::INFINITY, f64::min);
        assert_eq!(longest(cuts_by_speed(&[1.0; 7], &[1.0, 2.5])[0]), least);
    }

    #[test]
    fn levelled_cuts_keep_the_largest_run_and_even_out_the_rest() {
        let work = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0];
        assert_eq!(levelled(&work, &[3, 3, 1]), [3, 3, 1]);
        assert_eq!(levelled(&work, &[1, 2, 3, 1]), [2, 2, 2, 1]);
        let cuts = levelled(&[1.0; 7], &[3, 3, 1]);
        assert_eq!(cuts.iter().map(|cut| cut * cut).sum::<usize>(), 17, "{cuts:?}");
    }

    #[test]
    fn even_cuts_are_as_good_as_the_best_of_all_cuts() {
        // 500 lists of up to six small numbers from a linear congruential generator, against all
        // possible cuts.
        let mut state = 1u32;
        for round in 0..500 {
            let blocks = 1 + round % 6;
            let work: Vec<f64> = (0..blocks)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    f64::from(state >> 30)
                })
                .collect();
            for stages in 1..=blocks {
                let largest = |cuts: &[usize]| {
                    let mut rest = &work[..];
                    let mut sums = cuts.iter().map(|&cut| {
                        let (stage, after) = rest.split_at(cut);
                        rest = after;
                        stage.iter().sum::<f64>()
                    });
                    sums.by_ref().fold(0.0, f64::max)
                };
                let all_cuts = (0..1usize << (blocks - 1)).filter(|ends| ends.count_ones() as usize == stages - 1);
                let least = all_cuts
                    .map(|ends| {
                        let mut cuts = vec![1];
                        for block in 0..blocks - 1 {
                            if ends >> block & 1 == 1 {
                                cuts.push(1);
                            } else if let Some(last) = cuts.last_mut() {
                                *last += 1;
                            }
                        }
                        largest(&cuts)
                    })
                    .fold(f64::INFINITY, f64::min);
                let cuts = even_cuts(&work, stages);
                assert!(cuts.iter().all(|&cut| cut > 0) && cuts.iter().sum::<usize>() == blocks, "{cuts:?}");
                assert_eq!(largest(&cuts), least, "{work:?} in {stages}");
            }
        }
    }
}
