//! Layout fields that the user has fixed, and their text form: `--fix tensor=8,pipeline=4,...`.

use foretell_program::{Axis, CollectiveAlgorithm, ContextMethod, ContextOrder, Offload, Recompute, Schedule, StageLayout};
use foretell_simulator::gpu::StackLimits;
use foretell_units::Bytes;
use miette::Diagnostic;
use thiserror::Error;

/// Layout fields that the user has fixed. `None` leaves a field to the search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fixed {
    /// Data-parallel ranks.
    pub data: Option<usize>,
    /// Tensor-parallel ranks.
    pub tensor: Option<usize>,
    /// Pipeline stages.
    pub pipeline: Option<usize>,
    /// Samples of a micro-batch.
    pub micro_batch: Option<usize>,
    /// Pipeline schedule.
    pub schedule: Option<Schedule>,
    /// Model chunks of each stage.
    pub virtual_stages: Option<usize>,
    /// Activations to recompute.
    pub recompute: Option<Recompute>,
    /// Context-parallel ranks.
    pub context: Option<usize>,
    /// Expert-parallel ranks.
    pub expert: Option<usize>,
    /// Stage of ZeRO, 0 to 3.
    pub zero: Option<usize>,
    /// Ranks of a shard group.
    pub shard_group: Option<usize>,
    /// Whether norms and dropout are sharded over `tensor` along the sequence.
    pub sequence_parallel: Option<bool>,
    /// Algorithm of all-reduces.
    pub collective: Option<CollectiveAlgorithm>,
    /// State to keep in host memory.
    pub offload: Option<Offload>,
    /// Bytes of gradients that are reduced together.
    pub bucket: Option<Bytes>,
    /// A mesh for each stage: `2x4+2x4+1x8` is three stages with 2, 2 and 1 data-parallel ranks and
    /// 4, 4 and 8 tensor-parallel ranks.
    pub stages: Option<Vec<StageLayout>>,
    /// Position of each stage along the devices, from 0.
    pub stage_places: Option<Vec<usize>>,
    /// Blocks of each chunk, in model order.
    pub cuts: Option<Vec<usize>>,
    /// Rank order: mesh axes, the one whose ranks are on neighbouring devices first.
    pub rank_order: Option<Vec<Axis>>,
    /// Samples of each data-parallel rank, in micro-batches.
    pub shares: Option<Vec<usize>>,
    /// How attention gets the keys and values of other context-parallel ranks.
    pub context_method: Option<ContextMethod>,
    /// Order in which context-parallel ranks hold the positions of a sequence.
    pub context_order: Option<ContextOrder>,
    /// Most positions of a rank's micro-batch whose logits are in memory at once.
    pub loss_chunk: Option<usize>,
    /// Most positions of a rank's micro-batch that are at once in an MLP.
    pub mlp_chunk: Option<usize>,
}

impl Fixed {
    /// Fixes the fields for which a framework supports one value only, unless the user has fixed
    /// them, since a fork of the framework may support more. The sizes of a layout with `stages`
    /// are stated there.
    pub fn within(&mut self, limits: &StackLimits) {
        if !limits.splits_models && self.stages.is_none() {
            for size in [&mut self.tensor, &mut self.pipeline, &mut self.context, &mut self.expert] {
                size.get_or_insert(1);
            }
        }
        if !limits.shards_state {
            self.zero.get_or_insert(0);
        }
        if !limits.offloads {
            self.offload.get_or_insert(Offload::None);
        }
    }
}

/// A `--fix` that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
#[error("`{part}` cannot be fixed: {reason}")]
#[diagnostic(code(planner::fixed), help("write for example `tensor=2,pipeline=2,micro_batch=4,recompute=full`"))]
pub struct FixedError {
    /// The `name=value` at fault.
    part: String,
    /// What is wrong with it.
    reason: String,
}

impl std::str::FromStr for Fixed {
    type Err = FixedError;

