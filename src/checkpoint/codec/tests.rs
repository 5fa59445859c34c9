//! Whatever is encoded comes back, and whatever is changed is found.

use proptest::prelude::*;

use super::index::foot;
use super::*;
use crate::checkpoint::layout::{Dtype, crc32c};

const DTYPES: [&str; 12] =
    ["BF16", "F16", "F32", "F64", "C64", "C128", "F8_E4M3", "U8", "I16", "U32", "I64", "BOOL"];

/// Bytes without a pattern: splitmix64.
pub fn noise(len: usize) -> Vec<u8> {
    let mut state = 7_u64;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let n = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let n = (n ^ n >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        n ^ n >> 31
    };
    let words: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| next().to_le_bytes()).collect();
    words[..len].to_vec()
}

/// Normal numbers with a deviation of 0.02, as weights have, by Box and Muller.
fn normals(count: usize) -> Vec<f32> {
    let noise = noise(16 * count.div_ceil(2));
    let unit = |bytes: &[u8]| {
        let n = u64::from_le_bytes(*bytes.first_chunk().unwrap());
        ((n >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    };
    let pair = |bytes: &[u8]| {
        let (radius, turn) = ((-2.0 * unit(bytes).ln()).sqrt(), unit(&bytes[8..]));
        let (sine, cosine) = (turn * std::f64::consts::TAU).sin_cos();
        [(0.02 * radius * sine) as f32, (0.02 * radius * cosine) as f32]
    };
    noise.chunks_exact(16).flat_map(pair).take(count).collect()
}

pub fn normal_f32(count: usize) -> Vec<u8> {
    normals(count).into_iter().flat_map(f32::to_le_bytes).collect()
}

pub fn normal_bf16(count: usize) -> Vec<u8> {
    normals(count).into_iter().flat_map(|n| half::bf16::from_f32(n).to_le_bytes()).collect()
}

fn dtype(name: &str) -> Dtype {
    Dtype::named(name).unwrap()
}

fn encoded(name: &str, raw: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let sum = Encoder::new().unwrap().encode_always(dtype(name), raw, &mut out);
    assert_eq!(sum, crc32c(raw));
    out
}

fn back(name: &str, stored: &[u8], raw_bytes: usize) -> Result<Vec<u8>, Fault> {
    let mut raw = vec![0xaa; raw_bytes];
    decode(dtype(name), stored, &mut raw).map(|()| raw)
}

#[test]
fn normal_weights_shrink_as_far_as_their_exponents_allow() {
    // The exponent of a normal number has 2.55 bits of entropy: 0.66 of bf16, 0.83 of fp32.
    for (name, raw, share) in
        [("BF16", normal_bf16(1 << 20), 0.664), ("F32", normal_f32(1 << 20), 0.832)]
    {
        let mut out = vec![1, 2, 3];
        let sum = Encoder::new().unwrap().encode(dtype(name), &raw, &mut out).unwrap();
        assert_eq!((sum, &out[..3]), (crc32c(&raw), &[1, 2, 3][..]));
        let found = (out.len() - 3) as f64 / raw.len() as f64;
        assert!((share - 0.01..share).contains(&found), "{name} {found}");
        assert_eq!(back(name, &out[3..], raw.len()).unwrap(), raw);
    }
}

#[test]
fn what_does_not_pay_is_left_alone() {
    let mut encoder = Encoder::new().unwrap();
    let mut out = vec![9];
    let noise = noise(300_000);
    // Samples that look well, and nothing between them that does.
    let mut fooled = noise.clone();
    for sample in 0..4 {
        let start = (fooled.len() - 1024) / 3 * sample;
        fooled[start..start + 1024].fill(0);
    }
    for raw in [&noise, &fooled, &normal_f32(1000)] {
        assert_eq!(encoder.encode(dtype("F32"), raw, &mut out), None);
        assert_eq!(out, [9]);
    }
    assert!(probe(dtype("F32"), &fooled));
}

#[test]
fn constants_and_long_runs_are_small() {
    for name in DTYPES {
        let raw = vec![0; 600_000];
        let stored = encoded(name, &raw);
        assert!(stored.len() < 200, "{name} {}", stored.len());
        assert_eq!(back(name, &stored, raw.len()).unwrap(), raw);
    }
}

#[test]
fn blocks_encoded_apart_make_the_same_bytes() {
    let raw = normal_bf16(400_001);
    let form = Form::of(dtype("BF16"));
    let (mut rows, mut blocks) = (Vec::new(), Vec::new());
    for block in raw.chunks(BLOCK_BYTES) {
        Encoder::new().unwrap().block(form, block, &mut blocks, &mut rows);
    }
    encode::finish(form, raw.len() as u64, &rows, &mut blocks);
    assert_eq!(blocks, encoded("BF16", &raw));
}

#[test]
fn any_block_is_decoded_by_itself() {
    let raw = normal_f32(200_000);
    let stored = encoded("F32", &raw);
    let end = Index::end_bytes(dtype("F32"), raw.len() as u64).unwrap() as usize;
    let (raw_bytes, stored_bytes) = (raw.len() as u64, stored.len() as u64);
    let end = &stored[stored.len() - end..];
    let index = Index::parse(dtype("F32"), raw_bytes, stored_bytes, end).unwrap();
    assert_eq!((index.blocks(), index.raw_bytes()), (4, raw_bytes));
    let mut decoder = Decoder::default();
    for i in [3, 0, 2, 1] {
        let (range, from) = (index.raw_range(i), index.stored_range(i));
        let mut block = vec![0; (range.end - range.start) as usize];
        let bytes = &stored[from.start as usize..from.end as usize];
        decoder.block(&index, i, bytes, &mut block).unwrap();
        assert_eq!(block, raw[range.start as usize..range.end as usize]);
        assert!(decoder.block(&index, i, &bytes[1..], &mut block).is_err());
    }
    assert!(decoder.block(&index, 4, &[], &mut []).is_err());
}

#[test]
fn the_stored_form_of_a_small_chunk_is_known_byte_for_byte() {
    // Three bf16 numbers and an odd byte: -1.5, -1.5 and 1.0 are bfc0, bfc0 and 3f80, rotated left
    // 7f81, 7f81 and 7f00. The high plane is constant.
    let raw = [0xc0, 0xbf, 0xc0, 0xbf, 0x80, 0x3f, 0x55];
    let mut expected = vec![0x81, 0x81, 0x00, 0x7f, 0x55];
    expected.extend(crc32c(&raw).to_le_bytes());
    expected.extend([3, 0, 0, 0, 1, 0, 0, 2]);
    expected.extend([7, 0, 0, 0, 0, 0, 0, 0, 1, 2, 1, 0, b'd', b't', b'p', b'z']);
    assert_eq!(encoded("BF16", &raw), expected);
    assert_eq!(back("BF16", &expected, 7).unwrap(), raw);
}

#[test]
fn each_lie_is_told_where_it_stands() {
    let raw = normal_bf16(BLOCK_BYTES);
    let stored = encoded("BF16", &raw);
    let end = stored.len();
    let fails = |at: usize, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = stored.clone();
        change(&mut bytes);
        let fault = back("BF16", &bytes, raw.len()).unwrap_err();
        assert_eq!(fault.at, at as u64, "{fault:?}");
        fault
    };
    fails(end - 16, &|b| b[end - 1] = b'y');
    fails(end - 16, &|b| b[end - 6] = 2);
    fails(end - 16, &|b| b[end - 16] += 1);
    fails(end - 16, &|b| b[end - 7] = 4);
    // Rows: a method that is none, a plane that is too long, one that is empty.
    let second = end - 16 - 12;
    assert!(fails(second, &|b| b[second + 7] = 9).found.contains("method 9"));
    fails(second, &|b| b[second + 6] += 1);
    fails(second, &|b| b[second + 8..second + 11].fill(0));
    // A size that only the sum gives away, and a checksum.
    assert!(fails(0, &|b| b[second + 8] ^= 1).expected.contains("blocks of"));
    let last_block = Index::parse(dtype("BF16"), raw.len() as u64, end as u64, &stored[end - 40..]);
    let last_block = last_block.unwrap().stored_range(1).start as usize;
    assert!(fails(last_block, &|b| b[second] ^= 1).expected.contains("crc32c"));
    // The mantissas, and the frame of zstd behind them.
    assert!(fails(last_block, &|b| b[last_block] ^= 1).expected.contains("crc32c"));
    let frame = last_block + BLOCK_BYTES / 2;
    assert!(fails(frame, &|b| b[frame] ^= 1).found.contains("nknown frame"));
    assert!(back("BF16", &stored[1..], raw.len()).is_err());
    assert!(back("BF16", &stored, raw.len() - 2).is_err());
    assert!(back("F16", &stored, raw.len()).is_ok(), "the same form");
    assert!(back("F32", &stored, raw.len()).is_err());
    assert!(back("BF16", &[], 0).is_err());
    assert!(back("BF16", &foot(Form::of(dtype("BF16")), 0), 0).is_ok());
    assert_eq!(Index::end_bytes(dtype("U8"), u64::MAX), Some((1 << 46) * 8 + 16));
}

/// Inputs of the fuzzer: small chunks, whole and without their foot.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let seed = |choice: u8, name: &str, raw: &[u8], foot: bool| {
        let mut bytes = vec![choice];
        bytes.extend(&(raw.len() as u32).to_le_bytes()[..3]);
        bytes.extend(encoded(name, raw));
        bytes.truncate(bytes.len() - if foot { 0 } else { 16 });
        bytes
    };
    vec![
        ("bf16", seed(0, "BF16", &normal_bf16(600), true)),
        ("fp32", seed(1, "F32", &normal_f32(500), false)),
        ("fp64-constant", seed(2, "F64", &[0; 1001], false)),
        ("bytes", seed(3, "U8", &b"abcd".repeat(99), false)),
        ("two-blocks", seed(2, "F64", &vec![1; BLOCK_BYTES + 8], false)),
    ]
}

