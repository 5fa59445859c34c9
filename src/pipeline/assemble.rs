//! Assemble: outcomes of all cells into the arrays of a batch.

use std::ops::Range;
use std::sync::Arc;

use super::batch::{Array, Batch, BatchMemory, FieldData, Part};
use super::config::Ragged;
use super::field::{Field, Inline, Task};
use super::plan::Value;
use super::work::{Outcome, Sample, StepWork};
use crate::error::{Error, Result};
use crate::index::Boxes;
use crate::memory::Buffer;
use crate::transform::{DType, Natural};

const F32_BYTES: usize = size_of::<f32>();

/// Parts of a batch while it is put together. Part 0 is the batch's buffer, if there is one.
struct Parts<'a> {
    work: &'a StepWork,
    main: Option<Buffer>,
    more: Vec<Part>,
}

impl Parts<'_> {
    fn add(&mut self, part: Part) -> usize {
        self.more.push(part);
        self.more.len() - usize::from(self.main.is_none())
    }

    fn region(&self, field: usize, slot: usize) -> Range<usize> {
        let layout = &self.work.layout;
        let region = layout.region(field, slot).and_then(|r| layout.regions.get(r));
        region.cloned().unwrap_or_default()
    }

    fn main(&mut self) -> &mut [u8] {
        self.main.as_deref_mut().unwrap_or_default()
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        let mut buffer = self.work.engine.buffer(bytes, self.work.private);
        buffer.set_len(bytes);
        buffer
    }

    fn finish(self) -> BatchMemory {
        let main = self.main.map(Part::Owned);
        BatchMemory::new(main.into_iter().chain(self.more).collect())
    }
}

/// Puts a step whose cells are all good or masked together.
pub fn assemble(work: &StepWork) -> Result<Batch> {
    let samples = std::mem::take(&mut *work.samples.lock());
    let main = match &work.slots {
        None => None,
        Some(slots) => Some(slots.take().ok_or_else(|| lost("the batch's buffer"))?),
    };
    let mut parts = Parts { work, main, more: Vec::new() };
    let mut fields = Vec::with_capacity(work.engine.fields.len());
    for (f, field) in work.engine.fields.iter().enumerate() {
        let outcomes = (0..samples.len())
            .map(|slot| match work.take(slot, f) {
                Some(Ok(outcome)) => Ok(outcome),
                _ => Err(lost(&field.name)),
            })
            .collect::<Result<Vec<_>>>()?;
        fields.push((field.name.clone(), field_data(&mut parts, f, field, outcomes)));
    }
    let mut memory = parts.finish();
    if let Some(charge) = work.funding.lock().output.take() {
        memory.charge(charge);
    }
    Ok(batch(work, &samples, fields, memory))
}

fn batch(
    work: &StepWork,
    samples: &[Sample],
    fields: Vec<(String, FieldData)>,
    memory: BatchMemory,
) -> Batch {
    let key = |s: &Sample| work.engine.table.key(s.row as usize).to_string();
    Batch {
        epoch: work.pass.epoch(),
        step: work.step,
        keys: samples.iter().map(key).collect(),
        rows: samples.iter().map(|s| s.row).collect(),
        valid: samples.iter().map(|s| s.valid).collect(),
        fields,
        memory: Arc::new(memory),
        copied: work.private,
        bad: std::mem::take(&mut *work.bad.lock()),
    }
}

fn lost(what: &str) -> Error {
    Error::invalid("batch", "an outcome for every cell", format!("none for {what}"))
}

fn field_data(parts: &mut Parts<'_>, f: usize, field: &Field, outcomes: Vec<Outcome>) -> FieldData {
    match &field.task {
        Task::Image(image) => match image.shape {
            Some(shape) => fixed_images(parts, f, &outcomes, shape, image.spec.dtype),
            None => free_images(parts, f, outcomes, image.spec.dtype),
        },
        Task::Records { columns } => ragged(parts, f, outcomes, *columns),
        Task::Points(points) => match points.ragged {
            Ragged::Offsets => ragged(parts, f, outcomes, points.layout.columns()),
            Ragged::Pad { max_points } => {
                padded(parts, f, &outcomes, [max_points, points.layout.columns()])
            }
        },
        Task::Blob(_) => naturals(parts, outcomes),
        Task::Inline(kind) => inline(*kind, outcomes),
    }
}

fn fixed_images(
    parts: &mut Parts<'_>,
    f: usize,
    outcomes: &[Outcome],
    shape: [usize; 3],
    dtype: DType,
) -> FieldData {
    zero_masked(parts, f, outcomes);
    let offset_bytes = parts.region(f, 0).start;
    let shape = [outcomes.len(), shape[0], shape[1], shape[2]].to_vec();
    FieldData::Dense(Array { part: 0, offset_bytes, shape, first_stride_bytes: None, dtype })
}

