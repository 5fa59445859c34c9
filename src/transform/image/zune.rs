//! JPEG by zune-jpeg: pure Rust, whole pictures only. Used where libjpeg-turbo is not built in.

use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

use super::entropy;
use super::header::JpegHeader;
use super::spec::IMAGE_SIDE_MAX;
use crate::error::{Error, Result};

/// Name in decode reports.
pub const NAME: &str = "zune-jpeg";

/// Decodes a whole picture as RGBX, or as stored CMYK for four components.
pub fn decode(jpeg: &[u8], header: &JpegHeader, out: &mut [u8], file: &str) -> Result<()> {
    refuse(header, file)?;
    if !header.progressive() {
        entropy::check(jpeg, file)?;
    }
    let colours = if header.components == 4 { ColorSpace::CMYK } else { ColorSpace::RGBA };
    // Strict: missing data is an error instead of grey pixels.
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(IMAGE_SIDE_MAX as usize * 4)
        .set_max_height(IMAGE_SIDE_MAX as usize * 4)
        .jpeg_set_out_colorspace(colours);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(jpeg), options);
    decoder.decode_into(out).map_err(|e| damaged(file, &format!("{e:?}")))
}

/// What version 0.5.15 decodes to wrong pixels, or not at all.
fn refuse(header: &JpegHeader, file: &str) -> Result<()> {
    let what = if header.arithmetic() {
        "JPEG with arithmetic coding"
    } else if !header.interleaved && header.subsampled && !header.progressive() {
        "baseline JPEG with one scan per subsampled component"
    } else if header.ycck {
        "YCCK JPEG"
    } else {
        return Ok(());
    };
    let advice = "build with libjpeg-turbo (feature turbojpeg; install nasm), or convert it";
    Err(Error::Unsupported { what: format!("{file}: {what}"), advice: advice.into() })
}

fn damaged(file: &str, message: &str) -> Error {
    let advice = "the JPEG is damaged or cut off; fetch the file again or drop it";
    Error::corrupt(file, 0, "a complete JPEG", format!("{NAME} says: {message}"), advice)
}
