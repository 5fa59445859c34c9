//! What each rank is doing, left where the others can read it: when a rank does not answer, the
//! error on all ranks says what it last was at.
//!
//! A thread of its own puts the words, so that a rank that stands still in a write goes on saying
//! so, and one that is gone falls silent. What takes less than [`FIRST_AFTER`] costs nothing: no
//! word of it is ever put.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use super::Meet;
use super::room::name_ranks;

/// The first word is put when something takes this long.
const FIRST_AFTER: Duration = Duration::from_secs(1);
/// Words are put again this often: what they say of progress is at most this old.
const AGAIN_AFTER: Duration = Duration::from_secs(2);
/// Ranks whose words an error repeats; of more it says only that they are missing.
const SHOWN_MAX: usize = 4;
/// Ranks that are named as waited for.
const WAITED_MAX: usize = 8;
/// Longest text that is put or believed.
const TEXT_BYTES_MAX: usize = 512;
/// A word is replaced by deleting it first where values are files: a reader looks again.
const LOOKS: u32 = 3;
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// Bytes done of bytes to do.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    all: AtomicU64,
}

impl Progress {
    /// `all` bytes are to be done now.
    pub fn begin(&self, all: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.all.store(all, Ordering::Relaxed);
    }

    /// So many more are.
    pub fn add(&self, bytes: usize) {
        self.done.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn text(&self) -> String {
        let (done, all) = (self.done.load(Ordering::Relaxed), self.all.load(Ordering::Relaxed));
        let (unit, name) = match all {
            0..1_000 => return format!("{done} of {all} bytes"),
            1_000..1_000_000 => (1e3, "kB"),
            1_000_000..1_000_000_000 => (1e6, "MB"),
            _ => (1e9, "GB"),
        };
        format!("{:.1} of {:.1} {name}", done as f64 / unit, all as f64 / unit)
    }
}

#[derive(Debug)]
struct Task {
    id: u64,
    begun: Instant,
    what: String,
    since: Instant,
    progress: Option<Arc<Progress>>,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    tasks: Vec<Task>,
    /// Something changed since the last word.
    news: bool,
    last: Option<Instant>,
    has_thread: bool,
    closed: bool,
    session: u64,
}

impl State {
    /// When the next word is due; none while there is nothing to say or take back.
    fn due(&self, shown: bool) -> Option<Instant> {
        let Some(first) = self.tasks.iter().map(|task| task.begun + FIRST_AFTER).min() else {
            return shown.then(Instant::now);
        };
        match self.last.filter(|_| shown) {
            Some(_) if self.news => Some(Instant::now()),
            Some(last) => Some(last + AGAIN_AFTER),
            None => Some(first),
        }
    }

    /// What is being done, the most particular last.
    fn text(&self) -> String {
        let mut text = String::new();
        for task in &self.tasks {
            let _ = write!(text, "{}{}", if text.is_empty() { "" } else { "; " }, task.what);
            if let Some(progress) = &task.progress {
                let _ = write!(text, ", {}", progress.text());
            }
            let seconds = task.since.elapsed().as_secs();
            if seconds > 0 {
                let _ = write!(text, " (for {seconds} s)");
            }
        }
        let cut = (0..=TEXT_BYTES_MAX.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
        text.truncate(cut.unwrap_or_default());
        text
    }
}

/// A rank's word as it is put.
#[derive(Debug, Serialize, Deserialize)]
struct Word {
    session: u64,
    /// By the clock of that rank's machine, milliseconds since the Unix epoch.
    at_ms: u64,
    text: String,
}

#[derive(Debug)]
struct Desk {
    meet: Arc<dyn Meet>,
    prefix: String,
    rank: u32,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether a word is there; locked while one is put or taken back.
    shown: Mutex<bool>,
}

/// The words of this rank, and a look at those of others.
#[derive(Debug)]
pub struct Words {
    desk: Arc<Desk>,
    alone: bool,
    since_ms: u64,
}

/// Something this rank is doing, until it is dropped.
#[derive(Debug)]
pub struct Doing {
    desk: Arc<Desk>,
    id: u64,
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

impl Words {
    /// Words under `prefix`; a rank that is `alone` has nobody to tell.
    pub fn new(meet: Arc<dyn Meet>, prefix: String, rank: u32, alone: bool) -> Self {
        let desk = Desk {
            meet,
            prefix,
            rank,
            state: Mutex::default(),
            changed: Condvar::new(),
            shown: Mutex::new(false),
        };
        Self { desk: Arc::new(desk), alone, since_ms: now_ms() }
    }

