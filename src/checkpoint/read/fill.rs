//! Fills tensors from chunks: few threads, each with a few large reads in flight; whoever receives
//! a window computes its checksum and copies it into place while it is in the cache. What the page
//! cache holds is read straight into the target where a part lies there in one piece: one copy, and
//! the checksum is computed over what arrived. Blocks of compressed chunks are decoded by whoever
//! received them, into the target where they lie there in one piece.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crc_fast::{CrcAlgorithm, Digest};
use futures::stream::{self, FuturesUnordered};
use futures::{StreamExt, TryStreamExt};
use parking_lot::Mutex;

use super::needs::{Need, needs};
use super::packed::{Place, Table, Unpacker, is_short, table};
use super::windows::{Part, WINDOW_BYTES_MAX, Window, windows};
use super::{OLDER, OpenStep};
use crate::checkpoint::codec::Index;
use crate::checkpoint::layout::{Dtype, FileRecord, crc32c, file_path};
use crate::checkpoint::rects::{Rect, Runs};
use crate::error::{Error, Result};
use crate::memory::{Arena, ArenaOptions, Buffer, copy_past_cache};
use crate::runtime::block_on;
use crate::storage::local::ring_hook;
use crate::storage::{OpenOptions, ReadAt};

/// Threads that read, check and copy.
const THREADS_MAX: usize = 4;
/// Reads in flight per thread.
const DEPTH: usize = 4;
/// The same where chunks are compressed: decoding keeps a core busy. The memory in flight is the
/// same.
const UNPACK_THREADS_MAX: usize = 8;
const UNPACK_DEPTH: usize = 2;
const _: () = assert!(UNPACK_THREADS_MAX * UNPACK_DEPTH <= THREADS_MAX * DEPTH);
/// Tables of long compressed chunks that are read at a time.
const TABLES_AT_A_TIME: usize = 16;
/// Bytes taken from the page cache at a time: checked and copied on while a core's cache has them.
const PIECE_BYTES: usize = 256 << 10;
/// Shorter parts are taken from the page cache together with their neighbours: a system call each
/// would cost more than the second copy.
const STRAIGHT_BYTES_MIN: u64 = 64 << 10;

/// A part of a tensor to be filled.
#[derive(Debug)]
pub struct Target<'a> {
    /// Compact JSON array of keys.
    pub path: String,
    /// safetensors' name of the element type; must be the stored one.
    pub dtype: String,
    /// Shape of the whole tensor; must be the stored one.
    pub shape: Vec<i64>,
    /// What to fill: a rectangle, or a range of the flattened tensor.
    pub rect: Rect,
    /// Row-major memory of the rectangle.
    pub data: &'a mut [u8],
}

/// Which reads other processes of this machine are likely to make, too. Those go through the page
/// cache: the kernel reads a page once, whoever else wants it waits for that read and copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// None: this process is alone here.
    #[default]
    Alone,
    /// Chunks that this process needs only a part of: others need the rest.
    Partial,
    /// All: the targets are replicated.
    All,
}

/// Memory of a target as the reading threads see it.
struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: the coverage proof gives every byte of a target to exactly one chunk, every byte of a
// chunk (every block of a compressed one) to exactly one window, and every window to one thread,
// so no byte has two writers.
unsafe impl Send for Memory {}
// SAFETY: as above; nobody reads targets while they are filled.
unsafe impl Sync for Memory {}

impl Memory {
    fn write(&self, at: u64, from: &[u8]) {
        let at = at as usize;
        if at.checked_add(from.len()).is_none_or(|end| end > self.len) {
            debug_assert!(false, "run outside its target");
            return;
        }
        // SAFETY: the range was just checked; no other thread has it (see `Send`).
        unsafe { copy_past_cache(from.as_ptr(), self.start.add(at), from.len()) }
    }

    /// A range of the target to be read into; `None` if it reaches beyond.
    ///
    /// # Safety
    /// The range belongs to a part that the calling thread delivers; no other slice of it lives.
    #[expect(clippy::mut_from_ref, reason = "disjoint ranges go to different threads")]
    unsafe fn slice_mut(&self, at: u64, len: u64) -> Option<&mut [u8]> {
        let end = at.checked_add(len)?;
        if end > self.len as u64 {
            return None;
        }
        // SAFETY: the range was just checked and is the caller's alone.
        Some(unsafe { std::slice::from_raw_parts_mut(self.start.add(at as usize), len as usize) })
    }
}

