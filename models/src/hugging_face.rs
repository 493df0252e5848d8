//! Hugging Face's `config.json` as a [`Model`].
//!
//! Each model type has a reader, which asks for the fields that it understands ([`fields`]) and
//! lists those that change neither time nor memory nor results. A field that no reader asked for,
//! or whose value no graph can express, is an error that names it. For models of images and text,
//! the text model is read ([`images_and_text`]). It must not know layouts or devices: it ends with
//! a model.

mod cohere;
mod contrastive;
mod decoders;
mod encoders;
mod fields;
mod gemma4;
mod hybrids;
mod images;
mod images_and_text;
mod language;
mod lightning;
mod mixtures;
mod nearest;
mod others;
mod python_json;
mod recent;
mod rotary;
mod speech;
mod vision;

pub use fields::ConfigError;

use crate::model::Model;
use fields::Fields;
use miette::Diagnostic;

/// A model that was read from a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportedModel {
    /// The model.
    pub model: Model,
    /// Differences from Transformers' model, a sentence each. Only a different head changes the
    /// number of parameters.
    pub notes: Vec<String>,
}

/// A reader of one model type.
type Reader = fn(&mut Fields) -> Result<Model, ConfigError>;

/// The model types that can be read: the name, the Transformers class that is planned, the reader.
const READERS: [(&str, &str, Reader); 76] = [
    ("gpt2", "GPT2LMHeadModel", language::gpt2),
    ("llama", "LlamaForCausalLM", decoders::llama),
    ("llama4_text", "Llama4ForCausalLM", decoders::llama4),
    ("smollm3", "SmolLM3ForCausalLM", others::smollm3),
    ("granite", "GraniteForCausalLM", others::granite),
    ("glm", "GlmForCausalLM", others::glm),
    ("glm4", "Glm4ForCausalLM", others::glm4),
    ("glm4_moe", "Glm4MoeForCausalLM", others::glm4_moe),
    ("gpt_oss", "GptOssForCausalLM", recent::gpt_oss),
    ("olmo2", "Olmo2ForCausalLM", recent::olmo2),
    ("olmo3", "Olmo3ForCausalLM", recent::olmo3),
    ("olmoe", "OlmoeForCausalLM", recent::olmoe),
    ("minimax_m2", "MiniMaxM2ForCausalLM", recent::minimax_m2),
    ("seed_oss", "SeedOssForCausalLM", recent::seed_oss),
    ("ernie4_5", "Ernie4_5ForCausalLM", recent::ernie4_5),
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", recent::ernie4_5_moe),
    ("exaone4", "Exaone4ForCausalLM", recent::exaone4),
    ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", recent::hunyuan),
    ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", recent::hunyuan_moe),
    ("arcee", "ArceeForCausalLM", recent::arcee),
    ("granitemoe", "GraniteMoeForCausalLM", recent::granite_moe),
    ("qwen3_next", "Qwen3NextForCausalLM", hybrids::qwen3_next),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", hybrids::qwen3_5),
    ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", hybrids::qwen3_5_moe),
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM", hybrids::granite_hybrid),
    ("bamba", "BambaForCausalLM", hybrids::bamba),
    ("falcon_h1", "FalconH1ForCausalLM", hybrids::falcon_h1),
    ("nemotron_h", "NemotronHForCausalLM", hybrids::nemotron_h),
    ("kimi_linear", "KimiLinearForCausalLM", lightning::kimi_linear),
    ("minimax", "MiniMaxForCausalLM", lightning::minimax),
    // The same model in the files of its authors.
    ("minimax_m1", "MiniMaxM1ForCausalLM", lightning::minimax_m1),
    ("minimax_text_01", "MiniMaxText01ForCausalLM", lightning::minimax_m1),
    ("mamba2", "Mamba2ForCausalLM", hybrids::mamba2),
    ("mistral", "MistralForCausalLM", decoders::mistral),
    ("mixtral", "MixtralForCausalLM", decoders::mixtral),
    ("qwen2", "Qwen2ForCausalLM", decoders::qwen2),
    ("qwen2_moe", "Qwen2MoeForCausalLM", mixtures::qwen2_moe),
    ("deepseek_v2", "DeepseekV2ForCausalLM", mixtures::deepseek_v2),
    ("deepseek_v3", "DeepseekV3ForCausalLM", mixtures::deepseek_v3),
    // Its files name the class of DeepSeek V3.
    ("kimi_k2", "DeepseekV3ForCausalLM", mixtures::deepseek_v3),
    ("deepseek_v32", "DeepseekV32ForCausalLM", mixtures::deepseek_v32),
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM", mixtures::deepseek_v32),
    ("mimo", "MiMoForCausalLM", others::mimo),
    ("qwen3", "Qwen3ForCausalLM", decoders::qwen3),
    ("qwen3_moe", "Qwen3MoeForCausalLM", decoders::qwen3_moe),
    ("gemma", "GemmaForCausalLM", decoders::gemma),
    ("gemma2", "Gemma2ForCausalLM", decoders::gemma2),
    ("gemma3_text", "Gemma3ForCausalLM", decoders::gemma3),
    ("gemma4_text", "Gemma4ForCausalLM", gemma4::gemma4),
    ("gemma3n_text", "Gemma3nForCausalLM", gemma4::gemma3n),
    ("qwen2_vl_text", "Qwen2VLForConditionalGeneration", decoders::qwen2_vl),
    ("qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration", decoders::qwen2_vl),
    ("qwen3_vl_text", "Qwen3VLForConditionalGeneration", decoders::qwen3_vl),
    ("qwen3_vl_moe_text", "Qwen3VLMoeForConditionalGeneration", decoders::qwen3_vl_moe),
    ("phi", "PhiForCausalLM", language::phi),
    ("phi3", "Phi3ForCausalLM", decoders::phi3),
    ("gpt_neox", "GPTNeoXForCausalLM", language::gpt_neox),
    ("gptj", "GPTJForCausalLM", language::gptj),
    ("starcoder2", "Starcoder2ForCausalLM", language::starcoder2),
    ("mpt", "MptForCausalLM", language::mpt),
    ("cohere", "CohereForCausalLM", cohere::cohere),
    ("cohere2", "Cohere2ForCausalLM", cohere::cohere2),
    ("opt", "OPTForCausalLM", language::opt),
    ("bloom", "BloomForCausalLM", language::bloom),
    ("falcon", "FalconForCausalLM", language::falcon),
    ("bert", "BertForMaskedLM", encoders::bert),
    ("roberta", "RobertaForMaskedLM", encoders::roberta),
    ("xlm-roberta", "XLMRobertaForMaskedLM", encoders::roberta),
    ("distilbert", "DistilBertForMaskedLM", encoders::distilbert),
    ("modernbert", "ModernBertForMaskedLM", encoders::modernbert),
    ("t5", "T5ForConditionalGeneration", encoders::t5),
    ("whisper", "WhisperForConditionalGeneration", speech::whisper),
    ("clip", "CLIPModel", contrastive::clip),
    ("siglip", "SiglipModel", contrastive::siglip),
    ("vit", "ViTForImageClassification", images::vit),
    ("resnet", "ResNetForImageClassification", images::resnet),
];

