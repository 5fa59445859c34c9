//! The protocol: sessions, deadlines, values of any size, and cleaning up.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Meet, Words};
use crate::error::{Error, Result};

/// Called between looks; an error (Ctrl-C, closing) ends the wait.
pub type Tick<'a> = &'a mut dyn FnMut() -> Result<()>;

/// A tick that never ends a wait.
pub fn no_tick() -> Result<()> {
    Ok(())
}

/// Pause between looks: short at first, since ranks are usually close together.
const POLL_MIN: Duration = Duration::from_millis(1);
/// Longest pause: what it costs a rank that waits for a slow one.
const POLL_MAX: Duration = Duration::from_millis(50);
/// Value bytes per key; torch's TCPStore takes 8 MiB.
const PART_BYTES_MAX: usize = 4 << 20;
/// Parts of one value: 4 GiB in all, far above any table of chunks.
const PARTS_MAX: usize = 1024;
/// Ranks other than 0 wait this much longer for the verdict, so that rank 0, whose own deadline
/// ends first, can still tell them who was missing.
const VERDICT_GRACE_MIN: Duration = Duration::from_secs(1);
/// Upper end of the same.
const VERDICT_GRACE_MAX: Duration = Duration::from_secs(30);

/// What rank 0 knows of the others, or another rank of rank 0.
#[derive(Debug, Default)]
struct Session {
    id: Option<u64>,
    /// Rank 0: the greeting it answered last, per rank.
    answered: BTreeMap<u32, Vec<u8>>,
    /// Rank 0: ranks that took up the session.
    joined: BTreeSet<u32>,
}

/// Where the ranks of one checkpointer meet.
#[derive(Debug)]
pub struct Room {
    meet: Arc<dyn Meet>,
    prefix: String,
    nonce: u64,
    session: Mutex<Session>,
    /// What this rank is doing.
    pub words: Words,
    /// This rank.
    pub rank: u32,
    /// All ranks.
    pub world_size: u32,
    /// How long to wait for another rank.
    pub timeout: Duration,
}

/// A number that another process or an earlier run will not have drawn.
pub fn draw() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    RandomState::new().hash_one((now.map_or(0, |d| d.as_nanos()), std::process::id()))
}

impl Room {
    /// A room named `prefix`, which must be the same on all ranks and different per root.
    pub fn new(
        meet: Arc<dyn Meet>,
        prefix: String,
        rank: u32,
        world_size: u32,
        timeout: Duration,
    ) -> Self {
        let session = Mutex::default();
        let words = Words::new(Arc::clone(&meet), prefix.clone(), rank, world_size == 1);
        Self { meet, prefix, nonce: draw(), session, words, rank, world_size, timeout }
    }

    /// Another room of the same ranks' processes, in `meet` or where this one is: in it this
    /// process is `rank` of `world_size`.
    pub fn sibling(
        &self,
        name: &str,
        rank: u32,
        world_size: u32,
        meet: Option<Arc<dyn Meet>>,
    ) -> Self {
        let meet = meet.unwrap_or_else(|| Arc::clone(&self.meet));
        Self::new(meet, format!("{}-{name}", self.prefix), rank, world_size, self.timeout)
    }

    /// When to give up on other ranks.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// When to give up on rank 0's verdict.
    pub fn verdict_deadline(&self) -> Instant {
        self.deadline() + (self.timeout / 2).clamp(VERDICT_GRACE_MIN, VERDICT_GRACE_MAX)
    }

