//! Argument forms several verbs share: sizes with units, picture sizes, `key=value` options.

use std::time::Duration;

use crate::error::Result as EngineResult;
use crate::index::{SampleTable, open_dataset};
use crate::storage::{OptionMap, StorageOptions};

/// Units of a byte size, largest first, binary and decimal.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

/// Units of a time in seconds; longer names first where one ends with another.
const TIME_UNITS: [(&str, f64); 6] =
    [("ms", 1e-3), ("min", 60.0), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0)];

/// Storage options given on the command line.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct StorageArgs {
    /// Option of the storage backend as KEY=VALUE (repeatable); credentials belong in the
    /// environment instead
    #[arg(long = "storage-option", value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub storage_option: Vec<(String, String)>,
}

impl StorageArgs {
    /// The options as a map; the last of equal keys wins.
    pub fn map(&self) -> OptionMap {
        self.storage_option.iter().cloned().collect()
    }
}

/// A data set to open, for the verbs that look at one.
#[derive(Debug, clap::Args)]
pub struct DatasetArgs {
    /// Data set or index file
    uri: String,
    /// auto, nuscenes, nuscenes:<table folder>, webdataset or mmdet3d
    #[arg(long, default_value = "auto")]
    format: String,
    #[command(flatten)]
    storage: StorageArgs,
}

impl DatasetArgs {
    /// Opens it; the options are those its files are read with.
    pub fn open(&self) -> EngineResult<(SampleTable, StorageOptions)> {
        let options = StorageOptions { options: self.storage.map() };
        Ok((open_dataset(&self.uri, &self.format, None, &options)?, options))
    }
}

/// Parses `"2GiB"`, `"64 MiB"`, `"1e"`-free decimals such as `"1.5GB"`, or plain bytes.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number.trim(), *unit)))
        .unwrap_or((text, 1));
    let bad = || format!("expected bytes such as 2GiB, 64MiB or 1048576, found {text:?}");
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).ok_or_else(bad);
    }
    let value: f64 = number.parse().map_err(|_| bad())?;
    let bytes = value * unit as f64;
    if bytes.is_finite() && (0.0..=9e18).contains(&bytes) { Ok(bytes as u64) } else { Err(bad()) }
}

/// Parses `"50ms"`, `"90s"`, `"10min"`, `"1.5h"`, `"7d"`, or plain seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let found = TIME_UNITS.iter().find_map(|(name, unit_s)| {
        let number: f64 = text.strip_suffix(name)?.trim().parse().ok()?;
        Some(number * unit_s)
    });
    let seconds = found.or_else(|| text.parse().ok()).unwrap_or(f64::NAN);
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| format!("expected a time such as 7d, 12h or 30min, found {text:?}"))
}

/// Parses `WIDTHxHEIGHT` into pixels.
pub fn parse_size(text: &str) -> Result<(u32, u32), String> {
    let bad = || format!("expected WIDTHxHEIGHT such as 1600x900, found {text:?}");
    let (width, height) = text.split_once(['x', 'X']).ok_or_else(bad)?;
    Ok((width.parse().map_err(|_| bad())?, height.parse().map_err(|_| bad())?))
}

fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.into(), value.into())),
        // The text may be a secret typed in the wrong place, so it is not repeated.
        _ => Err("expected KEY=VALUE".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_units() {
        assert_eq!(parse_bytes("2GiB"), Ok(2 << 30));
        assert_eq!(parse_bytes("64 MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("1.5kB"), Ok(1500));
        assert_eq!(parse_bytes("123"), Ok(123));
        for bad in ["", "GiB", "-1", "2GiX", "nan", "99999999999TiB", "1e40"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_with_units() {
        assert_eq!(parse_duration("7d"), Ok(Duration::from_hours(168)));
        assert_eq!(parse_duration("1.5 h"), Ok(Duration::from_mins(90)));
        assert_eq!(parse_duration("50ms"), Ok(Duration::from_millis(50)));
        assert_eq!(parse_duration("2min"), Ok(Duration::from_mins(2)));
        assert_eq!(parse_duration("3"), Ok(Duration::from_secs(3)));
        for bad in ["", "d", "-1h", "soon", "nan", "1e40d"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn picture_sizes() {
        assert_eq!(parse_size("1600x900"), Ok((1600, 900)));
        assert!(parse_size("1600").is_err() && parse_size("ax9").is_err());
    }

    #[test]
    fn a_bad_pair_is_not_echoed() {
        assert_eq!(parse_pair("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert_eq!(parse_pair("s3cret"), Err("expected KEY=VALUE".into()));
    }
}
