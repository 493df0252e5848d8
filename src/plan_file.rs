//! Plan files, read and written (`docs/reference/contract.md`). [`foretell_program::Plan`] has what
//! the compiler needs; a plan file adds the model and the topology, by name, by path, or in place.

mod input;
mod model_reference;

pub use input::{Input, MOST_AHEAD};
pub use model_reference::ModelReference;

use crate::failure::{Failure, code};
use crate::foreign::{self, Wanted};
use crate::host;
use crate::inputs::{self, NamedModel};
use crate::method::Method;
use crate::stated_method;
use crate::stated_overlap::StatedOverlap;
use foretell_export::check_stack;
use foretell_program::{
    Compiled, Layout, Mode, Optimizer, Overlap, Plan, PlannedWorkload, PolicyMethod, Rollout, Stack, Training, compile,
};
use foretell_simulator::gpu;
use foretell_topologies::{Topology, TopologyReference};
use foretell_units::{Bytes, DataType, SchemaVersion};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de};
use std::path::{Path, PathBuf};

/// The content of a plan file.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Plan")]
pub struct PlanFile {
    /// The version of the file's form.
    #[serde(default)]
    schema_version: SchemaVersion,
    /// The model.
    pub model: ModelReference,
    /// The devices.
    pub topology: TopologyReference,
    /// Number of nodes of the topology's node template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<usize>,
    /// The node kind that holds the first ranks; default: the first of the topology.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_nodes: Option<String>,
    /// The mesh, and the choices of placement and order.
    #[serde(default)]
    layout: Layout,
    /// Samples of a step over all ranks.
    global_batch: usize,
    /// The number format of activations and matrix products.
    #[serde(default = "default_precision")]
    precision: DataType,
    /// The optimizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    optimizer: Option<Optimizer>,
    /// The recipe.
    #[serde(default)]
    training: Training,
    /// Samples that share batch statistics; default: a rank's micro-batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    batch_norm_group: Option<usize>,
    /// The software stack to model.
    #[serde(default)]
    stack: Stack,
    /// Which communication overlaps kernels; default: the stack's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    overlap: Option<StatedOverlap>,
    /// Facts about a run under another stack.
    #[serde(default, skip_serializing_if = "PlannedWorkload::is_usual")]
    workload: PlannedWorkload,
    /// How the replicas of the model stay together.
    #[serde(default)]
    mode: Mode,
    /// What is trained: everything (`pretrain`, `full`), adapters (`lora`, `qlora`), on preferences
    /// (`dpo`, `orpo`, `kto`, `reward`), or by RL post-training with a `rollout` (`grpo`, `ppo`).
    /// `global_batch` of the last two counts the responses of an update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    method: Option<Method>,
    /// The generation of a step of RL post-training, and its roles beside the actor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rollout: Option<Rollout>,
    /// The input pipeline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Input>,
}

fn default_precision() -> DataType {
    DataType::Fp32
}

/// RL post-training: the method and the rollout.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyTraining {
    /// The training method.
    pub method: PolicyMethod,
    /// The generation of a step.
    pub rollout: Rollout,
}

/// A plan file whose model and topology have been loaded.
#[derive(Clone, Debug)]
pub struct LoadedPlan {
    /// The model and its name.
    pub model: NamedModel,
    /// The devices.
    pub topology: Topology,
    /// The rest of the file, in the compiler's form.
    pub plan: Plan,
    /// The file as written, with model and topology as named there.
    pub file: PlanFile,
    /// The file's path, for messages.
    pub path: PathBuf,
    /// What the file leaves to the stack, one sentence each.
    pub remarks: Vec<String>,
    /// RL post-training, if the file describes some.
    pub policy: Option<PolicyTraining>,
}

impl LoadedPlan {
    /// Replaces the plan's `training`, and its optimizer if the recipe names one, by the recipe in
    /// a file.
    pub fn apply_recipe(&mut self, recipe: &Path) -> Result<(), Failure> {
        let mut training: Training = inputs::parse_yaml(&inputs::read(recipe)?, recipe)?;
        training.schema_version = None;
        self.file.optimizer = training.optimizer.take().or(Some(self.plan.optimizer));
        self.file.training = training;
        self.plan = self.file.plan();
        self.file.divided(&self.plan).validate().map_err(|error| Failure::of_input(error).in_file(recipe))
    }