pub fn fill(step: &OpenStep, targets: Vec<Target<'_>>, sharing: Sharing) -> Result<()> {
    let mut needs = needs(step, &targets)?;
    let memory: Vec<_> = targets
        .into_iter()
        .map(|t| Memory { start: t.data.as_mut_ptr(), len: t.data.len() })
        .collect();
    let mut by_file: BTreeMap<(Option<i64>, &str), Vec<usize>> = BTreeMap::new();
    for (id, need) in needs.iter().enumerate() {
        by_file.entry((need.chunk.step_ref, &need.chunk.file)).or_default().push(id);
    }
    let names: Vec<_> = by_file.keys().copied().collect();
    let by_file: Vec<Vec<usize>> = by_file.values().cloned().collect();
    let files = block_on(open_files(step, &names))??;
    for (id, table) in block_on(read_tables(step, &files, &by_file, &needs))?? {
        let end = needs[id].chunk.start + needs[id].chunk.length;
        needs[id].passed(end - table.sum.1, table.sum);
        needs[id].table = Some(table);
    }
    let wanted = |ids: Vec<usize>| ids.into_iter().flat_map(|id| needs[id].wanted(id)).collect();
    let windows: Vec<Window> =
        by_file.into_iter().enumerate().flat_map(|(i, ids)| windows(i, wanted(ids))).collect();
    let crew = Crew {
        step,
        needs: &needs,
        shared: &needs.iter().map(|need| need.is_shared(sharing)).collect::<Vec<_>>(),
        memory: &memory,
        files: &files,
        windows: &windows,
        buffers: buffers(step),
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        error: Mutex::new(None),
    };
    crew.run();
    if let Some(error) = crew.error.into_inner() {
        return Err(error);
    }
    needs.iter().try_for_each(|need| need.check_sum(step))
}

/// Memory for the windows that are in flight. It is mapped when the first is read: what the page
/// cache holds needs none.
fn buffers(step: &OpenStep) -> Arena {
    let local = step.store.capabilities().local_root.is_some();
    let hooks = if local { ring_hook().into_iter().collect() } else { Vec::new() };
    let limit_bytes = THREADS_MAX * DEPTH * WINDOW_BYTES_MAX as usize;
    Arena::with_options(ArenaOptions { limit_bytes, huge_pages: true, warm: true, hooks })
}

/// A file, opened around the page cache and through it.
struct Opened {
    direct: Arc<dyn ReadAt>,
    cached: Arc<dyn ReadAt>,
}

/// Opens files, each of this step or of the one named.
async fn open_files(step: &OpenStep, names: &[(Option<i64>, &str)]) -> Result<Vec<Opened>> {
    let mut files = Vec::new();
    for &(step_ref, name) in names {
        let path = file_path(&step.folder, step_ref, name);
        let direct = step.store.open(&path, OpenOptions { direct: true }).await?;
        let cached = step.store.open(&path, OpenOptions::default()).await?;
        let record = step.manifest.file_of(step_ref, name);
        check_header(record, &path, cached.as_ref()).await?;
        files.push(Opened { direct, cached });
    }
    Ok(files)
}

/// Reads the tables of compressed chunks that come in parts, each with the number of its need.
async fn read_tables(
    step: &OpenStep,
    files: &[Opened],
    by_file: &[Vec<usize>],
    needs: &[Need<'_>],
) -> Result<Vec<(usize, Table)>> {
    let pairs =
        files.iter().zip(by_file).flat_map(|(file, ids)| ids.iter().map(move |&id| (file, id)));
    let long = pairs.filter(|(_, id)| !needs[*id].chunk.is_raw() && !is_short(needs[*id].chunk));
    let reads = long.map(|(file, id)| async move {
        let chunk = needs[id].chunk;
        let table = table(file.cached.as_ref(), &step.path_of(chunk), chunk).await?;
        Ok((id, table))
    });
    stream::iter(reads).buffer_unordered(TABLES_AT_A_TIME).try_collect().await
}

/// The header is not needed to restore, but a file whose header is damaged is damaged, and other
/// readers of it would be misled.
async fn check_header(record: Option<&FileRecord>, path: &str, file: &dyn ReadAt) -> Result<()> {
    let Some(record) = record.filter(|r| r.header_bytes > 0) else { return Ok(()) };
    let length = record.header_bytes.min(record.size_bytes) as usize;
    let mut buffer = Buffer::heap(length);
    buffer.set_len(length);
    let header = file.read_at(0, buffer).await?.into_bytes();
    let found = format!("{:08x}", crc32c(&header));
    if found == record.header_crc32c {
        return Ok(());
    }
    let expected = format!("a header with crc32c {}", record.header_crc32c);
    Err(Error::corrupt(path, 0, expected, found, OLDER))
}

/// What the reading threads share.
struct Crew<'a> {
    step: &'a OpenStep,
    needs: &'a [Need<'a>],
    /// Of each need: whether it is read through the page cache.
    shared: &'a [bool],
    memory: &'a [Memory],
    files: &'a [Opened],
    windows: &'a [Window],
    /// Where windows are read into; re-used, and registered with the rings.
    buffers: Arena,
    next: AtomicUsize,
    stop: AtomicBool,
    error: Mutex<Option<Error>>,
}

