//! What a row says in our terms: a model, a plan, a cluster and a software stack; or why it says too little.

use crate::layout::{cuts, layout, stated_cuts, states_recompute};
use crate::model::model;
use crate::names;
use crate::row::Row;
use foretell_models::Model;
use foretell_program::{Layout, Optimizer, Plan, Program, Rank, Stack};
use foretell_simulator::gpu::{Cluster, ProductFormat, Profiles, StackKind, Trained, Workload};
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
    /// Whether what is computed again is stated, or nothing that frameworks have for such a model.
    pub recompute_is_stated: bool,
    /// Whether that stack stands in for one without a profile.
    pub stands_in: bool,
    /// The format of matrix products.
    pub format: ProductFormat,
    /// Which parameters are trained.
    pub trained: Trained,
    /// What of it is taken for something near, in words; such a prediction is not calibrated.
    pub stand_ins: Vec<String>,
}

impl Run {
    /// Reads a row.
    ///
    /// # Errors
    /// [`Refusal`] where the row says too little, contradicts itself, or says what is not known here.
    pub fn of(row: &Row, profiles: &Profiles) -> Result<Self, Refusal> {
        let refuse = |reason: String| Err(Refusal(reason));
        let kinds = ordered(names::node_kinds(row), row, profiles);
        let Some(&(first_nodes, device)) = kinds.first() else {
            return refuse(format!("no profile of the device `{}`", row.gpu));
        };
        let mut stand_ins = Vec::new();
        let stands_in = names::stack(row).is_none();
        let stack_name = match names::stack(row) {
            Some(name) => name,
            None => {
                let nearest = names::nearest_stack(row);
                stand_ins.push(match row.framework.as_str() {
                    "" => format!("the framework is not stated: `{nearest}` stands in"),
                    framework => format!("the framework `{framework}` has no profile: `{nearest}` stands in"),
                });
                nearest
            }
        };
        let profile = |error: foretell_simulator::gpu::ProfileError| Refusal(error.to_string());
        let mut stack = profiles.stack(stack_name).map_err(profile)?.clone();
        names::refine(row, &mut stack);
        if stands_in {
            stack.spread = profiles.unseen;
        }
        let trained = if names::trains_adapters(row) { Trained::Adapters } else { Trained::All };
        let Some(devices) = row.count("n_gpus") else { return refuse("the number of devices is not stated".into()) };
        let per_node =
            row.count("gpus_per_node").or_else(|| Some(devices.div_ceil(row.count("n_nodes")?))).unwrap_or(devices.min(8));
        let rate = row.number("inter_gbps_per_node").map(|gigabits| BytesPerSecond::new(gigabits * 1e9 / 8.0));
        let mut cluster = profiles.cluster(device, names::link(row), per_node, devices, rate).map_err(profile)?;
        if let Some(network) = names::network(row) {
            cluster.network = profiles.network(network).map_err(profile)?;
        }
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
            None => {
                stand_ins.push(format!("the precision `{}` is not known", row.precision));
                stack.precision
            }
        };
        let layout = layout(row, &stack, devices, &mut stand_ins)?;
        let model = model(row, &stack, &layout, &mut stand_ins)?;
        let is_language_model = matches!(model, Model::Gpt { .. } | Model::Llama { .. } | Model::Moe { .. });
        let recompute_is_stated = states_recompute(row) || !is_language_model || !stack.recompute_to_fit;
        let plan = plan(row, layout, format, &model)?;
        if cluster.gpu.estimated {
            stand_ins.push(format!("kernels on `{device}` were not measured"));
        }
        if stack.estimated {
            stand_ins.push(format!("the stack `{stack_name}` was not fitted"));
        }
        let plan = Plan { stack: Stack::new(stack_name), overlap: stack.overlap, ..plan };
        Ok(Self {
            model,
            plan,
            cluster,
            others,
            stack,
            stack_name: stack_name.into(),
            stands_in,
            recompute_is_stated,
            format,
            trained,
            stand_ins,
        })
    }
}

impl Run {
    /// Devices that it takes.
    pub fn devices(&self) -> usize {
        let layout = &self.plan.layout;
        layout.data * layout.tensor * layout.pipeline * layout.context * layout.expert
    }

    /// How many times as wide the stack's interval is, on a logarithmic scale, because less is known of this run's devices than of those that the
    /// stack was fitted on. Assumed: nothing measured says it.
    pub fn widening(&self) -> f64 {
        const UNFITTED_DEVICE: f64 = 1.4;
        let is_estimated = self.clusters().iter().any(|cluster| cluster.gpu.estimated);
        if is_estimated { UNFITTED_DEVICE } else { 1.0 }
    }

    /// What of it decides on costs beside kernels' sizes.
    pub fn workload(&self) -> Workload {
        let layout = &self.plan.layout;
        Workload {
            copies: if let Model::Moe { top_k, .. } = self.model { top_k } else { 1 },
            trained: self.trained,
            tensor: layout.tensor,
        }
    }

