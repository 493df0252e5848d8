//! A row of the table as a simulation input: a model, a plan, a cluster and a software stack.

use crate::layout::{cuts, layout, stated_cuts, states_recompute};
use crate::model::model;
use crate::names;
use crate::refusal::Refusal;
use crate::row::Row;
use foretell_models::Model;
use foretell_program::{Layout, OperandFormat, Overlap, Plan, PlannedWorkload, Program, Rank, Stack, Trained};
use foretell_simulator::CostModel;
use foretell_simulator::gpu::{Cluster, Fp8Scaling, ProductFormat, ProfileError, Profiles, StackProfile, Workload};
use foretell_topologies::{DeviceKind, Topology};
use foretell_units::diagnostic::one_line;
use foretell_units::{BytesPerSecond, DataType};

/// A row's run, ready to be compiled and simulated.
#[derive(Clone, Debug)]
pub struct Run {
    /// Model to train.
    pub model: Model,
    /// Plan: layout, batch and precision.
    pub plan: Plan,
    /// Devices and links; of the first kind of node, if nodes differ.
    pub cluster: Cluster,
    /// Nodes of other kinds, in rank order. Each entry has the number of its first node.
    pub other_clusters: Vec<(usize, Cluster)>,
    /// Profile of the software stack, with the row's settings applied.
    pub stack: StackProfile,
    /// Name of the stack's profile.
    pub stack_name: String,
    /// Whether recomputation is settled: the row states it, or the stack does not adapt it to the
    /// device's memory, or the model is not a language model.
    pub recompute_is_settled: bool,
    /// Name of the link between a node's devices, if the row names one other than the usual link.
    pub link: Option<&'static str>,
    /// Name of the network between nodes.
    pub network: &'static str,
    /// Number format of matrix products.
    pub format: ProductFormat,
    /// Properties of the run that costs depend on besides kernel sizes.
    pub workload: Workload,
    /// One sentence for each assumption that was necessary because neither row nor profiles state a
    /// value. A prediction with assumptions is not calibrated.
    pub assumptions: Vec<String>,
}

impl Run {
    /// Interprets a row.
    ///
    /// # Errors
    /// [`Refusal`] if the row states too little, contradicts itself, or names something without a
    /// profile or model family.
    pub fn of(row: &Row, profiles: &Profiles) -> Result<Self, Refusal> {
        if row.quality.starts_with('C') {
            return Err(Refusal("of the run only a symptom is stated (grade C)".into()));
        }
        let kinds = in_rank_order(names::node_kinds(row), row, profiles);
        let [first @ (_, device), others @ ..] = kinds.as_slice() else {
            return Err(Refusal(format!("the device `{}` has no profile", row.gpu)));
        };
        let doubt = row.doubt.iter().map(|reason| format!("the measurement is unclear: {reason}"));
        let mut assumptions: Vec<String> = row.unclear.iter().cloned().chain(doubt).collect();
        let (stack_name, stack) = stack(row, profiles, &mut assumptions)?;
        let devices = row.count("n_gpus").ok_or_else(|| Refusal("the number of devices is not stated".into()))?;
        let (cluster, other_clusters) = clusters(row, *first, others, devices, profiles, &mut assumptions)?;
        let format = format(row, &stack, &mut assumptions);
        let layout = layout(row, &stack, devices, &mut assumptions)?;
        let model = model(row, &stack, &layout, &mut assumptions)?;
        let is_language_model = matches!(model, Model::Gpt(_) | Model::Llama(_) | Model::Moe(_));
        let recompute_is_settled = states_recompute(row) || !is_language_model || !stack.defaults.recompute_to_fit;
        let plan = plan(row, layout, format, &model)?;
        if cluster.gpu.estimated {
            assumptions.push(format!("kernels on `{device}` were not measured"));
        }
        if stack.estimated {
            assumptions.push(format!("the stack `{stack_name}` was not fitted"));
        }
        let overlap = Overlap { tensor: stack.defaults.overlap.tensor || names::overlaps_tensor(row), ..stack.defaults.overlap };
        let nodes_per_token = names::groups_of_token(row).and_then(|[groups, chosen]| {
            let nodes = plan.layout.expert / cluster.devices_per_node.max(1);
            (nodes >= groups).then(|| chosen * nodes / groups)
        });
        let workload = PlannedWorkload { unknown_stack: names::stack(row).is_none(), nodes_per_token, ..plan.workload };
        let plan = Plan { stack: Stack::new(stack_name), overlap, workload, ..plan };
        let workload = Workload::of(&plan, &model);
        let stack = stack.applied(&workload, profiles.unseen);
        Ok(Self {
            model,
            plan,
            cluster,
            other_clusters,
            stack,
            stack_name: stack_name.into(),
            recompute_is_settled,
            link: names::link(row),
            network: names::network(row).unwrap_or("infiniband"),
            format,
            workload,
            assumptions,
        })
    }

