//! From a committed step back to tensors: what may be restored, opening, filling, verifying.

pub mod attempts;
mod diff;
mod fill;
mod needs;
mod packed;
mod verify;
mod windows;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::io::read_all;
use super::layout::{
    Chunk, MANIFEST, Manifest, TENSORS, crc32c, decode_table, file_path, join, parse_step_dir,
    step_dir,
};
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::Store;
use crate::storage::local::{LocalOptions, LocalStore};

pub use diff::{Change, Values, differences};
pub use fill::{Sharing, Target};
pub(super) use packed::Stream;
pub use verify::Problem;

const OLDER: &str = "use an older step";

/// A committed step whose manifest, sizes and table of chunks are in order.
#[derive(Debug)]
pub struct OpenStep {
    store: Arc<dyn Store>,
    /// Folder of the manifest, relative to the store's root.
    folder: String,
    manifest: Manifest,
    /// Chunks by tensor path.
    tensors: BTreeMap<String, Vec<Chunk>>,
}

/// Newest first: each step with a manifest, and why it cannot be restored if it cannot.
/// Checksums of data are not read here; they are verified while restoring.
pub fn candidates(store: &Arc<dyn Store>) -> Result<Vec<(i64, Option<String>)>> {
    block_on(async {
        let mut found = Vec::new();
        let names = store.list_names("").await?;
        let mut steps: Vec<_> = names.iter().filter_map(|n| parse_step_dir(n)).collect();
        steps.sort_unstable();
        for step in steps.into_iter().rev() {
            match checked_manifest(store.as_ref(), &step_dir(step)?).await {
                Ok(_) => found.push((step, None)),
                Err(Error::NotFound { .. }) => {}
                Err(e) => found.push((step, Some(e.to_string()))),
            }
        }
        Ok(found)
    })?
}

/// The manifest of a folder, whose seal holds and whose files all have the right size.
/// [`Error::NotFound`] only if there is no manifest.
async fn checked_manifest(store: &dyn Store, folder: &str) -> Result<Manifest> {
    let path = join(folder, MANIFEST);
    let manifest = Manifest::decode(&read_all(store, &path).await?, &path)?;
    if let Some(step) = folder.rsplit('/').next().and_then(parse_step_dir)
        && step != manifest.step
    {
        let (expected, found) = (format!("step {step}"), format!("step {}", manifest.step));
        return Err(Error::corrupt(path, 0, expected, found, OLDER));
    }
    check_sizes(store, folder, &manifest).await?;
    Ok(manifest)
}

/// Whether the files that a manifest names are there in their full size; [`Error::Corrupt`] if not.
pub async fn check_sizes(store: &dyn Store, folder: &str, manifest: &Manifest) -> Result<()> {
    let prefix = join(folder, &manifest.attempt);
    let mut listed = store.list(&prefix).await?;
    let mut seen = BTreeSet::from([prefix]);
    for referred in &manifest.referred {
        let path = file_path(folder, Some(referred.step), &referred.file.path);
        let attempt = path.rsplit_once('/').map_or("", |(attempt, _)| attempt);
        if seen.insert(attempt.into()) {
            listed.extend(store.list(attempt).await?);
        }
    }
    let sizes: BTreeMap<_, _> = listed.iter().map(|f| (f.path.as_str(), f.size_bytes)).collect();
    for (step_ref, file) in manifest.all_files() {
        let path = file_path(folder, step_ref, &file.path);
        if sizes.get(path.as_str()) == Some(&file.size_bytes) {
            continue;
        }
        // Not every object store lists what it holds at once: the file itself has the last word.
        let found = match store.head(&path).await {
            Ok(meta) if meta.size_bytes == file.size_bytes => continue,
            Ok(meta) => (meta.size_bytes, bytes(meta.size_bytes)),
            Err(Error::NotFound { .. }) => (0, "no such file".into()),
            Err(e) => return Err(e),
        };
        let expected = match step_ref {
            None => bytes(file.size_bytes),
            Some(_) => format!("{} that step {} refers to", bytes(file.size_bytes), manifest.step),
        };
        return Err(Error::corrupt(path, found.0, expected, found.1, OLDER));
    }
    Ok(())
}

fn bytes(n: u64) -> String {
    format!("{n} bytes")
}

/// Opens a step of a checkpoint root.
pub fn open_step(store: &Arc<dyn Store>, step: i64) -> Result<OpenStep> {
    let folder = step_dir(step)?;
    match open_folder(store, &folder) {
        Err(Error::NotFound { .. }) => Err(Error::NotFound {
            what: format!("committed step {step} in {}", store.uri()),
            advice: "steps() lists the committed ones".into(),
        }),
        other => other,
    }
}

