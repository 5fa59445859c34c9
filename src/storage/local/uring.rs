//! The io_uring engine: rings of our own, each driven by one thread.
//!
//! Operations come over a bounded channel and live in the ring's table until the kernel is done
//! with them, so nobody can free memory it still writes to. An idle thread sleeps in the kernel: a
//! read of an eventfd is kept pending in the ring, and submitters write to it when it sleeps.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Sender, bounded};
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::Semaphore;

use super::engine::{Engine, EngineKind, IN_FLIGHT_OPS_MAX, stopped};
use super::op::Op;
use super::ring::Driver;

/// Most rings; one moves several GB/s.
const RINGS_MAX: usize = 4;
/// Cores per ring: the copying of cached reads happens on the ring's thread.
const CORES_PER_RING: usize = 4;
/// Longest wait for a ring's thread to say whether it has a ring.
const START_WAIT_MAX: Duration = Duration::from_secs(30);

/// Rings and their threads.
#[derive(Debug)]
pub struct UringEngine {
    rings: Vec<Ring>,
    next: AtomicUsize,
    pid: u32,
    slots: Arc<Semaphore>,
}

#[derive(Debug)]
struct Ring {
    ops: Option<Sender<Op>>,
    wake: Arc<Wake>,
    thread: Option<JoinHandle<()>>,
}

/// What submitters and a ring's thread share besides the channel.
#[derive(Debug)]
pub struct Wake {
    /// Pending as a read in the ring.
    pub event: OwnedFd,
    /// Where that read goes; only the kernel writes it, and nobody reads it.
    pub count: AtomicU64,
    /// The thread is about to sleep, or sleeps.
    pub sleeping: AtomicBool,
    /// Rounds of the thread's loop; an idle ring makes none.
    pub rounds: AtomicU64,
}

impl Wake {
    fn new() -> io::Result<Self> {
        Ok(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC)?,
            count: AtomicU64::new(0),
            sleeping: AtomicBool::new(false),
            rounds: AtomicU64::new(0),
        })
    }

    /// Wakes the thread if it sleeps.
    fn notify(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst) {
            self.notify_always();
        }
    }

    fn notify_always(&self) {
        // A counter that is full already wakes the thread.
        let _ = rustix::io::write(self.event.as_fd(), &1_u64.to_ne_bytes());
    }
}

impl UringEngine {
    /// Sets rings up and starts their threads, or says why the kernel refuses.
    pub fn start() -> io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with_rings((cores / CORES_PER_RING).clamp(1, RINGS_MAX))
    }

    fn with_rings(count: usize) -> io::Result<Self> {
        let rings = (0..count).map(|_| Ring::start()).collect::<io::Result<_>>()?;
        let slots = Arc::new(Semaphore::new(IN_FLIGHT_OPS_MAX));
        Ok(Self { rings, next: AtomicUsize::new(0), pid: std::process::id(), slots })
    }
}

impl UringEngine {
    /// Makes the threads look at the registered buffers again.
    pub fn wake_all(&self) {
        self.rings.iter().for_each(|ring| ring.wake.notify_always());
    }
}

impl Ring {
    fn start() -> io::Result<Self> {
        let (ops, queue) = bounded(IN_FLIGHT_OPS_MAX);
        let wake = Arc::new(Wake::new()?);
        let (started, start) = bounded(1);
        let shared = Arc::clone(&wake);
        let thread =
            std::thread::Builder::new().name("drivetrain-ring".into()).spawn(move || {
                // The thread that submits must be the one that made the ring (SINGLE_ISSUER).
                match Driver::new(queue, shared) {
                    Ok(driver) => {
                        let _ = started.send(Ok(()));
                        driver.run();
                    }
                    Err(e) => drop(started.send(Err(e))),
                }
            })?;
        start.recv_timeout(START_WAIT_MAX).map_err(|_| io::ErrorKind::TimedOut)??;
        Ok(Self { ops: Some(ops), wake, thread: Some(thread) })
    }

    fn submit(&self, op: Op) {
        let Some(ops) = &self.ops else { return op.answer(Err(stopped())) };
        // As deep as there are slots in all, so it is never full for an operation with a slot.
        match ops.try_send(op) {
            Ok(()) => self.wake.notify(),
            Err(refused) => refused.into_inner().answer(Err(stopped())),
        }
    }
}

impl Drop for Ring {
    /// Lets the thread finish what the kernel has, then joins it.
    fn drop(&mut self) {
        self.ops = None;
        self.wake.notify_always();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Engine for UringEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Uring
    }

    fn pid(&self) -> u32 {
        self.pid
    }

    fn slots(&self) -> &Arc<Semaphore> {
        &self.slots
    }

    fn submit(&self, op: Op) {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        self.rings[turn % self.rings.len()].submit(op);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, ArenaOptions, Buffer};
    use crate::storage::local::engine::run;
    use crate::storage::local::op::{Done, Work};
    use crate::storage::local::registry::{registered, ring_hook};
    use crate::storage::local::sys::{OpenMode, open_maybe_direct};
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    fn engine() -> Option<UringEngine> {
        UringEngine::with_rings(1).inspect_err(|e| println!("skipped: no io_uring: {e}")).ok()
    }

    fn file(len: usize) -> Arc<File> {
        let file = tempfile::tempfile().unwrap();
        let data: Vec<u8> = (0..len).map(|i| (i / 7) as u8).collect();
        file.write_all_at(&data, 0).unwrap();
        Arc::new(file)
    }

