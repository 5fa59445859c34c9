//! Any way of spreading tensors over any number of ranks, saved and read back by any other: against
//! the gathered tensor, element by element. Worlds of up to 64 ranks as threads of this process.

use std::sync::Arc;
use std::time::Duration;

use drivetrain::checkpoint::flat::{flat_range, is_flat};
use drivetrain::checkpoint::meet::MemoryMeet;
use drivetrain::checkpoint::rects::Rect;
use drivetrain::storage::{StorageOptions, Store, open_store};

use crate::commit::{Owned, on_all, ranks, read, save};

const WAIT: Duration = Duration::from_mins(2);
/// Seeds of a usual run; `DRIVETRAIN_LONG=1` tries many more.
const CASES: u64 = 24;
const CASES_LONG: u64 = 400;

/// Splitmix64, so that a seed names a case.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number from `low` to `high`, both included.
    fn within(&mut self, low: i64, high: i64) -> i64 {
        low + (self.next() % (high - low + 1) as u64) as i64
    }
}

/// The ranges of one tensor that each rank holds, and who else holds them.
type Spread = Vec<Vec<(Rect, Vec<u32>)>>;

/// Cuts 0..size into parts, some of them empty.
fn cuts(draw: &mut Draw, size: i64, parts: usize) -> Vec<(i64, i64)> {
    let mut at: Vec<i64> = (1..parts).map(|_| draw.within(0, size)).collect();
    at.extend([0, size]);
    at.sort_unstable();
    at.windows(2).map(|w| (w[0], w[1] - w[0])).collect()
}

/// Two numbers whose product is the world, as the rows and columns of a mesh.
fn mesh(draw: &mut Draw, world: u32) -> (u32, u32) {
    let divisors: Vec<u32> = (1..=world).filter(|d| world.is_multiple_of(*d)).collect();
    let rows = divisors[draw.within(0, divisors.len() as i64 - 1) as usize];
    (rows, world / rows)
}

fn everywhere(world: u32, range: &Rect) -> Spread {
    let all: Vec<u32> = (0..world).collect();
    vec![vec![(range.clone(), if world > 1 { all } else { vec![] })]; world as usize]
}

/// Each mesh dimension cuts a tensor dimension, or repeats (HSDP, tensor parallelism and both).
fn grid(draw: &mut Draw, shape: &[i64], world: u32) -> Spread {
    let (rows, columns) = mesh(draw, world);
    let dims = shape.len() as i64;
    let (by_row, by_column) = (draw.within(0, dims - 1), draw.within(-1, dims - 1));
    let row_cuts = cuts(draw, shape[by_row as usize], rows as usize);
    let mut spread = Spread::new();
    let fine: Vec<Vec<(i64, i64)>> = row_cuts
        .iter()
        .map(|cut| {
            let size = if by_column == by_row { cut.1 } else { shape[by_column.max(0) as usize] };
            cuts(draw, size, columns as usize)
        })
        .collect();
    // All rows of the mesh cut another dimension alike.
    let of_row = |row: u32| if by_column == by_row { &fine[row as usize] } else { &fine[0] };
    for rank in 0..world {
        let (row, column) = (rank / columns, rank % columns);
        let mut rect = Rect::whole(shape);
        let mut cut = |dim: i64, (start, len): (i64, i64)| {
            rect.offsets[dim as usize] += start;
            rect.extent[dim as usize] = len;
        };
        cut(by_row, row_cuts[row as usize]);
        let mut same = Vec::new();
        if by_column >= 0 {
            cut(by_column, of_row(row)[column as usize]);
        } else if columns > 1 {
            same = (row * columns..(row + 1) * columns).collect();
        }
        spread.push(vec![(rect, same)]);
    }
    spread
}

