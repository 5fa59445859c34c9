//! Plan: which bytes a step needs, where they go, and how much memory that takes.

use std::ops::Range;

use super::coalesce::{Read, Wanted, coalesce};
use super::config::Ragged;
use super::field::{Field, Inline, PointsTask, Task};
use crate::error::{Error, Result};
use crate::index::{BlobRef, Boxes, Calibration, Pose, SampleTable};
use crate::memory::class_bytes;

/// Start of each field inside a batch's buffer: a cache line, which is also what vector loads and
/// tensor cores like.
pub const SLOT_ALIGN_BYTES: usize = 64;

const F32_BYTES: usize = size_of::<f32>();
const NS_PER_S: f64 = 1e9;

/// One encoded byte range that a cell is made of.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Where it lies.
    pub blob: BlobRef,
    /// Keyframe frame ← this sweep's frame; `None` for the keyframe itself.
    pub transform: Option<[f64; 16]>,
    /// Keyframe time minus this sweep's time, seconds.
    pub dt_s: f32,
}

/// A value that needs no reading.
#[derive(Debug, Clone)]
pub enum Value {
    /// Text.
    Text(String),
    /// Number; NaN where the sample has none.
    Scalar(f64),
    /// Pose.
    Pose(Pose),
    /// Calibration, if the sample has one.
    Calibration(Option<Box<Calibration>>),
    /// Boxes; none where the sample has no annotation.
    Boxes(Boxes),
}

/// What one field of one sample needs.
#[derive(Debug)]
pub enum Cell {
    /// Nothing more.
    Ready(Value),
    /// Bytes.
    Encoded(Vec<Piece>),
    /// It cannot be had.
    Failed(Error),
}

/// Looks up one cell. Never fails as a whole: what is wrong with a sample is the sample's matter.
pub fn plan_cell(table: &SampleTable, field: &Field, row: usize) -> Cell {
    let cell = match &field.task {
        Task::Inline(kind) => inline(table, field, *kind, row).map(Cell::Ready),
        Task::Points(points) => sweeps(table, field, points, row).map(Cell::Encoded),
        Task::Image(_) | Task::Records { .. } | Task::Blob(_) => {
            keyframe(table, field, row).map(|piece| Cell::Encoded(vec![piece]))
        }
    };
    cell.unwrap_or_else(Cell::Failed)
}

fn missing(table: &SampleTable, field: &Field, row: usize) -> Error {
    Error::NotFound {
        what: format!("field {} of sample {}", field.name, table.key(row)),
        advice: "the sample does not have it; leave the field out or choose on_error".into(),
    }
}

fn keyframe(table: &SampleTable, field: &Field, row: usize) -> Result<Piece> {
    let blob = table.blob(field.column, row)?.ok_or_else(|| missing(table, field, row))?;
    check_inside(table, &blob)?;
    Ok(Piece { blob, transform: None, dt_s: 0.0 })
}

/// A damaged index must not decide how much memory is asked for.
fn check_inside(table: &SampleTable, blob: &BlobRef) -> Result<()> {
    let size_bytes = table.source_bytes(blob.source).unwrap_or_default();
    if blob.offset.checked_add(blob.length).is_some_and(|end| end <= size_bytes) {
        return Ok(());
    }
    let file = table.source(blob.source).map_or_else(|e| e.to_string(), |s| s.uri);
    Err(Error::corrupt(
        file,
        blob.offset,
        format!("a range inside its {size_bytes} bytes"),
        format!("{} bytes", blob.length),
        "the index is damaged: delete it and index the data set again",
    ))
}

fn sweeps(
    table: &SampleTable,
    field: &Field,
    points: &PointsTask,
    row: usize,
) -> Result<Vec<Piece>> {
    let key = keyframe(table, field, row)?;
    let own = table.blob_timestamp_ns(field.column, row)?;
    let key_ns = own.unwrap_or_else(|| table.timestamp_ns(row));
    let mut pieces = vec![key];
    for item in table.sweeps(field.column, row, points.spec.sweeps)? {
        let dt_s = (key_ns.saturating_sub(item.timestamp_ns)) as f64 / NS_PER_S;
        let transform = Some(item.transform);
        check_inside(table, &item.blob)?;
        pieces.push(Piece { blob: item.blob, transform, dt_s: dt_s as f32 });
    }
    Ok(pieces)
}

fn inline(table: &SampleTable, field: &Field, kind: Inline, row: usize) -> Result<Value> {
    let column = field.column;
    let absent = || missing(table, field, row);
    Ok(match kind {
        Inline::Text => Value::Text(table.text(column, row)?.ok_or_else(absent)?),
        Inline::Scalar => Value::Scalar(table.scalar(column, row)?.unwrap_or(f64::NAN)),
        Inline::Pose => Value::Pose(table.pose(column, row)?.ok_or_else(absent)?),
        Inline::Calibration => Value::Calibration(table.calibration(column, row)?.map(Box::new)),
        Inline::Boxes => Value::Boxes(table.boxes(column, row)?.unwrap_or_default()),
    })
}

/// Most bytes the output of a cell can take inside the batch's buffer.
pub fn cell_bytes(field: &Field, cell: &Cell) -> usize {
    let pieces: &[Piece] = match cell {
        Cell::Encoded(pieces) => pieces,
        _ => &[],
    };
    let stored: usize = pieces.iter().map(|p| p.blob.length as usize).sum();
    match &field.task {
        Task::Image(image) => image.slot_bytes(),
        Task::Records { .. } => stored,
        Task::Points(points) => match points.ragged {
            Ragged::Offsets => points_bytes(points, stored),
            Ragged::Pad { max_points } => max_points * points.layout.columns() * F32_BYTES,
        },
        Task::Blob(_) | Task::Inline(_) => 0,
    }
}

