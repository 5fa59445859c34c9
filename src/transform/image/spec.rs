//! What an image transform means: crop, resize, normalise, lay out.

use std::fmt;

use crate::error::{Error, Result};
use crate::transform::DType;

/// Largest side of an output picture; a typing error should not ask for gigabytes.
pub const IMAGE_SIDE_MAX: u32 = 16_384;

/// Largest source picture in pixels; larger ones are refused before memory is touched.
pub const IMAGE_PIXELS_MAX: u64 = 1 << 27;

/// Order of the axes of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Layout {
    /// (3, H, W): one plane per colour, as convolutions want it.
    #[default]
    Chw,
    /// (H, W, 3): interleaved, as pictures are stored.
    Hwc,
}

/// A rectangle in pixels of the source picture, taken before resizing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Crop {
    /// First row.
    pub y: u32,
    /// First column.
    pub x: u32,
    /// Rows.
    pub h: u32,
    /// Columns.
    pub w: u32,
}

impl fmt::Display for Crop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { y, x, h, w } = self;
        let (bottom, right) = (y.saturating_add(*h), x.saturating_add(*w));
        write!(f, "rows {y}..{bottom} and columns {x}..{right}")
    }
}

/// Decode → crop → resize (antialiased bilinear) → `(level - mean) / std` → dtype and layout.
///
/// Levels are 0..=255 in RGB order. Resizing works on real numbers: levels are rounded only for
/// `uint8` output.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSpec {
    /// Output (height, width); `None` keeps the size after the crop.
    pub size: Option<(u32, u32)>,
    /// Rectangle to take, in source pixels, before resizing; only its pixels have influence.
    pub crop: Option<Crop>,
    /// Per-channel mean in levels (0..=255), RGB.
    pub mean: [f32; 3],
    /// Per-channel divisor in levels, RGB.
    pub std: [f32; 3],
    /// `F32`, `F16`, `BF16`, or `U8` (which needs mean 0 and std 1).
    pub dtype: DType,
    /// Order of the axes.
    pub layout: Layout,
    /// Decode at full resolution even where a smaller decode would do. The default lets the JPEG
    /// decoder halve in the DCT domain as long as its picture stays at least as large as `size`.
    pub exact: bool,
}

impl Default for ImageSpec {
    fn default() -> Self {
        Self {
            size: None,
            crop: None,
            mean: [0.0; 3],
            std: [1.0; 3],
            dtype: DType::F32,
            layout: Layout::Chw,
            exact: false,
        }
    }
}

impl ImageSpec {
    /// The natural form: (H, W, 3) uint8 RGB at full resolution.
    pub fn natural() -> Self {
        Self { dtype: DType::U8, layout: Layout::Hwc, exact: true, ..Self::default() }
    }

    /// Refuses parameters that have no meaning. Call once per loader, not per picture.
    pub fn validate(&self) -> Result<()> {
        if let Some((h, w)) = self.size
            && (h == 0 || w == 0 || h > IMAGE_SIDE_MAX || w > IMAGE_SIDE_MAX)
        {
            let found = format!("({h}, {w})");
            return Err(Error::invalid("size", format!("sides of 1..={IMAGE_SIDE_MAX}"), found));
        }
        if let Some(crop) = self.crop
            && (crop.h == 0 || crop.w == 0)
        {
            return Err(Error::invalid("crop", "at least one row and one column", crop));
        }
        if self.std.iter().any(|s| !s.is_finite() || *s == 0.0) {
            let found = format!("{:?}", self.std);
            return Err(Error::invalid("std", "finite numbers other than 0", found));
        }
        if self.mean.iter().any(|m| !m.is_finite()) {
            return Err(Error::invalid("mean", "finite numbers", format!("{:?}", self.mean)));
        }
        self.validate_dtype()
    }

