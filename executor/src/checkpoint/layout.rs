//! The offsets of all tensors in a checkpoint's files. They follow from the model, the optimizer
//! and the frozen parameters, so every rank knows them without communication.

use super::{ADAPTER_FILE, MODEL_FILE, OPTIMIZER_FILE};
use crate::checkpoint_error::CheckpointError;
use foretell_models::{Graph, Tensor, TensorId, is_adapter};
use foretell_program::{Plan, StateValue};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::{BTreeMap, HashMap};

/// The name of the outer optimizer's velocity.
pub(super) const OUTER_VELOCITY: &str = "outer_momentum_buffer";
pub(super) const OUTER_PARAMETER: &str = "outer_parameter";
/// The name of a worker's residual: the accumulated rounding errors of its pushes.
pub(super) const RESIDUAL: &str = "residual";
/// The name of the parameters of replicas other than the first.
pub(super) const PARAMETER: &str = "parameter";

/// The offset in a file of each tensor's value, by replica.
type Places = BTreeMap<(TensorId, StateValue, usize), u64>;

/// The files of a checkpoint that hold tensors.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointLayout {
    /// Each with its name.
    pub(crate) files: Vec<(&'static str, FileLayout)>,
}

/// The offsets of tensors in a safetensors file.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileLayout {
    /// The bytes before the tensors' elements.
    pub(super) header: Vec<u8>,
    /// The offset in the file of each tensor's public form. The parts of a form are contiguous.
    places: Places,
    /// The offset of each batch counter (`num_batches_tracked`) of batch normalisation.
    pub(super) batch_counts: Vec<u64>,
    /// The size of the file.
    pub(crate) bytes: u64,
}

impl CheckpointLayout {
    /// The files of a model that is trained by a plan.
    pub(crate) fn new(graph: &Graph, plan: &Plan) -> Result<Self, CheckpointError> {
        let (mut model, mut adapters) = (FileBuilder::default(), FileBuilder::default());
        let running = graph.tensors.iter().filter_map(|tensor| tensor.public_batch_count());
        for name in running.collect::<Vec<_>>() {
            let place = model.add(name, Dtype::I64, Vec::new());
            model.batch_counts.push(place);
        }
        let tensors = || graph.tensors.iter().enumerate().map(|(index, tensor)| (TensorId(index), tensor));
        for (id, tensor) in tensors() {
            let parts = tensor.public_tensors();
            let model = if is_adapter(&tensor.name) { &mut adapters } else { &mut model };
            // Parameters and running statistics both use the key `Parameter`.
            if !parts.is_empty() {
                model.places.insert((id, StateValue::Parameter, 0), model.end);
            }
            for part in parts {
                model.add(part.name, Dtype::F32, part.shape);
            }
        }
        let mut optimizer = FileBuilder::default();
        let is_trained = |(_, tensor): &(TensorId, &Tensor)| !plan.training.is_frozen(&tensor.name);
        let matrices = graph.hidden_matrices();
        let [of_others, of_matrices] = [false, true].map(|is_hidden_matrix| optimizer_values(plan, is_hidden_matrix));
        for (id, tensor) in graph.parameters().filter(is_trained) {
            for &(value, state) in if matrices.contains_key(&id) { &of_matrices } else { &of_others } {
                let replicas = plan.replicas_of(value);
                // The parameters of the first replica are in the model's file.
                let first = usize::from(value == StateValue::Parameter);
                for replica in first..replicas {
                    optimizer.places.insert((id, value, replica), optimizer.end);
                    for part in tensor.public_tensors() {
                        optimizer.add(name_of_state(&part.name, state, replica), Dtype::F32, part.shape);
                    }
                }
            }
        }
        let mut files = vec![(MODEL_FILE, model.finish()?), (OPTIMIZER_FILE, optimizer.finish()?)];
        if plan.training.lora.is_some() {
            files.push((ADAPTER_FILE, adapters.finish()?));
        }
        Ok(Self { files })
    }

    /// The number of the file that has a replica's value of a tensor, and the offset there.
    pub(crate) fn place(&self, tensor: TensorId, value: StateValue, replica: usize) -> Option<(usize, u64)> {
        let value = match value {
            StateValue::Master | StateValue::Running => StateValue::Parameter,
            value => value,
        };
        let key = (tensor, value, replica);
        let place = |(number, (_, file)): (usize, &(&str, FileLayout))| Some((number, *file.places.get(&key)?));
        self.files.iter().enumerate().find_map(place)
    }

    /// The size of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, file)| file.bytes).sum()
    }
}

/// The values that the optimizer's file has for a parameter, with their names.
fn optimizer_values(plan: &Plan, is_hidden_matrix: bool) -> Vec<(StateValue, &'static str)> {
    let names = plan.optimizer.state_names(is_hidden_matrix);
    let states = names.iter().take(plan.optimizer_states_of(is_hidden_matrix)).enumerate();
    let mut values: Vec<(StateValue, &str)> = states.map(|(number, &state)| (StateValue::Optimizer(number), state)).collect();
    if plan.mode.outer().is_some_and(|outer| outer.momentum != 0.0) {
        values.push((StateValue::OuterVelocity, OUTER_VELOCITY));
    }
    if plan.mode.keeps_outer_parameters() {
        values.push((StateValue::OuterParameter, OUTER_PARAMETER));
    }
    if plan.mode.keeps_residuals() {
        values.push((StateValue::Residual, RESIDUAL));
    }
    if plan.mode.differs_after_exchange(StateValue::Parameter) {
        values.push((StateValue::Parameter, PARAMETER));
    }
    values
}

/// The name of a replica's value of a parameter in the optimizer's file.
pub(super) fn name_of_state(parameter: &str, state: &str, replica: usize) -> String {
    match replica {
        0 => format!("{parameter}.{state}"),
        _ => format!("{parameter}.{state}.replica_{replica}"),
    }
}

/// The tensors of a file, while it is planned.
#[derive(Default)]
struct FileBuilder {
    tensors: Vec<(String, TensorInfo)>,
    places: Places,
    batch_counts: Vec<u64>,
    /// The end of the last tensor, counted from the first one's start.
    end: u64,
}

impl FileBuilder {
    /// Appends a tensor. Returns its offset from the first tensor.
    fn add(&mut self, name: String, dtype: Dtype, shape: Vec<usize>) -> u64 {
        let start = self.end;
        let size = (dtype.bitsize() / 8) as u64;
        self.end += shape.iter().map(|&extent| extent as u64).product::<u64>() * size;
        self.tensors.push((name, TensorInfo { dtype, shape, data_offsets: (start as usize, self.end as usize) }));
        start
    }

    fn finish(self) -> Result<FileLayout, CheckpointError> {
        let unusable = |reason: String| CheckpointError::OtherModel {
            path: "model.safetensors".into(),
            model: "this model".into(),
            reason,
            hint: "this is a fault in Foretell: please report it".into(),
        };
        // transformers refuses files that do not say which framework's names they have.
        let framework = HashMap::from([("format".to_string(), "pt".to_string())]);
        let metadata = Metadata::new(Some(framework), self.tensors).map_err(|error| unusable(error.to_string()))?;
        let mut text = serde_json::to_vec(&metadata).map_err(|error| unusable(error.to_string()))?;
        // The first tensor starts at a multiple of eight bytes.
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.append(&mut text);
        let first = header.len() as u64;
        let places = self.places.into_iter().map(|(key, place)| (key, place + first)).collect();
        let batch_counts = self.batch_counts.into_iter().map(|place| place + first).collect();
        Ok(FileLayout { header, places, batch_counts, bytes: first + self.end })
    }
}
