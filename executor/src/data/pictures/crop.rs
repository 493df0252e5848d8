//! The part of a picture that a model sees: a random one in training, the centre in evaluation.
//!
//! Both are torchvision's: `RandomResizedCrop` with its default scale and ratio, and `Resize`
//! followed by `CenterCrop`.

use super::decode::Pixels;
use super::resize::{Rectangle, resize};
use crate::data::order::{below, unit};
use rand_chacha::ChaCha8Rng;

/// The share of the area that a random crop has.
const SCALE: [f64; 2] = [0.08, 1.0];
/// Width over height of a random crop.
const RATIO: [f64; 2] = [3.0 / 4.0, 4.0 / 3.0];
/// Side of a picture before its centre is cut out, over the side of the centre: 256 to 224.
const MARGIN: f64 = 256.0 / 224.0;

/// Draws a rectangle within `width` x `height`.
pub(super) fn random_rectangle(random: &mut ChaCha8Rng, width: usize, height: usize) -> Rectangle {
    let area = (width * height) as f64;
    for _ in 0..10 {
        let target = area * between(random, SCALE);
        let ratio = between(random, RATIO.map(f64::ln)).exp();
        let (w, h) = ((target * ratio).sqrt().round_ties_even() as usize, (target / ratio).sqrt().round_ties_even() as usize);
        if (1..=width).contains(&w) && (1..=height).contains(&h) {
            let top = below(random, (height - h + 1) as u64) as usize;
            let left = below(random, (width - w + 1) as u64) as usize;
            return Rectangle { left, top, width: w, height: h };
        }
    }
    // The largest centred part with an allowed ratio.
    let own = width as f64 / height as f64;
    let (w, h) = if own < RATIO[0] {
        (width, ((width as f64 / RATIO[0]).round_ties_even() as usize).min(height))
    } else if own > RATIO[1] {
        (((height as f64 * RATIO[1]).round_ties_even() as usize).min(width), height)
    } else {
        (width, height)
    };
    Rectangle { left: (width - w) / 2, top: (height - h) / 2, width: w, height: h }
}

fn between(random: &mut ChaCha8Rng, [low, high]: [f64; 2]) -> f64 {
    low + (high - low) * unit(random)
}

/// A random part of the picture, resized to `width` x `height`.
pub(super) fn random_crop(random: &mut ChaCha8Rng, picture: &Pixels, [width, height]: [usize; 2]) -> Pixels {
    let from = random_rectangle(random, picture.width, picture.height);
    resize(picture, from, [width, height], 0..width, 0..height)
}

/// The centre of the picture, resized so that its short side is 256/224 times the crop's longer
/// side.
pub(super) fn center_crop(picture: &Pixels, [width, height]: [usize; 2]) -> Pixels {
    let whole = Rectangle { left: 0, top: 0, width: picture.width, height: picture.height };
    let short = (width.max(height) as f64 * MARGIN).round_ties_even() as usize;
    let long = |long_side: usize, short_side: usize| (short as f64 * long_side as f64 / short_side as f64) as usize;
    let (resized_width, resized_height) = match picture.width <= picture.height {
        true => (short, long(picture.height, picture.width)),
        false => (long(picture.width, picture.height), short),
    };
    let start = |resized: usize, wanted: usize| ((resized - wanted) as f64 / 2.0).round_ties_even() as usize;
    let (left, top) = (start(resized_width, width), start(resized_height, height));
    resize(picture, whole, [resized_width, resized_height], left..left + width, top..top + height)
}
