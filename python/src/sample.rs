//! Reads single samples in their natural forms: all blobs of a sample at once, then decoding.

use std::collections::HashMap;
use std::sync::Arc;

use drivetrain::index::{BlobRef, Codec, FieldKind, FieldSpec, SampleTable, Source};
use drivetrain::memory::Buffer;
use drivetrain::runtime::block_on;
use drivetrain::storage::{OpenOptions, ReadAt, StorageOptions, Store, open_store};
use drivetrain::transform::{ImageScratch, PointsSpec, count_points, natural};
use drivetrain::{Error, Result};
use futures::future::try_join_all;
use parking_lot::Mutex;

use crate::values::Value;

/// Sources kept open between samples; all are closed when there are more, since shards are few and
/// single files are read once.
const SOURCES_OPEN_MAX: usize = 64;

/// Reads samples of one table. Cheap to clone.
#[derive(Clone)]
pub struct SampleReader {
    shared: Arc<Shared>,
}

struct Shared {
    table: SampleTable,
    store: Arc<dyn Store>,
    open: Mutex<HashMap<u32, Arc<dyn ReadAt>>>,
    scratch: Mutex<Vec<ImageScratch>>,
}

impl SampleReader {
    /// A reader of `table`, whose sources lie below its root.
    pub fn open(table: SampleTable, options: &StorageOptions) -> Result<Self> {
        let store = open_store(table.root(), options)?;
        let (open, scratch) = (Mutex::default(), Mutex::default());
        Ok(Self { shared: Arc::new(Shared { table, store, open, scratch }) })
    }

    /// Values of the fields at `columns`, with their names.
    pub fn read(&self, row: usize, columns: &[usize]) -> Result<Vec<(String, Value)>> {
        let shared = &self.shared;
        let mut scratch = shared.scratch.lock().pop().unwrap_or_default();
        let result = shared.read(row, columns, &mut scratch);
        shared.scratch.lock().push(scratch);
        result
    }
}

impl Shared {
    fn read(
        &self,
        row: usize,
        columns: &[usize],
        scratch: &mut ImageScratch,
    ) -> Result<Vec<(String, Value)>> {
        let blobs = columns.iter().map(|c| self.blob(*c, row)).collect::<Result<Vec<_>>>()?;
        let reads = blobs.iter().map(|blob| self.fetch(blob.as_ref()));
        let fetched = block_on(try_join_all(reads))??;
        let mut values = Vec::with_capacity(columns.len());
        for ((column, blob), bytes) in columns.iter().zip(blobs).zip(fetched) {
            let spec = &self.table.fields()[*column];
            let value = match (blob, bytes) {
                (Some(blob), Some((bytes, file))) => decode(spec, &blob, bytes, scratch, &file)
                    .map_err(|e| e.in_part(blob.offset))?,
                _ => self.inline(*column, row, spec)?,
            };
            values.push((spec.name.clone(), value));
        }
        Ok(values)
    }

    fn blob(&self, column: usize, row: usize) -> Result<Option<BlobRef>> {
        if self.table.is_blob(column) { self.table.blob(column, row) } else { Ok(None) }
    }

    async fn fetch(&self, blob: Option<&BlobRef>) -> Result<Option<(Buffer, String)>> {
        let Some(blob) = blob else { return Ok(None) };
        let source = self.table.source(blob.source)?;
        let end = blob.offset.checked_add(blob.length);
        if end.is_none_or(|end| end > source.size_bytes) {
            let found = format!("bytes {} + {}", blob.offset, blob.length);
            let expected = format!("a range inside {} bytes", source.size_bytes);
            return Err(Error::corrupt(source.uri, blob.offset, expected, found, "index again"));
        }
        let reader = self.source(blob.source, &source).await?;
        let buffer = Buffer::heap(usize::try_from(blob.length).unwrap_or(usize::MAX));
        let buffer = reader.read_at(blob.offset, buffer).await?;
        Ok(Some((buffer, source.uri)))
    }

    async fn source(&self, id: u32, source: &Source) -> Result<Arc<dyn ReadAt>> {
        if let Some(reader) = self.open.lock().get(&id) {
            return Ok(Arc::clone(reader));
        }
        let reader = self.store.open(&source.uri, OpenOptions::default()).await?;
        let meta = reader.meta();
        if meta.size_bytes != source.size_bytes {
            let bytes = |count: u64| format!("{count} bytes");
            let (expected, found) = (bytes(source.size_bytes), bytes(meta.size_bytes));
            return Err(Error::Changed { file: source.uri.clone(), expected, found });
        }
        let etag = &meta.version.0;
        if !source.etag.is_empty() && *etag != source.etag {
            let (expected, found) = (source.etag.clone(), etag.clone());
            return Err(Error::Changed { file: source.uri.clone(), expected, found });
        }
        let mut open = self.open.lock();
        if open.len() >= SOURCES_OPEN_MAX {
            open.clear();
        }
        open.insert(id, Arc::clone(&reader));
        Ok(reader)
    }

    fn inline(&self, column: usize, row: usize, spec: &FieldSpec) -> Result<Value> {
        if self.table.is_blob(column) {
            return Ok(Value::Absent);
        }
        let value = match spec.kind {
            FieldKind::Boxes => self.table.boxes(column, row)?.map(Value::Boxes),
            FieldKind::Pose => self.table.pose(column, row)?.map(Value::Pose),
            FieldKind::Calibration => self.table.calibration(column, row)?.map(Value::Calibration),
            FieldKind::Scalar => self.table.scalar(column, row)?.map(Value::Scalar),
            _ => self.table.text(column, row)?.map(Value::Text),
        };
        Ok(value.unwrap_or(Value::Absent))
    }
}

/// Point records stay in the buffer they were read into; everything else is decoded.
fn decode(
    spec: &FieldSpec,
    blob: &BlobRef,
    bytes: Buffer,
    scratch: &mut ImageScratch,
    file: &str,
) -> Result<Value> {
    let frame = spec.frame.clone();
    if let Codec::F32Records { columns } = blob.codec {
        let count = columns as usize;
        let points = count_points(bytes.len() as u64, count, file)?;
        let mut names = PointsSpec::default().layout(&spec.columns, count)?.names;
        names.truncate(count);
        return Ok(Value::Records(names, points, bytes, frame));
    }
    let bytes = bytes.into_bytes();
    natural(spec.kind, &blob.codec, &spec.columns, bytes, scratch, file)
        .map(|value| Value::Natural(value, frame))
}
