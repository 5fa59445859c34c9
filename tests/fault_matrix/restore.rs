//! Reading fails while restoring: an error that can be retried is not taken for damage, and damage
//! is found whichever read brings it.

use std::sync::Arc;

use drivetrain::Error;
use drivetrain::storage::Store;
use drivetrain::storage::fault::{FaultScript, FaultStore};

use super::outcome::{Ground, NEW_SEED, read_step, save, state, told};
use super::places::{NEW_STEP, name, place};
use super::report::{Row, finish};

const FAULTS: [(&str, &str); 5] = [
    ("eio", "EIO"),
    ("timeout", "timeout"),
    ("truncate", "short read"),
    ("flip", "bit flip"),
    ("delay=20ms", "slow"),
];

#[test]
fn a_fault_at_any_operation_of_a_restore() {
    let ground = Ground::folder().with_old_step();
    let ckpt = ground.checkpointer(&ground.store, None).unwrap();
    save(&ckpt, NEW_STEP, NEW_SEED, false).unwrap();
    ckpt.close().unwrap();
    let faulty = |script: &str| {
        let script = FaultScript::parse(script).unwrap();
        Arc::new(FaultStore::new(Arc::clone(&ground.store), script))
    };
    let counter = faulty("");
    let all = {
        let store: Arc<dyn Store> = counter.clone();
        read_step(&store, NEW_STEP).unwrap();
        counter.history()
    };
    let mut rows = Vec::new();
    for (action, fault) in FAULTS {
        for operation in &all {
            let moves = operation.op == "read";
            if !moves && ["truncate", "flip"].contains(&action) {
                continue;
            }
            let store: Arc<dyn Store> = faulty(&format!("{action}@{}", operation.number));
            let read = read_step(&store, NEW_STEP);
            let (restores, saying) = match read {
                Ok(tensors) if tensors == state(NEW_SEED) => ("new".into(), "nothing".into()),
                Ok(_) => ("NEITHER".into(), "nothing".into()),
                Err(error) => {
                    let damaged = matches!(error, Error::Corrupt { .. });
                    let next = if damaged { "old" } else { "error; new when tried again" };
                    (next.to_string(), told(&Err(Arc::new(error)), name(&operation.path)))
                }
            };
            rows.push(Row {
                fault: fault.into(),
                place: place(operation.op, &operation.path),
                restores,
                told: saying,
                left: "nothing".into(),
            });
        }
    }
    // Nothing of this changed what is stored.
    assert_eq!(super::outcome::restored(&ground.store), "new");
    finish("restore", &rows);
}
