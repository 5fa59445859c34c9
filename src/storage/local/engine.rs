//! Which engine moves the bytes: chosen once per process, from the best the kernel allows down.
//!
//! The ladder is io_uring with registered buffers, io_uring with plain buffers, a thread pool. Why
//! a rung was refused is kept for `doctor`. `DRIVETRAIN_IO_ENGINE=uring|threads` overrides the
//! choice. A forked child gets engines of its own: a ring or a pool must not be shared, and its
//! threads did not survive the fork.

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::op::{Op, Outcome, Work};
use super::threads::ThreadEngine;
use super::uring::UringEngine;
use crate::error::{Error, Result};

/// Operations one engine holds at once, queued or in the kernel; more wait their turn in order.
pub const IN_FLIGHT_OPS_MAX: usize = 512;
/// Environment variable that overrides the choice.
pub const ENGINE_ENV: &str = "DRIVETRAIN_IO_ENGINE";

/// Which engine a store uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// The best this process can have (or what `DRIVETRAIN_IO_ENGINE` says).
    #[default]
    Auto,
    /// io_uring, or an error that says why not.
    Uring,
    /// The thread pool.
    Threads,
}

/// The engine that did an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring.
    Uring,
    /// Thread pool.
    Threads,
}

/// Moves bytes for operations that own their memory.
pub trait Engine: fmt::Debug + Send + Sync {
    /// Which one it is.
    fn kind(&self) -> EngineKind;
    /// Process that started it; its threads do not exist in a forked child.
    fn pid(&self) -> u32;
    /// Bounds the operations in flight.
    fn slots(&self) -> &Arc<Semaphore>;
    /// Takes an operation; its outcome goes to the operation's receiver.
    fn submit(&self, op: Op);
}

/// Runs one operation to its end. Dropping the future early leaves the operation, with its buffer
/// and file, to the engine.
pub async fn run(
    engine: &dyn Engine,
    file: &Arc<File>,
    offset: u64,
    work: Work,
    direct: bool,
) -> Outcome {
    let slots = Arc::clone(engine.slots());
    let permit = slots.acquire_owned().await.map_err(|_| stopped())?;
    let (op, outcome) = Op::new(Arc::clone(file), offset, work, direct, permit);
    engine.submit(op);
    outcome.await.map_err(|_| stopped())?
}

/// The error of an operation whose engine went away.
pub fn stopped() -> io::Error {
    io::Error::other("the I/O engine stopped")
}

/// Engines of one process.
struct Engines {
    pid: u32,
    uring: Option<Result<Arc<UringEngine>, String>>,
    threads: Option<Arc<ThreadEngine>>,
}

static ENGINES: Mutex<Option<Engines>> = Mutex::new(None);

/// The engine for a choice, started at first use.
pub fn engine(choice: EngineChoice) -> Result<Arc<dyn Engine>> {
    let mut slot = ENGINES.lock();
    let engines = current(&mut slot);
    match from_environment(choice)? {
        EngineChoice::Threads => Ok(engines.threads()?),
        EngineChoice::Uring => engines.uring().map(|e| e as Arc<dyn Engine>).map_err(|reason| {
            Error::Unsupported { what: format!("io_uring ({reason})"), advice: advice(&reason) }
        }),
        EngineChoice::Auto => match engines.uring() {
            Ok(uring) => Ok(uring),
            Err(_) => Ok(engines.threads()?),
        },
    }
}

/// The ring if it can be had, else why not.
pub fn uring() -> Result<Arc<UringEngine>, String> {
    current(&mut ENGINES.lock()).uring()
}

/// Makes running rings look at the registered buffers; starts none.
pub fn wake_rings() {
    if let Some(engines) = ENGINES.lock().as_ref()
        && engines.pid == std::process::id()
        && let Some(Ok(uring)) = &engines.uring
    {
        uring.wake_all();
    }
}

fn current(slot: &mut Option<Engines>) -> &mut Engines {
    let pid = std::process::id();
    if slot.as_ref().is_some_and(|engines| engines.pid != pid) {
        // Made before a fork: the threads are not here, so neither joining nor closing makes sense.
        std::mem::forget(slot.take());
    }
    slot.get_or_insert(Engines { pid, uring: None, threads: None })
}

impl Engines {
    fn uring(&mut self) -> Result<Arc<UringEngine>, String> {
        let start = || UringEngine::start().map(Arc::new).map_err(|e| refusal(&e));
        let made = self.uring.get_or_insert_with(|| {
            start().inspect_err(|reason| {
                tracing::warn!("local I/O uses threads: {reason}; {}", advice(reason));
            })
        });
        made.clone()
    }

    fn threads(&mut self) -> Result<Arc<ThreadEngine>> {
        if let Some(engine) = &self.threads {
            return Ok(Arc::clone(engine));
        }
        let made = ThreadEngine::start().map_err(|e| Error::io("start threads", "I/O pool", e))?;
        Ok(Arc::clone(self.threads.insert(Arc::new(made))))
    }
}

fn from_environment(choice: EngineChoice) -> Result<EngineChoice> {
    let Some(value) = std::env::var_os(ENGINE_ENV) else { return Ok(choice) };
    match (choice, value.to_string_lossy().as_ref()) {
        (EngineChoice::Auto, "uring") => Ok(EngineChoice::Uring),
        (EngineChoice::Auto, "threads") => Ok(EngineChoice::Threads),
        (_, "uring" | "threads" | "auto" | "") => Ok(choice),
        (_, other) => Err(Error::invalid(ENGINE_ENV, "uring, threads or auto", other)),
    }
}

/// Value of sysctl `kernel.io_uring_disabled`: 0 for all, 1 for a group, 2 for nobody.
pub fn io_uring_disabled() -> Option<i64> {
    let value = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()?;
    value.trim().parse().ok()
}

/// Says why io_uring was refused, telling a missing system call from a forbidden one.
fn refusal(e: &io::Error) -> String {
    match (e.raw_os_error(), io_uring_disabled()) {
        (Some(libc::ENOSYS), _) => "the kernel has no io_uring (ENOSYS)".into(),
        (Some(libc::EPERM | libc::EACCES), Some(value @ (1 | 2))) => {
            format!("sysctl kernel.io_uring_disabled is {value} (EPERM)")
        }
        (Some(libc::EPERM | libc::EACCES), _) => {
            "a seccomp filter or security module forbids io_uring_setup (EPERM)".into()
        }
        (Some(libc::ENOMEM), _) => "the locked-memory limit is too low for a ring (ENOMEM)".into(),
        _ => format!("io_uring_setup failed: {e}"),
    }
}

/// What to change for a reason given by [`refusal`].
pub fn advice(reason: &str) -> String {
    let text = if reason.contains("sysctl") {
        "as root run: sysctl -w kernel.io_uring_disabled=0"
    } else if reason.contains("seccomp") {
        "run the container with a seccomp profile that allows io_uring_setup, io_uring_enter and \
         io_uring_register"
    } else if reason.contains("locked-memory") {
        "raise it (ulimit -l, or LimitMEMLOCK= of the service)"
    } else {
        "use a kernel from 5.11 on, or stay on the thread pool"
    };
    text.into()
}
