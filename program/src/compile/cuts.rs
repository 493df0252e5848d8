//! Cutting the model into chunks, and where each lies: a chunk is a run of blocks, a stage has one or, in some schedules, several.

use crate::plan::{Plan, PlanError};
use foretell_models::Graph;

/// Where the blocks of a model lie.
#[derive(Clone, Debug)]
pub(super) struct Cuts {
    /// How many stages there are.
    pub(super) stages: usize,
    /// How many chunks each of them has.
    pub(super) chunks: usize,
    /// The stage of each block.
    pub(super) stage_of_block: Vec<usize>,
    /// Which of its stage's chunks each block is in.
    pub(super) chunk_of_block: Vec<usize>,
}

impl Cuts {
    /// Cuts a model as its plan says, and lays the chunks where its schedule does.
    pub(super) fn new(graph: &Graph, plan: &Plan) -> Result<Self, PlanError> {
        let (stages, chunks) = (plan.layout.pipeline, plan.layout.virtual_stages);
        let blocks = blocks_of_chunks(graph, plan)?.into_iter().enumerate();
        let places: Vec<(usize, usize)> = blocks
            .flat_map(|(position, blocks)| std::iter::repeat_n(plan.layout.schedule.place(stages, chunks, position), blocks))
            .collect();
        let (stage_of_block, chunk_of_block) = places.into_iter().unzip();
        Ok(Self { stages, chunks, stage_of_block, chunk_of_block })
    }
}

/// How many blocks each chunk has, in the model's order: the plan's, or as even in arithmetic as cuts between blocks allow.
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
    let (each, of_what) = if chunks == 1 { ("stage", "stages") } else { ("chunk", "chunks") };
    if let Some(cuts) = &plan.layout.cuts {
        if cuts.len() != positions
            || cuts.contains(&0)
            || cuts.iter().try_fold(0usize, |sum, &one| sum.checked_add(one)) != Some(blocks)
        {
            return Err(PlanError::Invalid {
                field: "cuts",
                reason: format!("{cuts:?} does not share out {blocks} blocks among {positions} {of_what}"),
                hint: format!("give one positive number a {each}, in the model's order, adding up to the number of blocks"),
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

/// Blocks of each chunk where a plan does not say: as even as cuts between blocks of so much `work` allow, for so many stages of so many chunks.
/// There are at least as many blocks as chunks.
pub fn usual_cuts(work: &[f64], stages: usize, chunks: usize) -> Vec<usize> {
    let cuts = even_cuts(work, stages * chunks);
    // Where a stage has several chunks, it is their sum that counts: all of them are to be even, not the largest alone.
    if chunks > 1 { levelled(work, &cuts) } else { cuts }
}

/// Cuts `work` into `stages` runs whose largest sum is least.
fn even_cuts(work: &[f64], stages: usize) -> Vec<usize> {
    cuts_by_speed(work, &vec![1.0; stages])
}

/// Cuts blocks of so much `work` into a run for each of some stages that are so fast, so that the one that takes longest takes the least: exact, by
/// dynamic programming over prefixes. There are at least as many blocks as stages, and each has one.
pub fn cuts_by_speed(work: &[f64], speeds: &[f64]) -> Vec<usize> {
    let (blocks, stages) = (work.len(), speeds.len());
    let mut prefix = vec![0.0];
    for (index, &amount) in work.iter().enumerate() {
        prefix.push(prefix[index] + amount);
    }
    // best[end]: the least longest time of the stages so far over the first `end` blocks; starts[stage][end]: where the last of them began.
    let mut best: Vec<f64> = prefix.iter().map(|sum| sum / speeds.first().copied().unwrap_or(1.0)).collect();
    let mut starts = vec![vec![0u32; blocks + 1]];
    for (stage, speed) in speeds.iter().enumerate().skip(1) {
        let mut largest = vec![f64::INFINITY; blocks + 1];
        let mut began = vec![0u32; blocks + 1];
        for end in stage + 1..=blocks {
            let last = |start: usize| (prefix[end] - prefix[start]) / speed;
            // The later the last stage begins the less it has, and the more those before it: the best is where they cross.
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

/// Of all cuts whose largest sum is that of `cuts` those whose sums differ least: with the least sum of squares.
fn levelled(work: &[f64], cuts: &[usize]) -> Vec<usize> {
    let blocks = work.len();
    let mut prefix = vec![0.0];
    for (index, &amount) in work.iter().enumerate() {
        prefix.push(prefix[index] + amount);
    }
    let mut end = 0;
    let sums = cuts.iter().map(|&cut| {
        end += cut;
        prefix[end] - prefix[end - cut]
    });
    let most = sums.fold(0.0, f64::max);
    // As in `even_cuts`: the least sum of squares of the runs so far over the first `end` blocks, and where the last of them began.
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

/// The first of `range` where what holds from some point on holds, by bisection.
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
    use super::{cuts_by_speed, even_cuts, levelled};

    #[test]
    fn cuts_are_the_most_even_there_are() {
        assert_eq!(even_cuts(&[1.0, 1.0, 1.0, 3.0], 2), [3, 1]);
        assert_eq!(even_cuts(&[5.0, 1.0, 1.0, 1.0, 1.0, 5.0], 3), [1, 4, 1]);
        assert_eq!(even_cuts(&[0.0, 0.0, 0.0], 3), [1, 1, 1], "every stage has a block, even one without work");
    }

    #[test]
    fn slower_stages_have_fewer_blocks() {
        assert_eq!(cuts_by_speed(&[1.0; 12], &[2.0, 2.0, 1.0, 1.0]), [4, 4, 2, 2]);
        assert_eq!(cuts_by_speed(&[1.0, 1.0, 1.0, 1.0, 6.0], &[1.0, 3.0]), [2, 3]);
        let longest = |first: usize| (first as f64).max((7 - first) as f64 / 2.5);
        let least = (1..7).map(longest).fold(f64::INFINITY, f64::min);
        assert_eq!(longest(cuts_by_speed(&[1.0; 7], &[1.0, 2.5])[0]), least);
    }

    #[test]
    fn levelled_cuts_have_no_larger_run_and_differ_less() {
        let work = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0];
        assert_eq!(levelled(&work, &[3, 3, 1]), [3, 3, 1]);
        assert_eq!(levelled(&work, &[1, 2, 3, 1]), [2, 2, 2, 1]);
        let cuts = levelled(&[1.0; 7], &[3, 3, 1]);
        assert_eq!(cuts.iter().map(|cut| cut * cut).sum::<usize>(), 17, "{cuts:?}");
    }

    #[test]
    fn no_other_cuts_are_more_even() {
        // Every list of up to six small numbers that a fixed linear congruence makes, against all ways to cut it.
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
                let ways = (0..1usize << (blocks - 1)).filter(|ends| ends.count_ones() as usize == stages - 1);
                let least = ways
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
