//! What happens when the last job of a step is done: bad samples are masked, replaced or raised,
//! and a complete step is put together and delivered.

use std::sync::Arc;

use super::assemble::assemble;
use super::budget::Charge;
use super::coalesce::Read;
use super::config::OnError;
use super::pass::Watch;
use super::plan::{Cell, Cost, plan_cell, plan_reads};
use super::quarantine::BadSample;
use super::work::{Failure, Outcome, Sample, StepWork};
use crate::error::{Error, Result};
use crate::telemetry::Stage;

/// Substitutes tried for one sample before its error is raised after all.
pub const REPLACE_TRIES_MAX: u64 = 32;

/// Called by whichever thread finished the last job of a round.
pub fn round_done(work: &Arc<StepWork>) {
    if work.pass.is_cancelled() {
        return;
    }
    let _watch = Watch::new(&work.pass, work.step);
    match settle(work) {
        Ok(again) if again.is_empty() => {
            let _timer = work.engine.stages.time(Stage::Assemble);
            work.funding.lock().transient = None;
            work.pass.deliver(work.step, assemble(work));
        }
        Ok(again) => retry(work, &again),
        Err(error) => work.pass.deliver(work.step, Err(error)),
    }
}

/// Applies the policy to every failed sample; returns the slots that get a substitute.
fn settle(work: &StepWork) -> Result<Vec<usize>> {
    let mut again = Vec::new();
    let count = work.samples.lock().len();
    for slot in 0..count {
        let Some((field, failure)) = first_failure(work, slot) else { continue };
        if work.engine.on_error == OnError::Raise || is_fatal(&failure.error) {
            return Err(failure.error);
        }
        if work.engine.on_error == OnError::Mask {
            mask(work, slot, field, &failure);
        } else {
            replace(work, slot, field, *failure)?;
            again.push(slot);
        }
    }
    Ok(again)
}

/// Errors that are not about one sample's bytes.
fn is_fatal(error: &Error) -> bool {
    matches!(error, Error::Invalid { .. } | Error::Closed { .. } | Error::Timeout { .. })
}

/// The first failed field of a slot. Outcomes of good fields are put back.
fn first_failure(work: &StepWork, slot: usize) -> Option<(usize, Box<Failure>)> {
    let mut first = None;
    for field in 0..work.engine.fields.len() {
        match work.take(slot, field) {
            Some(Err(failure)) if first.is_none() => first = Some((field, failure)),
            Some(Err(_)) | None => {}
            Some(outcome) => work.put(slot, field, outcome),
        }
    }
    first
}

fn mask(work: &StepWork, slot: usize, field: usize, failure: &Failure) {
    let mut samples = work.samples.lock();
    let Some(sample) = samples.get_mut(slot) else { return };
    sample.masked = true;
    sample.valid = false;
    work.bad.lock().push(bad_sample(work, sample, field, failure, "mask"));
    drop(samples);
    for field in 0..work.engine.fields.len() {
        work.put(slot, field, Ok(Outcome::Empty));
    }
}

fn replace(work: &StepWork, slot: usize, field: usize, failure: Failure) -> Result<()> {
    let engine = &work.engine;
    let mut samples = work.samples.lock();
    let Some(sample) = samples.get_mut(slot) else { return Ok(()) };
    let mut entry = bad_sample(work, sample, field, &failure, "replace");
    sample.tries += 1;
    if sample.tries > REPLACE_TRIES_MAX.min(engine.order.samples()) {
        return Err(failure.error);
    }
    sample.row = engine.order.at(work.pass.epoch(), sample.position + sample.tries);
    entry.substitute = Some(engine.table.key(sample.row as usize).to_string());
    work.bad.lock().push(entry);
    Ok(())
}

fn bad_sample(
    work: &StepWork,
    sample: &Sample,
    field: usize,
    failure: &Failure,
    action: &str,
) -> BadSample {
    BadSample {
        key: work.engine.table.key(sample.row as usize).to_string(),
        field: work.engine.fields.get(field).map_or_else(String::new, |f| f.name.clone()),
        source: failure.source.clone(),
        offset: failure.offset,
        reason: failure.error.to_string(),
        epoch: work.pass.epoch(),
        position: sample.position,
        action: action.to_string(),
        substitute: None,
    }
}

/// Memory for the substitutes' reads; false if the limit has no room for them. They may use what
/// the step was given for its first reads, which are over. Nobody waits here: finished younger
/// steps may have the memory, and they wait for this one.
fn fund(work: &StepWork, cost: Cost) -> bool {
    let mut guard = work.funding.lock();
    let funding = &mut *guard;
    let have = funding.transient.as_ref().map_or(0, Charge::bytes);
    let more = cost.transient_bytes.saturating_sub(have);
    let Some(mut charge) = work.engine.budget.try_charge(more + cost.output_bytes) else {
        return false;
    };
    let output = charge.split(cost.output_bytes);
    for (part, more) in [(&mut funding.output, output), (&mut funding.transient, charge)] {
        match part {
            Some(part) => part.join(more),
            None => *part = Some(more),
        }
    }
    true
}

/// Reads and decodes the substitutes.
fn retry(work: &Arc<StepWork>, slots: &[usize]) {
    let rows: Vec<(usize, u64)> = {
        let samples = work.samples.lock();
        slots.iter().filter_map(|s| Some((*s, samples.get(*s)?.row))).collect()
    };
    let engine = &work.engine;
    let plan = |row: u64| {
        let cell = |field| plan_cell(&engine.table, field, row as usize);
        engine.fields.iter().map(cell).collect()
    };
    let cells: Vec<(usize, Vec<Cell>)> =
        rows.into_iter().map(|(slot, row)| (slot, plan(row))).collect();
    let reads = plan_reads(&engine.fields, cells.iter().map(|(_, cells)| cells));
    let private = work.private || !fund(work, Cost::new(0, &reads));
    let buffer = |read: &Read| engine.buffer(read.length as usize, private);
    let reads = reads.into_iter().map(|read| (buffer(&read), read)).map(|(b, r)| (r, b)).collect();
    work.launch(cells, reads);
}