    /// The session number. Rank 0 draws it and answers greetings until every rank has taken it up;
    /// the others greet and wait for the answer to their own greeting.
    pub fn join(&self, deadline: Instant, tick: Tick<'_>) -> Result<u64> {
        let mut session = self.session.lock();
        if self.rank == 0 {
            let id = *session.id.get_or_insert_with(draw);
            self.words.set_session(id);
            let doing = self.words.begin("meeting the other ranks");
            let mut missing = Vec::new();
            poll(deadline, tick, || {
                missing = self.answer(&mut session, id)?;
                doing.waits_for(&missing);
                Ok(missing.is_empty().then_some(()))
            })?;
            return if missing.is_empty() {
                Ok(id)
            } else {
                Err(self.missing("joining", &missing))
            };
        }
        if let Some(id) = session.id {
            return Ok(id);
        }
        let id = self.greet(deadline, tick)?;
        self.words.set_session(id);
        session.id = Some(id);
        Ok(id)
    }

    /// Number of the session, if this rank has one yet.
    pub fn session_id(&self) -> Option<u64> {
        self.session.lock().id
    }

    /// The same without waiting for a meeting that is going on.
    pub fn session_now(&self) -> Option<u64> {
        self.session.try_lock().and_then(|session| session.id)
    }

    fn greet(&self, deadline: Instant, tick: Tick<'_>) -> Result<u64> {
        let own = |what: &str| format!("{}/{what}-{}", self.prefix, self.rank);
        let mine = format!("{:016x}", self.nonce);
        let _doing = self.words.begin("meeting rank 0");
        self.meet.set(&own("hello"), mine.as_bytes())?;
        let answer = poll(deadline, tick, || {
            let text = self.meet.try_get(&own("welcome"))?.and_then(|v| String::from_utf8(v).ok());
            let id = text.and_then(|t| t.strip_prefix(&mine).map(ToString::to_string));
            Ok(id.and_then(|id| u64::from_str_radix(&id, 16).ok()))
        })?;
        let id = answer.ok_or_else(|| self.missing("answering", &[0]))?;
        self.meet.delete(&own("welcome"))?;
        self.meet.delete(&own("hello"))?;
        self.meet.set(&own("joined"), format!("{id:016x}").as_bytes())?;
        Ok(id)
    }

    /// Rank 0: answers new greetings; returns the ranks that have not taken up the session.
    ///
    /// A greeting may be a killed run's: its answer carries the greeting's own nonce, so nobody
    /// takes it for theirs, and a live rank's new greeting differs and is answered again.
    fn answer(&self, session: &mut Session, id: u64) -> Result<Vec<u32>> {
        let key = |what: &str, rank: u32| format!("{}/{what}-{rank}", self.prefix);
        let session_text = format!("{id:016x}");
        let mut missing = Vec::new();
        for rank in 1..self.world_size {
            if session.joined.contains(&rank) {
                continue;
            }
            if self.meet.try_get(&key("joined", rank))?.as_deref() == Some(session_text.as_bytes())
            {
                self.meet.delete(&key("joined", rank))?;
                session.joined.insert(rank);
                continue;
            }
            missing.push(rank);
            let Some(hello) = self.meet.try_get(&key("hello", rank))? else { continue };
            if session.answered.get(&rank) != Some(&hello) {
                let welcome = [&hello, session_text.as_bytes()].concat();
                self.meet.set(&key("welcome", rank), &welcome)?;
                session.answered.insert(rank, hello);
            }
        }
        Ok(missing)
    }

    fn key(&self, op: &str, name: &str) -> String {
        let id = self.session_id().unwrap_or_default();
        format!("{}/{id:016x}/{op}/{name}", self.prefix)
    }

    /// Sets a value of any size.
    pub fn put(&self, op: &str, name: &str, value: &[u8]) -> Result<()> {
        let key = self.key(op, name);
        let parts: Vec<_> = value.chunks(PART_BYTES_MAX).collect();
        if parts.len() > PARTS_MAX {
            let most = format!("at most {} bytes", PART_BYTES_MAX * PARTS_MAX);
            return Err(Error::invalid("message between ranks", most, value.len()));
        }
        for (i, part) in parts.iter().enumerate() {
            self.meet.set(&format!("{key}.{i}"), part)?;
        }
        // The count comes last: who sees it can read all parts.
        self.meet.set(&key, parts.len().to_string().as_bytes())
    }

