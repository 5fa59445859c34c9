//! The arena: page-aligned buffers under one limit, mapped in slabs on demand and re-used.
//!
//! Touching fresh memory costs about ten times a copy, so slabs are touched once when they are
//! mapped and buffers go round. A request that does not fit waits for buffers to come back, first
//! come, first served; it is never refused and never exceeds the limit.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam::channel;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::mapping::Mapping;
use super::pin::PinHook;
use super::pool::{Place, Pool, Slab, class_bytes};
use super::{Buffer, PAGE_BYTES};
use crate::error::{Error, Result};

/// Limit of the process-wide arena.
const PROCESS_LIMIT_BYTES: usize = 2 << 30;

/// How an arena works.
#[derive(Debug, Clone)]
pub struct ArenaOptions {
    /// Most bytes ever mapped; at least one page.
    pub limit_bytes: usize,
    /// Ask for transparent huge pages.
    pub huge_pages: bool,
    /// Touch slabs when they are mapped.
    pub warm: bool,
    /// Told about each slab, in order.
    pub hooks: Vec<Arc<dyn PinHook>>,
}

/// What an arena holds now and held before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ArenaStats {
    /// The limit.
    pub limit_bytes: usize,
    /// Bytes in buffers that are alive, after rounding to classes.
    pub in_use_bytes: usize,
    /// Most bytes that were in use at once.
    pub peak_bytes: usize,
    /// Bytes mapped.
    pub slabs_bytes: usize,
    /// Slabs mapped.
    pub slabs: usize,
    /// Requests that had to wait.
    pub waits: u64,
    /// Requests waiting now.
    pub waiting: usize,
    /// Slabs that a hook (pinning, registration) refused; they serve as plain memory.
    pub hook_refusals: u64,
}

/// Page-aligned buffers under one limit. Clones share it.
#[derive(Debug, Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: ArenaOptions,
    state: Mutex<State>,
    /// Process that made it. In a forked child the lock may be held for ever by a thread that
    /// stayed with the parent, so a child leaves what it inherited as it is.
    pid: u32,
}

#[derive(Debug, Default)]
struct State {
    pool: Pool,
    waiters: VecDeque<Waiter>,
    peak_bytes: usize,
    waits: u64,
    hook_refusals: u64,
}

#[derive(Debug)]
struct Waiter {
    len: usize,
    capacity: usize,
    answer: Answer,
}

/// How a waiter gets its buffer: a future's channel, or a blocked thread's.
#[derive(Debug)]
enum Answer {
    Future(oneshot::Sender<Result<Buffer>>),
    Thread(channel::Sender<Result<Buffer>>),
}

impl Answer {
    fn is_gone(&self) -> bool {
        matches!(self, Self::Future(sender) if sender.is_closed())
    }

    /// Delivers; a waiter that gave up lets the buffer drop, which returns it to the arena.
    fn send(self, result: Result<Buffer>) {
        match self {
            Self::Future(sender) => drop(sender.send(result)),
            Self::Thread(sender) => drop(sender.try_send(result)),
        }
    }
}

/// The way back of a buffer to its arena.
#[derive(Debug)]
pub struct Home {
    arena: Arc<Inner>,
    place: Place,
}

impl Home {
    /// Takes the buffer's memory back.
    pub fn give_back(self, capacity: usize) {
        if self.arena.pid != std::process::id() {
            // Not dropped either: the last owner of an arena unmaps and unregisters.
            return std::mem::forget(self);
        }
        let waiting = {
            let mut state = self.arena.state.lock();
            state.pool.give(self.place, capacity);
            !state.waiters.is_empty()
        };
        if waiting {
            self.arena.serve();
        }
    }
}

impl Arena {
    /// An arena that never maps more than `limit_bytes`, with huge pages and warm slabs.
    pub fn new(limit_bytes: usize) -> Self {
        let hooks = Vec::new();
        Self::with_options(ArenaOptions { limit_bytes, huge_pages: true, warm: true, hooks })
    }

    /// An arena with options of its own.
    pub fn with_options(mut options: ArenaOptions) -> Self {
        options.limit_bytes = options.limit_bytes.max(PAGE_BYTES) / PAGE_BYTES * PAGE_BYTES;
        let pid = std::process::id();
        Self { inner: Arc::new(Inner { options, state: Mutex::default(), pid }) }
    }

    /// The process's own arena, for users that were given none.
    pub fn process() -> Self {
        static PROCESS: OnceLock<Arena> = OnceLock::new();
        PROCESS.get_or_init(|| Self::new(PROCESS_LIMIT_BYTES)).clone()
    }

    /// The limit.
    pub fn limit_bytes(&self) -> usize {
        self.inner.options.limit_bytes
    }

