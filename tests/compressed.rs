//! Chunks stored as `planes-zstd`: any range comes back on any mesh, and what is damaged is found.
//! The steps are saved raw and then rewritten here, by what the layout's page says of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drivetrain::Error;
use drivetrain::checkpoint::codec::{Encoder, RAW_BYTES_MIN};
use drivetrain::checkpoint::exchange::{ExportOptions, TargetKind, export};
use drivetrain::checkpoint::flat::flat_range;
use drivetrain::checkpoint::layout::{
    Chunk, Dtype, Manifest, PLANES_CODEC, crc32c, decode_table, encode_table, step_dir,
};
use drivetrain::checkpoint::meet::MemoryMeet;
use drivetrain::checkpoint::rects::Rect;
use drivetrain::checkpoint::{
    Checkpointer, Options, Sharing, Target, TensorIn, differences, open_step,
};
use drivetrain::storage::StorageOptions;

use crate::commit::{BLOCKING, alone, local, on_all, ranks};

const WAIT: Duration = Duration::from_mins(2);
const STATE: &str = r#"{"wide":{"~tensor":{"dtype":"F32","shape":[3600,1100]}},
    "half":{"~tensor":{"dtype":"BF16","shape":[300,31,7]}},
    "byte":{"~tensor":{"dtype":"U8","shape":[40000]}},
    "one":{"~tensor":{"dtype":"F64","shape":[]}}}"#;

/// A tensor of a saved state.
#[derive(Clone, PartialEq)]
pub struct Tensor {
    pub name: &'static str,
    pub dtype: &'static str,
    pub shape: Vec<i64>,
    pub data: Vec<u8>,
}

impl Tensor {
    pub fn path(&self) -> String {
        format!("[\"{}\"]", self.name)
    }

    fn element_bytes(&self) -> usize {
        Dtype::named(self.dtype).unwrap().bytes as usize
    }

    /// Elements of a range, one by one.
    fn part(&self, range: &Rect) -> Vec<u8> {
        if *range == Rect::whole(&self.shape) {
            return self.data.clone();
        }
        let size = self.element_bytes();
        if range.offsets.len() != self.shape.len() {
            let (start, len) = (range.offsets[0] as usize, range.extent[0] as usize);
            return self.data[start * size..(start + len) * size].to_vec();
        }
        let mut found = Vec::new();
        for n in 0..self.data.len() / size {
            let (mut rest, mut inside) = (n as i64, true);
            for d in (0..self.shape.len()).rev() {
                let i = rest % self.shape[d] - range.offsets[d];
                rest /= self.shape[d];
                inside &= (0..range.extent[d]).contains(&i);
            }
            if inside {
                found.extend_from_slice(&self.data[n * size..][..size]);
            }
        }
        found
    }
}

