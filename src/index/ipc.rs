//! Arrow IPC files: written atomically, mapped and opened without reading the numeric columns.
//!
//! A file holds one record batch and one dictionary per dictionary field, uncompressed. Opening
//! maps it; arrow checks offsets, dictionary keys and text, and the large columns (byte ranges,
//! matrices) stay untouched on disk until a row is asked for. Nothing in the file is trusted:
//! block positions are compared with the file's size before arrow slices by them.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::writer::FileWriter;
use arrow_ipc::{
    Block, Footer, RecordBatch as RecordBatchMessage, root_as_footer, root_as_message,
};
use arrow_schema::{DataType, Schema};
use bytes::Bytes;

use crate::error::{Error, Result};

/// Footer length (4 bytes) and the closing magic.
const TRAILER_BYTES: usize = 10;
/// The format aligns blocks and buffers to this.
const ALIGN_BYTES: i64 = 8;
/// Items of a text column's buffers: validity, offsets, text.
const TEXT_WIDTHS_BYTES: [i64; 3] = [1, 4, 1];
/// Continuation marker and length before a message.
const MESSAGE_PREFIX_BYTES: usize = 8;
/// Dictionaries of one file; an index has a few per field.
const DICTIONARIES_MAX: usize = 4096;

/// Writes `batch` to `path` through a temporary file in the same folder, durable on return.
pub(super) fn write(path: &Path, batch: &RecordBatch) -> Result<()> {
    let temp = temp_path(path);
    let result = write_temp(&temp, batch).and_then(|()| {
        fs::rename(&temp, path).map_err(|e| Error::io("rename", path.display().to_string(), e))
    });
    if result.is_err() {
        // The original failure is what the caller needs to see, not a failed clean-up.
        let _ = fs::remove_file(&temp);
    }
    result
}

fn temp_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    path.with_file_name(name)
}

fn write_temp(temp: &Path, batch: &RecordBatch) -> Result<()> {
    let name = temp.display().to_string();
    let io = |op| {
        let name = name.clone();
        move |e| Error::io(op, name, e)
    };
    if let Some(parent) = temp.parent() {
        fs::create_dir_all(parent).map_err(io("create folder of"))?;
    }
    let mut file = BufWriter::new(File::create(temp).map_err(io("create"))?);
    let mut writer =
        FileWriter::try_new(&mut file, &batch.schema()).map_err(|e| arrow(&name, e))?;
    writer.write(batch).and_then(|()| writer.finish()).map_err(|e| arrow(&name, e))?;
    drop(writer);
    file.flush().map_err(io("write"))?;
    file.get_ref().sync_all().map_err(io("sync"))
}

/// Maps `path` and decodes its only batch without copying, after `check` accepted the schema.
pub(super) fn open(
    path: &Path,
    check: impl FnOnce(&str, &Schema) -> Result<()>,
) -> Result<RecordBatch> {
    let name = path.display().to_string();
    check_regular(path, &name)?;
    let file = File::open(path).map_err(|e| Error::io("open", &name, e))?;
    // SAFETY: index files are replaced by rename and never changed in place, so the mapping stays
    // as it is for as long as it lives; a foreign process that truncates one breaks its own data.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| Error::io("map", &name, e))?;
    decode(&name, &Buffer::from(Bytes::from_owner(map)), check)
}

/// Opening a pipe would wait for a writer, and a folder cannot be mapped.
fn check_regular(path: &Path, name: &str) -> Result<()> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io("open", name, e))?;
    if meta.is_file() {
        return Ok(());
    }
    Err(Error::NotFound {
        what: format!("index file {name}"),
        advice: "there is something that is not a regular file: remove it, or name another index"
            .into(),
    })
}

/// Decodes the only batch of an Arrow IPC file.
pub(super) fn decode(
    name: &str,
    buffer: &Buffer,
    check: impl FnOnce(&str, &Schema) -> Result<()>,
) -> Result<RecordBatch> {
    let footer = footer(name, buffer)?;
    let fb_schema = footer.schema().ok_or_else(|| bad(name, "a schema", "none"))?;
    let schema = Arc::new(try_fb_to_schema(fb_schema).map_err(|e| arrow(name, e))?);
    check(name, &schema)?;
    let mut widths = Vec::new();
    schema.fields().iter().for_each(|field| item_bytes(field.data_type(), &mut widths));
    let mut decoder = FileDecoder::new(schema, footer.version());
    for block in footer.dictionaries().iter().flatten().take(DICTIONARIES_MAX) {
        let body = block_bytes(name, buffer, block, &TEXT_WIDTHS_BYTES)?;
        decoder.read_dictionary(block, &body).map_err(|e| arrow(name, e))?;
    }
    let blocks = footer.recordBatches().ok_or_else(|| bad(name, "one record batch", "none"))?;
    if blocks.len() != 1 {
        return Err(bad(name, "one record batch", blocks.len()));
    }
    let block = blocks.get(0);
    let body = block_bytes(name, buffer, block, &widths)?;
    let batch = decoder.read_record_batch(block, &body).map_err(|e| arrow(name, e))?;
    batch.ok_or_else(|| bad(name, "one record batch", "none"))
}