    fn validate_dtype(&self) -> Result<()> {
        match self.dtype {
            DType::F32 | DType::F16 | DType::BF16 => Ok(()),
            DType::U8 if self.mean == [0.0; 3] && self.std == [1.0; 3] => Ok(()),
            DType::U8 => Err(Error::invalid(
                "mean and std",
                "0 and 1 (the defaults) with dtype uint8",
                format!("{:?} and {:?}", self.mean, self.std),
            )),
            other => {
                Err(Error::invalid("dtype", "float32, float16, bfloat16 or uint8", other.name()))
            }
        }
    }

    /// The rectangle that is used, checked against the source's size.
    pub fn region(&self, src_h: u32, src_w: u32) -> Result<Crop> {
        let crop = self.crop.unwrap_or(Crop { y: 0, x: 0, h: src_h, w: src_w });
        let bottom = u64::from(crop.y) + u64::from(crop.h);
        let right = u64::from(crop.x) + u64::from(crop.w);
        if bottom > u64::from(src_h) || right > u64::from(src_w) {
            let expected = format!("a rectangle inside the picture of {src_h} x {src_w} pixels");
            return Err(Error::invalid("crop", expected, crop));
        }
        Ok(crop)
    }

    /// Height and width of the output for a source of `src_h` x `src_w` pixels.
    pub fn out_size(&self, src_h: u32, src_w: u32) -> (u32, u32) {
        let cropped = self.crop.map_or((src_h, src_w), |c| (c.h, c.w));
        self.size.unwrap_or(cropped)
    }

    /// Shape of the output for a source of `src_h` x `src_w` pixels.
    pub fn out_shape(&self, src_h: u32, src_w: u32) -> [usize; 3] {
        let (h, w) = self.out_size(src_h, src_w);
        match self.layout {
            Layout::Chw => [3, h as usize, w as usize],
            Layout::Hwc => [h as usize, w as usize, 3],
        }
    }

    /// Bytes of the output for a source of `src_h` x `src_w` pixels.
    pub fn out_bytes(&self, src_h: u32, src_w: u32) -> usize {
        self.out_shape(src_h, src_w).iter().product::<usize>() * self.dtype.size_bytes()
    }

    /// Shape of the output if it does not depend on the source.
    pub fn fixed_shape(&self) -> Option<[usize; 3]> {
        (self.size.is_some() || self.crop.is_some()).then(|| self.out_shape(0, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_follow_size_then_crop_then_source() {
        let crop = Some(Crop { y: 1, x: 2, h: 30, w: 40 });
        let plain = ImageSpec::default();
        assert_eq!(plain.out_shape(9, 16), [3, 9, 16]);
        assert_eq!(plain.fixed_shape(), None);
        let cropped = ImageSpec { crop, layout: Layout::Hwc, ..plain.clone() };
        assert_eq!(cropped.fixed_shape(), Some([30, 40, 3]));
        let sized = ImageSpec { size: Some((5, 7)), crop, dtype: DType::F16, ..plain };
        assert_eq!(sized.out_bytes(900, 1600), 3 * 5 * 7 * 2);
    }

    #[test]
    fn meaningless_parameters_are_refused_by_name() {
        let refuse = |spec: ImageSpec, word: &str| {
            let text = spec.validate().unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        };
        refuse(ImageSpec { size: Some((0, 4)), ..ImageSpec::default() }, "size");
        refuse(ImageSpec { std: [1.0, 0.0, 1.0], ..ImageSpec::default() }, "std");
        refuse(ImageSpec { mean: [f32::NAN; 3], ..ImageSpec::default() }, "mean");
        refuse(ImageSpec { dtype: DType::I64, ..ImageSpec::default() }, "dtype");
        refuse(ImageSpec { mean: [1.0; 3], ..ImageSpec::natural() }, "uint8");
        let crop = Some(Crop { y: u32::MAX, x: 0, h: 2, w: 2 });
        assert!(ImageSpec { crop, ..ImageSpec::default() }.region(900, 1600).is_err());
    }
}
