//! Saves and restores through real files: one rank, many ranks as threads, and what retention,
//! overwriting and disagreement do.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use drivetrain::Error;
use drivetrain::checkpoint::meet::{Meet, MemoryMeet};
use drivetrain::checkpoint::rects::Rect;
use drivetrain::checkpoint::{Checkpointer, Options, SaveOptions, Target, TensorIn};
use drivetrain::storage::Store;
use drivetrain::storage::local::{LocalOptions, LocalStore};

/// As a caller saves who waits anyway: no second staging slot is made for it.
pub const BLOCKING: SaveOptions = SaveOptions {
    overwrite: false,
    blocking: true,
    skip_after: None,
    metrics: BTreeMap::new(),
    stage: None,
    may_repeat: false,
};
const WAIT: Duration = Duration::from_mins(1);

/// A tensor with its own bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Owned {
    pub path: String,
    pub shape: Vec<i64>,
    pub rect: Rect,
    pub data: Vec<u8>,
    pub replicas: Vec<u32>,
}

impl Owned {
    pub fn whole(path: &str, shape: &[i64], seed: u64) -> Self {
        let len = shape.iter().product::<i64>() as u64;
        let word = |i: u64| (i + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes();
        let mut data: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
        data.truncate(len as usize);
        Self {
            path: format!("[\"{path}\"]"),
            shape: shape.to_vec(),
            rect: Rect::whole(shape),
            data,
            replicas: Vec::new(),
        }
    }

    pub fn replicated(mut self, world_size: u32) -> Self {
        self.replicas = (0..world_size).collect();
        self
    }

    /// Rows `from..to`.
    pub fn rows(&self, from: i64, to: i64) -> Self {
        let row = self.data.len() / self.shape[0].max(1) as usize;
        let mut part = self.clone();
        part.rect.offsets[0] = from;
        part.rect.extent[0] = to - from;
        part.data = self.data[from as usize * row..to as usize * row].to_vec();
        part
    }

    pub fn input(&self) -> TensorIn<'_> {
        TensorIn {
            path: self.path.clone(),
            dtype: "U8".into(),
            shape: self.shape.clone(),
            rect: self.rect.clone(),
            data: &self.data,
            replicas: self.replicas.clone(),
            pin_rank: None,
        }
    }
}

pub fn local(root: &Path) -> Arc<dyn Store> {
    Arc::new(LocalStore::new(root, LocalOptions::default()).unwrap())
}

pub fn alone(root: &Path, options: Options) -> Checkpointer {
    Checkpointer::new(local(root), 0, 1, options, None).unwrap()
}

pub fn save(ckpt: &Checkpointer, step: i64, tensors: &[Owned]) -> Result<i64, Arc<Error>> {
    save_with(ckpt, step, tensors, &format!("{{\"step\":{step}}}"), BLOCKING)
}

pub fn save_with(
    ckpt: &Checkpointer,
    step: i64,
    tensors: &[Owned],
    state: &str,
    options: SaveOptions,
) -> Result<i64, Arc<Error>> {
    let inputs: Vec<_> = tensors.iter().map(Owned::input).collect();
    ckpt.save(step, &inputs, state, "{\"rng\":1}", options).map_err(Arc::new)?.wait(WAIT)
}

/// Reads the given rectangles back.
pub fn read(ckpt: &Checkpointer, step: i64, like: &[Owned]) -> Result<Vec<Owned>, Error> {
    let open = ckpt.open(step)?;
    let mut found: Vec<Owned> = like.to_vec();
    for tensor in &mut found {
        tensor.data.fill(0xAA);
    }
    let targets = found
        .iter_mut()
        .map(|t| Target {
            path: t.path.clone(),
            dtype: "U8".into(),
            shape: t.shape.clone(),
            rect: t.rect.clone(),
            data: &mut t.data,
        })
        .collect();
    open.read_into(targets)?;
    Ok(found)
}

/// A small state of many shapes, different for each seed.
pub fn state(seed: u64) -> Vec<Owned> {
    vec![
        Owned::whole("embedding", &[1000, 33], seed),
        Owned::whole("big", &[20, 1 << 16], seed + 1),
        Owned::whole("scalar", &[], seed + 2),
        Owned::whole("empty", &[0, 4], seed + 3),
        Owned::whole("weird.name/..", &[5, 1, 7], seed + 4),
    ]
}

