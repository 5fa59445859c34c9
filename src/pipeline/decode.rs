//! Decode: encoded bytes of one cell into its slot of the batch.

use bytes::Bytes;

use super::config::Ragged;
use super::field::{ImageTask, PointsTask, Task};
use super::plan::Piece;
use super::pool::Scratch;
use super::slots::{SlotGuard, floats_mut};
use super::work::{Job, Outcome};
use crate::error::{Error, Result};
use crate::index::Codec;
use crate::memory::Buffer;
use crate::transform::image::{IMAGE_PIXELS_MAX, decode_depth};
use crate::transform::{
    DType, ImageSpec, Natural, SweepInput, count_points, decode_image, gather_points, image_size,
    natural,
};

const F32_BYTES: usize = size_of::<f32>();

/// Decodes a job's cell. An error comes with the piece it is about.
pub fn decode(
    job: &Job,
    bytes: &[Bytes],
    scratch: &mut Scratch,
) -> Result<Outcome, (usize, Error)> {
    let engine = &job.work.engine;
    let Some(field) = engine.fields.get(job.field) else { return Ok(Outcome::Empty) };
    match (&field.task, bytes.first(), job.pieces.first()) {
        (Task::Image(image), Some(bytes), Some(piece)) => {
            picture(job, image, bytes, piece, scratch).map_err(|e| (0, e))
        }
        (Task::Records { columns }, Some(bytes), _) => {
            records(job, *columns, bytes).map_err(|e| (0, e))
        }
        (Task::Points(points), Some(_), _) => clouds(job, points, bytes, scratch),
        (Task::Blob(kind), Some(bytes), Some(piece)) => {
            let columns = &engine.table.fields()[field.column].columns;
            let (codec, file) = (&piece.blob.codec, job.file(0));
            natural(*kind, codec, columns, bytes.clone(), &mut scratch.image, &file)
                .map(Outcome::Natural)
                .map_err(|e| (0, e))
        }
        _ => Ok(Outcome::Empty),
    }
}

/// The error of a decoder that panicked.
pub fn panicked(file: &str) -> Error {
    Error::corrupt(
        file,
        0,
        "bytes a decoder understands",
        "bytes that made it panic",
        "report this file; it is treated as a bad sample",
    )
}

fn slot(job: &Job) -> Result<SlotGuard<'_>> {
    let region = job.work.layout.region(job.field, job.slot);
    let slots = job.work.slots.as_ref();
    let guard = slots.zip(region).and_then(|(slots, region)| slots.claim(region));
    guard.ok_or_else(|| Error::invalid("batch slot", "a free region", "none"))
}

fn own_buffer(job: &Job, bytes: usize) -> Buffer {
    let mut buffer = job.work.engine.buffer(bytes, job.work.private);
    buffer.set_len(bytes);
    buffer
}

fn picture(
    job: &Job,
    task: &ImageTask,
    bytes: &Bytes,
    piece: &Piece,
    scratch: &mut Scratch,
) -> Result<Outcome> {
    let (codec, file) = (&piece.blob.codec, job.file(0));
    let scratch = &mut scratch.image;
    if let Some(shape) = task.shape {
        let mut out = slot(job)?;
        decode_image(bytes, codec, &task.spec, scratch, &mut out, &file)?;
        return Ok(Outcome::Image { shape, own: None });
    }
    if *codec == Codec::Png
        && task.spec == ImageSpec::natural()
        && let Some((h, w, levels)) = decode_depth(bytes, &file)?
    {
        let data: Vec<u8> = levels.iter().flat_map(|v| v.to_le_bytes()).collect();
        task.saw(data.len());
        let shape = vec![h as usize, w as usize];
        let array = Natural::Array { dtype: DType::U16, shape, data: data.into() };
        return Ok(Outcome::Natural(array));
    }
    let (h, w) = image_size(bytes, codec, &file)?;
    if u64::from(h) * u64::from(w) > IMAGE_PIXELS_MAX {
        let what = format!("{file}: a picture of {h} x {w} pixels");
        return Err(Error::Unsupported { what, advice: "give dt.Image(size=...)".into() });
    }
    let (shape, need) = (task.spec.out_shape(h, w), task.spec.out_bytes(h, w));
    let mut out = slot(job)?;
    let own = if need <= out.len() {
        decode_image(bytes, codec, &task.spec, scratch, &mut out[..need], &file)?;
        None
    } else {
        let mut own = own_buffer(job, need);
        decode_image(bytes, codec, &task.spec, scratch, &mut own, &file)?;
        Some(own)
    };
    task.saw(need);
    Ok(Outcome::Image { shape, own })
}

fn records(job: &Job, columns: usize, bytes: &Bytes) -> Result<Outcome> {
    let rows = count_points(bytes.len() as u64, columns, &job.file(0))?;
    let mut out = slot(job)?;
    let own = if let Some(place) = out.get_mut(..bytes.len()) {
        place.copy_from_slice(bytes);
        None
    } else {
        let mut own = own_buffer(job, bytes.len());
        own.copy_from_slice(bytes);
        Some(own)
    };
    Ok(Outcome::Points { rows, own })
}

fn clouds(
    job: &Job,
    task: &PointsTask,
    bytes: &[Bytes],
    scratch: &mut Scratch,
) -> Result<Outcome, (usize, Error)> {
    let mut points = 0;
    let mut inputs = Vec::with_capacity(bytes.len());
    for (index, (piece, bytes)) in job.pieces.iter().zip(bytes).enumerate() {
        points += count_points(bytes.len() as u64, task.layout.record_columns, &job.file(index))
            .map_err(|e| (index, e))?;
        inputs.push(SweepInput { bytes, transform: piece.transform.as_ref(), dt_s: piece.dt_s });
    }
    gather(job, task, &inputs, points, scratch).map_err(|e| (0, e))
}

fn gather(
    job: &Job,
    task: &PointsTask,
    inputs: &[SweepInput<'_>],
    points: usize,
    scratch: &mut Scratch,
) -> Result<Outcome> {
    let file = job.file(0);
    let values = points * task.layout.columns();
    let mut out = slot(job)?;
    let place = floats_mut(&mut out);
    let run = |out: &mut [f32]| gather_points(inputs, &task.layout, &task.spec, out, &file);
    if let Ragged::Pad { max_points } = task.ragged {
        let rows = padded(place, values, task.layout.columns(), max_points, scratch, run)?;
        return Ok(Outcome::Points { rows, own: None });
    }
    if values <= place.len() {
        return Ok(Outcome::Points { rows: run(place)?, own: None });
    }
    let mut own = own_buffer(job, values * F32_BYTES);
    let rows = run(floats_mut(&mut own))?;
    Ok(Outcome::Points { rows, own: Some(own) })
}

/// Fills a padded slot: in place if all points fit before any is dropped, else through scratch.
fn padded(
    place: &mut [f32],
    values: usize,
    columns: usize,
    max_points: usize,
    scratch: &mut Scratch,
    run: impl Fn(&mut [f32]) -> Result<usize>,
) -> Result<usize> {
    let rows = if values <= place.len() {
        run(place)?
    } else {
        if scratch.points.len() < values {
            scratch.points.resize(values, 0.0);
        }
        let rows = run(&mut scratch.points[..values])?.min(max_points);
        place[..rows * columns].copy_from_slice(&scratch.points[..rows * columns]);
        rows
    };
    place[rows * columns..].fill(0.0);
    Ok(rows)
}
