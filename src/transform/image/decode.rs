//! From encoded bytes to a picture in scratch memory, or straight to the natural form.

use super::header::{JpegHeader, read_header};
use super::png;
use super::resample::PIXEL_BYTES;
use super::spec::{Crop, IMAGE_PIXELS_MAX, ImageSpec, Layout};
#[cfg(feature = "turbojpeg")]
use super::turbo;
#[cfg(not(feature = "turbojpeg"))]
use super::zune;
use super::{DecodeInfo, ImageScratch};
use crate::error::{Error, Result};
use crate::index::Codec;
use crate::transform::DType;

/// Sizes of a decoded picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decoded {
    /// Rows in scratch memory.
    pub height: usize,
    /// Columns in scratch memory.
    pub width: usize,
    /// How it came about.
    pub info: DecodeInfo,
}

/// (height, width) of an encoded picture from its header, in source pixels.
pub fn image_size(encoded: &[u8], codec: &Codec, file: &str) -> Result<(u32, u32)> {
    match codec {
        Codec::Jpeg => read_header(encoded, file).map(|h| (h.height, h.width)),
        Codec::Png => png::size(encoded, file),
        other => Err(no_decoder(other, file)),
    }
}

/// Decodes into `scratch.pixels` as RGBX.
pub fn decode(
    encoded: &[u8],
    codec: &Codec,
    spec: &ImageSpec,
    scratch: &mut ImageScratch,
    file: &str,
) -> Result<Decoded> {
    match codec {
        Codec::Jpeg => {
            let header = checked_header(encoded, file)?;
            let region = spec.region(header.height, header.width)?;
            decode_jpeg(encoded, &header, denominator(spec, region), scratch, file)
        }
        Codec::Png => {
            let (height, width) = png::size(encoded, file)?;
            check_pixels(height, width, file)?;
            png::decode_rgbx(encoded, &mut scratch.pixels, file)?;
            let info =
                DecodeInfo { decoder: png::NAME, scale: (1, 1), src_h: height, src_w: width };
            Ok(Decoded { height: height as usize, width: width as usize, info })
        }
        other => Err(no_decoder(other, file)),
    }
}

fn no_decoder(codec: &Codec, file: &str) -> Error {
    let what = format!("{file}: decoding {codec:?} as an image");
    Error::Unsupported {
        what,
        advice: "ask for the field without dt.Image to get its bytes".into(),
    }
}

fn checked_header(jpeg: &[u8], file: &str) -> Result<JpegHeader> {
    let header = read_header(jpeg, file)?;
    check_pixels(header.height, header.width, file)?;
    Ok(header)
}

fn check_pixels(height: u32, width: u32, file: &str) -> Result<()> {
    if u64::from(height) * u64::from(width) <= IMAGE_PIXELS_MAX {
        return Ok(());
    }
    let what = format!("{file}: a picture of {height} x {width} pixels");
    let advice = format!("pictures of up to {IMAGE_PIXELS_MAX} pixels are decoded");
    Err(Error::Unsupported { what, advice })
}

/// How far to halve in the DCT domain: once if that leaves at least the target, further only while
/// twice the target is left. A halved picture is sharper than one shrunk by the triangle filter;
/// with a resize of at least 2 behind it the difference is gone, and beyond 1/2 entropy decoding
/// is nearly all that remains, so little is lost.
fn denominator(spec: &ImageSpec, region: Crop) -> u8 {
    let Some((h, w)) = spec.size else { return 1 };
    if spec.exact || cfg!(not(feature = "turbojpeg")) {
        return 1;
    }
    let enough = |(denominator, margin): &(u8, u32)| {
        let left = |side: u32| side / u32::from(*denominator);
        left(region.h) >= margin * h && left(region.w) >= margin * w
    };
    [(8, 2), (4, 2), (2, 1)].into_iter().find(enough).map_or(1, |(denominator, _)| denominator)
}

#[cfg(feature = "turbojpeg")]
fn decode_jpeg(
    jpeg: &[u8],
    header: &JpegHeader,
    denominator: u8,
    scratch: &mut ImageScratch,
    file: &str,
) -> Result<Decoded> {
    let (height, width) = turbo::scaled(header, denominator);
    scratch.pixels.resize(height * width * PIXEL_BYTES, 0);
    let four = header.components == 4;
    let format = if four { turbo::Format::Cmyk } else { turbo::Format::Rgbx };
    let pixels = &mut scratch.pixels;
    turbo_of(&mut scratch.turbo)?.decode(jpeg, header, denominator, format, pixels, file)?;
    if four {
        cmyk_to_rgb(&mut scratch.pixels, header.adobe);
    }
    let info = DecodeInfo {
        decoder: turbo::NAME,
        scale: (1, denominator),
        src_h: header.height,
        src_w: header.width,
    };
    Ok(Decoded { height, width, info })
}

