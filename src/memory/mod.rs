//! Memory with a budget: page-aligned buffers, byte permits, shared-memory slots.

mod buffer;

pub use buffer::{Buffer, PAGE_BYTES};
