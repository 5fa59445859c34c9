//! Seconds and megabytes of planning and committing a model that nobody here can hold:
//! `cargo run --release --example scale`. It moves no tensor; see `drivetrain::checkpoint::scale`.

use drivetrain::checkpoint::scale::{Report, Synthetic, simulate};

/// A trillion parameters on 16,384 ranks; the same smaller, to see how it grows; and one whose
/// table has about a million rows.
const MODELS: [(&str, Synthetic); 4] = [
    ("1 T, 16 x 8 x 128", mesh(128, 25_600, [16, 8, 128, 1])),
    ("1 T, 16 x 8 x 8, 16 copies", mesh(128, 25_600, [16, 8, 8, 16])),
    ("a quarter of the ranks", mesh(128, 25_600, [16, 8, 32, 1])),
    ("a million rows", mesh(144, 16_384, [8, 8, 32, 1])),
];

const fn mesh(layers: u32, hidden: i64, ranks: [u32; 4]) -> Synthetic {
    let [pipeline, tensor, sharded, replicas] = ranks;
    Synthetic { layers, hidden, pipeline, tensor, sharded, replicas }
}

fn main() -> Result<(), drivetrain::Error> {
    let only = std::env::args().nth(1);
    for (name, model) in MODELS {
        if only.as_ref().is_none_or(|o| name.contains(o.as_str())) {
            print(name, &simulate(&model)?);
        }
    }
    Ok(())
}

fn print(name: &str, report: &Report) {
    println!("\n### {name}\n");
    println!(
        "{:.2e} parameters, {} ranks, {} chunks, {:.1} TB of data, peak memory {} MB\n",
        report.parameters as f64,
        report.ranks,
        report.chunks,
        report.data_bytes as f64 / 1e12,
        peak_bytes() >> 20,
    );
    println!("| stage | seconds | MB |\n|---|---|---|");
    for cost in &report.costs {
        println!("| {} | {:.2} | {:.1} |", cost.stage, cost.seconds, cost.bytes as f64 / 1e6);
    }
}

/// Most memory this process ever had, from `/proc`; 0 where there is none.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}