/// Several rectangles per rank, as strided sharding makes them.
fn strided(draw: &mut Draw, shape: &[i64], world: u32) -> Spread {
    let dim = draw.within(0, shape.len() as i64 - 1) as usize;
    let mut spread = vec![Vec::new(); world as usize];
    let mut at = 0;
    for (n, (start, len)) in cuts(draw, shape[dim], 3 * world as usize).into_iter().enumerate() {
        assert_eq!(start, at);
        at += len;
        let mut rect = Rect::whole(shape);
        (rect.offsets[dim], rect.extent[dim]) = (start, len);
        if len > 0 {
            spread[n % world as usize].push((rect, vec![]));
        }
    }
    spread
}

/// Ranges of the flattened tensor, each on one rank or on several.
fn flattened(draw: &mut Draw, shape: &[i64], world: u32) -> Spread {
    let (parts, copies) = mesh(draw, world);
    let parts_cut = cuts(draw, shape.iter().product(), parts as usize);
    let of = |rank: u32| {
        let (start, len) = parts_cut[(rank / copies) as usize];
        let range = if shape.len() == 1 { rows(start, len) } else { flat_range(start, len) };
        let first = rank / copies * copies;
        let same = if copies > 1 { (first..first + copies).collect() } else { vec![] };
        vec![(range, same)]
    };
    (0..world).map(of).collect()
}

fn rows(start: i64, len: i64) -> Rect {
    Rect { offsets: vec![start], extent: vec![len] }
}

/// Halves of halves, given to anyone: no grid at all.
fn pieces(draw: &mut Draw, shape: &[i64], world: u32) -> Spread {
    let mut spread = vec![Vec::new(); world as usize];
    let mut open = vec![Rect::whole(shape)];
    while let Some(rect) = open.pop() {
        let dim = draw.within(0, shape.len() as i64 - 1) as usize;
        if open.len() < 12 && rect.extent[dim] > 1 && draw.within(0, 3) > 0 {
            let cut = draw.within(1, rect.extent[dim] - 1);
            let (mut low, mut high) = (rect.clone(), rect.clone());
            low.extent[dim] = cut;
            high.offsets[dim] += cut;
            high.extent[dim] -= cut;
            open.extend([low, high]);
        } else {
            spread[draw.within(0, i64::from(world) - 1) as usize].push((rect, vec![]));
        }
    }
    spread
}

/// Any of the above.
fn spread(draw: &mut Draw, shape: &[i64], world: u32) -> Spread {
    let kinds = if shape.is_empty() { 1 } else { 4 };
    match draw.within(0, kinds) {
        1 => flattened(draw, shape, world),
        2 => grid(draw, shape, world),
        3 => strided(draw, shape, world),
        4 => pieces(draw, shape, world),
        _ => everywhere(world, &Rect::whole(shape)),
    }
}

/// The elements of a range, picked one by one.
fn pick(whole: &Owned, range: &Rect, replicas: Vec<u32>) -> Owned {
    let shape = &whole.shape;
    let inside = |n: i64| {
        if is_flat(range, shape) {
            return n >= range.offsets[0] && n < range.offsets[0] + range.extent[0];
        }
        let mut rest = n;
        (0..shape.len()).rev().fold(true, |found, d| {
            let i = rest % shape[d];
            rest /= shape[d];
            found && i >= range.offsets[d] && i < range.offsets[d] + range.extent[d]
        })
    };
    let data = whole.data.iter().enumerate().filter(|(n, _)| inside(*n as i64));
    Owned {
        rect: range.clone(),
        data: data.map(|(_, byte)| *byte).collect(),
        replicas,
        ..whole.clone()
    }
}

fn shares(draw: &mut Draw, tensors: &[Owned], world: u32) -> Vec<Vec<Owned>> {
    let mut of_rank = vec![Vec::new(); world as usize];
    for whole in tensors {
        for (rank, ranges) in spread(draw, &whole.shape, world).into_iter().enumerate() {
            for (range, replicas) in ranges {
                of_rank[rank].push(pick(whole, &range, replicas));
            }
        }
    }
    of_rank
}

