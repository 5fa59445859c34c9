//! The process's one tokio runtime: made at first use, made anew in a forked child.
//!
//! A child of `fork` inherits the runtime's memory but none of its threads, so the pid that made a
//! runtime is kept beside it; a child leaks the dead one (joining it would hang) and makes its own.

use std::future::Future;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};

use crate::error::{Error, Result};

/// Control-plane threads: they only shuffle futures, decoding has its own pool.
const WORKER_THREADS: usize = 2;

static RUNTIME: Mutex<Option<(u32, Arc<Runtime>)>> = Mutex::new(None);

/// The runtime of this process.
pub fn runtime() -> Result<Arc<Runtime>> {
    let pid = std::process::id();
    let mut slot = RUNTIME.lock();
    if let Some((owner, runtime)) = slot.as_ref()
        && *owner == pid
    {
        return Ok(Arc::clone(runtime));
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(WORKER_THREADS)
        .thread_name("drivetrain-rt")
        .enable_all()
        .build()
        .map_err(|e| Error::io("start runtime", "tokio", e))?;
    let runtime = Arc::new(runtime);
    if let Some((_, dead)) = slot.replace((pid, Arc::clone(&runtime))) {
        std::mem::forget(dead);
    }
    Ok(runtime)
}

/// Runs a future to its end from a thread that is not one of the runtime's own.
pub fn block_on<F: Future>(future: F) -> Result<F::Output> {
    Ok(runtime()?.block_on(future))
}
