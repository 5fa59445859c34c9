//! Snapshots that a killed process of this run left in shared memory: found, checked, taken over.
//!
//! A slot is only looked at while its lock is held, which its owner loses by dying, however it
//! dies. Nothing of it is believed before every checksum was computed again.

use parking_lot::Mutex;

use super::planned::{Groups, Layout};
use super::seal::{DATA_START, Head, Identity, Record, session};
use super::slots::{SlotPlace, Slots, Staged};
use super::{ImageSums, image_starts, split_sums};
use crate::checkpoint::layout::{FileImage, Piece, crc32c};
use crate::error::{Error, Result};
use crate::memory::Slot;

/// Slots looked at, at most: a run has two per rank and checkpointer.
const CLAIMS_MAX: usize = 64;

/// A snapshot of a process that is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// The step.
    pub step: i64,
    /// Number of the save call that staged it.
    pub op: u64,
    /// Session of the ranks that saved together; 0 if they had not met.
    pub session: u64,
    /// The rank that staged it, and how many there were.
    pub rank: u32,
    /// Ranks that saved together.
    pub world_size: u32,
    /// Why it cannot be adopted, if it cannot.
    pub problem: Option<String>,
}

/// A snapshot that was taken over, as parts of a save.
#[derive(Debug)]
pub struct Adopted {
    /// Whose it was.
    pub identity: Identity,
    /// Files.
    pub images: Vec<FileImage>,
    /// What they hold.
    pub pieces: Vec<Piece>,
    /// Replicated tensors.
    pub groups: Groups,
    /// State that is equal on all ranks: JSON.
    pub state_json: String,
    /// State of this rank: JSON.
    pub per_rank_json: String,
    /// The bytes.
    pub staged: Staged,
}

/// A slot whose lock this process holds.
#[derive(Debug)]
struct Claim {
    slot: Slot,
    left: Left,
}

/// Slots of this run and rank that killed processes left.
#[derive(Debug, Default)]
pub struct Claims {
    found: Mutex<Option<Vec<Claim>>>,
    /// Parts that could not be committed now: they stay for the next process, unless this one
    /// begins anew.
    kept: Mutex<Vec<Slot>>,
}

impl Claims {
    /// Takes hold of what is there, once, and says what it is. Empty and half-staged slots are
    /// removed.
    pub fn look(&self, place: &SlotPlace) -> Vec<Left> {
        let mut claims = self.found.lock();
        let claims = claims.get_or_insert_with(|| claim_all(place));
        claims.iter().map(|claim| claim.left.clone()).collect()
    }

    /// The same, and what is left of ranks that nobody is now. Only after all ranks have looked for
    /// their own: this one takes whatever no process holds.
    pub fn look_elsewhere(&self, place: &SlotPlace) -> Vec<Left> {
        self.look(place);
        let mut claims = self.found.lock();
        let claims = claims.get_or_insert_default();
        claims.extend(claim_files(place, &place.run_prefix(), CLAIMS_MAX - claims.len()));
        claims.iter().map(|claim| claim.left.clone()).collect()
    }

    /// Files of this run that no process holds, of any rank; some may be claimed in a moment.
    pub fn more(place: &SlotPlace) -> bool {
        let (run, own) = (place.run_prefix(), place.prefix(place.rank));
        let other = |name: &str| name.starts_with(&run) && !name.starts_with(&own);
        place.files().iter().any(|file| file.stale && other(&file.name))
    }

    /// Takes all good parts of a save over that this process holds, whoever staged them; what
    /// became of them is told by [`Claims::put_back`].
    pub fn take_parts(&self, key: (i64, u64, u64)) -> Result<Vec<Adopted>> {
        let mut claims = self.found.lock();
        let claims = claims.get_or_insert_default();
        let wanted = |l: &Left| (l.step, l.op, l.session) == key && l.problem.is_none();
        let mut parts = Vec::new();
        for claim in claims.extract_if(.., |claim| wanted(&claim.left)) {
            let found = Parts::read(&claim.slot)?;
            let staged = Staged::new(claim.slot, found.sums);
            parts.push(Adopted {
                identity: found.identity,
                images: found.images,
                pieces: found.pieces,
                groups: found.groups,
                state_json: found.state,
                per_rank_json: found.per_rank,
                staged,
            });
        }
        Ok(parts)
    }

