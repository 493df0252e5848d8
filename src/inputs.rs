//! Finds what users name: models and topologies by name or path, profiles, and this machine. All
//! file reading of the command line is in this module.

use crate::confined;
use crate::failure::{Failure, Fault, code};
use crate::foreign::{self, Wanted};
use crate::host;
use crate::output;
use flate2::read::MultiGzDecoder;
use foretell_models::{
    GraphOptions, ImportedModel, Model, from_hugging_face, from_hugging_face_as, from_torch, is_hugging_face_config,
    is_torch_trace,
};
use foretell_program::{Profile, Routing};
use foretell_simulator::gpu::{Profiles, StackProfile};
use foretell_topologies::{Place, Topology, TopologyReference, YamlError, read_yaml};
use foretell_units::SchemaVersion;
use foretell_units::diagnostic::{Mistake, help};
use schemars::{JsonSchema, Schema};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use serde_saphyr::Spanned;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// A model with its name.
#[derive(Clone, Debug)]
pub struct NamedModel {
    /// The zoo's name, or the file's name without its extension.
    pub name: String,
    /// The model.
    pub model: Model,
}

/// The content of a model file.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Model", transform = or_based)]
pub struct ModelFile {
    /// The version of the file's form.
    #[serde(default)]
    schema_version: SchemaVersion,
    #[serde(flatten)]
    model: Model,
}

/// Adds the form that has a `base` to the schema, and refuses fields that no form has.
fn or_based(schema: &mut Schema) {
    if let Some(forms) = schema.get_mut("oneOf").and_then(Value::as_array_mut) {
        let meaning = "A model of the library with other sizes: its name, and the fields that differ.";
        let base = json!({"type": "string"});
        forms.push(
            json!({"description": meaning, "properties": {"base": base}, "required": ["base"], "additionalProperties": true}),
        );
    }
    schema.insert("unevaluatedProperties".into(), false.into());
}

impl ModelFile {
    /// The text of a model file.
    pub fn to_yaml(model: &Model) -> Result<String, Failure> {
        let file = Self { schema_version: SchemaVersion, model: model.clone() };
        serde_saphyr::to_string(&file).map_err(|error| Failure::undone(code::SYSTEM, error.to_string()))
    }
}

/// Name of the discovered topology of this machine's CPU cores.
pub const LOCAL: &str = "local";
/// Name of the discovered topology of this machine's NVIDIA GPUs.
pub const LOCAL_GPUS: &str = "local-gpus";

/// The longest file that a user writes or gives. A profile of the largest model has 2 MB.
const MOST_INPUT: u64 = 64 << 20;
/// The longest file of a run's folder. A timeline has some 50 bytes for each span.
const MOST_RUN_FILE: u64 = 4 << 30;

/// Reads a text file that a user gives.
pub fn read(path: &Path) -> Result<String, Failure> {
    read_up_to(path, MOST_INPUT)
}

/// Reads a file that another file names. The path may be relative to the folder in which a job is
/// run: the other file's folder, one above it, or the current one.
pub fn read_beside(folder: &Path, name: &Path) -> Option<Result<String, Failure>> {
    // The folder of a bare name is empty.
    let folder = host::absolute(&Path::new(".").join(folder)).ok()?;
    let folders = folder.ancestors().map(Path::to_path_buf).chain([PathBuf::from(".")]);
    folders
        .map(|folder| folder.join(name))
        .find(|path| confined::permit(path).is_ok() && host::is_file(path))
        .map(|path| read(&path))
}

/// Reads a file of a run's folder.
pub fn read_run_file(path: &Path) -> Result<String, Failure> {
    read_up_to(path, MOST_RUN_FILE)
}

/// How much longer than the compressed file a trace may be. Traces of PyTorch's profiler grow by
/// factors of 10 to 40; gzip's limit is 1,032.
const MOST_GROWTH: u64 = 200;

/// Length that any decompressed trace may have.
const LEAST_LIMIT: u64 = 64 << 20;

