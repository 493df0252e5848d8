//! Files of weights: opening them, and finding a model's tensors in them.

use super::{ADAPTER_FILE, MODEL_FILE};
use crate::checkpoint_error::CheckpointError;
use crate::files::read_description;
use crate::half::SixteenBits;
use crate::regular;
use crate::whole_file::folder_of;
use foretell_models::{Graph, PublicTensor, Role, Tensor, is_adapter};
use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The file that names the parts of sharded weights.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Tensors that files may have although models do not: buffers that follow from the sizes, and
/// heads that are not trained here. Each entry is an end or a start of a name.
const UNUSED_ENDS: [&str; 7] = [
    ".num_batches_tracked",
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
    ".position_ids",
    "cls.predictions.decoder.bias",
    "relative_attention_bias.weight",
];
const UNUSED_STARTS: [&str; 3] = ["bert.pooler.", "pooler.", "cls.seq_relationship."];

/// Second names of the embedding, in models that tie it to the output layer.
const TIED_NAMES: [&str; 5] = [
    "lm_head.weight",
    "cls.predictions.decoder.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "transformer.lm_head.weight",
];

/// First parts of names that a file without the model's head leaves out.
const BASE_PREFIXES: [&str; 3] = ["transformer.", "model.", "bert."];

/// The outcome of matching a file of weights with a model.
#[derive(Clone, Debug, Default)]
pub struct InitialWeights {
    /// The tensors that start fresh because the file has them in another size, or not at all.
    pub fresh: Vec<String>,
    /// The tensors of the file that the model does not use.
    pub unused: Vec<String>,
}

/// Open files of weights.
pub(super) struct TensorFiles {
    /// The path that was given.
    pub(super) path: PathBuf,
    files: Vec<(PathBuf, Mmap)>,
    /// By name: the index of the file, the offset of the tensor's first byte, and its description.
    tensors: BTreeMap<String, (usize, usize, TensorInfo)>,
}

/// A tensor in an open file.
pub(super) struct StoredTensor<'a> {
    path: &'a Path,
    name: &'a str,
    info: &'a TensorInfo,
    bytes: &'a [u8],
}

impl TensorFiles {
    /// As [`TensorFiles::open`]. If the graph has adapters, also opens their file if it lies beside
    /// the weights.
    pub(super) fn open_with_adapters(path: &Path, graph: &Graph) -> Result<Self, CheckpointError> {
        let mut files = Self::open(path)?;
        let beside = folder_of_weights(path).join(ADAPTER_FILE);
        if beside.is_file() && graph.parameters().any(|(_, tensor)| is_adapter(&tensor.name)) {
            files.add(beside)?;
        }
        Ok(files)
    }

    /// Opens a safetensors file, an index of several, or a folder with either.
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let mut files = Self { path: path.into(), files: Vec::new(), tensors: BTreeMap::new() };
        let in_folder = [MODEL_FILE, INDEX_FILE].map(|name| path.join(name)).into_iter().find(|file| file.is_file());
        let path = match in_folder {
            Some(file) => file,
            None if path.is_dir() => {
                return Err(CheckpointError::read(path, std::io::Error::other(format!("it has no `{MODEL_FILE}`"))));
            }
            None => path.into(),
        };
        if path.extension().is_some_and(|extension| extension == "json") {
            for part in parts_of_index(&path)? {
                files.add(part)?;
            }
        } else {
            files.add(path)?;
        }
        Ok(files)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), CheckpointError> {
        let (file, _) = regular::open(&path).map_err(|error| CheckpointError::read(&path, error))?;
        // SAFETY: the map is only read. If the file is truncated meanwhile, a signal ends the
        // program, as when a disk fails.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| CheckpointError::read(&path, error))?;
        let damaged = |error: safetensors::SafeTensorError| CheckpointError::Damaged {
            path: path.clone(),
            reason: format!("it is not a safetensors file, or not all of one ({error})"),
            hint: "copy or download it again",
        };
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(damaged)?;
        for (name, info) in metadata.tensors() {
            let place = 8 + header + info.data_offsets.0;
            self.tensors.insert(name, (self.files.len(), place, info.clone()));
        }
        self.files.push((path, map));
        Ok(())
    }

    /// The tensor with a name.
    pub(super) fn find(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (name, (file, first, info)) = self.tensors.get_key_value(name)?;
        let (path, map) = self.files.get(*file)?;
        let length = info.data_offsets.1 - info.data_offsets.0;
        Some(StoredTensor { path, name, info, bytes: map.get(*first..first + length)? })
    }
}

