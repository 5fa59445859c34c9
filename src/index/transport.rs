//! An index's zstd copy, for moving it: `<name>.index.arrow.zst` and `<name>.sources.arrow.zst`.
//!
//! A mapped index must be uncompressed. The copy is expanded once, into the user's cache, under a
//! name that changes with the copy's size and modification time.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::open::cache_base;
use super::sources::sources_path;
use super::{INDEX_SUFFIX, SampleTable};
use crate::error::{Error, Result};

/// Ending that is added to both files' names.
pub const COMPRESSED_SUFFIX: &str = ".zst";
/// Level 3 halves index tables at several hundred MB/s; higher ones gain a few per cent.
const LEVEL: i32 = 3;
/// Largest file that is expanded: ten times the index of a hundred million samples.
const EXPANDED_BYTES_MAX: u64 = 256 << 30;

/// Writes compressed copies of an index and its sources beside them; returns their paths, the
/// index's first. Frames carry checksums.
pub fn compress(index: &Path) -> Result<[PathBuf; 2]> {
    let pair = [index.to_path_buf(), sources_path(index)?];
    let [to_index, to_sources] = pair.clone().map(|path| with_suffix(&path));
    write_through_temp(&to_sources, |out| pack(&pair[1], out))?;
    write_through_temp(&to_index, |out| pack(&pair[0], out))?;
    Ok([to_index, to_sources])
}

/// Opens a compressed index, expanding it into the cache if it is not there yet.
pub fn open(compressed: &Path) -> Result<SampleTable> {
    let index = expand(compressed)?;
    let table = SampleTable::open(&index, None)?;
    let folder = index.parent().unwrap_or(Path::new(".")).display().to_string();
    if table.root() != folder {
        return Ok(table);
    }
    // The root is stored as "where the index lies", which means the copy, not the cache.
    let home = compressed.parent().filter(|p| !p.as_os_str().is_empty());
    let home = home.unwrap_or(Path::new(".")).display().to_string();
    SampleTable::open(&index, Some(&home))
}

fn expand(compressed: &Path) -> Result<PathBuf> {
    let name = compressed.display().to_string();
    let meta = fs::metadata(compressed).map_err(|e| Error::io("open", &name, e))?;
    let absolute = std::path::absolute(compressed).map_err(|e| Error::io("open", &name, e))?;
    let time = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    let key = format!("{}\0{}\0{time:?}", absolute.display(), meta.len());
    let hash = xxhash_rust::xxh3::xxh3_128(key.as_bytes());
    let base = cache_base().ok_or_else(|| Error::Unsupported {
        what: format!("opening {name} without a cache folder"),
        advice: "set XDG_CACHE_HOME or HOME, or expand both files with `zstd -d`".into(),
    })?;
    let file = compressed.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let file = file.strip_suffix(COMPRESSED_SUFFIX).unwrap_or(file);
    let index = base.join(format!("{hash:032x}")).join(file);
    if !index.exists() {
        let from_sources = with_suffix(&sources_path(&absolute.with_file_name(file))?);
        // The sources first: an index that exists has its sources.
        write_through_temp(&sources_path(&index)?, |out| unpack(&from_sources, out))?;
        write_through_temp(&index, |out| unpack(compressed, out))?;
    }
    Ok(index)
}

/// Whether a name is that of a compressed index.
pub fn is_compressed(uri: &str) -> bool {
    uri.strip_suffix(COMPRESSED_SUFFIX).is_some_and(|name| name.ends_with(INDEX_SUFFIX))
}

fn with_suffix(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(COMPRESSED_SUFFIX);
    name.into()
}

fn pack(from: &Path, out: &mut File) -> Result<()> {
    let name = from.display().to_string();
    let mut input = File::open(from).map_err(|e| Error::io("open", &name, e))?;
    let run = || -> io::Result<()> {
        let mut encoder = zstd::stream::write::Encoder::new(out, LEVEL)?;
        encoder.include_checksum(true)?;
        io::copy(&mut input, &mut encoder)?;
        encoder.finish()?.flush()
    };
    run().map_err(|e| Error::io("compress", &name, e))
}

fn unpack(from: &Path, out: &mut File) -> Result<()> {
    let name = from.display().to_string();
    let input = File::open(from).map_err(|e| Error::io("open", &name, e))?;
    let damaged = |e: io::Error| {
        Error::corrupt(&name, 0, "whole zstd frames", e, "copy it again, or index the data again")
    };
    let decoder = zstd::stream::read::Decoder::new(BufReader::new(input)).map_err(damaged)?;
    let mut limited = decoder.take(EXPANDED_BYTES_MAX);
    // A full cache disk is a write error and says so itself.
    let mut block = vec![0; 1 << 20];
    loop {
        let read = limited.read(&mut block).map_err(damaged)?;
        if read == 0 {
            return Ok(());
        }
        out.write_all(&block[..read]).map_err(|e| Error::io("expand", &name, e))?;
    }
}

/// Fills a temporary file in the target's folder, makes it durable and renames it.
fn write_through_temp(to: &Path, fill: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let name = to.display().to_string();
    let io = |op| {
        let name = name.clone();
        move |e| Error::io(op, name, e)
    };
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(io("create folder of"))?;
    }
    let mut temp = to.as_os_str().to_os_string();
    temp.push(format!(".{}.tmp", std::process::id()));
    let temp = PathBuf::from(temp);
    let mut file = File::create(&temp).map_err(io("create"))?;
    let done = fill(&mut file)
        .and_then(|()| file.sync_all().map_err(io("sync")))
        .and_then(|()| fs::rename(&temp, to).map_err(io("rename")));
    if done.is_err() {
        // What went wrong matters, not that the rest could not be cleaned up.
        let _ = fs::remove_file(&temp);
    }
    done
}
