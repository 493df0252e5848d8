//! torchtitan: its settings as sections of a TOML file, in the form of releases up to 0.2. A small
//! Python module applies the same file to a configuration of later releases. It must not know the
//! other frameworks.

mod read;

pub(super) use read::import;

use super::nearest::Nearest;
use super::{FrameworkError, Job, JobFiles};
use foretell_models::Model;
use foretell_program::{Kept, Offload, Optimizer, Plan, Recompute, Schedule, Training};
use foretell_units::DataType;

const VERSION: &str = "torchtitan 0.3.0";

const STACK: &str = "torchtitan";

const FRAMEWORK: &str = "torchtitan";

/// Models of our zoo with torchtitan's names: module, function of its configuration, and the flavor
/// in older files.
const MODELS: [(&str, &str, &str, &str); 5] = [
    ("llama3-8b", "llama3", "llama3_8b", "8B"),
    ("llama3-70b", "llama3", "llama3_70b", "70B"),
    ("llama3-405b", "llama3", "llama3_405b", "405B"),
    ("qwen3-0.6b", "qwen3", "qwen3_0_6b", "0.6B"),
    ("qwen3-32b", "qwen3", "qwen3_32b", "32B"),
];

/// Further models that torchtitan has in some release. They are read and not written.
const READ_MODELS: [(&str, &str, &str, &str); 14] = [
    ("llama2-7b", "llama2", "llama2_7b", "7B"),
    ("llama2-13b", "llama2", "llama2_13b", "13B"),
    ("llama2-70b", "llama2", "llama2_70b", "70B"),
    ("llama3.2-1b", "llama3", "llama3_1b", "1B"),
    ("llama3.2-3b", "llama3", "llama3_3b", "3B"),
    ("qwen3-1.7b", "qwen3", "qwen3_1_7b", "1.7B"),
    ("qwen3-4b", "qwen3", "qwen3_4b", "4B"),
    ("qwen3-8b", "qwen3", "qwen3_8b", "8B"),
    ("qwen3-14b", "qwen3", "qwen3_14b", "14B"),
    ("qwen3-30b-a3b", "qwen3", "qwen3_30b_a3b", "30B-A3B"),
    ("qwen3-235b-a22b", "qwen3", "qwen3_235b_a22b", "235B-A22B"),
    ("deepseek-v2-lite", "deepseek_v3", "deepseek_v3_16b", "16B"),
    ("deepseek-v2", "deepseek_v3", "deepseek_v3_236b", "236B"),
    ("deepseek-v3", "deepseek_v3", "deepseek_v3_671b", "671B"),
];

/// What torchtitan's selective checkpointing keeps.
const SELECTIVE: Kept = Kept { attention: true, products: false, projections: false, odd_products: true, sums: true };

/// Applies the TOML file to a configuration.
const MODULE: &str = r#""""Makes the configuration of a job from torchtitan.toml beside this file, for torchtitan 0.3.0."""
import importlib
import pathlib
import tomllib

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

SETTINGS = tomllib.loads((pathlib.Path(__file__).parent / "torchtitan.toml").read_text())


def job():
    model = SETTINGS["model"]
    registry = importlib.import_module(f"torchtitan.models.{model['name']}.config_registry")
    config = getattr(registry, model["config"])()
    for section in ["training", "parallelism"]:
        for key, value in SETTINGS[section].items():
            if not hasattr(getattr(config, section), key):
                raise AttributeError(f"{section}.{key} is no setting of this torchtitan")
            setattr(getattr(config, section), key, value)
    mode = SETTINGS["activation_checkpoint"]["mode"]
    config.activation_checkpoint = {"none": lambda: None, "full": FullAC.Config, "selective": SelectiveAC.Config}[mode]()
    optimizer = SETTINGS["optimizer"]
    for group in config.optimizer.param_groups:
        group.optimizer_name = optimizer["name"]
        group.optimizer_kwargs = dict(lr=optimizer["lr"], betas=(optimizer["beta1"], optimizer["beta2"]), eps=optimizer["eps"],
                                      weight_decay=optimizer["weight_decay"])
    return config
"#;

