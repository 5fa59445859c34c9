//! Merging byte ranges of one source into few reads.

/// Gap worth reading over: below this a second request costs more than the bytes between
/// (an NVMe read of 64 KiB takes about as long as one of 4 KiB; object stores favour even more).
pub const READ_GAP_BYTES_MAX: u64 = 64 << 10;

/// Longest merged read; longer ones would delay the first decode without saving requests.
pub const READ_MERGED_BYTES_MAX: u64 = 8 << 20;

/// A wanted range: `tag` finds the user again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Source id.
    pub source: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The bytes stay alive in the delivered batch; such ranges are not merged with passing ones,
    /// nor over gaps, so that a batch holds no bytes it does not show.
    pub keep: bool,
    /// Index into the caller's list.
    pub tag: usize,
}

/// One read and the ranges it serves, each with its start inside the read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// Source id.
    pub source: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Its bytes stay alive in the batch.
    pub keep: bool,
    /// (tag, start inside the read) of each range.
    pub users: Vec<(usize, u64)>,
}

/// Merges ranges that are close together. Every wanted range is inside exactly one read.
pub fn coalesce(mut wanted: Vec<Wanted>) -> Vec<Read> {
    wanted.sort_by_key(|w| (w.source, w.keep, w.offset, w.length));
    let mut reads: Vec<Read> = Vec::new();
    for range in wanted {
        let end = range.offset.saturating_add(range.length);
        if let Some(last) = reads.last_mut()
            && joins(last, &range)
        {
            last.users.push((range.tag, range.offset - last.offset));
            last.length = last.length.max(end - last.offset);
            continue;
        }
        reads.push(Read {
            source: range.source,
            offset: range.offset,
            length: range.length,
            keep: range.keep,
            users: vec![(range.tag, 0)],
        });
    }
    reads
}

fn joins(read: &Read, range: &Wanted) -> bool {
    let read_end = read.offset.saturating_add(read.length);
    let end = range.offset.saturating_add(range.length);
    let gap_max = if range.keep { 0 } else { READ_GAP_BYTES_MAX };
    read.source == range.source
        && read.keep == range.keep
        && range.offset <= read_end.saturating_add(gap_max)
        && (end <= read_end || end - read.offset <= READ_MERGED_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn want(source: u32, offset: u64, length: u64, tag: usize) -> Wanted {
        Wanted { source, offset, length, keep: false, tag }
    }

    #[test]
    fn near_ranges_share_a_read_and_far_ones_do_not() {
        let reads = coalesce(vec![
            want(0, 1000, 10, 1),
            want(0, 0, 10, 0),
            want(0, 1 << 20, 10, 2),
            want(1, 0, 5, 3),
        ]);
        assert_eq!(reads.len(), 3);
        assert_eq!((reads[0].length, reads[0].users.clone()), (1010, vec![(0, 0), (1, 1000)]));
    }

    #[test]
    fn kept_bytes_are_joined_only_when_they_touch() {
        let keep = |offset, tag| Wanted { keep: true, ..want(0, offset, 10, tag) };
        let reads = coalesce(vec![keep(0, 0), keep(10, 1), keep(21, 2)]);
        assert_eq!(reads.iter().map(|r| r.length).collect::<Vec<_>>(), [20, 10]);
    }

    proptest! {
        #[test]
        fn every_range_is_inside_its_read(
            ranges in proptest::collection::vec(
                (0u32..3, 0u64..4_000_000, 0u64..9_000_000, any::<bool>()), 0..60)
        ) {
            let wanted: Vec<Wanted> = ranges.iter().enumerate()
                .map(|(tag, r)| Wanted { source: r.0, offset: r.1, length: r.2, keep: r.3, tag })
                .collect();
            let reads = coalesce(wanted.clone());
            let mut seen = vec![0; wanted.len()];
            for read in &reads {
                for (tag, start) in &read.users {
                    let w = wanted[*tag];
                    seen[*tag] += 1;
                    prop_assert_eq!((w.source, w.keep), (read.source, read.keep));
                    prop_assert_eq!(read.offset + start, w.offset);
                    prop_assert!(start + w.length <= read.length);
                }
                let single = read.users.iter().map(|(t, _)| wanted[*t].length).max().unwrap_or(0);
                prop_assert!(read.length <= READ_MERGED_BYTES_MAX.max(single));
            }
            prop_assert!(seen.iter().all(|n| *n == 1));
        }
    }
}