/// Splitmix64.
pub fn noise(count: usize, seed: u64) -> impl Iterator<Item = u64> {
    (1..=count as u64).map(move |i| {
        let n = (seed + i).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let n = (n ^ n >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let n = (n ^ n >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        n ^ n >> 31
    })
}

/// Numbers around zero: the sum of four uniform ones.
fn bells(count: usize, seed: u64) -> impl Iterator<Item = f32> {
    let sum = |n: u64| (0..4).map(|i| (n >> (16 * i)) as u16 as f32 / 65536.0 - 0.5).sum::<f32>();
    // Thirds of it, so that no bit of the mantissa is always zero.
    noise(count, seed).map(move |n| sum(n) / 3.0)
}

fn state(seed: u64) -> Vec<Tensor> {
    let wide = bells(3600 * 1100, seed).flat_map(f32::to_le_bytes).collect();
    let half = bells(300 * 31 * 7, seed + 1).flat_map(|n| (n.to_bits() >> 16).to_le_bytes());
    let half = half.collect::<Vec<u8>>().chunks(4).flat_map(|n| [n[0], n[1]]).collect();
    let byte = noise(40_000, seed).map(|n| (n % 5 + seed % 2) as u8).collect();
    let tensor =
        |name, dtype, shape: &[i64], data| Tensor { name, dtype, shape: shape.to_vec(), data };
    vec![
        tensor("wide", "F32", &[3600, 1100], wide),
        tensor("half", "BF16", &[300, 31, 7], half),
        tensor("byte", "U8", &[40_000], byte),
        tensor("one", "F64", &[], (seed as f64).to_le_bytes().to_vec()),
    ]
}

fn save(ckpt: &Checkpointer, step: i64, parts: &[(&Tensor, Rect)]) {
    let data: Vec<_> = parts.iter().map(|(tensor, range)| tensor.part(range)).collect();
    let inputs: Vec<_> = parts
        .iter()
        .zip(&data)
        .map(|((tensor, range), data)| TensorIn {
            path: tensor.path(),
            dtype: tensor.dtype.into(),
            shape: tensor.shape.clone(),
            rect: range.clone(),
            data,
            replicas: Vec::new(),
            pin_rank: None,
        })
        .collect();
    let (state, own) = (STATE.replace('\n', ""), "{}");
    ckpt.save(step, &inputs, &state, own, BLOCKING).unwrap().wait(WAIT).unwrap();
}

/// Saves steps 1 and 2, and rewrites the second.
fn saved(root: &Path) -> Checkpointer {
    let ckpt = alone(root, Options::default());
    for step in [1, 2] {
        let state = state(step as u64);
        let parts: Vec<_> = state.iter().map(|t| (t, Rect::whole(&t.shape))).collect();
        save(&ckpt, step, &parts);
    }
    compress(root, 2, &|_, _| {});
    ckpt
}

fn read(ckpt: &Checkpointer, step: i64, parts: &[(&Tensor, Rect)]) -> Result<Vec<Vec<u8>>, Error> {
    read_shared(ckpt, step, parts, Sharing::Alone)
}

fn read_shared(
    ckpt: &Checkpointer,
    step: i64,
    parts: &[(&Tensor, Rect)],
    sharing: Sharing,
) -> Result<Vec<Vec<u8>>, Error> {
    let len = |(tensor, range): &(&Tensor, Rect)| {
        range.extent.iter().product::<i64>() as usize * tensor.element_bytes()
    };
    let mut found: Vec<Vec<u8>> = parts.iter().map(|part| vec![0xAA; len(part)]).collect();
    let target = |((tensor, range), data): (&(&Tensor, Rect), _)| Target {
        path: tensor.path(),
        dtype: tensor.dtype.into(),
        shape: tensor.shape.clone(),
        rect: range.clone(),
        data,
    };
    let targets = parts.iter().zip(found.iter_mut().map(Vec::as_mut_slice)).map(target).collect();
    ckpt.open(step)?.read_into_shared(targets, sharing)?;
    Ok(found)
}

fn rank_files(root: &Path, step: i64) -> Vec<PathBuf> {
    let folder = root.join(step_dir(step).unwrap());
    let manifest = manifest(&folder);
    manifest.files[1..].iter().map(|file| folder.join(&file.path)).collect()
}

fn manifest(folder: &Path) -> Manifest {
    Manifest::decode(&std::fs::read(folder.join("manifest.json")).unwrap(), "manifest").unwrap()
}

/// Rewrites a step with all its chunks of some size compressed; `spoil` may change the stored form
/// of one before checksums are computed of it.
fn compress(root: &Path, step: i64, spoil: &dyn Fn(&Chunk, &mut Vec<u8>)) {
    let folder = root.join(step_dir(step).unwrap());
    let mut manifest = manifest(&folder);
    let table = folder.join(&manifest.files[0].path);
    let mut chunks = decode_table(&std::fs::read(&table).unwrap(), "table").unwrap();
    let mut encoder = Encoder::new().unwrap();
    for record in &mut manifest.files[1..] {
        let raw = std::fs::read(folder.join(&record.path)).unwrap();
        let mut entries = serde_json::Map::new();
        let mut data = Vec::new();
        for chunk in chunks.iter_mut().filter(|chunk| chunk.file == record.path) {
            let raw = &raw[chunk.start as usize..(chunk.start + chunk.length) as usize];
            let mut stored = Vec::new();
            if raw.len() >= RAW_BYTES_MIN {
                encoder.encode(Dtype::named(&chunk.dtype).unwrap(), raw, &mut stored).unwrap();
                chunk.codec = PLANES_CODEC.into();
                spoil(chunk, &mut stored);
            } else {
                stored.extend_from_slice(raw);
            }
            chunk.start = data.len() as u64;
            chunk.length = stored.len() as u64;
            chunk.crc32c = crc32c(&stored);
            data.extend(stored);
            let entry = serde_json::json!({
                "dtype": "U8", "shape": [chunk.length], "data_offsets": [chunk.start, data.len()]
            });
            entries.insert(chunk.entry.clone(), entry);
        }
        let text = serde_json::to_vec(&entries).unwrap();
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text);
        record.header_bytes = file.len() as u64;
        record.header_crc32c = format!("{:08x}", crc32c(&file));
        for chunk in chunks.iter_mut().filter(|chunk| chunk.file == record.path) {
            chunk.start += record.header_bytes;
        }
        file.extend(data);
        rewrite(&folder, record, &file);
    }
    rewrite(&folder, &mut manifest.files[0], &encode_table(&chunks).unwrap());
    std::fs::write(folder.join("manifest.json"), manifest.encode().unwrap()).unwrap();
}

fn rewrite(folder: &Path, record: &mut drivetrain::checkpoint::layout::FileRecord, bytes: &[u8]) {
    record.size_bytes = bytes.len() as u64;
    record.crc32c = format!("{:08x}", crc32c(bytes));
    std::fs::write(folder.join(&record.path), bytes).unwrap();
}

/// Ranges of each tensor as other meshes want them: rows, columns, a flat range, all of it.
fn ranges(tensors: &[Tensor]) -> Vec<(&Tensor, Rect)> {
    let rect = |offsets: &[i64], extent: &[i64]| Rect {
        offsets: offsets.to_vec(),
        extent: extent.to_vec(),
    };
    let [wide, half, byte, one] = tensors else { panic!("four tensors") };
    vec![
        (wide, Rect::whole(&wide.shape)),
        (wide, rect(&[2000, 0], &[1, 1100])),
        (wide, rect(&[17, 300], &[2900, 5])),
        (wide, flat_range(1_234_567, 345_678)),
        (half, rect(&[10, 3, 2], &[200, 20, 4])),
        (half, flat_range(5, 60_000)),
        (half, Rect::whole(&half.shape)),
        (byte, rect(&[39_999], &[1])),
        (byte, Rect::whole(&byte.shape)),
        (one, Rect::whole(&[])),
    ]
}

/// Lets the page cache forget a file, as far as it likes to.
fn forget(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[test]
fn any_range_comes_back_from_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = state(3);
    // Saved on three ranks by rows: chunks longer and shorter than a read.
    let meet = Arc::new(MemoryMeet::default());
    let ckpts = ranks(&local(dir.path()), Some(&meet), 3, WAIT);
    on_all(&ckpts, |rank, ckpt| {
        let rows = |tensor: &Tensor| {
            let rows = tensor.shape.first().copied().unwrap_or_default();
            // The second has most of them.
            let cut = [0, rows / 50, rows / 50 * 49, rows];
            let mut range = Rect::whole(&tensor.shape);
            if !range.offsets.is_empty() {
                range.offsets[0] = cut[rank as usize];
                range.extent[0] = cut[rank as usize + 1] - cut[rank as usize];
            }
            range
        };
        let mine = tensors.iter().filter(|t| rank == 0 || !t.shape.is_empty());
        save(ckpt, 7, &mine.map(|t| (t, rows(t))).collect::<Vec<_>>());
    });
    drop(ckpts);
    compress(dir.path(), 7, &|_, _| {});
    let ckpt = alone(dir.path(), Options::default());
    let open = ckpt.open(7).unwrap();
    let long = |chunk: &&Chunk| chunk.codec == PLANES_CODEC && chunk.length > 8 << 20;
    let stored: Vec<_> = open.tensors().flat_map(|(_, chunks)| chunks).collect();
    assert!(stored.iter().any(long), "{stored:?}");
    let parts = ranges(&tensors);
    let expected: Vec<_> = parts.iter().map(|(tensor, range)| tensor.part(range)).collect();
    for (turn, sharing) in [Sharing::Alone, Sharing::Partial, Sharing::All].into_iter().enumerate()
    {
        assert!(
            read_shared(&ckpt, 7, &parts, sharing).unwrap() == expected,
            "from the cache {turn}"
        );
        for file in rank_files(dir.path(), 7) {
            forget(&file);
        }
        assert!(
            read_shared(&ckpt, 7, &parts, sharing).unwrap() == expected,
            "from the disk {turn}"
        );
    }
    for (part, expected) in parts.iter().zip(&expected) {
        assert!(read(&ckpt, 7, std::slice::from_ref(part)).unwrap() == [expected.clone()]);
    }
    assert!(ckpt.verify(7).unwrap().is_empty());
}

#[test]
fn damage_is_found_and_an_older_step_holds() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = saved(dir.path());
    let (old, new) = (state(1), state(2));
    let whole =
        |state: &[Tensor]| -> Vec<Vec<u8>> { state.iter().map(|t| t.data.clone()).collect() };
    let parts = |state| -> Vec<(&Tensor, Rect)> {
        let state: &Vec<Tensor> = state;
        state.iter().map(|t| (t, Rect::whole(&t.shape))).collect()
    };
    assert!(read(&ckpt, 2, &parts(&new)).unwrap() == whole(&new));
    let file = &rank_files(dir.path(), 2)[0];
    let good = std::fs::read(file).unwrap();
    let stride = good.len() / 11;
    for at in (good.len() - 40_000..good.len()).step_by(1777).chain((0..good.len()).step_by(stride))
    {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(file, &bad).unwrap();
        let error = read(&ckpt, 2, &parts(&new)).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{at}: {error}");
        assert!(error.to_string().contains("rank-00000.safetensors"), "{error}");
        assert!(!ckpt.verify(2).unwrap().is_empty(), "byte {at}");
    }
    std::fs::write(file, &good[..good.len() - 1]).unwrap();
    assert!(ckpt.candidates().unwrap()[0].1.is_some());
    assert_eq!(ckpt.candidates().unwrap()[1], (1, None));
    assert!(read(&ckpt, 1, &parts(&old)).unwrap() == whole(&old));
}