#[test]
fn what_was_saved_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), Options::default());
    assert!(ckpt.steps().unwrap().is_empty() && ckpt.candidates().unwrap().is_empty());
    for step in [10, 20] {
        assert_eq!(save(&ckpt, step, &state(step as u64)).unwrap(), step);
    }
    assert_eq!(ckpt.steps().unwrap(), [10, 20]);
    assert_eq!(ckpt.candidates().unwrap(), [(20, None), (10, None)]);
    for step in [10, 20] {
        let saved = state(step as u64);
        assert_eq!(read(&ckpt, step, &saved).unwrap(), saved);
        let open = ckpt.open(step).unwrap();
        assert_eq!(open.manifest().state_json, format!("{{\"step\":{step}}}"));
        assert_eq!(open.per_rank_json(0), Some("{\"rng\":1}"));
        assert_eq!(open.per_rank_json(1), None);
        assert!(ckpt.verify(step).unwrap().is_empty());
    }
    let names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(matches!(ckpt.open(15), Err(Error::NotFound { .. })));
    ckpt.close().unwrap();
}

#[test]
fn a_committed_step_is_refused_unless_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), Options::default());
    save(&ckpt, 5, &state(1)).unwrap();
    let error = save(&ckpt, 5, &state(2)).unwrap_err();
    assert!(matches!(&*error, Error::AlreadyExists { .. }), "{error}");
    assert_eq!(read(&ckpt, 5, &state(1)).unwrap(), state(1));
    save_with(&ckpt, 5, &state(2), "{}", SaveOptions { overwrite: true, ..BLOCKING }).unwrap();
    assert_eq!(read(&ckpt, 5, &state(2)).unwrap(), state(2));
    let attempts = std::fs::read_dir(dir.path().join("step-00000005")).unwrap().count();
    assert_eq!(attempts, 2, "manifest.json and one attempt");
}

#[test]
fn retention_keeps_what_it_should_and_foreign_files() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { keep_last: Some(2), keep_every: Some(30), ..Options::default() };
    let ckpt = alone(dir.path(), options);
    std::fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    save(&ckpt, 10, &state(1)).unwrap();
    let foreign = dir.path().join("step-00000010/plot.png");
    std::fs::write(&foreign, "mine").unwrap();
    for step in [20, 30, 40, 50] {
        save(&ckpt, step, &state(step as u64)).unwrap();
    }
    assert_eq!(ckpt.steps().unwrap(), [30, 40, 50]);
    assert!(foreign.exists() && dir.path().join("notes.txt").exists());
    assert_eq!(std::fs::read_dir(dir.path().join("step-00000010")).unwrap().count(), 1);
    assert!(!dir.path().join("step-00000020").exists());
}

pub fn ranks(
    store: &Arc<dyn Store>,
    meet: Option<&Arc<MemoryMeet>>,
    world_size: u32,
    timeout: Duration,
) -> Vec<Checkpointer> {
    let make = |rank| {
        let meet = meet.map(|m| Arc::clone(m) as Arc<dyn Meet>);
        let options = Options { timeout, ..Options::default() };
        Checkpointer::new(Arc::clone(store), rank, world_size, options, meet).unwrap()
    };
    (0..world_size).map(make).collect()
}

pub fn on_all<T: Send>(
    ranks: &[Checkpointer],
    work: impl Fn(u32, &Checkpointer) -> T + Sync,
) -> Vec<T> {
    thread::scope(|s| {
        let spawn = |(r, ckpt)| {
            let work = &work;
            s.spawn(move || work(r as u32, ckpt))
        };
        let handles: Vec<_> = ranks.iter().enumerate().map(spawn).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// Rank `r`'s share of a state that is partly sharded by rows and partly replicated.
pub fn share(rank: u32, world_size: u32, seed: u64) -> Vec<Owned> {
    let (r, w) = (i64::from(rank), i64::from(world_size));
    let sharded = Owned::whole("sharded", &[37, 1000], seed);
    let own = sharded.rows(37 * r / w, 37 * (r + 1) / w);
    vec![
        own,
        Owned::whole("big", &[20, 1 << 20], seed + 1).replicated(world_size),
        Owned::whole("small", &[100], seed + 2).replicated(world_size),
    ]
}

#[test]
fn many_ranks_write_once_and_any_number_reads() {
    for by_files in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let store = local(dir.path());
        let meet = Arc::new(MemoryMeet::default());
        let three = ranks(&store, (!by_files).then_some(&meet), 3, WAIT);
        for step in [1, 2] {
            let saved = on_all(&three, |r, ckpt| save(ckpt, step, &share(r, 3, step as u64)));
            assert!(saved.iter().all(|s| matches!(s, Ok(s) if *s == step)), "{saved:?}");
        }
        let said = on_all(&three, |r, c| c.agree("t", &format!("r{r}"), &mut || Ok(())).unwrap());
        assert!(said.iter().all(|s| s == &["r0", "r1", "r2"]));
        on_all(&three, |_, c| c.close().unwrap());
        let data: u64 = walk(dir.path()).values().sum();
        assert!(data < 2 * (21 << 20) + (1 << 20), "replicas written once: {data}");
        let one = alone(dir.path(), Options::default());
        let whole = [
            Owned::whole("sharded", &[37, 1000], 2),
            Owned::whole("big", &[20, 1 << 20], 3),
            Owned::whole("small", &[100], 4),
        ];
        assert_eq!(read(&one, 2, &whole).unwrap(), whole);
        for (from, to) in [(0, 1), (10, 20), (36, 37), (5, 5)] {
            let part = [whole[0].rows(from, to)];
            assert_eq!(read(&one, 2, &part).unwrap(), part);
        }
        assert_eq!(one.open(2).unwrap().manifest().per_rank_json.len(), 3);
        assert!(one.verify(2).unwrap().is_empty());
        if !by_files {
            let left = meet.keys();
            assert!(left.len() <= 3, "{left:?}");
        }
        let left: Vec<_> = walk(dir.path()).into_keys().filter(|p| p.contains(".meet")).collect();
        assert!(left.len() <= 2, "{left:?}");
    }
}

/// Sizes of all files by path.
pub fn walk(root: &Path) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(root).unwrap().display().to_string();
                found.insert(name, path.metadata().unwrap().len());
            }
        }
    }
    found
}

