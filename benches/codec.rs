//! CPU time of compressing and decoding checkpoint chunks on one thread, as JSON lines: GB of raw
//! bytes per second, the stored share, and what a plain copy of the same bytes takes.
//!
//! `cargo bench --bench codec`, or `… -- FILE DTYPE` for the bytes of a file. Values are normal
//! numbers as trained weights have them, and the state of an Adam that has seen 200 normal
//! gradients of each parameter's own scale.

#![allow(clippy::unwrap_used, reason = "a benchmark stops at the first surprise")]

use std::time::Duration;

use drivetrain::checkpoint::codec::{BLOCK_BYTES, Decoder, Encoder, Index, probe};
use drivetrain::checkpoint::layout::Dtype;
use rustix::time::{ClockId, clock_gettime};

/// Rounds of each measurement; the median is printed.
const ROUNDS: usize = 15;
/// Numbers of a tensor.
const NUMBERS: usize = 8 << 20;
/// Gradients that Adam has seen, and its decay rates.
const STEPS: usize = 200;
const BETAS: (f32, f32) = (0.9, 0.999);

fn thread_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Median GB/s over passes of `bytes`.
fn speed(bytes: usize, mut pass: impl FnMut()) -> f64 {
    let mut samples: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = thread_time();
            pass();
            thread_time().saturating_sub(start).as_secs_f64()
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    bytes as f64 / samples[ROUNDS / 2] / 1e9
}

/// Normal numbers: splitmix64, and Box and Muller.
struct Normal(u64);

impl Normal {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let n = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let n = (n ^ n >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        let n = n ^ n >> 31;
        let unit = |bits: u64| ((bits & 0xFF_FFFF) as f32 + 0.5) / 16_777_216.0;
        let radius = (-2.0 * unit(n).ln()).sqrt();
        radius * (unit(n >> 24) * std::f32::consts::TAU).cos()
    }
}

/// First and second moments of Adam.
fn adam() -> (Vec<u8>, Vec<u8>) {
    let mut normal = Normal(3);
    let (mut mean, mut square) = (Vec::new(), Vec::new());
    // As many as cost a second; repeated to the length of the others, far beyond any window.
    for _ in 0..1 << 18 {
        let scale = 1e-3 * (normal.next()).exp();
        let (mut m, mut v) = (0.0_f32, 0.0_f32);
        for _ in 0..STEPS {
            let gradient = scale * normal.next();
            m = BETAS.0 * m + (1.0 - BETAS.0) * gradient;
            v = BETAS.1 * v + (1.0 - BETAS.1) * gradient * gradient;
        }
        mean.extend(m.to_le_bytes());
        square.extend(v.to_le_bytes());
    }
    let repeat = NUMBERS >> 18;
    (mean.repeat(repeat), square.repeat(repeat))
}

fn report(name: &str, dtype: &str, raw: &[u8]) {
    let dtype = Dtype::named(dtype).unwrap();
    let (mut encoder, mut decoder) = (Encoder::new().unwrap(), Decoder::default());
    let mut stored = Vec::with_capacity(raw.len());
    let mut back = vec![0; raw.len()];
    let copy = speed(raw.len(), || back.copy_from_slice(std::hint::black_box(raw)));
    let probed = speed(raw.len(), || assert!(probe(dtype, std::hint::black_box(raw))));
    let encoded = speed(raw.len(), || {
        stored.clear();
        encoder.encode(dtype, raw, &mut stored).unwrap();
    });
    let index = Index::of(dtype, raw.len() as u64, &stored).unwrap();
    let decoded = speed(raw.len(), || {
        for (i, block) in back.chunks_mut(BLOCK_BYTES).enumerate() {
            let range = index.stored_range(i);
            let bytes = &stored[range.start as usize..range.end as usize];
            decoder.block(&index, i, bytes, block).unwrap();
        }
    });
    assert!(back == raw);
    let share = stored.len() as f64 / raw.len() as f64;
    println!(
        "{{\"bench\":\"codec_{name}\",\"stored_share\":{share:.4},\"encode_gb_s\":{encoded:.3},\
         \"decode_gb_s\":{decoded:.3},\"probe_gb_s\":{probed:.0},\"copy_gb_s\":{copy:.1}}}"
    );
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    if let [file, dtype] = arguments.as_slice() {
        report("file", dtype, &std::fs::read(file).unwrap());
        return;
    }
    let mut normal = Normal(1);
    let weights: Vec<f32> = (0..NUMBERS).map(|_| 0.02 * normal.next()).collect();
    let bf16 = |n: &f32| half::bf16::from_f32(*n);
    let halves: Vec<u8> = weights.iter().flat_map(|n| bf16(n).to_le_bytes()).collect();
    report("bf16_weights", "BF16", &halves);
    let rounded: Vec<u8> = weights.iter().flat_map(|n| bf16(n).to_f32().to_le_bytes()).collect();
    let f16: Vec<u8> = weights.iter().flat_map(|n| half::f16::from_f32(*n).to_le_bytes()).collect();
    report("f16_weights", "F16", &f16);
    let full: Vec<u8> = weights.iter().flat_map(|n| n.to_le_bytes()).collect();
    report("fp32_weights", "F32", &full);
    report("fp32_rounded_to_bf16", "F32", &rounded);
    let (mean, square) = adam();
    report("fp32_exp_avg", "F32", &mean);
    report("fp32_exp_avg_sq", "F32", &square);
    report("fp32_zeros", "F32", &vec![0; 4 * NUMBERS]);
}