    fn from_str(text: &str) -> Result<Self, FixedError> {
        let mut fixed = Fixed::default();
        let mut seen: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let wrong = |reason: &str| FixedError { part: part.into(), reason: reason.into() };
            let (name, value) = part.split_once('=').ok_or_else(|| wrong("it has no `=`"))?;
            let (name, value) = (name.trim(), value.trim());
            if seen.contains(&name) {
                return Err(wrong("it is given twice"));
            }
            seen.push(name);
            fixed.set(name, value).map_err(|reason| wrong(&reason))?;
        }
        // A list of recomputed layers has a number for each stage.
        if let Some(Recompute::FullLayersOfStages(layers)) = &fixed.recompute {
            let stages = layers.len();
            let stated = fixed.stages.as_ref().map(Vec::len).or(fixed.pipeline);
            if stated.is_some_and(|stated| stated != stages) {
                let reason =
                    format!("it has a number for each of {stages} stages, and other values state another number of stages");
                let part = text.split(',').map(str::trim).find(|part| part.starts_with("recompute"));
                return Err(FixedError { part: part.expect("invariant: a part fixed it").into(), reason });
            }
            fixed.pipeline = Some(stages);
        }
        // The lengths of `shares` and `cuts` give `data` and `pipeline` if these are not fixed
        // themselves.
        if let (Some(shares), None) = (&fixed.shares, fixed.data) {
            fixed.data = Some(shares.len());
        }
        if let (Some(cuts), None) = (&fixed.cuts, fixed.pipeline) {
            fixed.pipeline = Some((cuts.len() / fixed.virtual_stages.unwrap_or(1)).max(1));
        }
        Ok(fixed)
    }
}

impl Fixed {
    /// Sets the field `name` to the value written as `value`.
    ///
    /// # Errors
    /// A message about the name or the value.
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "data" => self.data = Some(positive(value)?),
            "tensor" => self.tensor = Some(positive(value)?),
            "pipeline" => self.pipeline = Some(positive(value)?),
            "micro_batch" => self.micro_batch = Some(positive(value)?),
            "virtual_stages" => self.virtual_stages = Some(positive(value)?),
            "context" => self.context = Some(positive(value)?),
            "expert" => self.expert = Some(positive(value)?),
            "shard_group" => self.shard_group = Some(positive(value)?),
            "zero" => {
                let stage = value.parse().ok().filter(|stage| *stage <= 3);
                self.zero = Some(stage.ok_or("ZeRO's stages are 0, 1, 2 and 3")?);
            }
            "sequence_parallel" => {
                self.sequence_parallel = Some(value.parse().map_err(|_| "its value is not true or false")?);
            }
            "bucket" => {
                let size = value.parse().ok().filter(|size| *size > Bytes::ZERO);
                self.bucket = Some(size.ok_or("a bucket is a size such as 25MiB")?);
            }
            "stages" => {
                let stages: Option<Vec<StageLayout>> = value.split('+').map(stage_mesh).collect();
                self.stages = Some(stages.ok_or("stages are `data` x `tensor` of each, such as 2x4+1x8")?);
            }
            "stage_places" => {
                self.stage_places = Some(numbers(value).ok_or("places are numbers such as 2+3+0+1, from 0 on")?);
            }
            "cuts" => {
                let cuts = numbers(value).filter(|cuts| !cuts.contains(&0));
                self.cuts = Some(cuts.ok_or("cuts are the blocks of each chunk, such as 4+4+3")?);
            }
            "shares" => {
                let shares = numbers(value).filter(|shares| !shares.contains(&0));
                self.shares = Some(shares.ok_or("shares are the samples of each rank of `data`, such as 1+3")?);
            }
            "placement" => {
                let axis = |name: &str| Axis::ALL.into_iter().find(|axis| axis.name() == name.trim());
                let axes: Option<Vec<Axis>> = value.split('+').map(axis).collect();
                self.rank_order =
                    Some(axes.ok_or("axes are tensor, context, expert, data and pipeline, such as tensor+pipeline+data")?);
            }
            "context_method" => self.context_method = Some(one_of(name, value, &ContextMethod::ALL, ContextMethod::name)?),
            "context_order" => self.context_order = Some(one_of(name, value, &ContextOrder::ALL, ContextOrder::name)?),
            "loss_chunk" => self.loss_chunk = Some(positive(value)?),
            "mlp_chunk" => self.mlp_chunk = Some(positive(value)?),
            "offload" => self.offload = Some(one_of(name, value, &Offload::ALL, Offload::name)?),
            "collective" => {
                self.collective = Some(one_of(name, value, &CollectiveAlgorithm::ALL, CollectiveAlgorithm::name)?);
            }
            "schedule" => self.schedule = Some(one_of(name, value, &Schedule::ALL, Schedule::name)?),
            "recompute" => self.recompute = Some(recompute(value)?),
            _ => return Err("there is no such layout field".into()),
        }
        Ok(())
    }
}

fn positive(value: &str) -> Result<usize, &'static str> {
    value.parse().ok().filter(|&number| number > 0).ok_or("its value is not a positive whole number")
}

/// Reads whole numbers joined by `+`.
fn numbers(value: &str) -> Option<Vec<usize>> {
    value.split('+').map(|number| number.trim().parse().ok()).collect()
}

/// Reads a stage's `data` x `tensor`.
fn stage_mesh(text: &str) -> Option<StageLayout> {
    let (data, tensor) = text.split_once('x')?;
    let size = |text: &str| text.trim().parse().ok().filter(|&size: &usize| size > 0);
    Some(StageLayout { data: size(data)?, tensor: size(tensor)?, ..StageLayout::default() })
}

