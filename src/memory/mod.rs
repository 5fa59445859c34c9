//! Memory with a budget: page-aligned buffers, byte permits, shared-memory slots.
//!
//! | type | what it is for |
//! |---|---|
//! | [`Arena`] | buffers under one limit, re-used; a request waits until it fits |
//! | [`Buffer`] | one of them, returned on drop |
//! | [`Permits`] | a semaphore over bytes for everything that is not a buffer |
//! | [`Slot`] | memory for one staged snapshot: a file in shared memory, or private |
//! | [`PinHook`] | told about every slab: CUDA pinning, io_uring registration |

mod arena;
mod buffer;
mod mapping;
mod permits;
mod pin;
mod pool;
mod slot;
mod stream_copy;

pub use arena::{Arena, ArenaOptions, ArenaStats};
pub use buffer::{Buffer, PAGE_BYTES};
pub use permits::{Permit, Permits};
pub use pin::PinHook;
pub use pool::class_bytes;
pub use slot::{SHM_DIR_ENV, Slot, SlotFile, shm_dir, shm_slots, slot_prefix, slots_prefix};
pub use stream_copy::{copy_past_cache, copy_seen};
