//! What each requested field needs: resolved once per loader against the table.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::config::{FieldForm, FieldRequest, Ragged};
use crate::error::{Error, Result};
use crate::index::{Codec, FieldKind, FieldSpec, SampleTable};
use crate::transform::{ImageSpec, PointLayout, PointsSpec};

/// Rows looked at to learn how a field's bytes are encoded, if the first rows have none.
const CODEC_ROWS_MAX: usize = 1000;

/// Points kept of one padded cloud: beyond any sensor, against typing errors.
const PAD_POINTS_MAX: usize = 1 << 24;

/// A field of the batch.
#[derive(Debug)]
pub struct Field {
    /// Name in the table and the batch.
    pub name: String,
    /// Its position in the table's fields.
    pub column: usize,
    /// What is done with it.
    pub task: Task,
}

/// What is done with a field.
#[derive(Debug)]
pub enum Task {
    /// Decode a picture into its slot.
    Image(ImageTask),
    /// Gather a keyframe and its sweeps.
    Points(PointsTask),
    /// Records as they are stored: (ΣN, C) float32.
    Records {
        /// C.
        columns: usize,
    },
    /// The natural form of whatever is stored: tensor, text or bytes.
    Blob(FieldKind),
    /// A value of the table.
    Inline(Inline),
}

/// Pictures of one field.
#[derive(Debug)]
pub struct ImageTask {
    /// What to make of them.
    pub spec: ImageSpec,
    /// Shape, if it does not depend on the picture.
    pub shape: Option<[usize; 3]>,
    /// Largest picture seen, bytes; slots of pictures without a fixed shape are this large.
    seen_bytes: AtomicUsize,
}

/// Point clouds of one field.
#[derive(Debug)]
pub struct PointsTask {
    /// What to gather.
    pub spec: PointsSpec,
    /// How to batch.
    pub ragged: Ragged,
    /// Columns of a stored record and of the batch.
    pub layout: PointLayout,
}

/// Kinds of values that lie in the table itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inline {
    /// Text.
    Text,
    /// Number.
    Scalar,
    /// Pose.
    Pose,
    /// Calibration.
    Calibration,
    /// Boxes.
    Boxes,
}

impl ImageTask {
    fn new(spec: ImageSpec) -> Result<Self> {
        spec.validate()?;
        let shape = spec.fixed_shape();
        Ok(Self { spec, shape, seen_bytes: AtomicUsize::new(0) })
    }

    /// Bytes to reserve for one picture; 0 if nothing is known yet.
    pub fn slot_bytes(&self) -> usize {
        match self.shape {
            Some(shape) => shape.iter().product::<usize>() * self.spec.dtype.size_bytes(),
            None => self.seen_bytes.load(Ordering::Relaxed),
        }
    }

    /// A picture of `bytes` was decoded.
    pub fn saw(&self, bytes: usize) {
        self.seen_bytes.fetch_max(bytes, Ordering::Relaxed);
    }
}

impl Field {
    /// Whether the size of its slots is known before anything was read.
    pub fn is_sized(&self) -> bool {
        match &self.task {
            Task::Image(image) => image.slot_bytes() > 0,
            _ => true,
        }
    }

    /// Whether its samples lie one after the other in the batch's buffer.
    pub fn has_slots(&self) -> bool {
        matches!(self.task, Task::Image(_) | Task::Points(_) | Task::Records { .. })
    }
}

/// Resolves requests against the table; `None` is every field in its natural form.
pub fn resolve(table: &SampleTable, requests: Option<&[FieldRequest]>) -> Result<Vec<Field>> {
    let Some(requests) = requests else {
        let all = table.fields().iter().enumerate();
        return all.map(|(column, spec)| field(table, column, spec, &FieldForm::Natural)).collect();
    };
    let mut fields: Vec<Field> = Vec::with_capacity(requests.len());
    for request in requests {
        let column = table.field(&request.name).ok_or_else(|| unknown(table, &request.name))?;
        if fields.iter().any(|f| f.column == column) {
            let what = format!("fields: {}", request.name);
            return Err(Error::invalid(what, "each field once", "it twice"));
        }
        let made = field(table, column, &table.fields()[column], &request.form);
        fields.push(made.map_err(|e| in_field(&request.name, e))?);
    }
    Ok(fields)
}

