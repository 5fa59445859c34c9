//! Where the elements of a parameter lie among the flat vectors of the ranks.
//!
//! | stage | layout of a group of parameters |
//! |---|---|
//! | 1, 2 | one vector of all parameters in order, cut into a part per rank, padded at the end |
//! | 3 | each parameter is cut into equal parts, padded at its end; a rank's vectors hold its part of each parameter in order |

/// Elements that lie together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// The rank that has them.
    pub rank: usize,
    /// Number of its vector.
    pub vector: usize,
    /// First element in the vector.
    pub at: u64,
    /// First element in the flattened parameter.
    pub start: u64,
    /// Number of elements.
    pub len: u64,
}

/// Elements `first..first + count` of vectors that follow one another, as (vector, element in it,
/// elements before it, number).
fn across(
    lens: impl IntoIterator<Item = u64>,
    first: u64,
    count: u64,
) -> impl Iterator<Item = (usize, u64, u64, u64)> {
    let mut begin = 0_u64;
    let end = first.saturating_add(count);
    lens.into_iter().enumerate().filter_map(move |(vector, len)| {
        let (from, to) = (begin, begin.saturating_add(len));
        begin = to;
        let (start, stop) = (first.max(from), end.min(to));
        (start < stop).then(|| (vector, start - from, start - first, stop - start))
    })
}

/// Stages 1 and 2: elements `first..first + count` of vector `vector`, of which rank r has the next
/// `lens[r]` elements.
pub fn consecutive(lens: &[u64], vector: usize, first: u64, count: u64) -> Vec<Cut> {
    across(lens.iter().copied(), first, count)
        .map(|(rank, at, start, len)| Cut { rank, vector, at, start, len })
        .collect()
}

/// Elements of a parameter that each of `world` ranks has in stage 3, padding included.
pub fn share(count: u64, world: u64) -> u64 {
    count.div_ceil(world.max(1))
}

/// Stage 3: a parameter of `count` elements, whose parts start at element `first` of the vectors of
/// `lens` elements that each rank has.
pub fn interleaved(lens: &[u64], world: u64, first: u64, count: u64) -> Vec<Cut> {
    let share = share(count, world);
    let mut cuts = Vec::new();
    for rank in 0..world {
        let before = (rank * share).min(count);
        let own = share.min(count - before);
        cuts.extend(across(lens.iter().copied(), first, own).map(|(vector, at, start, len)| Cut {
            rank: rank as usize,
            vector,
            at,
            start: before + start,
            len,
        }));
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(cuts: &[Cut]) -> Vec<(usize, usize, u64, u64, u64)> {
        cuts.iter().map(|c| (c.rank, c.vector, c.at, c.start, c.len)).collect()
    }

    #[test]
    fn parts_of_one_vector() {
        // Parameters of 7, 5 and 3 elements over three ranks of 6, 6 and 3.
        let lens = [6, 6, 3];
        assert_eq!(plain(&consecutive(&lens, 2, 0, 7)), [(0, 2, 0, 0, 6), (1, 2, 0, 6, 1)]);
        assert_eq!(plain(&consecutive(&lens, 2, 7, 5)), [(1, 2, 1, 0, 5)]);
        assert_eq!(plain(&consecutive(&lens, 2, 12, 3)), [(2, 2, 0, 0, 3)]);
        assert_eq!(plain(&consecutive(&lens, 2, 12, 0)), []);
    }

    #[test]
    fn parts_of_each_parameter() {
        // Five elements over three ranks: 2, 2, 1 and one of padding; they start at element 4 of
        // vectors of 5 and 9.
        let cuts = interleaved(&[5, 9], 3, 4, 5);
        let want = [(0, 0, 4, 0, 1), (0, 1, 0, 1, 1), (1, 0, 4, 2, 1), (1, 1, 0, 3, 1)];
        assert_eq!(plain(&cuts), [want.as_slice(), &[(2, 0, 4, 4, 1)]].concat());
        // One element over three ranks, and none.
        assert_eq!(plain(&interleaved(&[5], 3, 0, 1)), [(0, 0, 0, 0, 1)]);
        assert_eq!(plain(&interleaved(&[5], 3, 0, 0)), []);
        assert_eq!((share(5, 3), share(6, 3), share(1, 3), share(0, 3)), (2, 2, 1, 0));
    }
}
