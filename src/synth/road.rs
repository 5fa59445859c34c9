//! The road: a circle, so that every point has closed-form road coordinates and no scene ends.
//!
//! `s` runs along the middle line in metres (driving direction of the right half), `d` to the left.
//! Traffic keeps right: lanes at negative `d` drive towards growing `s`.

use std::f64::consts::{PI, TAU};

use super::math::{Vec2, atan2, sin_cos};
use super::noise::Dice;

/// Width of a lane in metres.
pub const LANE_M: f64 = 3.5;
/// Half width of the asphalt that carries traffic: two lanes each way.
pub const CARRIAGEWAY_M: f64 = 2.0 * LANE_M;
/// Where the parking strip ends and the kerb begins.
pub const KERB_M: f64 = 9.2;
/// Where the pavement ends and the green begins.
pub const PAVEMENT_M: f64 = 12.5;
/// Front walls of the near row of houses.
pub const NEAR_WALL_M: f64 = 15.0;
/// Front walls of the far row of houses.
pub const FAR_WALL_M: f64 = 34.0;

/// A circular road in the global frame.
#[derive(Debug, Clone)]
pub struct Road {
    centre: Vec2,
    radius_m: f64,
    /// +1 for a road that turns left, -1 for right.
    turn: f64,
    start_heading: f64,
    start_left: Vec2,
}

impl Road {
    /// A road somewhere on the map, gentle or sharp, to either side.
    pub fn random(dice: &mut Dice) -> Self {
        let start = Vec2::new(dice.between(300.0, 1900.0), dice.between(300.0, 1900.0));
        let start_heading = dice.between(-PI, PI);
        let turn = if dice.chance(0.5) { 1.0 } else { -1.0 };
        let radius_m = dice.between(160.0, 420.0);
        let start_left = Vec2::heading(start_heading).left();
        let centre = start.plus(start_left, turn * radius_m);
        Self { centre, radius_m, turn, start_heading, start_left }
    }

    /// Length of one round in metres.
    pub fn length_m(&self) -> f64 {
        TAU * self.radius_m
    }

    /// Heading of the middle line at `s`, radians.
    pub fn heading(&self, s: f64) -> f64 {
        self.start_heading + self.turn * s / self.radius_m
    }

    /// The global point at road coordinates.
    pub fn point(&self, s: f64, d: f64) -> Vec2 {
        let left = Vec2::heading(self.heading(s)).left();
        self.centre.plus(left, d - self.turn * self.radius_m)
    }

    /// Metres travelled at offset `d` per metre of `s`.
    pub fn stretch(&self, d: f64) -> f64 {
        1.0 - self.turn * d / self.radius_m
    }

    /// Road coordinates of a global point; `s` within half a round of the start.
    #[inline]
    pub fn locate(&self, point: Vec2) -> (f64, f64) {
        let out = point.minus(self.centre);
        let distance = out.norm();
        // The left normal at this point, times the distance.
        let left = Vec2::new(-self.turn * out.x, -self.turn * out.y);
        let angle = atan2(self.start_left.cross(left), self.start_left.dot(left));
        (self.turn * self.radius_m * angle, self.turn * (self.radius_m - distance))
    }

    /// Distances along a ray at which it crosses the circle at offset `d`, ascending; the ray is
    /// `origin + distance * direction` with a unit direction.
    pub fn crossings(&self, origin: Vec2, direction: Vec2, d: f64) -> Option<(f64, f64)> {
        let radius = self.radius_m - self.turn * d;
        let out = origin.minus(self.centre);
        let half = out.dot(direction);
        let square = half * half - (out.dot(out) - radius * radius);
        (square >= 0.0).then(|| (-half - square.sqrt(), -half + square.sqrt()))
    }

    /// The unit normal of the road at a point, pointing to growing `d`.
    pub fn left_at(&self, point: Vec2) -> Vec2 {
        let out = point.minus(self.centre);
        let scale = -self.turn / out.norm().max(1e-9);
        Vec2::new(out.x * scale, out.y * scale)
    }
}

/// How far a lane's traffic has come: steady speed with a slow swing, so that speeds change but
/// cars of one lane keep their distances.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Mean speed, m/s.
    pub speed_mps: f64,
    /// Amplitude of the speed's swing, m/s.
    pub swing_mps: f64,
    /// Angular frequency of the swing, 1/s.
    pub rate_per_s: f64,
}

impl Pace {
    /// Metres travelled and speed after `t` seconds.
    pub fn at(&self, t: f64) -> (f64, f64) {
        let (sin, cos) = sin_cos(self.rate_per_s * t);
        let travelled = self.speed_mps * t + self.swing_mps / self.rate_per_s * (1.0 - cos);
        (travelled, self.speed_mps + self.swing_mps * sin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_round_trip() {
        for seed in 0..20 {
            let road = Road::random(&mut Dice::new(&[seed]));
            for (s, d) in [(0.0, 0.0), (120.0, -5.0), (-300.0, 8.0), (40.0, 30.0)] {
                let (s2, d2) = road.locate(road.point(s, d));
                assert!((s - s2).abs() < 1e-6 && (d - d2).abs() < 1e-9, "{s} {d} {s2} {d2}");
            }
        }
    }

    #[test]
    fn left_is_where_d_grows() {
        let road = Road::random(&mut Dice::new(&[3]));
        let at = road.point(50.0, 2.0);
        let (_, d) = road.locate(at.plus(road.left_at(at), 0.5));
        assert!((d - 2.5).abs() < 1e-9);
    }

    #[test]
    fn a_crossing_lies_on_the_circle() {
        let road = Road::random(&mut Dice::new(&[9]));
        let origin = road.point(10.0, -1.75);
        let direction = Vec2::heading(1.0);
        let mut found = 0;
        for lateral in [-15.0, 15.0] {
            let Some((first, second)) = road.crossings(origin, direction, lateral) else {
                continue;
            };
            for distance in [first, second] {
                let (_, d) = road.locate(origin.plus(direction, distance));
                assert!((d - lateral).abs() < 1e-6, "{d}");
            }
            found += 1;
        }
        assert!(found > 0, "the outer circle is always crossed");
    }
}
