//! Megatron-LM's `pretrain_gpt.py` with Megatron-Core. It must not know the other frameworks.

mod model;

use super::arguments::Flags;
use super::nearest::{Nearest, bucket_elements, bucket_of, usual_training};
use super::{FrameworkError, ImportedPlan, Job, JobFiles};
use foretell_models::GraphOptions;
use foretell_program::{
    ContextMethod, Layout, Offload, Optimizer, Plan, Recompute, Schedule, Stack, Training, usual_cuts, work_of_blocks,
};
use foretell_units::DataType;

/// The release that the files are for.
const VERSION: &str = "megatron-core 0.19.2";

/// Its stack in our profiles.
const STACK: &str = "megatron-core";

const FRAMEWORK: &str = "Megatron-Core";

/// Arguments as flags with values; an empty value is a switch.
type Arguments = Vec<(&'static str, String)>;

pub(super) fn export(job: &Job<'_>) -> Result<JobFiles, FrameworkError> {
    let model = model::arguments(job.model)?;
    let mut nearest = Nearest::new(job.plan, FRAMEWORK, STACK)?;
    restrict(&mut nearest);
    let work = work_of_blocks(&job.model.graph(job.name, &GraphOptions::ONE).map_err(foretell_program::PlanError::from)?);
    let layout = &mut nearest.plan.layout;
    if layout.pipeline > 1 && layout.cuts.is_none() {
        layout.cuts = Some(usual_cuts(&work, layout.pipeline, layout.virtual_stages));
    }
    let plan = nearest.plan;
    let mut arguments = model;
    arguments.extend(layout_arguments(&plan.layout, work.len()));
    arguments.extend(training_arguments(&plan));
    let [nodes, per_node] = job.nodes()?;
    let lines: Vec<String> = arguments.iter().map(|(name, value)| format!("--{name} {value}").trim_end().to_string()).collect();
    let run = format!(
        "#!/bin/bash\n# {VERSION}, for {} on {nodes} nodes of {per_node} GPUs. Run it on each node, in a checkout of Megatron-LM,\n\
         # with MASTER_ADDR and NODE_RANK set. Synthetic data; replace --mock-data for your own.\n\
         set -e\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\nhere=$(dirname \"$(readlink -f \"$0\")\")\n\
         torchrun --nnodes {nodes} --nproc-per-node {per_node} --node-rank \"${{NODE_RANK:-0}}\" \\\n  \
         --master-addr \"${{MASTER_ADDR:-localhost}}\" --master-port \"${{MASTER_PORT:-29500}}\" \\\n  \
         pretrain_gpt.py $(grep -v '^#' \"$here/megatron.args\") \"$@\"\n",
        job.name,
    );
    let text = format!("# {VERSION}\n{}\n", lines.join("\n"));
    Ok(JobFiles {
        version: VERSION,
        files: vec![("megatron.args".into(), text), ("run.sh".into(), run)],
        command: "bash run.sh".into(),
        plan,
        differences: nearest.differences,
    })
}

/// Replaces what Megatron lacks.
fn restrict(nearest: &mut Nearest) {
    nearest.plain_schedule();
    let layout = &nearest.plan.layout;
    if layout.pipeline > 1 && layout.zero > 1 {
        nearest.replace(|plan| &mut plan.layout.zero, 1, "with pipeline stages only the optimizer's state is sharded: `zero: 1`");
    }
    if nearest.plan.layout.zero == 0 {
        nearest.plan.layout.shard_group = None;
    }
    let recompute = match &nearest.plan.layout.recompute {
        Recompute::FullLayersOfStages(layers) => Some(layers.iter().copied().max().unwrap_or(0)),
        _ => None,
    };
    if let Some(layers) = recompute {
        let difference = format!("every stage recomputes the same number of layers: {layers}");
        nearest.replace(|plan| &mut plan.layout.recompute, Recompute::full_layers(vec![layers]), difference);
    }
    let allowed = match nearest.plan.layout.recompute {
        Recompute::FullLayers(layers) => [Recompute::None, Recompute::Selective, Recompute::Full, Recompute::FullLayers(layers)],
        _ => [Recompute::None, Recompute::Selective, Recompute::Full, Recompute::Full],
    };
    nearest.coarse_recompute(&allowed);
    match nearest.plan.layout.offload {
        Offload::Both => {
            nearest.replace(
                |plan| &mut plan.layout.offload,
                Offload::Optimizer,
                "only the optimizer's state lies in host memory",
            );
        }
        Offload::Activations => {
            nearest.replace(|plan| &mut plan.layout.offload, Offload::None, "activations stay in device memory");
        }
        _ => {}
    }
    if nearest.plan.precision == DataType::Tf32 {
        nearest.replace(|plan| &mut plan.precision, DataType::Fp32, "the precision is fp32");
    }
    nearest.whole_bucket();
    usual_training(&mut nearest.plan);
    nearest.replace(|plan| &mut plan.training.nesterov, false, "Megatron's SGD has no Nesterov momentum");
}

/// The flags of a layout.
fn layout_arguments(layout: &Layout, blocks: usize) -> Arguments {
    let mut arguments: Arguments = vec![
        ("tensor-model-parallel-size", layout.tensor.to_string()),
        ("pipeline-model-parallel-size", layout.pipeline.to_string()),
        ("context-parallel-size", layout.context.to_string()),
    ];
    let mut switch = |name: &'static str, is_on: bool| {
        if is_on {
            arguments.push((name, String::new()));
        }
    };
    switch("sequence-parallel", layout.sequence_parallel);
    switch("use-distributed-optimizer", layout.zero > 0);
    switch("use-megatron-fsdp", layout.zero > 1);
    switch("optimizer-cpu-offload", layout.offload == Offload::Optimizer);
    // Reductions of gradients overlap the backward pass in every plan of this stack.
    switch("overlap-grad-reduce", true);
    switch("overlap-param-gather", layout.zero > 0);
    if layout.context > 1 {
        let method = if layout.context_method == ContextMethod::Ring { "p2p" } else { "all_gather" };
        arguments.push(("cp-comm-type", method.into()));
    }
    let expert_tensor = layout.expert_tensor.unwrap_or(layout.tensor);
    if layout.expert > 1 || layout.expert_tensor.is_some() {
        arguments.push(("expert-model-parallel-size", (layout.expert * layout.tensor / expert_tensor.max(1)).to_string()));
        arguments.push(("expert-tensor-parallel-size", expert_tensor.to_string()));
    }
    match layout.zero {
        2 => arguments.push(("data-parallel-sharding-strategy", "optim_grads".into())),
        3 => arguments.push(("data-parallel-sharding-strategy", "optim_grads_params".into())),
        _ => {}
    }
    if let Some(group) = layout.shard_group {
        arguments.push(("num-distributed-optimizer-instances", (layout.data / group.max(1)).to_string()));
    }
    arguments.push(("ddp-bucket-size", bucket_elements(layout).to_string()));
    if let Some(cuts) = layout.cuts.as_ref().filter(|_| layout.pipeline > 1) {
        arguments.push(("pipeline-model-parallel-layout", pipeline_layout(cuts, blocks)));
    }
    match layout.recompute {
        Recompute::Selective => {
            arguments.push(("recompute-granularity", "selective".into()));
            arguments.push(("recompute-modules", "core_attn".into()));
        }
        Recompute::Full => arguments.extend(full_recompute("uniform", 1)),
        Recompute::FullLayers(layers) => arguments.extend(full_recompute("block", layers)),
        _ => {}
    }
    arguments
}

