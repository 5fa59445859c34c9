//! What only rank 0 does: gather, judge, publish, tell, and sweep afterwards.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::drive::{Driver, Trouble};
use super::judge::{self, Doubt};
use super::machine::{Action, Event, Word};
use super::messages::{Details, Failure, Part, Verdict, decode, decode_part, encode};
use super::pack::{check_held, held_steps, hold, let_go};
use super::publish::{
    committed_already, existing, manifest_bytes, manifest_path, may_land, write_table,
};
use super::write::sync_file;
use super::{Folders, Job, Place};
use crate::checkpoint::layout::{FileRecord, Manifest, Referred, join};
use crate::checkpoint::meet::no_tick;
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::Version;

/// How long rank 0 waits for the others to have read the verdict before it leaves the keys.
const ACK_WAIT: Duration = Duration::from_secs(10);
/// How long an explanation may take: it is a message of what a rank already has in memory.
const EXPLAIN_WAIT: Duration = Duration::from_mins(1);

/// What rank 0 holds between its actions.
#[derive(Default)]
pub struct Leading {
    /// What every rank wrote, in rank order.
    parts: Vec<Part>,
    /// The state of all stages together, if there are several.
    united: Option<String>,
    /// Ranks that are asked for details.
    ask: Vec<u32>,
    /// The table, once it is durable.
    pub table: Option<FileRecord>,
    /// Steps that were marked as referred to by this save.
    held: Vec<i64>,
    /// The manifest that is to be replaced.
    old: Option<(Version, Option<Manifest>)>,
}

type Done = Result<Event, Trouble>;