#[test]
fn what_was_written_wrong_is_found_though_its_checksum_holds() {
    type Spoil = fn(&mut Vec<u8>);
    let spoils: [(Spoil, &str); 5] = [
        (|b| b[1000] ^= 1, "a block with crc32c"),
        (|b| b.truncate(b.len() - 1), "foot"),
        (|b| b.insert(7, 1), "blocks of"),
        (|b| b.truncate(10), "table"),
        (
            |b| {
                let n = b.len() - 20;
                b[n + 3] = 9;
            },
            "a plane of",
        ),
    ];
    for (spoil, expected) in spoils {
        for name in ["[\"wide\"]", "[\"half\"]"] {
            let dir = tempfile::tempdir().unwrap();
            let ckpt = alone(dir.path(), Options::default());
            let state = state(5);
            let parts: Vec<_> = state.iter().map(|t| (t, Rect::whole(&t.shape))).collect();
            save(&ckpt, 5, &parts);
            compress(dir.path(), 5, &|chunk, stored| {
                if chunk.path == name {
                    spoil(stored);
                }
            });
            let error = read(&ckpt, 5, &parts).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(expected) && text.contains(name), "{expected}: {text}");
            let problems = ckpt.verify(5).unwrap();
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].tensor == name && problems[0].reason.contains(expected));
        }
    }
}

