//! PNG: 8-bit colour as RGBX, and 16-bit grey as depth.

use std::io::Cursor;

use png::{BitDepth, ColorType, Decoder, Limits, Transformations};

use super::resample::PIXEL_BYTES;
use crate::error::{Error, Result};

/// Name in decode reports.
pub const NAME: &str = "png";

/// Memory the decoder may use beside the picture itself.
const DECODER_BYTES_MAX: usize = 64 << 20;

/// Bytes of the signature, the header chunk's length and name, and the two sides.
const SIZE_END: usize = 24;

/// (height, width) from the header.
pub fn size(encoded: &[u8], file: &str) -> Result<(u32, u32)> {
    let head = encoded.get(..SIZE_END).filter(|h| h.starts_with(b"\x89PNG\r\n\x1a\n"));
    let Some(head) = head.filter(|h| &h[12..16] == b"IHDR") else {
        return Err(damaged(file, "no PNG signature and header"));
    };
    let side = |at: usize| head[at..at + 4].iter().fold(0_u32, |v, b| v << 8 | u32::from(*b));
    match (side(20), side(16)) {
        (0, _) | (_, 0) => Err(damaged(file, "a side of 0 pixels")),
        size => Ok(size),
    }
}

fn damaged(file: &str, found: &str) -> Error {
    let advice = "the PNG is damaged or cut off; fetch the file again or drop it";
    Error::corrupt(file, 0, "a complete PNG", found, advice)
}

/// Decodes to samples as `transform` leaves them; returns their colour type.
fn samples(
    encoded: &[u8],
    transform: Transformations,
    file: &str,
) -> Result<(Vec<u8>, ColorType, BitDepth)> {
    let limits = Limits { bytes: DECODER_BYTES_MAX };
    let mut decoder = Decoder::new_with_limits(Cursor::new(encoded), limits);
    decoder.set_transformations(transform);
    let mut reader = decoder.read_info().map_err(|e| damaged(file, &e.to_string()))?;
    let bytes = reader.output_buffer_size();
    let mut data = vec![0; bytes.ok_or_else(|| damaged(file, "a size beyond memory"))?];
    let info = reader.next_frame(&mut data).map_err(|e| damaged(file, &e.to_string()))?;
    data.truncate(info.buffer_size());
    Ok((data, info.color_type, info.bit_depth))
}

/// Decodes into `out` as RGBX: palettes and low depths expanded, 16 bits cut to 8, alpha dropped.
pub fn decode_rgbx(encoded: &[u8], out: &mut Vec<u8>, file: &str) -> Result<()> {
    let transform = Transformations::EXPAND | Transformations::STRIP_16;
    let (data, colours, _) = samples(encoded, transform, file)?;
    let channels = colours.samples();
    out.resize(data.len() / channels * PIXEL_BYTES, 0);
    for (pixel, sample) in out.chunks_exact_mut(PIXEL_BYTES).zip(data.chunks_exact(channels)) {
        match sample {
            [grey] | [grey, _] => pixel[..3].fill(*grey),
            [r, g, b, ..] => pixel[..3].copy_from_slice(&[*r, *g, *b]),
            [] => {}
        }
    }
    Ok(())
}

/// 16-bit grey PNG as rows of u16 with (height, width); `None` for any other PNG.
pub fn decode_depth(encoded: &[u8], file: &str) -> Result<Option<(u32, u32, Vec<u16>)>> {
    let (height, width) = size(encoded, file)?;
    // Bit depth and colour type follow the sides: 16 bits, grey.
    if encoded.get(SIZE_END..SIZE_END + 2) != Some(&[16, 0]) {
        return Ok(None);
    }
    if u64::from(height) * u64::from(width) > super::IMAGE_PIXELS_MAX {
        return Err(damaged(file, &format!("{height} x {width} pixels")));
    }
    let (data, _, depth) = samples(encoded, Transformations::IDENTITY, file)?;
    if depth != BitDepth::Sixteen {
        return Err(damaged(file, "another bit depth than the header's"));
    }
    let levels = data.as_chunks::<2>().0.iter().map(|b| u16::from_be_bytes(*b)).collect();
    Ok(Some((height, width, levels)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(colours: ColorType, depth: BitDepth, data: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut encoder = png::Encoder::new(&mut out, 2, 1);
        encoder.set_color(colours);
        encoder.set_depth(depth);
        encoder.write_header().unwrap().write_image_data(data).unwrap();
        out
    }

    #[test]
    fn colours_become_rgbx() {
        let mut out = Vec::new();
        let rgb = encoded(ColorType::Rgb, BitDepth::Eight, &[1, 2, 3, 4, 5, 6]);
        assert_eq!(size(&rgb, "a").unwrap(), (1, 2));
        decode_rgbx(&rgb, &mut out, "a").unwrap();
        assert_eq!([&out[..3], &out[4..7]], [[1, 2, 3], [4, 5, 6]]);
        let grey = encoded(ColorType::GrayscaleAlpha, BitDepth::Eight, &[7, 0, 8, 255]);
        decode_rgbx(&grey, &mut out, "a").unwrap();
        assert_eq!([&out[..3], &out[4..7]], [[7; 3], [8; 3]]);
    }

    #[test]
    fn depth_keeps_16_bits() {
        let png = encoded(ColorType::Grayscale, BitDepth::Sixteen, &[1, 2, 255, 254]);
        assert_eq!(decode_depth(&png, "a").unwrap(), Some((1, 2, vec![258, 65534])));
        let eight = encoded(ColorType::Grayscale, BitDepth::Eight, &[1, 2]);
        assert_eq!(decode_depth(&eight, "a").unwrap(), None);
    }

    #[test]
    fn truncation_is_an_error() {
        let png = encoded(ColorType::Rgb, BitDepth::Eight, &[1, 2, 3, 4, 5, 6]);
        for cut in 0..png.len() - 12 {
            assert!(decode_rgbx(&png[..cut], &mut Vec::new(), "a").is_err(), "{cut}");
        }
    }

    proptest! {
        #[test]
        fn no_flipped_byte_panics(at in 0_usize..80, value in 0_u8..) {
            let mut png = encoded(ColorType::Rgb, BitDepth::Eight, &[1, 2, 3, 4, 5, 6]);
            let at = at % png.len();
            png[at] = value;
            let _ = decode_rgbx(&png, &mut Vec::new(), "x");
            let _ = decode_depth(&png, "x");
        }
    }
}