fn one_case(seed: u64, worlds: &[u32], tensors: usize) {
    let mut draw = Draw(seed);
    let any = |draw: &mut Draw| worlds[draw.within(0, worlds.len() as i64 - 1) as usize];
    let tensors: Vec<Owned> = (0..tensors)
        .map(|i| {
            let dims = draw.within(0, 3);
            let shape: Vec<i64> = (0..dims).map(|_| draw.within(1, 9)).collect();
            Owned::whole(&format!("t{i}"), &shape, draw.next())
        })
        .collect();
    let root = format!("memory://mesh/{seed}");
    let store: Arc<dyn Store> = open_store(&root, &StorageOptions::default()).unwrap();
    let world = any(&mut draw);
    let saved = shares(&mut draw, &tensors, world);
    let meet = Arc::new(MemoryMeet::default());
    let writers = ranks(&store, Some(&meet), world, WAIT);
    let done = on_all(&writers, |r, ckpt| save(ckpt, 1, &saved[r as usize]));
    assert!(done.iter().all(Result::is_ok), "seed {seed}: {done:?}");
    let open = writers[0].open(1).unwrap();
    let stored: u64 = open.tensors().flat_map(|(_, c)| c).map(|c| c.length).sum();
    let bytes: usize = tensors.iter().map(|t| t.data.len()).sum();
    assert_eq!(stored, bytes as u64, "seed {seed}: each byte is stored once");
    assert!(writers[0].verify(1).unwrap().is_empty(), "seed {seed}");
    for _ in 0..3 {
        let world = any(&mut draw);
        for (rank, wanted) in shares(&mut draw, &tensors, world).into_iter().enumerate() {
            let got = read(&writers[0], 1, &wanted).unwrap();
            assert!(got == wanted, "seed {seed}: rank {rank} of {world} reads something else");
        }
    }
}

fn seeds(from: u64) -> std::ops::Range<u64> {
    let long = std::env::var_os("DRIVETRAIN_LONG").is_some();
    from..from + if long { CASES_LONG } else { CASES }
}

#[test]
fn any_spread_reads_what_any_other_saved() {
    for seed in seeds(0) {
        one_case(seed, &[1, 2, 3, 4, 6, 8], 12);
    }
}

#[test]
fn large_worlds_do_too() {
    for seed in seeds(10_000).step_by(4) {
        one_case(seed, &[16, 24, 49, 64], 4);
    }
}

#[test]
fn a_range_that_nobody_wrote_or_two_did_is_refused_by_name() {
    let whole = Owned::whole("w", &[4, 6], 1);
    let wrong = [
        vec![vec![flat_range(0, 10)], vec![flat_range(11, 13)]],
        vec![vec![flat_range(0, 12)], vec![flat_range(11, 13)]],
        vec![vec![flat_range(0, 10)], vec![Rect { offsets: vec![2, 0], extent: vec![2, 6] }]],
        vec![vec![flat_range(0, 13)], vec![Rect { offsets: vec![2, 0], extent: vec![2, 6] }]],
    ];
    for (n, parts) in wrong.iter().enumerate() {
        let root = format!("memory://mesh-refused/{n}");
        let store: Arc<dyn Store> = open_store(&root, &StorageOptions::default()).unwrap();
        let meet = Arc::new(MemoryMeet::default());
        let both = ranks(&store, Some(&meet), 2, WAIT);
        let failed = on_all(&both, |r, ckpt| {
            let own: Vec<_> =
                parts[r as usize].iter().map(|range| pick(&whole, range, vec![])).collect();
            save(ckpt, 1, &own).unwrap_err().to_string()
        });
        assert!(failed.iter().all(|e| e.contains("[\"w\"]") && e.contains("wrote")), "{failed:?}");
        assert!(both[0].steps().unwrap().is_empty());
    }
}
