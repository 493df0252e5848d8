//! What a row says in our terms: a model, a plan, a cluster and a software stack; or why it says too little.

use crate::names;
use crate::row::Row;
use foretell_models::Model;
use foretell_program::{Layout, Optimizer, Plan, Program, Rank, Recompute, Schedule};
use foretell_simulator::gpu::{Cluster, ProductFormat, Profiles, StackKind};
use foretell_units::{BytesPerSecond, DataType};
use std::fmt;

/// Why a row cannot be simulated, for the person who reads the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(pub String);

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A row in our terms.
#[derive(Clone, Debug)]
pub struct Run {
    /// The model.
    pub model: Model,
    /// How it is laid out.
    pub plan: Plan,
    /// On what. Where nodes differ, those of the first kind.
    pub cluster: Cluster,
    /// Nodes of other kinds, which follow those of the first: each kind with the number of its first node.
    pub others: Vec<(usize, Cluster)>,
    /// The profile of the software stack.
    pub stack: StackKind,
    /// Its name.
    pub stack_name: String,
    /// The format of matrix products.
    pub format: ProductFormat,
    /// What of it is taken for something near, in words; such a prediction is not calibrated.
    pub stand_ins: Vec<String>,
}

/// The mean length of MLPerf's sequences for BERT over the 512 that they may have: implementations leave the padding out (packing or
/// unpadded kernels). About a half, as INDEX.md says of these rows; Wikipedia's mean is 0.49 of 512 (MLCommons' packing reference).
const BERT_UNPADDED: f64 = 0.5;

impl Run {
    /// Reads a row.
    ///
    /// # Errors
    /// [`Refusal`] where the row says too little, contradicts itself, or says what is not known here.
    pub fn of(row: &Row, profiles: &Profiles) -> Result<Self, Refusal> {
        let refuse = |reason: String| Err(Refusal(reason));
        let name = row.model.to_lowercase();
        if name.contains("lora") || row.notes.to_lowercase().contains("lora") || row.framework.contains("finetuning") {
            return refuse("fine-tuning of a part of the parameters is not simulated".into());
        }
        let kinds = names::node_kinds(row);
        let Some(&(first_nodes, device)) = kinds.first() else {
            return refuse(format!("no profile of the device `{}`", row.gpu));
        };
        let Some(stack_name) = names::stack(row) else {
            return refuse(format!("no profile of the framework `{}`", row.framework));
        };
        let profile = |error: foretell_simulator::gpu::ProfileError| Refusal(error.to_string());
        let stack = profiles.stack(stack_name).map_err(profile)?.clone();
        let Some(devices) = row.count("n_gpus") else { return refuse("the number of devices is not stated".into()) };
        let mut stand_ins = Vec::new();
        let per_node =
            row.count("gpus_per_node").or_else(|| Some(devices.div_ceil(row.count("n_nodes")?))).unwrap_or(devices.min(8));
        let rate = row.number("inter_gbps_per_node").map(|gigabits| BytesPerSecond::new(gigabits * 1e9 / 8.0));
        let cluster = profiles.cluster(device, names::link(row), per_node, devices, rate).map_err(profile)?;
        let mut others = Vec::new();
        let mut before = first_nodes;
        for &(nodes, other) in kinds.iter().skip(1) {
            others.push((before, profiles.cluster(other, None, per_node, devices, rate).map_err(profile)?));
            before += nodes;
        }
        if !others.is_empty() {
            stand_ins.push("nodes are taken to be filled in the order in which the row names them".into());
        }
        if rate.is_none() && devices > cluster.devices_per_node {
            stand_ins.push("the network's rate is not stated".into());
        }
        let format = match names::format(row) {
            Some(format) => format,
            None if row.precision.is_empty() || row.stated_precision.to_lowercase().contains("unknown") => {
                stand_ins.push("the precision is not stated".into());
                stack.precision
            }
            None => return refuse(format!("the precision `{}` is not known", row.precision)),
        };
        let layout = layout(row, &stack, devices, &mut stand_ins)?;
        let model = model(row, &stack, &layout, &mut stand_ins)?;
        let plan = plan(row, &stack, layout, format, &model)?;
        if cluster.gpu.estimated {
            stand_ins.push(format!("kernels on `{device}` were not measured"));
        }
        if stack.estimated {
            stand_ins.push(format!("the stack `{stack_name}` was not fitted"));
        }
        Ok(Self { model, plan, cluster, others, stack, stack_name: stack_name.into(), format, stand_ins })
    }
}

