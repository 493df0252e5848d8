//! A case of the law: a layout, what it trains, and its plan's text; and layouts that are not the
//! same for all ranks.

use super::is_convolutional;

#[derive(Clone, Debug)]
pub struct Case {
    pub model: &'static str,
    pub data: usize,
    pub tensor: usize,
    pub pipeline: usize,
    pub context: usize,
    pub context_method: &'static str,
    pub expert: usize,
    pub micro_batch: usize,
    pub micro_batches: usize,
    /// With the number of chunks a stage.
    pub schedule: (&'static str, usize),
    /// Blocks of each chunk; none: as even as can be.
    pub cuts: Option<Vec<usize>>,
    pub recompute: &'static str,
    pub offload: &'static str,
    pub optimizer: &'static str,
    pub bucket: &'static str,
    /// ZeRO's stage, and whether its shard groups are smaller than all of `data`.
    pub zero: usize,
    pub hybrid: bool,
    pub sequence_parallel: bool,
    pub clip: bool,
    /// Whether kernels wait for communication.
    pub blocking: bool,
    /// Whether `tensor` takes whole experts.
    pub whole_experts: bool,
    /// What `tensor` shards of single operators.
    pub operators: &'static str,
    pub precision: &'static str,
    pub seed: u64,
    /// In place of `data`, `tensor`, `context`, `expert`: unequal shares, or meshes of the stages'
    /// own.
    pub uneven: Option<Uneven>,
}

/// A layout that is not the same for all ranks: its text, its stages, and the parts into which its
/// first stage cuts samples.
#[derive(Clone, Copy, Debug)]
pub struct Uneven {
    pub text: &'static str,
    pub pipeline: usize,
    pub parts: usize,
}

pub const fn uneven(text: &'static str, pipeline: usize, parts: usize) -> Uneven {
    Uneven { text, pipeline, parts }
}

/// Of shares that are not equal, in stages that are.
pub const SHARES: [Uneven; 4] = [
    uneven("data: 2, shares: [2, 1]", 1, 3),
    uneven("data: 2, tensor: 2, shares: [1, 3]", 1, 4),
    uneven("data: 3, shares: [1, 2, 1]", 1, 4),
    uneven("data: 2, shares: [3, 1], pipeline: 2", 2, 4),
];

/// Of stages that are not as large as each other.
pub const MESHES: [Uneven; 8] = [
    uneven("pipeline: 2, stages: [{data: 2}, {data: 1}]", 2, 2),
    uneven("pipeline: 2, stages: [{data: 1}, {data: 3, shares: [1, 2, 1]}]", 2, 1),
    uneven("pipeline: 2, stages: [{data: 1}, {tensor: 2}]", 2, 1),
    uneven("pipeline: 2, stages: [{data: 2, tensor: 2}, {data: 2, shares: [1, 1]}]", 2, 2),
    uneven("pipeline: 3, stages: [{tensor: 2}, {data: 2}, {data: 1}]", 3, 1),
    uneven("pipeline: 2, stages: [{data: 4}, {data: 2, tensor: 2}]", 2, 4),
    uneven("pipeline: 2, stages: [{data: 2, shares: [3, 1]}, {data: 2}]", 2, 4),
    uneven("pipeline: 3, stages: [{data: 1}, {data: 2, tensor: 2}, {data: 1}]", 3, 1),
];

/// The same with sequences that are sharded.
pub const SEQUENCES: [Uneven; 3] = [
    uneven("pipeline: 2, stages: [{context: 2}, {tensor: 2}]", 2, 1),
    uneven("pipeline: 2, stages: [{data: 2, context: 2}, {context: 4}]", 2, 2),
    uneven("pipeline: 2, stages: [{tensor: 2, context: 2}, {data: 2, context: 1}]", 2, 1),
];

impl Case {
    /// A model on one rank: two micro-batches of two samples, AdamW in single precision, and
    /// nothing else asked for.
    pub fn usual(model: &'static str) -> Self {
        Self {
            model,
            data: 1,
            tensor: 1,
            pipeline: 1,
            context: 1,
            context_method: "gather",
            expert: 1,
            micro_batch: 2,
            micro_batches: 2,
            schedule: ("1f1b", 1),
            cuts: None,
            recompute: "none",
            offload: "none",
            optimizer: "adamw",
            bucket: "4KiB",
            zero: 0,
            hybrid: false,
            sequence_parallel: false,
            clip: false,
            blocking: false,
            whole_experts: false,
            operators: "{}",
            precision: "fp32",
            seed: 5,
            uneven: None,
        }
    }