#[cfg(feature = "turbojpeg")]
fn turbo_of(slot: &mut Option<turbo::Turbo>) -> Result<&mut turbo::Turbo> {
    let made = match slot.take() {
        Some(made) => made,
        None => turbo::Turbo::new()?,
    };
    Ok(slot.insert(made))
}

#[cfg(not(feature = "turbojpeg"))]
fn decode_jpeg(
    jpeg: &[u8],
    header: &JpegHeader,
    _denominator: u8,
    scratch: &mut ImageScratch,
    file: &str,
) -> Result<Decoded> {
    let (height, width) = (header.height as usize, header.width as usize);
    scratch.pixels.resize(height * width * PIXEL_BYTES, 0);
    zune::decode(jpeg, header, &mut scratch.pixels, file)?;
    if header.components == 4 {
        cmyk_to_rgb(&mut scratch.pixels, header.adobe);
    }
    let info = DecodeInfo {
        decoder: zune::NAME,
        scale: (1, 1),
        src_h: header.height,
        src_w: header.width,
    };
    Ok(Decoded { height, width, info })
}

/// Decodes straight into `out` as (H, W, 3) uint8 if that is all that is asked and the decoder can.
#[cfg(feature = "turbojpeg")]
pub fn decode_direct(
    encoded: &[u8],
    codec: &Codec,
    spec: &ImageSpec,
    scratch: &mut ImageScratch,
    out: &mut [u8],
    file: &str,
) -> Result<Option<DecodeInfo>> {
    let plain = spec.crop.is_none() && spec.dtype == DType::U8 && spec.layout == Layout::Hwc;
    if !plain || *codec != Codec::Jpeg {
        return Ok(None);
    }
    let header = checked_header(encoded, file)?;
    let same = spec.size.is_none_or(|size| size == (header.height, header.width));
    if !same || header.components == 4 || out.len() != spec.out_bytes(header.height, header.width) {
        return Ok(None);
    }
    turbo_of(&mut scratch.turbo)?.decode(encoded, &header, 1, turbo::Format::Rgb, out, file)?;
    let (src_h, src_w) = (header.height, header.width);
    Ok(Some(DecodeInfo { decoder: turbo::NAME, scale: (1, 1), src_h, src_w }))
}

/// zune-jpeg has no direct path that would differ from the general one.
#[cfg(not(feature = "turbojpeg"))]
#[allow(clippy::unnecessary_wraps, reason = "the same signature with either decoder")]
pub fn decode_direct(
    _encoded: &[u8],
    _codec: &Codec,
    _spec: &ImageSpec,
    _scratch: &mut ImageScratch,
    _out: &mut [u8],
    _file: &str,
) -> Result<Option<DecodeInfo>> {
    let _ = (DType::U8, Layout::Hwc);
    Ok(None)
}

/// Ink to light, in place: `light = (1 - ink) * (1 - black)` with Pillow's rounding. Adobe's files
/// store inks inverted.
fn cmyk_to_rgb(pixels: &mut [u8], inverted: bool) {
    let flip = if inverted { 255 } else { 0 };
    for pixel in pixels.as_chunks_mut::<4>().0 {
        let paper = i32::from(255 - (pixel[3] ^ flip));
        for level in &mut pixel[..3] {
            let product = i32::from(*level ^ flip) * paper + 128;
            let ink = ((product >> 8) + product) >> 8;
            *level = (paper - ink).clamp(0, 255) as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_keeps_at_least_the_target() {
        let region = Crop { y: 0, x: 0, h: 900, w: 1600 };
        let of =
            |size, exact| denominator(&ImageSpec { size, exact, ..ImageSpec::default() }, region);
        assert_eq!(of(Some((256, 704)), true), 1);
        assert_eq!(of(None, false), 1);
        if cfg!(feature = "turbojpeg") {
            assert_eq!(of(Some((256, 704)), false), 2);
            assert_eq!(of(Some((450, 801)), false), 1);
            assert_eq!(of(Some((112, 200)), false), 4);
            assert_eq!(of(Some((113, 200)), false), 2);
            assert_eq!(of(Some((56, 100)), false), 8);
        }
    }

    #[test]
    fn inks_by_hand() {
        // No ink is white; full black is black; full cyan without black has no red.
        let mut pixels = [0, 0, 0, 0, 9, 9, 9, 255, 255, 0, 0, 0];
        cmyk_to_rgb(&mut pixels, false);
        assert_eq!([&pixels[..3], &pixels[4..7]], [[255; 3], [0; 3]]);
        assert_eq!(pixels[8..11], [0, 255, 255]);
        let mut inverted = [255, 255, 255, 255];
        cmyk_to_rgb(&mut inverted, true);
        assert_eq!(inverted[..3], [255; 3]);
    }
}