/// An argument's error with the name of the field it was given for.
pub fn in_field(name: &str, error: Error) -> Error {
    match error {
        Error::Invalid { what, expected, found } if !what.contains(name) => {
            Error::Invalid { what: format!("fields: {name}: {what}"), expected, found }
        }
        other => other,
    }
}

fn unknown(table: &SampleTable, name: &str) -> Error {
    let names: Vec<&str> = table.fields().iter().map(|f| f.name.as_str()).collect();
    Error::NotFound {
        what: format!("field {name}"),
        advice: format!("the data set has {}", names.join(", ")),
    }
}

fn field(table: &SampleTable, column: usize, spec: &FieldSpec, form: &FieldForm) -> Result<Field> {
    let task = match form {
        FieldForm::Natural => natural(table, column, spec)?,
        FieldForm::Image(image) => {
            expect_kind(spec, &[FieldKind::Image], "dt.Image")?;
            Task::Image(ImageTask::new(image.clone())?)
        }
        FieldForm::Points { spec: points, ragged } => {
            expect_kind(spec, &[FieldKind::Points, FieldKind::Radar], "dt.Points")?;
            Task::Points(points_task(table, column, spec, points, *ragged)?)
        }
    };
    Ok(Field { name: spec.name.clone(), column, task })
}

fn expect_kind(spec: &FieldSpec, kinds: &[FieldKind], form: &str) -> Result<()> {
    if kinds.contains(&spec.kind) {
        return Ok(());
    }
    let expected = kinds.iter().map(|k| k.name()).collect::<Vec<_>>().join(" or ");
    let what = format!("fields: {} as {form}", spec.name);
    Err(Error::invalid(what, format!("a field of kind {expected}"), spec.kind.name()))
}

fn natural(table: &SampleTable, column: usize, spec: &FieldSpec) -> Result<Task> {
    if table.is_blob(column) {
        return Ok(match (spec.kind, codec_of(table, column)) {
            (FieldKind::Image, Some(Codec::Jpeg | Codec::Png)) => {
                Task::Image(ImageTask::new(ImageSpec::natural())?)
            }
            (_, Some(Codec::F32Records { columns })) => Task::Records { columns: columns as usize },
            _ => Task::Blob(spec.kind),
        });
    }
    Ok(Task::Inline(match spec.kind {
        FieldKind::Text => Inline::Text,
        FieldKind::Scalar => Inline::Scalar,
        FieldKind::Pose => Inline::Pose,
        FieldKind::Calibration => Inline::Calibration,
        FieldKind::Boxes => Inline::Boxes,
        other => {
            return Err(Error::Unsupported {
                what: format!("field {} of kind {} in a batch", spec.name, other.name()),
                advice: "leave it out with fields={...}".into(),
            });
        }
    }))
}

/// Encoding of the first sample that has the field.
fn codec_of(table: &SampleTable, column: usize) -> Option<Codec> {
    (0..table.len().min(CODEC_ROWS_MAX))
        .find_map(|row| table.blob(column, row).ok().flatten())
        .map(|blob| blob.codec)
}

fn points_task(
    table: &SampleTable,
    column: usize,
    field: &FieldSpec,
    spec: &PointsSpec,
    ragged: Ragged,
) -> Result<PointsTask> {
    let record_columns = match codec_of(table, column) {
        Some(Codec::F32Records { columns }) => columns as usize,
        None if !field.columns.is_empty() => field.columns.len(),
        other => {
            let found = other.map_or("no sample with bytes".into(), |c| c.name());
            let what = format!("fields: {} as dt.Points", field.name);
            return Err(Error::invalid(what, "records of float32", found));
        }
    };
    if let Ragged::Pad { max_points } = ragged
        && !(1..=PAD_POINTS_MAX).contains(&max_points)
    {
        return Err(Error::invalid("max_points", format!("1 to {PAD_POINTS_MAX}"), max_points));
    }
    let layout = spec.layout(&field.columns, record_columns)?;
    Ok(PointsTask { spec: spec.clone(), ragged, layout })
}
