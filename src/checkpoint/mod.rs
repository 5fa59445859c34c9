//! Snapshot → write → commit → read back.
//!
//! | file | what it does |
//! |---|---|
//! | `layout/` | the bytes on disk: names, rank files, table of chunks, manifest |
//! | `codec/` | compressed chunks |
//! | `plan` | which rank writes what |
//! | `snapshot/` | copies the state into a re-used slot, and finds those of killed processes |
//! | `meet/`, `agree` | how ranks meet, with deadlines |
//! | `commit/` | data files → table → manifest, and taking back what failed |
//! | `read/` | candidates, opening, filling tensors, verifying |
//! | `exchange/` | folders that other programs coordinate, read or write |
//! | `retain/` | which steps stay, whose they are, deleting |
//! | `numbers` | stored elements as numbers |
//! | `rects`, `flat` | rectangles and flat ranges: common parts, copies, the coverage proof |
//! | `checkpointer`, `handle` | what callers hold |

mod agree;
mod checkpointer;
pub mod codec;
mod commit;
pub mod exchange;
pub mod flat;
mod handle;
mod io;
pub mod layout;
pub mod meet;
mod numbers;
mod plan;
mod read;
pub mod rects;
mod retain;
mod snapshot;

pub use checkpointer::{Checkpointer, Options, SaveOptions};
pub use commit::{PackOptions, Tally, scale};
pub use handle::{Outcome, SaveHandle};
pub use plan::TensorIn;
pub use read::{
    Change, OpenStep, Problem, Sharing, Target, Values, candidates, differences, manifest_folders,
    open_folder, open_step, problem_of, verify_step,
};
pub use retain::{
    Adopted, Best, Keep, Known, adopt, committed, remove_steps, root_id, superfluous,
};
pub use snapshot::Left;
