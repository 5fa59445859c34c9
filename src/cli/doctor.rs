//! `drivetrain doctor`: what this machine offers, and what to change.
//!
//! Every line is a fact with, where it costs speed, the one thing to do about it. Nothing here is
//! a problem in the sense of exit code 1: Drivetrain works without any of it, slower.

use std::path::{Path, PathBuf};

use drivetrain_gpu_decode::{Discovery, discover};
use serde::Serialize;

use crate::cli::EXIT_OK;
use crate::cli::output::Output;
use crate::error::{Error, Result};
use crate::storage::local::{DirectReport, IoReport, probe, probe_direct};

/// Locked memory below this is too little to register a loader's buffers.
const MEMLOCK_BYTES_MIN: u64 = 64 << 20;
/// Shared memory below this is too little to stage the state of a small model twice.
const SHM_BYTES_MIN: u64 = 1 << 30;

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder whose file system is tried for O_DIRECT: where data or checkpoints lie
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    /// What was looked at.
    name: &'static str,
    /// Whether it is as fast as it gets.
    good: bool,
    /// What was found.
    found: String,
    /// What to change; empty if nothing.
    advice: String,
}

/// Probes the machine.
pub fn run(args: Args, out: &Output) -> Result<u8> {
    if !args.dir.is_dir() {
        return Err(Error::invalid("--dir", "an existing folder", args.dir.display()));
    }
    let findings = findings(&probe(), &args.dir, &probe_direct(&args.dir), &discover());
    let answer = serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "dir": args.dir,
        "findings": findings,
    });
    out.answer(&answer, |_| text(&findings));
    Ok(EXIT_OK)
}

fn findings(io: &IoReport, dir: &Path, direct: &DirectReport, cuda: &Discovery) -> Vec<Finding> {
    vec![kernel(io), uring(io), memlock(io), shm(io), o_direct(dir, direct), jpeg(), gpu(cuda)]
}

fn finding(name: &'static str, good: bool, found: String, advice: &str) -> Finding {
    let advice = if good { String::new() } else { advice.into() };
    Finding { name, good, found, advice }
}

fn kernel(io: &IoReport) -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    finding("machine", true, format!("Linux {}, {cores} cores", io.kernel), "")
}

fn uring(io: &IoReport) -> Finding {
    let found = if io.io_uring {
        format!("usable; local files go through {}", io.engine)
    } else {
        format!("not usable ({}); local files go through {}", io.io_uring_reason, io.engine)
    };
    finding("io_uring", io.io_uring, found, &io.io_uring_advice)
}

fn memlock(io: &IoReport) -> Finding {
    let size = |limit: Option<u64>| limit.map_or_else(|| "unlimited".into(), bytes);
    let limit = format!("{} (hard {})", size(io.memlock_bytes), size(io.memlock_hard_bytes));
    let (found, good) = match (io.io_uring, io.registers) {
        (true, true) => (format!("{limit}; buffers are registered with io_uring"), true),
        (true, false) => (format!("{limit}; plain buffers: {}", io.registered_reason), false),
        _ => (limit, io.memlock_bytes.is_none_or(|limit| limit >= MEMLOCK_BYTES_MIN)),
    };
    let advice = "raise it (`ulimit -l unlimited`, or LimitMEMLOCK= of the service): registered \
                  and pinned buffers count against it";
    finding("locked memory", good, found, advice)
}

fn shm(io: &IoReport) -> Finding {
    let (total, free) = (bytes(io.shm_total_bytes), bytes(io.shm_free_bytes));
    let found = format!("{}: {free} free of {total}", io.shm_dir.display());
    let advice = "make it twice the size of a rank's state (docker: --shm-size) or point \
                  DRIVETRAIN_SHM_DIR at a larger tmpfs; else snapshots stay in private memory";
    finding("shared memory", io.shm_free_bytes >= SHM_BYTES_MIN, found, advice)
}

fn o_direct(dir: &Path, direct: &DirectReport) -> Finding {
    let align = |align: Option<u32>| align.map_or_else(|| "?".into(), |a| a.to_string());
    let found = if direct.supported {
        let (memory, offset) = (direct.memory_align_bytes, direct.offset_align_bytes);
        let sizes = format!("memory {} B, offset {} B", align(memory), align(offset));
        format!("{}: works, aligned to {sizes}", dir.display())
    } else {
        format!("{}: refused ({})", dir.display(), direct.reason)
    };
    let advice = "checkpoints go through the page cache here; ext4, xfs and NVMe-backed volumes \
                  take O_DIRECT";
    finding("O_DIRECT", direct.supported, found, advice)
}

fn jpeg() -> Finding {
    let turbo = cfg!(feature = "turbojpeg");
    let found = if turbo { "libjpeg-turbo, zune-jpeg" } else { "zune-jpeg" };
    let advice = "install nasm (`apt-get install nasm`) and build again: libjpeg-turbo decodes \
                  scaled down, which is about twice as fast for typical model inputs";
    finding("JPEG decoders", turbo, found.into(), advice)
}

fn gpu(cuda: &Discovery) -> Finding {
    let device = |d: &drivetrain_gpu_decode::DeviceInfo| {
        let (major, minor) = d.compute_capability;
        format!("{} ({}, sm_{major}{minor})", d.name, bytes(d.memory_bytes as u64))
    };
    let found = if cuda.available {
        cuda.devices.iter().map(device).collect::<Vec<_>>().join(", ")
    } else {
        cuda.reason.clone()
    };
    // A machine without a GPU is complete as it is.
    finding("CUDA", true, found, "")
}

fn bytes(count: u64) -> String {
    let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let unit = units.iter().find(|(size, _)| count >= *size);
    unit.map_or_else(
        || format!("{count} B"),
        |(size, name)| format!("{:.1} {name}", count as f64 / *size as f64),
    )
}

fn text(findings: &[Finding]) -> String {
    let mut lines = vec![format!("drivetrain {}", env!("CARGO_PKG_VERSION"))];
    for Finding { name, good, found, advice } in findings {
        lines.push(format!("  {} {name:<14} {found}", if *good { "ok  " } else { "slow" }));
        if !advice.is_empty() {
            lines.push(format!("       {:<14} → {advice}", ""));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_with_advice() {
        let mut io = probe();
        io.io_uring = false;
        io.io_uring_reason = "io_uring_setup: EPERM".into();
        io.io_uring_advice = "sysctl kernel.io_uring_disabled=0".into();
        io.memlock_bytes = Some(8 << 20);
        io.shm_free_bytes = 64 << 20;
        let direct = probe_direct(Path::new("/no/such/folder"));
        let cuda = Discovery { available: false, reason: "no driver".into(), devices: vec![] };
        let found = findings(&io, Path::new("x"), &direct, &cuda);
        let slow: Vec<_> = found.iter().filter(|f| !f.good).map(|f| f.name).collect();
        for name in ["io_uring", "locked memory", "shared memory", "O_DIRECT"] {
            assert!(slow.contains(&name), "{name} in {slow:?}");
        }
        assert!(found.iter().all(|f| f.good == f.advice.is_empty()), "{found:?}");
        assert!(text(&found).contains("EPERM") && text(&found).contains("8.0 MiB (hard"));
    }

    #[test]
    fn sizes_are_readable() {
        assert_eq!((bytes(512), bytes(3 << 30)), ("512 B".into(), "3.0 GiB".into()));
    }
}
