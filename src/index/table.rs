//! The sample table as the rest of the engine sees it: rows, fields, byte ranges.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use arrow_array::cast::AsArray;
use arrow_array::types::{Int32Type, Int64Type};
use arrow_array::{Array, DictionaryArray, Int64Array, RecordBatch, StringArray, UInt64Array};
use arrow_schema::Schema;
use xxhash_rust::xxh3::Xxh3;

use super::ipc;
use super::reader::{Column, Range};
use super::schema::{self, head_fields, read_field};
use super::sources::{Sources, sources_path};
use super::types::{BlobRef, Boxes, Calibration, FieldSpec, Pose, SequenceItem, Source};
use crate::error::{Error, Result};

/// One row per sample. Cheap to clone; a selection shares the columns.
#[derive(Debug, Clone)]
pub struct SampleTable {
    inner: Arc<Inner>,
    rows: Option<Arc<[u64]>>,
    fingerprint: Arc<str>,
    selected: Arc<OnceLock<RecordBatch>>,
}

#[derive(Debug)]
struct Inner {
    batch: RecordBatch,
    key: StringArray,
    scene: DictionaryArray<Int32Type>,
    timestamp_ns: Int64Array,
    fields: Vec<FieldSpec>,
    columns: Vec<Column>,
    sources: Sources,
    root: String,
    path: Option<PathBuf>,
}

impl SampleTable {
    /// Maps `<name>.index.arrow` and `<name>.sources.arrow`; `root` replaces the root they name.
    pub fn open(path: &Path, root: Option<&str>) -> Result<Self> {
        let batch = ipc::open(path, check_schema)?;
        let sources_file = sources_path(path)?;
        let sources = Sources::open(&sources_file)?;
        let fingerprint = batch.schema_ref().metadata().get(schema::META_FINGERPRINT);
        sources.check_fingerprint(&sources_file, fingerprint.map_or("", String::as_str))?;
        let stored = batch.schema_ref().metadata().get(schema::META_ROOT).cloned();
        let root = match root.or(stored.as_deref()) {
            Some(".") | None => {
                let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
                folder.unwrap_or(Path::new(".")).display().to_string()
            }
            Some(root) => root.to_string(),
        };
        Self::new(batch, sources, root, Some(path.to_path_buf()))
    }

    /// A table in memory.
    pub fn from_parts(batch: RecordBatch, sources: &[Source], root: &str) -> Result<Self> {
        check_schema("index", &batch.schema())?;
        Self::new(batch, Sources::from_rows(sources)?, root.to_string(), None)
    }

    fn new(
        batch: RecordBatch,
        sources: Sources,
        root: String,
        path: Option<PathBuf>,
    ) -> Result<Self> {
        let file = path.as_ref().map_or("index".to_string(), |p| p.display().to_string());
        let schema = batch.schema();
        let head = head_fields().len();
        let mut fields = Vec::new();
        let mut columns = Vec::new();
        for (field, array) in schema.fields().iter().zip(batch.columns()).skip(head) {
            let (spec, layout) = read_field(&file, field)?;
            columns.push(Column::new(&file, layout, array)?);
            fields.push(spec);
        }
        let fingerprint = schema.metadata().get(schema::META_FINGERPRINT).cloned();
        let inner = Inner {
            key: batch.column(0).as_string::<i32>().clone(),
            scene: batch.column(1).as_dictionary::<Int32Type>().clone(),
            timestamp_ns: batch.column(2).as_primitive::<Int64Type>().clone(),
            batch,
            fields,
            columns,
            sources,
            root,
            path,
        };
        Ok(Self {
            inner: Arc::new(inner),
            rows: None,
            fingerprint: fingerprint.unwrap_or_default().into(),
            selected: Arc::default(),
        })
    }

    /// The same table over another root.
    pub(super) fn with_root(&self, root: &str) -> Result<Self> {
        let batch = self.batch()?;
        let mut metadata = batch.schema_ref().metadata().clone();
        metadata.insert(schema::META_ROOT, root);
        let schema = batch.schema_ref().as_ref().clone().with_metadata(metadata);
        let batch = RecordBatch::try_new(Arc::new(schema), batch.columns().to_vec())
            .map_err(|e| Error::invalid("index", "a consistent schema", e))?;
        Self::new(batch, self.inner.sources.clone(), root.to_string(), self.inner.path.clone())
    }