/// The folder of weights that are named by a file or by the folder itself.
pub fn folder_of_weights(path: &Path) -> &Path {
    if path.is_dir() { path } else { folder_of(path) }
}

/// The files that an index names, which lie beside it.
fn parts_of_index(path: &Path) -> Result<BTreeSet<PathBuf>, CheckpointError> {
    /// The part of the index that is needed.
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let damaged = |reason: String| CheckpointError::Damaged { path: path.into(), reason, hint: "copy or download it again" };
    let text = read_description(path).map_err(|error| CheckpointError::read(path, error))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let part = |name: String| match Path::new(&name).file_name() {
        Some(file) if file == name.as_str() => Ok(folder.join(name)),
        _ => Err(damaged(format!("`{name}` is not the name of a file beside it"))),
    };
    index.weight_map.into_values().map(part).collect()
}

impl StoredTensor<'_> {
    /// Reads the elements from `first` on, in the order of the file, as single-precision numbers.
    pub(super) fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        let width = self.info.dtype.bitsize() / 8;
        let bytes = self.bytes.get(first * width..).expect("invariant: the tensor has the elements that are read");
        let words = || bytes.as_chunks::<2>().0.iter().map(|&bytes| u16::from_le_bytes(bytes));
        match self.info.dtype {
            Dtype::F32 => {
                let stored = bytes.as_chunks::<4>().0;
                values.iter_mut().zip(stored).for_each(|(value, &bytes)| *value = f32::from_le_bytes(bytes));
            }
            Dtype::F64 => {
                let stored = bytes.as_chunks::<8>().0;
                values.iter_mut().zip(stored).for_each(|(value, &bytes)| *value = f64::from_le_bytes(bytes) as f32);
            }
            Dtype::BF16 => values.iter_mut().zip(words()).for_each(|(value, bits)| *value = SixteenBits::Bf16.to_single(bits)),
            Dtype::F16 => values.iter_mut().zip(words()).for_each(|(value, bits)| *value = SixteenBits::Fp16.to_single(bits)),
            other => {
                return Err(CheckpointError::Damaged {
                    path: self.path.into(),
                    reason: format!("`{}` has numbers of the type {other:?}", self.name),
                    hint: "convert the weights to F32, F16 or BF16",
                });
            }
        }
        Ok(())
    }

    fn check_finite(&self) -> Result<(), CheckpointError> {
        let mut values = vec![0.0; self.info.shape.iter().product()];
        self.read(0, &mut values)?;
        match values.into_iter().find(|value| !value.is_finite()) {
            None => Ok(()),
            Some(value) => Err(CheckpointError::NotFinite { path: self.path.into(), tensor: self.name.into(), value }),
        }
    }
}

/// How strictly weights must match a model. A start from published weights may lack adapters, and
/// the last layer of a classifier may be missing or have another size.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Heads {
    /// Such tensors then start fresh.
    MayDiffer,
    MustMatch,
}

/// A model's public tensors, and their names in some files.
pub(super) struct Matching {
    /// Name in the files, by public name. Tensors that start fresh have no entry.
    pub(super) stored: BTreeMap<String, String>,
    pub(super) found: InitialWeights,
}