#[test]
fn a_missing_rank_is_named_on_all_ranks_and_nothing_stays() {
    let dir = tempfile::tempdir().unwrap();
    let store = local(dir.path());
    let meet = Arc::new(MemoryMeet::default());
    let mut three = ranks(&store, Some(&meet), 3, Duration::from_secs(3));
    drop(three.pop());
    let tensors: Vec<_> = (0..2).map(|r| vec![share(r, 3, 1).swap_remove(2)]).collect();
    let failed = on_all(&three, |r, ckpt| save(ckpt, 1, &tensors[r as usize]).unwrap_err());
    for error in failed {
        assert!(matches!(&*error, Error::Timeout { .. }), "{error}");
        assert!(error.to_string().contains("rank 2"), "{error}");
    }
    assert!(walk(dir.path()).is_empty(), "{:?}", walk(dir.path()));
    let failed = on_all(&three, |_, c| c.agree("restore", "", &mut || Ok(())).unwrap_err());
    assert!(failed.iter().all(|e| e.to_string().contains("rank 2")), "{failed:?}");
}

/// Spoils what one rank saves: (rank, tensors, state, step).
type Change<'a> = &'a (dyn Fn(u32, &mut Vec<Owned>, &mut String, &mut i64) + Sync);

#[test]
fn ranks_that_differ_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = local(dir.path());
    let meet = Arc::new(MemoryMeet::default());
    let three = ranks(&store, Some(&meet), 3, WAIT);
    let refused = |step: i64, change: Change<'_>| {
        let errors = on_all(&three, |r, ckpt| {
            let (mut tensors, mut state, mut step) = (share(r, 3, 1), "{\"a\":1}".into(), step);
            change(r, &mut tensors, &mut state, &mut step);
            let saved = save_with(ckpt, step, &tensors, &state, BLOCKING);
            saved.unwrap_err().to_string()
        });
        assert!(errors.iter().all(|e| *e == errors[0]), "one error for all: {errors:?}");
        assert!(walk(dir.path()).is_empty(), "{:?}", walk(dir.path()));
        errors[0].clone()
    };
    let text = refused(1, &|r, _, state, _| {
        if r == 2 {
            *state = "{\"a\":2}".into();
        }
    });
    assert!(text.contains("key a") && text.contains("[2]"), "{text}");
    let text = refused(2, &|r, tensors, _, _| {
        if r == 1 {
            tensors[2] = Owned::whole("other", &[100], 1).replicated(3);
        }
    });
    assert!(text.contains("other") && text.contains("rank 1"), "{text}");
    let text = refused(3, &|r, _, _, step| {
        if r == 1 {
            *step = 4;
        }
    });
    assert!(text.contains("rank 1") && text.contains("step 4"), "{text}");
    let text = refused(5, &|r, tensors, _, _| {
        if r == 1 {
            tensors[0] = tensors[0].rows_at(1, 20);
        }
    });
    assert!(text.contains("sharded"), "{text}");
    // The ranks can go on after a refusal.
    let saved = on_all(&three, |r, ckpt| save(ckpt, 9, &share(r, 3, 1)));
    assert!(saved.iter().all(Result::is_ok), "{saved:?}");
}

impl Owned {
    /// The same bytes claimed to lie elsewhere, so that chunks overlap and leave a gap.
    fn rows_at(&self, from: i64, _to: i64) -> Self {
        let mut part = self.clone();
        part.rect.offsets[0] = from;
        part
    }
}

#[test]
fn an_unwritable_root_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "x").unwrap();
    let refused = LocalStore::new(&dir.path().join("file/below"), LocalOptions::default())
        .and_then(|s| Checkpointer::new(Arc::new(s), 0, 1, Options::default(), None));
    assert!(refused.is_err());
}