    fn look(&self, op: &str, name: &str) -> Result<Option<Vec<u8>>> {
        let key = self.key(op, name);
        let Some(count) = self.meet.try_get(&key)? else { return Ok(None) };
        let count = std::str::from_utf8(&count).ok().and_then(|c| c.parse::<usize>().ok());
        let mut value = Vec::new();
        for i in 0..count.unwrap_or_default().min(PARTS_MAX) {
            let Some(part) = self.meet.try_get(&format!("{key}.{i}"))? else { return Ok(None) };
            value.extend_from_slice(&part);
        }
        Ok(Some(value))
    }

    /// Waits for a value; `None` if the deadline comes first.
    pub fn wait(
        &self,
        op: &str,
        name: &str,
        deadline: Instant,
        tick: Tick<'_>,
    ) -> Result<Option<Vec<u8>>> {
        poll(deadline, tick, || self.look(op, name))
    }

    /// Waits for `name-<rank>` of each rank; those that did not come by the deadline are `None`.
    pub fn gather(
        &self,
        op: &str,
        name: &str,
        ranks: &[u32],
        deadline: Instant,
        tick: Tick<'_>,
    ) -> Result<BTreeMap<u32, Vec<u8>>> {
        let mut found = BTreeMap::new();
        let doing = self.words.begin("waiting for ranks");
        poll(deadline, tick, || {
            for &rank in ranks {
                if found.contains_key(&rank) {
                    continue;
                }
                if let Some(value) = self.look(op, &format!("{name}-{rank}"))? {
                    found.insert(rank, value);
                }
            }
            let missing = ranks.iter().copied().filter(|rank| !found.contains_key(rank));
            doing.waits_for(&missing.collect::<Vec<_>>());
            Ok((found.len() == ranks.len()).then_some(()))
        })?;
        Ok(found)
    }

    /// Deletes a value.
    pub fn remove(&self, op: &str, name: &str) -> Result<()> {
        let key = self.key(op, name);
        let count = self.meet.try_get(&key)?.unwrap_or_default();
        self.meet.delete(&key)?;
        let count = std::str::from_utf8(&count).ok().and_then(|c| c.parse::<usize>().ok());
        for i in 0..count.unwrap_or_default().min(PARTS_MAX) {
            self.meet.delete(&format!("{key}.{i}"))?;
        }
        Ok(())
    }

    /// Rank 0 gives the meeting place up.
    pub fn leave(&self) -> Result<()> {
        self.words.quiet();
        if self.rank == 0 && self.world_size > 1 { self.meet.leave() } else { Ok(()) }
    }

    /// The error that names ranks which did not come.
    pub fn missing(&self, doing: &str, ranks: &[u32]) -> Error {
        missing_error(doing, ranks, self.timeout, &self.words.last(ranks))
    }
}

/// Looks with growing pauses until there is something; `None` at the deadline.
fn poll<T>(
    deadline: Instant,
    tick: Tick<'_>,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    let mut pause = POLL_MIN;
    loop {
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        let now = Instant::now();
        if now >= deadline {
            return Ok(None);
        }
        tick()?;
        thread::sleep(pause.min(deadline - now));
        pause = (pause * 2).min(POLL_MAX);
    }
}

/// `rank 3`, or `ranks 3, 5`.
pub fn name_ranks(ranks: &[u32]) -> String {
    let mut names = String::from(if ranks.len() == 1 { "rank" } else { "ranks" });
    for (i, rank) in ranks.iter().enumerate() {
        let _ = write!(names, "{}{rank}", if i == 0 { " " } else { ", " });
    }
    names
}

/// The error that names ranks which did not come, with their last words.
pub fn missing_error(doing: &str, ranks: &[u32], waited: Duration, words: &str) -> Error {
    Error::Timeout {
        what: format!("{doing} by {}{words}", name_ranks(ranks)),
        waited,
        advice: "look at the log of that process: it may be dead or slow; nothing was committed"
            .into(),
    }
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod tests;
