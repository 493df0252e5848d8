//! A case of the law: a model, a layout and the text of the plan. Also the layouts whose ranks have
//! unequal shares or whose stages have different meshes.

use super::is_convolutional;

#[derive(Clone, Debug)]
pub struct Case {
    pub model: &'static str,
    pub data: usize,
    pub tensor: usize,
    pub pipeline: usize,
    pub context: usize,
    pub context_method: &'static str,
    pub context_order: &'static str,
    pub expert: usize,
    pub micro_batch: usize,
    pub micro_batches: usize,
    /// The schedule's name, and the number of chunks per stage.
    pub schedule: (&'static str, usize),
    /// Number of blocks in each chunk. `None`: the compiler chooses.
    pub cuts: Option<Vec<usize>>,
    pub recompute: &'static str,
    pub offload: &'static str,
    /// The positions of a chunk of the loss and of a chunk of an MLP.
    pub chunks: [Option<usize>; 2],
    pub optimizer: &'static str,
    pub bucket: &'static str,
    /// The stage of ZeRO, 0 to 3.
    pub zero: usize,
    /// Whether ZeRO's shard groups have two ranks instead of all four of `data`.
    pub hybrid: bool,
    pub sequence_parallel: bool,
    pub clip: bool,
    /// Further entries of the plan's `training`, each after a comma.
    pub recipe: &'static str,
    /// Whether communication does not overlap with kernels.
    pub blocking: bool,
    /// Whether forward and backward passes of different micro-batches are woven.
    pub weaves: bool,
    /// Whether the tensor axis distributes whole experts instead of sharding each one.
    pub whole_experts: bool,
    /// How the tensor axis shards single operators: the plan's `operators`.
    pub operators: &'static str,
    pub precision: &'static str,
    pub seed: u64,
    /// Unequal shares or a mesh per stage. Replaces `data`, `tensor`, `context` and `expert`.
    pub uneven: Option<Uneven>,
}

/// A layout with unequal shares or with a mesh per stage.
#[derive(Clone, Copy, Debug)]
pub struct Uneven {
    /// The entries of the plan's `layout`.
    pub text: &'static str,
    /// Number of stages.
    pub pipeline: usize,
    /// Number of parts into which the first stage divides a batch: the sum of its shares.
    pub parts: usize,
}

pub const fn uneven(text: &'static str, pipeline: usize, parts: usize) -> Uneven {
    Uneven { text, pipeline, parts }
}

/// Layouts with unequal shares and equal stages.
pub const SHARES: [Uneven; 4] = [
    uneven("data: 2, shares: [2, 1]", 1, 3),
    uneven("data: 2, tensor: 2, shares: [1, 3]", 1, 4),
    uneven("data: 3, shares: [1, 2, 1]", 1, 4),
    uneven("data: 2, shares: [3, 1], pipeline: 2", 2, 4),
];

/// Layouts whose stages have different meshes.
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

/// Layouts whose stages have different meshes and shard sequences.
pub const SEQUENCES: [Uneven; 3] = [
    uneven("pipeline: 2, stages: [{context: 2}, {tensor: 2}]", 2, 1),
    uneven("pipeline: 2, stages: [{data: 2, context: 2}, {context: 4}]", 2, 2),
    uneven("pipeline: 2, stages: [{tensor: 2, context: 2}, {data: 2, context: 1}]", 2, 1),
];

impl Case {
    /// A model on one rank: two micro-batches of two samples, AdamW, single precision.
    pub fn usual(model: &'static str) -> Self {
        Self {
            model,
            data: 1,
            tensor: 1,
            pipeline: 1,
            context: 1,
            context_method: "gather",
            context_order: "zigzag",
            expert: 1,
            micro_batch: 2,
            micro_batches: 2,
            schedule: ("1f1b", 1),
            cuts: None,
            recompute: "none",
            offload: "none",
            chunks: [None; 2],
            optimizer: "adamw",
            bucket: "4KiB",
            zero: 0,
            hybrid: false,
            sequence_parallel: false,
            clip: false,
            recipe: "",
            blocking: false,
            weaves: false,
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

    /// Returns the text of the plan.
    ///
    /// Adam's epsilon is large. With the default, the first updates are nearly the signs of the
    /// gradients, even where a gradient is only rounding error. The loss scale of fp16 is small,
    /// because with the default, rounding may decide whether a gradient overflows and a step is
    /// skipped.
    pub fn plan(&self) -> String {
        let Case { model, data, tensor, pipeline, context, expert, micro_batch, schedule, recompute, optimizer, bucket, .. } =
            self;
        let Case { zero, sequence_parallel, precision, context_method, context_order, operators, offload, .. } = self;
        let (schedule, virtual_stages) = schedule;
        let cuts = self.cuts.as_ref().map_or(String::new(), |cuts| format!(", cuts: {cuts:?}"));
        let chunks: String = ["loss_chunk", "mlp_chunk"]
            .into_iter()
            .zip(self.chunks)
            .filter_map(|(name, size)| Some(format!(", {name}: {}", size?)))
            .collect();
        let batch = self.global_batch();
        let learning_rate = if is_convolutional(model) && *precision != "fp32" { 0.001 } else { 0.01 };
        let shard_group = if self.hybrid && *zero > 0 && *data == 4 && self.uneven.is_none() { ", shard_group: 2" } else { "" };
        let experts = if self.whole_experts { ", expert_tensor: 1" } else { "" };
        let clip = if self.clip { ", clip_norm: 0.5" } else { "" };
        let recipe = self.recipe;
        let overlap = match (self.blocking, self.weaves) {
            (true, false) => "overlap: {tensor: false, context: false, expert: false, gradients: false, parameters: false}\n",
            (true, true) => "overlap: {tensor: false, context: false, gradients: false, parameters: false, passes: true}\n",
            (false, true) => "overlap: {passes: true}\n",
            (false, false) => "",
        };
        let mesh = match self.uneven {
            Some(uneven) => uneven.text.into(),
            None => format!("data: {data}, tensor: {tensor}, pipeline: {pipeline}, context: {context}, expert: {expert}"),
        };
        // With an even number of micro-batches the stages lie on the devices in reverse order.
        let places: Vec<usize> = (0..self.uneven.map_or(*pipeline, |uneven| uneven.pipeline)).rev().collect();
        let is_reversed = places.len() > 1 && self.micro_batches.is_multiple_of(2);
        let places = if is_reversed { format!(", stage_places: {places:?}") } else { String::new() };
        format!(
            "model: {model}\ntopology: local\nglobal_batch: {batch}\nprecision: {precision}\noptimizer: {optimizer}\n\
             batch_norm_group: 2\n\
             training: {{learning_rate: {learning_rate}, epsilon: 1e-3, loss_scale: {{initial: 256}}{clip}{recipe}}}\n\
             layout: {{{mesh}, context_method: {context_method}, context_order: {context_order}, \
             micro_batch: {micro_batch}, schedule: {schedule}, virtual_stages: {virtual_stages}, recompute: {recompute}, offload: {offload}, bucket: {bucket}, zero: {zero}{shard_group}, \
             sequence_parallel: {sequence_parallel}, operators: {operators}{experts}{cuts}{places}{chunks}}}\n{overlap}"
        )
    }

    /// The case with the same samples on one rank, in one micro-batch.
    pub fn on_one_rank(&self) -> Case {
        let micro_batch = self.global_batch();
        Case {
            data: 1,
            tensor: 1,
            pipeline: 1,
            context: 1,
            context_method: "gather",
            context_order: "zigzag",
            expert: 1,
            micro_batch,
            micro_batches: 1,
            recompute: "none",
            offload: "none",
            chunks: [None; 2],
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
