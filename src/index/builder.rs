//! Builds a sample table row by row; every format's index builder ends here.
//!
//! Values go straight into Arrow columns, so a table of millions of rows costs its own size and
//! no more. Fields that a row does not set are null.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Fields, Schema};
use xxhash_rust::xxh3::Xxh3;

use super::columns::{BlobColumn, BoxColumn, CalibrationColumn, DictionaryColumn, PoseColumn};
use super::schema::{self, Layout, arrow_field, head_fields};
use super::sources::SourceSet;
use super::table::SampleTable;
use super::types::{BlobRef, Boxes, Calibration, FieldSpec, Pose, SequenceItem, Source};
use crate::error::{Error, Result};

/// Bytes of text in one Arrow text column.
const TEXT_BYTES_MAX: usize = i32::MAX as usize;
/// Names every index uses itself.
const RESERVED_NAMES: [&str; 3] = ["key", "scene", "timestamp_ns"];

/// What the schema's metadata says about the whole table.
#[derive(Debug, Clone, Default)]
pub struct IndexMeta {
    /// URI of the data root; `.` is the folder of the index file.
    pub root: String,
    /// Name of the format that was indexed.
    pub format: String,
    /// Files the index was made from (tables, tars) as JSON, to see whether it is still fresh.
    pub inputs: String,
    /// What the builder wants a person to know, one line each.
    pub notes: Vec<String>,
}

/// Collects rows.
pub struct IndexBuilder {
    keys: Vec<String>,
    key_bytes: usize,
    scenes: DictionaryColumn,
    timestamps_ns: Vec<i64>,
    fields: Vec<(FieldSpec, Layout)>,
    columns: Vec<Column>,
    set: Vec<bool>,
    sources: SourceSet,
    hash: Xxh3,
}

// One per field, so its size does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
enum Column {
    Blob(BlobColumn),
    Pose(PoseColumn),
    Calibration(CalibrationColumn),
    Boxes(BoxColumn),
    Text(Vec<Option<String>>),
    Scalar(Vec<Option<f64>>),
}

impl Column {
    fn new(layout: Layout) -> Self {
        match layout {
            Layout::Blob => Self::Blob(BlobColumn::new(false)),
            Layout::Sequence => Self::Blob(BlobColumn::new(true)),
            Layout::Pose => Self::Pose(PoseColumn::default()),
            Layout::Calibration => Self::Calibration(CalibrationColumn::default()),
            Layout::Boxes => Self::Boxes(BoxColumn::default()),
            Layout::Text => Self::Text(Vec::new()),
            Layout::Scalar => Self::Scalar(Vec::new()),
        }
    }

    fn push_null(&mut self) {
        match self {
            Self::Blob(column) => column.push_null(),
            Self::Pose(column) => column.push(None),
            Self::Calibration(column) => column.push(None),
            Self::Boxes(column) => column.push(None),
            Self::Text(column) => column.push(None),
            Self::Scalar(column) => column.push(None),
        }
    }

    fn finish(self, data_type: &DataType) -> Result<ArrayRef, arrow_schema::ArrowError> {
        let empty = Fields::empty();
        let fields = if let DataType::Struct(fields) = data_type { fields } else { &empty };
        match self {
            Self::Blob(column) => column.finish(),
            Self::Pose(column) => column.finish(fields),
            Self::Calibration(column) => column.finish(fields),
            Self::Boxes(column) => column.finish(),
            Self::Text(column) => Ok(Arc::new(StringArray::from(column))),
            Self::Scalar(column) => Ok(Arc::new(Float64Array::from(column))),
        }
    }
}

impl std::fmt::Debug for IndexBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fields: Vec<_> = self.fields.iter().map(|(spec, _)| &spec.name).collect();
        f.debug_struct("IndexBuilder")
            .field("rows", &self.keys.len())
            .field("fields", &fields)
            .finish_non_exhaustive()
    }
}

impl IndexBuilder {
    /// A table with these fields, in this order.
    pub fn new(fields: Vec<(FieldSpec, Layout)>) -> Result<Self> {
        let mut hash = Xxh3::new();
        let mut seen: Vec<&str> = RESERVED_NAMES.to_vec();
        for (spec, _) in &fields {
            if seen.contains(&spec.name.as_str()) {
                return Err(Error::invalid("field name", "each name once", &spec.name));
            }
            seen.push(&spec.name);
            hash_text(&mut hash, &spec.name);
            hash_text(&mut hash, spec.kind.name());
        }
        let columns = fields.iter().map(|(_, layout)| Column::new(*layout)).collect();
        let set = vec![true; fields.len()];
        Ok(Self {
            keys: Vec::new(),
            key_bytes: 0,
            scenes: DictionaryColumn::default(),
            timestamps_ns: Vec::new(),
            fields,
            columns,
            set,
            sources: SourceSet::default(),
            hash,
        })
    }

    /// Id of a source; the same URI gives the same id.
    pub fn add_source(&mut self, source: Source) -> u32 {
        self.sources.add(source)
    }

    /// Id and length of a source that was added before; a missing one has no length.
    pub(super) fn find_source(&self, uri: &str) -> Option<(u32, u64)> {
        let (id, source) = self.sources.find(uri)?;
        Some((id, if source.is_missing() { 0 } else { source.size_bytes }))
    }

    /// Begins a row; what the row before did not set becomes null.
    pub fn begin(&mut self, key: &str, scene: &str, timestamp_ns: i64) -> Result<()> {
        self.end_row();
        self.key_bytes += key.len();
        if self.key_bytes > TEXT_BYTES_MAX {
            return Err(Error::invalid("keys of one index", "at most 2 GiB", self.key_bytes));
        }
        hash_text(&mut self.hash, key);
        self.keys.push(key.to_string());
        self.scenes.push(scene);
        self.timestamps_ns.push(timestamp_ns);
        self.set.fill(false);
        Ok(())
    }

