//! The manifest: put, read back, sealed. After an unclear answer the attempt id in the stored
//! manifest tells whose it is.

use bytes::Bytes;

use super::messages::Part;
use super::pack::{Packer, held_steps};
use super::write::{OpenFile, write_small};
use super::{Folders, Job, Place};
use crate::checkpoint::io::read_all;
use crate::checkpoint::layout::{
    Chunk, FileRecord, MANIFEST, Manifest, Referred, TENSORS, crc32c, encode_table, join,
};
use crate::checkpoint::retain::now_ns;
use crate::error::{Error, Result};
use crate::storage::{Store, Version};

/// Path of the manifest below the root.
pub fn manifest_path(folders: &Folders) -> String {
    join(&folders.step, MANIFEST)
}

/// Writes the table of all parts' chunks; its bytes are not durable yet.
pub async fn write_table(store: &dyn Store, folders: &Folders, parts: &[Part]) -> Result<OpenFile> {
    let chunks: Vec<&Chunk> = parts.iter().flat_map(|p| &p.chunks).collect();
    let bytes = Bytes::from(encode_table(&chunks)?);
    let record = FileRecord {
        path: join(&folders.attempt, TENSORS),
        size_bytes: bytes.len() as u64,
        crc32c: format!("{:08x}", crc32c(&bytes)),
        header_bytes: 0,
        header_crc32c: "00000000".into(),
        rank: 0,
    };
    write_small(store, join(&folders.path, TENSORS), bytes, record).await
}

/// The manifest's bytes.
pub fn manifest_bytes(
    place: &Place,
    folders: &Folders,
    job: &Job,
    parts: &[Part],
    united: Option<&str>,
    table: FileRecord,
    referred: Vec<Referred>,
) -> Result<Bytes> {
    let mut files = vec![table];
    files.extend(parts.iter().flat_map(|p| p.head.files.iter().cloned()));
    let manifest = Manifest {
        step: job.step,
        world_size: place.room.world_size,
        attempt: folders.attempt.clone(),
        files,
        refers_to: held_steps(&referred),
        referred,
        delta: place.pack.as_ref().is_some_and(Packer::is_delta),
        tool: concat!("drivetrain ", env!("CARGO_PKG_VERSION")).into(),
        committed_ns: Some(now_ns()),
        root: Some(place.keep.root().into()),
        metrics: job.metrics.clone(),
        state_json: united.unwrap_or(&job.state_json).into(),
        per_rank_json: parts.iter().map(|p| p.head.per_rank_json.clone()).collect(),
    };
    manifest.encode().map(Bytes::from)
}

/// The manifest that is there now: its version, and what it says if it can be read.
pub async fn existing(
    store: &dyn Store,
    path: &str,
) -> Result<Option<(Version, Option<Manifest>)>> {
    match store.head(path).await {
        Ok(meta) => {
            let old = read_all(store, path).await?;
            Ok(Some((meta.version, Manifest::decode(&old, path).ok())))
        }
        Err(Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Refuses a step whose manifest is there.
pub async fn refuse_committed(store: &dyn Store, path: &str) -> Result<()> {
    match store.head(path).await {
        Ok(_) => Err(committed_already(path)),
        Err(Error::NotFound { .. }) => Ok(()),
        Err(e) => Err(e),
    }
}

/// The refusal to touch a committed step.
pub fn committed_already(path: &str) -> Error {
    Error::AlreadyExists {
        what: format!("committed checkpoint {path}"),
        advice: "save another step, or pass overwrite=True to replace it".into(),
    }
}

/// Whether the stored manifest is that of this attempt.
pub async fn is_ours(store: &dyn Store, folders: &Folders) -> Result<bool> {
    let path = manifest_path(folders);
    match read_all(store, &path).await {
        Ok(bytes) => {
            let manifest = Manifest::decode(&bytes, &path);
            Ok(manifest.is_ok_and(|m| m.attempt == folders.attempt))
        }
        Err(Error::NotFound { .. }) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Whether a failed put may have had its effect, or may have it yet: then a manifest that is not
/// there now proves nothing.
pub fn may_land(error: &Error) -> bool {
    match error {
        Error::Timeout { .. } => true,
        Error::Io { source, .. } => {
            use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut};
            matches!(source.kind(), TimedOut | ConnectionAborted | ConnectionReset | BrokenPipe)
        }
        _ => false,
    }
}

/// Marks an error after which the step may be committed, so that its data must stay.
pub fn unknown_outcome(path: &str, error: &str) -> Error {
    Error::Io {
        op: UNKNOWN_OUTCOME,
        path: path.into(),
        source: std::io::Error::other(error.to_string()),
        advice: "the step may or may not be committed; `drivetrain ckpt ls` tells".into(),
    }
}

const UNKNOWN_OUTCOME: &str = "commit (outcome unknown)";