#[test]
fn exports_and_comparisons_see_the_elements() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = saved(dir.path());
    let (raw, packed) = (dir.path().join("raw.safetensors"), dir.path().join("packed.safetensors"));
    let out = |step, file: &Path| {
        let options = ExportOptions { step: Some(step), ..ExportOptions::default() };
        let (root, file) = (dir.path().to_str().unwrap(), file.to_str().unwrap());
        let storage = StorageOptions::default();
        export(root, TargetKind::Safetensors, file, &storage, &options, &mut |_| {}).unwrap();
    };
    out(2, &packed);
    // The same state, saved raw.
    let tensors = state(2);
    let parts: Vec<_> = tensors.iter().map(|t| (t, Rect::whole(&t.shape))).collect();
    save(&ckpt, 3, &parts);
    out(3, &raw);
    assert!(std::fs::read(&raw).unwrap() == std::fs::read(&packed).unwrap());
    let open = |step| open_step(&local(dir.path()), step).unwrap();
    let differ = |a, b| {
        let found = differences(&open(a), &open(b), &|_| true, &mut |_| {}).unwrap();
        found.into_iter().map(|(path, _)| path).collect::<Vec<_>>()
    };
    assert!(differ(2, 3).is_empty() && differ(3, 2).is_empty());
    assert_eq!(differ(1, 2).len(), 4);
    let sizes: BTreeMap<_, _> = open(2)
        .tensors()
        .map(|(path, c)| (path.to_string(), (c[0].raw_bytes(), c[0].length)))
        .collect();
    assert_eq!(sizes["[\"wide\"]"].0, 15_840_000);
    assert!(sizes["[\"wide\"]"].1 < 11_600_000 && sizes["[\"half\"]"].1 < 95_000);
    let program = std::process::Command::new(env!("CARGO_BIN_EXE_drivetrain"))
        .args(["ckpt", "inspect", "--step", "2", dir.path().to_str().unwrap()])
        .output()
        .unwrap();
    let said = String::from_utf8(program.stdout).unwrap();
    assert!(said.contains("compressed: 15.3 MiB of tensors in"), "{said}");
}