    fn filled(len: usize) -> Work {
        let mut buf = Buffer::heap(len);
        buf.set_len(len);
        Work::Read { buf, need_bytes: len }
    }

    #[test]
    fn an_idle_ring_makes_no_rounds() {
        let Some(engine) = engine() else { return };
        let file = file(100);
        let runtime = crate::runtime::runtime().unwrap();
        runtime.block_on(run(&engine, &file, 0, filled(100), false)).unwrap();
        let rounds = || engine.rings[0].wake.rounds.load(Ordering::SeqCst);
        // The thread may still be on its way to sleep after the answer; then it stays asleep.
        let mut before = rounds();
        for _ in 0..100 {
            std::thread::sleep(Duration::from_millis(2));
            if rounds() == before && engine.rings[0].wake.sleeping.load(Ordering::SeqCst) {
                break;
            }
            before = rounds();
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(rounds(), before);
        // And it wakes up again.
        runtime.block_on(run(&engine, &file, 0, filled(10), false)).unwrap();
        assert!(rounds() > before);
    }

    #[test]
    fn a_dropped_read_keeps_its_buffer_until_the_kernel_is_done() {
        let Some(engine) = engine() else { return };
        let file = file(1 << 20);
        let arena = Arena::new(8 << 20);
        let runtime = crate::runtime::runtime().unwrap();
        for _ in 0..200 {
            let buf = arena.alloc_blocking(1 << 20, Duration::from_mins(1)).unwrap();
            let work = Work::Read { buf, need_bytes: 1 << 20 };
            runtime.block_on(async {
                let reading = run(&engine, &file, 0, work, false);
                // Polled once, so that the operation is on its way, then dropped.
                let _ = tokio::time::timeout(Duration::ZERO, reading).await;
            });
            // Memory that can be had now is nobody's target any more.
            if let Some(mut other) = arena.try_alloc(1 << 20) {
                other.fill(0xEE);
                std::thread::yield_now();
                assert!(other.iter().all(|b| *b == 0xEE));
            }
        }
        drop(engine);
        assert_eq!(arena.stats().in_use_bytes, 0);
    }

    #[test]
    fn more_operations_than_slots_wait_their_turn() {
        let Some(engine) = engine() else { return };
        let file = file(1 << 16);
        let engine = Arc::new(engine);
        crate::runtime::block_on(async {
            let reads = (0..3 * IN_FLIGHT_OPS_MAX).map(|i| {
                let (engine, file) = (Arc::clone(&engine), Arc::clone(&file));
                tokio::spawn(async move {
                    let offset = i % 60_000;
                    let outcome = run(&*engine, &file, offset as u64, filled(100), false).await;
                    let Done { work: Work::Read { buf, .. }, moved: 100, .. } = outcome.unwrap()
                    else {
                        panic!("short")
                    };
                    assert!((0..100).all(|k| buf[k] == ((offset + k) / 7) as u8));
                })
            });
            for read in reads.collect::<Vec<_>>() {
                read.await.unwrap();
            }
        })
        .unwrap();
        assert_eq!(engine.slots.available_permits(), IN_FLIGHT_OPS_MAX);
    }

    #[test]
    fn registered_slabs_are_used_for_direct_operations_and_move_the_right_bytes() {
        let Some(engine) = engine() else { return };
        // O_DIRECT needs a disk; the target folder is on one where tests usually run.
        let target = concat!(env!("CARGO_MANIFEST_DIR"), "/target/tmp");
        std::fs::create_dir_all(target).unwrap();
        let folder = tempfile::tempdir_in(target).unwrap();
        let path = folder.path().join("file");
        let data: Vec<u8> = (0..4 << 20).map(|i| (i / 4099) as u8).collect();
        std::fs::write(&path, &data).unwrap();
        let opened = open_maybe_direct(&path, OpenMode::Read, true).unwrap();
        let (file, true) = opened else {
            println!("skipped: no O_DIRECT in {}", folder.path().display());
            return;
        };
        let file = Arc::new(file);
        let Some(hook) = ring_hook() else { return };
        let options =
            |hooks| ArenaOptions { limit_bytes: 8 << 20, huge_pages: true, warm: true, hooks };
        // Several arenas one after the other get the same addresses with other pages.
        for round in 0..5_u64 {
            let arena = Arena::with_options(options(vec![Arc::clone(&hook)]));
            let buf = arena.try_alloc(1 << 20).unwrap();
            let work = Work::Read { buf, need_bytes: 1 << 20 };
            let at = round << 19;
            let read = crate::runtime::block_on(run(&engine, &file, at, work, true)).unwrap();
            let done = read.unwrap();
            let Work::Read { buf, .. } = done.work else { panic!("not a read") };
            let at = at as usize;
            assert!(buf[..] == data[at..at + (1 << 20)]);
            assert!(done.fixed || registered().1.is_some());
        }
    }

    #[test]
    fn the_kernels_errors_arrive_as_such() {
        let Some(engine) = engine() else { return };
        let read_only = Arc::new(File::open("/proc/self/exe").unwrap());
        let work = Work::Write { data: bytes::Bytes::from_static(b"x") };
        let outcome = crate::runtime::block_on(run(&engine, &read_only, 0, work, false)).unwrap();
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
