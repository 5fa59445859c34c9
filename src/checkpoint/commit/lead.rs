//! A save on rank 0: write, gather, judge, publish, tell.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::judge::{self, Doubt};
use super::messages::{Details, Failure, Part, Verdict, decode, decode_part, encode};
use super::publish::{Published, committed_already, may_remove, publish};
use super::write::{remove_files, write_images};
use super::{Folders, Job, Place};
use crate::checkpoint::layout::{FileRecord, MANIFEST, join};
use crate::checkpoint::meet::{Tick, no_tick};
use crate::error::{Error, Result};
use crate::runtime::block_on;

/// How long rank 0 waits for the others to have read the verdict before it leaves the keys.
const ACK_WAIT: Duration = Duration::from_secs(10);
/// How long an explanation may take: it is a message of what a rank already has in memory.
const EXPLAIN_WAIT: Duration = Duration::from_mins(1);

pub fn run(place: &Place, job: &Job, tick: Tick<'_>) -> Result<()> {
    let room = &place.room;
    let deadline = room.deadline();
    let joined = room.join(deadline, tick);
    let session = room.session_id().unwrap_or_default();
    if joined.is_ok() {
        job.joined(session);
    }
    let folders = Folders::new(job.step, session, job.op)?;
    let outcome = match joined {
        Ok(_) => attempt(place, job, &folders, tick),
        Err(e) => Err(e.into()),
    };
    if room.world_size == 1 {
        let done = outcome.map_err(Refusal::into_error)?;
        place.keep.note(job.step, done.replaced);
        return Ok(());
    }
    match outcome {
        Ok(done) => {
            tell(place, job, "verdict", &Verdict::Committed);
            place.keep.note(job.step, done.replaced);
            Ok(())
        }
        Err(refusal) => {
            let explained = matches!(refusal, Refusal::Explained(_));
            let name = if explained { "final" } else { "verdict" };
            let removed = may_remove_after(&refusal);
            let failure = refusal.into_failure();
            let told = failure.clone();
            let verdict = if removed { Verdict::Failed(told) } else { Verdict::Unsure(told) };
            tell(place, job, name, &verdict);
            Err(failure.into_error())
        }
    }
}

/// Tells the other ranks. The outcome is what it is even if they cannot be told: they look at the
/// manifest themselves when they hear nothing, so this must not turn a commit into an error or
/// hide why there was none.
fn tell(place: &Place, job: &Job, name: &str, verdict: &Verdict) {
    let told = encode(verdict).and_then(|text| place.room.put(&job.meeting(), name, &text));
    if let Err(error) = told {
        tracing::warn!(%error, step = job.step, "the other ranks could not be told the outcome");
    }
}

/// Why a save was refused.
enum Refusal {
    /// An error of this rank, with its own type.
    Own(Error),
    /// A failure that all ranks raise.
    Shared(Failure),
    /// The same, after an explanation was asked for.
    Explained(Failure),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Own(error)
    }
}

impl Refusal {
    fn into_failure(self) -> Failure {
        match self {
            Self::Own(Error::Timeout { what, waited, advice: _ }) => {
                Failure::Late { what, waited_ms: waited.as_millis() as u64 }
            }
            Self::Own(error) => Failure::of(0, &error),
            Self::Shared(failure) | Self::Explained(failure) => failure,
        }
    }

    fn into_error(self) -> Error {
        match self {
            Self::Own(error) => error,
            Self::Shared(failure) | Self::Explained(failure) => failure.into_error(),
        }
    }
}

fn attempt(
    place: &Place,
    job: &Job,
    folders: &Folders,
    tick: Tick<'_>,
) -> Result<Published, Refusal> {
    let store = place.store.as_ref();
    if !job.overwrite {
        let path = join(&folders.step, MANIFEST);
        match block_on(store.head(&path))? {
            Ok(_) => return Err(committed_already(&path).into()),
            Err(Error::NotFound { .. }) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let written = block_on(write_images(store, folders, job, 0))??;
    let files = written.files.clone();
    let own = Part::of(job, written.files, written.chunks);
    let result = meet_and_publish(place, job, folders, own, tick);
    if let Err(refusal) = &result
        && may_remove_after(refusal)
    {
        block_on(remove_files(store, folders, &files))?;
    }
    result
}

fn may_remove_after(refusal: &Refusal) -> bool {
    match refusal {
        Refusal::Own(error) => may_remove(error),
        _ => true,
    }
}

fn meet_and_publish(
    place: &Place,
    job: &Job,
    folders: &Folders,
    own: Part,
    tick: Tick<'_>,
) -> Result<Published, Refusal> {
    let parts = gather(place, job, own, tick)?;
    match judge::judge(&parts) {
        Ok(()) => {}
        Err(Doubt::Certain(failure)) => return Err(Refusal::Shared(failure)),
        Err(Doubt::Ask(ranks)) => return Err(explain(place, job, &parts, ranks, tick)?),
    }
    let foreign = parts.iter().skip(1).flat_map(|p| &p.head.files);
    block_on(wait_visible(place, folders, foreign))??;
    Ok(block_on(publish(place, folders, job, &parts))??)
}

/// All parts in rank order.
fn gather(place: &Place, job: &Job, own: Part, tick: Tick<'_>) -> Result<Vec<Part>, Refusal> {
    let room = &place.room;
    let meeting = job.meeting();
    let others: Vec<u32> = (1..room.world_size).collect();
    let mut found = room.gather(&meeting, "part", &others, room.deadline(), tick)?;
    for rank in found.keys() {
        room.remove(&meeting, &format!("part-{rank}"))?;
    }
    let mut parts = vec![own];
    let mut missing = Vec::new();
    for rank in others {
        match found.remove(&rank) {
            Some(message) => match decode_part(rank, &message)? {
                Ok(part) => parts.push(part),
                Err(failure) => return Err(Refusal::Shared(failure)),
            },
            None => missing.push(rank),
        }
    }
    if missing.is_empty() {
        return Ok(parts);
    }
    let waited_ms = room.timeout.as_millis() as u64;
    let doing = format!("writing its part of step {}", job.step);
    Err(Refusal::Shared(Failure::Missing { doing, ranks: missing, waited_ms }))
}

/// Asks the ranks that differ for what they have, and names the difference.
fn explain(
    place: &Place,
    job: &Job,
    parts: &[Part],
    ranks: Vec<u32>,
    tick: Tick<'_>,
) -> Result<Refusal> {
    let room = &place.room;
    let meeting = job.meeting();
    let others: Vec<u32> = ranks.iter().copied().filter(|&r| r != 0).collect();
    room.put(&meeting, "verdict", &encode(&Verdict::Explain(others.clone()))?)?;
    let deadline = (Instant::now() + EXPLAIN_WAIT).min(room.deadline());
    let mut details = BTreeMap::from([(0, Details::of(job))]);
    for (rank, message) in room.gather(&meeting, "details", &others, deadline, tick)? {
        room.remove(&meeting, &format!("details-{rank}"))?;
        details.insert(rank, decode(rank, &message)?);
    }
    Ok(Refusal::Explained(judge::difference(parts, &details)))
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
