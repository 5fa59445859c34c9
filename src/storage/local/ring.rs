//! One ring and the loop that drives it.
//!
//! Each operation sits in a slot of the table while any part of it may be in the kernel; the slot's
//! number is the ring's `user_data`. There are fewer slots than the completion queue has entries,
//! so completions cannot overflow.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam::channel::{Receiver, TryRecvError};
use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::op::{Next, Op, Work};
use super::registry::Registered;
use super::uring::Wake;

/// Entries of the submission queue; the completion queue has twice as many.
const RING_ENTRIES: u32 = 128;
/// Operations in the kernel at once; the wake-up read takes one entry more.
const TABLE_SLOTS: usize = RING_ENTRIES as usize - 1;
/// `user_data` of the wake-up read.
const WAKE_DATA: u64 = u64::MAX;
/// Pause before a submission that the kernel had no resources for is tried again.
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// Why the loop ends.
enum End {
    /// The engine was dropped and the kernel is done with everything.
    Clean,
    /// The ring does not work any more.
    Broken,
}

/// A ring with its table.
pub struct Driver {
    ring: IoUring,
    queue: Receiver<Op>,
    wake: Arc<Wake>,
    table: Vec<Option<Op>>,
    free: Vec<usize>,
    /// Slots whose next transfer is to be issued.
    ready: VecDeque<usize>,
    wake_armed: bool,
    registered: Registered,
    closing: bool,
}

/// Sets a ring up with the leanest flags the kernel knows.
fn build() -> io::Result<IoUring> {
    let mut refusal = io::Error::from_raw_os_error(libc::ENOSYS);
    for step in 0..3 {
        let mut builder = IoUring::builder();
        builder.dontfork();
        if step < 2 {
            builder.setup_single_issuer().setup_coop_taskrun();
        }
        if step < 1 {
            builder.setup_defer_taskrun();
        }
        match builder.build(RING_ENTRIES) {
            Ok(ring) => return Ok(ring),
            // Only an unknown flag is worth another try.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => refusal = e,
            Err(e) => return Err(e),
        }
    }
    Err(refusal)
}

fn check_operations(ring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::Fsync::CODE,
    ];
    if needed.into_iter().all(|code| probe.is_supported(code)) {
        return Ok(());
    }
    Err(io::Error::from_raw_os_error(libc::ENOSYS))
}

impl Driver {
    /// A ring fed by `queue`; made on the thread that will run it.
    pub fn new(queue: Receiver<Op>, wake: Arc<Wake>) -> io::Result<Self> {
        let ring = build()?;
        check_operations(&ring)?;
        Ok(Self {
            ring,
            queue,
            wake,
            table: (0..TABLE_SLOTS).map(|_| None).collect(),
            free: (0..TABLE_SLOTS).rev().collect(),
            ready: VecDeque::with_capacity(TABLE_SLOTS),
            wake_armed: false,
            registered: Registered::new(),
            closing: false,
        })
    }

    /// Moves bytes until the engine is dropped.
    pub fn run(mut self) {
        let end = loop {
            self.wake.rounds.fetch_add(1, Ordering::SeqCst);
            self.accept();
            self.arm_wake();
            self.issue();
            if self.closing && self.is_idle() && !self.wake_armed {
                break End::Clean;
            }
            if let Err(e) = self.enter() {
                tracing::error!("io_uring stopped working: {e}");
                break End::Broken;
            }
            self.reap();
        };
        if matches!(end, End::Broken) {
            self.abandon();
        }
    }

    fn is_idle(&self) -> bool {
        self.free.len() == TABLE_SLOTS
    }

    /// Takes new operations while there are slots.
    fn accept(&mut self) {
        while let Some(slot) = self.free.pop() {
            match self.queue.try_recv() {
                Ok(op) => {
                    self.table[slot] = Some(op);
                    self.ready.push_back(slot);
                }
                Err(e) => {
                    self.closing |= e == TryRecvError::Disconnected;
                    self.free.push(slot);
                    return;
                }
            }
        }
    }