    /// A part that was taken over: committed, or to be kept for the next process.
    pub fn put_back(&self, staged: Staged, keep: bool) {
        match staged.into_slot() {
            Some(slot) if keep => self.kept.lock().push(slot),
            Some(slot) => drop(slot.remove()),
            None => tracing::warn!("a staged snapshot is still being read: its memory stays"),
        }
    }

    /// Removes parts that were kept: this run goes on without them.
    pub fn forget(&self) {
        for slot in std::mem::take(&mut *self.kept.lock()) {
            let _ = slot.remove();
        }
    }

    /// Takes a good one over.
    pub fn take(&self, slots: &Slots, step: i64, op: u64) -> Result<Adopted> {
        let mut claims = self.found.lock();
        let claims = claims.get_or_insert_default();
        let good = |c: &Claim| (c.left.step, c.left.op) == (step, op) && c.left.problem.is_none();
        let Some(i) = claims.iter().position(good) else {
            return Err(Error::NotFound {
                what: format!("staged snapshot of step {step}"),
                advice: "it was adopted or dropped before".into(),
            });
        };
        let slot = claims.swap_remove(i).slot;
        let parts = Parts::read(&slot)?;
        let staged = slots.take_in(slot, parts.sums);
        let (identity, images, pieces) = (parts.identity, parts.images, parts.pieces);
        let (groups, state_json, per_rank_json) = (parts.groups, parts.state, parts.per_rank);
        Ok(Adopted { identity, images, pieces, groups, state_json, per_rank_json, staged })
    }

    /// Removes what was not taken over, found before or not.
    pub fn drop_all(&self, place: &SlotPlace) {
        let Some(found) = self.found.lock().replace(Vec::new()) else {
            return remove_stale(place, &place.prefix(place.rank));
        };
        for claim in found {
            let (step, why) = (claim.left.step, claim.left.problem);
            tracing::info!(step, ?why, "a staged snapshot of a killed process was dropped");
            let _ = claim.slot.remove();
        }
    }

    /// Removes slots of this run that no process holds: when all ranks have taken theirs over,
    /// those of ranks that are elsewhere now or no more.
    pub fn sweep(place: &SlotPlace) {
        remove_stale(place, &place.run_prefix());
    }
}

fn remove_stale(place: &SlotPlace, prefix: &str) {
    for file in place.files().iter().filter(|f| f.stale && f.name.starts_with(prefix)) {
        tracing::info!(file.name, "a slot of a killed process was removed");
        let _ = file.remove_if_stale(&place.folder);
    }
}

fn claim_all(place: &SlotPlace) -> Vec<Claim> {
    claim_files(place, &place.prefix(place.rank), CLAIMS_MAX)
}

fn claim_files(place: &SlotPlace, prefix: &str, most: usize) -> Vec<Claim> {
    let files = place.files();
    let stale = files.iter().filter(|f| f.stale && f.name.starts_with(prefix));
    stale.take(most).filter_map(|file| claim(place, &file.name)).collect()
}