/// Opens the folder that holds a manifest (`""` for the root itself).
pub fn open_folder(store: &Arc<dyn Store>, folder: &str) -> Result<OpenStep> {
    let above = block_on(root_above(store, folder))??;
    let (store, folder) = above.as_ref().map_or((store, folder), |(s, f)| (s, f.as_str()));
    block_on(async {
        let manifest = checked_manifest(store.as_ref(), folder).await?;
        let name = join(&manifest.attempt, TENSORS);
        let path = join(folder, &name);
        let Some(record) = manifest.file(&name) else {
            return Err(Error::corrupt(path, 0, "a table of chunks", "none named", OLDER));
        };
        let table = match read_all(store.as_ref(), &path).await {
            Err(Error::NotFound { .. }) => {
                let expected = bytes(record.size_bytes);
                return Err(Error::corrupt(path, 0, expected, "no such file", OLDER));
            }
            other => other?,
        };
        let found = format!("{:08x}", crc32c(&table));
        if found != record.crc32c {
            let expected = format!("crc32c {}", record.crc32c);
            return Err(Error::corrupt(path, 0, expected, found, OLDER));
        }
        let tensors = by_tensor(decode_table(&table, &path)?, &manifest, &path)?;
        Ok(OpenStep { store: Arc::clone(store), folder: folder.into(), manifest, tensors })
    })?
}

/// The root that a step folder lies in, if the store's root is that folder and the step refers to
/// steps beside it.
async fn root_above(
    store: &Arc<dyn Store>,
    folder: &str,
) -> Result<Option<(Arc<dyn Store>, String)>> {
    if !folder.is_empty() {
        return Ok(None);
    }
    let manifest = Manifest::decode(&read_all(store.as_ref(), MANIFEST).await?, MANIFEST)?;
    if manifest.referred.is_empty() {
        return Ok(None);
    }
    let local = store.capabilities().local_root;
    let local = local.and_then(|path| std::fs::canonicalize(path).ok());
    let name = local.as_deref().and_then(|path| path.file_name()).and_then(|name| name.to_str());
    let own = name.filter(|name| parse_step_dir(name) == Some(manifest.step));
    match (own, local.as_deref().and_then(|path| path.parent())) {
        (Some(name), Some(root)) => {
            let above = LocalStore::new(root, LocalOptions::default())?;
            Ok(Some((Arc::new(above), name.into())))
        }
        _ => Err(Error::Unsupported {
            what: format!("{} by itself: it refers to steps {:?}", store.uri(), manifest.refers_to),
            advice: "open the checkpoint root that holds them all, with the step's number".into(),
        }),
    }
}

/// Sorts the rows by tensor after checking each against itself, its file and its siblings.
pub(super) fn by_tensor(
    chunks: Vec<Chunk>,
    manifest: &Manifest,
    table: &str,
) -> Result<BTreeMap<String, Vec<Chunk>>> {
    let sizes: HashMap<_, _> =
        manifest.all_files().map(|(step, f)| ((step, f.path.as_str()), f.size_bytes)).collect();
    // A tree only at the end: rows are many more than tensors, and their paths long and alike.
    let mut tensors: HashMap<String, Vec<Chunk>> = HashMap::new();
    // Rows of one file follow each other.
    let mut last: (Option<i64>, String, Option<u64>) = (None, String::new(), None);
    for chunk in chunks {
        chunk.check(table)?;
        let end = chunk.start + chunk.length;
        if chunk.file != last.1 || chunk.step_ref != last.0 {
            let size = sizes.get(&(chunk.step_ref, chunk.file.as_str())).copied();
            last = (chunk.step_ref, chunk.file.clone(), size);
        }
        let siblings = tensors.get_mut(&chunk.path);
        let sibling = siblings.as_ref().and_then(|s| s.first());
        let alike = sibling.is_none_or(|s| (&s.shape, &s.dtype) == (&chunk.shape, &chunk.dtype));
        if last.2.is_none_or(|size| end > size) || !alike {
            return Err(Error::corrupt(
                format!("{table}, tensor {}", chunk.path),
                0,
                "a range of a named file, and one shape and dtype per tensor",
                format!("{} {}..{end}, {} {:?}", chunk.file, chunk.start, chunk.dtype, chunk.shape),
                OLDER,
            ));
        }
        match siblings {
            Some(siblings) => siblings.push(chunk),
            None => drop(tensors.insert(chunk.path.clone(), vec![chunk])),
        }
    }
    Ok(tensors.into_iter().collect())
}