    pub fn global_batch(&self) -> usize {
        let parts = self.uneven.map_or(self.data * self.expert, |uneven| uneven.parts);
        parts * self.micro_batch * self.micro_batches
    }

    /// Adam's epsilon is large: with the usual one its first steps are the signs of gradients, also
    /// of those that are but rounding. fp16's loss scale is small: at the usual one a gradient may
    /// or may not overflow, by rounding, and a step be skipped.
    pub fn plan(&self) -> String {
        let Case { model, data, tensor, pipeline, context, expert, micro_batch, schedule, recompute, optimizer, bucket, .. } =
            self;
        let Case { zero, sequence_parallel, precision, context_method, operators, offload, .. } = self;
        let (schedule, virtual_stages) = schedule;
        let cuts = self.cuts.as_ref().map_or(String::new(), |cuts| format!(", cuts: {cuts:?}"));
        let batch = self.global_batch();
        let learning_rate = if is_convolutional(model) && *precision != "fp32" { 0.001 } else { 0.01 };
        let shard_group = if self.hybrid && *zero > 0 && *data == 4 && self.uneven.is_none() { ", shard_group: 2" } else { "" };
        let experts = if self.whole_experts { ", expert_tensor: 1" } else { "" };
        let clip = if self.clip { ", clip_norm: 0.5" } else { "" };
        let overlap = match self.blocking {
            true => "overlap: {tensor: false, context: false, expert: false, gradients: false, parameters: false}\n",
            false => "",
        };
        let mesh = match self.uneven {
            Some(uneven) => uneven.text.into(),
            None => format!("data: {data}, tensor: {tensor}, pipeline: {pipeline}, context: {context}, expert: {expert}"),
        };
        // In every other case the stages lie the other way round on the devices.
        let places: Vec<usize> = (0..self.uneven.map_or(*pipeline, |uneven| uneven.pipeline)).rev().collect();
        let is_turned = places.len() > 1 && self.micro_batches.is_multiple_of(2);
        let places = if is_turned { format!(", stage_places: {places:?}") } else { String::new() };
        format!(
            "model: {model}\ntopology: local\nglobal_batch: {batch}\nprecision: {precision}\noptimizer: {optimizer}\n\
             batch_norm_group: 2\n\
             training: {{learning_rate: {learning_rate}, epsilon: 1e-3, loss_scale: {{initial: 256}}{clip}}}\n\
             layout: {{{mesh}, context_method: {context_method}, \
             micro_batch: {micro_batch}, schedule: {schedule}, virtual_stages: {virtual_stages}, recompute: {recompute}, offload: {offload}, bucket: {bucket}, zero: {zero}{shard_group}, \
             sequence_parallel: {sequence_parallel}, operators: {operators}{experts}{cuts}{places}}}\n{overlap}"
        )
    }

    /// The same samples on one rank, all at once.
    pub fn on_one_rank(&self) -> Case {
        let micro_batch = self.global_batch();
        Case {
            data: 1,
            tensor: 1,
            pipeline: 1,
            context: 1,
            context_method: "gather",
            expert: 1,
            micro_batch,
            micro_batches: 1,
            recompute: "none",
            offload: "none",
            zero: 0,
            sequence_parallel: false,
            schedule: ("1f1b", 1),
            cuts: None,
            uneven: None,
            operators: "{}",
            ..self.clone()
        }
    }
}
