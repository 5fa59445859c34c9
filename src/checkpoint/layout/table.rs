//! `tensors.arrow`: one row per chunk, as an Arrow IPC file.

use std::borrow::Borrow;
use std::io::Cursor;
use std::sync::Arc;
use std::thread;

use arrow_array::builder::{Int64Builder, ListBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, UInt32Type, UInt64Type};
use arrow_array::{
    Array, ArrayRef, Int64Array, ListArray, RecordBatch, StringArray, UInt32Array, UInt64Array,
};
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

/// Rows per record batch: text offsets are 32 bits wide, so that this many rows may have names of
/// 16 KiB each.
const BATCH_ROWS_MAX: usize = 1 << 17;
/// First guess of a row's bytes, so that large tables do not grow step by step.
const ROW_BYTES: usize = 256;

/// Rows as the bytes of an Arrow IPC file.
pub fn encode_table<C: Borrow<Chunk>>(chunks: &[C]) -> Result<Vec<u8>> {
    let inner = |e: ArrowError| Error::invalid("table of chunks", "encodable rows", e);
    let bytes = Vec::with_capacity(chunks.len() * ROW_BYTES);
    let mut writer = FileWriter::try_new(bytes, &schema()).map_err(inner)?;
    let none: &[C] = &[];
    for rows in if chunks.is_empty() { none.chunks(1) } else { chunks.chunks(BATCH_ROWS_MAX) } {
        let batch = RecordBatch::try_new(schema(), columns(rows)).map_err(inner)?;
        writer.write(&batch).map_err(inner)?;
    }
    writer.into_inner().map_err(inner)
}

fn columns<C: Borrow<Chunk>>(chunks: &[C]) -> Vec<ArrayRef> {
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
        Arc::new(UInt32Array::from_iter_values(chunks.iter().map(|c| c.borrow().crc32c))),
        text(chunks, |c| &c.codec),
        numbers(chunks, |c| c.step_ref),
    ]
}

fn text<C: Borrow<Chunk>>(chunks: &[C], of: impl Fn(&Chunk) -> &String) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(chunks.iter().map(|c| of(c.borrow()))))
}

fn lists<C: Borrow<Chunk>>(chunks: &[C], of: impl Fn(&Chunk) -> &Vec<i64>) -> ArrayRef {
    let field = Field::new("item", DataType::Int64, false);
    let mut column = ListBuilder::new(Int64Builder::new()).with_field(field);
    for chunk in chunks {
        column.values().append_slice(of(chunk.borrow()));
        column.append(true);
    }
    Arc::new(column.finish())
}

fn numbers<C: Borrow<Chunk>>(chunks: &[C], of: impl Fn(&Chunk) -> Option<i64>) -> ArrayRef {
    Arc::new(chunks.iter().map(|c| of(c.borrow())).collect::<Int64Array>())
}

fn unsigned<C: Borrow<Chunk>>(chunks: &[C], of: impl Fn(&Chunk) -> u64) -> ArrayRef {
    Arc::new(UInt64Array::from_iter_values(chunks.iter().map(|c| of(c.borrow()))))
}

/// Rows of a table. The caller has checked the file's checksum; a table that still does not parse
/// was written by another program or version, which `file` names.
pub fn decode_table(bytes: &[u8], file: &str) -> Result<Vec<Chunk>> {
    let bad = |found: String| {
        Error::corrupt(file, 0, "an Arrow IPC file of chunks", found, "use an older step")
    };
    let reader = FileReader::try_new(Cursor::new(bytes), None).map_err(|e| bad(e.to_string()))?;
    let batches = reader.collect::<Result<Vec<_>, _>>().map_err(|e| bad(e.to_string()))?;
    let parts = rows_of(&batches).map_err(|what| bad(format!("column {what}")))?;
    let mut parts = parts.into_iter();
    let mut chunks = parts.next().unwrap_or_default();
    chunks.reserve(parts.as_slice().iter().map(Vec::len).sum());
    parts.for_each(|mut part| chunks.append(&mut part));
    Ok(chunks)
}

/// Threads that turn batches into rows; more than this wait for memory.
const DECODE_THREADS_MAX: usize = 8;

