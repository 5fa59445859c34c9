//! Rank 0's last steps: the table, the fsyncs, the manifest.

use bytes::Bytes;

use super::messages::Part;
use super::write::{finish_or_remove, remove_files};
use super::{Folders, Job, Place};
use crate::checkpoint::io::read_all;
use crate::checkpoint::layout::{
    FileRecord, MANIFEST, Manifest, TENSORS, crc32c, encode_table, join,
};
use crate::checkpoint::retain::now_ns;
use crate::error::{Error, Result};
use crate::storage::{Store, WriteOptions};

/// What a commit left to do.
#[derive(Debug, Default)]
pub struct Published {
    /// The manifest that was replaced, whose files nobody names any more.
    pub replaced: Option<Manifest>,
}

/// Writes the table and the manifest. After an error the table is gone again, unless the manifest
/// may already be there.
pub async fn publish(
    place: &Place,
    folders: &Folders,
    job: &Job,
    parts: &[Part],
) -> Result<Published> {
    let store = place.store.as_ref();
    let table = write_table(store, folders, parts).await?;
    let mut files = vec![table];
    files.extend(parts.iter().flat_map(|p| p.head.files.iter().cloned()));
    let manifest = Manifest {
        step: job.step,
        world_size: place.room.world_size,
        attempt: folders.attempt.clone(),
        files,
        refers_to: Vec::new(),
        tool: concat!("drivetrain ", env!("CARGO_PKG_VERSION")).into(),
        committed_ns: Some(now_ns()),
        root: Some(place.keep.root().into()),
        metrics: job.metrics.clone(),
        state_json: job.state_json.clone(),
        per_rank_json: parts.iter().map(|p| p.head.per_rank_json.clone()).collect(),
    };
    let result = async {
        sync_created(store, folders).await?;
        put_manifest(place, folders, job, &manifest).await
    };
    let result = result.await;
    if result.as_ref().is_err_and(may_remove) {
        remove_files(store, folders, &manifest.files[..1]).await;
    }
    result
}

async fn write_table(store: &dyn Store, folders: &Folders, parts: &[Part]) -> Result<FileRecord> {
    let chunks: Vec<_> = parts.iter().flat_map(|p| p.chunks.iter().cloned()).collect();
    let bytes = Bytes::from(encode_table(&chunks)?);
    let path = join(&folders.path, TENSORS);
    let options = WriteOptions { direct: false, size_bytes: Some(bytes.len() as u64) };
    let record = FileRecord {
        path: join(&folders.attempt, TENSORS),
        size_bytes: bytes.len() as u64,
        crc32c: format!("{:08x}", crc32c(&bytes)),
        header_bytes: 0,
        header_crc32c: "00000000".into(),
        rank: 0,
    };
    let mut writer = store.create(&path, options).await?;
    let written = writer.write(bytes).await;
    finish_or_remove(store, &path, writer, written).await.map(|()| record)
}

/// Makes the folders' entries durable, from the inside out, before the manifest names them.
pub async fn sync_created(store: &dyn Store, folders: &Folders) -> Result<()> {
    store.sync_dir(&folders.path).await?;
    store.sync_dir(&folders.step).await?;
    store.sync_dir("").await
}

/// The commit itself.
async fn put_manifest(
    place: &Place,
    folders: &Folders,
    job: &Job,
    manifest: &Manifest,
) -> Result<Published> {
    let store = place.store.as_ref();
    let path = join(&folders.step, MANIFEST);
    let bytes = Bytes::from(manifest.encode()?);
    let mut published = Published::default();
    let existing = if job.overwrite { existing(store, &path).await? } else { None };
    let put = match existing {
        Some((version, old)) => {
            published.replaced = old;
            store.replace(&path, bytes, &version).await
        }
        None => store.put_new(&path, bytes).await,
    };
    let done = match put {
        Ok(_) => store.sync_dir(&folders.step).await,
        Err(e) => settle(store, folders, &path, e).await,
    };
    match done {
        Ok(()) => Ok(published),
        Err(e) => Err(take_back(store, folders, &path, published, e).await),
    }
}

async fn existing(
    store: &dyn Store,
    path: &str,
) -> Result<Option<(crate::storage::Version, Option<Manifest>)>> {
    match store.head(path).await {
        Ok(meta) => {
            let old = read_all(store, path).await?;
            Ok(Some((meta.version, Manifest::decode(&old, path).ok())))
        }
        Err(Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// After an error nobody knows whether the manifest was stored: reading back its attempt tells.
async fn settle(store: &dyn Store, folders: &Folders, path: &str, error: Error) -> Result<()> {
    if is_ours(store, folders, path).await? {
        return store.sync_dir(&folders.step).await;
    }
    Err(match error {
        Error::AlreadyExists { .. } => committed_already(path),
        other => other,
    })
}

/// The refusal to touch a committed step.
pub fn committed_already(path: &str) -> Error {
    Error::AlreadyExists {
        what: format!("committed checkpoint {path}"),
        advice: "save another step, or pass overwrite=True to replace it".into(),
    }
}

async fn is_ours(store: &dyn Store, folders: &Folders, path: &str) -> Result<bool> {
    match read_all(store, path).await {
        Ok(bytes) => {
            let manifest = Manifest::decode(&bytes, path);
            Ok(manifest.is_ok_and(|m| m.attempt == folders.attempt))
        }
        Err(Error::NotFound { .. }) => Ok(false),
        Err(e) => Err(e),
    }
}

/// The save failed after its manifest may have been stored. If it is there and replaced nothing,
/// it is removed, since the caller will be told that the step was not saved. If that fails too,
/// the data stays: a manifest without its data would be worse than a step nobody was told of.
async fn take_back(
    store: &dyn Store,
    folders: &Folders,
    path: &str,
    published: Published,
    error: Error,
) -> Error {
    let ours = is_ours(store, folders, path).await;
    let gone = match ours {
        Ok(false) => true,
        Ok(true) if published.replaced.is_none() => store.delete(path).await.is_ok(),
        _ => false,
    };
    if gone { error } else { unknown_outcome(path, &error) }
}

/// Marks an error after which the step may be committed, so that its data must stay.
fn unknown_outcome(path: &str, error: &Error) -> Error {
    Error::Io {
        op: UNKNOWN_OUTCOME,
        path: path.into(),
        source: std::io::Error::other(error.to_string()),
        advice: "the step may or may not be committed; `drivetrain ckpt ls` tells".into(),
    }
}

const UNKNOWN_OUTCOME: &str = "commit (outcome unknown)";

/// Whether the data of a failed save may be removed.
pub fn may_remove(error: &Error) -> bool {
    !matches!(error, Error::Io { op, .. } if *op == UNKNOWN_OUTCOME)
}
