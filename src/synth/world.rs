//! One scene's world: a road, the ego car on it, things that move or stand, trees and poles.

use super::math::Vec2;
use super::noise::{Dice, hash64};
use super::road::{CARRIAGEWAY_M, LANE_M, Pace, Road};

/// Things and plants further from the ego than this are not simulated.
pub const SIGHT_M: f64 = 140.0;
/// Lateral position of the ego: the inner lane of the right half.
pub const EGO_LANE_M: f64 = -0.5 * LANE_M;
/// No other car of the ego's lane starts closer than this.
const EGO_GAP_M: f64 = 14.0;

/// What a thing is; fixes its size, its looks and its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Passenger car.
    Car,
    /// Truck with a box body.
    Truck,
    /// City bus.
    Bus,
    /// Adult on foot.
    Pedestrian,
    /// Traffic cone.
    Cone,
}

impl Class {
    /// All classes, in the order of the category table.
    pub const ALL: [Self; 5] = [Self::Car, Self::Truck, Self::Bus, Self::Pedestrian, Self::Cone];

    /// Category name of the nuScenes schema.
    pub fn category(self) -> &'static str {
        match self {
            Self::Car => "vehicle.car",
            Self::Truck => "vehicle.truck",
            Self::Bus => "vehicle.bus.rigid",
            Self::Pedestrian => "human.pedestrian.adult",
            Self::Cone => "movable_object.trafficcone",
        }
    }

    /// Smallest and largest length, width and height in metres.
    fn sizes(self) -> [(f64, f64); 3] {
        match self {
            Self::Car => [(4.0, 4.9), (1.75, 1.95), (1.42, 1.75)],
            Self::Truck => [(6.5, 9.0), (2.3, 2.5), (2.8, 3.5)],
            Self::Bus => [(10.5, 12.0), (2.5, 2.6), (3.1, 3.4)],
            Self::Pedestrian => [(0.6, 0.8), (0.55, 0.7), (1.55, 1.9)],
            Self::Cone => [(0.38, 0.42), (0.38, 0.42), (0.7, 0.9)],
        }
    }
}

/// How a thing moves along the road.
#[derive(Debug, Clone, Copy)]
pub enum Motion {
    /// With the traffic of a lane: +1 along growing `s`, -1 against it.
    Flow(Pace, f64),
    /// Walks at this signed speed, m/s.
    Walk(f64),
    /// Stands.
    Still,
}

/// An annotated thing.
#[derive(Debug, Clone)]
pub struct Thing {
    /// What it is.
    pub class: Class,
    /// Length, width, height in metres.
    pub size_m: [f64; 3],
    /// How it moves.
    pub motion: Motion,
    /// Colours follow from this.
    pub paint: u32,
    start_m: f64,
    lateral_m: f64,
}

/// Where a thing is at some time.
#[derive(Debug, Clone, Copy)]
pub struct State {
    /// Centre in the global plane, metres; everything stands on z = 0.
    pub position: Vec2,
    /// Unit vector the thing looks along.
    pub axis: Vec2,
    /// The same as an angle, radians.
    pub yaw: f64,
    /// Global velocity, m/s.
    pub velocity: Vec2,
}

/// A tree or a pole: no annotation, but it casts rays back.
#[derive(Debug, Clone, Copy)]
pub struct Plant {
    /// Foot in the global plane.
    pub at: Vec2,
    /// Radius of trunk or pole, metres.
    pub trunk_m: f64,
    /// Height of trunk or pole, metres.
    pub height_m: f64,
    /// Centre height and radius of the crown; `None` for poles.
    pub crown: Option<(f64, f64)>,
    /// Its own noise.
    pub salt: u32,
}

/// A scene's world.
#[derive(Debug, Clone)]
pub struct World {
    /// The road everything stands along.
    pub road: Road,
    /// Annotated things; an instance is an index here.
    pub things: Vec<Thing>,
    /// Trees and poles.
    pub plants: Vec<Plant>,
    /// Horizontal direction towards the sun.
    pub sun: Vec2,
    /// Textures follow from this.
    pub salt: u32,
    pace: Pace,
}

impl World {
    /// The world of scene `scene` under `seed`.
    pub fn new(seed: u64, scene: u32) -> Self {
        let mut dice = Dice::new(&[seed, u64::from(scene), 1]);
        let road = Road::random(&mut dice);
        let pace = random_pace(&mut dice, 7.0, 12.0);
        let sun = Vec2::heading(dice.between(-3.1, 3.1));
        let salt = hash64(&[seed, u64::from(scene), 2]) as u32;
        let mut world = Self { road, things: Vec::new(), plants: Vec::new(), sun, salt, pace };
        world.add_traffic(&mut dice);
        world.add_roadside(&mut dice);
        world.add_plants(&mut dice);
        world
    }

    /// The ego car (its reference point on the ground below the rear axle) at `t` seconds.
    pub fn ego(&self, t: f64) -> State {
        let (s, speed) = self.pace.at(t);
        self.state(s, EGO_LANE_M, 1.0, speed)
    }

    /// Thing `index` at `t` seconds.
    pub fn thing(&self, index: usize, t: f64) -> State {
        let thing = &self.things[index];
        let (travelled, speed, direction) = match thing.motion {
            Motion::Flow(pace, direction) => {
                let (travelled, speed) = pace.at(t);
                (travelled * direction, speed, direction)
            }
            Motion::Walk(speed) => (speed * t, speed.abs(), speed.signum()),
            Motion::Still => (0.0, 0.0, -thing.lateral_m.signum()),
        };
        self.state(thing.start_m + travelled, thing.lateral_m, direction, speed)
    }

