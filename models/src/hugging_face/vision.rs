//! The parts that see images in models of images and text, as an encoder in front of the text
//! model.

use super::Unknown;
use super::fields::{ConfigError, Fields, inexpressible};
use crate::families::{Decoder, JoinedPatches, NormKind, Projector, VisionTower};
use serde_json::{Map, Value, json};

/// Tokens of an image if its resolution is free: a picture of 448 x 448 pixels in Qwen2-VL.
const FREE_TOKENS: usize = 256;

/// The outer settings that a projector needs.
pub(super) struct Outer {
    kind: String,
    vision: Map<String, Value>,
    /// `mm_tokens_per_image`, `spatial_merge_size` and `multimodal_projector_bias`.
    tokens: Option<usize>,
    merge: Option<usize>,
    bias: Option<bool>,
}

impl Outer {
    /// The part that sees images, if a configuration has one.
    ///
    /// # Errors
    /// [`ConfigError`] if a field of the projector has no value of its kind.
    pub(super) fn of(object: &Map<String, Value>) -> Result<Option<Self>, ConfigError> {
        let Some(vision) = object.get("vision_config").and_then(Value::as_object) else { return Ok(None) };
        let stated = |field: &str| object.get(field).filter(|value| !value.is_null());
        let number = |field: &str| {
            let size = |value: &Value| match value.as_u64() {
                Some(size) if (1..=1 << 20).contains(&size) => Ok(size as usize),
                _ => Err(inexpressible(field, value, "it is a whole number from 1 to 1,048,576")),
            };
            stated(field).map(size).transpose()
        };
        let bias = stated("multimodal_projector_bias")
            .map(|value| value.as_bool().ok_or_else(|| inexpressible("multimodal_projector_bias", value, "it is true or false")));
        Ok(Some(Self {
            kind: object.get("model_type").and_then(Value::as_str).unwrap_or_default().into(),
            vision: vision.clone(),
            tokens: number("mm_tokens_per_image")?,
            merge: number("spatial_merge_size")?,
            bias: bias.transpose()?,
        }))
    }

    /// The decoder with its encoder, and a note on the images of a sample.
    ///
    /// # Errors
    /// [`ConfigError`] if the encoder is of no known kind, or if its images do not fit.
    pub(super) fn attach(&self, decoder: Decoder) -> Result<(Decoder, String), ConfigError> {
        let mut fields = Fields::new(self.vision.clone(), None)?;
        let tower = self.tower(&mut fields, &decoder)?;
        fields.finish(Unknown::Refused)?;
        if tower.tokens() > decoder.sequence {
            let hint = format!("an image is {} tokens, and a sample has {}", tower.tokens(), decoder.sequence);
            return Err(inexpressible("vision_config", &json!(self.kind), &hint));
        }
        let note = format!(
            "a sample has 1 image of {} patches, which become {} of its {} positions; `vision: {{images: .., patches: ..}}` in the model \
             file sets others",
            tower.patches,
            tower.tokens(),
            decoder.sequence
        );
        Ok((Decoder { vision: Some(tower), ..decoder }, note))
    }

    fn tower(&self, fields: &mut Fields, decoder: &Decoder) -> Result<VisionTower, ConfigError> {
        let inner = self.vision.get("model_type").and_then(Value::as_str).unwrap_or_default();
        match (self.kind.as_str(), inner) {
            ("qwen2_vl", _) => qwen2(fields, decoder),
            ("qwen2_5_vl", _) => qwen2_5(fields, decoder),
            ("qwen3_vl" | "qwen3_vl_moe", _) => qwen3(fields, decoder),
            (_, "clip_vision_model") => self.projected(clip(fields)?, decoder),
            (_, "siglip_vision_model") => self.projected(siglip(fields)?, decoder),
            (_, "pixtral") => self.projected(pixtral(fields, decoder, self.merge_of(2))?, decoder),
            (_, other) => {
                Err(inexpressible("vision_config.model_type", &json!(other), "encoders: CLIP, SigLIP, Pixtral, Qwen's"))
            }
        }
    }

    fn merge_of(&self, usual: usize) -> usize {
        self.merge.unwrap_or(usual)
    }