fn full_recompute(method: &str, layers: usize) -> [(&'static str, String); 3] {
    [("recompute-granularity", "full".into()), ("recompute-method", method.into()), ("recompute-num-layers", layers.to_string())]
}

/// Megatron's layout of a pipeline: E the embedding, t a layer, L the loss, `|` between chunks.
fn pipeline_layout(cuts: &[usize], blocks: usize) -> String {
    let mut first = 0;
    let chunk = |&count: &usize| {
        let range = first..first + count;
        first += count;
        let layers = range.clone().filter(|&block| block > 0 && block + 1 < blocks).count();
        let embedding = if range.contains(&0) { "E" } else { "" };
        let loss = if range.contains(&(blocks.saturating_sub(1))) { "L" } else { "" };
        let layers = match layers {
            0 => String::new(),
            1 => "t".into(),
            many => format!("t*{many}"),
        };
        format!("{embedding}{layers}{loss}")
    };
    cuts.iter().map(chunk).collect::<Vec<_>>().join("|")
}

/// Reads Megatron's layout of a pipeline: the blocks of each chunk.
fn read_pipeline_layout(text: &str) -> Result<Vec<usize>, FrameworkError> {
    let wrong = |reason: String| FrameworkError::Form {
        reason: format!("`--pipeline-model-parallel-layout {text}`: {reason}"),
        hint: "write chunks of E, t, L and their numbers, such as `Et*3|t*4|t*3L`".into(),
    };
    text.replace(',', "")
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
                    let digits = number.len() - number.trim_start_matches(|one: char| one.is_ascii_digit()).len();
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

/// The flags of batches, precision and optimizer.
fn training_arguments(plan: &Plan) -> Arguments {
    let training = &plan.training;
    let mut arguments: Arguments = vec![
        ("micro-batch-size", plan.layout.micro_batch.to_string()),
        ("global-batch-size", plan.global_batch.to_string()),
        ("lr", plan.learning_rate().to_string()),
        ("weight-decay", training.weight_decay.to_string()),
        ("clip-grad", training.clip_norm.unwrap_or(0.0).to_string()),
    ];
    match plan.optimizer {
        Optimizer::Sgd => {
            arguments.push(("optimizer", "sgd".into()));
            arguments.push(("sgd-momentum", training.momentum.to_string()));
        }
        Optimizer::Adam | Optimizer::AdamW | Optimizer::Lamb => {
            arguments.push(("optimizer", "adam".into()));
            arguments.push(("adam-beta1", training.beta1.to_string()));
            arguments.push(("adam-beta2", training.beta2.to_string()));
            arguments.push(("adam-eps", training.epsilon.to_string()));
        }
    }
    match plan.precision {
        DataType::Bf16 => arguments.push(("bf16", String::new())),
        DataType::Fp16 => {
            arguments.push(("fp16", String::new()));
            arguments.push(("initial-loss-scale", training.loss_scale.initial.to_string()));
            arguments.push(("loss-scale-window", training.loss_scale.growth_interval.to_string()));
        }
        DataType::Fp8 => {
            arguments.push(("bf16", String::new()));
            arguments.push(("fp8-format", "hybrid".into()));
        }
        _ => {}
    }
    arguments.extend([
        ("train-iters", "50".into()),
        ("mock-data", String::new()),
        ("eval-iters", "0".into()),
        ("log-interval", "1".into()),
        ("transformer-impl", "transformer_engine".into()),
    ]);
    arguments
}

/// Flags that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 49] = [
    "mock-data",
    "train-iters",
    "train-samples",
    "eval-iters",
    "eval-interval",
    "log-interval",
    "save",
    "save-interval",
    "load",
    "data-path",
    "split",
    "tokenizer-type",
    "tokenizer-model",
    "vocab-file",
    "merge-file",
    "lr-decay-style",
    "lr-decay-iters",
    "lr-warmup-iters",
    "lr-warmup-fraction",
    "min-lr",
    "seed",
    "init-method-std",
    "tensorboard-dir",
    "wandb-project",
    "wandb-exp-name",
    "wandb-save-dir",
    "distributed-backend",
    "distributed-timeout-minutes",
    "log-throughput",
    "log-timers-to-tensorboard",
    "exit-interval",
    "exit-duration-in-mins",
    "dataloader-type",
    "num-workers",
    "data-cache-path",
    "nnodes",
    "nproc-per-node",
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-id",
    "rdzv-backend",
    "rdzv-endpoint",
    "timing-log-level",
    "timing-log-option",
    "ckpt-format",
    "log-params-norm",
    "log-num-zeros-in-grad",
    "transformer-impl",
];

pub(super) fn import(text: &str, ranks: usize) -> Result<ImportedPlan, FrameworkError> {
    let mut flags = Flags::parse(text);
    let mut unread = Vec::new();
    if flags.is_empty() {
        return Err(FrameworkError::Form {
            reason: "there are no arguments of Megatron-LM".into(),
            hint: "give the arguments of `pretrain_gpt.py`, or a script that has them".into(),
        });
    }
    flags.neutral(&NEUTRAL);
    let model = model::read(&mut flags)?;
    let mut layout = read_layout(&mut flags, ranks)?;
    layout.recompute = read_recompute(&mut flags, &mut unread)?;
    let plan = read_training(&mut flags, layout)?;
    unread.extend(flags.unread());
    Ok(ImportedPlan { plan, model, unread })
}

fn impossible(reason: String, hint: &str) -> FrameworkError {
    FrameworkError::Form { reason, hint: hint.into() }
}

fn read_layout(flags: &mut Flags, ranks: usize) -> Result<Layout, FrameworkError> {
    let tensor = flags.number("tensor-model-parallel-size")?.unwrap_or(1usize);
    let pipeline = flags.number("pipeline-model-parallel-size")?.unwrap_or(1usize);
    let context = flags.number("context-parallel-size")?.unwrap_or(1usize);
    let model_ranks = [tensor, pipeline, context].into_iter().try_fold(1usize, usize::checked_mul).unwrap_or(0);
    if model_ranks == 0 || !ranks.is_multiple_of(model_ranks) {
        let reason =
            format!("{ranks} ranks are no multiple of tensor x pipeline x context, which is {tensor} x {pipeline} x {context}");
        return Err(impossible(reason, "say the cluster with `--topology` and `--nodes`"));
    }
    let expert_tensor = flags.number("expert-tensor-parallel-size")?.unwrap_or(tensor);
    let experts = flags.number("expert-model-parallel-size")?.unwrap_or(1usize);
    let expert = experts.saturating_mul(expert_tensor) / tensor.max(1);
    let data_ranks = ranks / model_ranks;
    if expert == 0 || experts.checked_mul(expert_tensor) != Some(expert * tensor) || !data_ranks.is_multiple_of(expert) {
        let reason = format!(
            "experts on {experts} x {expert_tensor} ranks cannot be laid out over `tensor` {tensor} and {data_ranks} ranks of data"
        );
        return Err(impossible(reason, "choose sizes with a whole number of expert groups along tensor and data"));
    }
    let data = data_ranks / expert;
    let mut layout = Layout { data, tensor, pipeline, context, expert, ..Layout::default() };
    layout.expert_tensor = Some(expert_tensor).filter(|&ranks| ranks != tensor);
    if flags.text("cp-comm-type").as_deref().is_none_or(|method| method == "p2p") && context > 1 {
        layout.context_method = ContextMethod::Ring;
    }
    layout.sequence_parallel = flags.switch("sequence-parallel");
    let is_sharded = flags.switch("use-distributed-optimizer") | flags.switch("use-megatron-fsdp");
    layout.zero = match flags.text("data-parallel-sharding-strategy").as_deref() {
        Some("optim_grads") => 2,
        Some("optim_grads_params") => 3,
        _ => usize::from(is_sharded),
    };
    if let Some(instances) = flags.number::<usize>("num-distributed-optimizer-instances")?.filter(|&instances| instances > 1) {
        if !data.is_multiple_of(instances) {
            let reason = format!("{instances} instances of the optimizer for {data} ranks of data");
            return Err(impossible(reason, "choose a number that divides them"));
        }
        layout.shard_group = Some(data / instances);
    }
    if flags.switch("optimizer-cpu-offload") {
        layout.offload = Offload::Optimizer;
    }
    flags.neutral(&["overlap-grad-reduce", "overlap-param-gather"]);
    if let Some(parameters) = flags.number::<u64>("ddp-bucket-size")? {
        layout.bucket = bucket_of(parameters);
    }
    read_chunks(flags, &mut layout)?;
    Ok(layout)
}

/// Reads the chunks of the pipeline.
fn read_chunks(flags: &mut Flags, layout: &mut Layout) -> Result<(), FrameworkError> {
    let layers = flags.number::<usize>("num-layers")?;
    if let Some(text) = flags.text("pipeline-model-parallel-layout") {
        let cuts = read_pipeline_layout(&text)?;
        if !cuts.len().is_multiple_of(layout.pipeline) {
            return Err(impossible(
                format!("{} chunks for {} stages", cuts.len(), layout.pipeline),
                "give every stage as many chunks",
            ));
        }
        layout.virtual_stages = cuts.len() / layout.pipeline;
        layout.cuts = Some(cuts);
    } else if layout.pipeline > 1 {
        let per_chunk = flags.number::<usize>("num-layers-per-virtual-pipeline-stage")?;
        let stated = flags.number::<usize>("num-virtual-stages-per-pipeline-rank")?;
        let from_layers = layers.zip(per_chunk).map(|(layers, per_chunk)| layers / layout.pipeline / per_chunk.max(1));
        layout.virtual_stages = stated.or(from_layers).unwrap_or(1).max(1);
        // Megatron gives every chunk as many layers, beside the embedding and the loss.
        let chunks = layout.pipeline.saturating_mul(layout.virtual_stages);
        let layers = layers.filter(|layers| layers.is_multiple_of(chunks));
        layout.cuts = layers.map(|layers| {
            let blocks = |chunk: usize| layers / chunks + usize::from(chunk == 0) + usize::from(chunk + 1 == chunks);
            (0..chunks).map(blocks).collect()
        });
    }
    if layout.virtual_stages > 1 {
        layout.schedule = Schedule::Interleaved;
    }
    Ok(())
}

/// Reads what is recomputed. Adds to `unread` what a plan does not express.
fn read_recompute(flags: &mut Flags, unread: &mut Vec<String>) -> Result<Recompute, FrameworkError> {
    let granularity = flags.text("recompute-granularity");
    let method = flags.text("recompute-method");
    let layers = flags.number::<usize>("recompute-num-layers")?;
    let modules = flags.list("recompute-modules");
    // An older name of the selective granularity.
    let is_selective = flags.switch("recompute-activations");
    let unknown =
        |flag: &str, value: &str, hint: &str| Err(impossible(format!("`--{flag} {value}` is not one of Megatron's"), hint));
    match granularity.as_deref().or(is_selective.then_some("selective")) {
        None => Ok(Recompute::None),
        Some("selective") => {
            let others: Vec<&str> = modules.iter().map(String::as_str).filter(|&module| module != "core_attn").collect();
            if !others.is_empty() {
                unread.push(format!("--recompute-modules {}", others.join(" ")));
            }
            let has_attention = modules.is_empty() || modules.len() > others.len();
            Ok(if has_attention { Recompute::Selective } else { Recompute::None })
        }
        Some("full") => match method.as_deref() {
            Some("block") => Ok(Recompute::full_layers(vec![layers.unwrap_or(1)])),
            Some("uniform") => {
                // One input is kept for each group of layers, and ours are groups of one.
                unread.extend(layers.filter(|&layers| layers > 1).map(|layers| format!("--recompute-num-layers {layers}")));
                Ok(Recompute::Full)
            }
            None => Err(impossible(
                "`--recompute-granularity full` without `--recompute-method`".into(),
                "add `--recompute-method uniform` or `block`, as Megatron demands",
            )),
            Some(other) => unknown("recompute-method", other, "methods: uniform, block"),
        },
        Some(other) => unknown("recompute-granularity", other, "granularities: full, selective"),
    }
}

fn read_training(flags: &mut Flags, layout: Layout) -> Result<Plan, FrameworkError> {
    let usual = Training::default();
    let micro_batch = flags.number("micro-batch-size")?.unwrap_or(1usize);
    let replicas = layout.data.saturating_mul(layout.expert);
    let global_batch = flags.number("global-batch-size")?.unwrap_or(micro_batch.saturating_mul(replicas));
    let mut plan = Plan::new(Layout { micro_batch, ..layout }, global_batch);
    plan.stack = Stack::new(STACK);
    let mut training = Training { learning_rate: flags.number("lr")?, ..usual };
    // Megatron's own defaults differ from ours.
    training.weight_decay = flags.number("weight-decay")?.unwrap_or(0.01);
    training.clip_norm = Some(flags.number("clip-grad")?.unwrap_or(1.0f32)).filter(|&norm| norm > 0.0);
    plan.optimizer = match flags.text("optimizer").as_deref() {
        Some("sgd") => Optimizer::Sgd,
        Some(other) if other != "adam" => {
            return Err(impossible(format!("the optimizer `{other}` is not one of ours"), "optimizers: adam, sgd"));
        }
        _ if training.weight_decay == 0.0 => Optimizer::Adam,
        _ => Optimizer::AdamW,
    };
    training.momentum = flags.number("sgd-momentum")?.unwrap_or(usual.momentum);
    training.beta1 = flags.number("adam-beta1")?.unwrap_or(usual.beta1);
    training.beta2 = flags.number("adam-beta2")?.unwrap_or(usual.beta2);
    training.epsilon = flags.number("adam-eps")?.unwrap_or(usual.epsilon);
    training.loss_scale.initial = flags.number("initial-loss-scale")?.unwrap_or(usual.loss_scale.initial);
    training.loss_scale.growth_interval = flags.number("loss-scale-window")?.unwrap_or(usual.loss_scale.growth_interval);
    plan.training = training;
    let [is_bf16, is_fp16] = ["bf16", "fp16"].map(|name| flags.switch(name));
    let eight_bits = flags.text("fp8-format");
    plan.precision = match (is_bf16, is_fp16, eight_bits) {
        (_, _, Some(_)) => DataType::Fp8,
        (true, ..) => DataType::Bf16,
        (_, true, _) => DataType::Fp16,
        _ => DataType::Fp32,
    };
    Ok(plan)
}