    /// What the ranks of a stage run on: of several kinds the one that is slowest at products, for which the others wait.
    pub fn kind_of(&self, program: &Program, stage: usize) -> usize {
        if self.others.is_empty() {
            return 0;
        }
        let kind_of = |rank: Rank| {
            let node = rank.0 / self.cluster.devices_per_node;
            self.others.iter().rposition(|(first, _)| node >= *first).map_or(0, |other| other + 1)
        };
        let clusters = self.clusters();
        let rate =
            |kind: usize| clusters[kind].gpu.peak(self.format).value() * clusters[kind].gpu.product_efficiency(self.format);
        let kinds = program.mesh.stage_ranks(stage).into_iter().map(kind_of);
        kinds.min_by(|&one, &two| rate(one).total_cmp(&rate(two))).unwrap_or(0)
    }

    /// The kinds of node in the order of the first of each.
    pub fn clusters(&self) -> Vec<&Cluster> {
        std::iter::once(&self.cluster).chain(self.others.iter().map(|(_, cluster)| cluster)).collect()
    }
}

fn plan(row: &Row, layout: Layout, format: ProductFormat, model: &Model) -> Result<Plan, Refusal> {
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

/// Nodes of several kinds in the order in which ranks fill them: as the row names them, unless the stages that it states say that the slowest
/// kind comes first, having the fewest layers.
fn ordered(mut kinds: Vec<(usize, &'static str)>, row: &Row, profiles: &Profiles) -> Vec<(usize, &'static str)> {
    let blocks = row.count("layers").and_then(|layers| stated_cuts(&row.notes, layers)).unwrap_or_default();
    if let ([first, .., last], true) = (blocks.as_slice(), kinds.len() > 1)
        && first < last
    {
        let speed = |name: &str| profiles.gpu(name).map_or(0.0, |gpu| gpu.peak(ProductFormat::Fp16).value());
        kinds.sort_by(|one, two| speed(one.1).total_cmp(&speed(two.1)));
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::read_rows;

    fn run(cells: &str) -> Run {
        let header =
            "row_id,model,layers,hidden,heads,vocab,seq,experts,topk,gpu,n_gpus,dp,pp,mbs,gbs,zero,precision,framework,notes";
        let rows = read_rows(&format!("{header}\n{cells}\n")).expect("rows");
        Run::of(&rows[0], Profiles::library().expect("sound")).expect("a run")
    }

    #[test]
    fn fsdp_in_a_pipeline_sums_gradients_once() {
        let run = run("a,Llama,16,1024,16,32000,1024,,,H100,32,8,4,1,64,3,bf16,torchtitan,");
        assert_eq!(run.plan.layout.zero, 1);
    }

    #[test]
    fn runs_whose_times_contradict_what_is_said_of_them_compute_nothing_again() {
        let header = "table,row_id,model,layers,hidden,heads,vocab,seq,gpu,n_gpus,dp,tp,mbs,gbs,recompute,precision,framework";
        let recompute = |table: &str| {
            let cells =
                format!("{table},a,GPT,12,1024,16,50257,1024,A100-SXM4-80GB,2,1,2,1,8,full,fp16,Megatron-DeepSpeed (1F1B)");
            let rows = read_rows(&format!("{header}\n{cells}\n")).expect("rows");
            let run = Run::of(&rows[0], Profiles::library().expect("sound")).expect("a run");
            (run.plan.layout.recompute.clone(), run.stack_name)
        };
        use foretell_program::Recompute;
        assert_eq!(recompute("vtrain_single_node"), (Recompute::None, "megatron-deepspeed-node".into()));
        assert_eq!(recompute("vtrain_multi_node"), (Recompute::Full, "megatron-deepspeed".into()));
    }

    #[test]
    fn experts_under_deepep_are_shared_out_over_up_to_64_ranks() {
        let run = run("a,gpt-oss,8,1024,16,32000,1024,128,4,H100,64,64,1,1,64,3,bf16,NeMo AutoModel,TE + DeepEP");
        assert_eq!((run.plan.layout.expert, run.plan.layout.data), (64, 1));
        assert!(run.stand_ins.iter().any(|one| one.contains("64 ranks")), "{:?}", run.stand_ins);
    }

    #[test]
    fn without_a_framework_the_likest_stands_in_and_less_is_known() {
        let named = run("a,Llama,16,1024,16,32000,1024,,,H100,8,8,1,1,8,3,bf16,FSDP,");
        let unnamed = run("a,Llama,16,1024,16,32000,1024,,,H100,8,8,1,1,8,3,bf16,,");
        assert!(unnamed.stands_in && unnamed.stack_name == named.stack_name);
        assert_eq!(unnamed.stack.spread, Profiles::library().expect("sound").unseen);
    }
}
