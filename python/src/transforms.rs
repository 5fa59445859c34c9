//! The transform kernels one call at a time: for value tests against reference libraries and for
//! looking at a single sample the way the loader would make it.

use drivetrain::index::Codec;
use drivetrain::transform::{
    Crop, ImageScratch, ImageSpec, Layout, PointsSpec, SweepInput, count_points, decode_image,
    gather_points, image_size,
};
use drivetrain::{Error, Result};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::buffer::NativeBuffer;
use crate::errors::to_python;

/// Rows and columns of a rectangle as Python gives it: (y, x, h, w).
pub type CropTuple = (u32, u32, u32, u32);

/// Layout by the name Python uses.
pub fn layout_of(name: &str) -> Result<Layout> {
    match name {
        "CHW" => Ok(Layout::Chw),
        "HWC" => Ok(Layout::Hwc),
        other => Err(Error::invalid("layout", "CHW or HWC", other)),
    }
}

/// Arguments of an image transform.
#[derive(Debug, FromPyObject)]
pub struct ImageArgs {
    size: Option<(u32, u32)>,
    crop: Option<CropTuple>,
    mean: Option<[f32; 3]>,
    std: Option<[f32; 3]>,
    dtype: String,
    layout: String,
    exact: bool,
}

impl ImageArgs {
    /// The checked spec.
    pub fn spec(&self) -> Result<ImageSpec> {
        let spec = ImageSpec {
            size: self.size,
            crop: self.crop.map(|(y, x, h, w)| Crop { y, x, h, w }),
            mean: self.mean.unwrap_or([0.0; 3]),
            std: self.std.unwrap_or([1.0; 3]),
            dtype: self.dtype.parse()?,
            layout: layout_of(&self.layout)?,
            exact: self.exact,
        };
        spec.validate()?;
        Ok(spec)
    }
}

type ImageResult = (NativeBuffer, Vec<usize>, &'static str, (u8, u8));

fn image(data: &[u8], codec: &Codec, spec: &ImageSpec, name: &str) -> Result<ImageResult> {
    let (h, w) = image_size(data, codec, name)?;
    let mut out = vec![0; spec.out_bytes(h, w)];
    let info = decode_image(data, codec, spec, &mut ImageScratch::default(), &mut out, name)?;
    let shape = spec.out_shape(h, w).to_vec();
    Ok((NativeBuffer::from_bytes(out.into()), shape, info.decoder, info.scale))
}

/// Decodes one JPEG or PNG as `args` (an object with the attributes of `dt.Image`) says.
///
/// Returns (buffer, shape, decoder, (scale numerator, denominator)).
#[pyfunction]
fn transform_image(
    py: Python<'_>,
    data: PyBackedBytes,
    args: ImageArgs,
    name: &str,
) -> PyResult<ImageResult> {
    let codec = if data.starts_with(b"\x89PNG") { Codec::Png } else { Codec::Jpeg };
    py.detach(|| args.spec().and_then(|spec| image(&data, &codec, &spec, name)))
        .map_err(|e| to_python(py, &e))
}

/// Arguments of a points transform.
#[derive(Debug, FromPyObject)]
pub struct PointsArgs {
    sweeps: usize,
    range: Option<[f32; 6]>,
    columns: Option<Vec<String>>,
    remove_close_m: Option<f32>,
}

impl PointsArgs {
    /// The spec; its layout is checked against a file's columns later.
    pub fn spec(&self) -> PointsSpec {
        PointsSpec {
            sweeps: self.sweeps,
            range: self.range,
            columns: self.columns.clone(),
            remove_close_m: self.remove_close_m,
        }
    }
}

type Cloud = (PyBackedBytes, Option<[f64; 16]>, f32);

fn points(
    clouds: &[Cloud],
    names: &[String],
    record_columns: usize,
    spec: &PointsSpec,
) -> Result<(NativeBuffer, usize, Vec<String>)> {
    let layout = spec.layout(names, record_columns)?;
    let inputs: Vec<SweepInput<'_>> = clouds
        .iter()
        .map(|(bytes, transform, dt_s)| SweepInput {
            bytes,
            transform: transform.as_ref(),
            dt_s: *dt_s,
        })
        .collect();
    let mut total = 0;
    for input in &inputs {
        total += count_points(input.bytes.len() as u64, record_columns, "points")?;
    }
    let mut out = vec![0.0; total * layout.columns()];
    let kept = gather_points(&inputs, &layout, spec, &mut out, "points")?;
    out.truncate(kept * layout.columns());
    let bytes: Vec<u8> = out.iter().flat_map(|v| v.to_le_bytes()).collect();
    Ok((NativeBuffer::from_bytes(bytes.into()), kept, layout.names))
}

/// Gathers clouds `(bytes, row-major 4x4 keyframe ← sweep or None, dt in s)` as `args` (an object
/// with the attributes of `dt.Points`) says.
///
/// Returns (buffer of float32, points, column names).
#[pyfunction]
fn transform_points(
    py: Python<'_>,
    clouds: Vec<Cloud>,
    names: Vec<String>,
    record_columns: usize,
    args: PointsArgs,
) -> PyResult<(NativeBuffer, usize, Vec<String>)> {
    py.detach(|| points(&clouds, &names, record_columns, &args.spec()))
        .map_err(|e| to_python(py, &e))
}

/// Adds this file's functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(transform_image, module)?)?;
    module.add_function(wrap_pyfunction!(transform_points, module)?)
}
