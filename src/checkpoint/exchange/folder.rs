//! One checkpoint folder, its manifest directly inside, written by ranks that someone else
//! coordinates (torch.distributed.checkpoint) or by one process (an import).
//!
//! The order is that of every save: data files → table → fsync of the folders → manifest. Whoever
//! fails before the manifest leaves no checkpoint.

use std::sync::Arc;

use bytes::Bytes;

use super::stream::{Feed, Windows, write_stream};
use crate::checkpoint::io::read_all;
use crate::checkpoint::layout::{
    Chunk, FileImage, FileRecord, MANIFEST, Manifest, Piece, RAW_CODEC, RollLimits, TENSORS,
    attempt_dir, check_relative, crc32c, encode_table, is_attempt_dir, is_attempt_file, join,
    parse_step_dir, plan_files,
};
use crate::checkpoint::meet::draw;
use crate::checkpoint::retain::{now_ns, root_id};
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::{ObjectMeta, StorageOptions, Store, WriteOptions, open_store};

/// Age from which an attempt that nobody committed is a leftover: another job may still write it.
const LEFTOVER_AGE_NS: i64 = 30 * 60 * 1_000_000_000;

/// What a rank wrote.
#[derive(Debug, Clone, Default)]
pub struct Written {
    /// Its files.
    pub files: Vec<FileRecord>,
    /// Its chunks.
    pub chunks: Vec<Chunk>,
}

/// All that the manifest will say.
#[derive(Debug, Clone, Default)]
pub struct Publication {
    /// The step.
    pub step: i64,
    /// Ranks that wrote.
    pub world_size: u32,
    /// What they wrote, in rank order.
    pub written: Written,
    /// State: JSON.
    pub state_json: String,
    /// State of each rank: JSON.
    pub per_rank_json: Vec<String>,
    /// Whether a manifest that is there may be replaced.
    pub overwrite: bool,
}

/// Name of an attempt folder that no other save has.
pub fn fresh_attempt() -> String {
    attempt_dir(draw())
}

/// The step that a folder's name says: `step-00001000`, or the digits at its end; else 0.
pub fn step_of_folder(uri: &str) -> i64 {
    let name = uri.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let digits = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    parse_step_dir(name).or_else(|| name[digits..].parse().ok()).unwrap_or(0)
}

/// A folder that becomes one checkpoint.
#[derive(Debug)]
pub struct Folder {
    store: Arc<dyn Store>,
    /// The folder above, whose entry for this one must be durable, too.
    parent: Option<Arc<dyn Store>>,
    attempt: String,
    windows: Windows,
}

impl Folder {
    /// The folder `uri`, to be written under `attempt`.
    pub fn new(uri: &str, options: &StorageOptions, attempt: &str) -> Result<Self> {
        if !is_attempt_dir(attempt) {
            return Err(Error::invalid("attempt", "a name made by fresh_attempt", attempt));
        }
        let store = open_store(uri, options)?;
        let root = store.capabilities().local_root;
        let above = root.as_deref().and_then(|root| root.parent()).and_then(|p| p.to_str());
        let parent = above.map(|above| open_store(above, options)).transpose()?;
        Ok(Self { store, parent, attempt: attempt.into(), windows: Windows::default() })
    }

