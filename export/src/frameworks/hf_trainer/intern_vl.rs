//! Settings of InternVL's training scripts that a Trainer does not have: those of its images, and
//! its name for recomputation.

use super::super::FrameworkError;
use super::super::stated::Stated;
use serde_json::json;

/// Settings that change neither the time of a step nor its memory.
const NEUTRAL: [&str; 12] = [
    "conv_style",
    "meta_path",
    "ps_version",
    "drop_path_rate",
    "pad2square",
    "use_data_resampling",
    "normalize_type",
    "split_annotations",
    "loss_reduction",
    "loss_reduction_all_gather",
    "use_custom_trainer",
    "neftune_alpha",
];

/// Settings that decide the number of tokens of an image.
const OF_IMAGES: [&str; 6] =
    ["force_image_size", "down_sample_ratio", "dynamic_image_size", "max_dynamic_patch", "min_dynamic_patch", "use_thumbnail"];

/// Reads the settings that only these scripts have, if they are among the stated ones.
pub(super) fn read(stated: &mut Stated) -> Result<(), FrameworkError> {
    if !["force_image_size", "down_sample_ratio", "conv_style"].iter().any(|name| stated.has(name)) {
        return Ok(());
    }
    stated.neutral(&NEUTRAL);
    if !stated.has("activation_checkpointing") {
        stated.provide("activation_checkpointing", json!(true));
        stated.assume("`recompute` full: InternVL's default of `grad_checkpoint`");
    }
    let named: Vec<String> = OF_IMAGES.iter().filter(|name| stated.has(name)).map(|name| stated.written(name)).collect();
    stated.neutral(&OF_IMAGES);
    if !named.is_empty() {
        stated.assume(format!(
            "{}: how many patches an image has is the model's, `vision: {{images: .., patches: ..}}` in the model file",
            named.join(", ")
        ));
    }
    Ok(())
}