    /// Replaces the plan's routing of tokens to experts by the value of `--routing`.
    pub fn replace_routing(&mut self, routing: &str) -> Result<(), Failure> {
        self.file.workload.routing = inputs::routing(routing)?;
        self.plan.workload = self.file.workload.clone();
        self.plan
            .validate_routing(self.model.model.experts(), self.model.model.mixture_layers())
            .map_err(|error| Failure::of_input(error).in_file(&self.path))
    }

    /// Replaces the plan's training and workload.
    pub fn replace_training(&mut self, training: Training, workload: PlannedWorkload) -> Result<(), Failure> {
        (self.file.training, self.file.workload) = (training, workload);
        self.plan = self.file.plan();
        let divided = self.file.divided(&self.plan);
        divided.validate().map_err(|error| Failure::of_input(error).in_file(&self.path))?;
        check_stack(&self.model.model, &divided).map_err(|error| Failure::of_input(error).in_file(&self.path))
    }

    /// Refuses a plan whose mode has several kinds of steps, for a question (`what`) about one
    /// kind.
    pub fn require_equal_steps(&self, what: &str) -> Result<(), Failure> {
        if self.plan.mode.is_synchronous() {
            return Ok(());
        }
        let message = format!("`mode`: {what} is there for the synchronous mode only");
        Err(Failure::input(code::PLAN_CONTRADICTION, message).hint("use `mode: synchronous`").in_file(&self.path))
    }

    /// Compiles the plan. An error names the file.
    pub fn compile(&self) -> Result<Compiled, Failure> {
        compile(&self.model.model, &self.model.name, &self.plan).map_err(|error| Failure::of_input(error).in_file(&self.path))
    }
}

impl PlanFile {
    /// Makes the file of a plan.
    pub fn new(model: ModelReference, topology: TopologyReference, nodes: Option<usize>, plan: &Plan) -> Self {
        let plan = plan.clone();
        Self {
            schema_version: SchemaVersion,
            model,
            topology,
            nodes,
            first_nodes: None,
            layout: plan.layout,
            global_batch: plan.global_batch,
            precision: plan.precision,
            optimizer: Some(plan.optimizer),
            training: plan.training,
            batch_norm_group: plan.batch_norm_group,
            overlap: StatedOverlap::of(plan.overlap, usual_overlap(&plan.stack).unwrap_or_default()),
            stack: plan.stack,
            workload: plan.workload,
            mode: plan.mode,
            method: None,
            rollout: None,
            input: None,
        }
    }

    /// The file with RL post-training, if `policy` is given.
    #[must_use]
    pub fn with_policy(self, policy: Option<PolicyTraining>) -> Self {
        let (method, rollout) = policy.map(|policy| (Method::from(policy.method), policy.rollout)).unzip();
        Self { method, rollout, ..self }
    }

    /// Returns the plan without model and topology.
    pub fn plan(&self) -> Plan {
        let file = self.clone();
        Plan {
            layout: file.layout,
            global_batch: file.global_batch,
            precision: file.precision,
            optimizer: file.training.optimizer.or(file.optimizer).unwrap_or_default(),
            training: Training { schema_version: None, optimizer: None, ..file.training },
            batch_norm_group: file.batch_norm_group,
            overlap: file.overlap.unwrap_or_default().over(usual_overlap(&file.stack).unwrap_or_default()),
            stack: file.stack,
            workload: file.workload,
            mode: file.mode,
        }
    }

    /// The file's plan with a batch that the layout must divide. Responses of a rollout are packed
    /// before they are distributed, so their number need not be a multiple of the layout's.
    fn divided(&self, plan: &Plan) -> Plan {
        let global_batch = if self.rollout.is_some() { plan.layout.samples_at_once() } else { plan.global_batch };
        Plan { global_batch, ..plan.clone() }
    }

    /// Makes paths that are relative to one folder relative to another. Names that are not paths
    /// stay.
    pub fn relative_to(&mut self, from: &Path, to: &Path) -> Result<(), Failure> {
        let absolute = |path: &Path| {
            // The folder of a bare file name is empty.
            let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            host::absolute(path).map_err(|error| {
                Failure::undone(code::FILE_UNWRITABLE, format!("the path `{}` cannot be made absolute: {error}", path.display()))
            })
        };
        let (from, to) = (absolute(from)?, absolute(to)?);
        let moved = |name: &mut String, is_known: bool| {
            let path = from.join(name.as_str());
            if !is_known && host::is_file(&path) {
                *name = relative(&path, &to).display().to_string();
            }
        };
        if let ModelReference::Named(name) = &mut self.model {
            let is_known = inputs::is_zoo_name(name);
            moved(name, is_known);
        }
        if let TopologyReference::Named(name) = &mut self.topology {
            let is_known = inputs::is_library_name(name);
            moved(name, is_known);
        }
        Ok(())
    }