impl Run {
    /// What the ranks of a stage run on: of several kinds the one that is slowest at products, for which the others wait.
    pub fn cluster_of(&self, program: &Program, stage: usize) -> &Cluster {
        if self.others.is_empty() {
            return &self.cluster;
        }
        let kind_of = |rank: Rank| {
            let node = rank.0 / self.cluster.devices_per_node;
            self.others.iter().rev().find(|(first, _)| node >= *first).map_or(&self.cluster, |(_, cluster)| cluster)
        };
        let rate = |cluster: &Cluster| cluster.gpu.peak(self.format).value() * cluster.gpu.product_efficiency(self.format);
        let kinds = program.mesh.stage_ranks(stage).into_iter().map(kind_of);
        kinds.min_by(|one, two| rate(one).total_cmp(&rate(two))).unwrap_or(&self.cluster)
    }
}

fn layout(row: &Row, stack: &StackKind, devices: usize, stand_ins: &mut Vec<String>) -> Result<Layout, Refusal> {
    let size = |column| row.count(column).unwrap_or(1);
    let (tensor, pipeline, context) = (size("tp"), size("pp"), size("cp"));
    let replica = tensor * pipeline * context;
    let data = match row.count("dp") {
        Some(data) => data,
        None if devices.is_multiple_of(replica) => devices / replica,
        None => return Err(Refusal(format!("{devices} devices are no multiple of tp x pp x cp = {replica}"))),
    };
    if data * replica != devices {
        return Err(Refusal(format!("dp {data} x tp {tensor} x pp {pipeline} x cp {context} are not the {devices} devices")));
    }
    // Megatron's expert-parallel ranks are of `dp`, or where one expert is not cut of `dp` and `tp` (and `cp`) together.
    let experts = if row.count("experts").is_some() { size("ep") } else { 1 };
    let expert = if data.is_multiple_of(experts) {
        if tensor > 1 && experts > 1 {
            stand_ins.push("whether `tp` cuts experts is not stated".into());
        }
        experts
    } else if (data * tensor).is_multiple_of(experts) && experts.is_multiple_of(tensor) && data.is_multiple_of(experts / tensor) {
        stand_ins.push("experts that spread over `tp` are simulated as cut by it".into());
        experts / tensor
    } else {
        return Err(Refusal(format!("ep {experts} divides neither dp {data} nor dp x tp {}", data * tensor)));
    };
    let virtual_stages = if pipeline > 1 { size("vpp") } else { 1 };
    let zero = match row.zero.chars().next() {
        Some(digit @ '0'..='3') if data > 1 || digit == '3' => digit as usize - '0' as usize,
        _ => 0,
    };
    let recompute = match row.recompute.to_lowercase() {
        text if text.starts_with("full") => Recompute::Full,
        text if text.starts_with("selective") => Recompute::Selective,
        text if text.starts_with("none") => Recompute::None,
        _ => stack.recompute,
    };
    let sequence_parallel = tensor > 1 && row.number("sp").map_or(stack.sequence_parallel, |value| value != 0.0);
    let micro_batch = match (row.count("mbs"), row.count("gbs"), row.count("ga")) {
        (Some(size), _, _) => size,
        (None, Some(batch), steps) if batch.is_multiple_of(data * steps.unwrap_or(1)) => batch / data / steps.unwrap_or(1),
        (None, Some(batch), Some(_)) if batch.is_multiple_of(data) => batch / data,
        _ => return Err(Refusal("neither the micro-batch nor a global batch that the ranks share evenly is stated".into())),
    };
    Ok(Layout {
        data: data / expert,
        tensor,
        pipeline,
        context,
        expert,
        sequence_parallel,
        virtual_stages,
        schedule: if virtual_stages > 1 { Schedule::Interleaved } else { Schedule::OneForwardOneBackward },
        zero,
        recompute,
        micro_batch,
        bucket: stack.bucket,
        ..Layout::default()
    })
}

