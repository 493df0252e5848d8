//! Properties that families of image models share, and defaults of their sizes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The form of an image model: for large images or for small ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Stem {
    /// For images of about 224x224 pixels. A ResNet begins with a 7x7 convolution of stride 2 and a
    /// max-pool. A VGG ends with a classifier of three layers.
    #[default]
    Imagenet,
    /// For images of about 32x32 pixels. A ResNet begins with a 3x3 convolution of stride 1. A VGG
    /// ends with a pooling of the whole image and a classifier of one layer.
    Small,
}

/// The most pixels on each side of an image.
pub(super) const MOST_PIXELS: usize = 8192;

/// Pixels on each side of ImageNet's images, as they are usually cropped.
pub(super) fn image() -> usize {
    224
}

/// Channels of ImageNet's images.
pub(super) fn channels() -> usize {
    3
}

/// Classes of ImageNet.
pub(super) fn classes() -> usize {
    1000
}

/// Channels of the first stage of a ResNet or a VGG.
pub(super) fn width() -> usize {
    64
}