/// Reads a trace, which may be compressed with gzip, as PyTorch and Foretell write it.
pub fn read_trace(path: &Path) -> Result<String, Failure> {
    let bytes = read_bytes(path, MOST_RUN_FILE)?;
    if !bytes.starts_with(b"\x1f\x8b") {
        return text_of(bytes, path);
    }
    let mut text = Vec::new();
    // Read no more than a plain trace may have, and no more than traces usually grow by, whatever
    // the file expands to.
    let most = (bytes.len() as u64).saturating_mul(MOST_GROWTH).clamp(LEAST_LIMIT, MOST_RUN_FILE);
    let mut limited = MultiGzDecoder::new(bytes.as_slice()).take(most + 1);
    limited.read_to_end(&mut text).map_err(|error| unreadable(path, &error, "check that the file is whole"))?;
    if text.len() as u64 > most {
        let why = format!("its {} bytes grow to more than {most} of text", bytes.len());
        return Err(unreadable(path, &why, "check that it is the file that you mean; a plain trace may have 4 GiB"));
    }
    text_of(text, path)
}

const READ_HINT: &str = "check that the path exists and that the file is readable text";

/// The error for a file that cannot be read.
fn unreadable(path: &Path, why: &dyn std::fmt::Display, hint: &str) -> Failure {
    Failure::input(code::FILE_UNREADABLE, format!("`{}` cannot be read: {why}", path.display())).hint(hint)
}

/// Reads a text file of at most `most` bytes. Never reads more.
fn read_up_to(path: &Path, most: u64) -> Result<String, Failure> {
    text_of(read_bytes(path, most)?, path)
}

/// The text of a file's bytes.
fn text_of(bytes: Vec<u8>, path: &Path) -> Result<String, Failure> {
    String::from_utf8(bytes).map_err(|error| match foreign::of_bytes(error.as_bytes()) {
        Some((what, hint)) => Failure::input(code::FILE_KIND, format!("this is {what}, and no text")).hint(hint).in_file(path),
        None => unreadable(path, &error, READ_HINT),
    })
}

/// Reads a file of at most `most` bytes.
fn read_bytes(path: &Path, most: u64) -> Result<Vec<u8>, Failure> {
    confined::permit(path)?;
    let bytes = host::read(path, most).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => unreadable(path, &error, "check that it is the file that you mean"),
        ErrorKind::InvalidInput => unreadable(path, &error, "write the contents into a file, and give that"),
        _ => unreadable(path, &error, READ_HINT),
    })?;
    tracing::debug!("read `{}`, {} bytes", path.display(), bytes.len());
    Ok(bytes)
}

/// Reads the value of `--routing`: a distribution, or a file of measured loads.
pub fn routing(text: &str) -> Result<Routing, Failure> {
    let path = Path::new(text);
    match text.parse() {
        Err(_) if host::is_file(path) => parse_yaml(&read(path)?, path),
        routing => routing.map_err(|mistake| Failure::of_input(mistake).about("`--routing`")),
    }
}

/// Parses YAML (or JSON, a subset of it). An error names line and column.
pub fn parse_yaml<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T, Failure> {
    read_yaml(text).map_err(|YamlError { place, mistake }| {
        let hint = "`foretell models show`, `foretell topologies show` and `foretell plan -o` print files in the right form";
        let fault = Fault::new(code::FILE_FORM, mistake.message);
        let hint = if mistake.hint.is_empty() { hint.to_owned() } else { mistake.hint };
        Failure::Input(fault.hint(hint).in_text(path, text, place).into())
    })
}

/// Finds a model by zoo name, or reads its file.
pub fn model(text: &str) -> Result<NamedModel, Failure> {
    model_in(text, Path::new("."))
}

/// As [`model`], with paths relative to `folder`.
pub fn model_in(text: &str, folder: &Path) -> Result<NamedModel, Failure> {
    if is_zoo_name(text) || !looks_like_path(text, folder) {
        let model = Model::named(text)?;
        return Ok(NamedModel { name: Model::named_on_hub(text).unwrap_or(text).into(), model });
    }
    let path = folder.join(text);
    let content = read(&path)?;
    if is_torch_trace(&content) {
        return torch_trace(&content, &path, None);
    }
    if is_hugging_face_config(&content) {
        return hugging_face(&content, &path, None, None);
    }
    let model = match with_base(&content, &path)? {
        Some(model) => model,
        None => {
            let file: Result<ModelFile, Failure> = parse_yaml(&content, &path);
            file.map_err(|failure| foreign::explain(failure, &content, &path, Wanted::Model))?.model
        }
    };
    let name = path.file_stem().map_or_else(|| text.into(), |stem| stem.to_string_lossy().into_owned());
    sound(NamedModel { name, model }, &path)
}