fn plan(row: &Row, _stack: &StackKind, layout: Layout, format: ProductFormat, model: &Model) -> Result<Plan, Refusal> {
    let at_once = layout.samples_at_once();
    let global_batch = match (row.count("gbs"), row.count("ga")) {
        (Some(batch), _) if batch.is_multiple_of(at_once) => batch,
        (Some(batch), _) => {
            return Err(Refusal(format!(
                "the global batch of {batch} is no multiple of the {at_once} samples that all ranks take at once"
            )));
        }
        (None, Some(steps)) => at_once * steps,
        (None, None) => return Err(Refusal("the global batch is not stated".into())),
    };
    let layout = Layout { cuts: cuts(row, &layout, model), ..layout };
    let precision = match format {
        ProductFormat::Fp32 => DataType::Fp32,
        ProductFormat::Tf32 => DataType::Tf32,
        ProductFormat::Fp16 => DataType::Fp16,
        _ => DataType::Bf16,
    };
    let optimizer = if matches!(model, Model::Resnet { .. }) { Optimizer::Sgd } else { Optimizer::AdamW };
    Ok(Plan { precision, optimizer, ..Plan::new(layout, global_batch) })
}

/// Layers of each chunk as Megatron cuts: as many in each, the embedding with the first and the head with the last; where that does not
/// divide, both counted as layers. What the row's notes say of its stages counts before.
fn cuts(row: &Row, layout: &Layout, model: &Model) -> Option<Vec<usize>> {
    let chunks = layout.pipeline * layout.virtual_stages;
    let layers = match *model {
        Model::Gpt { layers, .. } | Model::Llama { layers, .. } | Model::Moe { layers, .. } | Model::Bert { layers, .. } => {
            layers
        }
        _ => return None,
    };
    if chunks < 2 {
        return None;
    }
    if let Some(stated) = stated_cuts(&row.notes, layers).filter(|cuts| cuts.len() == chunks && !cuts.contains(&0)) {
        return Some(stated);
    }
    if layers.is_multiple_of(chunks) {
        let mut cuts = vec![layers / chunks; chunks];
        *cuts.first_mut()? += 1;
        *cuts.last_mut()? += 1;
        return Some(cuts);
    }
    (layers + 2).is_multiple_of(chunks).then(|| vec![(layers + 2) / chunks; chunks])
}

/// `layers per stage [7, 9, 9, 9]`, embedding and head counted; or `stage boundaries [0, 7, 14, 20, 30]`, where DeepSpeed's Megatron has three
/// more entries before the layers and three after them (a cast, the embedding, a transposition; a transposition, the norm, the head).
fn stated_cuts(notes: &str, layers: usize) -> Option<Vec<usize>> {
    let numbers = |label: &str| -> Option<Vec<usize>> {
        let rest = notes.split_once(label)?.1.split_once('[')?.1.split_once(']')?.0;
        rest.split(',').map(|number| number.trim().parse().ok()).collect()
    };
    if let Some(stages) = numbers("layers per stage") {
        return (stages.iter().sum::<usize>() == layers + 2).then_some(stages);
    }
    let boundaries = numbers("stage boundaries")?;
    if *boundaries.last()? != layers + 6 {
        return None;
    }
    // Blocks before a boundary: the embedding, the layers, the head.
    let blocks = |boundary: usize| match boundary {
        0 => 0,
        end if end == layers + 6 => layers + 2,
        boundary => (boundary.saturating_sub(3)).min(layers) + 1,
    };
    Some(boundaries.windows(2).map(|pair| blocks(pair[1]).saturating_sub(blocks(pair[0]))).collect())
}

