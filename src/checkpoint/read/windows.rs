//! Turns the chunks that are wanted into few, large, page-aligned reads.

/// Largest read: full bandwidth on the disks we measured, and a window still fits a cache.
const WINDOW_BYTES_MAX: u64 = 8 << 20;
/// Gap that is cheaper to read than to skip with another request.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Reads start on a page, as O_DIRECT wants.
const ALIGN_BYTES: u64 = 4096;

/// A range of a file that is wanted; `id` is the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub id: usize,
    pub start: u64,
    pub end: u64,
}

/// Part of a wanted range that a window holds, as offsets in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub id: usize,
    pub start: u64,
    pub end: u64,
}

/// One read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    pub file: usize,
    pub start: u64,
    pub end: u64,
    pub parts: Vec<Part>,
}

/// Windows over one file that together hold every wanted range.
pub fn windows(file: usize, mut wanted: Vec<Wanted>) -> Vec<Window> {
    wanted.sort_by_key(|w| w.start);
    let mut windows: Vec<Window> = Vec::new();
    for range in wanted {
        let mut at = range.start;
        while at < range.end {
            let fits = windows
                .last()
                .is_some_and(|w| at >= w.start && at <= w.end + GAP_BYTES_MAX && at < limit(w));
            if !fits {
                let start = at - at % ALIGN_BYTES;
                windows.push(Window { file, start, end: at, parts: Vec::new() });
            }
            let Some(window) = windows.last_mut() else { break };
            let end = range.end.min(limit(window));
            window.parts.push(Part { id: range.id, start: at, end });
            window.end = window.end.max(end);
            at = end;
        }
    }
    windows
}

impl Window {
    /// The piece `start..end` of this window.
    pub fn cut(&self, start: u64, end: u64) -> Window {
        let parts = self.parts.iter().filter(|p| p.start < end && p.end > start);
        let parts =
            parts.map(|p| Part { id: p.id, start: p.start.max(start), end: p.end.min(end) });
        Window { file: self.file, start, end, parts: parts.collect() }
    }
}

fn limit(window: &Window) -> u64 {
    window.start + WINDOW_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_wanted_byte_is_in_exactly_one_part(
            lengths in prop::collection::vec((0_u64..200_000, 0_u64..20_000_000), 0..12)
        ) {
            let mut at = 0;
            let wanted: Vec<_> = lengths.iter().enumerate().map(|(id, &(gap, len))| {
                let start = at + gap;
                at = start + len;
                Wanted { id, start, end: at }
            }).collect();
            let windows = windows(3, wanted.clone());
            let mut next: Vec<u64> = wanted.iter().map(|w| w.start).collect();
            let mut end = 0;
            for w in &windows {
                prop_assert!(w.start % ALIGN_BYTES == 0 && w.end - w.start <= WINDOW_BYTES_MAX);
                prop_assert!(w.start + ALIGN_BYTES > end, "read again: {} {}", w.start, end);
                end = w.end;
                for p in &w.parts {
                    prop_assert!(p.start >= w.start && p.end <= w.end);
                    prop_assert_eq!(p.start, next[p.id]);
                    next[p.id] = p.end;
                }
            }
            for (w, n) in wanted.iter().zip(next) {
                prop_assert!(w.start == w.end || n == w.end);
            }
        }
    }
}