/// Reads a model file with `base: NAME`: a model of the zoo with some sizes changed. `None` if the
/// file has no `base`.
fn with_base(content: &str, path: &Path) -> Result<Option<Model>, Failure> {
    let begins = |line: &str| line.trim_start().trim_start_matches(['{', '"', '\'']).trim_start().starts_with("base");
    if !content.lines().any(begins) {
        return Ok(None);
    }
    let mut sizes: serde_json::Map<String, Value> = parse_yaml(content, path)?;
    let Some(base) = sizes.remove("base") else { return Ok(None) };
    based(&base, sizes).map(Some).map_err(|mistake| {
        let place = refused_place(content, &base);
        Failure::Input(Fault::of(mistake).in_text(path, content, place).into())
    })
}

/// The place of the base in a file if there is no such base, else of the first field that the base
/// does not take; `None` if it takes each by itself.
fn refused_place(content: &str, base: &Value) -> Option<Place> {
    let fields: BTreeMap<String, Spanned<Value>> = read_yaml(content).ok()?;
    let is_known = based(base, serde_json::Map::new()).is_ok();
    let is_refused = |(name, field): &(String, Spanned<Value>)| match name.as_str() {
        "base" => !is_known,
        _ => is_known && based(base, [(name.clone(), field.value.clone())].into_iter().collect()).is_err(),
    };
    let (_, refused) = fields.into_iter().find(is_refused)?;
    let location = refused.referenced;
    (location.line() > 0).then(|| Place { line: location.line(), column: location.column() })
}

/// A model of the zoo with some sizes changed.
pub fn based(base: &Value, mut sizes: serde_json::Map<String, Value>) -> Result<Model, Mistake> {
    let name = base.as_str().unwrap_or_default();
    let base = Model::named(name).map_err(|error| Mistake::of(&error))?;
    let written = |error: serde_json::Error| {
        let message = error.to_string();
        let hint = format!("`foretell models show {name}` lists its sizes");
        Mistake::recorded(&message).unwrap_or_else(|| Mistake::new(message, hint))
    };
    if let Some(version) = sizes.remove("schema_version") {
        let _: SchemaVersion = serde_json::from_value(version).map_err(written)?;
    }
    let mut model = serde_json::to_value(&base).map_err(written)?;
    if let (Some(family), Some(own)) = (sizes.get("family"), model.get("family"))
        && family != own
    {
        return Err(Mistake::new(format!("`family` is {family}, and `{name}` is of {own}"), "omit `family`"));
    }
    if let Some(model) = model.as_object_mut() {
        model.extend(sizes);
    }
    serde_json::from_value(model).map_err(written)
}

/// Reads a `config.json` of Hugging Face; `sequence` replaces the longest sequence that it allows.
/// Prints notes on differences from Transformers' model. `like` is another model type to read it
/// as.
pub fn hugging_face(content: &str, path: &Path, sequence: Option<usize>, like: Option<&str>) -> Result<NamedModel, Failure> {
    let imported = match like {
        Some(like) => from_hugging_face_as(content, sequence, like),
        None => from_hugging_face(content, sequence),
    };
    let imported = imported.map_err(|error| Failure::of_input(error).in_file(path))?;
    note(&imported, path);
    let stem = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    // The file's usual name says nothing about the model; its folder's name does.
    let folder = host::absolute(path).ok().and_then(|path| Some(path.parent()?.file_name()?.to_string_lossy().into_owned()));
    let name = if stem == "config" { folder.unwrap_or(stem) } else { stem };
    sound(NamedModel { name, model: imported.model }, path)
}

/// Reads a trace of a PyTorch step; `sequence` replaces the trace's. Prints notes on what was
/// assumed.
pub fn torch_trace(content: &str, path: &Path, sequence: Option<usize>) -> Result<NamedModel, Failure> {
    let imported = from_torch(content, sequence).map_err(|error| Failure::of_input(error).in_file(path))?;
    note(&imported, path);
    let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    sound(NamedModel { name, model: imported.model }, path)
}

/// Prints notes on differences from the file's model.
fn note(imported: &ImportedModel, path: &Path) {
    for note in &imported.notes {
        output::note(&format!("{}: {note}", path.display()));
    }
}

