//! The Arrow schema of an index file: which columns a field of each kind has, and what the schema's
//! metadata says. The reader accepts exactly these types, so a foreign or future file is refused
//! by name instead of being half understood.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use arrow_schema::{DataType, Field, Fields, Schema};

use super::types::{FieldKind, FieldSpec};
use crate::error::{Error, Result};

/// Version of the index file format; another one is refused.
pub const FORMAT_VERSION: &str = "1";

pub(super) const META_VERSION: &str = "drivetrain.version";
pub(super) const META_FINGERPRINT: &str = "drivetrain.fingerprint";
pub(super) const META_ROOT: &str = "drivetrain.root";
pub(super) const META_FORMAT: &str = "drivetrain.format";
pub(super) const META_INPUTS: &str = "drivetrain.inputs";
pub(super) const META_NOTES: &str = "drivetrain.notes";
const META_KIND: &str = "drivetrain.kind";
const META_FRAME: &str = "drivetrain.frame";
const META_COLUMNS: &str = "drivetrain.columns";
const META_EXTRA: &str = "drivetrain.extra";

/// What a field's column stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// A byte range.
    Blob,
    /// A byte range with earlier items of the same sensor.
    Sequence,
    /// A 4x4 matrix and its time.
    Pose,
    /// A sensor's mounting, its pose in the world and its intrinsics.
    Calibration,
    /// A list of boxes.
    Boxes,
    /// Inline text.
    Text,
    /// One f64.
    Scalar,
}

impl Layout {
    /// All layouts, for finding the one a column has.
    pub(super) const ALL: [Self; 7] = [
        Self::Blob,
        Self::Sequence,
        Self::Pose,
        Self::Calibration,
        Self::Boxes,
        Self::Text,
        Self::Scalar,
    ];

    /// Arrow type of the column.
    pub fn data_type(self) -> DataType {
        match self {
            Self::Blob => DataType::Struct(blob_fields(false)),
            Self::Sequence => DataType::Struct(blob_fields(true)),
            Self::Pose => DataType::Struct(Fields::from(vec![
                Field::new("matrix", fixed(DataType::Float64, 16), false),
                Field::new("timestamp_ns", DataType::Int64, false),
            ])),
            Self::Calibration => DataType::Struct(Fields::from(vec![
                Field::new("sensor_to_ego", fixed(DataType::Float64, 16), false),
                Field::new("ego_to_global", fixed(DataType::Float64, 16), false),
                Field::new("intrinsic", fixed(DataType::Float64, 9), true),
                Field::new("timestamp_ns", DataType::Int64, false),
            ])),
            Self::Boxes => list(DataType::Struct(box_fields())),
            Self::Text => DataType::Utf8,
            Self::Scalar => DataType::Float64,
        }
    }
}

/// Dictionary-encoded text, one dictionary per field and file.
pub(super) fn dictionary() -> DataType {
    DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8))
}

pub(super) fn fixed(item: DataType, len: i32) -> DataType {
    DataType::FixedSizeList(item_field(item), len)
}

pub(super) fn list(item: DataType) -> DataType {
    DataType::List(item_field(item))
}

pub(super) fn item_field(item: DataType) -> Arc<Field> {
    Arc::new(Field::new("item", item, false))
}

/// Columns of a byte range. A null length is a file that was not there when it was indexed.
pub(super) fn blob_fields(with_sweeps: bool) -> Fields {
    let mut fields = range_fields();
    fields.push(Field::new("timestamp_ns", DataType::Int64, false));
    if with_sweeps {
        fields.push(Field::new("sweeps", list(DataType::Struct(sweep_fields())), false));
    }
    Fields::from(fields)
}

/// Columns of one earlier sweep.
pub(super) fn sweep_fields() -> Fields {
    let mut fields = range_fields();
    fields.push(Field::new("timestamp_ns", DataType::Int64, false));
    fields.push(Field::new("transform", fixed(DataType::Float64, 16), false));
    Fields::from(fields)
}

