//! Rigid transforms that carry the names of their frames: composing two whose frames don't meet is
//! an error, not a wrong picture.
//!
//! Everything is f64: poses in map frames reach millions of metres, where an f32 step is half a
//! metre. Matrices are row-major 4x4, target ← source, in metres.

use crate::error::{Error, Result};

/// Row-major 4x4 matrix.
pub type Matrix4 = [f64; 16];

/// The identity.
pub const IDENTITY: Matrix4 =
    [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0];

/// A quaternion shorter than this (or longer than its inverse) is damage, not rounding.
const QUATERNION_NORM_MIN: f64 = 0.5;

/// A rigid transform between two named frames.
#[derive(Debug, Clone, PartialEq)]
pub struct Transform {
    /// Frame of the result.
    pub target: String,
    /// Frame of the input.
    pub source: String,
    /// Row-major 4x4, target ← source, metres.
    pub matrix: Matrix4,
}

impl Transform {
    /// Names a matrix.
    pub fn new(target: impl Into<String>, source: impl Into<String>, matrix: Matrix4) -> Self {
        Self { target: target.into(), source: source.into(), matrix }
    }

    /// `self` after `inner`: (a ← b) · (b ← c) = (a ← c). Frames that don't meet are an error.
    pub fn compose(&self, inner: &Self) -> Result<Self> {
        if self.source != inner.target {
            return Err(Error::invalid(
                "composed transforms",
                format!("{} ← {0} meeting {0} ← …", self.source),
                format!(
                    "{} ← {} after {} ← {}",
                    self.target, self.source, inner.target, inner.source
                ),
            ));
        }
        Ok(Self {
            target: self.target.clone(),
            source: inner.source.clone(),
            matrix: multiply(&self.matrix, &inner.matrix),
        })
    }

    /// The way back: source ← target.
    pub fn inverse(&self) -> Self {
        Self {
            target: self.source.clone(),
            source: self.target.clone(),
            matrix: inverse_rigid(&self.matrix),
        }
    }

    /// A point, in metres, brought from the source into the target frame.
    pub fn apply(&self, point: [f64; 3]) -> [f64; 3] {
        apply(&self.matrix, point)
    }
}

/// Matrix of a unit quaternion (w, x, y, z) and a translation in metres. The quaternion is
/// normalised first, as the data sets round theirs; one far from unit length is refused.
pub fn from_quaternion(rotation_wxyz: [f64; 4], translation_m: [f64; 3]) -> Option<Matrix4> {
    let norm = rotation_wxyz.iter().map(|v| v * v).sum::<f64>().sqrt();
    let usable = (QUATERNION_NORM_MIN..1.0 / QUATERNION_NORM_MIN).contains(&norm)
        && translation_m.iter().all(|v| v.is_finite());
    if !usable {
        return None;
    }
    let [w, x, y, z] = rotation_wxyz.map(|v| v / norm);
    let [tx, ty, tz] = translation_m;
    Some([
        1.0 - 2.0 * (y * y + z * z),
        2.0 * (x * y - w * z),
        2.0 * (x * z + w * y),
        tx,
        2.0 * (x * y + w * z),
        1.0 - 2.0 * (x * x + z * z),
        2.0 * (y * z - w * x),
        ty,
        2.0 * (x * z - w * y),
        2.0 * (y * z + w * x),
        1.0 - 2.0 * (x * x + y * y),
        tz,
        0.0,
        0.0,
        0.0,
        1.0,
    ])
}

/// a · b.
pub fn multiply(a: &Matrix4, b: &Matrix4) -> Matrix4 {
    let mut out = [0.0; 16];
    for row in 0..4 {
        for column in 0..4 {
            out[row * 4 + column] = (0..4).map(|k| a[row * 4 + k] * b[k * 4 + column]).sum::<f64>();
        }
    }
    out
}

/// Inverse of a rigid transform: transpose the rotation, turn the translation back.
pub fn inverse_rigid(m: &Matrix4) -> Matrix4 {
    let mut out = IDENTITY;
    for row in 0..3 {
        for column in 0..3 {
            out[row * 4 + column] = m[column * 4 + row];
        }
        out[row * 4 + 3] = -(0..3).map(|k| m[k * 4 + row] * m[k * 4 + 3]).sum::<f64>();
    }
    out
}

/// A point through a matrix.
pub fn apply(m: &Matrix4, p: [f64; 3]) -> [f64; 3] {
    std::array::from_fn(|row| {
        let r = &m[row * 4..row * 4 + 4];
        r[0] * p[0] + r[1] * p[1] + r[2] * p[2] + r[3]
    })
}

/// A direction through a matrix: rotated, not moved.
pub fn rotate(m: &Matrix4, p: [f64; 3]) -> [f64; 3] {
    std::array::from_fn(|row| {
        let r = &m[row * 4..row * 4 + 3];
        r[0] * p[0] + r[1] * p[1] + r[2] * p[2]
    })
}

/// Heading of a frame's x axis about +z from +x, radians in [-π, π].
pub fn yaw(m: &Matrix4) -> f64 {
    m[4].atan2(m[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: &Matrix4, b: &Matrix4) -> bool {
        a.iter().zip(b).all(|(x, y)| (x - y).abs() < 1e-12)
    }

    #[test]
    fn a_quarter_turn_about_z() {
        let half = std::f64::consts::FRAC_1_SQRT_2;
        let m = from_quaternion([half, 0.0, 0.0, half], [1.0, 2.0, 3.0]).unwrap();
        let p = apply(&m, [1.0, 0.0, 0.0]);
        assert!((p[0] - 1.0).abs() < 1e-12 && (p[1] - 3.0).abs() < 1e-12 && p[2] == 3.0);
        assert!((yaw(&m) - std::f64::consts::FRAC_PI_2).abs() < 1e-12);
    }

    #[test]
    fn inverse_undoes() {
        let m = from_quaternion([0.5, 0.5, -0.5, 0.5], [4.0, -5.0, 6.0]).unwrap();
        assert!(close(&multiply(&m, &inverse_rigid(&m)), &IDENTITY));
        assert!(close(&multiply(&inverse_rigid(&m), &m), &IDENTITY));
    }

    #[test]
    fn frames_must_meet() {
        let a = Transform::new("ego", "lidar", IDENTITY);
        let b = Transform::new("global", "ego", IDENTITY);
        let both = b.compose(&a).unwrap();
        assert_eq!((both.target.as_str(), both.source.as_str()), ("global", "lidar"));
        let message = a.compose(&b).unwrap_err().to_string();
        assert!(message.contains("ego ← lidar after global ← ego"), "{message}");
        assert_eq!(b.inverse().target, "ego");
    }

    #[test]
    fn damaged_quaternions_are_refused() {
        assert!(from_quaternion([0.0; 4], [0.0; 3]).is_none());
        assert!(from_quaternion([f64::NAN, 0.0, 0.0, 1.0], [0.0; 3]).is_none());
        assert!(from_quaternion([1.0, 0.0, 0.0, 0.0], [f64::INFINITY, 0.0, 0.0]).is_none());
        assert!(from_quaternion([1.0001, 0.0, 0.0, 0.0], [0.0; 3]).is_some());
    }
}
