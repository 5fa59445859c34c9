//! The arena under load: buffers never overlap, the limit holds, memory is re-used, waits end.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use drivetrain::Error;
use drivetrain::memory::{
    Arena, ArenaOptions, Buffer, PAGE_BYTES, PinHook, Slot, shm_slots, slot_prefix,
};
use futures::FutureExt;
use proptest::prelude::*;

const MIB: usize = 1 << 20;

fn cold(limit_bytes: usize) -> Arena {
    let hooks = Vec::new();
    Arena::with_options(ArenaOptions { limit_bytes, huge_pages: false, warm: false, hooks })
}

fn ends(buf: &Buffer) -> (usize, usize) {
    let start = buf.as_ptr().addr();
    (start, start + buf.capacity())
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(40)
    })]

    /// Random allocations and frees: live buffers are disjoint, keep what was written to them, and
    /// the mapped total stays under the limit.
    #[test]
    fn live_buffers_are_disjoint_and_the_limit_holds(
        steps in proptest::collection::vec((0..3_u8, 0..24_u32, any::<u16>()), 1..300),
        limit_mib in 1..40_usize,
    ) {
        let arena = cold(limit_mib * MIB);
        let mut live: Vec<(u8, Buffer)> = Vec::new();
        for (n, (action, size_log, jitter)) in steps.into_iter().enumerate() {
            if action == 0 && !live.is_empty() {
                let (mark, buf) = live.swap_remove(jitter as usize % live.len());
                let mut ends = buf.iter().take(64).chain(buf.iter().rev().take(64));
                prop_assert!(ends.all(|b| *b == mark));
            } else {
                let len = (1_usize << size_log) + usize::from(jitter) % (1 << size_log);
                let Some(mut buf) = arena.try_alloc(len) else { continue };
                prop_assert_eq!(buf.len(), len);
                prop_assert_eq!(buf.as_ptr().addr() % PAGE_BYTES, 0);
                let (start, end) = ends(&buf);
                for (_, other) in &live {
                    let (from, to) = ends(other);
                    prop_assert!(end <= from || to <= start);
                }
                let mark = n as u8;
                let len = buf.len();
                buf[..len.min(64)].fill(mark);
                buf[len.saturating_sub(64)..].fill(mark);
                live.push((mark, buf));
            }
            let stats = arena.stats();
            let held: usize = live.iter().map(|(_, b)| b.capacity()).sum();
            prop_assert_eq!(stats.in_use_bytes, held);
            prop_assert!(stats.slabs_bytes <= stats.limit_bytes);
            prop_assert!(stats.peak_bytes >= held);
        }
        live.clear();
        prop_assert_eq!(arena.stats().in_use_bytes, 0);
        // Whatever was cut before, all of it can be had in one piece again.
        prop_assert!(arena.try_alloc(limit_mib * MIB).is_some());
    }
}

/// 1,000 rounds of batches of varying sizes map no more after the first hundred.
#[test]
fn a_thousand_rounds_keep_slabs_flat() {
    let arena = cold(256 * MIB);
    let mut held: HashMap<usize, Vec<Buffer>> = HashMap::new();
    let mut after_warmup = 0;
    for round in 0..1000_usize {
        held.remove(&(round % 3));
        let sizes = [1000, 300_000, 3 * MIB, 777_777 + round % 37 * 4096, 20 * MIB + round % 11];
        let bufs = sizes.iter().map(|len| arena.try_alloc(*len).unwrap()).collect();
        held.insert(round % 3, bufs);
        if round == 100 {
            after_warmup = arena.stats().slabs_bytes;
        }
    }
    assert_eq!(arena.stats().slabs_bytes, after_warmup);
    assert_eq!(arena.stats().waits, 0);
}

#[test]
fn sizes_up_to_the_limit_work_and_larger_ones_are_refused_by_name() {
    let arena = cold(600 * MIB);
    for len in [1024, 52_000_000, 64 * MIB, 512 * MIB, 600 * MIB] {
        assert_eq!(arena.try_alloc(len).unwrap().len(), len);
    }
    assert!(arena.try_alloc(600 * MIB + 1).is_none());
    let error = arena.alloc(600 * MIB + 1).now_or_never().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Invalid { what, .. } if what == "memory_limit"), "{error}");
    arena.trim();
    assert_eq!(arena.stats().slabs_bytes, 0);
}

#[test]
fn a_wait_ends_when_buffers_come_back_in_order() {
    let arena = cold(8 * MIB);
    let held = arena.try_alloc(6 * MIB).unwrap();
    let mut large = Box::pin(arena.alloc(8 * MIB));
    let mut small = Box::pin(arena.alloc(MIB));
    assert!((&mut large).now_or_never().is_none());
    // Would fit, but the large one came first and must not starve.
    assert!((&mut small).now_or_never().is_none());
    assert!(arena.try_alloc(1).is_none());
    drop(held);
    let large = large.now_or_never().unwrap().unwrap();
    assert!((&mut small).now_or_never().is_none());
    drop(large);
    assert_eq!(small.now_or_never().unwrap().unwrap().len(), MIB);
    assert_eq!((arena.stats().waits, arena.stats().in_use_bytes), (2, 0));
}