/// Returns the choice that is called `value`.
fn one_of<Choice: Copy>(
    field: &str,
    value: &str,
    choices: &[Choice],
    name: fn(Choice) -> &'static str,
) -> Result<Choice, String> {
    let known = choices.iter().copied().find(|&choice| name(choice) == value);
    known.ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|&choice| name(choice)).collect();
        format!("{field} is one of {}", names.join(", "))
    })
}

fn recompute(value: &str) -> Result<Recompute, &'static str> {
    match value {
        "none" => return Ok(Recompute::None),
        "selective" => return Ok(Recompute::Selective),
        "full" => return Ok(Recompute::Full),
        _ => {}
    }
    let layers = value.strip_prefix("full:").and_then(numbers).filter(|layers| layers.iter().any(|&layers| layers > 0));
    match layers.as_deref() {
        Some([layers]) => Ok(Recompute::FullLayers(*layers)),
        Some(layers) => Ok(Recompute::FullLayersOfStages(layers.to_vec())),
        None => Err(
            "recompute is none, selective, full, full:4 for the first four layers of each stage, or full:4+2+0 for the first \
             layers of three stages",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_program::Stack;

    #[test]
    fn an_error_names_the_part_at_fault() {
        let error = "tensor=x".parse::<Fixed>().expect_err("not a number").to_string();
        assert!(error.starts_with("`tensor=x` cannot be fixed: its value is not a positive whole number"), "{error}");
        let twice = "tensor=2,tensor=4".parse::<Fixed>().expect_err("two values").to_string();
        assert!(twice.starts_with("`tensor=4` cannot be fixed: it is given twice"), "{twice}");
        for wrong in
            ["cuts=4+0", "cuts=a", "shares=0", "placement=tensor+rows", "context_method=star", "context_order=star", "speed=9"]
        {
            assert!(wrong.parse::<Fixed>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn recomputed_layers_are_read_for_all_stages_or_for_each() {
        let some = "recompute=full:3".parse::<Fixed>().expect("well formed").recompute;
        assert_eq!(some, Some(Recompute::FullLayers(3)));
        let of_stages = "recompute=full:3+1+0".parse::<Fixed>().expect("well formed").recompute;
        assert_eq!(of_stages, Some(Recompute::FullLayersOfStages(vec![3, 1, 0])));
        assert_eq!("recompute=full:3+1+0".parse::<Fixed>().expect("well formed").pipeline, Some(3));
        let other = "pipeline=2,recompute=full:3+1+0".parse::<Fixed>().expect_err("two numbers of stages").to_string();
        assert!(other.starts_with("`recompute=full:3+1+0` cannot be fixed: it has a number for each of 3 stages"), "{other}");
        assert!("recompute=full:0".parse::<Fixed>().is_err() && "recompute=full:".parse::<Fixed>().is_err());
    }

    #[test]
    fn lists_are_joined_by_plus_signs() {
        let fixed = "cuts=4+3,shares=1+3,placement=tensor+pipeline,context_method=ring,context_order=contiguous"
            .parse::<Fixed>()
            .expect("well formed");
        assert_eq!((fixed.cuts, fixed.shares), (Some(vec![4, 3]), Some(vec![1, 3])));
        assert_eq!(fixed.rank_order, Some(vec![Axis::Tensor, Axis::Pipeline]));
        assert_eq!(fixed.context_method, Some(ContextMethod::Ring));
        assert_eq!(fixed.context_order, Some(ContextOrder::Contiguous));
        let fixed: Fixed = "loss_chunk=1024,mlp_chunk=512".parse().expect("well formed");
        assert_eq!((fixed.loss_chunk, fixed.mlp_chunk), (Some(1024), Some(512)));
    }

    #[test]
    fn what_the_user_fixes_goes_before_the_stack() {
        let within = |text: &str, stack: &str| {
            let mut fixed: Fixed = text.parse().expect("it is well formed");
            fixed.within(StackLimits::of(&Stack::new(stack)).expect("the stack has limits"));
            fixed
        };
        let fixed = within("tensor=2", "ddp");
        assert_eq!((fixed.tensor, fixed.pipeline, fixed.zero), (Some(2), Some(1), Some(0)));
        let fixed = within("", "fsdp");
        assert_eq!((fixed.tensor, fixed.expert, fixed.zero), (Some(1), Some(1), None));
        assert_eq!(fixed.offload, Some(Offload::None));
        assert_eq!(within("offload=both", "megatron-core").offload, Some(Offload::Both));
        assert_eq!(within("", "maxtext-tpu").offload, None);
    }
}
