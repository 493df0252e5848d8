//! What families of image models share: the first layers, and the sizes that model files may leave out.

use serde::{Deserialize, Serialize};

/// The first layers of a model of images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stem {
    /// For images of 224x224 pixels. A ResNet begins with a 7x7 convolution of stride 2 and a max-pool.
    #[default]
    Imagenet,
    /// For images of 32x32 pixels and smaller. A ResNet begins with a 3x3 convolution of stride 1.
    Small,
}

/// The widest images of any family.
pub(super) const MOST_PIXELS: usize = 8192;

/// ImageNet's images as models are usually trained on them: pixels on each side.
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
