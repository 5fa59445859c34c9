//! The fused kernel: move, filter, pick columns, append time.
//!
//! Every point is written to the next free place and kept by moving the end, so there is no branch
//! for the predictor to miss and no second pass.

use super::spec::{Pick, PointLayout, PointsSpec};
use crate::error::{Error, Result};

/// Bytes of a stored value.
const VALUE_BYTES: usize = 4;

/// One cloud of a sample.
#[derive(Debug, Clone, Copy)]
pub struct SweepInput<'a> {
    /// Little-endian f32 records.
    pub bytes: &'a [u8],
    /// Row-major 4x4: keyframe sensor frame ← this sweep's sensor frame; `None` for the keyframe,
    /// whose points are passed on bit for bit.
    pub transform: Option<&'a [f64; 16]>,
    /// Seconds from this sweep to the keyframe, 0 or more.
    pub dt_s: f32,
}

/// Points in `length_bytes` of records of `record_columns` f32.
pub fn count_points(length_bytes: u64, record_columns: usize, file: &str) -> Result<usize> {
    let record_bytes = (record_columns * VALUE_BYTES) as u64;
    if record_bytes == 0 || !length_bytes.is_multiple_of(record_bytes) {
        let expected = format!("a multiple of {record_bytes} bytes ({record_columns} x float32)");
        let found = format!("{length_bytes} bytes");
        let advice = "the file is cut off, or its records have another number of columns";
        return Err(Error::corrupt(file, length_bytes, expected, found, advice));
    }
    Ok((length_bytes / record_bytes) as usize)
}

/// Gathers all points that stay into `out`, as rows of `layout.columns()` f32, and returns how many
/// there are. `out` must hold all input points (see [`count_points`]); what lies behind the last
/// point is left with undefined values.
pub fn gather_points(
    inputs: &[SweepInput<'_>],
    layout: &PointLayout,
    spec: &PointsSpec,
    out: &mut [f32],
    file: &str,
) -> Result<usize> {
    let mut total = 0;
    for input in inputs {
        total += count_points(input.bytes.len() as u64, layout.record_columns, file)?;
    }
    let columns = layout.columns();
    if out.len() < total * columns {
        let expected = format!("{total} rows of {columns} values");
        let what = format!("output memory for {file}");
        return Err(Error::invalid(what, expected, format!("{} values", out.len())));
    }
    let mut written = 0;
    for input in inputs {
        written += gather_sweep(input, layout, spec, &mut out[written * columns..]);
    }
    Ok(written)
}

/// Chooses the kernel compiled for the record's width, which makes the inner loops straight code.
fn gather_sweep(
    input: &SweepInput<'_>,
    layout: &PointLayout,
    spec: &PointsSpec,
    out: &mut [f32],
) -> usize {
    let pass = Pass::new(input, spec);
    let natural = layout.picks.iter().enumerate().all(|(i, pick)| match pick {
        Pick::Record(from) => *from == i && i < layout.record_columns,
        Pick::Time => i == layout.record_columns,
    });
    let natural = natural && layout.picks.len() == layout.record_columns + 1;
    match (layout.record_columns, natural) {
        (4, true) => natural_columns::<4, 5>(&pass, input.bytes, out),
        (5, true) => natural_columns::<5, 6>(&pass, input.bytes, out),
        _ => any_columns(&pass, input.bytes, layout, out),
    }
}

/// Parameters of one sweep, with absent filters replaced by ones that pass everything.
struct Pass<'a> {
    transform: Option<&'a [f64; 16]>,
    dt_s: f32,
    range: Option<[f32; 6]>,
    close_m: f32,
}

impl<'a> Pass<'a> {
    fn new(input: &SweepInput<'a>, spec: &PointsSpec) -> Self {
        let moved = input.transform.is_some();
        let close_m = if moved { spec.remove_close_m.unwrap_or(0.0) } else { 0.0 };
        Self { transform: input.transform, dt_s: input.dt_s, range: spec.range, close_m }
    }

    /// The moved point, and whether it stays.
    #[inline(always)]
    #[allow(clippy::needless_bitwise_bool, reason = "no branches: scans alternate in and out")]
    fn point(&self, [x, y, z]: [f32; 3]) -> ([f32; 3], bool) {
        let close = (x.abs() < self.close_m) & (y.abs() < self.close_m);
        let point = self.transform.map_or([x, y, z], |m| {
            let (x, y, z) = (f64::from(x), f64::from(y), f64::from(z));
            let axis = |r: usize| m[r] * x + m[r + 1] * y + m[r + 2] * z + m[r + 3];
            [axis(0) as f32, axis(4) as f32, axis(8) as f32]
        });
        let inside = self.range.is_none_or(|r| {
            (0..3).fold(true, |stay, a| stay & (point[a] > r[a]) & (point[a] < r[a + 3]))
        });
        (point, inside & !close)
    }
}

/// All columns of the file in order, then time.
fn natural_columns<const IN: usize, const OUT: usize>(
    pass: &Pass<'_>,
    bytes: &[u8],
    out: &mut [f32],
) -> usize {
    let mut written = 0;
    let (values, _) = bytes.as_chunks::<VALUE_BYTES>();
    let (records, _) = values.as_chunks::<IN>();
    let (rows, _) = out.as_chunks_mut::<OUT>();
    for record in records {
        let record = record.map(f32::from_le_bytes);
        let (point, stays) = pass.point([record[0], record[1], record[2]]);
        let Some(row) = rows.get_mut(written) else { break };
        row[..3].copy_from_slice(&point);
        row[3..IN].copy_from_slice(&record[3..]);
        row[IN] = pass.dt_s;
        written += usize::from(stays);
    }
    written
}

