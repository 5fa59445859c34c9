//! The driver: one task per pass that plans steps in order, funds them and sets them going.

use std::sync::Arc;
use std::time::Duration;

use super::budget::Charge;
use super::coalesce::Read;
use super::engine::Engine;
use super::pass::{PassState, Watch};
use super::plan::{Cell, Cost, Layout, plan_cell, plan_reads};
use super::slots::SlotBuffer;
use super::work::{Funding, Sample, Start, StepWork};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::order::{EpochOrder, Partition};
use crate::telemetry::Stage;

/// Runs a pass to its end, to an error or until it is cancelled.
pub async fn drive(engine: Arc<Engine>, pass: Arc<PassState>, partition: Partition) {
    let order = engine.order.epoch(pass.epoch());
    let mut watch = Watch::new(&pass, 0);
    for step in pass.steps() {
        watch.step = step;
        pass.room().await;
        let sized = engine.fields.iter().all(super::field::Field::is_sized);
        if pass.is_cancelled() {
            return;
        }
        let work = match start(&engine, &pass, &order, &partition, step).await {
            Ok(work) => work,
            Err(error) => return pass.deliver(step, Err(error)),
        };
        if !sized {
            // Pictures of unknown size: the first step shows how much memory the others need.
            let done = Arc::downgrade(&work);
            drop(work);
            while !pass.is_cancelled() && done.strong_count() > 0 {
                tokio::time::sleep(FIRST_STEP_POLL).await;
            }
        }
    }
}

/// How often the first step of a loader with pictures of unknown size is looked at, once.
const FIRST_STEP_POLL: Duration = Duration::from_millis(1);

/// How often a scattered arena is tried again without being told that bytes came back: a read's
/// buffer returns a moment after its step's bytes.
const FREED_POLL: Duration = Duration::from_millis(5);

struct Planned {
    samples: Vec<Sample>,
    cells: Vec<Vec<Cell>>,
    layout: Layout,
    reads: Vec<Read>,
    cost: Cost,
}

fn plan(
    engine: &Engine,
    pass: &PassState,
    order: &EpochOrder,
    partition: &Partition,
    step: u64,
) -> Planned {
    let _timer = engine.stages.time(Stage::Plan);
    let slots = partition.slots(engine.order.samples(), pass.pass().start, step);
    let samples: Vec<Sample> = slots
        .map(|slot| Sample {
            row: order.at(slot.position),
            position: slot.position,
            valid: slot.valid,
            tries: 0,
            masked: false,
        })
        .collect();
    let cell = |row: u64, field| plan_cell(&engine.table, field, row as usize);
    let cells: Vec<Vec<Cell>> =
        samples.iter().map(|s| engine.fields.iter().map(|f| cell(s.row, f)).collect()).collect();
    let layout = Layout::new(&engine.fields, &cells);
    let reads = plan_reads(&engine.fields, cells.iter());
    let cost = Cost::new(layout.bytes(), &reads);
    Planned { samples, cells, layout, reads, cost }
}

async fn start(
    engine: &Arc<Engine>,
    pass: &Arc<PassState>,
    order: &EpochOrder,
    partition: &Partition,
    step: u64,
) -> Result<Arc<StepWork>> {
    let planned = plan(engine, pass, order, partition, step);
    planned.cost.check(engine.budget.limit_bytes())?;
    let funding = fund(engine, pass, step, planned.cost).await;
    let mut private = funding.is_none();
    let needs_slots = !planned.layout.regions.is_empty();
    let main_bytes = if needs_slots { planned.layout.bytes() } else { 0 };
    let mut sizes: Vec<usize> = planned.reads.iter().map(|r| r.length as usize).collect();
    sizes.push(main_bytes);
    let own_bytes = planned.cost.output_bytes + planned.cost.transient_bytes;
    let mut buffers = allocate(engine, pass, (step, own_bytes), &sizes, &mut private).await;
    if pass.is_cancelled() {
        return Err(Error::Closed { what: "this iterator".into() });
    }
    let main = buffers.pop().filter(|_| needs_slots);
    let slots = main.map(|b| SlotBuffer::new(b, planned.layout.regions.clone())).transpose()?;
    let start = Start {
        step,
        samples: planned.samples,
        layout: planned.layout,
        slots,
        funding: funding.unwrap_or_default(),
        private,
    };
    let work = StepWork::new(Arc::clone(engine), Arc::clone(pass), start);
    pass.started(step, planned.cost, &work);
    let reads = planned.reads.into_iter().zip(buffers).collect();
    work.launch(planned.cells.into_iter().enumerate().collect(), reads);
    Ok(work)
}

/// All buffers of a step, in the order of `sizes`. They are taken here, by the driver, in the order
/// of steps, so that waiting for a scattered arena to heal waits for older steps only. Largest
/// first: small ones would break up the ranges that large ones need.
async fn allocate(
    engine: &Engine,
    pass: &PassState,
    step: (u64, u64),
    sizes: &[usize],
    private: &mut bool,
) -> Vec<Buffer> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(sizes[*i]));
    let mut buffers: Vec<Option<Buffer>> = sizes.iter().map(|_| None).collect();
    for index in order {
        buffers[index] = Some(take(engine, pass, step, sizes[index], private).await);
    }
    buffers.into_iter().flatten().collect()
}

async fn take(
    engine: &Engine,
    pass: &PassState,
    (step, own_bytes): (u64, u64),
    bytes: usize,
    private: &mut bool,
) -> Buffer {
    if bytes == 0 {
        return Buffer::heap(0);
    }
    let mut waiting = false;
    while !*private && !pass.is_cancelled() {
        if let Some(buffer) = engine.try_buffer(bytes) {
            if waiting {
                pass.set_blocked(None);
            }
            return buffer;
        }
        if engine.budget.used_bytes() <= own_bytes {
            // Nobody else has memory that could come back: its own buffers lie in the way.
            break;
        }
        waiting = true;
        pass.set_blocked(Some((step, own_bytes)));
        tokio::select! {
            () = engine.budget.freed(FREED_POLL) => {}
            () = pass.private_allowed(step) => *private = true,
        }
    }
    if waiting {
        pass.set_blocked(None);
    }
    engine.trim();
    engine.buffer(bytes, true)
}

/// Memory for a step; `None` if it shall lie outside the limit because the caller holds all of it.
async fn fund(engine: &Engine, pass: &PassState, step: u64, cost: Cost) -> Option<Funding> {
    let total = cost.output_bytes + cost.transient_bytes;
    if total == 0 {
        return Some(Funding::default());
    }
    if let Some(charge) = engine.budget.try_charge(total) {
        return Some(divide(charge, cost));
    }
    let _timer = engine.stages.time(Stage::Memory);
    pass.set_blocked(Some((step, 0)));
    let funding = tokio::select! {
        biased;
        charge = engine.budget.charge(total) => Some(divide(charge, cost)),
        () = pass.private_allowed(step) => None,
    };
    pass.set_blocked(None);
    funding
}

fn divide(mut charge: Charge, cost: Cost) -> Funding {
    let transient = charge.split(cost.transient_bytes);
    Funding { output: Some(charge), transient: Some(transient) }
}