#[test]
fn the_corpus_replays_without_a_panic() {
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/planes");
    if std::env::var_os("DRIVETRAIN_BLESS").is_some() {
        std::fs::create_dir_all(&corpus).unwrap();
        for (name, seed) in seeds() {
            std::fs::write(corpus.join(name), seed).unwrap();
        }
    }
    let files: Vec<_> = std::fs::read_dir(&corpus).unwrap().collect();
    assert!(files.len() >= seeds().len(), "{} seeds", files.len());
    for file in files {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        fuzz(&bytes);
        for cut in (0..bytes.len()).step_by(7) {
            fuzz(&bytes[..cut]);
        }
    }
}

/// Bytes with and without patterns, of any length.
fn any_raw() -> impl Strategy<Value = Vec<u8>> {
    let len =
        prop_oneof![0..100_usize, 0..3 * BLOCK_BYTES, Just(BLOCK_BYTES), Just(BLOCK_BYTES + 1)];
    (len, 0..4_u8, any::<u8>(), 1..400_usize).prop_map(|(len, kind, byte, run)| match kind {
        0 => noise(len),
        1 => normal_f32(len.div_ceil(4))[..len].to_vec(),
        2 => (0..len).map(|i| (i / run) as u8 ^ byte).collect(),
        _ => noise(len).into_iter().enumerate().map(|(i, n)| n & (i / run) as u8).collect(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_bytes_of_any_type_come_back(
        raw in any_raw(),
        name in prop::sample::select(&DTYPES[..]),
    ) {
        let stored = encoded(name, &raw);
        let end_bytes = Index::end_bytes(dtype(name), raw.len() as u64).unwrap();
        prop_assert!(stored.len() as u64 <= raw.len() as u64 + end_bytes);
        prop_assert_eq!(back(name, &stored, raw.len()), Ok(raw.clone()));
        let mut out = Vec::new();
        if let Some(sum) = Encoder::new().unwrap().encode(dtype(name), &raw, &mut out) {
            prop_assert_eq!((sum, out), (crc32c(&raw), stored));
        }
    }

    #[test]
    fn no_change_of_a_stored_byte_goes_unseen(
        raw in any_raw(),
        name in prop::sample::select(&DTYPES[..]),
        at: prop::sample::Index,
        flip in 1..=255_u8,
    ) {
        let mut stored = encoded(name, &raw);
        let at = at.index(stored.len());
        stored[at] ^= flip;
        // A frame of zstd may hold bits that mean nothing; then the bytes are the same.
        if let Ok(found) = back(name, &stored, raw.len()) {
            prop_assert_eq!(found, raw);
        }
    }

    #[test]
    fn hostile_bytes_are_errors(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        raw_bytes in 0..3 * BLOCK_BYTES,
        name in prop::sample::select(&DTYPES[..]),
    ) {
        let form = Form::of(dtype(name));
        let mut stored = bytes;
        prop_assert!(raw_bytes == 0 || back(name, &stored, raw_bytes).is_err());
        // With a foot that fits, so that the table is read.
        stored.extend(foot(form, raw_bytes as u64));
        let _ = back(name, &stored, raw_bytes);
    }
}