    /// Returns the run of a plan on a topology.
    ///
    /// # Errors
    /// [`Refusal`] if a device of the topology has no profile.
    pub fn of_plan(model: &Model, plan: &Plan, topology: &Topology) -> Result<Self, Refusal> {
        let profiles = Profiles::library().map_err(refused)?;
        let costs = CostModel::new(None, topology).with_plan(topology, plan, model).map_err(refused)?;
        let mut clusters = Vec::new();
        let mut first_node = 0;
        for group in topology.node_groups() {
            let unknown = || Refusal(format!("the device `{}` has no profile", topology.device_kinds()[group.kind].name));
            clusters.push((first_node, costs.cluster(group.kind).ok_or_else(unknown)?.clone()));
            first_node += group.count;
        }
        if clusters.is_empty() {
            return Err(Refusal("the topology has no devices".into()));
        }
        let (_, cluster) = clusters.remove(0);
        let workload = Workload::of(plan, model);
        let stack = profiles.stack(plan.stack.name()).map_err(refused)?.clone().applied(&workload, profiles.unseen);
        Ok(Self {
            model: model.clone(),
            plan: plan.clone(),
            cluster,
            other_clusters: clusters,
            stack,
            stack_name: plan.stack.name().into(),
            recompute_is_settled: true,
            link: None,
            network: topology.network().transport.name(),
            format: ProductFormat::of_plan(plan),
            workload,
            assumptions: costs.remarks,
        })
    }

    /// Returns the topology on which a plan of this run has the same devices and links.
    ///
    /// # Errors
    /// [`Refusal`] if they cannot be described.
    pub fn topology(&self) -> Result<Topology, Refusal> {
        let devices = self.devices();
        let node = |number: usize, count: usize, cluster: &Cluster| {
            let sheet = DeviceKind::library(&cluster.device).ok().flatten();
            let pcie =
                self.link.or_else(|| PCIE.map(|(name, _)| name).into_iter().find(|name| cluster.gpu.link.starts_with(name)));
            let link = match (pcie, sheet.and_then(|sheet| sheet.link)) {
                (Some(generation), _) => {
                    let (_, rate) = PCIE.into_iter().find(|(name, _)| *name == generation).unwrap_or(PCIE[1]);
                    format!("pcie-{rate}")
                }
                (None, Some(rate)) => format!("nvswitch-{}B/s", rate.value()),
                (None, None) => "nvswitch-100GB/s".into(),
            };
            format!(
                "  - {{name: kind{number}, count: {count}, devices: {{kind: {}, count: {}}}, link: {link}, \
                 nics: {{count: 1, bandwidth: {}B/s}}}}\n",
                cluster.device,
                cluster.devices_per_node,
                cluster.node_rate.value()
            )
        };
        let text = if self.cluster.gpu.generation == "tpu" {
            format!(
                "name: row\nnodes:\n  - {{name: host, count: {devices}, devices: {{kind: {}, count: 1}}}}\n\
                 network: {{kind: torus, dimensions: 1, bandwidth: 50GB/s}}\n",
                self.cluster.device
            )
        } else {
            let per_node = self.cluster.devices_per_node;
            let nodes = devices.div_ceil(per_node);
            let starts: Vec<usize> = self.other_clusters.iter().map(|(first, _)| *first).chain([nodes]).collect();
            let mut text = format!("name: row\nnodes:\n{}", node(0, starts[0].max(1), &self.cluster));
            for (index, (first, cluster)) in self.other_clusters.iter().enumerate() {
                text += &node(index + 1, starts[index + 1].saturating_sub(*first).max(1), cluster);
            }
            format!("{text}network: {{kind: switch, transport: {}}}\n", self.network)
        };
        Topology::from_yaml(&text, "row").map_err(|error| Refusal(one_line(&error)))
    }

    /// Returns the number of devices.
    pub fn devices(&self) -> usize {
        let layout = &self.plan.layout;
        layout.data * layout.tensor * layout.pipeline * layout.context * layout.expert
    }

    /// Returns which of [`Run::clusters`] a stage runs on. If its ranks are on several kinds of
    /// nodes, that is the kind with the slowest matrix products, since the others wait for it.
    pub fn cluster_of_stage(&self, program: &Program, stage: usize) -> usize {
        if self.other_clusters.is_empty() {
            return 0;
        }
        let cluster_of = |rank: Rank| {
            let node = rank.0 / self.cluster.devices_per_node;
            self.other_clusters.iter().rposition(|(first, _)| node >= *first).map_or(0, |other| other + 1)
        };
        let rates: Vec<f64> = self
            .clusters()
            .map(|cluster| cluster.gpu.peak(self.format).value() * cluster.gpu.product_efficiency(self.format))
            .collect();
        let clusters = program.mesh.stage_ranks(stage).into_iter().map(cluster_of);
        clusters.min_by(|&cluster, &other| rates[cluster].total_cmp(&rates[other])).expect("invariant: a stage has ranks")
    }