#[test]
fn a_cancelled_wait_gives_up_its_place() {
    let arena = cold(4 * MIB);
    let held = arena.try_alloc(4 * MIB).unwrap();
    let mut gone = Box::pin(arena.alloc(4 * MIB));
    assert!((&mut gone).now_or_never().is_none());
    let mut next = Box::pin(arena.alloc(MIB));
    assert!((&mut next).now_or_never().is_none());
    drop(gone);
    drop(held);
    assert!(next.now_or_never().unwrap().is_ok());
    assert_eq!((arena.stats().waiting, arena.stats().in_use_bytes), (0, 0));
}

#[test]
fn threads_share_an_arena_without_starving_or_losing_bytes() {
    let arena = cold(8 * MIB);
    std::thread::scope(|scope| {
        for seed in 0..4_usize {
            let arena = &arena;
            scope.spawn(move || {
                for i in 0..500 {
                    let len = 1 + (seed * 7919 + i * 104_729) % (5 * MIB);
                    let mut buf = arena.alloc_blocking(len, Duration::from_mins(1)).unwrap();
                    buf[0] = seed as u8;
                    buf[len - 1] = seed as u8;
                    std::thread::yield_now();
                    assert_eq!((buf[0], buf[len - 1]), (seed as u8, seed as u8));
                }
            });
        }
    });
    let stats = arena.stats();
    assert_eq!((stats.in_use_bytes, stats.waiting), (0, 0));
    assert!(stats.slabs_bytes <= 8 * MIB);
}

#[test]
fn a_blocked_thread_is_told_what_it_waited_for() {
    let arena = cold(MIB);
    let _held = arena.try_alloc(MIB).unwrap();
    let error = arena.alloc_blocking(5, Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
}

#[derive(Debug, Default)]
struct CountingHook {
    pinned_bytes: AtomicUsize,
    refuse: bool,
}

impl PinHook for CountingHook {
    unsafe fn pin(&self, _ptr: *mut u8, len: usize) -> drivetrain::Result<()> {
        if self.refuse {
            return Err(Error::invalid("pin", "memory", "none"));
        }
        self.pinned_bytes.fetch_add(len, Ordering::SeqCst);
        Ok(())
    }

    unsafe fn unpin(&self, _ptr: *mut u8, len: usize) {
        self.pinned_bytes.fetch_sub(len, Ordering::SeqCst);
    }
}

#[test]
fn every_slab_is_pinned_while_it_lives_and_a_refusal_is_no_error() {
    let (good, bad) =
        (Arc::new(CountingHook::default()), CountingHook { refuse: true, ..Default::default() });
    let arena = Arena::with_options(ArenaOptions {
        limit_bytes: 64 * MIB,
        huge_pages: true,
        warm: true,
        hooks: vec![Arc::clone(&good) as Arc<dyn PinHook>, Arc::new(bad)],
    });
    let buf = arena.try_alloc(40 * MIB).unwrap();
    assert_eq!(good.pinned_bytes.load(Ordering::SeqCst), arena.stats().slabs_bytes);
    assert!(arena.stats().hook_refusals > 0);
    let bytes = buf.into_bytes().slice(10..20);
    drop(arena);
    // The slab outlives its arena as long as a view of a buffer lives.
    assert_eq!(bytes.len(), 10);
    assert!(good.pinned_bytes.load(Ordering::SeqCst) > 0);
    drop(bytes);
    assert_eq!(good.pinned_bytes.load(Ordering::SeqCst), 0);
}

/// Set in the child: the folder of its slot.
const SLOT_CHILD_ENV: &str = "DRIVETRAIN_TEST_SLOT_FOLDER";

/// The child's part: stages a snapshot and dies without a word.
#[test]
fn slot_child() {
    let Some(folder) = std::env::var_os(SLOT_CHILD_ENV) else { return };
    let name = format!("{}run-0-0", slot_prefix(0xABC));
    let mut slot = Slot::create(folder.as_ref(), &name, 3 * MIB).unwrap();
    slot.warm();
    slot.fill(0x5A);
    println!("staged");
    std::thread::sleep(Duration::from_mins(1));
}

/// A killed process's snapshot can be adopted; a living one's cannot be taken.
#[test]
fn a_slot_outlives_the_process_that_filled_it() {
    use std::io::{BufRead, BufReader};
    let folder = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::slot_child", "--nocapture", "--test-threads=1"])
        .env(SLOT_CHILD_ENV, folder.path())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("staged")));

    let found = shm_slots(folder.path(), &slot_prefix(0xABC)).unwrap();
    assert_eq!((found.len(), found[0].stale, found[0].bytes), (1, false, 3 << 20));
    assert!(Slot::open(folder.path(), &found[0].name).is_err());
    assert!(shm_slots(folder.path(), &slot_prefix(0xABD)).unwrap().is_empty());

    child.kill().unwrap();
    child.wait().unwrap();
    let found = shm_slots(folder.path(), &slot_prefix(0xABC)).unwrap();
    assert!(found[0].stale);
    let adopted = Slot::open(folder.path(), &found[0].name).unwrap();
    assert!(adopted.len() == 3 * MIB && adopted.iter().all(|b| *b == 0x5A));
    adopted.remove().unwrap();
    assert!(shm_slots(folder.path(), "").unwrap().is_empty());
}