    /// Says what this rank does from now on.
    pub fn begin(&self, what: impl Into<String>) -> Doing {
        let now = Instant::now();
        let mut state = self.desk.state.lock();
        state.next_id += 1;
        let id = state.next_id;
        if !self.alone {
            state.tasks.push(Task {
                id,
                begun: now,
                what: what.into(),
                since: now,
                progress: None,
            });
            state.news = true;
            if !state.has_thread {
                let desk = Arc::clone(&self.desk);
                let thread = thread::Builder::new().name("drivetrain-words".into());
                // Without it nothing is lost but the words.
                state.has_thread = thread.spawn(move || desk.run()).is_ok();
            }
            self.desk.changed.notify_all();
        }
        drop(state);
        Doing { desk: Arc::clone(&self.desk), id }
    }

    /// Words carry the number of the ranks' session, once there is one.
    pub fn set_session(&self, session: u64) {
        self.desk.state.lock().session = session;
    }

    /// Takes the word back.
    pub fn quiet(&self) {
        self.desk.take_back();
    }

    /// The last words of ranks that do not answer, as the end of a sentence that names them.
    pub fn last(&self, ranks: &[u32]) -> String {
        let mut text = String::new();
        if self.alone || ranks.len() > SHOWN_MAX {
            return text;
        }
        for &rank in ranks {
            let whose = if ranks.len() == 1 { "its".to_string() } else { format!("rank {rank}'s") };
            let _ = write!(text, "{}", if text.is_empty() { " (" } else { "; " });
            let _ = match self.word_of(rank) {
                Some(word) => {
                    let seconds = now_ms().saturating_sub(word.at_ms) / 1000;
                    write!(text, "{whose} last word, {seconds} s ago: {}", word.text)
                }
                None if ranks.len() == 1 => write!(text, "it left no word of what it is doing"),
                None => write!(text, "rank {rank} left no word of what it is doing"),
            };
        }
        if !text.is_empty() {
            text.push(')');
        }
        text
    }

    fn word_of(&self, rank: u32) -> Option<Word> {
        for look in 0..LOOKS {
            if look > 0 {
                thread::sleep(LOOK_PAUSE);
            }
            // An error here must not hide the one that is being put into words.
            if let Ok(Some(value)) = self.desk.meet.try_get(&self.desk.key(rank)) {
                let word: Word = serde_json::from_slice(&value).ok()?;
                return (self.believes(&word)).then_some(word);
            }
        }
        None
    }

    /// Not what a run left that was killed before this one began.
    fn believes(&self, word: &Word) -> bool {
        let session = self.desk.state.lock().session;
        let ours = word.session == session && session != 0;
        word.text.len() <= TEXT_BYTES_MAX
            && (ours || (word.session == 0 && word.at_ms >= self.since_ms))
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        self.desk.state.lock().closed = true;
        self.desk.changed.notify_all();
    }
}

impl Doing {
    /// It does something else now.
    pub fn now(&self, what: impl Into<String>) {
        self.change(what.into(), None);
    }

    /// The same, with bytes that are counted.
    pub fn counting(&self, what: impl Into<String>, progress: &Arc<Progress>) {
        self.change(what.into(), Some(Arc::clone(progress)));
    }

    /// It waits for these ranks.
    pub fn waits_for(&self, ranks: &[u32]) {
        let named = &ranks[..ranks.len().min(WAITED_MAX)];
        let more = if ranks.len() > WAITED_MAX { " and more" } else { "" };
        self.change(format!("waiting for {}{more}", name_ranks(named)), None);
    }

    fn change(&self, what: String, progress: Option<Arc<Progress>>) {
        let mut state = self.desk.state.lock();
        let Some(task) = state.tasks.iter_mut().find(|task| task.id == self.id) else { return };
        if task.what == what {
            return;
        }
        (task.what, task.since, task.progress) = (what, Instant::now(), progress);
        state.news = true;
        self.desk.changed.notify_all();
    }

    /// Ends it, and takes the word back before returning if it was the last.
    pub fn end(self) {
        let desk = Arc::clone(&self.desk);
        drop(self);
        if desk.state.lock().tasks.is_empty() {
            desk.take_back();
        }
    }
}

impl Drop for Doing {
    fn drop(&mut self) {
        let mut state = self.desk.state.lock();
        let count = state.tasks.len();
        state.tasks.retain(|task| task.id != self.id);
        if state.tasks.len() < count {
            state.news = true;
            self.desk.changed.notify_all();
        }
    }
}

impl Desk {
    fn key(&self, rank: u32) -> String {
        format!("{}/words-{rank}", self.prefix)
    }