    /// The encoder with the outer model's projector.
    fn projected(&self, tower: VisionTower, decoder: &Decoder) -> Result<VisionTower, ConfigError> {
        match self.kind.as_str() {
            "llava" | "vipllava" => {
                let projector = Projector { inner: Some(decoder.hidden), bias: self.bias.unwrap_or(true), norm: None };
                Ok(VisionTower { projector, ..tower })
            }
            "paligemma" => Ok(VisionTower { projector: Projector { inner: None, bias: true, norm: None }, ..tower }),
            "gemma3" => {
                let tokens = self.tokens.unwrap_or(256);
                if !tower.patches.is_multiple_of(tokens) {
                    return Err(inexpressible(
                        "mm_tokens_per_image",
                        &json!(tokens),
                        "each token is the mean of as many patches",
                    ));
                }
                let projector = Projector { inner: None, bias: false, norm: Some(NormKind::Rms) };
                Ok(VisionTower { patches_of_token: tower.patches / tokens, joined: JoinedPatches::Mean, projector, ..tower })
            }
            "mistral3" => {
                let merge = self.merge_of(2);
                let projector =
                    Projector { inner: Some(decoder.hidden), bias: self.bias.unwrap_or(false), norm: Some(NormKind::Rms) };
                Ok(VisionTower { patches_of_token: merge * merge, joined: JoinedPatches::Merged, projector, ..tower })
            }
            other => Err(inexpressible("model_type", &json!(other), "projectors: LLaVA's, PaliGemma's, Gemma 3's, Mistral 3's")),
        }
    }
}

/// An encoder without positions, of the sizes `layers, hidden, heads, ffn, pixels, patches`.
fn plain([layers, hidden, heads, ffn, pixels, patches]: [usize; 6]) -> VisionTower {
    VisionTower {
        layers,
        hidden,
        heads,
        ffn,
        pixels,
        patches,
        images: 1,
        patches_of_token: 1,
        joined: JoinedPatches::SideBySide,
        norm: NormKind::Layer,
        gated: false,
        patch_bias: false,
        bias: true,
        position_rows: 0,
        class_position: false,
        norm_before: false,
        norm_after: false,
        window: 0,
        projector: Projector { inner: None, bias: false, norm: None },
        further_projectors: 0,
    }
}

/// Patches of an image if its resolution is free.
fn free_patches(decoder: &Decoder, merge: usize) -> usize {
    FREE_TOKENS.min(decoder.sequence).saturating_mul(merge * merge)
}

/// Reads the sizes that CLIP's and SigLIP's encoders have.
fn fixed(fields: &mut Fields, [hidden, heads, ffn, layers, image, patch]: [usize; 6]) -> Result<VisionTower, ConfigError> {
    fields.neutral(&["projection_dim", "vocab_size", "hidden_act", "layer_norm_eps", "attention_dropout", "dropout"]);
    let [hidden, heads, ffn] = [
        fields.size_or("hidden_size", hidden)?,
        fields.size_or("num_attention_heads", heads)?,
        fields.size_or("intermediate_size", ffn)?,
    ];
    let layers = fields.size_or("num_hidden_layers", layers)?;
    let (image, patch) = (fields.size_or("image_size", image)?, fields.size_or("patch_size", patch)?);
    let patches = (image / patch) * (image / patch);
    if patches == 0 {
        return Err(inexpressible("patch_size", &json!(patch), "an image has at least one patch"));
    }
    let pixels = fields.size_or("num_channels", 3)?.saturating_mul(patch * patch);
    Ok(VisionTower { position_rows: patches, ..plain([layers, hidden, heads, ffn, pixels, patches]) })
}

fn clip(fields: &mut Fields) -> Result<VisionTower, ConfigError> {
    let tower = fixed(fields, [768, 12, 3072, 12, 224, 32])?;
    Ok(VisionTower { class_position: true, position_rows: tower.position_rows + 1, norm_before: true, norm_after: true, ..tower })
}

fn siglip(fields: &mut Fields) -> Result<VisionTower, ConfigError> {
    fields.must_be_off("vision_use_head", "no head pools what the text model reads")?;
    let tower = fixed(fields, [768, 12, 3072, 12, 224, 16])?;
    Ok(VisionTower { patch_bias: true, norm_after: true, ..tower })
}

