//! JPEG and PNG files to pixels. The format is found by the first bytes: data sets hold PNG files
//! that are named `.jpg`. This module knows neither files nor models.

use std::io::Cursor;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// Bytes of a pixel: red, green, blue and one that is not used, so that a pixel is four lanes.
pub(super) const PIXEL: usize = 4;

/// The most pixels of a picture: Pillow's limit against files that claim a huge size.
const MAX_PIXELS: usize = 89_478_485;

/// A picture in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pixels {
    pub width: usize,
    pub height: usize,
    /// `[height, width, PIXEL]`.
    pub bytes: Vec<u8>,
}

impl Pixels {
    /// The bytes of one row; empty below the last.
    pub(super) fn row(&self, row: usize) -> &[u8] {
        let length = self.width * PIXEL;
        self.bytes.get(row * length..(row + 1) * length).unwrap_or_default()
    }
}

/// Decodes a file.
///
/// # Errors
/// The reason, as the rest of a sentence that begins with the file's name.
pub(super) fn decode(file: &[u8]) -> Result<Pixels, String> {
    match file {
        [0xFF, 0xD8, ..] => decode_jpeg(file),
        [0x89, b'P', b'N', b'G', ..] => decode_png(file),
        [] => Err("is empty".into()),
        _ => Err("is neither a JPEG nor a PNG file".into()),
    }
}

fn check_size(width: usize, height: usize) -> Result<(), String> {
    match width.checked_mul(height) {
        Some(1..=MAX_PIXELS) => Ok(()),
        _ => Err(format!("claims {width}x{height} pixels, and at most {MAX_PIXELS} are read")),
    }
}

fn decode_jpeg(file: &[u8]) -> Result<Pixels, String> {
    // The decoder detects an early end only if rows of blocks are missing, so require the end
    // marker.
    let last_scan = file.windows(2).rposition(|pair| pair == [0xFF, 0xDA]);
    if !file.get(last_scan.unwrap_or(file.len())..).is_some_and(|scan| scan.windows(2).any(|pair| pair == [0xFF, 0xD9])) {
        return Err("is cut short: its JPEG data has no end".into());
    }
    // Strict, or corrupt data would decode to grey.
    let options = |space| {
        let options = DecoderOptions::default().jpeg_set_out_colorspace(space).set_strict_mode(true);
        options.set_max_width(MAX_PIXELS).set_max_height(MAX_PIXELS)
    };
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(file), options(ColorSpace::RGBA));
    let corrupt = |error: zune_jpeg::errors::DecodeErrors| format!("is corrupt: {error:?}");
    decoder.decode_headers().map_err(corrupt)?;
    let (width, height) = decoder.dimensions().ok_or("states no size")?;
    check_size(width, height)?;
    // The decoder writes print colours (CMYK, YCCK) in three bytes a pixel, whatever colours it is
    // asked for.
    let is_print = matches!(decoder.input_colorspace(), Some(ColorSpace::CMYK | ColorSpace::YCCK));
    if is_print {
        decoder.set_options(options(ColorSpace::RGB));
    }
    let mut bytes = decoder.decode().map_err(corrupt)?;
    if is_print {
        bytes = bytes.as_chunks::<3>().0.iter().flat_map(|&[red, green, blue]| [red, green, blue, 0]).collect();
    }
    match bytes.len() == width * height * PIXEL {
        true => Ok(Pixels { width, height, bytes }),
        false => Err("is corrupt: its size and its colours do not agree".into()),
    }
}

fn decode_png(file: &[u8]) -> Result<Pixels, String> {
    let corrupt = |error: png::DecodingError| format!("is corrupt: {error}");
    let limits = png::Limits { bytes: MAX_PIXELS * PIXEL };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(file), limits);
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(corrupt)?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    check_size(width, height)?;
    let mut samples = vec![0; reader.output_buffer_size()];
    reader.next_frame(&mut samples).map_err(corrupt)?;
    // Checks the end of the file and its checksums.
    reader.finish().map_err(corrupt)?;
    let (color, _) = reader.output_color_type();
    let mut bytes = vec![0; width * height * PIXEL];
    for (pixel, source) in bytes.chunks_exact_mut(PIXEL).zip(samples.chunks_exact(color.samples())) {
        // Transparency is dropped, as Pillow's `convert("RGB")` does.
        let color = match *source {
            [red, green, blue] | [red, green, blue, _] => [red, green, blue],
            [grey] | [grey, _] => [grey; 3],
            _ => unreachable!("invariant: a pixel has one to four samples"),
        };
        pixel.iter_mut().zip(color).for_each(|(byte, value)| *byte = value);
    }
    Ok(Pixels { width, height, bytes })
}