    /// Writes `<name>.index.arrow` and `<name>.sources.arrow`, each atomically, sources first: an
    /// index that exists has its sources. A selection is written as a table of its own.
    pub fn write(&self, path: &Path) -> Result<()> {
        ipc::write(&sources_path(path)?, &self.inner.sources.batch_of(&self.fingerprint)?)?;
        ipc::write(path, &self.batch()?)
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.rows.as_ref().map_or(self.inner.batch.num_rows(), |rows| rows.len())
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row of the stored table. Rows past the end give the last one's successor, which every
    /// accessor refuses.
    fn stored(&self, row: usize) -> usize {
        match &self.rows {
            None => row,
            Some(rows) => rows.get(row).map_or(usize::MAX, |r| *r as usize),
        }
    }

    fn checked(&self, row: usize) -> Result<usize> {
        let stored = self.stored(row);
        if row < self.len() && stored < self.inner.batch.num_rows() {
            return Ok(stored);
        }
        Err(Error::invalid("row", format!("0..{}", self.len()), row))
    }

    /// Key of a sample (nuScenes: the sample token); empty past the end.
    pub fn key(&self, row: usize) -> &str {
        self.checked(row).map_or("", |row| self.inner.key.value(row))
    }

    /// Scene of a sample; empty past the end.
    pub fn scene(&self, row: usize) -> &str {
        let scene = &self.inner.scene;
        let key = self.checked(row).ok().and_then(|row| scene.key(row));
        key.map_or("", |key| scene.values().as_string::<i32>().value(key))
    }

    /// Time of a sample, nanoseconds since the epoch of its recording; 0 past the end.
    pub fn timestamp_ns(&self, row: usize) -> i64 {
        self.checked(row).map_or(0, |row| self.inner.timestamp_ns.value(row))
    }

    /// Row of a key; the first one where a key repeats.
    pub fn find(&self, key: &str) -> Option<usize> {
        (0..self.len()).find(|row| self.key(*row) == key)
    }

    /// The fields, in column order.
    pub fn fields(&self) -> &[FieldSpec] {
        &self.inner.fields
    }

    /// Position in [`Self::fields`] of a name.
    pub fn field(&self, name: &str) -> Option<usize> {
        self.inner.fields.iter().position(|f| f.name == name)
    }

    fn column(&self, field: usize) -> Result<(&FieldSpec, &Column)> {
        let found = self.inner.fields.get(field).zip(self.inner.columns.get(field));
        found.ok_or_else(|| {
            Error::invalid("field", format!("0..{}", self.inner.fields.len()), field)
        })
    }

    fn wrong(spec: &FieldSpec, wanted: &str) -> Error {
        Error::invalid(format!("field {}", spec.name), wanted, spec.kind.name())
    }

    fn missing(&self, spec: &FieldSpec, row: usize, source: u32) -> Error {
        let uri = self.inner.sources.uri(source).unwrap_or("an unknown source");
        Error::NotFound {
            what: format!("{uri} ({} of sample {})", spec.name, self.key(row)),
            advice: "the file was not there when the data set was indexed; \
                     put it in place and index again"
                .into(),
        }
    }

    /// Byte range of a field, `None` where the sample has none. A file that was missing when the
    /// data was indexed is [`Error::NotFound`].
    pub fn blob(&self, field: usize, row: usize) -> Result<Option<BlobRef>> {
        let (spec, column) = self.column(field)?;
        let range = column.blob(self.checked(row)?);
        match range.ok_or_else(|| Self::wrong(spec, "a field of byte ranges"))? {
            None => Ok(None),
            Some(Range::Here(blob)) => Ok(Some(blob)),
            Some(Range::Missing { source }) => Err(self.missing(spec, row, source)),
        }
    }

    /// Time of a blob's own sensor, which differs from the sample's; `None` without a blob.
    pub fn blob_timestamp_ns(&self, field: usize, row: usize) -> Result<Option<i64>> {
        let (_, column) = self.column(field)?;
        Ok(column.blob_timestamp_ns(self.checked(row)?))
    }

    /// All stored earlier sweeps of a sequence field, nearest first.
    pub fn sequence(&self, field: usize, row: usize) -> Result<Vec<SequenceItem>> {
        self.sweeps(field, row, usize::MAX)
    }

    /// Up to `max` earlier sweeps, nearest first. Only those asked for must have had their file.
    pub fn sweeps(&self, field: usize, row: usize, max: usize) -> Result<Vec<SequenceItem>> {
        let (spec, column) = self.column(field)?;
        let items = column.sweeps(self.checked(row)?, max);
        let items = items.ok_or_else(|| Self::wrong(spec, "a field of byte ranges"))?;
        items
            .into_iter()
            .map(|item| item.map_err(|source| self.missing(spec, row, source)))
            .collect()
    }

    /// Boxes of a sample.
    pub fn boxes(&self, field: usize, row: usize) -> Result<Option<Boxes>> {
        let (spec, column) = self.column(field)?;
        let boxes = column.boxes(self.checked(row)?).ok_or_else(|| Self::wrong(spec, "boxes"))?;
        let frame = spec.frame.clone().unwrap_or_default();
        Ok(boxes.map(|boxes| Boxes { frame, ..boxes }))
    }

    /// Pose of a sample. Its frames come from the field: `frame` is the target, `source` in
    /// `extra` the source.
    pub fn pose(&self, field: usize, row: usize) -> Result<Option<Pose>> {
        let (spec, column) = self.column(field)?;
        let pose = column.pose(self.checked(row)?).ok_or_else(|| Self::wrong(spec, "a pose"))?;
        Ok(pose.map(|(matrix, timestamp_ns)| Pose {
            target: spec.frame.clone().unwrap_or_default(),
            source: spec.extra.get("source").cloned().unwrap_or_default(),
            matrix,
            timestamp_ns,
        }))
    }

    /// Calibration of a sensor at a sample; its channel is `channel` in the field's `extra`.
    pub fn calibration(&self, field: usize, row: usize) -> Result<Option<Calibration>> {
        let (spec, column) = self.column(field)?;
        let value = column.calibration(self.checked(row)?);
        let value = value.ok_or_else(|| Self::wrong(spec, "a calibration"))?;
        let channel = spec.extra.get("channel").cloned().unwrap_or_default();
        Ok(value.map(|value| Calibration { channel, ..value }))
    }

    /// Inline text. Text that lies in a file is a blob: see [`Self::blob`].
    pub fn text(&self, field: usize, row: usize) -> Result<Option<String>> {
        let (spec, column) = self.column(field)?;
        let row = self.checked(row)?;
        let Column::Text(array) = column else { return Err(Self::wrong(spec, "inline text")) };
        Ok(array.is_valid(row).then(|| array.value(row).to_string()))
    }

    /// One number.
    pub fn scalar(&self, field: usize, row: usize) -> Result<Option<f64>> {
        let (spec, column) = self.column(field)?;
        let row = self.checked(row)?;
        let Column::Scalar(array) = column else { return Err(Self::wrong(spec, "a number")) };
        Ok(array.is_valid(row).then(|| array.value(row)))
    }

    /// Whether the field's bytes lie in sources (and [`Self::blob`] answers), not in the table.
    pub fn is_blob(&self, field: usize) -> bool {
        matches!(self.inner.columns.get(field), Some(Column::Blob(..)))
    }

    /// Whether a sample has a value in a field. A file that was missing is not one.
    pub fn has_value(&self, field: usize, row: usize) -> bool {
        let Ok((_, column)) = self.column(field) else { return false };
        self.checked(row).is_ok_and(|row| column.has_value(row))
    }

    /// One source.
    pub fn source(&self, id: u32) -> Result<Source> {
        let sources = &self.inner.sources;
        sources.get(id).ok_or_else(|| Error::invalid("source", format!("0..{}", sources.len()), id))
    }

    /// Bytes of one source when it was indexed; `None` if there is no such source.
    pub fn source_bytes(&self, id: u32) -> Option<u64> {
        self.inner.sources.size_bytes(id)
    }

    /// Number of sources.
    pub fn source_count(&self) -> usize {
        self.inner.sources.len()
    }

    /// URI of the data root, against which source URIs are relative.
    pub fn root(&self) -> &str {
        &self.inner.root
    }

    /// Index file this table was opened from.
    pub fn path(&self) -> Option<&Path> {
        self.inner.path.as_deref()
    }

    /// Name of the indexed format.
    pub fn format(&self) -> &str {
        self.metadata(schema::META_FORMAT)
    }

    /// What the builder wanted a person to know.
    pub fn notes(&self) -> Vec<&str> {
        self.metadata(schema::META_NOTES).lines().collect()
    }

    pub(super) fn metadata(&self, key: &str) -> &str {
        self.inner.batch.schema_ref().metadata().get(key).map_or("", String::as_str)
    }

    /// 32 hex digits over keys, fields and byte ranges; a selection has its own.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Rows of the stored table, if this is a selection.
    pub fn rows(&self) -> Option<&[u64]> {
        self.rows.as_deref()
    }

    /// The whole table as Arrow. A selection is gathered at the first call.
    pub fn batch(&self) -> Result<RecordBatch> {
        let Some(rows) = &self.rows else { return Ok(self.inner.batch.clone()) };
        if let Some(batch) = self.selected.get() {
            return Ok(batch.clone());
        }
        let rows = UInt64Array::from(rows.to_vec());
        let gathered = arrow_select::take::take_record_batch(&self.inner.batch, &rows);
        let schema = self.inner.batch.schema();
        let mut metadata = schema.metadata().clone();
        metadata.insert(schema::META_FINGERPRINT, self.fingerprint.to_string());
        let schema = schema.as_ref().clone().with_metadata(metadata);
        let batch = gathered
            .and_then(|all| RecordBatch::try_new(Arc::new(schema), all.columns().to_vec()))
            .map_err(|e| Error::invalid("selection", "rows that Arrow can gather", e))?;
        Ok(self.selected.get_or_init(|| batch).clone())
    }

    /// The samples at `rows`, in that order; a row may come more than once.
    pub fn select(&self, rows: &[u64]) -> Result<Self> {
        let mut hash = Xxh3::new();
        // Over stored rows, so that a selection of a selection is the same as selecting at once.
        hash.update(self.metadata(schema::META_FINGERPRINT).as_bytes());
        let mut stored = Vec::with_capacity(rows.len());
        for row in rows {
            let row = self.checked(usize::try_from(*row).unwrap_or(usize::MAX))? as u64;
            hash.update(&row.to_le_bytes());
            stored.push(row);
        }
        Ok(Self {
            inner: Arc::clone(&self.inner),
            rows: Some(stored.into()),
            fingerprint: format!("{:032x}", hash.digest128()).into(),
            selected: Arc::default(),
        })
    }
}

/// Refuses foreign files and other versions before a row is decoded.
fn check_schema(file: &str, schema: &Schema) -> Result<()> {
    let version = schema.metadata().get(schema::META_VERSION).map_or("none", String::as_str);
    if version != schema::FORMAT_VERSION {
        return Err(Error::corrupt(
            file,
            0,
            format!("a sample table of version {}", schema::FORMAT_VERSION),
            format!("version {version}"),
            "index the data set again with this version",
        ));
    }
    for (at, expected) in head_fields().iter().enumerate() {
        let found = schema.fields().get(at);
        if found.map(|f| (f.name(), f.data_type())) != Some((expected.name(), expected.data_type()))
        {
            return Err(Error::corrupt(file, 0, expected, format!("{found:?}"), "index again"));
        }
    }
    let mut fields = schema.fields().iter().skip(head_fields().len());
    fields.try_for_each(|field| read_field(file, field).map(|_| ()))
}
