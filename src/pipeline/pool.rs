//! The decoder threads of one loader.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam::channel::{self, Receiver, Sender};

use super::work::Job;
use crate::error::{Error, Result};
use crate::transform::ImageScratch;

enum Message {
    Run(Arc<Job>),
    Stop,
}

/// Hands jobs to the threads.
#[derive(Clone)]
pub struct JobSender(Sender<Message>);

impl std::fmt::Debug for JobSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JobSender({} waiting)", self.0.len())
    }
}

impl JobSender {
    /// Queues a job. The queue needs no bound of its own: every job belongs to a funded step, and
    /// those are bounded in number and bytes. After the threads have stopped jobs are dropped.
    pub fn send(&self, job: Arc<Job>) {
        let _ = self.0.send(Message::Run(job));
    }
}

/// The threads. Stopped and joined by [`Pool::stop`] or on drop.
#[derive(Debug)]
pub struct Pool {
    sender: JobSender,
    threads: Vec<JoinHandle<()>>,
}

/// What a decoder thread keeps between jobs, so that nothing is allocated per sample.
#[derive(Debug, Default)]
pub struct Scratch {
    /// For pictures.
    pub image: ImageScratch,
    /// For clouds that are cut to a fixed number of points.
    pub points: Vec<f32>,
}

impl Pool {
    /// Starts `threads` threads.
    pub fn start(threads: usize) -> Result<Self> {
        let (sender, receiver) = channel::unbounded();
        let mut pool = Self { sender: JobSender(sender), threads: Vec::with_capacity(threads) };
        for index in 0..threads {
            let receiver = receiver.clone();
            let thread = thread::Builder::new()
                .name(format!("drivetrain-dec{index}"))
                .spawn(move || serve(&receiver))
                .map_err(|e| Error::io("start", "decoder thread", e))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Where jobs go.
    pub fn sender(&self) -> JobSender {
        self.sender.clone()
    }

    /// Lets the threads finish the jobs queued before, and joins them.
    pub fn stop(&mut self) {
        for _ in &self.threads {
            let _ = self.sender.0.send(Message::Stop);
        }
        for thread in self.threads.drain(..) {
            // A decoder thread catches panics of jobs; there is nothing to learn from its end.
            let _ = thread.join();
        }
    }

    /// Forgets the threads: they did not survive a fork.
    pub fn forget(&mut self) {
        std::mem::take(&mut self.threads).into_iter().for_each(std::mem::forget);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

fn serve(receiver: &Receiver<Message>) {
    let mut scratch = Scratch::default();
    while let Ok(Message::Run(job)) = receiver.recv() {
        // The step's watch has made it an error; the thread lives on for other steps.
        if catch_unwind(AssertUnwindSafe(|| job.run(&mut scratch))).is_err() {
            scratch = Scratch::default();
        }
    }
}