/// Bytes of `stored` bytes of records with the batch's columns, if no point is dropped.
pub fn points_bytes(points: &PointsTask, stored: usize) -> usize {
    stored / (points.layout.record_columns * F32_BYTES) * points.layout.columns() * F32_BYTES
}

/// Where each cell's output lies in the batch's buffer.
#[derive(Debug, Default, Clone)]
pub struct Layout {
    /// First region of each field; `None` for fields outside the buffer.
    pub first_region: Vec<Option<usize>>,
    /// Regions in order, `batch_size` for each field that has them.
    pub regions: Vec<Range<usize>>,
}

impl Layout {
    /// Lays the fields out one after the other; `cells[slot][field]`.
    pub fn new(fields: &[Field], cells: &[Vec<Cell>]) -> Self {
        let mut layout = Self::default();
        let mut at: usize = 0;
        for (f, field) in fields.iter().enumerate() {
            if !field.has_slots() {
                layout.first_region.push(None);
                continue;
            }
            layout.first_region.push(Some(layout.regions.len()));
            at = at.next_multiple_of(SLOT_ALIGN_BYTES);
            for sample in cells {
                let bytes = sample.get(f).map_or(0, |cell| cell_bytes(field, cell));
                layout.regions.push(at..at + bytes);
                at += bytes;
            }
        }
        layout
    }

    /// Bytes of the whole buffer.
    pub fn bytes(&self) -> usize {
        self.regions.last().map_or(0, |r| r.end)
    }

    /// Region of a cell.
    pub fn region(&self, field: usize, slot: usize) -> Option<usize> {
        self.first_region.get(field).copied().flatten().map(|first| first + slot)
    }
}

/// Reads for the pieces of the cells of some samples. The tag of a user is its position among all
/// pieces, in the order of samples, fields and pieces.
pub fn plan_reads<'a>(fields: &[Field], cells: impl Iterator<Item = &'a Vec<Cell>>) -> Vec<Read> {
    let mut wanted = Vec::new();
    for sample in cells {
        for (cell, field) in sample.iter().zip(fields) {
            let Cell::Encoded(pieces) = cell else { continue };
            for Piece { blob, .. } in pieces {
                let (source, offset, length) = (blob.source, blob.offset, blob.length);
                let keep = matches!(field.task, Task::Blob(_));
                wanted.push(Wanted { source, offset, length, keep, tag: wanted.len() });
            }
        }
    }
    coalesce(wanted)
}

/// Memory a step takes, rounded as the arena rounds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// The batch itself, held until the caller drops it.
    pub output_bytes: u64,
    /// Encoded bytes, gone when they are decoded.
    pub transient_bytes: u64,
}

impl Cost {
    /// Of a batch buffer of `batch_bytes` and these reads.
    pub fn new(batch_bytes: usize, reads: &[Read]) -> Self {
        let sum = |keep: bool| {
            reads.iter().filter(|r| r.keep == keep).map(|r| lent(r.length)).sum::<u64>()
        };
        Self { output_bytes: lent(batch_bytes as u64) + sum(true), transient_bytes: sum(false) }
    }

    /// Refuses a step that cannot fit the limit even alone.
    pub fn check(&self, limit_bytes: u64) -> Result<()> {
        let need = self.output_bytes.saturating_add(self.transient_bytes);
        if need <= limit_bytes {
            return Ok(());
        }
        let expected = format!("at least {need} bytes, which one batch of this loader needs");
        Err(Error::invalid("memory_limit", expected, format!("{limit_bytes} bytes")))
    }
}

/// What the arena lends for a request: nothing for nothing.
fn lent(bytes: u64) -> u64 {
    if bytes == 0 { 0 } else { class_bytes(bytes as usize) as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Codec, FieldKind};

    fn read(length: u64, keep: bool) -> Read {
        Read { source: 0, offset: 0, length, keep, users: vec![] }
    }

    #[test]
    fn costs_are_whole_pages_and_kept_reads_belong_to_the_batch() {
        let cost = Cost::new(5000, &[read(1, false), read(4097, true)]);
        assert_eq!(cost, Cost { output_bytes: 2 * 4096 + 2 * 4096, transient_bytes: 4096 });
        assert!(cost.check(20480).is_ok());
        let error = cost.check(20479).unwrap_err().to_string();
        assert!(error.contains("memory_limit") && error.contains("20480"), "{error}");
    }

    #[test]
    fn fields_start_on_cache_lines_and_slots_touch() {
        let records =
            |name: &str| Field { name: name.into(), column: 0, task: Task::Records { columns: 1 } };
        let blob = Field { name: "b".into(), column: 1, task: Task::Blob(FieldKind::Bytes) };
        let cell = |length| {
            let blob = BlobRef { source: 0, offset: 0, length, codec: Codec::Raw };
            Cell::Encoded(vec![Piece { blob, transform: None, dt_s: 0.0 }])
        };
        let cells = vec![
            vec![cell(4), cell(9), cell(8)],
            vec![cell(12), cell(9), Cell::Failed(Error::Closed { what: String::new() })],
        ];
        let layout = Layout::new(&[records("a"), blob, records("c")], &cells);
        assert_eq!(layout.regions, [0..4, 4..16, 64..72, 72..72]);
        assert_eq!(layout.first_region, [Some(0), None, Some(2)]);
        assert_eq!((layout.region(2, 1), layout.region(1, 0), layout.bytes()), (Some(3), None, 72));
    }
}
