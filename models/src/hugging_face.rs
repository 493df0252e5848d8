//! Hugging Face's `config.json` as a [`Model`].
//!
//! Each model type has a reader, which asks for the fields that it understands ([`fields`]) and
//! lists those that change neither time nor memory nor results. A field that nobody asked for, or
//! whose value no graph can express, is an error that names it. Of models of images and text, the
//! text model is read ([`images_and_text`]). It must not know layouts or devices: it ends with a
//! model.

mod decoders;
mod encoders;
mod fields;
mod images;
mod images_and_text;
mod language;
mod mixtures;
mod rotary;

pub use fields::ConfigError;

use crate::model::Model;
use fields::Fields;

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
const READERS: [(&str, &str, Reader); 29] = [
    ("gpt2", "GPT2LMHeadModel", language::gpt2),
    ("llama", "LlamaForCausalLM", decoders::llama),
    ("llama4_text", "Llama4ForCausalLM", decoders::llama4),
    ("mistral", "MistralForCausalLM", decoders::mistral),
    ("mixtral", "MixtralForCausalLM", decoders::mixtral),
    ("qwen2", "Qwen2ForCausalLM", decoders::qwen2),
    ("qwen2_moe", "Qwen2MoeForCausalLM", mixtures::qwen2_moe),
    ("deepseek_v2", "DeepseekV2ForCausalLM", mixtures::deepseek_v2),
    ("deepseek_v3", "DeepseekV3ForCausalLM", mixtures::deepseek_v3),
    ("qwen3", "Qwen3ForCausalLM", decoders::qwen3),
    ("qwen3_moe", "Qwen3MoeForCausalLM", decoders::qwen3_moe),
    ("gemma", "GemmaForCausalLM", decoders::gemma),
    ("gemma2", "Gemma2ForCausalLM", decoders::gemma2),
    ("gemma3_text", "Gemma3ForCausalLM", decoders::gemma3),
    ("qwen2_vl_text", "Qwen2VLForConditionalGeneration", decoders::qwen2_vl),
    ("qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration", decoders::qwen2_vl),
    ("qwen3_vl_text", "Qwen3VLForConditionalGeneration", decoders::qwen3_vl),
    ("phi", "PhiForCausalLM", language::phi),
    ("phi3", "Phi3ForCausalLM", decoders::phi3),
    ("gpt_neox", "GPTNeoXForCausalLM", language::gpt_neox),
    ("opt", "OPTForCausalLM", language::opt),
    ("bloom", "BloomForCausalLM", language::bloom),
    ("falcon", "FalconForCausalLM", language::falcon),
    ("bert", "BertForMaskedLM", encoders::bert),
    ("roberta", "RobertaForMaskedLM", encoders::roberta),
    ("xlm-roberta", "XLMRobertaForMaskedLM", encoders::roberta),
    ("t5", "T5ForConditionalGeneration", encoders::t5),
    ("vit", "ViTForImageClassification", images::vit),
    ("resnet", "ResNetForImageClassification", images::resnet),
];

/// Returns the model types that can be read.
pub fn hugging_face_types() -> impl Iterator<Item = &'static str> {
    READERS.into_iter().map(|(name, _, _)| name).chain(images_and_text::types())
}

/// Whether a text looks like a `config.json`: JSON with a `model_type` and no `family`.
pub fn is_hugging_face_config(text: &str) -> bool {
    let Ok(serde_json::Value::Object(object)) = serde_json::from_str(text) else { return false };
    object.contains_key("model_type") && !object.contains_key("family")
}

/// Reads a `config.json`. `sequence` replaces the longest sequence that the configuration allows,
/// which is the default.
///
/// # Errors
/// [`ConfigError`], with the fields that are unknown or cannot be expressed.
pub fn from_hugging_face(text: &str, sequence: Option<usize>) -> Result<ImportedModel, ConfigError> {
    let mut object = fields::parse(text)?;
    let left_out = images_and_text::keep_text(&mut object)?;
    let mut fields = Fields::new(object, sequence)?;
    if let Some(note) = left_out {
        fields.note(note);
    }
    let model_type = fields.model_type().to_string();
    let Some((_, planned, read)) = READERS.iter().find(|(name, _, _)| *name == model_type) else {
        let hint = if fields.has("text_config") {
            "give the object `text_config` of this file as a file of its own: what is around it is not expressible".into()
        } else {
            format!("types that can be: {}", hugging_face_types().collect::<Vec<_>>().join(", "))
        };
        return Err(ConfigError::UnknownType { name: model_type, hint });
    };
    fields.architecture(planned)?;
    let model = read(&mut fields)?;
    let notes = fields.finish()?;
    Ok(ImportedModel { model, notes })
}
