//! The driver: one task per pass that plans steps in order, funds them and sets them going.

use std::sync::Arc;

use super::budget::Charge;
use super::engine::Engine;
use super::pass::PassState;
use super::plan::{Cell, Cost, Layout, plan_cell, plan_reads};
use super::slots::SlotBuffer;
use super::work::{Funding, Sample, Start, StepWork, keeps_bytes};
use crate::error::{Error, Result};
use crate::order::{EpochOrder, Partition};
use crate::telemetry::Stage;

/// Runs a pass to its end, to an error or until it is cancelled.
pub async fn drive(engine: Arc<Engine>, pass: Arc<PassState>, partition: Partition) {
    let order = engine.order.epoch(pass.epoch());
    for step in pass.steps() {
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
const FIRST_STEP_POLL: std::time::Duration = std::time::Duration::from_millis(1);

struct Planned {
    samples: Vec<Sample>,
    cells: Vec<Vec<Cell>>,
    layout: Layout,
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
    let cells: Vec<Vec<Cell>> = samples
        .iter()
        .map(|s| {
            engine.fields.iter().map(|f| plan_cell(&engine.table, f, s.row as usize)).collect()
        })
        .collect();
    let layout = Layout::new(&engine.fields, &cells);
    let cost = Cost::new(layout.bytes(), &plan_reads(pieces(engine, &cells)));
    Planned { samples, cells, layout, cost }
}

fn pieces<'a>(
    engine: &'a Engine,
    cells: &'a [Vec<Cell>],
) -> impl Iterator<Item = (&'a crate::index::BlobRef, bool)> {
    cells.iter().flat_map(move |sample| {
        sample.iter().zip(engine.fields.iter()).flat_map(|(cell, field)| {
            let pieces = if let Cell::Encoded(pieces) = cell { &pieces[..] } else { &[] };
            pieces.iter().map(move |piece| (&piece.blob, keeps_bytes(field)))
        })
    })
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
    let private = funding.is_none();
    if pass.is_cancelled() {
        return Err(Error::Closed { what: "this iterator".into() });
    }
    let bytes = planned.layout.bytes();
    let slots = if planned.layout.regions.is_empty() {
        None
    } else {
        let buffer = engine.buffer(bytes, private);
        Some(SlotBuffer::new(buffer, planned.layout.regions.clone())?)
    };
    let start = Start {
        step,
        samples: planned.samples,
        layout: planned.layout,
        slots,
        funding: funding.unwrap_or_default(),
        private,
    };
    let work = StepWork::new(Arc::clone(engine), Arc::clone(pass), start);
    pass.started(step, planned.cost.output_bytes, &work);
    work.launch(planned.cells.into_iter().enumerate().collect());
    Ok(work)
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
    pass.set_blocked(Some(step));
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