fn zero_masked(parts: &mut Parts<'_>, f: usize, outcomes: &[Outcome]) {
    for (slot, outcome) in outcomes.iter().enumerate() {
        if matches!(outcome, Outcome::Empty) {
            let region = parts.region(f, slot);
            if let Some(bytes) = parts.main().get_mut(region) {
                bytes.fill(0);
            }
        }
    }
}

/// Pictures of any size: one array if all are equal, else one each. Masked ones take the shape of
/// the first good one.
fn free_images(parts: &mut Parts<'_>, f: usize, outcomes: Vec<Outcome>, dtype: DType) -> FieldData {
    let shapes = outcomes.iter().filter_map(|o| match o {
        Outcome::Image { shape, .. } => Some(*shape),
        _ => None,
    });
    let all: Vec<[usize; 3]> = shapes.collect();
    let plain = outcomes.iter().all(|o| matches!(o, Outcome::Image { .. } | Outcome::Empty));
    let first = all.first().copied().unwrap_or([0, 0, 3]);
    if plain && all.iter().all(|s| *s == first) {
        return equal_images(parts, f, outcomes, first, dtype);
    }
    let list = outcomes.into_iter().enumerate().map(|(slot, outcome)| match outcome {
        Outcome::Image { shape, own: None } => Array {
            part: 0,
            offset_bytes: parts.region(f, slot).start,
            shape: shape.to_vec(),
            first_stride_bytes: None,
            dtype,
        },
        Outcome::Image { shape, own: Some(own) } => {
            whole(parts.add(Part::Owned(own)), shape.to_vec(), dtype)
        }
        Outcome::Natural(Natural::Array { dtype, shape, data }) => {
            whole(parts.add(Part::Read(data)), shape, dtype)
        }
        _ => zeros(parts, first.to_vec(), dtype),
    });
    FieldData::List(list.collect())
}

fn whole(part: usize, shape: Vec<usize>, dtype: DType) -> Array {
    Array { part, offset_bytes: 0, shape, first_stride_bytes: None, dtype }
}

fn zeros(parts: &mut Parts<'_>, shape: Vec<usize>, dtype: DType) -> Array {
    let mut buffer = parts.buffer(shape.iter().product::<usize>() * dtype.size_bytes());
    buffer.fill(0);
    whole(parts.add(Part::Owned(buffer)), shape, dtype)
}

/// Pictures of one size. Slots may be larger than the pictures, which strides express; pictures
/// that did not fit their slots (the first of a loader, before sizes are known) are copied.
fn equal_images(
    parts: &mut Parts<'_>,
    f: usize,
    outcomes: Vec<Outcome>,
    shape: [usize; 3],
    dtype: DType,
) -> FieldData {
    let count = outcomes.len();
    let item = shape.iter().product::<usize>() * dtype.size_bytes();
    let shape = [count, shape[0], shape[1], shape[2]].to_vec();
    let in_slots = |o: &Outcome| !matches!(o, Outcome::Image { own: Some(_), .. });
    let stride = parts.region(f, 0).len();
    if outcomes.iter().all(in_slots) && stride >= item {
        zero_masked(parts, f, &outcomes);
        let offset_bytes = parts.region(f, 0).start;
        let first_stride_bytes = (stride != item).then_some(stride);
        let array = Array { part: 0, offset_bytes, shape, first_stride_bytes, dtype };
        return FieldData::Dense(array);
    }
    let mut all = parts.buffer(count * item);
    for (slot, (outcome, place)) in outcomes.iter().zip(all.chunks_mut(item.max(1))).enumerate() {
        match outcome {
            Outcome::Image { own: Some(own), .. } => place.copy_from_slice(own),
            Outcome::Image { own: None, .. } => {
                let start = parts.region(f, slot).start;
                place.copy_from_slice(&parts.main()[start..start + item]);
            }
            _ => place.fill(0),
        }
    }
    FieldData::Dense(whole(parts.add(Part::Owned(all)), shape, dtype))
}

fn rows_of(outcome: &Outcome) -> usize {
    if let Outcome::Points { rows, .. } = outcome { *rows } else { 0 }
}

/// Clouds one after the other. Each was written at the start of its slot; moving them together is
/// one pass over what is left after filtering, and nothing at all without a filter.
fn ragged(parts: &mut Parts<'_>, f: usize, outcomes: Vec<Outcome>, columns: usize) -> FieldData {
    let mut offsets = vec![0_i64];
    let mut total = 0;
    for outcome in &outcomes {
        total += rows_of(outcome);
        offsets.push(total as i64);
    }
    let row_bytes = columns * F32_BYTES;
    let in_slots = |o: &Outcome| !matches!(o, Outcome::Points { own: Some(_), .. });
    let values = if outcomes.iter().all(in_slots) {
        let start = parts.region(f, 0).start;
        let mut end = start;
        for (slot, outcome) in outcomes.iter().enumerate() {
            let from = parts.region(f, slot).start;
            let length = rows_of(outcome) * row_bytes;
            if from != end && length > 0 {
                parts.main().copy_within(from..from + length, end);
            }
            end += length;
        }
        Array {
            part: 0,
            offset_bytes: start,
            shape: vec![total, columns],
            first_stride_bytes: None,
            dtype: DType::F32,
        }
    } else {
        gathered(parts, f, &outcomes, row_bytes, total)
    };
    FieldData::Ragged { values, offsets }
}