    /// Makes typed paths absolute, so the file can be stored anywhere. Zoo and library names stay.
    pub fn absolute_paths(&mut self) -> Result<(), Failure> {
        let absolute = |name: &mut String, is_known: bool| {
            if !is_known && host::is_file(Path::new(name.as_str())) {
                let path = host::absolute(Path::new(name.as_str())).map_err(|error| {
                    Failure::undone(code::FILE_UNWRITABLE, format!("the path `{name}` cannot be made absolute: {error}"))
                })?;
                *name = path.display().to_string();
            }
            Ok::<(), Failure>(())
        };
        if let ModelReference::Named(name) = &mut self.model {
            let is_known = inputs::is_zoo_name(name);
            absolute(name, is_known)?;
        }
        if let TopologyReference::Named(name) = &mut self.topology {
            let is_known = inputs::is_library_name(name);
            absolute(name, is_known)?;
        }
        Ok(())
    }

    /// Formats the file as YAML.
    pub fn to_yaml(&self) -> Result<String, Failure> {
        serde_saphyr::to_string(self)
            .map_err(|error| Failure::undone(code::FILE_UNWRITABLE, format!("the plan cannot be written: {error}")))
    }

    /// Reads a plan file of a training step, its model and its topology.
    pub fn load(path: &Path) -> Result<LoadedPlan, Failure> {
        let loaded = Self::load_any(path)?;
        match &loaded.policy {
            None => Ok(loaded),
            Some(PolicyTraining { method, .. }) => {
                let message = format!("`method: {}`: only `plan` and `simulate` know steps that generate", method.name());
                let hint = "leave `method` and `rollout` out: the rest is the actor's own training";
                Err(Failure::input(code::PLAN_CONTRADICTION, message).hint(hint).in_file(path))
            }
        }
    }

    /// Reads a plan file, including those of RL post-training.
    pub fn load_any(path: &Path) -> Result<LoadedPlan, Failure> {
        let text = inputs::read(path)?;
        let file: Result<PlanFile, Failure> = inputs::parse_yaml(&text, path);
        let mut file = file.map_err(|failure| foreign::explain(failure, &text, path, Wanted::Plan))?;
        if !inputs::parse_yaml::<Stated>(&text, path)?.layout.bucket {
            file.layout.bucket = usual_bucket(&file.stack, file.layout.bucket);
        }
        let folder = path.parent().unwrap_or(Path::new("."));
        let model = match &file.model {
            ModelReference::Named(name) => inputs::model_in(name, folder)?,
            ModelReference::InPlace(model) => {
                inputs::sound(NamedModel { name: model.family().into(), model: model.clone() }, path)?
            }
        };
        let topology = match &file.topology {
            TopologyReference::Named(name) => inputs::topology_in(name, folder)?,
            TopologyReference::InPlace(spec) => {
                spec.as_ref().clone().build().map_err(|error| error.in_file(&path.display().to_string(), &text))?
            }
        };
        let topology = match file.nodes {
            Some(nodes) => topology.with_nodes(nodes).map_err(|error| error.in_file(&path.display().to_string(), &text))?,
            None => topology,
        };
        let topology = match &file.first_nodes {
            Some(first) => topology.beginning_with(first).map_err(|error| error.in_file(&path.display().to_string(), &text))?,
            None => topology,
        };
        topology.validate().map_err(|error| error.in_file(&path.display().to_string(), &text))?;
        if let (Some(plan), Some(training)) = (file.optimizer, file.training.optimizer)
            && plan != training
        {
            let (plan, training) = (plan.name(), training.name());
            let message = format!("`optimizer` is `{plan}`, and `training.optimizer` is `{training}`");
            return Err(Failure::input(code::PLAN_CONTRADICTION, message).hint("keep one of them").in_file(path));
        }
        let mut method_remarks = Vec::new();
        // The method is translated to the fields that describe the same.
        if let Some(method) = file.method.take_if(|method| method.policy().is_none()) {
            stated_method::apply(method, &mut file.training, &mut file.workload, &model.model, &mut method_remarks)
                .map_err(|failure| failure.in_file(path))?;
        }
        let plan = file.plan();
        let stack = inputs::stack(plan.stack.name()).map_err(|failure| failure.in_file(path))?;
        let divided = file.divided(&plan);
        let checked =
            divided.validate().and_then(|()| divided.validate_routing(model.model.experts(), model.model.mixture_layers()));
        checked.map_err(|error| Failure::of_input(error).in_file(path))?;
        check_stack(&model.model, &divided).map_err(|error| Failure::of_input(error).in_file(path))?;
        let (model, mut remarks) = without_padding(model, &plan, stack.defaults.sequence_share);
        if file.overlap.is_some_and(|overlap| overlap.expert == Some(true)) && model.model.experts().is_none() {
            remarks.push("`overlap: {expert: true}` without effect: the model has no mixtures of experts".into());
        }
        if file.batch_norm_group.is_some() && !model.model.has_batch_norm() {
            remarks.push("`batch_norm_group` without effect: the model has no batch normalisation".into());
        }
        remarks.append(&mut method_remarks);
        let policy = match (file.method.and_then(Method::policy), file.rollout.clone()) {
            (Some(method), Some(rollout)) => Some(PolicyTraining { method, rollout }),
            (None, None) => None,
            (method, _) => {
                let (stated, missing) = if method.is_some() { ("method", "rollout") } else { ("rollout", "method") };
                let message = format!("`{stated}` without `{missing}`");
                return Err(Failure::input(code::PLAN_CONTRADICTION, message)
                    .hint("state `method: grpo` or `ppo` and a `rollout`, or neither")
                    .in_file(path));
            }
        };
        if let Some(policy) = &policy {
            policy.rollout.validate(plan.global_batch).map_err(|error| Failure::of_input(error).in_file(path))?;
        }
        Ok(LoadedPlan { model, topology, plan, file, path: path.into(), remarks, policy })
    }
}

