//! Pictures: decode → crop → resize → normalise → lay out, straight into the batch.
//!
//! A JPEG is decoded to RGBX in per-thread scratch memory (at 1/2, 1/4 or 1/8 in the DCT domain
//! when the target is that much smaller and `exact` is not asked), resampled row by row in fixed
//! point while the row is in the cache, normalised and written to its place. After the first
//! pictures of a size nothing is allocated.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod decode;
#[cfg(any(test, not(feature = "turbojpeg")))]
mod entropy;
mod header;
mod png;
mod resample;
mod spec;
mod store;
mod taps;
#[cfg(feature = "turbojpeg")]
mod turbo;
#[cfg(not(feature = "turbojpeg"))]
mod zune;

pub use decode::image_size;
pub use header::{JpegHeader, read_header};
pub use png::decode_depth;
pub use spec::{Crop, IMAGE_PIXELS_MAX, IMAGE_SIDE_MAX, ImageSpec, Layout};

use crate::error::{Error, Result};
use crate::index::Codec;
use decode::Decoded;
use resample::{Picture, Rows, resample};
use store::{StoreScratch, store_row};
use taps::{Axis, Taps};

/// How a picture was decoded; parity tests need the decoder by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeInfo {
    /// Name of the decoder.
    pub decoder: &'static str,
    /// Scale at which it decoded, as a fraction.
    pub scale: (u8, u8),
    /// Rows of the encoded picture.
    pub src_h: u32,
    /// Columns of the encoded picture.
    pub src_w: u32,
}

/// Re-used memory and decoders of one thread.
#[derive(Debug, Default)]
pub struct ImageScratch {
    pixels: Vec<u8>,
    rows: Taps,
    columns: Taps,
    buffers: Rows,
    store: StoreScratch,
    #[cfg(feature = "turbojpeg")]
    turbo: Option<turbo::Turbo>,
}

/// Decodes `encoded` into `out` as `spec` says. `out` must have exactly
/// `spec.out_bytes(height, width)` bytes and needs no alignment; `file` is named in errors.
///
/// # Errors
/// [`Error::Corrupt`] for damaged or truncated data, [`Error::Unsupported`] for coding processes
/// without a decoder, [`Error::Invalid`] for a crop outside the picture or a wrong `out`.
pub fn decode_image(
    encoded: &[u8],
    codec: &Codec,
    spec: &ImageSpec,
    scratch: &mut ImageScratch,
    out: &mut [u8],
    file: &str,
) -> Result<DecodeInfo> {
    if let Some(info) = decode::decode_direct(encoded, codec, spec, scratch, out, file)? {
        return Ok(info);
    }
    let decoded = decode::decode(encoded, codec, spec, scratch, file)?;
    let (src_h, src_w) = (decoded.info.src_h, decoded.info.src_w);
    let want = spec.out_bytes(src_h, src_w);
    if out.len() != want {
        let what = format!("output memory for {file}");
        return Err(Error::invalid(what, format!("{want} bytes"), format!("{} bytes", out.len())));
    }
    finish(spec, decoded, scratch, out)?;
    Ok(decoded.info)
}

/// Crop, resize, normalise and write what [`decode::decode`] left in scratch memory.
fn finish(
    spec: &ImageSpec,
    decoded: Decoded,
    scratch: &mut ImageScratch,
    out: &mut [u8],
) -> Result<()> {
    let info = decoded.info;
    let region = spec.region(info.src_h, info.src_w)?;
    let (out_h, out_w) = spec.out_size(info.src_h, info.src_w);
    let scale = f64::from(info.scale.0) / f64::from(info.scale.1);
    let axis = |src_len, from: u32, length: u32, out_len: u32| Axis {
        src_len,
        start: f64::from(from) * scale,
        length: f64::from(length) * scale,
        out_len: out_len as usize,
    };
    scratch.rows.prepare(axis(decoded.height, region.y, region.h, out_h));
    scratch.columns.prepare(axis(decoded.width, region.x, region.w, out_w));
    let picture = Picture { pixels: &scratch.pixels, width: decoded.width };
    let store = &mut scratch.store;
    resample(picture, &scratch.rows, &scratch.columns, &mut scratch.buffers, |y, planes| {
        store_row(spec, store, (y, out_h as usize), planes, out);
    });
    Ok(())
}
