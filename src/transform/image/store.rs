//! The last step of an image: `(level - mean) / std`, conversion, and the write into the batch.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::spec::{ImageSpec, Layout};
use crate::transform::DType;

/// Re-used memory of [`store_row`].
#[derive(Debug, Default)]
pub struct StoreScratch {
    normal: Vec<f32>,
    half: Vec<f16>,
    brain: Vec<bf16>,
}

/// Writes output row `y` (three planes of levels) into `out`, which has the shape
/// `spec.out_shape` for `height` rows.
pub fn store_row(
    spec: &ImageSpec,
    scratch: &mut StoreScratch,
    (y, height): (usize, usize),
    planes: [&[f32]; 3],
    out: &mut [u8],
) {
    let width = planes[0].len();
    let size = spec.dtype.size_bytes();
    match spec.layout {
        Layout::Chw => {
            for (c, plane) in planes.into_iter().enumerate() {
                let start = (c * height + y) * width * size;
                let to = &mut out[start..start + width * size];
                let (mean, factor) = (spec.mean[c], 1.0 / spec.std[c]);
                if spec.dtype == DType::F32 {
                    for (to, level) in to.as_chunks_mut::<4>().0.iter_mut().zip(plane) {
                        *to = ((level - mean) * factor).to_le_bytes();
                    }
                    continue;
                }
                scratch.normal.clear();
                scratch.normal.extend(plane.iter().map(|level| (level - mean) * factor));
                convert(spec.dtype, scratch, to);
            }
        }
        Layout::Hwc => {
            interleave(spec, planes, &mut scratch.normal);
            let start = y * width * 3 * size;
            convert(spec.dtype, scratch, &mut out[start..start + width * 3 * size]);
        }
    }
}

fn interleave(spec: &ImageSpec, [r, g, b]: [&[f32]; 3], out: &mut Vec<f32>) {
    let factor = spec.std.map(|s| 1.0 / s);
    out.clear();
    for ((r, g), b) in r.iter().zip(g).zip(b) {
        let levels = [*r, *g, *b];
        out.extend((0..3).map(|c| (levels[c] - spec.mean[c]) * factor[c]));
    }
}

/// Converts `scratch.normal` to `dtype`, little-endian, at any alignment.
fn convert(dtype: DType, scratch: &mut StoreScratch, out: &mut [u8]) {
    let normal = &scratch.normal;
    match dtype {
        DType::F16 => {
            scratch.half.resize(normal.len(), f16::ZERO);
            scratch.half.convert_from_f32_slice(normal);
            for (to, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(&scratch.half) {
                *to = value.to_le_bytes();
            }
        }
        DType::BF16 => {
            scratch.brain.resize(normal.len(), bf16::ZERO);
            scratch.brain.convert_from_f32_slice(normal);
            for (to, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(&scratch.brain) {
                *to = value.to_le_bytes();
            }
        }
        DType::U8 => {
            for (to, value) in out.iter_mut().zip(normal) {
                *to = to_level(*value);
            }
        }
        _ => {
            for (to, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(normal) {
                *to = value.to_le_bytes();
            }
        }
    }
}

/// Rounds half up, as Pillow's fixed point does; the cast saturates.
#[inline(always)]
fn to_level(value: f32) -> u8 {
    (value + 0.5) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(dtype: DType, layout: Layout) -> Vec<u8> {
        let (mean, std) = match dtype {
            DType::U8 => ([0.0; 3], [1.0; 3]),
            _ => ([1.0, 2.0, 3.0], [2.0, 4.0, 8.0]),
        };
        let spec = ImageSpec { mean, std, dtype, layout, ..ImageSpec::default() };
        let mut out = vec![0; 12 * dtype.size_bytes()];
        let rows: [[[f32; 2]; 3]; 2] =
            [[[1.0, 3.0], [2.0, 6.0], [3.0, 11.0]], [[5.0, 7.5], [10.0, 14.0], [19.0, 254.6]]];
        for (y, planes) in rows.iter().enumerate() {
            let planes = [&planes[0][..], &planes[1][..], &planes[2][..]];
            store_row(&spec, &mut StoreScratch::default(), (y, 2), planes, &mut out);
        }
        out
    }

    #[test]
    fn levels_round_half_up() {
        let want = [1, 2, 3, 3, 6, 11, 5, 10, 19, 8, 14, 255];
        assert_eq!(stored(DType::U8, Layout::Hwc), want);
    }

    #[test]
    fn planes_and_pixels_by_hand() {
        let want = [0.0, 1.0, 2.0, 3.25, 0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 31.45];
        let floats: Vec<f32> = stored(DType::F32, Layout::Chw)
            .chunks(4)
            .map(|c| f32::from_le_bytes(c.try_into().unwrap()))
            .collect();
        for (got, want) in floats.iter().zip(want) {
            assert!((got - want).abs() < 1e-5, "{floats:?}");
        }
        let halves: Vec<f32> = stored(DType::F16, Layout::Hwc)
            .chunks(2)
            .map(|c| f16::from_le_bytes(c.try_into().unwrap()).to_f32())
            .collect();
        assert_eq!(&halves[..9], &[0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
        let brain = stored(DType::BF16, Layout::Chw);
        assert_eq!(bf16::from_le_bytes([brain[6], brain[7]]).to_f32(), 3.25);
    }
}