    /// A buffer of `len` bytes, as soon as the limit allows; contents are whatever was there.
    /// More than the whole limit is [`Error::Invalid`]. Dropping the future gives up the place.
    pub async fn alloc(&self, len: usize) -> Result<Buffer> {
        let (sender, receiver) = oneshot::channel();
        match self.inner.take_or_queue(len, || Answer::Future(sender))? {
            Some(buffer) => Ok(buffer),
            None => receiver.await.map_err(|_| closed())?,
        }
    }

    /// A buffer of `len` bytes now, or none: the limit is reached, others wait, or `len` is larger
    /// than the limit.
    pub fn try_alloc(&self, len: usize) -> Option<Buffer> {
        let capacity = self.inner.capacity(len).ok()?;
        if !self.inner.state.lock().waiters.is_empty() {
            return None;
        }
        self.inner.take(len, capacity).ok().flatten()
    }

    /// As [`Arena::alloc`] for a thread that may block, for at most `wait`.
    pub fn alloc_blocking(&self, len: usize, wait: Duration) -> Result<Buffer> {
        let (sender, receiver) = channel::bounded(1);
        match self.inner.take_or_queue(len, || Answer::Thread(sender))? {
            Some(buffer) => Ok(buffer),
            None => receiver.recv_timeout(wait).map_err(|_| Error::Timeout {
                what: format!("a free buffer of {len} bytes"),
                waited: wait,
                advice: "drop held buffers or raise memory_limit".into(),
            })?,
        }
    }

    /// What it holds.
    pub fn stats(&self) -> ArenaStats {
        let state = self.inner.state.lock();
        ArenaStats {
            limit_bytes: self.limit_bytes(),
            in_use_bytes: state.pool.in_use_bytes,
            peak_bytes: state.peak_bytes,
            slabs_bytes: state.pool.mapped_bytes,
            slabs: state.pool.slab_count(),
            waits: state.waits,
            waiting: state.waiters.len(),
            hook_refusals: state.hook_refusals,
        }
    }

    /// Unmaps the slabs that hold no buffer.
    pub fn trim(&self) {
        let mut state = self.inner.state.lock();
        let unused = state.pool.take_unused();
        self.inner.release(unused);
    }
}

fn closed() -> Error {
    Error::Closed { what: "the wait for a buffer".into() }
}

impl Inner {
    fn capacity(&self, len: usize) -> Result<usize> {
        let limit = self.options.limit_bytes;
        if len > limit {
            let expected = format!("at least {len} bytes, the size of one buffer");
            return Err(Error::invalid("memory_limit", expected, format!("{limit} bytes")));
        }
        Ok(class_bytes(len).min(limit))
    }

    /// Takes a buffer, or joins the queue behind those who came before.
    fn take_or_queue(
        self: &Arc<Self>,
        len: usize,
        answer: impl FnOnce() -> Answer,
    ) -> Result<Option<Buffer>> {
        let capacity = self.capacity(len)?;
        let queued = !self.state.lock().waiters.is_empty();
        if !queued && let Some(buffer) = self.take(len, capacity)? {
            return Ok(Some(buffer));
        }
        {
            let mut state = self.state.lock();
            state.waits += 1;
            state.waiters.push_back(Waiter { len, capacity, answer: answer() });
        }
        // A buffer may have come back between the try and the queue.
        self.serve();
        Ok(None)
    }

    /// Takes a buffer from the slabs, mapping another one while the limit allows.
    fn take(self: &Arc<Self>, len: usize, capacity: usize) -> Result<Option<Buffer>> {
        loop {
            let slab_bytes = {
                let mut state = self.state.lock();
                if let Some(taken) = state.take(capacity) {
                    drop(state);
                    return Ok(Some(self.lend(taken, len, capacity)));
                }
                let Some(slab_bytes) = self.reserve(&mut state, capacity) else {
                    return Ok(None);
                };
                slab_bytes
            };
            self.map(slab_bytes)?;
        }
    }

    /// Reserves a slab, unmapping unused ones that are in its way before it is mapped.
    fn reserve(&self, state: &mut State, capacity: usize) -> Option<usize> {
        let (slab_bytes, evicted) = state.pool.grow(capacity, self.options.limit_bytes)?;
        self.release(evicted);
        Some(slab_bytes)
    }

    /// Maps and warms a reserved slab, without the lock.
    fn map(&self, slab_bytes: usize) -> Result<()> {
        let map = Mapping::anonymous(slab_bytes, self.options.huge_pages).map_err(|e| {
            self.state.lock().pool.unreserve(slab_bytes);
            Error::io("map", format!("a slab of {slab_bytes} bytes"), e)
        })?;
        if self.options.warm {
            map.warm();
        }
        let accepted = self.pin(&map);
        self.state.lock().pool.add(map, accepted);
        Ok(())
    }