impl Matching {
    /// Finds the tensors of a model in files of weights.
    pub(super) fn new(files: &TensorFiles, graph: &Graph, heads: Heads) -> Result<Self, CheckpointError> {
        let mut matching = Self { stored: BTreeMap::new(), found: InitialWeights::default() };
        let refused = |reason: String, hint: String| CheckpointError::OtherModel {
            path: files.path.clone(),
            model: graph.name.clone(),
            reason,
            hint,
        };
        for tensor in &graph.tensors {
            let is_head = tensor.dimensions.iter().any(|dimension| dimension.name == "classes");
            let may_start_fresh = heads == Heads::MayDiffer && (is_head || is_adapter(&tensor.name));
            for PublicTensor { name, shape, .. } in tensor.public_tensors() {
                let stored = names_in_files(&name).into_iter().find_map(|name| files.tensors.get_key_value(&name));
                match stored {
                    Some((stored, (.., info))) if info.shape == shape => {
                        matching.stored.insert(name, stored.clone());
                    }
                    // The model has a tensor of this name with another shape, so the stored one is
                    // unused rather than unknown.
                    Some((stored, _)) if may_start_fresh => {
                        matching.found.unused.push(stored.clone());
                        matching.found.fresh.push(name);
                    }
                    None if may_start_fresh => matching.found.fresh.push(name),
                    Some((_, (.., info))) => {
                        let (reason, hint) = other_shape(tensor, &name, &shape, &info.shape);
                        return Err(refused(reason, hint));
                    }
                    None => {
                        let hint = "use the model that the weights are of, or check its sizes";
                        return Err(refused(format!("`{name}` is missing"), hint.into()));
                    }
                }
            }
        }
        let used: BTreeSet<&String> = matching.stored.values().chain(&matching.found.unused).collect();
        let others: Vec<String> = files.tensors.keys().filter(|name| !used.contains(name)).cloned().collect();
        for name in others {
            if TIED_NAMES.contains(&name.as_str()) {
                matching
                    .check_tied(files, &name)
                    .map_err(|reason| refused(reason, "use `tied_embeddings: false` for this model".into()))?;
            } else if !is_unused(&name) {
                let hint = "use the model that the weights are of, or check its sizes";
                return Err(refused(format!("the model has no `{name}`"), hint.into()));
            }
            matching.found.unused.push(name);
        }
        matching.found.unused.retain(|name| !name.ends_with(".num_batches_tracked"));
        Ok(matching)
    }

    /// Checks that all values are finite.
    pub(super) fn check_finite(&self, files: &TensorFiles) -> Result<(), CheckpointError> {
        self.stored.values().filter_map(|name| files.find(name)).try_for_each(|stored| stored.check_finite())
    }

    /// Checks that a second name of the embedding has the embedding's values.
    fn check_tied(&self, files: &TensorFiles, name: &str) -> Result<(), String> {
        let bytes = |name: &str| files.find(name).map(|stored| stored.bytes);
        let embeddings =
            ["transformer.wte.weight", "model.embed_tokens.weight", "shared.weight", "bert.embeddings.word_embeddings.weight"];
        let mut own = embeddings.iter().filter_map(|embedding| bytes(self.stored.get(*embedding)?));
        match own.any(|own| Some(own) == bytes(name)) {
            true => Ok(()),
            false => Err(format!("`{name}` differs from the embedding, and the model has one tensor for both")),
        }
    }
}

/// The names under which files may have a tensor, the usual one first: without the prefix of a
/// model with a head, as `DistributedDataParallel` saves it, and as old versions of BERT have it.
fn names_in_files(name: &str) -> Vec<String> {
    let base = BASE_PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
    let mut names: Vec<String> = std::iter::once(name).chain(base).map(str::to_string).collect();
    names.push(format!("module.{name}"));
    let old = |name: &String| name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
    let old: Vec<String> = names.iter().map(old).filter(|other| !names.contains(other)).collect();
    names.extend(old);
    names
}

fn is_unused(name: &str) -> bool {
    UNUSED_ENDS.iter().any(|end| name.ends_with(end)) || UNUSED_STARTS.iter().any(|start| name.starts_with(start))
}

/// The reason and the hint of the error for a tensor of another shape.
fn other_shape(tensor: &Tensor, name: &str, shape: &[usize], found: &[usize]) -> (String, String) {
    let reason = format!("`{name}` is {found:?} there and {shape:?} in the model");
    let has_vocabulary = tensor.dimensions.iter().any(|dimension| dimension.name == "vocabulary");
    let hint = match (found.first(), &tensor.role) {
        (Some(tokens), Role::Parameter(_)) if has_vocabulary && found.get(1..) == shape.get(1..) => {
            format!("the weights are for another vocabulary: use a model with `vocab: {tokens}`")
        }
        _ => "use the model that the weights are of, or check its sizes".into(),
    };
    (reason, hint)
}