/// Rows in order, in parts; a single batch stays in the calling thread.
fn rows_of(batches: &[RecordBatch]) -> Result<Vec<Vec<Chunk>>, &'static str> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(DECODE_THREADS_MAX);
    let decode = |batches: &[RecordBatch]| {
        let mut chunks = Vec::new();
        batches.iter().try_for_each(|batch| append_rows(batch, &mut chunks)).map(|()| chunks)
    };
    if threads == 1 || batches.len() <= 1 {
        return Ok(vec![decode(batches)?]);
    }
    thread::scope(|scope| {
        let shares = batches.chunks(batches.len().div_ceil(threads));
        let workers: Vec<_> = shares.map(|share| scope.spawn(move || decode(share))).collect();
        workers.into_iter().map(|w| w.join().unwrap_or(Err("of rows that panic"))).collect()
    })
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
    let rows = Rows::of(batch)?;
    chunks.reserve(batch.num_rows());
    chunks.extend((0..batch.num_rows()).map(|i| rows.chunk(i)));
    Ok(())
}

type Cell<T> = Result<T, &'static str>;

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Cell<&'a ArrayRef> {
    batch.column_by_name(name).ok_or("missing")
}

/// Columns whose types were checked, found once for all rows.
struct Rows<'a> {
    text: [&'a StringArray; 5],
    lists: [&'a ListArray; 3],
    numbers: [&'a Int64Array; 3],
    start: &'a UInt64Array,
    length: &'a UInt64Array,
    crc32c: &'a UInt32Array,
}

impl<'a> Rows<'a> {
    fn of(batch: &'a RecordBatch) -> Cell<Self> {
        let text = |name| column(batch, name).map(AsArray::as_string::<i32>);
        let list = |name| column(batch, name).map(AsArray::as_list::<i32>);
        let number = |name| column(batch, name).map(AsArray::as_primitive::<Int64Type>);
        let unsigned = |name| column(batch, name).map(AsArray::as_primitive::<UInt64Type>);
        Ok(Self {
            text: [text("path")?, text("entry")?, text("dtype")?, text("file")?, text("codec")?],
            lists: [list("shape")?, list("offsets")?, list("extent")?],
            numbers: [number("flat_start")?, number("flat_len")?, number("step_ref")?],
            start: unsigned("start")?,
            length: unsigned("length")?,
            crc32c: column(batch, "crc32c")?.as_primitive::<UInt32Type>(),
        })
    }

    fn chunk(&self, i: usize) -> Chunk {
        let text = |column: usize| self.text[column].value(i).to_string();
        let number = |column: usize| {
            let values = self.numbers[column];
            values.is_valid(i).then(|| values.value(i))
        };
        Chunk {
            path: text(0),
            entry: text(1),
            dtype: text(2),
            shape: self.list(0, i),
            offsets: self.list(1, i),
            extent: self.list(2, i),
            flat: number(0).zip(number(1)),
            file: text(3),
            start: self.start.value(i),
            length: self.length.value(i),
            crc32c: self.crc32c.value(i),
            codec: text(4),
            step_ref: number(2),
        }
    }

    /// Without the slice that arrow would make of every value.
    fn list(&self, column: usize, i: usize) -> Vec<i64> {
        let list = self.lists[column];
        let (from, to) = (list.value_offsets()[i] as usize, list.value_offsets()[i + 1] as usize);
        let values = list.values().as_primitive::<Int64Type>().values();
        values.get(from..to).unwrap_or_default().to_vec()
    }
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
        assert!(decode_table(&encode_table::<Chunk>(&[]).unwrap(), "t").unwrap().is_empty());
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
        let mut packed = chunk(0);
        (packed.codec, packed.length) = ("planes-zstd".into(), 15);
        packed.check("t").unwrap();
        assert_eq!((packed.raw_bytes(), chunk(0).raw_bytes()), (16, 16));
        let wrong: [fn(&mut Chunk); 12] = [
            |c| c.step_ref = Some(-1),
            |c| c.file = "../x".into(),
            |c| c.dtype = "F31".into(),
            |c| c.length = 15,
            |c| c.offsets = vec![8, 0],
            |c| c.codec = "zip".into(),
            |c| c.codec = "planes-zstd".into(),
            |c| (c.codec, c.length) = ("planes-zstd".into(), 0),
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
