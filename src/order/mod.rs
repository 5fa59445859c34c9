//! Order as arithmetic: the sample at position p of epoch e is a pure function of (seed, e, p).
//!
//! | file | what it says |
//! |---|---|
//! | `random` | a counter-based random stream keyed by (seed, epoch, sample, operation) |
//! | `permute` | a keyed bijection of `0..n` in O(1) memory |
//! | `shuffle` | full, block and sequential order built from it |
//! | `partition` | which positions step s of rank r covers, and how the tail is padded or dropped |
//! | `state` | the few integers that say where a loader stands |
//! | `cursor` | how those integers move: passes, epochs, break, load, set_epoch |
//!
//! Nothing here does I/O, allocates per sample or knows about threads. The permutation and the
//! stream are specified with test vectors in `docs/order.md`: changing either silently would break
//! every stored loader state, so a test compares this code with that page.

mod cursor;
mod partition;
mod permute;
mod random;
mod shuffle;
mod state;

pub use cursor::{Cursor, Pass};
pub use partition::{Partition, Slot};
pub use permute::Permutation;
pub use random::{OPERATION_RESERVED, Stream, philox4x32};
pub use shuffle::{EpochOrder, Order, Shuffle};
pub use state::{LoaderState, STATE_VERSION};