/// Any record width and choice of columns.
fn any_columns(pass: &Pass<'_>, bytes: &[u8], layout: &PointLayout, out: &mut [f32]) -> usize {
    let mut written = 0;
    let columns = layout.columns();
    for record in bytes.chunks_exact(layout.record_columns * VALUE_BYTES) {
        let (values, _) = record.as_chunks::<VALUE_BYTES>();
        let value = |i: usize| f32::from_le_bytes(values[i]);
        let (point, stays) = pass.point([value(0), value(1), value(2)]);
        for (slot, pick) in out[written * columns..].iter_mut().zip(&layout.picks) {
            *slot = match pick {
                Pick::Record(i) if *i < 3 => point[*i],
                Pick::Record(i) => value(*i),
                Pick::Time => pass.dt_s,
            };
        }
        written += usize::from(stays);
    }
    written
}

/// Records of `columns` f32 as rows, for callers that need values rather than bytes.
pub fn records(bytes: &[u8], columns: usize, file: &str) -> Result<Vec<f32>> {
    count_points(bytes.len() as u64, columns, file)?;
    Ok(bytes.as_chunks::<VALUE_BYTES>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EYE: [f64; 16] =
        [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0];

    fn bytes_of(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    fn gather(spec: &PointsSpec, columns: usize, inputs: &[SweepInput<'_>]) -> Vec<Vec<f32>> {
        let layout = spec.layout(&[], columns).unwrap();
        let total: usize = inputs.iter().map(|i| i.bytes.len() / 4 / columns).sum();
        let mut out = vec![f32::NAN; total * layout.columns()];
        let kept = gather_points(inputs, &layout, spec, &mut out, "a.bin").unwrap();
        out.chunks(layout.columns()).take(kept).map(<[f32]>::to_vec).collect()
    }

    #[test]
    fn sweep_is_turned_moved_timed_and_filtered() {
        // A quarter turn to the left about z, then 10 m along x.
        let mut turn = EYE;
        (turn[0], turn[1], turn[4], turn[5], turn[3]) = (0.0, -1.0, 1.0, 0.0, 10.0);
        let key = bytes_of(&[0.5, 0.5, 0.0, 7.0, 1.0, 100.0, 0.0, 0.0, 7.0, 2.0]);
        let past = bytes_of(&[2.0, 3.0, 1.0, 9.0, 3.0, 0.5, -0.5, 0.0, 9.0, 4.0]);
        let inputs = [
            SweepInput { bytes: &key, transform: None, dt_s: 0.0 },
            SweepInput { bytes: &past, transform: Some(&turn), dt_s: 0.05 },
        ];
        let spec = PointsSpec {
            range: Some([-50.0, -50.0, -5.0, 50.0, 50.0, 3.0]),
            remove_close_m: Some(1.0),
            ..PointsSpec::default()
        };
        let want = vec![vec![0.5, 0.5, 0.0, 7.0, 1.0, 0.0], vec![7.0, 2.0, 1.0, 9.0, 3.0, 0.05]];
        assert_eq!(gather(&spec, 5, &inputs), want);
    }

    #[test]
    fn range_is_strict_and_drops_nan() {
        let key = bytes_of(&[1.0, 0.0, 0.0, f32::NAN, 0.0, 0.0, 0.9, 0.0, 0.0]);
        let inputs = [SweepInput { bytes: &key, transform: None, dt_s: 0.0 }];
        let spec =
            PointsSpec { range: Some([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0]), ..Default::default() };
        assert_eq!(gather(&spec, 3, &inputs), vec![vec![0.9, 0.0, 0.0, 0.0]]);
        assert_eq!(gather(&PointsSpec::default(), 3, &inputs).len(), 3);
    }

    #[test]
    fn broken_record_size_names_file_and_sizes() {
        let text = count_points(103, 5, "sweep.bin").unwrap_err().to_string();
        assert!(["sweep.bin", "103 bytes", "20 bytes"].iter().all(|t| text.contains(t)), "{text}");
        assert!(count_points(0, 0, "a").is_err());
    }

    #[test]
    fn too_small_output_is_an_error() {
        let spec = PointsSpec::default();
        let layout = spec.layout(&[], 3).unwrap();
        let input = SweepInput { bytes: &[0; 24], transform: None, dt_s: 0.0 };
        assert!(gather_points(&[input], &layout, &spec, &mut [0.0; 7], "a").is_err());
    }

    proptest! {
        #[test]
        fn special_kernels_equal_the_general_one(
            values in prop::collection::vec(-60.0_f32..60.0, 0..200),
            matrix in prop::array::uniform12(-1.0_f64..1.0),
            five in any::<bool>(), moved in any::<bool>(), ranged in any::<bool>(),
        ) {
            let columns = if five { 5 } else { 4 };
            let bytes = bytes_of(&values[..values.len() / columns * columns]);
            let mut transform = EYE;
            transform[..12].copy_from_slice(&matrix);
            let spec = PointsSpec {
                range: ranged.then_some([-40.0, -40.0, -30.0, 40.0, 40.0, 30.0]),
                remove_close_m: Some(5.0),
                ..PointsSpec::default()
            };
            let transform = moved.then_some(&transform);
            let input = SweepInput { bytes: &bytes, transform, dt_s: 0.25 };
            let layout = spec.layout(&[], columns).unwrap();
            let mut got = vec![0.0; bytes.len() / 4 / columns * layout.columns()];
            let mut want = got.clone();
            let kept = gather_points(&[input], &layout, &spec, &mut got, "a").unwrap();
            let pass = Pass::new(&input, &spec);
            prop_assert_eq!(any_columns(&pass, &bytes, &layout, &mut want), kept);
            let end = kept * layout.columns();
            prop_assert_eq!(&got[..end], &want[..end]);
        }
    }
}