    /// Shows a new slab to the hooks, up to the first that refuses it; returns how many took it.
    fn pin(&self, map: &Mapping) -> usize {
        let (ptr, len) = (map.ptr().as_ptr(), map.len());
        // SAFETY: the slab is mapped, and `release` unpins it before it is unmapped.
        let pinned = |hook: &Arc<dyn PinHook>| self.accepted(unsafe { hook.pin(ptr, len) });
        self.options.hooks.iter().take_while(|hook| pinned(hook)).count()
    }

    fn accepted(&self, result: Result<()>) -> bool {
        if let Err(e) = &result {
            let mut state = self.state.lock();
            state.hook_refusals += 1;
            if state.hook_refusals == 1 {
                tracing::debug!("memory is used without pinning or registration: {e}");
            }
        }
        result.is_ok()
    }

    fn release(&self, slabs: Vec<Slab>) {
        for slab in slabs {
            for hook in self.options.hooks.iter().take(slab.hooks).rev() {
                // SAFETY: the first `slab.hooks` hooks took this slab, and no buffer of it is lent.
                unsafe { hook.unpin(slab.map.ptr().as_ptr(), slab.map.len()) };
            }
        }
    }

    fn lend(
        self: &Arc<Self>,
        (place, ptr): (Place, NonNull<u8>),
        len: usize,
        capacity: usize,
    ) -> Buffer {
        let home = Home { arena: Arc::clone(self), place };
        // SAFETY: the pool lends this range to one buffer at a time, anonymous memory is
        // initialised, and `home` keeps the arena with its slabs alive.
        unsafe { Buffer::lent(ptr, len, capacity, home) }
    }

    /// Gives waiters their buffers, in order, while there is memory.
    fn serve(self: &Arc<Self>) {
        loop {
            let step = {
                let mut state = self.state.lock();
                self.next_step(&mut state)
            };
            match step {
                Step::Done => return,
                Step::Deliver(waiter, taken) => {
                    let buffer = self.lend(taken, waiter.len, waiter.capacity);
                    waiter.answer.send(Ok(buffer));
                }
                Step::Map(slab_bytes) => {
                    if let Err(e) = self.map(slab_bytes) {
                        let waiter = self.state.lock().waiters.pop_front();
                        if let Some(waiter) = waiter {
                            waiter.answer.send(Err(e));
                        }
                    }
                }
            }
        }
    }

    fn next_step(&self, state: &mut State) -> Step {
        while state.waiters.front().is_some_and(|w| w.answer.is_gone()) {
            state.waiters.pop_front();
        }
        let Some(capacity) = state.waiters.front().map(|w| w.capacity) else { return Step::Done };
        if let Some(taken) = state.take(capacity)
            && let Some(waiter) = state.waiters.pop_front()
        {
            return Step::Deliver(waiter, taken);
        }
        self.reserve(state, capacity).map_or(Step::Done, Step::Map)
    }
}

/// What serving the queue does next.
enum Step {
    Done,
    Deliver(Waiter, (Place, NonNull<u8>)),
    Map(usize),
}

impl State {
    fn take(&mut self, capacity: usize) -> Option<(Place, NonNull<u8>)> {
        let taken = self.pool.take(capacity);
        self.peak_bytes = self.peak_bytes.max(self.pool.in_use_bytes);
        taken
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let slabs = self.state.get_mut().pool.take_slabs();
        // A forked child unmaps; what is pinned or registered is the parent's.
        if self.pid == std::process::id() {
            self.release(slabs);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Longest life of the child: it only drops a buffer.
    const CHILD_LIMIT: Duration = Duration::from_secs(20);

    /// Whether a child ended by itself with status 0.
    fn ended_well(child: libc::pid_t) -> bool {
        let (mut status, deadline) = (0, Instant::now() + CHILD_LIMIT);
        loop {
            // SAFETY: `status` is ours to write.
            match unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } {
                0 if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                // SAFETY: our own child, which has not been waited for.
                0 => unsafe {
                    libc::kill(child, libc::SIGKILL);
                    libc::waitpid(child, &raw mut status, 0);
                    return false;
                },
                _ => return status == 0,
            }
        }
    }

    #[test]
    fn a_forked_child_does_not_wait_for_the_lock_of_a_thread_it_lacks() {
        let arena = Arena::new(1 << 20);
        let buffer = arena.try_alloc(4096).unwrap();
        let held = arena.inner.state.lock();
        // SAFETY: the child drops a buffer and ends without running anything else.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(buffer);
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) }
        }
        assert!(ended_well(child));
        drop(held);
        drop(buffer);
        assert_eq!(arena.stats().in_use_bytes, 0);
    }
}