/// What a thread works with.
struct Hands {
    /// What was taken from the page cache.
    piece: Buffer,
    unpacker: Unpacker,
}

impl Crew<'_> {
    fn run(&self) {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let (threads, depth) = self.size();
        let threads = cores.min(threads).min(self.windows.len().div_ceil(depth));
        thread::scope(|scope| {
            for _ in 1..threads {
                // Without the thread the others do its work.
                let _ = thread::Builder::new()
                    .name("drivetrain-restore".into())
                    .spawn_scoped(scope, || self.work());
            }
            self.work();
        });
    }

    /// Threads at most, and reads in flight of each.
    fn size(&self) -> (usize, usize) {
        let raw = self.needs.iter().all(|need| need.chunk.is_raw());
        if raw { (THREADS_MAX, DEPTH) } else { (UNPACK_THREADS_MAX, UNPACK_DEPTH) }
    }

    fn work(&self) {
        let result = block_on(self.read_windows());
        if let Err(error) | Ok(Err(error)) = result {
            self.stop.store(true, Ordering::Relaxed);
            self.error.lock().get_or_insert(error);
        }
    }

    async fn read_windows(&self) -> Result<()> {
        let mut reads = FuturesUnordered::new();
        let mut hands = Hands { piece: Buffer::heap(PIECE_BYTES), unpacker: Unpacker::default() };
        let (_, depth) = self.size();
        loop {
            while reads.len() < depth
                && !self.stop.load(Ordering::Relaxed)
                && let Some(window) = self.windows.get(self.next.fetch_add(1, Ordering::Relaxed))
            {
                let Some(window) = self.deliver_cached(window, &mut hands)? else { continue };
                let len = (window.end - window.start) as usize;
                let buf = self.buffers.try_alloc(len).unwrap_or_else(|| Buffer::heap(len));
                let read = self.reader(&window).read_at(window.start, buf);
                reads.push(async move { (window, read.await) });
            }
            let Some((window, read)) = reads.next().await else { return Ok(()) };
            self.deliver(&window.parts, window.start, &read?, &mut hands.unpacker)?;
        }
    }

    fn reader(&self, window: &Window) -> &dyn ReadAt {
        let file = &self.files[window.file];
        let shared = window.parts.iter().any(|part| self.shared[part.id]);
        if shared { file.cached.as_ref() } else { file.direct.as_ref() }
    }

    /// Delivers what the page cache holds of the window's start; returns what must be read.
    fn deliver_cached(&self, window: &Window, hands: &mut Hands) -> Result<Option<Window>> {
        let mut i = 0;
        while let Some(part) = window.parts.get(i) {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let (count, reached) = if part.end - part.start < STRAIGHT_BYTES_MIN {
                self.read_together(window, i, hands)?
            } else if !self.needs[part.id].chunk.is_raw() {
                (1, self.read_whole(window.file, part, hands)?)
            } else if let Some(target) = self.straight(part) {
                (1, self.read_straight(window.file, part, target))
            } else {
                (1, self.read_pieces(window.file, part, hands)?)
            };
            if count == 0 || reached < part.end {
                return Ok(Some(window.rest(i, reached)));
            }
            i += count;
        }
        Ok(None)
    }

    /// Where a part goes, if it goes to one place as it is.
    #[expect(clippy::mut_from_ref, reason = "each part is delivered by one thread, once")]
    fn straight(&self, part: &Part) -> Option<&mut [u8]> {
        let need = self.needs.get(part.id)?;
        let [(target, runs)] = need.uses.as_slice() else { return None };
        let (low, high) = (part.start - need.chunk.start, part.end - need.chunk.start);
        let at = runs.straight(low, high)?;
        // SAFETY: this thread delivers the part, which is wholly read before the next one.
        unsafe { self.memory.get(*target)?.slice_mut(at, high - low) }
    }

    /// Reads a part from the page cache into its target; returns its end, or its start if not all
    /// of it is there.
    fn read_straight(&self, file: usize, part: &Part, target: &mut [u8]) -> u64 {
        let file = &self.files[file].cached;
        let (mut at, mut sum) = (part.start, Digest::new(CrcAlgorithm::Crc32Iscsi));
        for piece in target.chunks_mut(PIECE_BYTES) {
            if !file.read_cached(at, piece) {
                return part.start;
            }
            sum.update(piece);
            at += piece.len() as u64;
        }
        self.needs[part.id].passed(part.start, (sum.finalize() as u32, at - part.start));
        at
    }

    /// Reads a part from the page cache piece by piece and copies it on; returns how far it came.
    fn read_pieces(&self, file: usize, part: &Part, hands: &mut Hands) -> Result<u64> {
        let file = &self.files[file].cached;
        let mut at = part.start;
        while at < part.end {
            let end = part.end.min(at + PIECE_BYTES as u64);
            hands.piece.set_len((end - at) as usize);
            if !file.read_cached(at, &mut hands.piece) {
                break;
            }
            let piece = [Part { id: part.id, start: at, end }];
            self.deliver(&piece, at, &hands.piece, &mut hands.unpacker)?;
            at = end;
        }
        Ok(at)
    }

    /// Reads a part of a compressed chunk from the page cache; returns its end, or its start if not
    /// all of it is there.
    fn read_whole(&self, file: usize, part: &Part, hands: &mut Hands) -> Result<u64> {
        let bytes = (part.end - part.start) as usize;
        if hands.piece.capacity() < bytes {
            hands.piece = Buffer::heap(bytes);
        }
        hands.piece.set_len(bytes);
        if !self.files[file].cached.read_cached(part.start, &mut hands.piece) {
            return Ok(part.start);
        }
        self.deliver(&[*part], part.start, &hands.piece, &mut hands.unpacker)?;
        Ok(part.end)
    }

    /// Reads short parts from the `first` on together; returns how many, and the first one's end
    /// (its start and 0 if they are not all in the page cache).
    fn read_together(
        &self,
        window: &Window,
        first: usize,
        hands: &mut Hands,
    ) -> Result<(usize, u64)> {
        let parts = window.together(first, STRAIGHT_BYTES_MIN, PIECE_BYTES as u64);
        let start = parts.first().map_or(window.end, |p| p.start);
        let end = parts.iter().map(|p| p.end).max().unwrap_or(start);
        hands.piece.set_len((end - start) as usize);
        if !self.files[window.file].cached.read_cached(start, &mut hands.piece) {
            return Ok((0, start));
        }
        self.deliver(parts, start, &hands.piece, &mut hands.unpacker)?;
        Ok((parts.len(), end))
    }

    /// Checks and copies parts, given the bytes from `start` of their file on.
    fn deliver(
        &self,
        parts: &[Part],
        start: u64,
        bytes: &[u8],
        unpacker: &mut Unpacker,
    ) -> Result<()> {
        for part in parts {
            let need = &self.needs[part.id];
            let from = (part.start - start) as usize;
            let part_bytes = &bytes[from..from + (part.end - part.start) as usize];
            let sum = (crc32c(part_bytes), part_bytes.len() as u64);
            need.passed(part.start, sum);
            let (low, high) = (part.start - need.chunk.start, part.end - need.chunk.start);
            if need.chunk.is_raw() {
                self.place(need).take(low..high, part_bytes);
            } else {
                self.unpack(need, low, part_bytes, unpacker)?;
            }
        }
        Ok(())
    }

    /// Decodes a part of a compressed chunk that starts `at` bytes into it.
    fn unpack(&self, need: &Need<'_>, at: u64, part: &[u8], unpacker: &mut Unpacker) -> Result<()> {
        let place = &mut self.place(need);
        let unpacked = if let Some(table) = &need.table {
            unpacker.blocks(&table.index, at, part, place)
        } else {
            let index = Index::of(Dtype::named(&need.chunk.dtype)?, need.chunk.raw_bytes(), part);
            index.and_then(|index| unpacker.blocks(&index, at, part, place))
        };
        unpacked.map_err(|fault| fault.in_file(need.named(self.step), need.chunk.start))
    }

    fn place<'a>(&'a self, need: &'a Need<'_>) -> Uses<'a> {
        Uses { memory: self.memory, uses: &need.uses }
    }
}

/// Where the bytes of a chunk go.
struct Uses<'a> {
    memory: &'a [Memory],
    uses: &'a [(usize, Runs)],
}

impl Place for Uses<'_> {
    fn straight(&mut self, range: Range<u64>) -> Option<&mut [u8]> {
        let [(target, runs)] = self.uses else { return None };
        let at = runs.straight(range.start, range.end)?;
        // SAFETY: this thread delivers the range, wholly before the next one, and holds `self`.
        unsafe { self.memory.get(*target)?.slice_mut(at, range.end - range.start) }
    }

    fn wants(&self, range: Range<u64>) -> bool {
        let mut found = false;
        for (_, runs) in self.uses {
            runs.within(range.start, range.end, |_, _, _| found = true);
        }
        found
    }

    fn take(&mut self, range: Range<u64>, bytes: &[u8]) {
        for (target, runs) in self.uses {
            runs.within(range.start, range.end, |source, at, len| {
                let source = (source - range.start) as usize;
                self.memory[*target].write(at, &bytes[source..source + len as usize]);
            });
        }
    }
}