/// Returns the model in the size that the stack trains: without padding, if the plan or the stack
/// says so. Also returns a sentence on that.
fn without_padding(model: NamedModel, plan: &Plan, usual: f64) -> (NamedModel, Vec<String>) {
    let share = plan.workload.unpadded.unwrap_or(usual);
    let Some(shorter) = gpu::without_padding(&model.model, share) else {
        let stated = plan.workload.unpadded.filter(|share| *share < 1.0);
        let remark = |share| format!("`unpadded: {share}` without effect: only BERT with 512 tokens or more is trained so");
        return (model, stated.map(remark).into_iter().collect());
    };
    let remark = format!(
        "{:.0} % of a sequence's tokens are computed, since `{}` leaves padding out; `workload: {{unpadded: 1}}` computes all",
        share * 100.0,
        plan.stack.name()
    );
    (NamedModel { model: shorter, ..model }, vec![remark])
}

/// Returns a path relative to a folder. Both are absolute.
fn relative(path: &Path, folder: &Path) -> PathBuf {
    // Resolve first: `..` can be removed by name only from a resolved path.
    let resolve = |path: &Path| host::resolved(path).unwrap_or_else(|_| path.to_path_buf());
    let (path, folder) = (resolve(path), resolve(folder));
    let common = path.components().zip(folder.components()).take_while(|(component, other)| component == other).count();
    let up = folder.components().skip(common).map(|_| std::path::Component::ParentDir);
    up.chain(path.components().skip(common)).collect()
}

/// Which fields a file states that its stack would otherwise decide.
#[derive(Deserialize)]
struct Stated {
    #[serde(default)]
    layout: StatedLayout,
}

#[derive(Default, Deserialize)]
struct StatedLayout {
    #[serde(default, deserialize_with = "is_there")]
    bucket: bool,
}

/// `true` for any value.
fn is_there<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    de::IgnoredAny::deserialize(deserializer).map(|_| true)
}

/// Returns the bytes that a stack communicates together: the default of a layout without `bucket`.
/// `own` is the default for unknown stacks.
pub fn usual_bucket(stack: &Stack, own: Bytes) -> Bytes {
    inputs::stack(stack.name()).map_or(own, |stack| stack.defaults.bucket)
}

/// Returns which communication a stack overlaps with kernels: the default of a file without
/// `overlap`.
pub fn usual_overlap(stack: &Stack) -> Option<Overlap> {
    inputs::stack(stack.name()).ok().map(|stack| stack.defaults.overlap)
}
