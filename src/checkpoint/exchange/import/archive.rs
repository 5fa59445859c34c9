//! One file of `torch.save`: a zip archive, or a legacy file whose storages follow one another. The
//! pickle is read as recorded calls, and says where in the file the storages are.

use std::collections::HashMap;

use drivetrain_formats as formats;
use formats::pickle::Pickle;
use formats::torch::{HEAD_BYTES_MAX, NAMES, is_legacy, legacy, zip};

use super::bytes::Part;
use crate::error::{Error, Result};

/// Largest pickle inside an archive.
const PICKLE_BYTES_MAX: u64 = 1 << 30;
/// First read of a legacy file's head; doubled while it is too short.
const HEAD_BYTES: u64 = 1 << 20;
const AGAIN: &str = "copy the file again, or save it again";

/// Where the storages of a file are, by key: first byte and length.
pub type Storages = HashMap<String, (u64, u64)>;

/// The pickle of a file of either kind, and where its storages are.
pub async fn read_torch(part: Part<'_>) -> Result<(Pickle, Storages)> {
    let head = part.read(0, part.bytes.min(64)).await?;
    if head.starts_with(zip::MAGIC) {
        let archive = Archive::open(part).await?;
        Ok((archive.pickle().await?, archive.storages().await?))
    } else if is_legacy(&head) {
        legacy_file(part).await
    } else {
        let advice = "name the kind of checkpoint with --from";
        Err(Error::corrupt(part.name(), 0, "a file of torch.save", "other bytes", advice))
    }
}

/// A zip archive of `torch.save`.
pub struct Archive<'a> {
    part: Part<'a>,
    records: Vec<zip::Record>,
    /// Folder that all records are in.
    folder: String,
}

impl<'a> Archive<'a> {
    /// Reads the directory.
    pub async fn open(part: Part<'a>) -> Result<Self> {
        let tail_bytes = zip::TAIL_BYTES_MAX.min(part.bytes);
        let tail = part.read(part.bytes - tail_bytes, tail_bytes).await?;
        let directory = zip::directory(&tail, part.bytes).map_err(|e| part.format(e))?;
        let from = part.bytes - tail_bytes;
        let listed = if directory.offset >= from {
            let at = (directory.offset - from) as usize;
            tail.slice(at..at + directory.bytes as usize)
        } else {
            part.read(directory.offset, directory.bytes).await?
        };
        let records = zip::records(&listed, directory).map_err(|e| part.format(e))?;
        let pickle = records.iter().find(|r| r.name.ends_with("/data.pkl"));
        let folder = pickle.and_then(|r| r.name.strip_suffix("data.pkl")).map(String::from);
        let Some(folder) = folder else {
            let script = records.iter().any(|r| r.name.ends_with("constants.pkl"));
            let found = if script { "a TorchScript archive" } else { "none" };
            let expected = "a record data.pkl of torch.save";
            return Err(Error::corrupt(part.name(), part.start, expected, found, AGAIN));
        };
        let archive = Self { part, records, folder };
        archive.check_byte_order().await?;
        Ok(archive)
    }

    fn record(&self, name: &str) -> Option<&zip::Record> {
        self.records.iter().find(|r| r.name.strip_prefix(&self.folder) == Some(name))
    }

    async fn check_byte_order(&self) -> Result<()> {
        let Some(record) = self.record("byteorder") else { return Ok(()) };
        let (start, bytes) = self.place(record).await?;
        let order = self.part.read(start, bytes.min(16)).await?;
        if &order[..] == b"little" {
            return Ok(());
        }
        let what = format!("{} with byte order {:?}", self.part.name(), order);
        Err(Error::Unsupported { what, advice: "load and save it on this machine".into() })
    }

    /// Where a record's data is, relative to the archive.
    async fn place(&self, record: &zip::Record) -> Result<(u64, u64)> {
        let local = self.part.read(record.header, zip::LOCAL_BYTES).await?;
        let start = zip::data_start(&local, record).map_err(|e| self.part.format(e))?;
        let end = start.checked_add(record.bytes).filter(|&end| end <= self.part.bytes);
        if end.is_none() {
            let found = format!("{} bytes from {start}", record.bytes);
            let expected = "a record inside the archive";
            return Err(Error::corrupt(self.part.name(), start, expected, found, AGAIN));
        }
        Ok((start, record.bytes))
    }

    /// The pickle.
    pub async fn pickle(&self) -> Result<Pickle> {
        let record = self.record("data.pkl").filter(|r| r.bytes <= PICKLE_BYTES_MAX);
        let Some(record) = record else {
            let expected = format!("a pickle of at most {PICKLE_BYTES_MAX} bytes");
            return Err(Error::corrupt(self.part.name(), 0, expected, "a larger one", AGAIN));
        };
        let (start, bytes) = self.place(record).await?;
        let bytes = self.part.read(start, bytes).await?;
        let parsed = Pickle::parse_symbolic(&bytes, NAMES);
        parsed.map(|(pickle, _)| pickle).map_err(|e| self.part.format(e))
    }

    /// Where all storages are in the file.
    pub async fn storages(&self) -> Result<Storages> {
        let mut storages = Storages::new();
        for record in &self.records {
            let inside = record.name.strip_prefix(&self.folder);
            let Some(key) = inside.and_then(|name| name.strip_prefix("data/")) else { continue };
            let (start, bytes) = self.place(record).await?;
            storages.insert(key.to_string(), (self.part.start + start, bytes));
        }
        Ok(storages)
    }
}

async fn legacy_file(part: Part<'_>) -> Result<(Pickle, Storages)> {
    let mut want = HEAD_BYTES.min(part.bytes);
    let head = loop {
        let bytes = part.read(0, want).await?;
        match legacy(&bytes) {
            Err(formats::Error::Truncated { .. }) if want < part.bytes && want < HEAD_BYTES_MAX => {
                want = (want * 2).min(part.bytes);
            }
            other => break other.map_err(|e| part.format(e))?,
        }
    };
    let sizes = storage_sizes(&head.object);
    let mut storages = Storages::new();
    let mut at = head.storages;
    for key in head.keys {
        let count = part.read(at, 8).await?;
        let count = count.iter().rev().fold(0_u64, |n, &b| n << 8 | u64::from(b));
        let Some(&element) = sizes.get(&key) else {
            let expected = "a tensor for each storage";
            return Err(Error::corrupt(part.name(), at, expected, "one without", AGAIN));
        };
        let bytes = count.checked_mul(element);
        let end = bytes.and_then(|n| n.checked_add(at + 8)).filter(|&end| end <= part.bytes);
        let (Some(bytes), Some(end)) = (bytes, end) else {
            let found = format!("{count} elements of {element} bytes");
            return Err(Error::corrupt(part.name(), at, "a storage in the file", found, AGAIN));
        };
        storages.insert(key, (at + 8, bytes));
        at = end;
    }
    Ok((head.object, storages))
}

/// Bytes of an element of each storage that the object refers to.
fn storage_sizes(object: &Pickle) -> HashMap<String, u64> {
    let references = object.persistent().filter_map(formats::torch::storage_element);
    references.collect()
}
