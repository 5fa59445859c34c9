//! `tensors.arrow`: one row per chunk, as an Arrow IPC file.

use std::io::Cursor;
use std::sync::Arc;

use arrow_array::builder::{
    Int64Builder, ListBuilder, StringBuilder, UInt32Builder, UInt64Builder,
};
use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, UInt32Type, UInt64Type};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_ipc::reader::FileReader;
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};

use super::chunk::Chunk;
use crate::error::{Error, Result};

fn schema() -> SchemaRef {
    let list = || DataType::List(Arc::new(Field::new("item", DataType::Int64, false)));
    let column = |name: &str, kind| Field::new(name, kind, false);
    Arc::new(Schema::new(vec![
        column("path", DataType::Utf8),
        column("entry", DataType::Utf8),
        column("dtype", DataType::Utf8),
        column("shape", list()),
        column("offsets", list()),
        column("extent", list()),
        Field::new("flat_start", DataType::Int64, true),
        Field::new("flat_len", DataType::Int64, true),
        column("file", DataType::Utf8),
        column("start", DataType::UInt64),
        column("length", DataType::UInt64),
        column("crc32c", DataType::UInt32),
        column("codec", DataType::Utf8),
        Field::new("step_ref", DataType::Int64, true),
    ]))
}

/// Rows as the bytes of an Arrow IPC file.
pub fn encode_table(chunks: &[Chunk]) -> Result<Vec<u8>> {
    let inner = |e: ArrowError| Error::invalid("table of chunks", "encodable rows", e);
    let batch = RecordBatch::try_new(schema(), columns(chunks)).map_err(inner)?;
    let mut writer = FileWriter::try_new(Vec::new(), &schema()).map_err(inner)?;
    writer.write(&batch).map_err(inner)?;
    writer.into_inner().map_err(inner)
}

fn columns(chunks: &[Chunk]) -> Vec<ArrayRef> {
    vec![
        text(chunks, |c| &c.path),
        text(chunks, |c| &c.entry),
        text(chunks, |c| &c.dtype),
        lists(chunks, |c| &c.shape),
        lists(chunks, |c| &c.offsets),
        lists(chunks, |c| &c.extent),
        numbers(chunks, |c| c.flat.map(|f| f.0)),
        numbers(chunks, |c| c.flat.map(|f| f.1)),
        text(chunks, |c| &c.file),
        unsigned(chunks, |c| c.start),
        unsigned(chunks, |c| c.length),
        checksums(chunks),
        text(chunks, |c| &c.codec),
        numbers(chunks, |c| c.step_ref),
    ]
}

fn text(chunks: &[Chunk], of: impl Fn(&Chunk) -> &String) -> ArrayRef {
    let mut column = StringBuilder::new();
    for c in chunks {
        column.append_value(of(c));
    }
    Arc::new(column.finish())
}

fn lists(chunks: &[Chunk], of: impl Fn(&Chunk) -> &Vec<i64>) -> ArrayRef {
    let field = Field::new("item", DataType::Int64, false);
    let mut column = ListBuilder::new(Int64Builder::new()).with_field(field);
    for chunk in chunks {
        column.values().append_slice(of(chunk));
        column.append(true);
    }
    Arc::new(column.finish())
}

fn numbers(chunks: &[Chunk], of: impl Fn(&Chunk) -> Option<i64>) -> ArrayRef {
    let mut column = Int64Builder::new();
    for c in chunks {
        column.append_option(of(c));
    }
    Arc::new(column.finish())
}

fn unsigned(chunks: &[Chunk], of: impl Fn(&Chunk) -> u64) -> ArrayRef {
    let mut column = UInt64Builder::new();
    for c in chunks {
        column.append_value(of(c));
    }
    Arc::new(column.finish())
}

fn checksums(chunks: &[Chunk]) -> ArrayRef {
    let mut column = UInt32Builder::new();
    for c in chunks {
        column.append_value(c.crc32c);
    }
    Arc::new(column.finish())
}

/// Rows of a table. The caller has checked the file's checksum; a table that still does not parse
/// was written by another program or version, which `file` names.
pub fn decode_table(bytes: &[u8], file: &str) -> Result<Vec<Chunk>> {
    let bad = |found: String| {
        Error::corrupt(file, 0, "an Arrow IPC file of chunks", found, "use an older step")
    };
    let reader = FileReader::try_new(Cursor::new(bytes), None).map_err(|e| bad(e.to_string()))?;
    let mut chunks = Vec::new();
    for batch in reader {
        let batch = batch.map_err(|e| bad(e.to_string()))?;
        append_rows(&batch, &mut chunks).map_err(|what| bad(format!("column {what}")))?;
    }
    Ok(chunks)
}

