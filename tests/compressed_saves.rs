//! Saves that compress: what is written opens as safetensors, comes back bit for bit, and is
//! referred to like anything else.

use std::path::Path;

use drivetrain::checkpoint::layout::{Manifest, PLANES_CODEC, RAW_CODEC, step_dir};
use drivetrain::checkpoint::rects::Rect;
use drivetrain::checkpoint::{Checkpointer, Options, PackOptions, Target, TensorIn};

use crate::commit::{BLOCKING, alone, walk};
use crate::compressed::{Tensor, noise};

/// bf16 numbers whose exponents take few values and whose mantissas are noise, as trained ones.
fn weights(count: usize, seed: u64) -> Vec<u8> {
    let number = |n: u64| {
        let exponent = 120 + (n >> 32).trailing_ones().min(6) as u16;
        (n as u16 & 0x807F) | exponent << 7
    };
    noise(count, seed).flat_map(|n| number(n).to_le_bytes()).collect()
}

const ROWS: i64 = 700;
const COLUMNS: i64 = 1500;

fn state(seed: u64) -> Vec<Tensor> {
    let tensor =
        |name, dtype, shape: &[i64], data| Tensor { name, dtype, shape: shape.to_vec(), data };
    let count = (ROWS * COLUMNS) as usize;
    vec![
        tensor("layer", "BF16", &[ROWS, COLUMNS], weights(count, 5)),
        tensor("head", "BF16", &[3, 20_001], weights(60_003, seed)),
        tensor("noise", "U8", &[50_000], noise(50_000, 9).map(|n| n as u8).collect()),
        tensor("short", "F32", &[5], vec![7; 20]),
        tensor("scalar", "F64", &[], vec![1; 8]),
    ]
}

fn packing(delta_saves_max: Option<u32>) -> Options {
    let pack = PackOptions { delta_saves_max, compress: true };
    Options { pack, ..Options::default() }
}

fn save<'a>(
    ckpt: &Checkpointer,
    step: i64,
    tensors: &'a [Tensor],
) -> drivetrain::checkpoint::Tally {
    let input = |t: &'a Tensor| TensorIn {
        path: t.path(),
        dtype: t.dtype.into(),
        shape: t.shape.clone(),
        rect: Rect::whole(&t.shape),
        data: &t.data,
        replicas: Vec::new(),
        pin_rank: None,
    };
    let inputs: Vec<TensorIn<'_>> = tensors.iter().map(input).collect();
    let handle = ckpt.save(step, &inputs, "{}", "{}", BLOCKING).unwrap();
    handle.wait(std::time::Duration::from_mins(2)).unwrap();
    handle.tally().unwrap()
}

fn whole(ckpt: &Checkpointer, step: i64, tensors: &[Tensor]) {
    let mut found = tensors.to_vec();
    for tensor in &mut found {
        tensor.data.fill(0xAA);
    }
    let targets = found.iter_mut().map(|t| Target {
        path: t.path(),
        dtype: t.dtype.into(),
        shape: t.shape.clone(),
        rect: Rect::whole(&t.shape),
        data: &mut t.data,
    });
    ckpt.open(step).unwrap().read_into(targets.collect()).unwrap();
    assert!(found == tensors, "step {step}");
    assert_eq!(ckpt.verify(step).unwrap(), [], "step {step}");
}

fn manifest(root: &Path, step: i64) -> Manifest {
    let path = root.join(step_dir(step).unwrap()).join("manifest.json");
    Manifest::decode(&std::fs::read(path).unwrap(), "manifest.json").unwrap()
}

/// Codecs of a tensor's chunks, and where they lie if not in the step.
fn stored(ckpt: &Checkpointer, step: i64, name: &str) -> Vec<(String, Option<i64>, u64)> {
    let open = ckpt.open(step).unwrap();
    let (_, chunks) = open.tensor(&format!("[\"{name}\"]")).unwrap();
    chunks.iter().map(|c| (c.codec.clone(), c.step_ref, c.length)).collect()
}

/// Entries of a safetensors file: name, dtype, first size, start and end of the data.
fn entries(file: &Path) -> Vec<(String, String, u64, u64, u64)> {
    let bytes = std::fs::read(file).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let rows = json.iter().filter(|(name, _)| *name != "__metadata__");
    let mut found: Vec<_> = rows
        .map(|(name, row)| {
            let at: [u64; 2] = serde_json::from_value(row["data_offsets"].clone()).unwrap();
            let size = row["shape"].get(0).and_then(serde_json::Value::as_u64).unwrap_or(1);
            (name.clone(), row["dtype"].as_str().unwrap().to_string(), size, at[0], at[1])
        })
        .collect();
    found.sort_by_key(|row| (row.3, row.4));
    assert_eq!(found.last().unwrap().4 + 8 + n as u64, bytes.len() as u64, "no trailing bytes");
    found
}

#[test]
fn what_is_worth_it_is_compressed_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), packing(None));
    let tally = save(&ckpt, 1, &state(1));
    whole(&ckpt, 1, &state(1));
    let raw: u64 = state(1).iter().map(|t| t.data.len() as u64).sum();
    assert_eq!((tally.raw_bytes, tally.referred_bytes), (raw, 0));
    // Half of the bytes are exponents of two bits and the sign's place; the rest is noise.
    assert!(tally.written_bytes < raw * 3 / 4, "{tally:?}");
    for (name, codec) in [
        ("layer", PLANES_CODEC),
        ("head", PLANES_CODEC),
        ("noise", RAW_CODEC),
        ("short", RAW_CODEC),
    ] {
        let chunks = stored(&ckpt, 1, name);
        assert!(chunks.iter().all(|c| c.0 == codec && c.1.is_none()), "{name} {chunks:?}");
    }
    let (file, size) =
        walk(dir.path()).into_iter().find(|f| f.0.ends_with(".safetensors")).unwrap();
    assert_eq!(size, tally.written_bytes, "not longer than what was written");
    let rows = entries(&dir.path().join(file));
    let mut end = 0;
    for (name, dtype, first, from, to) in &rows {
        assert_eq!(*from, end, "{name} leaves a hole");
        end = *to;
        if name == "layer" {
            assert_eq!((dtype.as_str(), *first), ("U8", to - from));
        }
    }
    assert!(rows.iter().any(|r| r.0 == "short" && r.1 == "F32"));
    assert_eq!(manifest(dir.path(), 1).files[1].size_bytes, size);
    // Whoever does not compress reads it, and goes on.
    ckpt.close().unwrap();
    whole(&alone(dir.path(), Options::default()), 1, &state(1));
}

#[test]
fn compressed_chunks_are_referred_to() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), packing(Some(9)));
    for step in [1, 2, 3] {
        let tally = save(&ckpt, step, &state(step as u64));
        whole(&ckpt, step, &state(step as u64));
        let head = 3 * 20_001 * 2;
        if step > 1 {
            assert_eq!(
                tally.referred_bytes,
                tally.raw_bytes - head - 28,
                "the short ones are written"
            );
            assert!(tally.written_bytes < 4096 + head * 3 / 4, "{tally:?}");
            let first = stored(&ckpt, 1, "layer");
            let here = stored(&ckpt, step, "layer");
            assert_eq!(here, [(PLANES_CODEC.to_string(), Some(1), first[0].2)]);
            assert_eq!(stored(&ckpt, step, "head")[0].1, None);
        }
        assert_eq!(manifest(dir.path(), step).refers_to, if step > 1 { vec![1] } else { vec![] });
    }
}