impl Driver<'_> {
    /// Carries out an action of rank 0; `explained` if the first word asked for details.
    pub fn lead(&mut self, action: Action, explained: bool) -> Done {
        match action {
            Action::Join => self.join_as_lead()?,
            Action::Gather => self.gather()?,
            Action::Judge => return self.judge(),
            Action::GatherDetails => self.gather_details()?,
            Action::WaitVisible => self.wait_visible()?,
            Action::Hold => self.hold()?,
            Action::CheckHeld => {
                let referred = self.referred();
                block_on(check_held(self.place.store.as_ref(), &referred))??;
            }
            Action::WriteTable => {
                let store = self.place.store.as_ref();
                let table = write_table(store, &self.folders, &self.leading.parts);
                self.open = Some(block_on(table)??);
            }
            Action::SyncTable => {
                let sync = sync_file(self.place.store.as_ref(), self.opened()?);
                self.leading.table = block_on(sync)??.0;
            }
            Action::LookOld => {
                let path = manifest_path(&self.folders);
                self.leading.old = block_on(existing(self.place.store.as_ref(), &path))??;
            }
            Action::PutManifest => return Ok(self.put_manifest()),
            Action::Tell(word) => self.tell(word, explained)?,
            Action::Retire => {
                let replaced = self.leading.old.take().and_then(|(_, old)| old);
                self.place.keep.note(self.job.step, replaced);
                self.let_go();
            }
            other => return self.common(other),
        }
        Ok(Event::Done)
    }

    fn join_as_lead(&mut self) -> Result<()> {
        let room = &self.place.room;
        let joined = room.join(room.deadline(), self.tick);
        // The session is there even if not all ranks came: those that did will hear of it.
        let session = room.session_id().unwrap_or_default();
        self.folders = Folders::new(self.job.step, session, self.job.op)?;
        joined.map(|_| self.job.joined(session))
    }

    /// Collects the other ranks' parts.
    fn gather(&mut self) -> Result<(), Trouble> {
        let room = &self.place.room;
        let meeting = self.job.meeting();
        let others: Vec<u32> = (1..room.world_size).collect();
        let mut found = room.gather(&meeting, "part", &others, room.deadline(), self.tick)?;
        for rank in found.keys() {
            room.remove(&meeting, &format!("part-{rank}"))?;
        }
        let mut missing = Vec::new();
        for rank in others {
            match found.remove(&rank) {
                Some(message) => {
                    let part = decode_part(rank, &message)?.map_err(Trouble::Shared)?;
                    self.leading.parts.push(part);
                }
                None => missing.push(rank),
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let waited_ms = room.timeout.as_millis() as u64;
        let doing = format!("writing its part of step {}", self.job.step);
        let words = room.words.last(&missing);
        Err(Trouble::Shared(Failure::Missing { doing, ranks: missing, waited_ms, words }))
    }

    fn judge(&mut self) -> Done {
        self.packed.tell(&mut self.written);
        // The files' names stay with the driver, which removes them if the save fails.
        let own = Part::of(0, self.job, self.written.files.clone(), &mut self.written);
        self.leading.parts.insert(0, own);
        match judge::judge(&self.leading.parts) {
            Ok(()) => {
                self.leading.united =
                    judge::united(&self.leading.parts).map_err(Trouble::Shared)?;
                Ok(Event::Done)
            }
            Err(Doubt::Certain(failure)) => Err(Trouble::Shared(failure)),
            Err(Doubt::Ask(ranks)) => {
                self.leading.ask = ranks.into_iter().filter(|&r| r != 0).collect();
                Ok(Event::Differ)
            }
        }
    }

    /// Names the difference, as far as the asked ranks answer.
    fn gather_details(&mut self) -> Result<(), Trouble> {
        let room = &self.place.room;
        let meeting = self.job.meeting();
        let deadline = (Instant::now() + EXPLAIN_WAIT).min(room.deadline());
        let mut details = BTreeMap::from([(0, Details::of(self.job))]);
        let ask = &self.leading.ask;
        for (rank, message) in room.gather(&meeting, "details", ask, deadline, self.tick)? {
            room.remove(&meeting, &format!("details-{rank}"))?;
            details.insert(rank, decode(rank, &message)?);
        }
        Err(Trouble::Shared(judge::difference(&self.leading.parts, &details)))
    }

    fn wait_visible(&self) -> Result<()> {
        let foreign = self.leading.parts.iter().skip(1).flat_map(|p| &p.head.files);
        block_on(wait_visible(self.place, &self.folders, foreign))?
    }

    /// Files of other steps that chunks of any rank lie in, each once, in order.
    fn referred(&self) -> Vec<Referred> {
        let all = self.leading.parts.iter().flat_map(|p| &p.head.referred);
        let unique: BTreeMap<_, _> = all.map(|r| ((r.step, &r.file.path), r)).collect();
        unique.into_values().cloned().collect()
    }

    /// Marks the steps that are referred to, so that nobody removes them meanwhile.
    fn hold(&mut self) -> Result<()> {
        for step in held_steps(&self.referred()) {
            self.leading.held.push(step);
            block_on(hold(self.place.store.as_ref(), step, &self.folders.attempt))??;
        }
        Ok(())
    }

    /// Takes the marks away: the manifest says it now, or never will.
    pub fn let_go(&mut self) {
        for step in std::mem::take(&mut self.leading.held) {
            let gone = let_go(self.place.store.as_ref(), step, &self.folders.attempt);
            if let Err(error) | Ok(Err(error)) = block_on(gone) {
                tracing::debug!(%error, step, "a mark of a reference stays until it is old");
            }
        }
    }

    /// The commit itself.
    fn put_manifest(&mut self) -> Event {
        let store = self.place.store.as_ref();
        let path = manifest_path(&self.folders);
        let table = self.leading.table.clone();
        let (place, folders, parts) = (self.place, &self.folders, &self.leading.parts);
        let referred = self.referred();
        let put = table
            .ok_or_else(|| Error::Closed { what: "the table of the save".into() })
            .and_then(|table| {
                let united = self.leading.united.as_deref();
                manifest_bytes(place, folders, self.job, parts, united, table, referred)
            })
            .and_then(|bytes| match &self.leading.old {
                Some((version, _)) => block_on(store.replace(&path, bytes, version))?,
                None => block_on(store.put_new(&path, bytes))?,
            });
        let Err(error) = put else { return Event::Done };
        let unclear = may_land(&error);
        let error = match error {
            Error::AlreadyExists { .. } => committed_already(&path),
            other => other,
        };
        let failed = self.failed(error.into());
        if unclear { Event::Unknown } else { failed }
    }

    fn tell(&mut self, word: Word, explained: bool) -> Result<()> {
        let why = || match &self.trouble {
            Some(trouble) => trouble.failure(0),
            None => Failure::of(0, &Error::Closed { what: "the save".into() }),
        };
        let verdict = match word {
            Word::Committed => Verdict::Committed,
            Word::Failed => Verdict::Failed(why()),
            Word::Unsure => Verdict::Unsure(self.unsure()),
            Word::Explain => Verdict::Explain(self.leading.ask.clone()),
        };
        let name = if explained { "final" } else { "verdict" };
        let told =
            encode(&verdict).and_then(|text| self.place.room.put(&self.job.meeting(), name, &text));
        if let Err(error) = &told {
            let step = self.job.step;
            tracing::warn!(%error, step, "the other ranks could not be told the outcome");
        }
        told
    }
}

/// Waits until this rank sees the other ranks' files in their full size.
async fn wait_visible(
    place: &Place,
    folders: &Folders,
    files: impl Iterator<Item = &FileRecord>,
) -> Result<()> {
    let deadline = Instant::now() + super::VISIBLE_WAIT.min(place.room.timeout);
    for file in files {
        let path = join(&folders.step, &file.path);
        loop {
            let seen = match place.store.head(&path).await {
                Ok(meta) if meta.size_bytes == file.size_bytes => break,
                Ok(meta) => format!("{} bytes", meta.size_bytes),
                Err(Error::NotFound { .. }) => "nothing".into(),
                Err(e) => return Err(e),
            };
            if Instant::now() >= deadline {
                return Err(Error::Peer {
                    rank: file.rank,
                    what: format!(
                        "wrote {path} with {} bytes, but rank 0 sees {seen}: the checkpoint root \
                         must be one folder shared by all ranks",
                        file.size_bytes
                    ),
                });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(())
}

/// A finished save whose meeting can be cleared away.
#[derive(Debug, Clone, Copy)]
pub struct Tidy {
    op: u64,
}

impl Tidy {
    /// Of this job.
    pub fn of(job: &Job) -> Self {
        Self { op: job.op }
    }
}

/// Deletes the meeting's keys once every rank has read the verdict; called when the caller of the
/// save already knows the outcome.
pub fn tidy(place: &Place, tidy: Tidy) -> Result<()> {
    let room = &place.room;
    if room.rank != 0 || room.world_size == 1 {
        return Ok(());
    }
    let meeting = super::meeting(tidy.op);
    let others: Vec<u32> = (1..room.world_size).collect();
    let deadline = Instant::now() + ACK_WAIT.min(room.timeout);
    let acks = room.gather(&meeting, "ack", &others, deadline, &mut no_tick)?;
    if acks.len() == others.len() {
        for rank in others {
            room.remove(&meeting, &format!("ack-{rank}"))?;
            room.remove(&meeting, &format!("part-{rank}"))?;
        }
        room.remove(&meeting, "verdict")?;
        room.remove(&meeting, "final")?;
    }
    Ok(())
}