    /// Returns the kinds of nodes, in rank order.
    pub fn clusters(&self) -> impl Iterator<Item = &Cluster> {
        std::iter::once(&self.cluster).chain(self.other_clusters.iter().map(|(_, cluster)| cluster))
    }

    /// Returns the kinds of nodes, in rank order, to change them.
    pub fn clusters_mut(&mut self) -> impl Iterator<Item = &mut Cluster> {
        std::iter::once(&mut self.cluster).chain(self.other_clusters.iter_mut().map(|(_, cluster)| cluster))
    }

    /// Returns a key that is equal for runs that compile to the same Programs.
    pub fn program_key(&self) -> String {
        // Recomputation that is not settled depends on the device's memory.
        let memory = (!self.recompute_is_settled).then_some((self.cluster.gpu.memory, self.format));
        format!("{:?} {:?} {memory:?}", self.model, self.plan)
    }
}

/// Rates of PCIe links with sixteen lanes, as topologies write them (`link_specs.csv`).
const PCIE: [(&str, &str); 3] = [("pcie3", "15.75GB/s"), ("pcie4", "31GB/s"), ("pcie5", "63GB/s")];

fn refused(error: ProfileError) -> Refusal {
    Refusal(one_line(&error))
}

/// Returns the name and the profile of the row's stack, with the row's settings applied. If the
/// framework has no profile, uses that of a similar stack.
fn stack(row: &Row, profiles: &Profiles, assumptions: &mut Vec<String>) -> Result<(&'static str, StackProfile), Refusal> {
    let known = names::stack(row);
    let name = known.unwrap_or_else(|| names::nearest_stack(row));
    let stack = profiles.stack(name).map_err(refused)?.clone();
    if known.is_none() {
        assumptions.push(match row.framework.as_str() {
            "" => format!("the framework is not stated; `{name}` stands in"),
            framework => format!("the framework `{framework}` has no profile; `{name}` stands in"),
        });
    }
    Ok((name, stack))
}

/// Returns the cluster of the first kind of node, and those of the other kinds, each with the
/// number of its first node. A kind is a number of nodes and a device.
fn clusters(
    row: &Row,
    (first_nodes, first_device): (usize, &str),
    others: &[(usize, &str)],
    devices: usize,
    profiles: &Profiles,
    assumptions: &mut Vec<String>,
) -> Result<(Cluster, Vec<(usize, Cluster)>), Refusal> {
    let per_node = row.count("gpus_per_node").or_else(|| Some(devices.div_ceil(row.count("n_nodes")?))).unwrap_or(devices.min(8));
    let rate = row.number("inter_gbps_per_node").map(|gigabits| BytesPerSecond::new(gigabits * 1e9 / 8.0));
    let cluster = |device: &str, link: Option<&str>| profiles.cluster(device, link, per_node, devices, rate).map_err(refused);
    let mut first = cluster(first_device, names::link(row))?;
    first.network = profiles.network(names::network(row).unwrap_or("infiniband")).map_err(refused)?;
    let mut other_clusters = Vec::with_capacity(others.len());
    let mut nodes_before = first_nodes;
    for &(nodes, device) in others {
        other_clusters.push((nodes_before, cluster(device, None)?));
        nodes_before += nodes;
    }
    if !other_clusters.is_empty() {
        assumptions.push("ranks are assumed to fill nodes in the order in which the row names them".into());
    }
    if rate.is_none() && devices > first.devices_per_node {
        assumptions.push("the network's rate is not stated".into());
    }
    Ok((first, other_clusters))
}

/// Returns the row's format of matrix products, or the stack's usual one.
fn format(row: &Row, stack: &StackProfile, assumptions: &mut Vec<String>) -> ProductFormat {
    if let Some(format) = names::format(row) {
        return format;
    }
    let is_unknown = row.precision.is_empty() || row.stated_precision.to_lowercase().contains("unknown");
    assumptions.push(if is_unknown {
        "the precision is not stated".into()
    } else {
        format!("the precision `{}` is not known", row.precision)
    });
    stack.defaults.precision
}

