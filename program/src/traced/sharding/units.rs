//! The units that FSDP gathers and reduces as a whole: the layers, and what is in none of them.
//!
//! Source: `fsdp2_prepare_model` in `accelerate/utils/fsdp_utils.py` (1.15).

use super::super::{Fsdp2Groups, ParameterOf, Sharding, TracedJob};
use foretell_models::operator_tables::{OperatorTable, ParameterRole, TableParameter};

/// A unit.
#[derive(Clone, Debug, Default)]
pub(super) struct Unit {
    /// Elements of the rank's shard of trained and frozen parameters, with padding.
    pub(super) shard: u64,
    /// Bytes of the rank's shard as it is stored.
    pub(super) stored_bytes: u64,
    /// Bytes that are cast before they are sent.
    pub(super) cast_bytes: u64,
    /// Bytes of each gathered parameter, in the format in which it computes.
    pub(super) gathered: Vec<u64>,
    /// Trained elements, gathered, and their shard.
    pub(super) trained: u64,
    pub(super) trained_shard: u64,
}

impl Unit {
    /// Bytes of all gathered parameters.
    pub(super) fn gathered_bytes(&self) -> u64 {
        self.gathered.iter().sum()
    }
}

/// Where a parameter belongs that is in no layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The root's unit.
    Root,
    /// The embedding's.
    Embedding,
    /// That of the last norm and the head.
    Tail,
}

/// All units of a rank. Those of the layers come first; then the root's, the embedding's and the
/// tail's, which may be empty.
#[derive(Debug)]
pub(super) struct Units {
    list: Vec<Unit>,
    layers: usize,
    /// By the table's parameter.
    places: Vec<Place>,
    /// Whether the tail has the embedding, too, since the head shares its weights.
    pub(super) is_tied: bool,
}

impl Units {
    /// Empty units for a job's parameters.
    pub(super) fn new(job: &TracedJob) -> Self {
        let (table, layers) = (&job.table, job.sizes.layers);
        let is_tied = table.parameters.iter().any(|parameter| parameter.role == ParameterRole::Tied && is_head(parameter));
        let place = |parameter: &TableParameter| match job.sharding {
            Sharding::Fsdp2 { groups: Fsdp2Groups::Accelerate, .. } => place(table, parameter, is_tied),
            _ => Place::Root,
        };
        let places = table.parameters.iter().map(place).collect();
        Self { list: vec![Unit::default(); layers + 3], layers, places, is_tied }
    }

    /// The number of a parameter's unit.
    pub(super) fn of(&self, parameter: ParameterOf) -> usize {
        parameter.layer.unwrap_or_else(|| match self.places[parameter.index] {
            Place::Root => self.root(),
            Place::Embedding => self.embedding(),
            Place::Tail => self.tail(),
        })
    }

    /// The last layer's unit, if there is a layer.
    pub(super) fn last_layer(&self) -> Option<usize> {
        self.layers.checked_sub(1)
    }

    /// The root's unit.
    pub(super) fn root(&self) -> usize {
        self.layers
    }

    /// The embedding's unit.
    pub(super) fn embedding(&self) -> usize {
        self.layers + 1
    }

    /// The tail's unit.
    pub(super) fn tail(&self) -> usize {
        self.layers + 2
    }

    /// A unit by its number.
    pub(super) fn unit(&self, number: usize) -> &Unit {
        &self.list[number]
    }

    /// The same, to fill it.
    pub(super) fn unit_mut(&mut self, number: usize) -> &mut Unit {
        &mut self.list[number]
    }
}

/// Accelerate's place of a parameter that is in no layer: the modules that the model names as its
/// embedding and head, and the last norm among the base model's own modules.
fn place(table: &OperatorTable, parameter: &TableParameter, is_tied: bool) -> Place {
    let name = parameter.name.as_str();
    let [.., module, _] = name.split('.').collect::<Vec<_>>()[..] else { return Place::Root };
    if ["embed_tokens", "wte", "embed_in", "word_embeddings"].contains(&module) || name.contains(".patch_embeddings.") {
        return if is_tied { Place::Tail } else { Place::Embedding };
    }
    // Below peft's wrapper the attribute `model` is the model with its head, which has no norm.
    let has_adapters = table.parameters.iter().any(|parameter| parameter.role == ParameterRole::Adapter);
    let is_found = name.split('.').count() == 3 && !(has_adapters && name.starts_with("model."));
    let is_norm = module == "ln_f" || module.contains("norm");
    if is_head(parameter) || (is_norm && is_found) { Place::Tail } else { Place::Root }
}

/// Whether a parameter belongs to the head over the vocabulary.
fn is_head(parameter: &TableParameter) -> bool {
    ["lm_head.", "embed_out.", "cls.predictions.decoder."].iter().any(|head| parameter.name.starts_with(head))
}