/// Returns the model types that can be read.
pub fn hugging_face_types() -> impl Iterator<Item = &'static str> {
    READERS.into_iter().map(|(name, _, _)| name).chain(images_and_text::types())
}

/// Whether a text looks like a `config.json`: JSON with a `model_type` and no `family`.
pub fn is_hugging_face_config(text: &str) -> bool {
    let Ok(serde_json::Value::Object(object)) = python_json::parse(text) else { return false };
    object.contains_key("model_type") && !object.contains_key("family")
}

/// Whether a model type has a reader.
fn is_readable(name: &str) -> bool {
    READERS.iter().any(|(known, _, _)| *known == name)
}

/// Reads a `config.json`. `sequence` replaces the longest sequence that the configuration allows,
/// which is the default.
///
/// # Errors
/// [`ConfigError`], with the fields that are unknown or cannot be expressed.
pub fn from_hugging_face(text: &str, sequence: Option<usize>) -> Result<ImportedModel, ConfigError> {
    read(fields::parse(text)?, sequence, Unknown::Refused)
}

/// As [`from_hugging_face`], with the reader of another model type. Fields that the reader does not
/// know are noted: the model is similar to one of that type, and not exactly the file's own.
///
/// # Errors
/// As [`from_hugging_face`].
pub fn from_hugging_face_as(text: &str, sequence: Option<usize>, like: &str) -> Result<ImportedModel, ConfigError> {
    let mut object = fields::parse_any(text)?;
    if !object.contains_key("model_type") {
        object.insert("model_type".into(), like.into());
        return read(object, sequence, Unknown::Noted);
    }
    let outer = object.get("model_type").cloned().unwrap_or_default();
    let has_text_model = images_and_text::enter_text(&mut object);
    let own = object.insert("model_type".into(), like.into()).unwrap_or_default();
    object.remove("architectures");
    let mut imported = read(object, sequence, Unknown::Noted)?;
    if has_text_model {
        imported.notes.insert(0, format!("of a model of type {outer} the text model is read alone, without the parts beside it"));
    }
    imported.notes.insert(0, format!("a model of type {own} is read as one of type `{like}`: parts of its own are not planned"));
    Ok(imported)
}

