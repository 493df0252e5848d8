//! The units that FSDP gathers and reduces as a whole: the layers, and what is in none of them.
//!
//! Source: `fsdp2_prepare_model` in `accelerate/utils/fsdp_utils.py` (1.15).

use super::super::{Fsdp2Groups, ParameterOf, Sharding, TracedJob};
use foretell_models::operator_tables::{Element, Line, OperatorTable, ParameterRole, TableParameter};

/// A unit.
#[derive(Clone, Debug, Default)]
pub(super) struct Unit {
    /// Elements of the rank's shard of trained and frozen parameters, with padding.
    pub(super) shard: u64,
    /// Bytes of the rank's shard as it is stored.
    pub(super) stored_bytes: u64,
    /// Elements of the shard that are cast before they are sent, and their bytes then.
    pub(super) cast_shard: u64,
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

    /// FSDP1 casts all of a unit that has something to cast.
    pub(super) fn cast_as_a_whole(&mut self, ranks: u64) {
        for unit in self.list.iter_mut().filter(|unit| unit.cast_bytes > 0) {
            (unit.cast_shard, unit.cast_bytes) = (unit.shard, unit.gathered_bytes() / ranks);
        }
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

/// Bytes of the images of a rank's batch in single precision, which live beside the narrower ones
/// that FSDP2's root makes of them for a model without autocast. 0 for texts, which are not cast.
pub(super) fn image_bytes(job: &TracedJob, values: &[f64]) -> u64 {
    let start = job.table.parts.iter().filter(|part| part.name == "forward.start");
    let first = start.flat_map(|part| &part.lines).find_map(|line| match line {
        Line::Operator(operator) => Some(operator),
        _ => None,
    });
    let image = first.filter(|operator| operator.name == "aten.convolution").and_then(|operator| operator.inputs.first());
    let is_cast = matches!(job.sharding, Sharding::Fsdp2 { groups: Fsdp2Groups::Accelerate, .. });
    let narrow = image.filter(|image| is_cast && image.element != Element::F32);
    narrow.map_or(0, |image| 4 * image.shape(values).iter().product::<f64>().round() as u64)
}

/// Whether a parameter belongs to the head over the vocabulary.
fn is_head(parameter: &TableParameter) -> bool {
    ["lm_head.", "embed_out.", "cls.predictions.decoder."].iter().any(|head| parameter.name.starts_with(head))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traced::TracedOptimizer;
    use Place::{Embedding, Root, Tail};
    use foretell_models::operator_tables::TableSizes;
    use std::sync::Arc;

    /// The places of an architecture's parameters that are in no layer.
    fn places(words: &[(&str, &str)]) -> Vec<(String, Place)> {
        let usual = [("framework", "hf"), ("version", "latest"), ("loss", "model"), ("kernels", "hf")];
        let key: Vec<(&str, &str)> = usual.iter().chain(words).copied().collect();
        let table = OperatorTable::library(&key).expect("the library is sound").expect("it was traced");
        let is_tied = table.parameters.iter().any(|parameter| parameter.role == ParameterRole::Tied && is_head(parameter));
        let own = table.parameters.iter().filter(|parameter| {
            parameter.stack.is_none() && !matches!(parameter.role, ParameterRole::Tied | ParameterRole::Buffer)
        });
        let ends = own.map(|parameter| {
            let name: Vec<&str> = parameter.name.rsplit('.').take(2).collect();
            (format!("{}.{}", name[1], name[0]), place(&table, parameter, is_tied))
        });
        ends.collect()
    }

    #[test]
    fn each_parameter_in_no_layer_has_the_group_that_accelerate_gives_it() {
        let named = |places: Vec<(String, Place)>, expected: &[(&str, Place)]| {
            let expected: Vec<(String, Place)> = expected.iter().map(|&(name, place)| (name.into(), place)).collect();
            assert_eq!(places, expected);
        };
        let (embedding, norm, head) = ("embed_tokens.weight", "norm.weight", "lm_head.weight");
        let llama = |head, adapter| places(&[("architecture", "llama"), ("adapter", adapter), ("head", head)]);
        named(llama("usual", "none"), &[(embedding, Embedding), (norm, Tail), (head, Tail)]);
        named(llama("usual", "lora-all"), &[(embedding, Embedding), (norm, Root), (head, Tail)]);
        named(llama("tied", "none"), &[(embedding, Tail), (norm, Tail)]);
        let gpt2 = [("wte.weight", Tail), ("wpe.weight", Root), ("ln_f.weight", Tail), ("ln_f.bias", Tail)];
        named(places(&[("architecture", "gpt2"), ("attention", "sdpa"), ("dropout", "none")]), &gpt2);
        let vit = places(&[("architecture", "vit"), ("attention", "sdpa")]);
        let of = |place: Place| vit.iter().filter(|(_, own)| *own == place).map(|(name, _)| name.as_str()).collect::<Vec<_>>();
        assert_eq!(of(Embedding), ["projection.weight", "projection.bias"]);
        assert_eq!(of(Tail), ["layernorm.weight", "layernorm.bias"]);
        assert_eq!(of(Root).last(), Some(&"classifier.bias"));
    }

    #[test]
    fn images_in_single_precision_live_beside_their_cast() {
        let bytes = |architecture: &str, precision: &str, sharding: Sharding| {
            let key = [("architecture", architecture), ("framework", "hf"), ("version", "latest"), ("precision", precision)];
            let table = OperatorTable::library(&key).expect("the library is sound").expect("it was traced");
            let sizes = [("b", 8), ("s", 512), ("h", 768), ("n", 12), ("k", 12), ("d", 64), ("f", 3072), ("v", 1000)];
            let empty = TableSizes { layers: 2, ..TableSizes::default() };
            let sizes = sizes.into_iter().fold(empty, |sizes, (symbol, size)| sizes.with(symbol, size));
            let values = table.values(&sizes).expect("sizes are given");
            let job = TracedJob::new(Arc::new(table), sizes, 4, sharding, Element::F32, TracedOptimizer::AdamWFused);
            image_bytes(&job, &values)
        };
        let accelerate = Sharding::Fsdp2 { reduce: Element::Bf16, groups: Fsdp2Groups::Accelerate };
        assert_eq!(bytes("vit", "bf16", accelerate), 8 * 3 * 224 * 224 * 4);
        let none = [("vit", "fp32", accelerate), ("vit", "bf16", Sharding::Ddp), ("llama", "bf16", accelerate)];
        assert!(none.into_iter().all(|(architecture, precision, sharding)| bytes(architecture, precision, sharding) == 0));
    }
}
