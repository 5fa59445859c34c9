//! A save on a rank other than 0: write, tell, wait for the verdict.

use std::time::Instant;

use super::messages::{Details, Failure, Part, Verdict, decode, encode, encode_part};
use super::write::{remove_files, write_images};
use super::{Folders, Job, Place};
use crate::checkpoint::io::read_all;
use crate::checkpoint::layout::{MANIFEST, Manifest, join};
use crate::checkpoint::meet::{Tick, no_tick};
use crate::error::{Error, Result};
use crate::runtime::block_on;

pub fn run(place: &Place, job: &Job, tick: Tick<'_>) -> Result<()> {
    let room = &place.room;
    let session = room.join(room.verdict_deadline(), tick)?;
    job.joined(session);
    let folders = Folders::new(job.step, session, job.op)?;
    let meeting = job.meeting();
    let mut files = Vec::new();
    // Rank 0 may have refused already; then writing would be for nothing.
    let early = room.wait(&meeting, "verdict", Instant::now(), &mut no_tick)?;
    if early.is_none() {
        let part = write(place, job, &folders)?;
        if let Ok(part) = &part {
            files.clone_from(&part.head.files);
        }
        room.put(&meeting, &format!("part-{}", room.rank), &encode_part(&part)?)?;
    }
    let verdict = wait_verdict(place, job, tick)?;
    let result = match verdict {
        Some(Verdict::Committed) => Ok(()),
        Some(Verdict::Failed(failure)) => {
            block_on(remove_files(place.store.as_ref(), &folders, &files))?;
            Err(failure.into_error())
        }
        Some(Verdict::Unsure(failure)) => Err(failure.into_error()),
        Some(Verdict::Explain(_)) | None => unheard(place, &folders),
    };
    // The receipt only lets rank 0 clear its keys away: without it the outcome is still known.
    if let Err(error) = room.put(&meeting, &format!("ack-{}", room.rank), b"") {
        tracing::debug!(%error, step = job.step, "the verdict could not be acknowledged");
    }
    result
}

fn write(place: &Place, job: &Job, folders: &Folders) -> Result<Result<Part, Failure>> {
    let rank = place.room.rank;
    let written = block_on(write_images(place.store.as_ref(), folders, job, rank))?;
    Ok(match written {
        Ok(written) => Ok(Part::of(job, written.files, written.chunks)),
        Err(e) => Err(Failure::of(rank, &e)),
    })
}

fn wait_verdict(place: &Place, job: &Job, tick: Tick<'_>) -> Result<Option<Verdict>> {
    let room = &place.room;
    let meeting = job.meeting();
    let Some(first) = room.wait(&meeting, "verdict", room.verdict_deadline(), tick)? else {
        return Ok(None);
    };
    let verdict: Verdict = decode(0, &first)?;
    let Verdict::Explain(ranks) = &verdict else { return Ok(Some(verdict)) };
    if ranks.contains(&room.rank) {
        let details = encode(&Details::of(job))?;
        room.put(&meeting, &format!("details-{}", room.rank), &details)?;
    }
    let last = room.wait(&meeting, "final", room.verdict_deadline(), tick)?;
    last.map(|message| decode(0, &message)).transpose()
}

/// Rank 0 said nothing. It may have died before or after the commit: the manifest tells. Without
/// one the files stay, since rank 0 might be slow and commit yet.
fn unheard(place: &Place, folders: &Folders) -> Result<()> {
    let path = join(&folders.step, MANIFEST);
    let found = block_on(read_all(place.store.as_ref(), &path))?;
    let manifest = found.and_then(|bytes| Manifest::decode(&bytes, &path));
    if manifest.is_ok_and(|m| m.attempt == folders.attempt) {
        return Ok(());
    }
    Err(Error::Timeout {
        what: "the verdict of rank 0 on the commit".into(),
        waited: place.room.timeout,
        advice: "look at the log of rank 0: it may be dead; the step was not committed".into(),
    })
}
