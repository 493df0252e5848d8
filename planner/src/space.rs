//! The space of layouts: every way to share out the devices, the batch and the memory that the compiler can lay out.

use foretell_program::{Layout, Recompute, Schedule};
use thiserror::Error;

/// The most micro-batches of a step that are considered where the user fixes no micro-batch: more than eight times the deepest
/// pipelines of one node only cost start-up time.
const MOST_MICRO_BATCHES: usize = 32;

/// Choices that are the user's: `--fix tensor=8,pipeline=4`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fixed {
    /// Ranks that share out samples.
    pub data: Option<usize>,
    /// Ranks that share out operators' weights.
    pub tensor: Option<usize>,
    /// Stages.
    pub pipeline: Option<usize>,
    /// Samples of a micro-batch.
    pub micro_batch: Option<usize>,
    /// The order of micro-batches.
    pub schedule: Option<Schedule>,
    /// Model chunks a stage.
    pub virtual_stages: Option<usize>,
    /// What is computed again.
    pub recompute: Option<Recompute>,
    /// Ranks that share out positions; 1 where it is left open.
    pub context: Option<usize>,
    /// Ranks that share out experts; 1 where it is left open.
    pub expert: Option<usize>,
    /// ZeRO's stage; none where it is left open.
    pub zero: Option<usize>,
    /// Ranks of a shard group; all of `data` where it is left open.
    pub shard_group: Option<usize>,
    /// Whether `tensor` shares out the sequence outside of products; not where it is left open.
    pub sequence_parallel: Option<bool>,
}

/// Why a `--fix` cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "`{part}` cannot be fixed: {reason}; hint: write for example `tensor=2,pipeline=2,micro_batch=4,schedule=1f1b,recompute=full`"
)]
pub struct FixedError {
    /// The part of the text.
    part: String,
    /// What is wrong with it.
    reason: String,
}

impl std::str::FromStr for Fixed {
    type Err = FixedError;

    fn from_str(text: &str) -> Result<Self, FixedError> {
        let mut fixed = Fixed::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let wrong = |reason: &str| FixedError { part: part.into(), reason: reason.into() };
            let (name, value) = part.split_once('=').ok_or_else(|| wrong("it has no `=`"))?;
            let number = || match value.trim().parse::<usize>() {
                Ok(number) if number > 0 => Ok(Some(number)),
                _ => Err(wrong("its value is not a positive whole number")),
            };
            match name.trim() {
                "data" => fixed.data = number()?,
                "tensor" => fixed.tensor = number()?,
                "pipeline" => fixed.pipeline = number()?,
                "micro_batch" => fixed.micro_batch = number()?,
                "virtual_stages" => fixed.virtual_stages = number()?,
                "context" => fixed.context = number()?,
                "expert" => fixed.expert = number()?,
                "shard_group" => fixed.shard_group = number()?,
                "zero" => {
                    let stage = value.trim().parse().ok().filter(|stage| *stage <= 3);
                    fixed.zero = Some(stage.ok_or_else(|| wrong("ZeRO's stages are 0, 1, 2 and 3"))?);
                }
                "sequence_parallel" => {
                    let chosen = value.trim().parse().map_err(|_| wrong("its value is not true or false"))?;
                    fixed.sequence_parallel = Some(chosen);
                }
                "schedule" => {
                    let known = Schedule::ALL.into_iter().find(|schedule| schedule.name() == value.trim());
                    let no_such = "there is no such schedule (gpipe, 1f1b, interleaved, zb-h1, zb-v)";
                    fixed.schedule = Some(known.ok_or_else(|| wrong(no_such))?);
                }
                "recompute" => {
                    fixed.recompute = Some(match value.trim() {
                        "none" => Recompute::None,
                        "selective" => Recompute::Selective,
                        "full" => Recompute::Full,
                        _ => return Err(wrong("recompute is none, selective or full")),
                    });
                }
                _ => return Err(wrong("there is no such choice")),
            }
        }
        Ok(fixed)
    }
}

/// Every layout of `global_batch` samples over at most `devices` devices. Where `fixed` says all three of `data`, `tensor` and `pipeline`
/// that is the one mesh, if there are as many devices. Else a mesh always has a divisor of the devices: what is left idle then is whole
/// nodes' worth.
pub fn layouts(base: &Layout, devices: usize, blocks: usize, global_batch: usize, fixed: &Fixed) -> Vec<Layout> {
    let mut layouts = Vec::new();
    let (context, expert) = (fixed.context.unwrap_or(1), fixed.expert.unwrap_or(1));
    let base = Layout {
        context,
        expert,
        zero: fixed.zero.unwrap_or(base.zero),
        shard_group: fixed.shard_group.or(base.shard_group),
        sequence_parallel: fixed.sequence_parallel.unwrap_or(base.sequence_parallel),
        ..base.clone()
    };
    // What is left for the other axes.
    let devices = context.checked_mul(expert).map_or(0, |ranks| devices / ranks);
    let worlds = match (fixed.data, fixed.tensor, fixed.pipeline) {
        (Some(data), Some(tensor), Some(pipeline)) => {
            let world = data.checked_mul(tensor).and_then(|ranks| ranks.checked_mul(pipeline));
            world.filter(|&ranks| ranks <= devices).into_iter().collect()
        }
        _ => divisors(devices),
    };
    for world in worlds {
        for tensor in divisors(world).into_iter().filter(|&size| fixed.tensor.is_none_or(|fixed| fixed == size)) {
            let stages = divisors(world / tensor).into_iter();
            for pipeline in stages.filter(|&size| fixed.pipeline.is_none_or(|fixed| fixed == size)) {
                let data = world / tensor / pipeline;
                let possible = fixed.data.is_none_or(|fixed| fixed == data) && pipeline <= blocks;
                if possible && global_batch.is_multiple_of(data * expert) {
                    let mesh = Layout { data, tensor, pipeline, ..base.clone() };
                    layouts.extend(with_micro_batches(&mesh, blocks, global_batch / data / expert, fixed));
                }
            }
        }
    }
    layouts
}

