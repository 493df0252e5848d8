//! Megatron-LM's `pretrain_gpt.py` with Megatron-Core, and ms-swift's jobs on them. It must not
//! know the other frameworks.

mod model;
mod names;
mod read;
mod read_pipeline;
mod swift;

pub(super) use read::import;

use super::nearest::{Nearest, bucket_elements, usual_training};
use super::{FrameworkError, Job, JobFiles};
use foretell_models::GraphOptions;
use foretell_program::{ContextMethod, Layout, Offload, Optimizer, Plan, Recompute, usual_cuts, work_of_blocks};
use foretell_units::DataType;

/// The release that the files are for.
const VERSION: &str = "megatron-core 0.19.2";

/// The name of its stack in our profiles.
const STACK: &str = "megatron-core";

const FRAMEWORK: &str = "Megatron-Core";

/// Arguments as flags with values; an empty value is a switch.
type Arguments = Vec<(&'static str, String)>;

pub(super) fn export(job: &Job<'_>) -> Result<JobFiles, FrameworkError> {
    let model = model::arguments(job.model)?;
    let has_muon = job.plan.optimizer == Optimizer::Muon;
    let optimizer = if has_muon { Optimizer::AdamW } else { job.plan.optimizer };
    let mut nearest = Nearest::new(&Plan { optimizer, ..job.plan.clone() }, FRAMEWORK, STACK)?;
    if has_muon {
        nearest.plan.optimizer = Optimizer::Muon;
        if nearest.plan.layout.zero > 1 {
            nearest.replace(|plan| &mut plan.layout.zero, 1, "Muon runs without Megatron-FSDP: `zero: 1`");
        }
    }
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
    // With one queue, kernels start in the order of their launches. Megatron's overlap needs that,
    // and its FSDP refuses it.
    let connections =
        if plan.layout.zero > 1 { "unset CUDA_DEVICE_MAX_CONNECTIONS" } else { "export CUDA_DEVICE_MAX_CONNECTIONS=1" };
    let run = format!(
        "#!/bin/bash\n# {VERSION}, for {} on {nodes} nodes of {per_node} GPUs. Run it on each node, in a checkout of Megatron-LM,\n\
         # with MASTER_ADDR and NODE_RANK set. Synthetic data; replace --mock-data for your own.\n\
         set -e\n{connections}\nhere=$(dirname \"$(readlink -f \"$0\")\")\n\
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

/// Replaces settings that Megatron lacks.
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
        Offload::Both | Offload::State => {
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
    // Megatron offloads no other optimizer.
    switch("use-precision-aware-optimizer", layout.offload == Offload::Optimizer);
    // In every plan of this stack, gradient reductions overlap the backward pass.
    switch("overlap-grad-reduce", true);
    switch("overlap-param-gather", layout.zero > 0);
    if layout.context > 1 {
        let method = match layout.context_method {
            ContextMethod::Ring => "p2p",
            ContextMethod::Gather => "all_gather",
            ContextMethod::AllToAll => "a2a",
        };
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
    if layout.zero > 1 {
        arguments.push(("ckpt-format", "fsdp_dtensor".into()));
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
        Recompute::None => {}
        Recompute::FullLayersOfStages(_) | Recompute::AllBut(_) => unreachable!("invariant: `restrict` has replaced it"),
    }
    arguments
}

fn full_recompute(method: &str, layers: usize) -> [(&'static str, String); 3] {
    [("recompute-granularity", "full".into()), ("recompute-method", method.into()), ("recompute-num-layers", layers.to_string())]
}

/// Megatron's description of a pipeline: E for the embedding, t for a layer, L for the loss, `|`
/// between chunks.
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

/// The flags for batches, precision and optimizer.
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
        Optimizer::Adam | Optimizer::AdamW | Optimizer::Lamb | Optimizer::Muon => {
            if plan.optimizer == Optimizer::Muon {
                arguments.push(("optimizer", "muon".into()));
                arguments.push(("muon-momentum", training.momentum.to_string()));
                arguments.push(("muon-nesterov", String::new()));
                arguments.push(("muon-num-ns-steps", "5".into()));
                arguments.push(("muon-coefficient-type", "quintic".into()));
                arguments.push(("muon-scale-mode", "spectral".into()));
                arguments.push(("muon-extra-scale-factor", "0.2".into()));
                // Matrices are made orthogonal as a whole, as ours are.
                arguments.push(("muon-no-split-qkv", String::new()));
                arguments.push(("muon-tp-mode", "duplicated".into()));
            } else {
                arguments.push(("optimizer", "adam".into()));
            }
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
