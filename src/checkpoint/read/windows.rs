//! Turns the chunks that are wanted into few, large, page-aligned reads.

/// Largest read: full bandwidth on the disks we measured, and a window still fits a cache.
pub const WINDOW_BYTES_MAX: u64 = 8 << 20;
/// Gap that is cheaper to read than to skip with another request.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Reads start on a page, as O_DIRECT wants.
const ALIGN_BYTES: u64 = 4096;

/// A range that must not be cut is at most this long, wherever it starts on a page.
pub const WHOLE_BYTES_MAX: u64 = WINDOW_BYTES_MAX - ALIGN_BYTES;

/// A range of a file that is wanted; `id` is the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    pub id: usize,
    pub start: u64,
    pub end: u64,
    /// Whether it comes in one part; then it is at most [`WHOLE_BYTES_MAX`] long.
    pub whole: bool,
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
            let next = if range.whole { range.end - 1 } else { at };
            let fits = windows
                .last()
                .is_some_and(|w| at >= w.start && at <= w.end + GAP_BYTES_MAX && next < limit(w));
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
    /// What is left when the parts before number `first` are done, and that one up to `reached`.
    pub fn rest(&self, first: usize, reached: u64) -> Window {
        let mut parts = self.parts.get(first..).unwrap_or_default().to_vec();
        if let Some(part) = parts.first_mut() {
            part.start = part.start.max(reached);
        }
        let start = parts.iter().map(|p| p.start).min().unwrap_or(self.end);
        Window { file: self.file, start: start - start % ALIGN_BYTES, end: self.end, parts }
    }

    /// The parts from number `first` on that are shorter than `short_bytes` and lie within
    /// `most_bytes`; at least the first.
    pub fn together(&self, first: usize, short_bytes: u64, most_bytes: u64) -> &[Part] {
        let rest = self.parts.get(first..).unwrap_or_default();
        let Some(start) = rest.first().map(|p| p.start) else { return rest };
        let fits = |p: &Part| p.end - p.start < short_bytes && p.end <= start + most_bytes;
        let count = rest.iter().take_while(|p| fits(p)).count();
        &rest[..count.max(1)]
    }
}

fn limit(window: &Window) -> u64 {
    window.start + WINDOW_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Wherever a window is left off, the rest holds exactly the other bytes.
    fn check_cuts(window: &Window) {
        let bytes = |parts: &[Part]| parts.iter().map(|p| p.end - p.start).sum::<u64>();
        for (i, part) in window.parts.iter().enumerate() {
            let reached = u64::midpoint(part.start, part.end);
            let rest = window.rest(i, reached);
            let done = bytes(&window.parts[..i]) + (reached - part.start);
            assert_eq!(done + bytes(&rest.parts), bytes(&window.parts));
            assert!(rest.start.is_multiple_of(ALIGN_BYTES) && rest.start <= reached);
            assert!(reached - rest.start < ALIGN_BYTES && rest.end == window.end);
            let group = window.together(i, 64 << 10, 256 << 10);
            let end = group.iter().map(|p| p.end).max().unwrap();
            assert!(group[0] == *part && (group.len() == 1 || end - part.start <= 256 << 10));
        }
        assert!(window.rest(window.parts.len(), window.end).parts.is_empty());
    }

    proptest! {
        #[test]
        fn every_wanted_byte_is_in_exactly_one_part(
            lengths in prop::collection::vec(
                (0_u64..200_000, 0_u64..20_000_000, any::<bool>()), 0..12
            )
        ) {
            let mut at = 0;
            let wanted: Vec<_> = lengths.iter().enumerate().map(|(id, &(gap, len, whole))| {
                let start = at + gap;
                at = start + if whole { len % (WHOLE_BYTES_MAX + 1) } else { len };
                Wanted { id, start, end: at, whole }
            }).collect();
            let windows = windows(3, wanted.clone());
            let mut next: Vec<u64> = wanted.iter().map(|w| w.start).collect();
            for w in &windows {
                check_cuts(w);
            }
            let mut end = 0;
            for w in &windows {
                prop_assert!(w.start % ALIGN_BYTES == 0 && w.end - w.start <= WINDOW_BYTES_MAX);
                prop_assert!(w.start + ALIGN_BYTES > end, "read again: {} {}", w.start, end);
                end = w.end;
                for p in &w.parts {
                    prop_assert!(p.start >= w.start && p.end <= w.end);
                    prop_assert_eq!(p.start, next[p.id]);
                    prop_assert!(!wanted[p.id].whole || p.end == wanted[p.id].end);
                    next[p.id] = p.end;
                }
            }
            for (w, n) in wanted.iter().zip(next) {
                prop_assert!(w.start == w.end || n == w.end);
            }
        }
    }
}
