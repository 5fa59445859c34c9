//! LiDAR sweeps: 32 beams turning clockwise, cast against the same world as the pictures.
//!
//! A sweep shows the world at its stamp, the end of the turn, as motion-compensated files do.
//! Records are five little-endian f32: x, y, z in metres (x right, y forward, z up), intensity
//! 0..255, ring 0..31 from the lowest beam.

use std::f64::consts::TAU;

use super::camera::NOTHING;
use super::cast::{Column, Hit, Surface};
use super::math::{Vec2, sin_cos};
use super::noise::{mix, mix2, unit};
use super::rig::{LIDAR_AT_M, mount};
use super::snapshot::{PartKind, Snapshot};

/// Beams, one ring each.
pub const BEAMS: u32 = 32;
/// Lowest beam, degrees.
const LOWEST_DEG: f64 = -30.67;
/// Between beams, degrees.
const BEAM_STEP_DEG: f64 = 1.333;
/// Longest range, metres.
const RANGE_M: f64 = 100.0;
/// Largest range error, metres.
const ERROR_M: f64 = 0.02;
/// Share of beams without a return.
const LOST: f32 = 0.02;
/// The car's own roof as the beams see it: x range, half width, height in the ego frame, metres.
const ROOF_M: (f64, f64, f64, f64) = (-0.9, 2.4, 0.85, 1.56);

/// One turn of the LiDAR.
#[derive(Debug, Clone, Default)]
pub struct Sweep {
    /// Records x, y, z, intensity, ring.
    pub points: Vec<[f32; 5]>,
    /// The thing each point lies on (an index into the world's things), or [`NOTHING`].
    pub things: Vec<u32>,
}

impl Sweep {
    /// The records as file bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.points.iter().flatten().flat_map(|value| value.to_le_bytes()).collect()
    }

    /// Points on one thing.
    pub fn count(&self, thing: usize) -> usize {
        self.things.iter().filter(|&&id| id as usize == thing).count()
    }
}

/// Casts a whole turn of `steps` azimuths. `salt` seeds range errors and lost returns.
pub fn sweep(snapshot: &Snapshot<'_>, steps: u32, salt: u32) -> Sweep {
    let slopes = slopes();
    let mut column = Column::new(mount(&snapshot.ego, LIDAR_AT_M), LIDAR_AT_M[2]);
    let mut sweep = Sweep::default();
    for step in 0..steps {
        // Azimuth in the LiDAR frame, clockwise from the left.
        let local = Vec2::heading(-TAU * f64::from(step) / f64::from(steps));
        let in_ego = Vec2::new(local.y, -local.x);
        column.aim(snapshot, in_ego.rotate(snapshot.ego.axis));
        for (ring, &slope) in slopes.iter().enumerate() {
            let bits = mix2(step as i32, ring as i32, salt);
            if unit(bits) >= LOST {
                one_beam(&mut sweep, snapshot, &column, (local, in_ego), ring, slope, bits);
            }
        }
    }
    sweep
}

fn slopes() -> [f64; BEAMS as usize] {
    std::array::from_fn(|ring| {
        let (sin, cos) = sin_cos((LOWEST_DEG + BEAM_STEP_DEG * ring as f64).to_radians());
        sin / cos
    })
}

fn one_beam(
    sweep: &mut Sweep,
    snapshot: &Snapshot<'_>,
    column: &Column,
    (local, in_ego): (Vec2, Vec2),
    ring: usize,
    slope: f64,
    bits: u32,
) {
    let (distance, intensity, thing) = if let Some(distance) = roof(in_ego, slope) {
        (distance, 6.0, NOTHING)
    } else {
        let hit = column.hit(slope);
        (hit.distance_m, intensity(snapshot, &hit), thing_of(snapshot, &hit))
    };
    let stretch = (1.0 + slope * slope).sqrt();
    if distance * stretch > RANGE_M {
        return;
    }
    let error = ERROR_M * f64::from(unit(mix(bits)) + unit(mix(bits ^ 0x5bd1_e995)) - 1.0);
    let range = distance + error / stretch;
    let brightness = (intensity * (0.8 + 0.4 * unit(mix(bits ^ 0x27d4_eb2f)))).floor();
    sweep.points.push([
        (local.x * range) as f32,
        (local.y * range) as f32,
        (slope * range) as f32,
        brightness.clamp(0.0, 255.0),
        ring as f32,
    ]);
    sweep.things.push(thing);
}

/// Distance at which a beam meets the car's own roof.
fn roof(in_ego: Vec2, slope: f64) -> Option<f64> {
    let (back, front, side, height) = ROOF_M;
    if slope >= 0.0 {
        return None;
    }
    let distance = (LIDAR_AT_M[2] - height) / -slope;
    let (x, y) = (LIDAR_AT_M[0] + in_ego.x * distance, in_ego.y * distance);
    (x > back && x < front && y.abs() < side).then_some(distance)
}

fn thing_of(snapshot: &Snapshot<'_>, hit: &Hit) -> u32 {
    match hit.surface {
        Surface::Thing { placed, .. } => snapshot.things[usize::from(placed)].index as u32,
        _ => NOTHING,
    }
}

fn intensity(snapshot: &Snapshot<'_>, hit: &Hit) -> f32 {
    match hit.surface {
        Surface::Sky => 0.0,
        Surface::Ground => 14.0,
        Surface::House { style, .. } => 18.0 + 30.0 * unit(style),
        Surface::Trunk(_) => 22.0,
        Surface::Crown(_) => 12.0,
        Surface::Thing { kind: PartKind::Cone, .. } => 150.0,
        Surface::Thing { placed, .. } => {
            20.0 + 40.0 * unit(snapshot.things[usize::from(placed)].thing.paint)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::world::World;

    #[test]
    fn ground_points_lie_on_the_ground() {
        let world = World::new(0, 0);
        let snapshot = Snapshot::new(&world, 0.0);
        let sweep = sweep(&snapshot, 500, 3);
        assert!(sweep.points.len() > 500 * 32 / 2, "{} points", sweep.points.len());
        let lowest = sweep.points.iter().map(|p| p[2]).fold(f32::INFINITY, f32::min);
        assert!((lowest + 1.84).abs() < 0.05, "{lowest}");
        let rings: std::collections::BTreeSet<u32> =
            sweep.points.iter().map(|p| p[4] as u32).collect();
        assert_eq!(rings.len(), BEAMS as usize);
        assert_eq!(sweep.bytes().len(), sweep.points.len() * 20);
    }

    #[test]
    fn points_on_a_thing_lie_in_its_box() {
        let world = World::new(0, 0);
        let snapshot = Snapshot::new(&world, 1.0);
        let sweep = sweep(&snapshot, 720, 3);
        let mut checked = 0;
        for (point, &thing) in sweep.points.iter().zip(&sweep.things) {
            if thing == NOTHING {
                continue;
            }
            let in_ego = Vec2::new(f64::from(point[1]), f64::from(-point[0]));
            let at = mount(&snapshot.ego, LIDAR_AT_M).plus(in_ego.rotate(snapshot.ego.axis), 1.0);
            let state = world.thing(thing as usize, 1.0);
            let inside = at.minus(state.position).unrotate(state.axis);
            let [length, width, height] = world.things[thing as usize].size_m;
            assert!(inside.x.abs() < 0.5 * length + 0.03 && inside.y.abs() < 0.5 * width + 0.03);
            assert!(f64::from(point[2]) + LIDAR_AT_M[2] < height + 0.03);
            checked += 1;
        }
        assert!(checked > 300, "{checked}");
    }
}
