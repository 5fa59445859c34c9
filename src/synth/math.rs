//! Plane geometry without the system's math library, whose last bits differ between machines.
//!
//! Sine, cosine and arc tangent are polynomials in f64; Rust never contracts `a * b + c` into one
//! rounding, so the results are the same bits everywhere.

use std::f64::consts::{FRAC_PI_2, FRAC_PI_4, PI};

/// Tangent of π/8: above it the arc tangent is folded once more.
const TAN_PI_8: f64 = 0.414_213_562_373_095_05;

/// Sine and cosine; absolute error below 1e-13 for |x| < 1e4.
pub fn sin_cos(x: f64) -> (f64, f64) {
    let turns = (x / FRAC_PI_2).round();
    let r = x - turns * FRAC_PI_2;
    let q = r * r;
    let s = r * horner(
        q,
        &[
            1.0,
            -1.0 / 6.0,
            120.0_f64.recip(),
            -1.0 / 5040.0,
            1.0 / 362_880.0,
            -1.0 / 39_916_800.0,
            1.0 / 6_227_020_800.0,
        ],
    );
    let c = horner(
        q,
        &[
            1.0,
            -0.5,
            1.0 / 24.0,
            -1.0 / 720.0,
            1.0 / 40_320.0,
            -1.0 / 3_628_800.0,
            1.0 / 479_001_600.0,
            -1.0 / 87_178_291_200.0,
        ],
    );
    match (turns as i64).rem_euclid(4) {
        0 => (s, c),
        1 => (c, -s),
        2 => (-s, -c),
        _ => (-c, s),
    }
}

#[inline]
fn horner(x: f64, coefficients: &[f64]) -> f64 {
    coefficients.iter().rev().fold(0.0, |sum, c| sum * x + c)
}

/// Angle of (x, y) in (-π, π]; absolute error below 1e-10.
#[inline]
pub fn atan2(y: f64, x: f64) -> f64 {
    let (ax, ay) = (x.abs(), y.abs());
    if ax == 0.0 && ay == 0.0 {
        return 0.0;
    }
    let steep = ay > ax;
    let ratio = if steep { ax / ay } else { ay / ax };
    let mut angle = atan_unit(ratio);
    if steep {
        angle = FRAC_PI_2 - angle;
    }
    if x < 0.0 {
        angle = PI - angle;
    }
    if y < 0.0 { -angle } else { angle }
}

/// Arc tangent of a ratio in [0, 1].
#[inline]
fn atan_unit(ratio: f64) -> f64 {
    if ratio > TAN_PI_8 {
        return FRAC_PI_4 - atan_small((1.0 - ratio) / (1.0 + ratio));
    }
    atan_small(ratio)
}

#[inline]
fn atan_small(x: f64) -> f64 {
    let q = x * x;
    x * horner(
        q,
        &[
            1.0,
            -1.0 / 3.0,
            1.0 / 5.0,
            -1.0 / 7.0,
            1.0 / 9.0,
            -1.0 / 11.0,
            1.0 / 13.0,
            -1.0 / 15.0,
            1.0 / 17.0,
            -1.0 / 19.0,
            1.0 / 21.0,
        ],
    )
}

/// A point or direction in the plane.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Vec2 {
    /// First coordinate, metres.
    pub x: f64,
    /// Second coordinate, metres.
    pub y: f64,
}

impl Vec2 {
    /// From coordinates.
    pub fn new(x: f64, y: f64) -> Self {
        Self { x, y }
    }

    /// The unit vector at an angle from +x.
    pub fn heading(angle: f64) -> Self {
        let (y, x) = sin_cos(angle);
        Self { x, y }
    }

    /// Scalar product.
    pub fn dot(self, other: Self) -> f64 {
        self.x * other.x + self.y * other.y
    }

    /// z of the vector product: positive if `other` is to the left.
    pub fn cross(self, other: Self) -> f64 {
        self.x * other.y - self.y * other.x
    }

    /// Turned by +90°.
    pub fn left(self) -> Self {
        Self { x: -self.y, y: self.x }
    }

    /// `self + other * scale`.
    pub fn plus(self, other: Self, scale: f64) -> Self {
        Self { x: self.x + other.x * scale, y: self.y + other.y * scale }
    }

    /// `self - other`.
    pub fn minus(self, other: Self) -> Self {
        Self { x: self.x - other.x, y: self.y - other.y }
    }

    /// Length.
    pub fn norm(self) -> f64 {
        self.dot(self).sqrt()
    }

    /// Turned by an angle whose heading vector is `axis`: axis-frame coordinates to the plane's.
    pub fn rotate(self, axis: Self) -> Self {
        Self { x: axis.x * self.x - axis.y * self.y, y: axis.y * self.x + axis.x * self.y }
    }

    /// Turned back: the plane's coordinates to axis-frame coordinates.
    pub fn unrotate(self, axis: Self) -> Self {
        Self { x: axis.dot(self), y: axis.cross(self) }
    }
}

/// Quaternion w x y z of a turn by `angle` about +z.
pub fn yaw_quaternion(angle: f64) -> [f64; 4] {
    let (s, c) = sin_cos(0.5 * angle);
    [c, 0.0, 0.0, s]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_system_library() {
        for i in -4000..4000 {
            let x = f64::from(i) * 0.0137;
            let (s, c) = sin_cos(x);
            assert!((s - x.sin()).abs() < 1e-12 && (c - x.cos()).abs() < 1e-12, "{x}");
            assert!((atan2(s, c) - s.atan2(c)).abs() < 1e-9, "{x}");
        }
        assert_eq!(atan2(0.0, 0.0), 0.0);
    }

    #[test]
    fn rotation_round_trips() {
        let axis = Vec2::heading(0.7);
        let back = Vec2::new(3.0, -2.0).rotate(axis).unrotate(axis);
        assert!((back.x - 3.0).abs() < 1e-12 && (back.y + 2.0).abs() < 1e-12);
    }
}