    /// The thread: until the words are dropped.
    fn run(&self) {
        loop {
            let shown = *self.shown.lock();
            let mut state = self.state.lock();
            while !state.closed {
                match state.due(shown) {
                    Some(at) if at <= Instant::now() => break,
                    Some(at) => drop(self.changed.wait_until(&mut state, at)),
                    None => self.changed.wait(&mut state),
                }
            }
            let (closed, idle) = (state.closed, state.tasks.is_empty());
            drop(state);
            if closed {
                return;
            }
            if idle { self.take_back() } else { self.put() }
        }
    }

    fn put(&self) {
        let mut shown = self.shown.lock();
        let word = {
            let mut state = self.state.lock();
            (state.news, state.last) = (false, Some(Instant::now()));
            if state.tasks.is_empty() {
                return;
            }
            Word { session: state.session, at_ms: now_ms(), text: state.text() }
        };
        // Even after an error something may be there.
        *shown = true;
        let value = serde_json::to_vec(&word).unwrap_or_default();
        if let Err(error) = self.meet.set(&self.key(self.rank), &value) {
            tracing::debug!(%error, "the other ranks could not be told what this one is doing");
        }
    }

    fn take_back(&self) {
        let mut shown = self.shown.lock();
        if *shown {
            *shown = false;
            if let Err(error) = self.meet.delete(&self.key(self.rank)) {
                tracing::debug!(%error, "a word for the other ranks could not be taken back");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryMeet;
    use super::*;

    fn pair(meet: &Arc<MemoryMeet>) -> [Words; 2] {
        [0, 1].map(|rank| Words::new(Arc::clone(meet) as Arc<dyn Meet>, "r".into(), rank, false))
    }

    #[test]
    fn progress_is_told_in_the_unit_of_the_whole() {
        let progress = Progress::default();
        for (done, all, text) in [
            (0, 0, "0 of 0 bytes"),
            (7, 999, "7 of 999 bytes"),
            (1_200_000, 4_000_000, "1.2 of 4.0 MB"),
            (1_234_000_000, 4_000_000_000, "1.2 of 4.0 GB"),
        ] {
            progress.begin(all);
            progress.add(done);
            assert_eq!(progress.text(), text);
        }
    }

    #[test]
    fn the_last_word_of_a_rank_is_told_and_taken_back() {
        let meet = Arc::new(MemoryMeet::default());
        let [zero, one] = pair(&meet);
        let progress = Arc::new(Progress::default());
        progress.begin(4000);
        let saving = one.begin("saving step 7");
        let file = one.begin("x");
        file.counting("writing rank-00001.safetensors (1 of 2)", &progress);
        progress.add(1000);
        assert_eq!(zero.last(&[1]), " (it left no word of what it is doing)");
        one.desk.put();
        let told = zero.last(&[1]);
        assert_eq!(
            told,
            " (its last word, 0 s ago: saving step 7; writing rank-00001.safetensors (1 of 2), \
             1.0 of 4.0 kB)"
        );
        let both = zero.last(&[1, 2]);
        assert!(both.contains("; rank 2 left no word") && both.contains("rank 1's last word"));
        assert_eq!(zero.last(&[1, 2, 3, 4, 5]), "");
        drop(file);
        saving.end();
        assert!(meet.keys().is_empty());
    }

    #[test]
    fn words_of_another_session_or_an_earlier_run_are_not_believed() {
        let meet = Arc::new(MemoryMeet::default());
        let [zero, one] = pair(&meet);
        let _doing = one.begin("saving");
        zero.set_session(5);
        for (session, believed) in [(5, true), (4, false), (0, true)] {
            one.set_session(session);
            one.desk.put();
            assert_eq!(zero.last(&[1]).contains("saving"), believed, "session {session}");
        }
        let old = Word { session: 0, at_ms: zero.since_ms - 1, text: "old".into() };
        meet.set("r/words-1", &serde_json::to_vec(&old).unwrap()).unwrap();
        assert!(!zero.last(&[1]).contains("old"));
        meet.set("r/words-1", b"no JSON").unwrap();
        assert!(zero.last(&[1]).contains("no word"));
    }

    #[test]
    fn what_is_over_soon_is_never_put_and_what_lasts_is() {
        let meet = Arc::new(MemoryMeet::default());
        let [zero, one] = pair(&meet);
        for _ in 0..50 {
            one.begin("something short").end();
        }
        assert!(meet.keys().is_empty());
        let lasting = one.begin("something long");
        let limit = Instant::now() + Duration::from_mins(1);
        while meet.keys().is_empty() && Instant::now() < limit {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(zero.last(&[1]).contains("something long (for 1 s)"), "{}", zero.last(&[1]));
        lasting.now("something else");
        while zero.last(&[1]).contains("long") && Instant::now() < limit {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(zero.last(&[1]).contains("something else"));
        drop(lasting);
        while !meet.keys().is_empty() && Instant::now() < limit {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(meet.keys().is_empty());
    }
}