/// Locks a slot and says what it is; `None` removes nothing but what no one can use.
fn claim(place: &SlotPlace, name: &str) -> Option<Claim> {
    // Somebody else was faster, or it is nothing that a process of this user made.
    let slot = Slot::open(&place.folder, name).ok()?;
    let head = match Head::read(&slot) {
        Ok(Some(head)) => head,
        Ok(None) => {
            tracing::info!(name, "a slot of a killed process holds no whole snapshot: removed");
            let _ = slot.remove();
            return None;
        }
        Err(error) => {
            tracing::warn!(%error, "a staged snapshot is left where it is");
            return None;
        }
    };
    let session = session(&slot).unwrap_or_default();
    let mut left = Left { step: head.step, op: 0, session, rank: 0, world_size: 0, problem: None };
    match Parts::read(&slot).and_then(|parts| parts.check(place, &slot).map(|()| parts)) {
        Ok(Parts { identity, .. }) => {
            (left.op, left.rank, left.world_size) =
                (identity.op, identity.rank, identity.world_size);
        }
        Err(error) => left.problem = Some(error.to_string()),
    }
    Some(Claim { slot, left })
}

/// A slot's record, read back.
struct Parts {
    identity: Identity,
    images: Vec<FileImage>,
    pieces: Vec<Piece>,
    groups: Groups,
    sums: ImageSums,
    state: String,
    per_rank: String,
}

impl Parts {
    fn read(slot: &Slot) -> Result<Self> {
        let head = Head::read(slot)?.ok_or_else(|| damaged(slot, "a seal", "none"))?;
        let data = slot.get(DATA_START..head.record_start).unwrap_or_default();
        let Record { identity, state, per_rank, layout, sums } = head.record(slot)?;
        let identity = serde_json::from_slice(identity)
            .map_err(|e| damaged(slot, "an identity", &e.to_string()))?;
        let (images, pieces, groups) = Layout::decode(layout)?.restore(data)?;
        let (words, _) = sums.as_chunks::<4>();
        let words: Vec<_> = words.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let sums = split_sums(&images, &words);
        let text = |bytes: &[u8]| {
            let text = std::str::from_utf8(bytes).map(ToString::to_string);
            text.map_err(|e| damaged(slot, "text", &e.to_string()))
        };
        let (state, per_rank) = (text(state)?, text(per_rank)?);
        Ok(Self { identity, images, pieces, groups, sums, state, per_rank })
    }

    /// Whether it belongs to this place, and whether every byte of it is what was staged.
    fn check(&self, place: &SlotPlace, slot: &Slot) -> Result<()> {
        let Identity { run, rank, world_size, .. } = &self.identity;
        if *run != place.run || rank >= world_size {
            let found = format!("run {run:?}, rank {rank} of {world_size}");
            return Err(damaged(slot, &format!("run {:?}", place.run), &found));
        }
        if place.root.as_ref() != Some(&self.identity.root) {
            let expected = "a snapshot of this checkpoint root";
            let found = match place.root {
                Some(_) => "one of an earlier folder of the same name",
                None => "one of any job: an object store needs run_id",
            };
            return Err(damaged(slot, expected, found));
        }
        let (starts, _) = image_starts(&self.images);
        for ((image, start), sums) in self.images.iter().zip(starts).zip(&self.sums) {
            check_image(slot, image, DATA_START + start, sums)?;
        }
        Ok(())
    }
}

fn check_image(slot: &Slot, image: &FileImage, base: usize, sums: &[u32]) -> Result<()> {
    let header = (0, image.header.len() as u64, "header");
    let entries = image.entries.iter().map(|e| (e.start, e.length, e.entry.as_str()));
    let parts: Vec<_> = std::iter::once(header).chain(entries).collect();
    if parts.len() != sums.len() {
        return Err(damaged(slot, "a checksum of each entry", &sums.len().to_string()));
    }
    for ((start, length, name), &sum) in parts.into_iter().zip(sums) {
        let rest = usize::try_from(start).ok().and_then(|at| slot.get(base..)?.get(at..));
        let bytes = rest.and_then(|rest| rest.get(..usize::try_from(length).ok()?));
        let bytes = bytes.ok_or_else(|| damaged(slot, name, "an entry beyond the slot"))?;
        let found = crc32c(bytes);
        if found != sum {
            let expected = format!("{} {name} with crc32c {sum:08x}", image.name);
            return Err(damaged(slot, &expected, &format!("{found:08x}")));
        }
    }
    Ok(())
}