fn with_micro_batches(mesh: &Layout, blocks: usize, samples: usize, fixed: &Fixed) -> Vec<Layout> {
    let mut layouts = Vec::new();
    for micro_batch in divisors(samples) {
        let considered = match fixed.micro_batch {
            Some(fixed) => fixed == micro_batch,
            None => samples / micro_batch <= MOST_MICRO_BATCHES,
        };
        if !considered {
            continue;
        }
        for (schedule, virtual_stages) in schedules(mesh.pipeline, blocks, samples / micro_batch, fixed) {
            let usual = [Recompute::None, Recompute::Full];
            for &recompute in fixed.recompute.as_ref().map_or(&usual[..], std::slice::from_ref) {
                layouts.push(Layout { micro_batch, schedule, virtual_stages, recompute, ..mesh.clone() });
            }
        }
    }
    layouts
}

/// The schedules, each with a number of chunks, that may be of use for a pipeline and that do not contradict what is fixed.
fn schedules(stages: usize, blocks: usize, micro_batches: usize, fixed: &Fixed) -> Vec<(Schedule, usize)> {
    let mut found = Vec::new();
    for schedule in Schedule::ALL {
        // Without a pipeline the order that holds least is as fast as any; and GPipe is nowhere faster than 1F1B, which holds less.
        let sensible = if stages > 1 { schedule != Schedule::Gpipe } else { schedule == Schedule::OneForwardOneBackward };
        if !fixed.schedule.map_or(sensible, |fixed| fixed == schedule) {
            continue;
        }
        // One chunk of an interleaved stage is 1F1B. More than four cost more messages than they save of the bubble.
        let usual: &[usize] = if schedule == Schedule::Interleaved { &[2, 4] } else { &[1, 2] };
        let considered = fixed.virtual_stages.as_ref().map_or(usual, std::slice::from_ref);
        for &chunks in considered.iter().filter(|&&chunks| schedule.allows(chunks)) {
            // With a smaller last group of micro-batches interleaving saves little, and with one alone nothing.
            let is_worth_it = match schedule {
                Schedule::Interleaved => micro_batches.is_multiple_of(stages),
                // A pipeline that is never full is mostly bubble, whatever fills it.
                Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleV => micro_batches >= stages,
                Schedule::Gpipe | Schedule::OneForwardOneBackward => true,
            };
            let is_chosen = fixed.schedule.is_some() || fixed.virtual_stages.is_some();
            if (is_worth_it || is_chosen) && stages.checked_mul(chunks).is_some_and(|positions| positions <= blocks) {
                found.push((schedule, chunks));
            }
        }
    }
    found
}

/// The divisors of a number, ascending: those up to its root, each with its counterpart.
fn divisors(number: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..=number.isqrt()).filter(|&divisor| number.is_multiple_of(divisor)).collect();
    let large = small.iter().rev().map(|divisor| number / divisor).filter(|&large| large > number.isqrt());
    small.iter().copied().chain(large).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fixed_stays_and_the_rest_is_enumerated() {
        let fixed: Fixed = "tensor=2, schedule=gpipe,recompute=none".parse().expect("it is well formed");
        let layouts = layouts(&Layout::default(), 8, 10, 16, &fixed);
        assert!(layouts.iter().all(|layout| layout.tensor == 2 && layout.schedule == Schedule::Gpipe));
        let meshes: std::collections::BTreeSet<_> = layouts.iter().map(|layout| (layout.data, layout.pipeline)).collect();
        assert_eq!(meshes.into_iter().collect::<Vec<_>>(), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]);
    }

    #[test]
    fn a_mesh_that_is_fixed_need_not_divide_the_devices() {
        let fixed: Fixed = "data=3,tensor=1,pipeline=2,micro_batch=2,recompute=none,schedule=1f1b".parse().expect("well formed");
        let found = layouts(&Layout::default(), 8, 10, 12, &fixed);
        assert_eq!(found, [Layout { data: 3, pipeline: 2, micro_batch: 2, ..Layout::default() }]);
        assert!(layouts(&Layout::default(), 5, 10, 12, &fixed).is_empty(), "there are too few devices");
        let enormous: Fixed = "data=4294967296,tensor=4294967296,pipeline=2".parse().expect("well formed");
        assert!(layouts(&Layout::default(), 8, 10, 12, &enormous).is_empty());
    }

    #[test]
    fn divisors_are_all_there_are_ascending() {
        for number in 0usize..200 {
            let all: Vec<usize> = (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).collect();
            assert_eq!(divisors(number), all);
        }
    }

    #[test]
    fn a_mistake_is_named() {
        let error = "tensor=x".parse::<Fixed>().expect_err("not a number").to_string();
        assert!(error.starts_with("`tensor=x` cannot be fixed: its value is not a positive whole number"), "{error}");
        assert!("speed=9".parse::<Fixed>().is_err());
    }
}