fn pixtral(fields: &mut Fields, decoder: &Decoder, merge: usize) -> Result<VisionTower, ConfigError> {
    fields.neutral(&["rope_theta", "rope_parameters", "head_dim"]);
    let tower = fixed(fields, [1024, 16, 4096, 24, 1024, 16])?;
    let patches = free_patches(decoder, merge);
    Ok(VisionTower { norm: NormKind::Rms, gated: true, bias: false, norm_before: true, position_rows: 0, patches, ..tower })
}

/// Reads the fields that Qwen's encoders have. Returns an encoder of `hidden` features, and the
/// number of patches merged on each side.
fn qwen(
    fields: &mut Fields,
    decoder: &Decoder,
    hidden: usize,
    ffn: usize,
    patch: usize,
) -> Result<(VisionTower, usize), ConfigError> {
    fields.neutral(&["hidden_act", "tokens_per_second", "rope_parameters", "rope_theta", "out_hidden_size"]);
    fields.neutral(&["in_chans", "spatial_patch_size"]);
    let [layers, heads] = [fields.size_or("depth", 32)?, fields.size_or("num_heads", 16)?];
    let patch = fields.size_or("patch_size", patch)?;
    let frames = fields.size_or("temporal_patch_size", 2)?;
    let pixels = fields.size_or("in_channels", 3)?.saturating_mul(frames).saturating_mul(patch * patch);
    let merge = fields.size_or("spatial_merge_size", 2)?;
    let patches = free_patches(decoder, merge);
    let norm = NormKind::Layer;
    let projector = Projector { inner: Some(hidden.saturating_mul(merge * merge)), bias: true, norm: Some(norm) };
    let tower = plain([layers, hidden, heads, ffn, pixels, patches]);
    Ok((VisionTower { patches_of_token: merge * merge, projector, ..tower }, patch))
}

fn qwen2(fields: &mut Fields, decoder: &Decoder) -> Result<VisionTower, ConfigError> {
    let hidden = fields.size_or("embed_dim", 1280)?;
    let ffn = hidden * fields.size_or("mlp_ratio", 4)?;
    // The text model's features.
    fields.neutral(&["hidden_size"]);
    Ok(qwen(fields, decoder, hidden, ffn, 14)?.0)
}

fn qwen2_5(fields: &mut Fields, decoder: &Decoder) -> Result<VisionTower, ConfigError> {
    let hidden = fields.size_or("hidden_size", 3584)?;
    let ffn = fields.size_or("intermediate_size", 3420)?;
    let window = fields.size_or("window_size", 112)?;
    let full = fields.list("fullatt_block_indexes")?;
    let (tower, patch) = qwen(fields, decoder, hidden, ffn, 14)?;
    let usual: Vec<Value> = (0..tower.layers).filter(|layer| (layer + 1).is_multiple_of(8)).map(Value::from).collect();
    if let Some(layers) = full.filter(|layers| *layers != usual && tower.layers >= 8) {
        return Err(inexpressible("fullatt_block_indexes", &json!(layers), "every eighth layer sees the whole image"));
    }
    let side = (window / patch).max(1);
    let norm = NormKind::Rms;
    Ok(VisionTower {
        norm,
        gated: true,
        window: side * side,
        projector: Projector { norm: Some(norm), ..tower.projector },
        ..tower
    })
}

fn qwen3(fields: &mut Fields, decoder: &Decoder) -> Result<VisionTower, ConfigError> {
    let hidden = fields.size_or("hidden_size", 1152)?;
    let ffn = fields.size_or("intermediate_size", 4304)?;
    let position_rows = fields.size_or("num_position_embeddings", 2304)?;
    let further = fields.list("deepstack_visual_indexes")?.map_or(3, |layers| layers.len());
    let layers = fields.size_or("depth", 27)?;
    let (tower, _) = qwen(fields, decoder, hidden, ffn, 16)?;
    // The table is interpolated for other resolutions.
    let patches = tower.patches.min(position_rows / tower.patches_of_token * tower.patches_of_token);
    Ok(VisionTower { layers, patch_bias: true, position_rows, patches, further_projectors: further, ..tower })
}
