//! Choices that are the user's, and how they are written: `--fix tensor=8,pipeline=4,...`.

use foretell_program::{Axis, CollectiveAlgorithm, ContextMethod, Offload, Recompute, Schedule, StageLayout};
use foretell_units::Bytes;
use thiserror::Error;

/// What may be said of `recompute`.
const RECOMPUTE: &str = "recompute is none, selective, full, full:4 for the first four layers of each stage, or full:4+2+0 for so many of each of three";

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
    /// How all-reduces are made; each as is the fastest where it is left open.
    pub collective: Option<CollectiveAlgorithm>,
    /// What lies in the host's memory.
    pub offload: Option<Offload>,
    /// Bytes of gradients that are reduced together.
    pub bucket: Option<Bytes>,
    /// Meshes of the stages' own: `2x4+2x4+1x8` are three with two, two and one ranks of `data`, and four, four and eight of `tensor`.
    pub stages: Option<Vec<StageLayout>>,
    /// Of each stage its place along the devices, `1+0`: in order where it is so fixed.
    pub stage_places: Option<Vec<usize>>,
    /// Blocks of each chunk of the model, in its order.
    pub cuts: Option<Vec<usize>>,
    /// The order of the axes along the devices, the one whose ranks follow each other first.
    pub placement: Option<Vec<Axis>>,
    /// Samples of each rank of `data`, in units of a micro-batch.
    pub shares: Option<Vec<usize>>,
    /// How attention sees all keys and values where `context` shares out their positions.
    pub context_method: Option<ContextMethod>,
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
        let mut said: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let wrong = |reason: &str| FixedError { part: part.into(), reason: reason.into() };
            let (name, value) = part.split_once('=').ok_or_else(|| wrong("it has no `=`"))?;
            if said.contains(&name.trim()) {
                return Err(wrong("it is said twice"));
            }
            said.push(name.trim());
            let number = || match value.trim().parse::<usize>() {
                Ok(number) if number > 0 => Ok(Some(number)),
                _ => Err(wrong("its value is not a positive whole number")),
            };
            let numbers = || value.split('+').map(|number| number.trim().parse().ok()).collect::<Option<Vec<usize>>>();
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
                "bucket" => {
                    let size = value.trim().parse().ok().filter(|size| *size > Bytes::ZERO);
                    fixed.bucket = Some(size.ok_or_else(|| wrong("a bucket is a size such as 25MiB"))?);
                }
                "stages" => {
                    let stage = |text: &str| {
                        let (data, tensor) = text.split_once('x')?;
                        let sizes = [data, tensor].map(|size| size.trim().parse().ok().filter(|&size: &usize| size > 0));
                        Some(StageLayout { data: sizes[0]?, tensor: sizes[1]?, ..StageLayout::default() })
                    };
                    let stages: Option<Vec<StageLayout>> = value.split('+').map(stage).collect();
                    fixed.stages = Some(stages.ok_or_else(|| wrong("stages are `data` x `tensor` of each, such as 2x4+1x8"))?);
                }
                "stage_places" => {
                    let places = numbers().ok_or_else(|| wrong("places are numbers such as 2+3+0+1, from 0 on"))?;
                    fixed.stage_places = Some(places);
                }
                "cuts" => {
                    let cuts = numbers().filter(|cuts| !cuts.contains(&0));
                    fixed.cuts = Some(cuts.ok_or_else(|| wrong("cuts are the blocks of each chunk, such as 4+4+3"))?);
                }
                "shares" => {
                    let shares = numbers().filter(|shares| !shares.contains(&0));
                    fixed.shares =
                        Some(shares.ok_or_else(|| wrong("shares are the samples of each rank of `data`, such as 1+3"))?);
                }
                "placement" => {
                    let axis = |name: &str| Axis::ALL.into_iter().find(|axis| axis.name() == name.trim());
                    let axes: Option<Vec<Axis>> = value.split('+').map(axis).collect();
                    fixed.placement = Some(axes.ok_or_else(|| {
                        wrong("axes are tensor, context, expert, data and pipeline, such as tensor+pipeline+data")
                    })?);
                }
                "context_method" => {
                    let known = ContextMethod::ALL.into_iter().find(|method| method.name() == value.trim());
                    fixed.context_method = Some(known.ok_or_else(|| wrong("context_method is gather or ring"))?);
                }
                "offload" => {
                    let known = Offload::ALL.into_iter().find(|offload| offload.name() == value.trim());
                    fixed.offload = Some(known.ok_or_else(|| wrong("offload is none, optimizer, activations or both"))?);
                }
                "collective" => {
                    let known = CollectiveAlgorithm::ALL.into_iter().find(|algorithm| algorithm.name() == value.trim());
                    fixed.collective = Some(known.ok_or_else(|| wrong("collective is automatic, ring or tree"))?);
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
                        other => {
                            let layers = other.strip_prefix("full:").map(|layers| layers.split('+').map(str::parse).collect());
                            match layers {
                                Some(Ok::<Vec<usize>, _>(layers)) if layers.iter().any(|&layers| layers > 0) => {
                                    match layers[..] {
                                        [layers] => Recompute::FullLayers(layers),
                                        _ => Recompute::FullLayersOfStages(layers),
                                    }
                                }
                                _ => return Err(wrong(RECOMPUTE)),
                            }
                        }
                    });
                }
                _ => return Err(wrong("there is no such choice")),
            }
        }
        // As many ranks and stages as there are numbers for.
        if let (Some(shares), None) = (&fixed.shares, fixed.data) {
            fixed.data = Some(shares.len());
        }
        if let (Some(cuts), None) = (&fixed.cuts, fixed.pipeline) {
            fixed.pipeline = Some((cuts.len() / fixed.virtual_stages.unwrap_or(1)).max(1));
        }
        Ok(fixed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_is_named() {
        let error = "tensor=x".parse::<Fixed>().expect_err("not a number").to_string();
        assert!(error.starts_with("`tensor=x` cannot be fixed: its value is not a positive whole number"), "{error}");
        let twice = "tensor=2,tensor=4".parse::<Fixed>().expect_err("two answers").to_string();
        assert!(twice.starts_with("`tensor=4` cannot be fixed: it is said twice"), "{twice}");
        let some = "recompute=full:3".parse::<Fixed>().expect("well formed").recompute;
        assert_eq!(some, Some(Recompute::FullLayers(3)));
        let of_stages = "recompute=full:3+1+0".parse::<Fixed>().expect("well formed").recompute;
        assert_eq!(of_stages, Some(Recompute::FullLayersOfStages(vec![3, 1, 0])));
        assert!("recompute=full:0".parse::<Fixed>().is_err() && "recompute=full:".parse::<Fixed>().is_err());
        let lying = "cuts=4+3,shares=1+3,placement=tensor+pipeline,context_method=ring".parse::<Fixed>().expect("well formed");
        assert_eq!((lying.cuts, lying.shares), (Some(vec![4, 3]), Some(vec![1, 3])));
        let method = lying.context_method;
        assert_eq!((lying.placement, method), (Some(vec![Axis::Tensor, Axis::Pipeline]), Some(ContextMethod::Ring)));
        for wrong in ["cuts=4+0", "cuts=a", "shares=0", "placement=tensor+rows", "context_method=star", "speed=9"] {
            assert!(wrong.parse::<Fixed>().is_err(), "{wrong}");
        }
    }
}
