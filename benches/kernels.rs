//! CPU time of the transform kernels on one thread, as JSON lines, each with its floor and the
//! ratio to it measured in the same run.
//!
//! `cargo bench --features turbojpeg --bench kernels`; camera pictures and a sweep are taken from
//! `DRIVETRAIN_TEST_DATA` (default `../shared/data`) where that is there, else made up.

#![allow(clippy::unwrap_used, reason = "a benchmark stops at the first surprise")]

use std::path::PathBuf;
use std::time::Duration;

use drivetrain::index::Codec;
use drivetrain::transform::{
    DType, ImageScratch, ImageSpec, PointsSpec, SweepInput, decode_image, gather_points,
};
use rustix::time::{ClockId, clock_gettime};

/// Rounds of each kernel; the median is printed.
const ROUNDS: usize = 15;

fn thread_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Median CPU milliseconds per item of a pass over `count` items.
fn measure(count: usize, mut pass: impl FnMut(usize)) -> f64 {
    let mut samples: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = thread_time();
            (0..count).for_each(&mut pass);
            thread_time().saturating_sub(start).as_secs_f64() * 1e3 / count as f64
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    samples[ROUNDS / 2]
}

fn report(name: &str, cpu_ms: f64, floor: &str, floor_ms: f64) {
    let ratio = cpu_ms / floor_ms;
    println!(
        "{{\"bench\":\"{name}\",\"cpu_ms\":{cpu_ms:.4},\"floor\":\"{floor}\",\
         \"floor_ms\":{floor_ms:.4},\"ratio\":{ratio:.3}}}"
    );
}

fn data_folder() -> PathBuf {
    let fallback = concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/data");
    std::env::var_os("DRIVETRAIN_TEST_DATA").map_or_else(|| fallback.into(), PathBuf::from)
}

fn files(ending: &str) -> Vec<Vec<u8>> {
    let folder = data_folder().join("nuscenes_demo");
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let named = |p: &PathBuf| p.to_string_lossy().ends_with(ending);
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(named).collect();
    paths.sort();
    paths.iter().filter_map(|p| std::fs::read(p).ok()).collect()
}

/// A 1600x900 picture with the texture of a road scene, about 200 kB.
fn made_up_picture() -> Vec<u8> {
    let (w, h) = (1600_usize, 900_usize);
    let mut state = 1_u32;
    let mut pixels = vec![0; w * h * 3];
    for (i, level) in pixels.iter_mut().enumerate() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (x, y) = (i / 3 % w, i / 3 / w);
        *level = ((x / 9 + y / 5) % 160) as u8 + (state >> 29) as u8 * 4;
    }
    let mut jpeg = Vec::new();
    let encoder = jpeg_encoder::Encoder::new(&mut jpeg, 80);
    encoder.encode(&pixels, w as u16, h as u16, jpeg_encoder::ColorType::Rgb).unwrap();
    jpeg
}

#[cfg(feature = "turbojpeg")]
fn decoder_floor(pictures: &[Vec<u8>], denominator: usize) -> f64 {
    let factor = turbojpeg::ScalingFactor::new(1, denominator);
    let mut decoder = turbojpeg::Decompressor::new().unwrap();
    decoder.set_scaling_factor(factor).unwrap();
    let mut pixels = vec![0; 1600 * 900 * 4];
    measure(pictures.len(), |i| {
        let header = decoder.read_header(&pictures[i]).unwrap().scaled(factor);
        let (width, height) = (header.width, header.height);
        let format = turbojpeg::PixelFormat::RGB;
        let pixels = &mut pixels[..];
        let image = turbojpeg::Image { pixels, width, pitch: width * 3, height, format };
        decoder.decompress(&pictures[i], image).unwrap();
    })
}

#[cfg(not(feature = "turbojpeg"))]
fn decoder_floor(pictures: &[Vec<u8>], _denominator: usize) -> f64 {
    use zune_core::bytestream::ZCursor;
    measure(pictures.len(), |i| {
        zune_jpeg::JpegDecoder::new(ZCursor::new(&pictures[i])).decode().unwrap();
    })
}

fn images() {
    let mut pictures = files(".jpg");
    if pictures.is_empty() {
        pictures.push(made_up_picture());
    }
    let half = decoder_floor(&pictures, 2);
    let full = decoder_floor(&pictures, 1);
    let mut scratch = ImageScratch::default();
    let base = ImageSpec {
        size: Some((256, 704)),
        mean: [123.675, 116.28, 103.53],
        std: [58.395, 57.12, 57.375],
        ..ImageSpec::default()
    };
    let mut out = vec![0; base.out_bytes(0, 0)];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for exact in [false, true] {
            let spec = ImageSpec { dtype, exact, ..base.clone() };
            let out = &mut out[..spec.out_bytes(0, 0)];
            let cpu_ms = measure(pictures.len(), |i| {
                decode_image(&pictures[i], &Codec::Jpeg, &spec, &mut scratch, out, "").unwrap();
            });
            let (floor, floor_ms) =
                if exact { ("decode_full", full) } else { ("decode_half", half) };
            let exact = if exact { "exact" } else { "scaled" };
            report(&format!("image_{dtype}_{exact}_256x704"), cpu_ms, floor, floor_ms);
        }
    }
}

fn points() {
    let keyframe = files("LIDAR_TOP__1532402927647951.pcd.bin").pop().unwrap_or_else(|| {
        let value = |i: usize| ((i * 7919 % 120_000) as f32 / 1e3 - 60.0).to_le_bytes();
        (0..34_688 * 5).flat_map(value).collect()
    });
    let turn: [f64; 16] =
        [0.9998, -0.02, 0.0, 0.4, 0.02, 0.9998, 0.0, 0.01, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0];
    let inputs: Vec<SweepInput<'_>> = (0..10)
        .map(|i| SweepInput {
            bytes: &keyframe,
            transform: (i > 0).then_some(&turn),
            dt_s: 0.05 * i as f32,
        })
        .collect();
    let mut out = vec![0.0_f32; keyframe.len() / 4 / 5 * 10 * 6];
    let copy = measure(10, |_| {
        for (to, from) in out.chunks_exact_mut(keyframe.len() / 4).zip(&inputs) {
            for (to, from) in to.iter_mut().zip(from.bytes.as_chunks::<4>().0) {
                *to = f32::from_le_bytes(*from);
            }
        }
        std::hint::black_box(&out);
    });
    let specs = [
        ("all", PointsSpec::default()),
        (
            "range",
            PointsSpec {
                range: Some([-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]),
                remove_close_m: Some(1.0),
                ..PointsSpec::default()
            },
        ),
        (
            "range_xyz",
            PointsSpec {
                range: Some([-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]),
                columns: Some(["x", "y", "z", "dt_s"].map(String::from).to_vec()),
                ..PointsSpec::default()
            },
        ),
    ];
    for (name, spec) in specs {
        let layout = spec.layout(&[], 5).unwrap();
        let cpu_ms = measure(10, |_| {
            std::hint::black_box(gather_points(&inputs, &layout, &spec, &mut out, "").unwrap());
        });
        report(&format!("points_10_sweeps_{name}"), cpu_ms, "copy", copy);
    }
}

fn main() {
    images();
    points();
}