    fn state(&self, s: f64, d: f64, direction: f64, speed: f64) -> State {
        let heading = self.road.heading(s);
        let turned = if direction < 0.0 { std::f64::consts::PI } else { 0.0 };
        let yaw = heading + turned;
        let along = Vec2::heading(heading);
        let pace = direction * speed * self.road.stretch(d);
        State {
            position: self.road.point(s, d),
            axis: Vec2::heading(yaw),
            yaw,
            velocity: Vec2::new(along.x * pace, along.y * pace),
        }
    }

    /// Cars, trucks and buses in four lanes, all around the circle.
    fn add_traffic(&mut self, dice: &mut Dice) {
        let lanes = [
            (EGO_LANE_M, 1.0, self.pace),
            (-1.5 * LANE_M, 1.0, random_pace(dice, 6.0, 9.0)),
            (0.5 * LANE_M, -1.0, random_pace(dice, 8.0, 12.0)),
            (1.5 * LANE_M, -1.0, random_pace(dice, 6.0, 9.0)),
        ];
        for (lateral_m, direction, pace) in lanes {
            let end_m = self.road.length_m() - EGO_GAP_M;
            let mut s = dice.between(EGO_GAP_M, EGO_GAP_M + 18.0);
            while s < end_m {
                let class = match dice.between(0.0, 1.0) {
                    p if p < 0.80 => Class::Car,
                    p if p < 0.93 => Class::Truck,
                    _ => Class::Bus,
                };
                self.add(dice, class, s, lateral_m, Motion::Flow(pace, direction));
                s += dice.between(17.0, 46.0);
            }
        }
    }

    /// Parked cars, people on the pavement, cones beside the carriageway.
    fn add_roadside(&mut self, dice: &mut Dice) {
        for side in [-1.0, 1.0] {
            let mut s = 0.0;
            while s < self.road.length_m() - 8.0 {
                if dice.chance(0.55) {
                    self.add(dice, Class::Car, s, side * 8.1, Motion::Still);
                } else if dice.chance(0.12) {
                    self.add(dice, Class::Cone, s, side * (CARRIAGEWAY_M - 0.1), Motion::Still);
                }
                s += dice.between(5.8, 9.0);
            }
            let mut s = 0.0;
            while s < self.road.length_m() {
                let speed = dice.between(0.7, 1.7) * if dice.chance(0.5) { 1.0 } else { -1.0 };
                let lateral_m = side * dice.between(10.7, 12.2);
                self.add(dice, Class::Pedestrian, s, lateral_m, Motion::Walk(speed));
                s += dice.between(4.0, 28.0);
            }
        }
    }

    fn add(&mut self, dice: &mut Dice, class: Class, start_m: f64, lateral_m: f64, motion: Motion) {
        let size_m = class.sizes().map(|(low, high)| millimetres(dice.between(low, high)));
        let paint = dice.bits() as u32;
        self.things.push(Thing { class, size_m, motion, paint, start_m, lateral_m });
    }

    /// Trees and lamp posts between kerb and pavement.
    fn add_plants(&mut self, dice: &mut Dice) {
        for side in [-1.0, 1.0] {
            let mut s = 0.0;
            while s < self.road.length_m() - 4.0 {
                let at = self.road.point(s, side * dice.between(9.75, 10.05));
                let salt = dice.bits() as u32;
                let plant = if dice.chance(0.3) {
                    Plant { at, trunk_m: 0.09, height_m: 7.5, crown: None, salt }
                } else {
                    let radius_m = dice.between(1.5, 2.7);
                    let centre_m = dice.between(2.4, 3.2) + radius_m;
                    let trunk_m = dice.between(0.12, 0.22);
                    Plant {
                        at,
                        trunk_m,
                        height_m: centre_m,
                        crown: Some((centre_m, radius_m)),
                        salt,
                    }
                };
                self.plants.push(plant);
                s += dice.between(8.0, 19.0);
            }
        }
    }
}

fn random_pace(dice: &mut Dice, low_mps: f64, high_mps: f64) -> Pace {
    Pace {
        speed_mps: dice.between(low_mps, high_mps),
        swing_mps: dice.between(0.5, 2.0),
        rate_per_s: dice.between(0.25, 0.45),
    }
}

/// Sizes as the annotation table writes them, so that table and pictures agree exactly.
fn millimetres(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn velocity_is_the_derivative_of_position() {
        let world = World::new(4, 0);
        for index in (0..world.things.len()).step_by(7) {
            let (a, b) = (world.thing(index, 2.999), world.thing(index, 3.001));
            let v = world.thing(index, 3.0).velocity;
            let moved = b.position.minus(a.position);
            assert!((moved.x / 0.002 - v.x).abs() < 1e-3, "thing {index}");
            assert!((moved.y / 0.002 - v.y).abs() < 1e-3, "thing {index}");
        }
    }

    #[test]
    fn cars_of_a_lane_never_meet() {
        let world = World::new(1, 3);
        let near = |t: f64| {
            let ego = world.ego(t).position;
            let cars = world.things.iter().enumerate().filter(|(_, x)| x.class == Class::Car);
            cars.map(|(i, _)| world.thing(i, t).position.minus(ego).norm())
                .fold(f64::INFINITY, f64::min)
        };
        for t in 0..40 {
            assert!(near(f64::from(t)) > 2.5, "a car within {} m at {t} s", near(f64::from(t)));
        }
    }
}