fn plan(row: &Row, layout: Layout, format: ProductFormat, model: &Model) -> Result<Plan, Refusal> {
    let samples_at_once = layout.samples_at_once();
    let global_batch = match (row.count("gbs"), row.count("ga")) {
        (Some(batch), _) if batch.is_multiple_of(samples_at_once) => batch,
        (Some(batch), _) => {
            return Err(Refusal(format!(
                "the global batch {batch} is not a multiple of the {samples_at_once} samples in one micro-batch of all ranks"
            )));
        }
        (None, Some(steps)) => samples_at_once * steps,
        (None, None) => return Err(Refusal("the global batch is not stated".into())),
    };
    let layout = Layout { cuts: cuts(row, &layout, model), ..layout };
    let precision = match format {
        ProductFormat::Fp32 => DataType::Fp32,
        ProductFormat::Tf32 => DataType::Tf32,
        ProductFormat::Fp16 => DataType::Fp16,
        _ => DataType::Bf16,
    };
    let products = match (format, names::fp8_scaling(row)) {
        (ProductFormat::Fp8, Fp8Scaling::Row) => Some(OperandFormat::Fp8ByRow),
        (ProductFormat::Fp8, Fp8Scaling::Tensor) => Some(OperandFormat::Fp8),
        (ProductFormat::Mxfp8, _) => Some(OperandFormat::Mxfp8),
        (ProductFormat::Nvfp4, _) => Some(OperandFormat::Nvfp4),
        _ => None,
    };
    let workload = PlannedWorkload {
        products,
        trains: if names::trains_adapters(row) { Trained::Adapters } else { Trained::All },
        eager_loss: names::has_eager_loss(row),
        loss: names::loss(row),
        // BERT's sequence in a row has no padding.
        unpadded: matches!(model, Model::Bert(_)).then_some(1.0),
        ..PlannedWorkload::default()
    };
    Ok(Plan { precision, optimizer: model.usual_optimizer(), workload, ..Plan::new(layout, global_batch) })
}

/// Returns the kinds of nodes in the order in which ranks fill them. That is the row's order,
/// unless the row states stages and the first has fewer blocks than the last: then the slowest kind
/// comes first.
fn in_rank_order(mut kinds: Vec<(usize, &'static str)>, row: &Row, profiles: &Profiles) -> Vec<(usize, &'static str)> {
    let blocks = row.count("layers").and_then(|layers| stated_cuts(&row.notes, layers)).unwrap_or_default();
    if let ([first, .., last], true) = (blocks.as_slice(), kinds.len() > 1)
        && first < last
    {
        let speed = |name: &str| profiles.gpu(name).map_or(0.0, |gpu| gpu.peak(ProductFormat::Fp16).value());
        kinds.sort_by(|kind, other| speed(kind.1).total_cmp(&speed(other.1)));
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
    fn fsdp_in_a_pipeline_reduces_gradients_once_a_step() {
        let run = run("a,Llama,16,1024,16,32000,1024,,,H100,32,8,4,1,64,3,bf16,torchtitan,");
        assert_eq!(run.plan.layout.zero, 1);
    }

    #[test]
    fn unclear_recomputation_is_read_as_the_list_says() {
        let header = "row_id,model,layers,hidden,heads,vocab,seq,gpu,n_gpus,dp,tp,mbs,gbs,recompute,precision,framework";
        let run = |name: &str| {
            let cells = format!("{name},GPT,12,1024,16,50257,1024,A100-SXM4-80GB,2,1,2,1,8,full,fp16,Megatron-DeepSpeed (1F1B)");
            let rows = read_rows(&format!("{header}\n{cells}\n")).expect("rows");
            Run::of(&rows[0], Profiles::library().expect("sound")).expect("a run")
        };
        use foretell_program::Recompute;
        let unclear = run("vtrain_single_node-0001");
        assert_eq!(unclear.plan.layout.recompute, Recompute::None);
        assert!(unclear.assumptions.iter().any(|assumption| assumption.contains("read as")), "{:?}", unclear.assumptions);
        assert_eq!(run("a").plan.layout.recompute, Recompute::Full);
    }

    #[test]
    fn experts_under_deepep_are_sharded_over_up_to_64_ranks() {
        let run = run("a,gpt-oss,8,1024,16,32000,1024,128,4,H100,64,64,1,1,64,3,bf16,NeMo AutoModel,TE + DeepEP");
        assert_eq!((run.plan.layout.expert, run.plan.layout.data), (64, 1));
        assert!(run.assumptions.iter().any(|assumption| assumption.contains("64 ranks")), "{:?}", run.assumptions);
    }

    #[test]
    fn a_stand_in_for_an_unstated_framework_has_a_wider_interval() {
        let named = run("a,Llama,16,1024,16,32000,1024,,,H100,8,8,1,1,8,3,bf16,FSDP,");
        let unnamed = run("a,Llama,16,1024,16,32000,1024,,,H100,8,8,1,1,8,3,bf16,,");
        assert_eq!(unnamed.stack_name, named.stack_name);
        assert!(unnamed.assumptions.iter().any(|assumption| assumption.contains("stands in")), "{:?}", unnamed.assumptions);
        assert_eq!(unnamed.stack.spread, Profiles::library().expect("sound").unseen);
    }
}