fn footer<'a>(name: &str, buffer: &'a Buffer) -> Result<Footer<'a>> {
    let trailer = buffer
        .len()
        .checked_sub(TRAILER_BYTES)
        .and_then(|start| Some((start, <[u8; TRAILER_BYTES]>::try_from(&buffer[start..]).ok()?)));
    let Some((end, trailer)) = trailer else {
        return Err(bad(name, "an Arrow IPC file", format!("{} bytes", buffer.len())));
    };
    let len = read_footer_length(trailer).map_err(|e| arrow(name, e))?;
    let start = end.checked_sub(len).ok_or_else(|| bad(name, "a footer in the file", len))?;
    root_as_footer(&buffer[start..end]).map_err(|e| bad(name, "an Arrow footer", e))
}

/// The bytes of a block, if they lie in the file and the ranges in its message lie in them.
/// Arrow slices by these numbers without asking, so they are compared here.
fn block_bytes(name: &str, buffer: &Buffer, block: &Block, widths_bytes: &[i64]) -> Result<Buffer> {
    let range = || {
        let offset = usize::try_from(block.offset()).ok()?;
        let meta = usize::try_from(block.metaDataLength()).ok()?;
        let len = usize::try_from(block.bodyLength()).ok()?.checked_add(meta)?;
        let aligned = block.offset() % ALIGN_BYTES == 0 && meta as i64 % ALIGN_BYTES == 0;
        let inside = offset.checked_add(len)? <= buffer.len() && meta > MESSAGE_PREFIX_BYTES;
        (inside && aligned).then_some((offset, meta, len))
    };
    let Some((offset, meta, len)) = range() else {
        return Err(bad(name, "a block inside the file", "a longer one"));
    };
    let bytes = buffer.slice_with_length(offset, len);
    let message = root_as_message(&bytes[MESSAGE_PREFIX_BYTES..meta])
        .map_err(|e| bad(name, "an Arrow message", e))?;
    let batch = message
        .header_as_record_batch()
        .or_else(|| message.header_as_dictionary_batch().and_then(|d| d.data()));
    if !batch.is_some_and(|batch| ranges_fit(&batch, len - meta, widths_bytes)) {
        return Err(bad(name, "an uncompressed batch whose buffers lie inside it", "another"));
    }
    Ok(bytes)
}

fn ranges_fit(batch: &RecordBatchMessage<'_>, body_bytes: usize, widths_bytes: &[i64]) -> bool {
    let inside = |offset: i64, length: i64, width: i64| {
        let end = offset.checked_add(length);
        let aligned = offset % ALIGN_BYTES == 0 && length % width == 0;
        aligned && offset >= 0 && length >= 0 && end.is_some_and(|end| end <= body_bytes as i64)
    };
    // A value takes a bit at least, so a longer column than that is not in the body.
    let rows_max = (body_bytes as i64).saturating_mul(8).saturating_add(1);
    let plausible = |len, nulls| (0..=rows_max).contains(&len) && (0..=len).contains(&nulls);
    let (Some(buffers), Some(nodes)) = (batch.buffers(), batch.nodes()) else { return false };
    batch.compression().is_none()
        && buffers.len() == widths_bytes.len()
        && buffers.iter().zip(widths_bytes).all(|(b, w)| inside(b.offset(), b.length(), *w))
        && nodes.iter().all(|node| plausible(node.length(), node.null_count()))
}

/// Bytes of one item in each buffer of a column, in the order of the buffers; bitmaps and text
/// count as bytes.
fn item_bytes(data_type: &DataType, out: &mut Vec<i64>) {
    match data_type {
        DataType::Utf8 => out.extend(TEXT_WIDTHS_BYTES),
        DataType::Dictionary(key, _) => out.extend([1, key.primitive_width().unwrap_or(1) as i64]),
        DataType::List(item) => {
            out.extend([1, size_of::<i32>() as i64]);
            item_bytes(item.data_type(), out);
        }
        DataType::FixedSizeList(item, _) => {
            out.push(1);
            item_bytes(item.data_type(), out);
        }
        DataType::Struct(fields) => {
            out.push(1);
            fields.iter().for_each(|field| item_bytes(field.data_type(), out));
        }
        other => out.extend([1, other.primitive_width().unwrap_or(1) as i64]),
    }
}

fn bad(name: &str, expected: &str, found: impl std::fmt::Display) -> Error {
    Error::corrupt(name, 0, expected, found, "delete the index and build it again")
}

fn arrow(name: &str, e: arrow_schema::ArrowError) -> Error {
    bad(name, "a readable Arrow IPC file", e)
}