fn range_fields() -> Vec<Field> {
    vec![
        Field::new("source", DataType::UInt32, false),
        Field::new("offset", DataType::UInt64, false),
        Field::new("length", DataType::UInt64, true),
        Field::new("codec", dictionary(), false),
    ]
}

/// Columns of one box.
pub(super) fn box_fields() -> Fields {
    Fields::from(vec![
        Field::new("geometry", fixed(DataType::Float32, 7), false),
        Field::new("velocity", fixed(DataType::Float32, 3), false),
        Field::new("name", dictionary(), false),
        Field::new("token", DataType::Utf8, false),
        Field::new("lidar_points", DataType::Int32, false),
    ])
}

/// The columns every index begins with.
pub(super) fn head_fields() -> Vec<Field> {
    vec![
        Field::new("key", DataType::Utf8, false),
        Field::new("scene", dictionary(), false),
        Field::new("timestamp_ns", DataType::Int64, false),
    ]
}

/// Schema of the sources file.
pub(super) fn sources_schema() -> Schema {
    Schema::new_with_metadata(
        vec![
            Field::new("id", DataType::UInt32, false),
            Field::new("uri", DataType::Utf8, false),
            Field::new("size", DataType::UInt64, true),
            Field::new("etag", DataType::Utf8, false),
            Field::new("mtime_ns", DataType::Int64, false),
        ],
        HashMap::from([(META_VERSION.to_string(), FORMAT_VERSION.to_string())]),
    )
}

/// Column of a field, with what the spec says in its metadata.
pub(super) fn arrow_field(spec: &FieldSpec, layout: Layout) -> Field {
    let mut meta = HashMap::from([(META_KIND.to_string(), spec.kind.name().to_string())]);
    if let Some(frame) = &spec.frame {
        meta.insert(META_FRAME.into(), frame.clone());
    }
    if !spec.columns.is_empty() {
        meta.insert(META_COLUMNS.into(), spec.columns.join(","));
    }
    if !spec.extra.is_empty() {
        meta.insert(META_EXTRA.into(), serde_json::json!(spec.extra).to_string());
    }
    Field::new(&spec.name, layout.data_type(), true).with_metadata(meta)
}

/// What a column of an opened file means.
pub(super) fn read_field(file: &str, field: &Field) -> Result<(FieldSpec, Layout)> {
    let meta = field.metadata();
    let kind = meta.get(META_KIND).and_then(|name| FieldKind::from_name(name));
    let layout = Layout::ALL.into_iter().find(|layout| layout.data_type() == *field.data_type());
    let (Some(kind), Some(layout)) = (kind, layout) else {
        return Err(Error::corrupt(
            file,
            0,
            "a column of a known kind and type",
            format!("{}: {}", field.name(), field.data_type()),
            "index the data set again with this version",
        ));
    };
    let extra: BTreeMap<String, String> = match meta.get(META_EXTRA) {
        None => BTreeMap::new(),
        Some(text) => serde_json::from_str(text).map_err(|e| {
            Error::corrupt(file, 0, "JSON in the field's metadata", e, "index the data set again")
        })?,
    };
    let columns = meta.get(META_COLUMNS).map(|text| text.split(',').map(String::from).collect());
    let spec = FieldSpec {
        name: field.name().clone(),
        kind,
        frame: meta.get(META_FRAME).cloned(),
        columns: columns.unwrap_or_default(),
        extra,
    };
    Ok((spec, layout))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_survives_its_metadata() {
        for layout in Layout::ALL {
            let spec = FieldSpec {
                name: "LIDAR_TOP".into(),
                kind: FieldKind::Points,
                frame: Some("LIDAR_TOP".into()),
                columns: vec!["x".into(), "y".into()],
                extra: BTreeMap::from([("stamp".into(), "end".into())]),
            };
            let back = read_field("f", &arrow_field(&spec, layout)).unwrap();
            assert_eq!(back, (spec, layout));
        }
    }

    #[test]
    fn a_foreign_column_is_named() {
        let field = Field::new("speed", DataType::Float32, false);
        assert!(read_field("f", &field).unwrap_err().to_string().contains("speed: Float32"));
    }
}