pub(super) fn export(job: &Job<'_>) -> Result<JobFiles, FrameworkError> {
    let (module, config, _, blocks) = find_model(job.model)?;
    let mut nearest = Nearest::new(job.plan, FRAMEWORK, STACK)?;
    restrict(&mut nearest)?;
    let plan = nearest.plan;
    let settings = plan_settings(&plan, blocks)?;
    let (sequence, _) = job.model.sample().tokens().expect("invariant: torchtitan's models read tokens");
    // torchtitan captures the step as a CUDA graph by default, but cannot capture pipelines.
    let uncaptured = if plan.layout.pipeline > 1 { "disable_cuda_graphs = true\n" } else { "" };
    let text = format!(
        "# {VERSION}\n[model]\nname = \"{module}\"\nconfig = \"{config}\"\n\n{}",
        settings.replace("[training]\n", &format!("[training]\nseq_len = {sequence}\n{uncaptured}"))
    );
    let [nodes, per_node] = job.nodes()?;
    let run = format!(
        "#!/bin/bash\n# {VERSION}, for {} on {nodes} nodes of {per_node} GPUs. Run it on each node, with MASTER_ADDR set.\nset -e\n\
         export PYTHONPATH=$(dirname \"$(readlink -f \"$0\")\"):$PYTHONPATH\n\
         torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d \\\n  \
         --rdzv-endpoint \"${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-29500}}\" \\\n  \
         -m torchtitan.train --module foretell_job --config job \"$@\"\n",
        job.name
    );
    Ok(JobFiles {
        version: VERSION,
        files: vec![("torchtitan.toml".into(), text), ("foretell_job.py".into(), MODULE.into()), ("run.sh".into(), run)],
        command: "bash run.sh".into(),
        plan,
        differences: nearest.differences,
    })
}

/// Finds torchtitan's names of a model, of any sequence length, and the number of its blocks.
fn find_model(model: &Model) -> Result<(&'static str, &'static str, &'static str, usize), FrameworkError> {
    let sequence = model.sample().tokens().map(|(sequence, _)| sequence);
    let is_same = |name: &str| {
        let known = Model::named(name).expect("invariant: the registry's models are in the zoo");
        sequence.is_some_and(|sequence| known.with_sequence(sequence).as_ref() == Some(model))
    };
    let found = MODELS.into_iter().find(|(name, ..)| is_same(name));
    let blocks = model.repeated_layers().map_or(0, |layers| layers + 2);
    found.map(|(_, module, config, flavor)| (module, config, flavor, blocks)).ok_or_else(|| FrameworkError::Model {
        framework: FRAMEWORK,
        reason: format!("its registry has {}", MODELS.map(|(name, ..)| name).join(", ")),
        hint: "use one of these models, or `--to megatron` for other sizes",
    })
}

/// Replaces settings that torchtitan lacks.
fn restrict(nearest: &mut Nearest) -> Result<(), FrameworkError> {
    let layout = &nearest.plan.layout;
    nearest.without_axis(layout.expert, "expert")?;
    nearest.plan.layout.expert_tensor = None;
    if nearest.plan.layout.schedule != Schedule::Gpipe {
        nearest.plain_schedule();
    }
    if nearest.plan.layout.zero == 1 {
        nearest.replace(|plan| &mut plan.layout.zero, 2, "FSDP shards gradients with the optimizer's state: `zero: 2`");
    }
    if nearest.plan.layout.context > 1 && nearest.plan.layout.zero == 0 {
        nearest.replace(|plan| &mut plan.layout.zero, 3, "ranks of `context` shard parameters: `zero: 3`");
    }
    // If `data` and `context` have one rank, nothing is sharded.
    if nearest.plan.layout.data * nearest.plan.layout.context == 1 || nearest.plan.layout.zero == 0 {
        nearest.plan.layout.zero = 0;
        nearest.plan.layout.shard_group = None;
    }
    if nearest.plan.layout.tensor == 1 {
        nearest.replace(|plan| &mut plan.layout.sequence_parallel, false, "without `tensor` there is no sequence parallelism");
    }
    nearest.coarse_recompute(&[Recompute::None, Recompute::Full, Recompute::AllBut(SELECTIVE)]);
    nearest.replace(|plan| &mut plan.layout.offload, Offload::None, "everything stays in device memory");
    if nearest.plan.layout.context > 1 {
        nearest.replace(
            |plan| &mut plan.layout.context_method,
            foretell_program::ContextMethod::Gather,
            "keys and values are gathered over `context`",
        );
    } else {
        nearest.plan.layout.context_method = foretell_program::ContextMethod::Gather;
    }
    if !matches!(nearest.plan.precision, DataType::Bf16 | DataType::Fp32) {
        nearest.replace(|plan| &mut plan.precision, DataType::Bf16, "the precision is bf16");
    }
    nearest.usual_bucket();
    let usual = Training::default();
    nearest.plan.training.loss_scale = usual.loss_scale;
    nearest.plan.training.momentum = usual.momentum;
    nearest.plan.training.nesterov = false;
    if nearest.plan.optimizer == Optimizer::Sgd {
        nearest.replace(|plan| &mut plan.optimizer, Optimizer::Adam, "the optimizer is Adam");
        nearest.plan.training.learning_rate = None;
        nearest.plan.training.weight_decay = 0.0;
    }
    let rate = nearest.plan.learning_rate();
    nearest.plan.training.learning_rate = Some(rate);
    Ok(())
}

