//! Space for all files of a save, before the first byte of any is written.
//!
//! A save of several files must not find out at the last one that the disk is full.

use std::collections::VecDeque;

use super::write::create;
use super::{Folders, Job};
use crate::checkpoint::layout::join;
use crate::error::{Error, Result};
use crate::storage::{Store, WriteOptions, Writer};

/// A file whose space is reserved, and nothing of it written.
pub struct Made {
    path: String,
    /// Writes it from its start.
    pub writer: Box<dyn Writer>,
}

/// Creates all files of a job in their full size. After an error none of them stays.
pub async fn reserve(store: &dyn Store, folders: &Folders, job: &Job) -> Result<VecDeque<Made>> {
    let mut made = VecDeque::new();
    for (i, image) in job.images.iter().enumerate() {
        let path = join(&folders.path, &image.name);
        let options = WriteOptions { direct: true, size_bytes: Some(image.size_bytes) };
        match create(store, &path, options).await {
            Ok(writer) => made.push_back(Made { path, writer }),
            Err(error) => {
                give_back(store, made).await;
                let rest = job.images[i..].iter().map(|image| image.size_bytes).sum();
                return Err(needing(error, rest));
            }
        }
    }
    Ok(made)
}

/// What is missing is room for all files that are not there yet.
fn needing(error: Error, rest_bytes: u64) -> Error {
    match error {
        Error::NoSpace { path, need_bytes, have_bytes } => {
            Error::NoSpace { path, need_bytes: need_bytes.max(rest_bytes), have_bytes }
        }
        other => other,
    }
}

/// Removes files that will not be written.
pub async fn give_back(store: &dyn Store, made: VecDeque<Made>) {
    for Made { path, writer } in made {
        let _ = writer.abort().await;
        let _ = store.delete(&path).await;
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::{Place, run};
    use super::*;
    use crate::checkpoint::layout::{FileImage, RollLimits, plan_files};
    use crate::checkpoint::meet::{MemoryMeet, Room, no_tick};
    use crate::checkpoint::plan::{TensorIn, plan};
    use crate::checkpoint::read::verify_step;
    use crate::checkpoint::rects::Rect;
    use crate::checkpoint::retain::{Keep, Retention};
    use crate::checkpoint::snapshot::{DATA_START, Staged, image_starts, stage};
    use crate::memory::Slot;
    use crate::runtime::block_on;
    use crate::storage::fault::{FaultScript, FaultStore};
    use crate::storage::local::{LocalOptions, LocalStore};

    /// A staged save of three files, one tensor in each.
    fn job() -> Job {
        let data: Vec<u8> = (0..50_000_u32).map(|i| (i * 7) as u8).collect();
        let tensors: Vec<_> = (0..3)
            .map(|i| {
                let shape = vec![10_000 * (i + 1)];
                TensorIn {
                    path: format!("[\"w{i}\"]"),
                    dtype: "U8".into(),
                    rect: Rect::whole(&shape),
                    data: &data[..shape[0] as usize],
                    shape,
                    replicas: Vec::new(),
                    pin_rank: None,
                }
            })
            .collect();
        let plan = plan(0, 1, &tensors).unwrap();
        let limits = RollLimits { entries_max: 3, ..RollLimits::default() };
        let images = plan_files(0, &plan.pieces, limits).unwrap();
        assert!(images.len() > 1, "{}", images.len());
        let (_, bytes) = image_starts(&images);
        let mut slot = Slot::private(DATA_START + bytes).unwrap();
        let sums = stage(&mut slot, &images, &plan.pieces, &tensors).unwrap();
        Job {
            step: 1,
            images: Arc::new(images),
            pieces: Arc::new(plan.pieces),
            groups: Arc::new(plan.groups.into_iter().collect()),
            staged: Some(Staged::new(slot, sums)),
            state_json: "{}".into(),
            per_rank_json: "{}".into(),
            ..Job::default()
        }
    }

    fn place(root: &Path, script: &str) -> (Place, Arc<FaultStore>) {
        let local = Arc::new(LocalStore::new(root, LocalOptions::default()).unwrap());
        let store = Arc::new(FaultStore::new(local, FaultScript::parse(script).unwrap()));
        let keep = Arc::new(Retention::new(store.as_ref(), Keep::default()).unwrap());
        let meet = Arc::new(MemoryMeet::default());
        let room = Room::new(meet, "r".into(), 0, 1, Duration::from_mins(1));
        (Place { store: Arc::clone(&store) as _, room, keep, pack: None }, store)
    }

    #[test]
    fn all_files_are_there_in_full_size_before_the_first_byte() {
        let dir = tempfile::tempdir().unwrap();
        let (place, store) = place(dir.path(), "");
        let job = job();
        run(&place, &job, &mut no_tick).unwrap();
        let of_files = store.history().into_iter().filter(|op| op.path.contains("rank-"));
        let names: Vec<_> = of_files.map(|op| op.op).collect();
        let first = names.iter().position(|op| *op == "write").unwrap();
        assert_eq!(names.iter().filter(|op| **op == "create").count(), job.images.len());
        assert!(names[first..].iter().all(|op| *op != "create"), "{names:?}");
        assert!(verify_step(&place.store, 1).unwrap().is_empty());
    }

    #[test]
    fn a_failure_at_any_file_leaves_none() {
        let files = job().images.len();
        for op in ["create", "write", "finish"] {
            for number in 1..=files {
                let dir = tempfile::tempdir().unwrap();
                let (place, _) = place(dir.path(), &format!("eio@{op}:rank-:{number}"));
                run(&place, &job(), &mut no_tick).unwrap_err();
                let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
                assert!(left.is_empty(), "{op} {number}: {left:?}");
            }
        }
    }

    #[test]
    fn a_file_that_has_no_room_is_told_with_all_that_are_to_come() {
        let dir = tempfile::tempdir().unwrap();
        let (place, store) = place(dir.path(), "");
        let folders = Folders::new(1, 2, 3).unwrap();
        let image = |name: &str, size_bytes| FileImage {
            name: name.into(),
            header: Vec::new(),
            entries: Vec::new(),
            size_bytes,
        };
        let job = |sizes: [u64; 3]| {
            let images = ["a", "b", "c"].into_iter().zip(sizes).map(|(n, size)| image(n, size));
            Job { images: Arc::new(images.collect()), ..Job::default() }
        };
        let made = block_on(reserve(store.as_ref(), &folders, &job([5000, 70_000, 1]))).unwrap();
        let made = made.unwrap();
        let sizes: Vec<_> = ["a", "b", "c"]
            .map(|n| dir.path().join(&folders.path).join(n).metadata().unwrap().len())
            .into();
        assert_eq!(sizes, [5000, 70_000, 1]);
        block_on(give_back(place.store.as_ref(), made)).unwrap();
        // No file system of a test has an exbibyte left.
        let large = 1 << 60;
        let failed = block_on(reserve(store.as_ref(), &folders, &job([5000, large, 9]))).unwrap();
        match failed.map(|_| ()).unwrap_err() {
            Error::NoSpace { need_bytes, have_bytes, path } => {
                assert_eq!(need_bytes, large + 9);
                assert!(have_bytes < large && path.ends_with('b'), "{have_bytes} {path}");
            }
            other => panic!("{other}"),
        }
        assert_eq!(std::fs::read_dir(dir.path().join(&folders.path)).unwrap().count(), 0);
    }
}
