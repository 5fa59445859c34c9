//! What a case left: which step restores, what the caller heard, what lies around.

use std::path::Path;
use std::sync::Arc;

use drivetrain::Error;
use drivetrain::checkpoint::layout::{MANIFEST, Manifest, join, step_dir};
use drivetrain::checkpoint::{
    Checkpointer, Options, SaveOptions, Target, candidates, open_step, verify_step,
};
use drivetrain::runtime::block_on;
use drivetrain::storage::{OptionMap, Store};

use super::places::{NEW_STEP, OLD_STEP, leftovers};
use crate::commit::{Owned, local, save_with, walk};
use crate::support::s3::Server;

/// The seed of what stood before, and of what the fault meets.
pub const OLD_SEED: u64 = 1;
pub const NEW_SEED: u64 = 2;
/// The new state of cases that upload in parts.
pub const LARGE_SEED: u64 = 4;
/// A little more than one part.
const LARGE_BYTES: i64 = (8 << 20) + 4321;
const HOUR: std::time::Duration = std::time::Duration::from_hours(1);
/// Step that is saved after the fault, to show that the run goes on.
const NEXT_STEP: i64 = 3;
const NEXT_SEED: u64 = 3;

/// Where a case happens. The store works; faults are put around it or before it.
pub struct Ground<'a> {
    pub store: Arc<dyn Store>,
    pub uri: String,
    /// What a child process needs to open the same place.
    pub options: OptionMap,
    /// Folder of staging slots, so that those of killed children are not left in shared memory.
    pub shm: tempfile::TempDir,
    bucket: Option<(&'a Server, String)>,
    _root: Option<tempfile::TempDir>,
}

impl<'a> Ground<'a> {
    /// A fresh folder.
    pub fn folder() -> Self {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let uri = path.display().to_string();
        Self::new(local(&path), uri, OptionMap::new(), None, Some(root))
    }

    /// A bucket of an in-process server, emptied.
    pub fn bucket(server: &'a Server, name: &str) -> Self {
        let bucket = (server, name.to_string());
        server.clear(name);
        server.script("");
        let uri = format!("s3://{name}/run");
        Self::new(server.open_hasty(&uri), uri, server.hasty_options(), Some(bucket), None)
    }

