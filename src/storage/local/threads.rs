//! The thread-pool engine: `pread` and `pwrite` on a few threads of our own. It works everywhere,
//! also where io_uring is forbidden.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, bounded};
use tokio::sync::Semaphore;

use super::engine::{Engine, EngineKind, IN_FLIGHT_OPS_MAX};
use super::op::{Next, Op, Work};

/// Threads that wait in the kernel: enough for a device to see a queue, few enough to stay cheap.
const THREADS: usize = 4;

/// A small pool of threads that read and write.
#[derive(Debug)]
pub struct ThreadEngine {
    ops: Option<Sender<Op>>,
    pid: u32,
    slots: Arc<Semaphore>,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadEngine {
    /// Starts the threads.
    pub fn start() -> io::Result<Self> {
        let (ops, queue) = bounded(IN_FLIGHT_OPS_MAX);
        let threads = (0..THREADS).map(|_| worker(queue.clone())).collect::<io::Result<_>>()?;
        let slots = Arc::new(Semaphore::new(IN_FLIGHT_OPS_MAX));
        Ok(Self { ops: Some(ops), pid: std::process::id(), slots, threads })
    }
}

fn worker(queue: Receiver<Op>) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("drivetrain-io".into()).spawn(move || {
        for op in queue {
            perform(op);
        }
    })
}

fn perform(mut op: Op) {
    loop {
        let result = transfer(&mut op);
        match op.advance(result) {
            Ok(Next::Again) => {}
            Ok(Next::Complete) => return op.answer(Ok(())),
            Err(e) => return op.answer(Err(e)),
        }
    }
}

fn transfer(op: &mut Op) -> io::Result<usize> {
    let (at, from, len) = (op.file_offset(), op.moved(), op.chunk_len());
    match &mut op.work {
        Work::Read { buf, .. } => op.file.read_at(&mut buf[from..from + len], at),
        Work::Write { data } => op.file.write_at(&data[from..from + len], at),
        Work::Sync => op.file.sync_all().map(|()| 0),
    }
}

impl Engine for ThreadEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Threads
    }

    fn pid(&self) -> u32 {
        self.pid
    }

    fn slots(&self) -> &Arc<Semaphore> {
        &self.slots
    }

    fn submit(&self, op: Op) {
        // The channel is as deep as there are slots, so it is never full for an op with a slot.
        if let Some(ops) = &self.ops
            && let Err(refused) = ops.try_send(op)
        {
            refused.into_inner().answer(Err(super::engine::stopped()));
        }
    }
}

impl Drop for ThreadEngine {
    fn drop(&mut self) {
        self.ops = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
