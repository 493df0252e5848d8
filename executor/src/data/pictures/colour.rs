//! Random changes of colours: torchvision's `ColorJitter` on Pillow's bytes, with the same
//! rounding.

use super::decode::{PIXEL, Pixels};
use crate::data::order::{below, unit};
use rand_chacha::ChaCha8Rng;

/// Changes brightness, contrast, saturation and hue, in random order. `strengths` has the largest
/// change of each.
pub(super) fn jitter(random: &mut ChaCha8Rng, picture: &mut Pixels, strengths: [f64; 4]) {
    let mut order = [0, 1, 2, 3];
    for last in (1..order.len()).rev() {
        order.swap(last, below(random, last as u64 + 1) as usize);
    }
    let draws = strengths.map(|strength| strength * (2.0 * unit(random) - 1.0));
    for change in order {
        match (change, draws) {
            (0, [draw, ..]) if draw != 0.0 => brightness(picture, 1.0 + draw),
            (1, [_, draw, ..]) if draw != 0.0 => contrast(picture, 1.0 + draw),
            (2, [_, _, draw, _]) if draw != 0.0 => saturation(picture, 1.0 + draw),
            (3, [.., draw]) if draw != 0.0 => turn_hue(picture, draw),
            _ => {}
        }
    }
}

/// Pillow's `Image.blend` of two bytes.
fn blend(from: u8, to: u8, share: f64) -> u8 {
    let (from, to, share) = (f32::from(from), f32::from(to), share as f32);
    // The conversion truncates, and limits to 0 and 255.
    (from + share * (to - from)) as u8
}

/// Pillow's grey of a pixel: ITU-R 601-2 in fixed point.
fn grey([red, green, blue, _]: [u8; PIXEL]) -> u8 {
    ((u32::from(red) * 19595 + u32::from(green) * 38470 + u32::from(blue) * 7471 + 0x8000) >> 16) as u8
}

fn each(picture: &mut Pixels, change: impl Fn([u8; PIXEL]) -> [u8; PIXEL]) {
    for pixel in picture.bytes.as_chunks_mut::<PIXEL>().0 {
        *pixel = change(*pixel);
    }
}

pub(super) fn brightness(picture: &mut Pixels, factor: f64) {
    each(picture, |pixel| pixel.map(|value| blend(0, value, factor)));
}

pub(super) fn contrast(picture: &mut Pixels, factor: f64) {
    let pixels = picture.bytes.as_chunks::<PIXEL>().0;
    let sum: u64 = pixels.iter().map(|pixel| u64::from(grey(*pixel))).sum();
    let mean = (sum as f64 / pixels.len().max(1) as f64 + 0.5) as u8;
    each(picture, |pixel| pixel.map(|value| blend(mean, value, factor)));
}

pub(super) fn saturation(picture: &mut Pixels, factor: f64) {
    each(picture, |pixel| {
        let grey = grey(pixel);
        pixel.map(|value| blend(grey, value, factor))
    });
}

/// Turns the hue by a fraction of the colour circle: adds `turn · 255`, truncated, to Pillow's
/// 8-bit hue.
pub(super) fn turn_hue(picture: &mut Pixels, turn: f64) {
    let steps = (turn * 255.0) as i32 as u8;
    each(picture, |[red, green, blue, rest]| {
        let [hue, saturation, value] = to_hsv([red, green, blue]);
        let [red, green, blue] = from_hsv([hue.wrapping_add(steps), saturation, value]);
        [red, green, blue, rest]
    });
}

/// Pillow's `rgb2hsv_row` (`src/libImaging/Convert.c`).
fn to_hsv(color: [u8; 3]) -> [u8; 3] {
    let [red, green, blue] = color;
    let (most, least) = (red.max(green).max(blue), red.min(green).min(blue));
    if most == least {
        return [0, 0, most];
    }
    // Pillow's variables are `float`, and its expressions `double`.
    let range = f32::from(most - least);
    let [from_red, from_green, from_blue] = color.map(|value| f64::from(f32::from(most - value) / range));
    let sextant = if red == most {
        from_blue - from_green
    } else if green == most {
        2.0 + from_red - from_blue
    } else {
        4.0 + from_green - from_red
    };
    let hue = (f64::from(sextant as f32) / 6.0 + 1.0).fract() as f32;
    let saturation = range / f32::from(most);
    [(f64::from(hue) * 255.0) as u8, (f64::from(saturation) * 255.0) as u8, most]
}

/// Pillow's `hsv2rgb_row`.
fn from_hsv([hue, saturation, value]: [u8; 3]) -> [u8; 3] {
    if saturation == 0 {
        return [value; 3];
    }
    let sextant = f64::from(hue) * 6.0 / 255.0;
    let (whole, part) = (sextant.floor(), f64::from((sextant - sextant.floor()) as f32));
    let (saturation, level) = (f64::from((f64::from(saturation) / 255.0) as f32), f64::from(value));
    let byte = |value: f64| value.round() as u8;
    let low = byte(level * (1.0 - saturation));
    let falling = byte(level * (1.0 - saturation * part));
    let rising = byte(level * (1.0 - saturation * (1.0 - part)));
    match whole as u8 % 6 {
        0 => [value, rising, low],
        1 => [falling, value, low],
        2 => [low, value, rising],
        3 => [low, falling, value],
        4 => [rising, low, value],
        _ => [value, low, falling],
    }
}