fn append_rows(batch: &RecordBatch, chunks: &mut Vec<Chunk>) -> Result<(), &'static str> {
    let expected = schema();
    for field in expected.fields() {
        let name = field.name().as_str();
        let column = column(batch, name)?;
        let same = match field.data_type() {
            DataType::List(_) => {
                column.as_list_opt::<i32>().is_some_and(|l| l.value_type() == DataType::Int64)
            }
            kind => column.data_type() == kind,
        };
        if !same || (!field.is_nullable() && column.null_count() > 0) {
            return Err("of another type");
        }
    }
    for i in 0..batch.num_rows() {
        chunks.push(Chunk {
            path: string(batch, "path", i)?,
            entry: string(batch, "entry", i)?,
            dtype: string(batch, "dtype", i)?,
            shape: list(batch, "shape", i)?,
            offsets: list(batch, "offsets", i)?,
            extent: list(batch, "extent", i)?,
            flat: int(batch, "flat_start", i)?.zip(int(batch, "flat_len", i)?),
            file: string(batch, "file", i)?,
            start: uint(batch, "start", i)?,
            length: uint(batch, "length", i)?,
            crc32c: column(batch, "crc32c")?.as_primitive::<UInt32Type>().value(i),
            codec: string(batch, "codec", i)?,
            step_ref: int(batch, "step_ref", i)?,
        });
    }
    Ok(())
}

type Cell<T> = Result<T, &'static str>;

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Cell<&'a ArrayRef> {
    batch.column_by_name(name).ok_or("missing")
}

fn string(batch: &RecordBatch, name: &str, i: usize) -> Cell<String> {
    Ok(column(batch, name)?.as_string::<i32>().value(i).to_string())
}

fn list(batch: &RecordBatch, name: &str, i: usize) -> Cell<Vec<i64>> {
    let values = column(batch, name)?.as_list::<i32>().value(i);
    Ok(values.as_primitive::<Int64Type>().values().to_vec())
}

fn int(batch: &RecordBatch, name: &str, i: usize) -> Cell<Option<i64>> {
    let values = column(batch, name)?.as_primitive::<Int64Type>();
    Ok(values.is_valid(i).then(|| values.value(i)))
}

fn uint(batch: &RecordBatch, name: &str, i: usize) -> Cell<u64> {
    Ok(column(batch, name)?.as_primitive::<UInt64Type>().value(i))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(i: i64) -> Chunk {
        Chunk {
            path: format!("[\"w\",{i}]"),
            entry: format!("w.{i}"),
            dtype: "F32".into(),
            shape: vec![8, 4],
            offsets: vec![i, 0],
            extent: vec![1, 4],
            flat: None,
            file: "a-0/rank-00000.safetensors".into(),
            start: 4096,
            length: 16,
            crc32c: u32::MAX - i as u32,
            codec: "raw".into(),
            step_ref: (i == 2).then_some(7),
        }
    }

    #[test]
    fn rows_come_back() {
        let mut chunks: Vec<_> = (0..3).map(chunk).collect();
        chunks[0].shape.clear();
        chunks[0].offsets.clear();
        chunks[0].extent.clear();
        (chunks[1].flat, chunks[1].offsets, chunks[1].extent) = (Some((3, 4)), vec![], vec![]);
        let bytes = encode_table(&chunks).unwrap();
        assert_eq!(decode_table(&bytes, "t").unwrap(), chunks);
        assert!(decode_table(&encode_table(&[]).unwrap(), "t").unwrap().is_empty());
    }

    #[test]
    fn other_bytes_are_refused_without_panic() {
        let bytes = encode_table(&[chunk(0)]).unwrap();
        for n in [0, 1, 8, bytes.len() / 2, bytes.len() - 1] {
            assert!(decode_table(&bytes[..n], "t").is_err());
        }
        assert!(decode_table(b"not arrow at all, but long enough to look", "t").is_err());
    }

    #[test]
    fn rows_that_contradict_themselves_are_refused() {
        chunk(0).check("t").unwrap();
        let mut flat = chunk(0);
        (flat.flat, flat.offsets, flat.extent) = (Some((28, 4)), vec![], vec![]);
        flat.check("t").unwrap();
        let wrong: [fn(&mut Chunk); 9] = [
            |c| c.file = "../x".into(),
            |c| c.dtype = "F31".into(),
            |c| c.length = 15,
            |c| c.offsets = vec![8, 0],
            |c| c.codec = "zip".into(),
            |c| c.start = u64::MAX,
            |c| c.flat = Some((0, 4)),
            |c| (c.flat, c.offsets, c.extent) = (Some((29, 4)), vec![], vec![]),
            |c| (c.flat, c.offsets, c.extent) = (Some((0, 3)), vec![], vec![]),
        ];
        for change in wrong {
            let mut c = chunk(0);
            change(&mut c);
            assert!(c.check("t").is_err(), "{c:?}");
        }
    }
}