impl OpenStep {
    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// All tensors, by path.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[Chunk])> {
        self.tensors.iter().map(|(path, chunks)| (path.as_str(), chunks.as_slice()))
    }

    /// The chunks of one tensor.
    pub fn tensor(&self, path: &str) -> Option<(&str, &[Chunk])> {
        let found = self.tensors.get_key_value(path);
        found.map(|(path, chunks)| (path.as_str(), chunks.as_slice()))
    }

    /// JSON of a rank's own state; `None` for a rank that did not exist.
    pub fn per_rank_json(&self, rank: u32) -> Option<&str> {
        self.manifest.per_rank_json.get(rank as usize).map(String::as_str)
    }

    /// Fills the targets, verifying the checksum of every chunk it reads. All elements of each
    /// target come from exactly one chunk, or nothing is filled and the error names the tensor and
    /// ranges. After a checksum error targets may be partly overwritten.
    pub fn read_into(&self, targets: Vec<Target<'_>>) -> Result<()> {
        fill::fill(self, targets, Sharing::Alone)
    }

    /// The same where other processes of this machine read the same chunks meanwhile: what they
    /// share is read from the disk once.
    pub fn read_into_shared(&self, targets: Vec<Target<'_>>, sharing: Sharing) -> Result<()> {
        fill::fill(self, targets, sharing)
    }

    /// Reads every byte and reports what is wrong; empty if nothing is.
    pub fn verify(&self) -> Result<Vec<Problem>> {
        self.verify_with(&mut |_| {})
    }

    /// As [`OpenStep::verify`], telling the bytes of every read that is done.
    pub fn verify_with(&self, progress: &mut dyn FnMut(u64)) -> Result<Vec<Problem>> {
        block_on(verify::verify(self, progress))?
    }

    /// Bytes of all its own files.
    pub fn size_bytes(&self) -> u64 {
        self.manifest.files.iter().map(|f| f.size_bytes).sum()
    }

    /// Bytes that a rank has staged for it, about: its files, what compression left out of them,
    /// and its chunks that lie elsewhere.
    pub(super) fn rank_bytes(&self, rank: u32) -> u64 {
        let files = self.manifest.files.iter().filter(|file| file.rank == rank);
        let own: u64 = files.map(|file| file.size_bytes).sum();
        let others = self.tensors.values().flatten().filter(|chunk| {
            let is_other = chunk.step_ref.is_some() || !chunk.is_raw();
            let file = || self.manifest.file_of(chunk.step_ref, &chunk.file);
            is_other && file().is_some_and(|file| file.rank == rank)
        });
        let missing = |chunk: &Chunk| match chunk.step_ref {
            Some(_) => chunk.raw_bytes(),
            None => chunk.raw_bytes().saturating_sub(chunk.length),
        };
        own + others.map(missing).sum::<u64>()
    }

    /// Bytes of the files of other steps that it refers to.
    pub fn referred_bytes(&self) -> u64 {
        self.manifest.referred.iter().map(|r| r.file.size_bytes).sum()
    }

    /// Folder of the manifest, relative to the store's root.
    pub(super) fn folder(&self) -> &str {
        &self.folder
    }

    /// The store that it is read from.
    pub(super) fn store(&self) -> &dyn Store {
        self.store.as_ref()
    }

    /// Path of the file that a chunk lies in, below the store's root.
    pub(super) fn path_of(&self, chunk: &Chunk) -> String {
        file_path(&self.folder, chunk.step_ref, &chunk.file)
    }
}

/// Verifies a step that may not even open: manifest and table problems are reported, not raised.
pub fn verify_step(store: &Arc<dyn Store>, step: i64) -> Result<Vec<Problem>> {
    let opened = open_step(store, step);
    opened.map_or_else(problem_of, |open| open.verify())
}

/// An error of opening as the problem it found; other errors stay errors.
pub fn problem_of(error: Error) -> Result<Vec<Problem>> {
    match error {
        Error::Corrupt { file, expected, found, offset, .. } => Ok(vec![Problem {
            file,
            tensor: String::new(),
            reason: format!("expected {expected}, found {found} at byte {offset}"),
        }]),
        other => Err(other),
    }
}

/// Folders that hold a manifest, newest step first: those of a checkpoint root, or `""` alone if
/// the store's root is one checkpoint itself. A damaged manifest counts, with the folder's step.
pub fn manifest_folders(store: &Arc<dyn Store>) -> Result<Vec<(Option<i64>, String)>> {
    let steps = block_on(super::retain::committed(store.as_ref()))??;
    if steps.is_empty() {
        return match block_on(store.head(MANIFEST))? {
            Ok(_) => Ok(vec![(None, String::new())]),
            Err(Error::NotFound { .. }) => Ok(Vec::new()),
            Err(e) => Err(e),
        };
    }
    let folder = |step: i64| Ok((Some(step), step_dir(step)?));
    steps.into_iter().rev().map(folder).collect()
}
