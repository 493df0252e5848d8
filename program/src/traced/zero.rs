//! DeepSpeed's ZeRO: what its optimizers allocate, copy and send, as Hugging Face's Trainer runs
//! them.
//!
//! Without `data_types.grad_accum_dtype`, which the Trainer does not set, gradients accumulate in
//! the model's format. `DeepSpeedEngine._do_optimizer_sanity_check` then takes
//! `DeepSpeedZeroOptimizer` for stages 1 and 2, never `BF16_Optimizer`, and
//! `DeepSpeedZeroOptimizer_Stage3` for stage 3. Gradients are sent in the model's format, too
//! (`communication_data_type`).
//!
//! Source: DeepSpeed 0.19.6 (commit `edaa7221`), `deepspeed/runtime/engine.py` and
//! `deepspeed/runtime/zero/`. Each buffer names the function that makes it.

mod gradient_stages;
mod modules;
mod offload;
mod parameter_stage;

#[cfg(test)]
mod tests;

pub(super) use gradient_stages::GradientStages;
pub(super) use parameter_stage::ParameterStage;

use super::{AllocationStream, Contents, Emitter, HostOptimizer, ParameterOf, RankEvent, TrainedTensor};
use std::collections::BTreeMap;

/// Values of DeepSpeed's configuration, in elements.
#[derive(Clone, Copy, Debug)]
struct ZeroSettings {
    /// `reduce_bucket_size`.
    reduce_bucket: u64,
    /// `stage3_prefetch_bucket_size`.
    prefetch_bucket: u64,
    /// `stage3_param_persistence_threshold`.
    persistence: u64,
}

/// `stage3_max_reuse_distance`: parameters that are used again before so many others are not
/// released.
const REUSE_DISTANCE: u64 = 1_000_000_000;

/// `stage3_max_live_parameters`: gathering ahead stops at so many.
const MAX_LIVE: u64 = 1_000_000_000;

/// `sub_group_size`: stage 3 updates parameters in groups whose partitions have so many elements.
const SUB_GROUP: u64 = 1_000_000_000;

/// Makes a partition's gradients one buffer in single precision, from the model's format of `width`
/// bytes. Returns the buffer's allocation.
fn single_gradients<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, elements: u64, width: u64) -> u64 {
    let flat = emitter.allocate(elements * width, Contents::Gradients, AllocationStream::Compute);
    emitter.send(RankEvent::Moves { name: "flat gradients", bytes: 2 * elements * width, launches: 1 });
    if width >= 4 {
        return flat;
    }
    let single = emitter.allocate(elements * 4, Contents::Gradients, AllocationStream::Compute);
    let bytes = elements * (width + 4);
    emitter.send(RankEvent::Moves { name: "gradients in single precision", bytes, launches: 1 });
    emitter.release(flat);
    single
}

/// Clips a partition's gradients, and updates its copy of the parameters in single precision.
fn clip_and_step<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, elements: u64) {
    emitter.send(RankEvent::Moves { name: "gradients' clipping", bytes: 8 * elements, launches: 1 });
    let optimizer = emitter.job.optimizer;
    optimizer.step(emitter, &[TrainedTensor::flat(elements, 4)]);
}

/// Copies a partition's updated parameters into the model's, of `width` bytes.
fn copy_to_parameters<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, elements: u64, width: u64) {
    let bytes = elements * (4 + width);
    emitter.send(RankEvent::Moves { name: "copy to the model's parameters", bytes, launches: 1 });
}

/// Computes the norm of the gradients of `elements` elements, in double precision
/// (`get_grad_norm_direct`). The largest of a rank's tensors has `largest`.
fn gradient_norm<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, [elements, largest]: [u64; 2], width: u64) {
    emitter.passing(8 * largest, Contents::Gradients, AllocationStream::Compute);
    emitter.send(RankEvent::Moves { name: "gradients' norm", bytes: (width + 16) * elements, launches: 2 });
}

impl ZeroSettings {
    /// DeepSpeed's defaults (`zero/config.py`) for stages 1 and 2. For stage 3 what Transformers
    /// computes for `auto`, as in its example (`trainer_config_finalize` in
    /// `transformers/integrations/deepspeed.py`).
    fn new<V>(emitter: &Emitter<'_, V>, stage: u8) -> Self {
        let hidden = emitter.job.sizes.symbols.get("h").map(|hidden| hidden.round() as u64);
        match hidden.filter(|_| stage == 3) {
            Some(hidden) => ZeroSettings {
                reduce_bucket: hidden * hidden,
                prefetch_bucket: hidden * hidden * 9 / 10,
                persistence: 10 * hidden,
            },
            None => ZeroSettings { reduce_bucket: 500_000_000, prefetch_bucket: 50_000_000, persistence: 100_000 },
        }
    }
}

/// All parameters in the order in which a model names them: layer by layer, and within a mixture
/// expert by expert.
fn in_model_order<'a, V: FnMut(RankEvent<'a>)>(emitter: &Emitter<'a, V>) -> Vec<ParameterOf> {
    let table = &emitter.job.table;
    let mut firsts: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, parameter) in table.parameters.iter().enumerate() {
        if let Some(stack) = &parameter.stack {
            firsts.entry(stack).or_insert(index);
        }
    }
    let first = |parameter: &ParameterOf| {
        let stack = table.parameters[parameter.index].stack.as_deref();
        stack.and_then(|stack| firsts.get(stack).copied()).unwrap_or(parameter.index)
    };
    // What each expert has is listed in one piece.
    let mut places: Vec<usize> = (0..table.parameters.len()).collect();
    for index in 1..places.len() {
        if table.parameters[index - 1].is_of_each_expert() && table.parameters[index].is_of_each_expert() {
            places[index] = places[index - 1];
        }
    }
    let mut parameters = emitter.parameters();
    parameters
        .sort_by_key(|parameter| (first(parameter), parameter.layer, places[parameter.index], parameter.expert, parameter.index));
    parameters
}

/// The group of the optimizer that a parameter is in: 0 with weight decay, 1 without, for vectors
/// such as biases and norms' weights (`Trainer.get_decay_parameter_names`).
fn optimizer_group<V>(emitter: &Emitter<'_, V>, parameter: ParameterOf) -> usize {
    usize::from(emitter.job.table.parameters[parameter.index].own_dimensions().len() < 2)
}