    fn end_row(&mut self) {
        for (column, set) in self.columns.iter_mut().zip(&mut self.set) {
            if !std::mem::replace(set, true) {
                column.push_null();
            }
        }
    }

    /// The column of `field` in the current row, once per row.
    fn slot(&mut self, field: usize) -> Result<&mut Column> {
        match self.set.get_mut(field) {
            Some(set) if !*set => *set = true,
            _ => return Err(Error::invalid("field of the row", "one not yet set", field)),
        }
        self.hash.update(&(field as u64).to_le_bytes());
        Ok(&mut self.columns[field])
    }

    fn mismatch(&self, field: usize, what: &str) -> Error {
        let (spec, layout) = &self.fields[field];
        Error::invalid(&spec.name, format!("a value of layout {layout:?}"), what)
    }

    /// Sets a byte range and its earlier sweeps, nearest first.
    pub fn blob(
        &mut self,
        field: usize,
        blob: &BlobRef,
        timestamp_ns: i64,
        sweeps: &[SequenceItem],
    ) -> Result<()> {
        for item in std::iter::once(blob).chain(sweeps.iter().map(|s| &s.blob)) {
            let uri = self.sources.get(item.source).map_or("", |s| s.uri.as_str());
            hash_text(&mut self.hash, uri);
            self.hash.update(&item.offset.to_le_bytes());
            self.hash.update(&item.length.to_le_bytes());
        }
        // Split borrows: the column is written while the sources are asked.
        self.slot(field)?;
        let sources = &self.sources;
        let missing = |id: u32| sources.get(id).is_none_or(Source::is_missing);
        if let Column::Blob(column) = &mut self.columns[field] {
            column.push(blob, timestamp_ns, sweeps, missing);
            return Ok(());
        }
        Err(self.mismatch(field, "a byte range"))
    }

    /// Sets a pose.
    pub fn pose(&mut self, field: usize, pose: &Pose) -> Result<()> {
        if let Column::Pose(column) = self.slot(field)? {
            column.push(Some(pose));
            return Ok(());
        }
        Err(self.mismatch(field, "a pose"))
    }

    /// Sets a calibration.
    pub fn calibration(&mut self, field: usize, value: &Calibration) -> Result<()> {
        if let Column::Calibration(column) = self.slot(field)? {
            column.push(Some(value));
            return Ok(());
        }
        Err(self.mismatch(field, "a calibration"))
    }

    /// Sets boxes; all vectors must be as long as `geometry`.
    pub fn boxes(&mut self, field: usize, boxes: &Boxes) -> Result<()> {
        let n = boxes.geometry.len();
        let lens =
            [boxes.velocity.len(), boxes.names.len(), boxes.tokens.len(), boxes.lidar_points.len()];
        if lens.iter().any(|len| *len != n) {
            return Err(Error::invalid("boxes", format!("{n} of each value"), format!("{lens:?}")));
        }
        if let Column::Boxes(column) = self.slot(field)? {
            column.push(Some(boxes));
            return Ok(());
        }
        Err(self.mismatch(field, "boxes"))
    }

    /// Sets inline text.
    pub fn text(&mut self, field: usize, text: &str) -> Result<()> {
        if let Column::Text(column) = self.slot(field)? {
            column.push(Some(text.to_string()));
            return Ok(());
        }
        Err(self.mismatch(field, "text"))
    }

    /// Sets a number.
    pub fn scalar(&mut self, field: usize, value: f64) -> Result<()> {
        if let Column::Scalar(column) = self.slot(field)? {
            column.push(Some(value));
            return Ok(());
        }
        Err(self.mismatch(field, "a number"))
    }

    /// Ends the table.
    pub fn finish(mut self, meta: &IndexMeta) -> Result<SampleTable> {
        self.end_row();
        let fingerprint = format!("{:032x}", self.hash.digest128());
        let arrow = |e| Error::invalid("index", "columns that Arrow can hold", e);
        let mut fields = head_fields();
        let mut arrays: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from(self.keys)),
            self.scenes.finish().map_err(arrow)?,
            Arc::new(Int64Array::from(self.timestamps_ns)),
        ];
        for ((spec, layout), column) in self.fields.iter().zip(self.columns) {
            let field = arrow_field(spec, *layout);
            arrays.push(column.finish(field.data_type()).map_err(arrow)?);
            fields.push(field);
        }
        let schema = Schema::new_with_metadata(fields, metadata(meta, fingerprint));
        let batch = RecordBatch::try_new(Arc::new(schema), arrays).map_err(arrow)?;
        SampleTable::from_parts(batch, &self.sources.into_rows(), &meta.root)
    }
}

fn metadata(meta: &IndexMeta, fingerprint: String) -> HashMap<String, String> {
    let mut map = HashMap::from([
        (schema::META_VERSION.to_string(), schema::FORMAT_VERSION.to_string()),
        (schema::META_FINGERPRINT.to_string(), fingerprint),
        (schema::META_ROOT.to_string(), meta.root.clone()),
        (schema::META_FORMAT.to_string(), meta.format.clone()),
        (schema::META_INPUTS.to_string(), meta.inputs.clone()),
    ]);
    if !meta.notes.is_empty() {
        map.insert(schema::META_NOTES.to_string(), meta.notes.join("\n"));
    }
    map
}

/// Length first, so that neighbouring texts cannot run into each other.
fn hash_text(hash: &mut Xxh3, text: &str) {
    hash.update(&(text.len() as u64).to_le_bytes());
    hash.update(text.as_bytes());
}