    /// Keeps the wake-up read pending.
    fn arm_wake(&mut self) {
        if self.wake_armed || self.closing {
            return;
        }
        let event = types::Fd(self.wake.event.as_raw_fd());
        let target = self.wake.count.as_ptr().cast();
        let entry = opcode::Read::new(event, target, 8).build().user_data(WAKE_DATA);
        self.wake_armed = self.push(&entry);
    }

    /// Issues the next transfer of every ready operation.
    fn issue(&mut self) {
        self.registered.refresh(&self.ring);
        while let Some(&slot) = self.ready.front() {
            let Some(op) = self.table[slot].as_mut() else {
                self.ready.pop_front();
                continue;
            };
            let entry = transfer(op, &self.ring, &mut self.registered).user_data(slot as u64);
            if !self.push(&entry) {
                return;
            }
            self.ready.pop_front();
        }
    }

    fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the memory and the descriptor of the entry belong to an operation in the table
        // (or to `wake`), which stays until the entry's completion is reaped; a
        // ring that breaks leaks them in `abandon`.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Submits, and sleeps until something happens if there is nothing else to do.
    fn enter(&mut self) -> io::Result<()> {
        let full = self.free.is_empty();
        if !full {
            self.wake.sleeping.store(true, Ordering::SeqCst);
        }
        // Looked at after `sleeping` is set: a submitter either sees it set or is seen here.
        let wait = self.ready.is_empty() && (full || self.queue.is_empty());
        let outcome = self.ring.submit_and_wait(usize::from(wait));
        self.wake.sleeping.store(false, Ordering::SeqCst);
        match outcome.map_err(|e| (e.raw_os_error(), e)) {
            Ok(_) | Err((Some(libc::EINTR), _)) => Ok(()),
            Err((Some(libc::EAGAIN | libc::EBUSY), _)) => {
                std::thread::sleep(BUSY_PAUSE);
                Ok(())
            }
            Err((_, e)) => Err(e),
        }
    }

    fn reap(&mut self) {
        let mut completions = self.ring.completion();
        completions.sync();
        for completion in completions {
            let (data, result) = (completion.user_data(), completion.result());
            if data == WAKE_DATA {
                self.wake_armed = false;
                continue;
            }
            let slot = data as usize;
            let Some(mut op) = self.table.get_mut(slot).and_then(Option::take) else { continue };
            let result = match usize::try_from(result) {
                Ok(count) => Ok(count),
                Err(_) => Err(io::Error::from_raw_os_error(-result)),
            };
            match op.advance(result) {
                Ok(Next::Again) => {
                    self.table[slot] = Some(op);
                    self.ready.push_back(slot);
                    continue;
                }
                Ok(Next::Complete) => op.answer(Ok(())),
                Err(e) => op.answer(Err(e)),
            }
            self.free.push(slot);
        }
    }

    /// Fails everything but frees nothing that the kernel may still use.
    fn abandon(mut self) {
        for op in self.table.iter_mut().filter_map(Option::take) {
            op.fail_and_leak();
        }
        std::mem::forget(Arc::clone(&self.wake));
    }
}

/// The entry for an operation's next transfer: through registered memory where it lies in some.
fn transfer(op: &mut Op, ring: &IoUring, registered: &mut Registered) -> squeue::Entry {
    let fd = types::Fd(op.file.as_raw_fd());
    let (at, from, len) = (op.file_offset(), op.moved(), op.chunk_len());
    let mut fixed = |ptr| registered.find(ring, ptr, len);
    let (entry, index) = match &mut op.work {
        Work::Read { buf, .. } => {
            let target = buf[from..].as_mut_ptr();
            let index = fixed(target);
            let entry = match index {
                Some(n) => opcode::ReadFixed::new(fd, target, len as u32, n).offset(at).build(),
                None => opcode::Read::new(fd, target, len as u32).offset(at).build(),
            };
            (entry, index)
        }
        Work::Write { data } => {
            let source = data[from..].as_ptr();
            let index = fixed(source);
            let entry = match index {
                Some(n) => opcode::WriteFixed::new(fd, source, len as u32, n).offset(at).build(),
                None => opcode::Write::new(fd, source, len as u32).offset(at).build(),
            };
            (entry, index)
        }
        Work::Sync => (opcode::Fsync::new(fd).build(), None),
    };
    op.fixed |= index.is_some();
    entry
}