/// The sections of the file.
fn plan_settings(plan: &Plan, blocks: usize) -> Result<String, FrameworkError> {
    let layout = &plan.layout;
    let training = &plan.training;
    let micro_batches = plan.micro_batches()?;
    let local = if layout.pipeline > 1 { layout.micro_batch * micro_batches } else { layout.micro_batch };
    let shard = if layout.zero == 0 { 1 } else { layout.shard_group.unwrap_or(layout.data) };
    let dtype = if plan.precision == DataType::Bf16 { "bfloat16" } else { "float32" };
    let mode = match layout.recompute {
        Recompute::None => "none",
        Recompute::Full => "full",
        Recompute::AllBut(_) => "selective",
        Recompute::Selective | Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_) => {
            unreachable!("invariant: `restrict` has replaced it")
        }
    };
    let schedule = match layout.schedule {
        Schedule::Gpipe => "GPipe",
        Schedule::Interleaved => "Interleaved1F1B",
        Schedule::OneForwardOneBackward => "1F1B",
        other => unreachable!("invariant: `restrict` has replaced {other:?}"),
    };
    let name = if plan.optimizer == Optimizer::AdamW { "AdamW" } else { "Adam" };
    let parts = layout.cuts.as_ref().filter(|_| layout.pipeline > 1).map_or(String::new(), |cuts| model_parts(cuts, blocks));
    let per_stage = match (&layout.cuts, layout.pipeline) {
        (None, stages) if stages > 1 => {
            let chunks = stages * layout.virtual_stages;
            let layers = blocks.div_ceil(chunks);
            if blocks.div_ceil(layers.max(1)) != chunks {
                return Err(FrameworkError::Layout {
                    framework: FRAMEWORK,
                    reason: format!("it does not divide {blocks} blocks into {chunks} chunks"),
                    hint: "give `cuts` in the plan".into(),
                });
            }
            format!("pipeline_parallel_layers_per_stage = {layers}\n")
        }
        _ => String::new(),
    };
    Ok(format!(
        "[training]\nlocal_batch_size = {local}\nglobal_batch_size = {}\nmax_norm = {:?}\nmixed_precision_param = \"{dtype}\"\n\n\
         [parallelism]\ndata_parallel_replicate_degree = {}\ndata_parallel_shard_degree = {shard}\n\
         fsdp_reshard_after_forward = \"{}\"\ntensor_parallel_degree = {}\nenable_sequence_parallel = {}\n\
         pipeline_parallel_degree = {}\npipeline_parallel_schedule = \"{schedule}\"\npipeline_parallel_microbatch_size = {}\n\
         {per_stage}{parts}context_parallel_degree = {}\nexpert_parallel_degree = 1\n\n\
         [activation_checkpoint]\nmode = \"{mode}\"\n\n\
         [optimizer]\nname = \"{name}\"\nlr = {:?}\nbeta1 = {:?}\nbeta2 = {:?}\neps = {:?}\nweight_decay = {:?}\n",
        plan.global_batch,
        // Without clipping, torchtitan gets a norm that no gradient reaches.
        training.clip_norm.unwrap_or(UNCLIPPED),
        layout.data / shard.max(1),
        if layout.zero == 3 { "always" } else { "never" },
        layout.tensor,
        layout.sequence_parallel,
        layout.pipeline,
        layout.micro_batch,
        layout.context,
        plan.learning_rate(),
        training.beta1,
        training.beta2,
        training.epsilon,
        training.weight_decay,
    ))
}

/// A norm that no gradient exceeds.
const UNCLIPPED: f32 = 1e30;

/// The modules of each chunk.
fn model_parts(cuts: &[usize], blocks: usize) -> String {
    let mut first = 0;
    let chunk = |&count: &usize| {
        let names: Vec<String> = (first..first + count)
            .flat_map(|block| match block {
                0 => vec!["\"tok_embeddings\"".to_string()],
                last if last + 1 == blocks => vec!["\"norm\"".into(), "\"lm_head\"".into()],
                layer => vec![format!("\"layers.{}\"", layer - 1)],
            })
            .collect();
        first += count;
        format!("[{}]", names.join(", "))
    };
    format!("module_fqns_per_model_part = [{}]\n", cuts.iter().map(chunk).collect::<Vec<_>>().join(", "))
}
