//! Natural forms: what a field is when nobody asked for a transform.

use bytes::Bytes;

use super::DType;
use super::image::{ImageScratch, ImageSpec, decode_depth, decode_image, image_size};
use super::points::{PointsSpec, count_points};
use crate::error::{Error, Result};
use crate::index::{Codec, FieldKind};

/// A decoded value.
#[derive(Debug, Clone, PartialEq)]
pub enum Natural {
    /// A dense array: (H, W, 3) uint8 RGB of an image, (H, W) uint16 of a depth image, or a tensor.
    Array {
        /// Element type.
        dtype: DType,
        /// Sizes of the axes, slowest first.
        shape: Vec<usize>,
        /// Elements, little-endian, row-major.
        data: Bytes,
    },
    /// Points: (N, C) float32 with column names.
    Points {
        /// Name of each column; the first three are x, y and z.
        columns: Vec<String>,
        /// Number of points.
        points: usize,
        /// Rows of `columns.len()` f32, little-endian: the stored bytes themselves.
        data: Bytes,
    },
    /// Text, checked to be UTF-8.
    Text(String),
    /// Bytes without a decoder.
    Bytes(Bytes),
}

/// Decodes one blob. `columns` are the field's column names (for points); `file` is named in
/// errors.
pub fn natural(
    kind: FieldKind,
    codec: &Codec,
    columns: &[String],
    bytes: Bytes,
    scratch: &mut ImageScratch,
    file: &str,
) -> Result<Natural> {
    match (kind, codec) {
        (FieldKind::Image, Codec::Jpeg | Codec::Png) => image(codec, &bytes, scratch, file),
        (_, Codec::F32Records { columns: count }) => points(columns, *count, bytes, file),
        (_, Codec::Text | Codec::Json) => text(bytes, file),
        (_, Codec::Npy) => super::npy::tensor(bytes, file),
        _ => Ok(Natural::Bytes(bytes)),
    }
}

fn image(codec: &Codec, bytes: &[u8], scratch: &mut ImageScratch, file: &str) -> Result<Natural> {
    if *codec == Codec::Png
        && let Some((h, w, levels)) = decode_depth(bytes, file)?
    {
        let data: Vec<u8> = levels.iter().flat_map(|v| v.to_le_bytes()).collect();
        let shape = vec![h as usize, w as usize];
        return Ok(Natural::Array { dtype: DType::U16, shape, data: data.into() });
    }
    let (h, w) = image_size(bytes, codec, file)?;
    let spec = ImageSpec::natural();
    if u64::from(h) * u64::from(w) > super::image::IMAGE_PIXELS_MAX {
        let what = format!("{file}: a picture of {h} x {w} pixels");
        return Err(Error::Unsupported { what, advice: "read its bytes instead".into() });
    }
    let mut data = vec![0; spec.out_bytes(h, w)];
    decode_image(bytes, codec, &spec, scratch, &mut data, file)?;
    let shape = spec.out_shape(h, w).to_vec();
    Ok(Natural::Array { dtype: DType::U8, shape, data: data.into() })
}

fn points(columns: &[String], count: u32, data: Bytes, file: &str) -> Result<Natural> {
    let points = count_points(data.len() as u64, count as usize, file)?;
    let mut names = PointsSpec::default().layout(columns, count as usize)?.names;
    // The stored columns only: time exists once sweeps are gathered.
    names.truncate(count as usize);
    Ok(Natural::Points { columns: names, points, data })
}

fn text(bytes: Bytes, file: &str) -> Result<Natural> {
    match std::str::from_utf8(&bytes) {
        Ok(text) => Ok(Natural::Text(text.to_string())),
        Err(error) => {
            let at = error.valid_up_to() as u64;
            let found =
                bytes.get(at as usize).map_or("nothing".into(), |b| format!("byte {b:02X}"));
            Err(Error::corrupt(file, at, "UTF-8 text", found, "read the field as bytes"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: FieldKind, codec: &Codec, bytes: Vec<u8>) -> Result<Natural> {
        natural(kind, codec, &[], bytes.into(), &mut ImageScratch::default(), "a.file")
    }

    #[test]
    fn pictures_are_rgb_bytes() {
        let mut jpeg = Vec::new();
        let pixels = [200_u8; 5 * 4 * 3];
        let encoder = jpeg_encoder::Encoder::new(&mut jpeg, 100);
        encoder.encode(&pixels, 5, 4, jpeg_encoder::ColorType::Rgb).unwrap();
        let Natural::Array { dtype, shape, data } =
            of(FieldKind::Image, &Codec::Jpeg, jpeg).unwrap()
        else {
            panic!("not an array");
        };
        assert_eq!((dtype, shape), (DType::U8, vec![4, 5, 3]));
        assert!(data.iter().all(|v| v.abs_diff(200) <= 1));
    }

    #[test]
    fn points_keep_their_bytes_and_get_names() {
        let bytes: Vec<u8> = (0..40).collect();
        let got = of(FieldKind::Points, &Codec::F32Records { columns: 5 }, bytes.clone()).unwrap();
        let columns = ["x", "y", "z", "c3", "c4"].map(String::from).to_vec();
        assert_eq!(got, Natural::Points { columns, points: 2, data: bytes.into() });
        assert!(of(FieldKind::Points, &Codec::F32Records { columns: 5 }, vec![0; 39]).is_err());
    }

    #[test]
    fn text_must_be_text_and_the_rest_stays_bytes() {
        let hello = of(FieldKind::Text, &Codec::Text, "grüß".into()).unwrap();
        assert_eq!(hello, Natural::Text("grüß".into()));
        let error = of(FieldKind::Text, &Codec::Text, vec![b'a', 0xFF]).unwrap_err().to_string();
        assert!(error.contains("byte 1"), "{error}");
        let raw = of(FieldKind::Radar, &Codec::Pcd, vec![1, 2]).unwrap();
        assert_eq!(raw, Natural::Bytes(vec![1, 2].into()));
    }
}
