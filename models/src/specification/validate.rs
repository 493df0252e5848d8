//! Sizes that contradict each other or cannot be counted with are refused here, so that the zoo meets none.

use super::{Model, ModelError, Stem};

/// The most layers of a model: a hundred times those of the deepest language models.
const MOST_LAYERS: usize = 10_000;

impl Model {
    /// Refuses sizes of which no graph can be built.
    pub(super) fn validate(&self, name: &str) -> Result<(), ModelError> {
        let wrong = |reason: String, hint: &str| Err(ModelError::Inconsistent { name: name.into(), reason, hint: hint.into() });
        let positive = |what: &str, value: usize| match value {
            0 => wrong(format!("`{what}` is 0"), "every size is at least 1"),
            value if value > 1 << 24 => wrong(format!("`{what}` is {value}"), "no size is larger than 16,777,216"),
            _ => Ok(()),
        };
        let transformer = |layers: usize, hidden: usize, heads: usize, ffn: usize| {
            for (what, value) in [("layers", layers), ("hidden", hidden), ("heads", heads), ("ffn", ffn)] {
                positive(what, value)?;
            }
            if layers > MOST_LAYERS {
                return wrong(format!("`layers` is {layers}"), "a model has 10,000 layers at most");
            }
            if !hidden.is_multiple_of(heads) {
                return wrong(format!("hidden {hidden} is not a multiple of heads {heads}"), "choose heads that divide hidden");
            }
            Ok(())
        };
        match *self {
            Model::Mlp { ref widths } => {
                if widths.len() < 2 {
                    return wrong("`widths` needs an input and an output".into(), "write for example widths: [784, 512, 10]");
                }
                if widths.len() > MOST_LAYERS + 1 {
                    return wrong(format!("`widths` has {} entries", widths.len()), "a model has 10,000 layers at most");
                }
                widths.iter().try_for_each(|&width| positive("widths", width))
            }
            Model::Resnet { depth, stem, image, channels, classes, width } => {
                if ![18, 34, 50, 101, 152].contains(&depth) {
                    return wrong(format!("there is no ResNet of depth {depth}"), "use depth 18, 34, 50, 101 or 152");
                }
                positive("channels", channels)?;
                positive("classes", classes)?;
                positive("width", width)?;
                let smallest = if stem == Stem::Imagenet { 32 } else { 4 };
                if image < smallest || image > 8192 {
                    return wrong(
                        format!("`image` is {image}"),
                        "images are 32 to 8192 pixels wide, or from 4 with `stem: small`",
                    );
                }
                Ok(())
            }
            Model::Gpt { layers, hidden, heads, ffn, vocab, sequence, .. }
            | Model::Bert { layers, hidden, heads, ffn, vocab, sequence, .. } => {
                positive("vocab", vocab)?;
                positive("sequence", sequence)?;
                transformer(layers, hidden, heads, ffn.unwrap_or(1))
            }
            Model::Moe {
                layers,
                hidden,
                heads,
                kv_heads,
                head_dimension,
                query_rank,
                key_value_rank,
                ffn,
                dense_ffn,
                shared_ffn,
                vocab,
                sequence,
                experts,
                top_k,
                moe_every,
                rope_theta,
                ..
            } => {
                let kv_heads = kv_heads.unwrap_or(heads);
                for (what, value) in [
                    ("layers", layers),
                    ("hidden", hidden),
                    ("heads", heads),
                    ("kv_heads", kv_heads),
                    ("query_rank", query_rank.unwrap_or(1)),
                    ("key_value_rank", key_value_rank.unwrap_or(1)),
                    ("ffn", ffn),
                    ("dense_ffn", dense_ffn.unwrap_or(1)),
                    ("shared_ffn", shared_ffn.unwrap_or(1)),
                    ("vocab", vocab),
                    ("sequence", sequence),
                    ("experts", experts),
                    ("top_k", top_k),
                    ("moe_every", moe_every),
                    ("rope_theta", rope_theta),
                ] {
                    positive(what, value)?;
                }
                if layers > MOST_LAYERS {
                    return wrong(format!("`layers` is {layers}"), "a model has 10,000 layers at most");
                }
                rotary_head(name, hidden, heads, head_dimension)?;
                if !heads.is_multiple_of(kv_heads) {
                    return wrong(
                        format!("heads {heads} is not a multiple of kv_heads {kv_heads}"),
                        "choose kv_heads that divide heads",
                    );
                }
                if top_k > experts || experts > 1 << 14 {
                    return wrong(
                        format!("each token goes to {top_k} of {experts} experts"),
                        "`top_k` is at most `experts`, and that at most 16,384",
                    );
                }
                Ok(())
            }
            Model::T5 {
                layers,
                hidden,
                heads,
                head_dimension,
                ffn,
                vocab,
                source_sequence,
                target_sequence,
                relative_buckets,
                relative_max_distance,
                ..
            } => {
                for (what, value) in [
                    ("layers", layers),
                    ("hidden", hidden),
                    ("heads", heads),
                    ("head_dimension", head_dimension.unwrap_or(1)),
                    ("ffn", ffn),
                    ("vocab", vocab),
                    ("source_sequence", source_sequence),
                    ("target_sequence", target_sequence),
                    ("relative_max_distance", relative_max_distance),
                ] {
                    positive(what, value)?;
                }
                if layers > MOST_LAYERS / 2 {
                    return wrong(format!("`layers` is {layers}"), "encoder and decoder have 5,000 layers each at most");
                }
                if head_dimension.is_none() && !hidden.is_multiple_of(heads) {
                    return wrong(
                        format!("hidden {hidden} is not a multiple of heads {heads}"),
                        "choose heads that divide hidden, or give `head_dimension`",
                    );
                }
                if relative_buckets < 4 || relative_max_distance <= relative_buckets {
                    return wrong(
                        format!("{relative_buckets} buckets for distances up to {relative_max_distance}"),
                        "`relative_buckets` is at least 4, and `relative_max_distance` is larger",
                    );
                }
                Ok(())
            }
            Model::LstmSeq2seq { layers, hidden, embedding, source_vocab, target_vocab, source_sequence, target_sequence } => {
                for (what, value) in [
                    ("layers", layers),
                    ("hidden", hidden),
                    ("embedding", embedding.unwrap_or(1)),
                    ("source_vocab", source_vocab),
                    ("target_vocab", target_vocab),
                    ("source_sequence", source_sequence),
                    ("target_sequence", target_sequence),
                ] {
                    positive(what, value)?;
                }
                // Four gates lie side by side.
                if hidden > 1 << 22 {
                    return wrong(format!("`hidden` is {hidden}"), "a recurrent layer has 4,194,304 features at most");
                }
                if layers > MOST_LAYERS / 2 {
                    return wrong(format!("`layers` is {layers}"), "encoder and decoder have 5,000 layers each at most");
                }
                Ok(())
            }
            Model::Llama { layers, hidden, heads, kv_heads, head_dimension, ffn, vocab, sequence, rope_theta, .. } => {
                for (what, value) in [("vocab", vocab), ("sequence", sequence), ("rope_theta", rope_theta)] {
                    positive(what, value)?;
                }
                for (what, value) in [("layers", layers), ("hidden", hidden), ("heads", heads), ("ffn", ffn)] {
                    positive(what, value)?;
                }
                if layers > MOST_LAYERS {
                    return wrong(format!("`layers` is {layers}"), "a model has 10,000 layers at most");
                }
                let kv_heads = kv_heads.unwrap_or(heads);
                positive("kv_heads", kv_heads)?;
                if !heads.is_multiple_of(kv_heads) {
                    return wrong(
                        format!("heads {heads} is not a multiple of kv_heads {kv_heads}"),
                        "choose kv_heads that divide heads",
                    );
                }
                rotary_head(name, hidden, heads, head_dimension)
            }
            Model::Vit { layers, hidden, heads, ffn, patch, image, channels, classes, .. } => {
                for (what, value) in [("patch", patch), ("image", image), ("channels", channels), ("classes", classes)] {
                    positive(what, value)?;
                }
                transformer(layers, hidden, heads, ffn.unwrap_or(1))?;
                if image > 8192 || !image.is_multiple_of(patch) {
                    return wrong(
                        format!("`image` is {image} and `patch` {patch}"),
                        "images are 8192 pixels wide at most, and a whole number of patches",
                    );
                }
                Ok(())
            }
            Model::Vgg { depth, stem, image, channels, classes, width, hidden, dropout, .. } => {
                if ![11, 13, 16, 19].contains(&depth) {
                    return wrong(format!("there is no VGG of depth {depth}"), "use depth 11, 13, 16 or 19");
                }
                for (what, value) in [("channels", channels), ("classes", classes), ("width", width), ("hidden", hidden)] {
                    positive(what, value)?;
                }
                if stem == Stem::Small && !dropout.is_none() {
                    return wrong(
                        format!("`dropout` is {}", dropout.value()),
                        "it is of the classifier's inner layers, which `stem: small` does not have: leave it out",
                    );
                }
                match stem {
                    // What is left after five poolings is what the classifier was made for.
                    Stem::Imagenet if image / 32 != 7 => {
                        wrong(format!("`image` is {image}"), "images are 224 to 255 pixels wide, or any size with `stem: small`")
                    }
                    Stem::Small if !(32..=8192).contains(&image) => {
                        wrong(format!("`image` is {image}"), "with `stem: small` images are 32 to 8192 pixels wide")
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}

/// Refuses heads whose features cannot be turned in pairs; `heads` is at least 1.
fn rotary_head(name: &str, hidden: usize, heads: usize, head_dimension: Option<usize>) -> Result<(), ModelError> {
    let wrong = |reason: String, hint: &str| Err(ModelError::Inconsistent { name: name.into(), reason, hint: hint.into() });
    let features = match head_dimension {
        Some(features) if features > 1 << 16 => return wrong(format!("`head_dimension` is {features}"), "it is at most 65,536"),
        Some(features) => features,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let reason = format!("hidden {hidden} is not a multiple of heads {heads}");
            return wrong(reason, "choose heads that divide hidden, or give `head_dimension`");
        }
    };
    if features == 0 || !features.is_multiple_of(2) {
        return wrong(
            format!("a head has {features} features, no even number"),
            "rotary positions turn pairs of features: choose hidden and heads so that a head has an even number, or `head_dimension`",
        );
    }
    Ok(())
}
