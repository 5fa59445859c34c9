//! io_uring.
use super::engine::{Engine, EngineKind};
use super::op::Op;
use std::io;
use std::sync::Arc;
use tokio::sync::Semaphore;
/// Ring.
#[derive(Debug)]
pub struct UringEngine {
    slots: Arc<Semaphore>,
}
impl UringEngine {
    /// Starts.
    pub fn start() -> io::Result<Self> {
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }
}
impl Engine for UringEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Uring
    }
    fn slots(&self) -> &Arc<Semaphore> {
        &self.slots
    }
    fn submit(&self, op: Op) {
        op.answer(Err(super::engine::stopped()));
    }
}