fn model(row: &Row, stack: &StackKind, layout: &Layout, stand_ins: &mut Vec<String>) -> Result<Model, Refusal> {
    let name = row.model.to_lowercase();
    if name.contains("resnet-50") || name.contains("resnet50") {
        return Ok(Model::Resnet {
            depth: 50,
            stem: foretell_models::Stem::Imagenet,
            image: 224,
            channels: 3,
            classes: 1000,
            width: 64,
        });
    }
    for other in ["transformer-xl", "gnmt", "t5", "transformer-big", "dlrm", "nemotron-h", "mamba", "stable", "unet"] {
        if name.contains(other) {
            return Err(Refusal(format!("the model `{}` is not one of ours", row.model)));
        }
    }
    let needed = |column: &'static str| row.count(column).ok_or_else(|| Refusal(format!("`{column}` is not stated")));
    let (layers, hidden, heads) = (needed("layers")?, needed("hidden")?, needed("heads")?);
    let mut sequence = needed("seq")?;
    let vocabulary = row.count("vocab").unwrap_or_else(|| {
        stand_ins.push("the vocabulary is not stated".into());
        51200
    });
    let vocab = vocabulary.next_multiple_of(stack.vocabulary_multiple * layout.tensor);
    if !hidden.is_multiple_of(heads) {
        return Err(Refusal(format!("{heads} heads do not share {hidden} features evenly")));
    }
    let head_dimension = None;
    let ffn = row.count("ffn").unwrap_or(4 * hidden);
    // Ranks that are more than heads of keys have copies.
    let kv_heads = row.count("kv_heads").unwrap_or(heads).max(layout.tensor).min(heads);
    if name.contains("bert") {
        if row.notes.contains("unpadded") {
            sequence = (sequence as f64 * BERT_UNPADDED).round() as usize;
        }
        return Ok(Model::Bert {
            layers,
            hidden,
            heads,
            ffn: Some(ffn),
            vocab,
            sequence,
            dropout: Default::default(),
            attention_dropout: Default::default(),
        });
    }
    if let (Some(experts), Some(top_k)) = (row.count("experts"), row.count("topk")) {
        if layout.context > 1 {
            return Err(Refusal(
                "experts under context parallelism: the compiler has every rank of `context` compute all tokens".into(),
            ));
        }
        if name.contains("deepseek") {
            stand_ins.push("latent attention and shared experts are simulated as plain ones".into());
        }
        return Ok(Model::Moe {
            layers,
            hidden,
            heads,
            kv_heads: Some(kv_heads),
            head_dimension,
            query_rank: None,
            key_value_rank: None,
            dense_ffn: None,
            shared_ffn: None,
            dense_layers: 0,
            ffn: row.count("moe_ffn").unwrap_or(ffn),
            vocab,
            sequence,
            experts,
            top_k,
            moe_every: 1,
            capacity_factor: 1.0f64.try_into().map_err(Refusal)?,
            rope_theta: 10_000,
            tied_embeddings: false,
        });
    }
    let is_gated = row.number("gated_ffn").map_or(name.contains("llama"), |value| value != 0.0);
    if is_gated || kv_heads != heads {
        // Without a gate: two matrices of the same weight in all as the three of a gated one two thirds as wide.
        let ffn = if is_gated { ffn } else { (2 * ffn / 3).next_multiple_of(64 * layout.tensor) };
        return Ok(Model::Llama {
            layers,
            hidden,
            heads,
            kv_heads: Some(kv_heads),
            head_dimension,
            ffn,
            vocab,
            sequence,
            tied_embeddings: false,
            rope_theta: 10_000,
        });
    }
    Ok(Model::Gpt {
        layers,
        hidden,
        heads,
        ffn: Some(ffn),
        vocab,
        sequence,
        tied_embeddings: true,
        dropout: Default::default(),
        attention_dropout: Default::default(),
    })
}