/// What happens to fields that no reader knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unknown {
    /// Such fields are an error.
    Refused,
    /// Such fields are noted.
    Noted,
}

fn read(
    mut object: serde_json::Map<String, serde_json::Value>,
    sequence: Option<usize>,
    unknown: Unknown,
) -> Result<ImportedModel, ConfigError> {
    let seen = vision::Outer::of(&object)?;
    let left_out = images_and_text::keep_text(&mut object)?;
    let unread = Some(&object).filter(|object| !is_readable(type_of(object))).cloned();
    let mut fields = Fields::new(object, sequence)?;
    let model_type = fields.model_type().to_string();
    let Some((_, planned, read)) = READERS.iter().find(|(name, _, _)| *name == model_type) else {
        let hint = unreadable_type_hint(unread.unwrap_or_default(), sequence);
        return Err(ConfigError::UnknownType { name: model_type, hint });
    };
    fields.architecture(planned)?;
    let model = read(&mut fields)?;
    let mut notes = fields.finish(unknown)?;
    let Some(left_out) = left_out else { return Ok(ImportedModel { model, notes }) };
    // The part that sees images is planned if its kind is known, and noted otherwise.
    let decoder = model.as_decoder();
    match seen.zip(decoder).map(|(seen, decoder)| seen.attach(decoder)) {
        Some(Ok((decoder, note))) => {
            notes.insert(0, note);
            Ok(ImportedModel { model: Model::Decoder(decoder), notes })
        }
        Some(Err(error)) => {
            let reason = error.help().map(|hint| format!(": {hint}")).unwrap_or_default();
            notes.insert(0, format!("{left_out}: {error}{reason}"));
            Ok(ImportedModel { model, notes })
        }
        None => {
            notes.insert(0, left_out);
            Ok(ImportedModel { model, notes })
        }
    }
}

fn type_of(object: &serde_json::Map<String, serde_json::Value>) -> &str {
    object.get("model_type").and_then(serde_json::Value::as_str).unwrap_or_default()
}

/// Suggests what to do with a configuration whose type has no reader.
fn unreadable_type_hint(mut object: serde_json::Map<String, serde_json::Value>, sequence: Option<usize>) -> String {
    const OTHERS: &str = "use a model of `foretell models`, a model file, or a trace (`foretell import torch`)";
    let known = nearest::known(type_of(&object));
    images_and_text::enter_text(&mut object);
    if let Some(missing) = known.or_else(|| nearest::known(type_of(&object))) {
        return format!("{missing}; {OTHERS}");
    }
    let others = nearest::other_layers(&object);
    if !others.is_empty() {
        let names = others.join("`, `");
        return format!("its layers are of kinds that are not planned (`{names}`), and no type that is comes near; {OTHERS}");
    }
    let (like, file) = match nearest::nearest(&object) {
        Ok(nearest) => nearest,
        Err(reason) => return format!("{reason}; {OTHERS}"),
    };
    object.insert("model_type".into(), like.into());
    object.remove("architectures");
    match read(object, sequence, Unknown::Noted) {
        Ok(imported) => {
            let left_out = imported.notes.iter().find_map(|note| note.strip_prefix(fields::LEFT_OUT));
            let without = left_out.map_or_else(String::new, |names| format!(", without {names}"));
            format!(
                "`foretell import hf-config FILE --as {like}` reads what it shares with that type{without}; the model file that comes \
                 nearest: {file}"
            )
        }
        Err(error) => {
            format!("it cannot be read as `{like}` either: {error}; the model file that comes nearest: {file}")
        }
    }
}