    fn new(
        store: Arc<dyn Store>,
        uri: String,
        options: OptionMap,
        bucket: Option<(&'a Server, String)>,
        root: Option<tempfile::TempDir>,
    ) -> Self {
        Self { store, uri, options, shm: tempfile::tempdir().unwrap(), bucket, _root: root }
    }

    /// The root, where it is a folder.
    pub fn path(&self) -> &Path {
        Path::new(&self.uri)
    }

    /// Saves the old step.
    pub fn with_old_step(self) -> Self {
        let ckpt = self.checkpointer(&self.store, None).unwrap();
        save(&ckpt, OLD_STEP, OLD_SEED, false).unwrap();
        ckpt.close().unwrap();
        self
    }

    pub fn checkpointer(
        &self,
        store: &Arc<dyn Store>,
        keep_last: Option<u32>,
    ) -> Result<Checkpointer, Error> {
        let shm_dir = Some(self.shm.path().to_path_buf());
        let options = Options { keep_last, shm_dir, ..Options::default() };
        Checkpointer::new(Arc::clone(store), 0, 1, options, None)
    }

    /// What restores, and what lies around. Then, when all that is an hour old, the next save must
    /// succeed.
    pub fn look(&self) -> (String, String) {
        let restores = restored(&self.store);
        let left = self.leftovers();
        self.age();
        let next = self.checkpointer(&self.store, None).unwrap();
        save(&next, NEXT_STEP, NEXT_SEED, false).unwrap();
        next.close().unwrap();
        let after = read_step(&self.store, NEXT_STEP).unwrap();
        assert!(after == state(NEXT_SEED), "the next save is not whole");
        (restores, left)
    }

    /// Everything is an hour older, so that it is no longer taken for work in progress.
    fn age(&self) {
        if let Some((server, bucket)) = &self.bucket {
            return server.age(bucket, HOUR);
        }
        let before = std::time::SystemTime::now() - HOUR;
        for file in walk(self.path()).into_keys() {
            let file = std::fs::File::options().write(true).open(self.path().join(file)).unwrap();
            file.set_modified(before).unwrap();
        }
    }

    /// What lies around that no committed step names, in words.
    pub fn leftovers(&self) -> String {
        let listed = block_on(self.store.list("")).unwrap().unwrap();
        let files: Vec<String> = listed.into_iter().map(|file| file.path).collect();
        let mut named = Vec::new();
        for step in [0, OLD_STEP, NEW_STEP, NEXT_STEP] {
            let folder = step_dir(step).unwrap();
            let path = join(&folder, MANIFEST);
            let Some(bytes) = read_all(&self.store, &path) else { continue };
            named.push(path.clone());
            if let Ok(manifest) = Manifest::decode(&bytes, &path) {
                named.extend(manifest.files.iter().map(|file| join(&folder, &file.path)));
            }
        }
        leftovers(&files, &named)
    }
}

fn read_all(store: &Arc<dyn Store>, path: &str) -> Option<bytes::Bytes> {
    block_on(async {
        let file = store.open(path, drivetrain::storage::OpenOptions::default()).await.ok()?;
        let size = file.meta().size_bytes as usize;
        let buf = file.read_at(0, drivetrain::memory::Buffer::heap(size)).await.ok()?;
        Some(bytes::Bytes::copy_from_slice(&buf))
    })
    .unwrap()
}

/// The state of a seed: a matrix, a small vector and a scalar, and for one seed a large tensor.
pub fn state(seed: u64) -> Vec<Owned> {
    let mut tensors = vec![
        Owned::whole("w", &[300, 7], seed),
        Owned::whole("b", &[5], seed + 100),
        Owned::whole("s", &[], seed + 200),
    ];
    if seed == LARGE_SEED {
        tensors.push(Owned::whole("large", &[LARGE_BYTES], seed + 300));
    }
    tensors
}

pub fn save(ckpt: &Checkpointer, step: i64, seed: u64, overwrite: bool) -> Result<i64, Arc<Error>> {
    let options = SaveOptions { overwrite, blocking: true, ..SaveOptions::default() };
    save_with(ckpt, step, &state(seed), &format!("{{\"seed\":{seed}}}"), options)
}

pub fn read_step(store: &Arc<dyn Store>, step: i64) -> Result<Vec<Owned>, Error> {
    let open = open_step(store, step)?;
    // The state says which tensors to ask for; that their bytes are right, it cannot say.
    let text = &open.manifest().state_json;
    let mut found = state(seed_of(text));
    for tensor in &mut found {
        tensor.data.fill(0xAA);
    }
    let mut targets = Vec::new();
    for tensor in &mut found {
        targets.push(Target {
            path: tensor.path.clone(),
            dtype: "U8".into(),
            shape: tensor.shape.clone(),
            rect: tensor.rect.clone(),
            data: &mut tensor.data,
        });
    }
    open.read_into(targets)?;
    Ok(found)
}

fn seed_of(state_json: &str) -> u64 {
    let value: serde_json::Value = serde_json::from_str(state_json).unwrap();
    value["seed"].as_u64().unwrap()
}

/// What a restore finds: the newest step that is good, as `Checkpointer.restore` looks for it.
pub fn restored(store: &Arc<dyn Store>) -> String {
    let mut skipped = "";
    for (step, reason) in candidates(store).unwrap() {
        let read = match reason {
            Some(_) => None,
            None => match read_step(store, step) {
                Ok(tensors) => Some(tensors),
                Err(Error::Corrupt { .. }) => None,
                Err(e) => return format!("NEITHER: step {step}: {e}"),
            },
        };
        match read {
            None => {
                let problems = verify_step(store, step).unwrap();
                assert!(!problems.is_empty(), "a step is skipped that verify finds good");
                skipped = "; the new one is skipped";
            }
            Some(tensors) if tensors == state(OLD_SEED) => return format!("old{skipped}"),
            Some(tensors) if tensors == state(NEW_SEED) || tensors == state(LARGE_SEED) => {
                return format!("new{skipped}");
            }
            Some(_) => return format!("NEITHER: step {step} holds something else"),
        }
    }
    "NEITHER: no good step".into()
}

/// What a caller was told, sorted by what it can do; `thing` is what must be named in it.
pub fn told(saved: &Result<i64, Arc<Error>>, named: &str) -> String {
    let Err(error) = saved else { return "committed".into() };
    let text = error.to_string();
    let kind = match &**error {
        Error::Io { .. } if text.contains("outcome unknown") => {
            return "outcome unknown: `ckpt ls` tells".into();
        }
        Error::NoSpace { .. } => "no space: bytes needed and left",
        Error::Timeout { .. } => "no answer in time",
        Error::AlreadyExists { .. } => "already there",
        Error::Corrupt { .. } => "damaged: offset, expected, found",
        Error::Changed { .. } => "changed meanwhile",
        Error::Peer { .. } => "a rank failed",
        Error::NotFound { .. } => "not there",
        _ => "I/O error",
    };
    let named = if text.contains(named) { "names it" } else { "does not name it" };
    format!("{kind}; {named}")
}

/// A caller that was told of success has the new step, one that was told of failure the old one.
pub fn honest(saved: &Result<i64, Arc<Error>>, restores: &str) -> bool {
    match saved {
        Ok(_) => restores.starts_with("new"),
        Err(e) => e.to_string().contains("outcome unknown") || restores.starts_with("old"),
    }
}