    /// Refuses a folder that is a checkpoint already.
    pub fn refuse_committed(&self) -> Result<()> {
        match block_on(self.store.head(MANIFEST))? {
            Ok(_) => Err(self.committed_already()),
            Err(Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn committed_already(&self) -> Error {
        Error::AlreadyExists {
            what: format!("checkpoint {}", join(self.store.uri(), MANIFEST)),
            advice: "save to another folder, or pass overwrite=True to replace it".into(),
        }
    }

    /// Writes the files of a rank and makes them durable. After an error they are removed.
    pub fn write_rank(&self, rank: u32, pieces: &[Piece], feed: &mut dyn Feed) -> Result<Written> {
        let images = plan_files(rank, pieces, RollLimits::default())?;
        let mut written = Written::default();
        for image in &images {
            let done = block_on(self.write_image(image, rank, pieces, feed, &mut written))?;
            if let Err(error) = done {
                self.discard(&written.files)?;
                return Err(error);
            }
        }
        Ok(written)
    }

    async fn write_image(
        &self,
        image: &FileImage,
        rank: u32,
        pieces: &[Piece],
        feed: &mut dyn Feed,
        written: &mut Written,
    ) -> Result<()> {
        let name = join(&self.attempt, &image.name);
        let options = WriteOptions { direct: true, size_bytes: Some(image.size_bytes) };
        let mut writer = self.store.create(&name, options).await?;
        let sums = match write_stream(writer.as_mut(), image, &self.windows, feed).await {
            Ok(sums) => sums,
            Err(error) => {
                // What it stays behind is under an attempt that no manifest names.
                let _ = writer.abort().await;
                let _ = self.store.delete(&name).await;
                return Err(error);
            }
        };
        if let Err(error) = writer.finish().await {
            let _ = self.store.delete(&name).await;
            return Err(error);
        }
        written.files.push(FileRecord {
            path: name.clone(),
            size_bytes: image.size_bytes,
            crc32c: format!("{:08x}", sums.whole),
            header_bytes: image.header.len() as u64,
            header_crc32c: format!("{:08x}", sums.header),
            rank,
        });
        for (entry, &sum) in image.entries.iter().zip(&sums.entries) {
            let Some(piece) = entry.piece.and_then(|i| pieces.get(i)) else { continue };
            let flat = piece.is_flat();
            written.chunks.push(Chunk {
                path: piece.path.clone(),
                entry: entry.entry.clone(),
                dtype: piece.dtype.name.into(),
                shape: piece.shape.clone(),
                offsets: if flat { vec![] } else { piece.rect.offsets.clone() },
                extent: if flat { vec![] } else { piece.rect.extent.clone() },
                flat: flat.then(|| (piece.rect.offsets[0], piece.rect.extent[0])),
                file: name.clone(),
                start: entry.start,
                length: entry.length,
                crc32c: sum,
                codec: RAW_CODEC.into(),
                step_ref: None,
            });
        }
        Ok(())
    }

    /// Removes files of a save that failed, and the attempt folder if it is empty then.
    pub fn discard(&self, files: &[FileRecord]) -> Result<()> {
        block_on(async {
            for file in files {
                let _ = self.store.delete(&file.path).await;
            }
            let _ = self.store.remove_dir(&self.attempt).await;
        })
    }

    /// Writes the table and commits. After an error nothing is committed, unless it says that the
    /// outcome is unknown.
    pub fn publish(&self, publication: Publication) -> Result<()> {
        block_on(self.publish_async(publication))?
    }

    async fn publish_async(&self, publication: Publication) -> Result<()> {
        let table = self.write_table(&publication.written.chunks).await?;
        let table_path = table.path.clone();
        let mut files = vec![table];
        files.extend(publication.written.files);
        let manifest = Manifest {
            step: publication.step,
            world_size: publication.world_size,
            attempt: self.attempt.clone(),
            files,
            refers_to: Vec::new(),
            referred: Vec::new(),
            delta: false,
            committed_ns: Some(now_ns()),
            // Not the root above, if there is one: its Checkpointer did not write this folder and
            // so must not prune it.
            root: Some(root_id(self.store.as_ref())),
            metrics: std::collections::BTreeMap::new(),
            tool: concat!("drivetrain ", env!("CARGO_PKG_VERSION")).into(),
            state_json: publication.state_json,
            per_rank_json: publication.per_rank_json,
        };
        let committed = self.commit(&manifest, publication.overwrite).await;
        if committed.as_ref().is_err_and(|e| !is_unknown(e)) {
            let _ = self.store.delete(&table_path).await;
        }
        committed
    }

    async fn write_table(&self, chunks: &[Chunk]) -> Result<FileRecord> {
        let path = join(&self.attempt, TENSORS);
        for chunk in chunks {
            chunk.check(&path)?;
            check_relative(&chunk.file, &path)?;
        }
        let bytes = Bytes::from(encode_table(chunks)?);
        let record = FileRecord {
            path: path.clone(),
            size_bytes: bytes.len() as u64,
            crc32c: format!("{:08x}", crc32c(&bytes)),
            header_bytes: 0,
            header_crc32c: "00000000".into(),
            rank: 0,
        };
        let options = WriteOptions { direct: false, size_bytes: Some(record.size_bytes) };
        let mut writer = self.store.create(&path, options).await?;
        let written = writer.write(bytes).await;
        let finished = match written {
            Ok(()) => writer.finish().await.map(drop),
            Err(error) => {
                let _ = writer.abort().await;
                Err(error)
            }
        };
        if finished.is_err() {
            let _ = self.store.delete(&path).await;
        }
        finished.map(|()| record)
    }

    async fn commit(&self, manifest: &Manifest, overwrite: bool) -> Result<()> {
        let store = self.store.as_ref();
        store.sync_dir(&self.attempt).await?;
        store.sync_dir("").await?;
        if let Some(parent) = &self.parent {
            parent.sync_dir("").await?;
        }
        let bytes = Bytes::from(manifest.encode()?);
        let existing = if overwrite { self.existing().await? } else { None };
        let put = match &existing {
            Some((version, _)) => store.replace(MANIFEST, bytes, version).await,
            None => store.put_new(MANIFEST, bytes).await,
        };
        if let Err(error) = put {
            // The answer may have been lost after the manifest was stored: it tells whose it is.
            match self.is_ours().await {
                Ok(true) => {}
                Ok(false) if matches!(error, Error::AlreadyExists { .. }) => {
                    return Err(self.committed_already());
                }
                Ok(false) => return Err(error),
                Err(_) => return Err(unknown(store.uri(), &error)),
            }
        }
        store.sync_dir("").await.map_err(|e| unknown(store.uri(), &e))?;
        if let Some((_, Some(old))) = existing {
            self.remove_replaced(&old).await;
        }
        if let Err(error) = self.sweep().await {
            tracing::debug!(%error, "leftovers of older saves could not be removed");
        }
        Ok(())
    }

    /// Removes what killed or failed saves left: attempts that nobody has written to for a while.
    /// Called when this attempt is the committed one.
    async fn sweep(&self) -> Result<()> {
        let store = self.store.as_ref();
        for name in store.list_names("").await? {
            let Some(attempt) = name.strip_suffix('/').filter(|name| is_attempt_dir(name)) else {
                continue;
            };
            let files = store.list(attempt).await?;
            let is_old = |f: &ObjectMeta| {
                f.mtime_ns > 0 && now_ns().saturating_sub(f.mtime_ns) > LEFTOVER_AGE_NS
            };
            let is_ours = |f: &ObjectMeta| {
                let file = f.path.strip_prefix(attempt).and_then(|rest| rest.strip_prefix('/'));
                file.is_some_and(is_attempt_file)
            };
            if attempt == self.attempt || !files.iter().all(|f| is_old(f) && is_ours(f)) {
                continue;
            }
            for file in files {
                store.delete(&file.path).await?;
            }
            store.remove_dir(attempt).await?;
        }
        Ok(())
    }

    async fn existing(&self) -> Result<Option<(crate::storage::Version, Option<Manifest>)>> {
        let meta = match self.store.head(MANIFEST).await {
            Ok(meta) => meta,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(e) => return Err(e),
        };
        let old = read_all(self.store.as_ref(), MANIFEST).await?;
        Ok(Some((meta.version, Manifest::decode(&old, MANIFEST).ok())))
    }

    async fn is_ours(&self) -> Result<bool> {
        match read_all(self.store.as_ref(), MANIFEST).await {
            Ok(bytes) => {
                let manifest = Manifest::decode(&bytes, MANIFEST);
                Ok(manifest.is_ok_and(|m| m.attempt == self.attempt))
            }
            Err(Error::NotFound { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Files that only the replaced manifest named. Best effort: the commit is done.
    async fn remove_replaced(&self, old: &Manifest) {
        if old.attempt == self.attempt || !is_attempt_dir(&old.attempt) {
            return;
        }
        let inside = format!("{}/", old.attempt);
        for file in old.files.iter().filter(|f| f.path.starts_with(&inside)) {
            let _ = self.store.delete(&file.path).await;
        }
        let _ = self.store.remove_dir(&old.attempt).await;
    }

    /// Stores a small note for the other ranks, replacing an older one.
    pub fn put_note(&self, name: &str, text: &str) -> Result<()> {
        block_on(async {
            self.store.delete(name).await?;
            self.store.put_new(name, Bytes::from(text.to_owned())).await.map(drop)
        })?
    }

    /// A note that [`Folder::put_note`] stored.
    pub fn note(&self, name: &str) -> Result<String> {
        let bytes = block_on(read_all(self.store.as_ref(), name))??;
        String::from_utf8(bytes.to_vec()).map_err(|e| {
            Error::corrupt(name, e.utf8_error().valid_up_to() as u64, "text", "bytes", "save again")
        })
    }

    /// Removes a note.
    pub fn remove_note(&self, name: &str) -> Result<()> {
        block_on(self.store.delete(name))?
    }
}

const UNKNOWN_OUTCOME: &str = "commit (outcome unknown)";

fn unknown(uri: &str, error: &Error) -> Error {
    Error::Io {
        op: UNKNOWN_OUTCOME,
        path: join(uri, MANIFEST),
        source: std::io::Error::other(error.to_string()),
        advice: "the checkpoint may or may not be committed; `drivetrain ckpt verify` tells".into(),
    }
}

fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::Io { op, .. } if *op == UNKNOWN_OUTCOME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_come_from_names() {
        for (uri, step) in [
            ("/a/step-00001000", 1000),
            ("s3://b/run/step-00000007/", 7),
            ("ckpt_250", 250),
            ("/a/final", 0),
            ("/a/99999999999999999999", 0),
        ] {
            assert_eq!(step_of_folder(uri), step, "{uri}");
        }
    }
}