/// Clouds of which some (substitutes larger than what they replace) are outside their slots.
fn gathered(
    parts: &mut Parts<'_>,
    f: usize,
    outcomes: &[Outcome],
    row_bytes: usize,
    total: usize,
) -> Array {
    let mut all = parts.buffer(total * row_bytes);
    let mut end = 0;
    for (slot, outcome) in outcomes.iter().enumerate() {
        let Outcome::Points { rows, own } = outcome else { continue };
        let length = rows * row_bytes;
        let start = parts.region(f, slot).start;
        let from = match own {
            Some(own) => &own[..length],
            None => &parts.main()[start..start + length],
        };
        all[end..end + length].copy_from_slice(from);
        end += length;
    }
    let columns = row_bytes / F32_BYTES;
    whole(parts.add(Part::Owned(all)), vec![total, columns], DType::F32)
}

fn padded(
    parts: &mut Parts<'_>,
    f: usize,
    outcomes: &[Outcome],
    item_shape: [usize; 2],
) -> FieldData {
    zero_masked(parts, f, outcomes);
    let values = Array {
        part: 0,
        offset_bytes: parts.region(f, 0).start,
        shape: vec![outcomes.len(), item_shape[0], item_shape[1]],
        first_stride_bytes: None,
        dtype: DType::F32,
    };
    FieldData::Padded { values, count: outcomes.iter().map(|o| rows_of(o) as i64).collect() }
}

/// Natural forms other than pictures and clouds: text if all are text, else arrays.
fn naturals(parts: &mut Parts<'_>, outcomes: Vec<Outcome>) -> FieldData {
    let is_text = |o: &Outcome| matches!(o, Outcome::Natural(Natural::Text(_)) | Outcome::Empty);
    if !outcomes.is_empty() && outcomes.iter().all(is_text) && !outcomes.iter().all(is_empty) {
        let texts = outcomes.into_iter().map(|outcome| match outcome {
            Outcome::Natural(Natural::Text(text)) => text,
            _ => String::new(),
        });
        return FieldData::Text(texts.collect());
    }
    let mut blobs = true;
    let arrays: Vec<Array> = outcomes
        .into_iter()
        .map(|outcome| {
            blobs &= matches!(outcome, Outcome::Natural(Natural::Bytes(_)) | Outcome::Empty);
            natural_array(parts, outcome)
        })
        .collect();
    if blobs { FieldData::Blobs(arrays) } else { FieldData::List(arrays) }
}

fn is_empty(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Empty)
}

fn natural_array(parts: &mut Parts<'_>, outcome: Outcome) -> Array {
    let (data, shape, dtype) = match outcome {
        Outcome::Natural(Natural::Array { dtype, shape, data }) => (data, shape, dtype),
        Outcome::Natural(Natural::Points { columns, points, data }) => {
            (data, vec![points, columns.len()], DType::F32)
        }
        Outcome::Natural(Natural::Bytes(data)) => {
            let length = data.len();
            (data, vec![length], DType::U8)
        }
        Outcome::Natural(Natural::Text(text)) => {
            let length = text.len();
            (text.into_bytes().into(), vec![length], DType::U8)
        }
        _ => return whole(0, vec![0], DType::U8),
    };
    whole(parts.add(Part::Read(data)), shape, dtype)
}

fn inline(kind: Inline, outcomes: Vec<Outcome>) -> FieldData {
    let values = outcomes.into_iter().map(|outcome| match outcome {
        Outcome::Value(value) => Some(value),
        _ => None,
    });
    match kind {
        Inline::Text => FieldData::Text(
            values.map(|v| if let Some(Value::Text(t)) = v { t } else { String::new() }).collect(),
        ),
        Inline::Scalar => FieldData::Scalars(
            values.map(|v| if let Some(Value::Scalar(s)) = v { s } else { 0.0 }).collect(),
        ),
        Inline::Pose => FieldData::Poses(
            values.map(|v| if let Some(Value::Pose(p)) = v { Some(p) } else { None }).collect(),
        ),
        Inline::Calibration => FieldData::Calibrations(
            values
                .map(|v| if let Some(Value::Calibration(c)) = v { c.map(|c| *c) } else { None })
                .collect(),
        ),
        Inline::Boxes => FieldData::Boxes(
            values
                .map(|v| if let Some(Value::Boxes(b)) = v { b } else { Boxes::default() })
                .collect(),
        ),
    }
}
