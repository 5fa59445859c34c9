//! What a points transform means: which sweeps, which columns, which points.

use crate::error::{Error, Result};

/// Name of the column with seconds between the keyframe and the point's sweep.
pub const TIME_COLUMN: &str = "dt_s";

/// Columns of a record; nuScenes has 5, the widest known format under 32.
pub const COLUMNS_MAX: usize = 64;

/// Keyframe plus earlier sweeps → keyframe frame → drop points → columns.
///
/// Order of the output: keyframe first, then the sweeps as given (nearest first), points in file
/// order. Points are moved in f64 and rounded once to f32.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PointsSpec {
    /// Earlier sweeps to add, as far as there are any; 0 is the keyframe alone.
    pub sweeps: usize,
    /// `[x_min, y_min, z_min, x_max, y_max, z_max]` in metres in the keyframe's sensor frame; a
    /// point stays if it is strictly inside on all axes (so NaN never stays). `None` keeps all.
    pub range: Option<[f32; 6]>,
    /// Output columns by name; `None` is all columns of the file, then `dt_s`.
    pub columns: Option<Vec<String>>,
    /// Drop points of earlier sweeps with |x| and |y| both below this in their own sensor frame:
    /// returns from the car itself. The keyframe keeps all its points, as in mmdet3d.
    pub remove_close_m: Option<f32>,
}

/// Where an output column comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    /// Column of the record; 0, 1 and 2 are x, y and z and are moved.
    Record(usize),
    /// Seconds from the point's sweep to the keyframe.
    Time,
}

/// Columns resolved against a file's: made once per field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PointLayout {
    /// f32 values of one stored record.
    pub record_columns: usize,
    /// Source of each output column.
    pub picks: Vec<Pick>,
    /// Name of each output column.
    pub names: Vec<String>,
}

impl PointLayout {
    /// Output columns.
    pub fn columns(&self) -> usize {
        self.picks.len()
    }
}

impl PointsSpec {
    /// Resolves the columns against a file's column names (`FieldSpec::columns`; missing names
    /// become `x y z c3 c4 ...`) and checks the other parameters.
    pub fn layout(&self, file_columns: &[String], record_columns: usize) -> Result<PointLayout> {
        if !(3..=COLUMNS_MAX).contains(&record_columns) {
            let expected = format!("3..={COLUMNS_MAX}, beginning with x y z");
            return Err(Error::invalid("columns of a point record", expected, record_columns));
        }
        self.validate()?;
        let known: Vec<String> =
            (0..record_columns).map(|i| column_name(file_columns, i)).collect();
        let wanted = match &self.columns {
            Some(columns) => columns.clone(),
            None => known.iter().cloned().chain([TIME_COLUMN.to_string()]).collect(),
        };
        let picks = wanted.iter().map(|name| pick(&known, name)).collect::<Result<Vec<_>>>()?;
        Ok(PointLayout { record_columns, picks, names: wanted })
    }

    fn validate(&self) -> Result<()> {
        if let Some(range) = self.range
            && !(0..3).all(|axis| range[axis] < range[axis + 3])
        {
            let expected = "[x_min, y_min, z_min, x_max, y_max, z_max] with each min below its max";
            return Err(Error::invalid("range", expected, format!("{range:?}")));
        }
        if let Some(radius) = self.remove_close_m
            && (radius.is_nan() || radius < 0.0)
        {
            return Err(Error::invalid("remove_close_m", "0 or more metres", radius));
        }
        let columns = self.columns.as_ref().map_or(1, Vec::len);
        if !(1..=COLUMNS_MAX).contains(&columns) {
            return Err(Error::invalid("columns", format!("1..={COLUMNS_MAX} names"), columns));
        }
        Ok(())
    }
}

fn column_name(file_columns: &[String], index: usize) -> String {
    match (file_columns.get(index), index) {
        (Some(name), _) => name.clone(),
        (None, 0) => "x".into(),
        (None, 1) => "y".into(),
        (None, 2) => "z".into(),
        (None, _) => format!("c{index}"),
    }
}

fn pick(known: &[String], name: &str) -> Result<Pick> {
    match known.iter().position(|k| k == name) {
        Some(index) => Ok(Pick::Record(index)),
        None if name == TIME_COLUMN => Ok(Pick::Time),
        None => {
            let expected = format!("names out of {}, {TIME_COLUMN}", known.join(", "));
            Err(Error::invalid("columns", expected, name))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        text.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn default_columns_are_the_files_and_time() {
        let layout = PointsSpec::default().layout(&names("x y z intensity ring"), 5).unwrap();
        assert_eq!(layout.names, names("x y z intensity ring dt_s"));
        assert_eq!(layout.picks.last(), Some(&Pick::Time));
        let unnamed = PointsSpec::default().layout(&[], 4).unwrap();
        assert_eq!(unnamed.names, names("x y z c3 dt_s"));
    }

    #[test]
    fn chosen_columns_keep_their_order() {
        let spec = PointsSpec { columns: Some(names("dt_s ring x")), ..PointsSpec::default() };
        let layout = spec.layout(&names("x y z intensity ring"), 5).unwrap();
        assert_eq!(layout.picks, [Pick::Time, Pick::Record(4), Pick::Record(0)]);
        let error = spec.layout(&names("x y z"), 3).unwrap_err().to_string();
        assert!(error.contains("ring"), "{error}");
    }

    #[test]
    fn meaningless_parameters_are_refused() {
        let turned = Some([1.0, 0.0, 0.0, -1.0, 1.0, 1.0]);
        assert!(PointsSpec { range: turned, ..PointsSpec::default() }.layout(&[], 3).is_err());
        let close = Some(f32::NAN);
        assert!(PointsSpec { remove_close_m: close, ..Default::default() }.layout(&[], 3).is_err());
        assert!(PointsSpec::default().layout(&[], 2).is_err());
    }
}
