//! `dt.Image` and `dt.Points` as the engine's field requests.

use drivetrain::Error;
use drivetrain::pipeline::{FieldForm, FieldRequest, Ragged, in_field};
use drivetrain::transform::{Crop, ImageSpec, Layout, PointsSpec};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::to_python;

/// Requests from (name, None or a dict of the dataclass's fields plus `kind`).
pub fn requests(
    py: Python<'_>,
    fields: Vec<(String, Option<Bound<'_, PyDict>>)>,
) -> PyResult<Vec<FieldRequest>> {
    let one = |(name, form): (String, Option<Bound<'_, PyDict>>)| {
        let form = match form {
            None => FieldForm::Natural,
            Some(form) => parse(&form).map_err(|e| match e {
                Wrong::Native(error) => to_python(py, &in_field(&name, error)),
                Wrong::Python(error) => error,
            })?,
        };
        Ok(FieldRequest { name, form })
    };
    fields.into_iter().map(one).collect()
}

enum Wrong {
    Native(Error),
    Python(PyErr),
}

impl From<PyErr> for Wrong {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<Error> for Wrong {
    fn from(error: Error) -> Self {
        Self::Native(error)
    }
}

fn get<'py, T>(form: &Bound<'py, PyDict>, name: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error: Into<PyErr>>,
{
    let value = form.get_item(name)?;
    let value = value.ok_or_else(|| pyo3::exceptions::PyKeyError::new_err(name.to_string()))?;
    value.extract().map_err(Into::into)
}

fn parse(form: &Bound<'_, PyDict>) -> Result<FieldForm, Wrong> {
    let kind: String = get(form, "kind")?;
    if kind == "image" { Ok(FieldForm::Image(image(form)?)) } else { points(form) }
}

fn image(form: &Bound<'_, PyDict>) -> Result<ImageSpec, Wrong> {
    let crop: Option<(u32, u32, u32, u32)> = get(form, "crop")?;
    let dtype: String = get(form, "dtype")?;
    let layout: String = get(form, "layout")?;
    let layout = match layout.as_str() {
        "CHW" => Layout::Chw,
        "HWC" => Layout::Hwc,
        other => return Err(Error::invalid("layout", "CHW or HWC", other).into()),
    };
    Ok(ImageSpec {
        size: get(form, "size")?,
        crop: crop.map(|(y, x, h, w)| Crop { y, x, h, w }),
        mean: get(form, "mean")?,
        std: get(form, "std")?,
        dtype: dtype.parse()?,
        layout,
        exact: get(form, "exact")?,
    })
}

fn points(form: &Bound<'_, PyDict>) -> Result<FieldForm, Wrong> {
    let ragged: String = get(form, "ragged")?;
    let max_points: Option<usize> = get(form, "max_points")?;
    let ragged = match (ragged.as_str(), max_points) {
        ("offsets", None) => Ragged::Offsets,
        ("pad", Some(max_points)) => Ragged::Pad { max_points },
        ("pad", None) => {
            return Err(Error::invalid("max_points", "a number with ragged=\"pad\"", "none").into());
        }
        ("offsets", Some(n)) => {
            return Err(Error::invalid("max_points", "none with ragged=\"offsets\"", n).into());
        }
        (other, _) => return Err(Error::invalid("ragged", "offsets or pad", other).into()),
    };
    let spec = PointsSpec {
        sweeps: get(form, "sweeps")?,
        range: get(form, "range")?,
        columns: get(form, "columns")?,
        remove_close_m: get(form, "remove_close_m")?,
    };
    Ok(FieldForm::Points { spec, ragged })
}