fn damaged(slot: &Slot, expected: &str, found: &str) -> Error {
    let file = slot.path().map(|p| p.display().to_string()).unwrap_or_default();
    Error::corrupt(file, 0, expected, found, "the staged snapshot is not adopted")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::{Planned, seal, stage};
    use super::*;
    use crate::checkpoint::plan::TensorIn;
    use crate::checkpoint::rects::Rect;
    use crate::memory::{SlotFile, shm_slots};

    fn place(folder: &tempfile::TempDir, rank: u32, world_size: u32) -> SlotPlace {
        let shm = Some(folder.path().into());
        SlotPlace::new(shm, "root", Some("job"), rank, world_size).at_root(Some(folder.path()))
    }

    fn identity(place: &SlotPlace, step: i64) -> Identity {
        Identity {
            run: place.run.clone(),
            root: place.root.clone().unwrap(),
            rank: place.rank,
            world_size: place.world_size,
            step,
            op: 3,
            overwrite: false,
            metrics: [("loss".to_string(), Some(0.1)), ("odd".to_string(), None)].into(),
            stage: (place.world_size > 2).then_some(2),
        }
    }

    /// A staged slot, as a killed process leaves it.
    fn leave(place: &SlotPlace, identity: &Identity) {
        let slots = Slots::new(place.clone(), true);
        let data: Vec<u8> = (0..40_000_u32).map(|i| (i * 7) as u8).collect();
        let shape = vec![data.len() as i64];
        let tensor = TensorIn {
            path: "[\"w\"]".into(),
            dtype: "U8".into(),
            rect: Rect::whole(&shape),
            shape,
            data: &data,
            replicas: Vec::new(),
            pin_rank: None,
        };
        let tensors = [tensor];
        let planned = Planned::new(place.rank, place.world_size, &tensors, false).unwrap();
        let text = serde_json::to_vec(identity).unwrap();
        let mut record = Record {
            identity: &text,
            state: b"{\"n\":1}",
            per_rank: b"{}",
            layout: &planned.layout,
            sums: &[],
        };
        let soon = Instant::now() + Duration::from_secs(1);
        let mut slot = slots.acquire(1 << 20, soon).unwrap();
        let sums = stage(&mut slot, &planned.images, &planned.pieces, &tensors).unwrap();
        let words: Vec<u8> = sums.iter().flatten().flat_map(|sum| sum.to_le_bytes()).collect();
        record.sums = &words;
        seal(&mut slot, identity.step, DATA_START + planned.data_bytes, &record).unwrap();
    }

    fn files(folder: &tempfile::TempDir) -> Vec<SlotFile> {
        shm_slots(folder.path(), "").unwrap()
    }

    fn only_problem(place: &SlotPlace) -> String {
        let left = Claims::default().look(place);
        assert_eq!(left.len(), 1, "{left:?}");
        left[0].problem.clone().unwrap_or_default()
    }

    #[test]
    fn a_whole_snapshot_is_taken_over_with_all_that_a_commit_needs() {
        let folder = tempfile::tempdir().unwrap();
        let place = place(&folder, 1, 2);
        leave(&place, &identity(&place, 7));
        let (claims, slots) = (Claims::default(), Slots::new(place.clone(), true));
        let found = claims.look(&place);
        let left = Left { step: 7, op: 3, session: 0, rank: 1, world_size: 2, problem: None };
        assert_eq!(found, [left]);
        assert!(Claims::default().look(&place).is_empty(), "another process has it");
        assert!(claims.take(&slots, 8, 3).is_err());
        let adopted = claims.take(&slots, 7, 3).unwrap();
        assert_eq!(adopted.identity, identity(&place, 7));
        assert_eq!(
            (adopted.state_json.as_str(), adopted.per_rank_json.as_str()),
            ("{\"n\":1}", "{}")
        );
        assert_eq!((adopted.pieces.len(), adopted.pieces[0].length), (1, 40_000));
        assert_eq!(adopted.staged.sums(0).len(), 1 + adopted.images[0].entries.len());
        assert!(claims.take(&slots, 7, 3).is_err());
        slots.release(adopted.staged, false);
        drop(slots);
        assert!(files(&folder).is_empty());
    }

    #[test]
    fn what_does_not_belong_here_or_was_changed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let home = place(&folder, 0, 1);
        leave(&home, &identity(&home, 7));
        assert_eq!(only_problem(&home), "");
        let mut other_run = home.clone();
        other_run.run = "another".into();
        let claim = claim(&other_run, &files(&folder)[0].name).unwrap();
        assert!(claim.left.problem.unwrap().contains("run"));
        drop(claim.slot);
        let mut elsewhere = home.clone();
        elsewhere.root = Some("another".into());
        assert!(only_problem(&elsewhere).contains("earlier folder"));
        let name = files(&folder)[0].name.clone();
        for at in [DATA_START + 9, DATA_START + 4096 + 39_999] {
            let mut slot = Slot::open(folder.path(), &name).unwrap();
            slot[at] ^= 4;
            drop(slot);
            assert!(only_problem(&home).contains("crc32c"), "byte {at}");
            Slot::open(folder.path(), &name).unwrap()[at] ^= 4;
        }
        assert_eq!(only_problem(&home), "");
        let claims = Claims::default();
        claims.look(&home);
        claims.drop_all(&home);
        assert!(files(&folder).is_empty());
    }

    #[test]
    fn parts_of_another_world_are_taken_by_whoever_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let (zero, one) = (place(&folder, 0, 2), place(&folder, 1, 2));
        for rank in [&zero, &one] {
            leave(rank, &identity(rank, 7));
        }
        let alone = place(&folder, 0, 1);
        let claims = Claims::default();
        assert!(Claims::more(&alone));
        let own = claims.look(&alone);
        assert_eq!((own.len(), own[0].rank, own[0].world_size), (1, 0, 2));
        let all = claims.look_elsewhere(&alone);
        let ranks: Vec<_> = all.iter().map(|l| (l.rank, l.world_size, &l.problem)).collect();
        assert_eq!(ranks, [(0, 2, &None), (1, 2, &None)]);
        assert!(!Claims::more(&alone), "another process finds nothing more");
        assert!(Claims::default().look_elsewhere(&alone).is_empty());
        assert!(claims.take_parts((7, 3, 1)).unwrap().is_empty(), "of another session");
        let mut parts = claims.take_parts((7, 3, 0)).unwrap();
        parts.sort_by_key(|part| part.identity.rank);
        assert_eq!(parts.iter().map(|p| p.identity.rank).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(parts[1].identity, identity(&one, 7));
        for (part, keep) in parts.into_iter().zip([true, false]) {
            claims.put_back(part.staged, keep);
        }
        assert_eq!(files(&folder).len(), 1);
        claims.drop_all(&alone);
        assert_eq!(files(&folder).len(), 1, "it may still be committed by the next process");
        claims.forget();
        assert!(files(&folder).is_empty());
    }

    #[test]
    fn slots_in_use_and_those_of_others_are_left_alone_and_half_staged_ones_go() {
        let folder = tempfile::tempdir().unwrap();
        let (home, sibling) = (place(&folder, 0, 2), place(&folder, 1, 2));
        leave(&sibling, &identity(&sibling, 7));
        let slots = Slots::new(home.clone(), true);
        let soon = Instant::now() + Duration::from_secs(1);
        let live = slots.acquire(100, soon).unwrap();
        assert!(Claims::default().look(&home).is_empty());
        Claims::default().drop_all(&home);
        assert_eq!(files(&folder).len(), 2);
        drop(live);
        assert!(Claims::default().look(&home).is_empty());
        assert_eq!(files(&folder).len(), 1, "the half-staged slot was removed");
        Claims::sweep(&home);
        assert!(files(&folder).is_empty());
    }
}
