//! JPEG by libjpeg-turbo: whole or DCT-scaled, into the caller's memory.

use std::ffi::CStr;

use turbojpeg::raw;

use super::header::JpegHeader;
use super::resample::PIXEL_BYTES;
use super::spec::IMAGE_PIXELS_MAX;
use crate::error::{Error, Result};

/// Scans of a progressive file; encoders write about ten, a hostile file thousands.
const SCANS_MAX: i32 = 100;

/// Name in decode reports.
pub const NAME: &str = "libjpeg-turbo";

/// Pixel formats that are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// 3 bytes: red, green, blue.
    Rgb,
    /// 4 bytes: red, green, blue, unused.
    Rgbx,
    /// 4 bytes: cyan, magenta, yellow, black as stored.
    Cmyk,
}

impl Format {
    fn bytes(self) -> usize {
        if self == Self::Rgb { 3 } else { PIXEL_BYTES }
    }

    fn code(self) -> i32 {
        match self {
            Self::Rgb => raw::TJPF_TJPF_RGB,
            Self::Rgbx => raw::TJPF_TJPF_RGBX,
            Self::Cmyk => raw::TJPF_TJPF_CMYK,
        }
    }
}

/// One decompressor; made once per thread and re-used.
#[derive(Debug)]
pub struct Turbo {
    handle: raw::tjhandle,
}

// SAFETY: the handle is owned, has no thread affinity, and every use takes `&mut self`.
unsafe impl Send for Turbo {}

impl Turbo {
    /// A decompressor with this module's limits.
    pub fn new() -> Result<Self> {
        // SAFETY: no preconditions.
        let handle = unsafe { raw::tj3Init(raw::TJINIT_TJINIT_DECOMPRESS as i32) };
        if handle.is_null() {
            let what = "a libjpeg-turbo decompressor".to_string();
            return Err(Error::Unsupported { what, advice: "memory may be exhausted".into() });
        }
        let turbo = Self { handle };
        turbo.set(raw::TJPARAM_TJPARAM_SCANLIMIT, SCANS_MAX);
        turbo.set(raw::TJPARAM_TJPARAM_MAXPIXELS, IMAGE_PIXELS_MAX as i32);
        Ok(turbo)
    }

    fn set(&self, parameter: raw::TJPARAM, value: i32) {
        // SAFETY: the handle is alive; both parameters exist for decompressors.
        unsafe { raw::tj3Set(self.handle, parameter as i32, value) };
    }

    /// Decodes to `ceil(size / denominator)` pixels; `out` must have exactly those bytes.
    pub fn decode(
        &mut self,
        jpeg: &[u8],
        header: &JpegHeader,
        denominator: u8,
        format: Format,
        out: &mut [u8],
        file: &str,
    ) -> Result<()> {
        let (h, w) = scaled(header, denominator);
        debug_assert_eq!(out.len(), h * w * format.bytes());
        let factor = raw::tjscalingfactor { num: 1, denom: i32::from(denominator) };
        // SAFETY: the handle is alive. libjpeg-turbo reads `jpeg.len()` bytes and, with the size
        // in the header that `read_header` found too, writes h rows of w pixels, which `out` holds
        // (checked below against what the library itself has read).
        let status = unsafe {
            let mut status = raw::tj3SetScalingFactor(self.handle, factor);
            if status == 0 {
                status = raw::tj3DecompressHeader(self.handle, jpeg.as_ptr(), jpeg.len() as _);
            }
            if (status == 0 || self.is_warning()) && self.size() != (header.height, header.width) {
                return Err(self.error(file));
            }
            if (status == 0 || self.is_warning()) && out.len() >= h * w * format.bytes() {
                let (from, to) = (jpeg.as_ptr(), out.as_mut_ptr());
                let size = jpeg.len() as _;
                status = raw::tj3Decompress8(self.handle, from, size, to, 0, format.code());
            }
            status
        };
        if status == 0 || (self.is_warning() && harmless(&self.message())) {
            return Ok(());
        }
        Err(self.error(file))
    }

    /// (height, width) as the library has read them.
    fn size(&self) -> (u32, u32) {
        let get = |parameter: raw::TJPARAM| {
            // SAFETY: the handle is alive and a header has been read.
            unsafe { raw::tj3Get(self.handle, parameter as i32) as u32 }
        };
        (get(raw::TJPARAM_TJPARAM_JPEGHEIGHT), get(raw::TJPARAM_TJPARAM_JPEGWIDTH))
    }

    fn is_warning(&self) -> bool {
        // SAFETY: the handle is alive.
        unsafe { raw::tj3GetErrorCode(self.handle) == raw::TJERR_TJERR_WARNING as i32 }
    }

    fn message(&self) -> String {
        // SAFETY: the library returns a NUL-terminated string inside the handle, copied at once.
        let text = unsafe { CStr::from_ptr(raw::tj3GetErrorStr(self.handle)) };
        text.to_string_lossy().into_owned()
    }

    fn error(&self, file: &str) -> Error {
        let advice = "the JPEG is damaged or cut off; fetch the file again or drop it";
        let found = format!("{NAME} says: {}", self.message());
        Error::corrupt(file, 0, "a complete JPEG", found, advice)
    }
}

impl Drop for Turbo {
    fn drop(&mut self) {
        // SAFETY: made by tj3Init and not used after.
        unsafe { raw::tj3Destroy(self.handle) }
    }
}

/// (rows, columns) after decoding at `1 / denominator`.
pub fn scaled(header: &JpegHeader, denominator: u8) -> (usize, usize) {
    let divide = |side: u32| side.div_ceil(u32::from(denominator)) as usize;
    (divide(header.height), divide(header.width))
}

/// Warnings after which the picture is still the one that was encoded. Everything else (missing
/// data, bad codes) means made-up pixels.
fn harmless(warning: &str) -> bool {
    ["extraneous bytes before marker", "Adobe color transform", "JFIF revision"]
        .iter()
        .any(|text| warning.contains(text))
}