/// Refuses a model whose sizes contradict each other. The error names the file.
pub fn sound(named: NamedModel, path: &Path) -> Result<NamedModel, Failure> {
    let options = GraphOptions::ONE;
    named.model.graph(&named.name, &options).map_err(|error| Failure::of_input(error).in_file(path))?;
    Ok(named)
}

/// Whether a name is in the zoo, or is that of a model of the zoo on Hugging Face's hub, and so not
/// a path.
pub fn is_zoo_name(text: &str) -> bool {
    Model::names().any(|name| name == text) || Model::named_on_hub(text).is_some() && !Path::new(text).exists()
}

/// Whether a name is in the topology library or means this machine, and so is not a path.
pub fn is_library_name(text: &str) -> bool {
    text == LOCAL || text == LOCAL_GPUS || Topology::library_names().any(|name| name == text)
}

/// Finds a topology by library name, reads its file, makes it from a few words (`8xh100`), or
/// discovers this machine.
pub fn topology(text: &str, nodes: Option<usize>) -> Result<Topology, Failure> {
    let topology = topology_in(text, Path::new("."))?;
    let topology = match nodes {
        Some(nodes) => topology.with_nodes(nodes)?,
        None => topology,
    };
    topology.validate().map_err(|error| error.in_file(text, ""))?;
    Ok(topology)
}

/// As [`topology`], with paths relative to `folder`, and not yet validated.
pub fn topology_in(text: &str, folder: &Path) -> Result<Topology, Failure> {
    if text == LOCAL {
        return host::local();
    }
    if text == LOCAL_GPUS {
        return host::local_gpus(LOCAL_GPUS);
    }
    if !is_library_name(text)
        && !host::is_file(&folder.join(text))
        && let Some(said) = Topology::said(text)
    {
        let said = said?;
        said.notes.iter().for_each(|note| output::note(note));
        return Ok(said.topology);
    }
    if is_library_name(text) || !looks_like_path(text, folder) {
        return Topology::library(text).map_err(|error| {
            let hint = help(&error).unwrap_or_default();
            let said = "devices and nodes may also be said, such as `8xh100` or `2x8xa100-80g@200Gbit/s`";
            Failure::of_input(error).hint(format!("{hint}; {said}"))
        });
    }
    let path = folder.join(text);
    let content = read(&path)?;
    Topology::from_yaml(&content, &path.display().to_string())
        .map_err(|error| foreign::explain(error.into(), &content, &path, Wanted::Topology))
}

/// The form in which a plan file refers to a topology: by its name, or in a confined process, whose
/// files no one else has, by its contents.
pub fn topology_reference(text: &str) -> Result<TopologyReference, Failure> {
    let path = Path::new(text);
    if !confined::is_confined() || is_library_name(text) || !host::is_file(path) {
        return Ok(TopologyReference::Named(text.into()));
    }
    parse_yaml(&read(path)?, path)
}

/// Reads a profile that `calibrate` wrote.
pub fn profile(path: Option<&Path>) -> Result<Option<Profile>, Failure> {
    let parsed = |path: &Path| {
        let content = read(path)?;
        parse_yaml(&content, path).map_err(|failure| foreign::explain(failure, &content, path, Wanted::Profile))
    };
    path.map(parsed).transpose()
}

/// Formats a profile as YAML.
pub fn profile_yaml(profile: &Profile) -> Result<String, Failure> {
    serde_saphyr::to_string(profile)
        .map_err(|error| Failure::undone(code::FILE_UNWRITABLE, format!("the profile cannot be written: {error}")))
}

fn looks_like_path(text: &str, folder: &Path) -> bool {
    text.contains('/')
        || [".yaml", ".yml", ".json"].iter().any(|ending| text.ends_with(ending))
        || host::is_file(&folder.join(text))
}

/// Finds a software stack by name.
pub fn stack(name: &str) -> Result<&'static StackProfile, Failure> {
    let profiles = Profiles::library().map_err(Failure::of_undone)?;
    profiles.stack(name).map_err(|_| {
        let names: Vec<&str> = profiles.stack_names().collect();
        Failure::input(code::UNKNOWN_NAME, format!("unknown stack `{name}`")).hint(format!("use one of {}", names.join(", ")))
    })
}
