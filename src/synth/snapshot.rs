//! The world around the ego at one instant: what a picture or a sweep is cast against.

use super::math::Vec2;
use super::world::{Class, Plant, SIGHT_M, State, Thing, World};

/// One box of a thing's body, in the thing's own frame (x forward, y left, z up, metres; the
/// origin is the foot of its centre). All parts lie inside the annotated box.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Smallest x and y.
    pub low: Vec2,
    /// Largest x and y.
    pub high: Vec2,
    /// Lowest and highest z.
    pub z: (f64, f64),
    /// How it is painted.
    pub kind: PartKind,
}

/// How a part is painted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartKind {
    /// Lower body of a vehicle: paint, wheels, lights.
    Body,
    /// Glass house above the body.
    Cabin,
    /// Box body of a truck.
    Cargo,
    /// Body of a bus: windows all along.
    Coach,
    /// Legs of a person.
    Legs,
    /// Torso of a person.
    Torso,
    /// Head of a person.
    Head,
    /// A cone.
    Cone,
}

/// A thing in its place.
#[derive(Debug)]
pub struct Placed<'a> {
    /// Index into the world's things.
    pub index: usize,
    /// What it is.
    pub thing: &'a Thing,
    /// Where it is.
    pub state: State,
    /// Radius of its footprint in metres.
    pub reach_m: f64,
    /// Its boxes.
    pub parts: Vec<Part>,
}

/// The world around the ego at one instant.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// The whole world.
    pub world: &'a World,
    /// The ego car.
    pub ego: State,
    /// Things in sight.
    pub things: Vec<Placed<'a>>,
    /// Trees and poles in sight.
    pub plants: Vec<&'a Plant>,
}

impl<'a> Snapshot<'a> {
    /// The world of a scene at `t` seconds after its first keyframe.
    pub fn new(world: &'a World, t: f64) -> Self {
        let ego = world.ego(t);
        let near = |at: Vec2| at.minus(ego.position).norm() < SIGHT_M;
        let things = (0..world.things.len())
            .filter_map(|index| {
                let state = world.thing(index, t);
                near(state.position).then(|| place(&world.things[index], index, state))
            })
            .collect();
        let plants = world.plants.iter().filter(|plant| near(plant.at)).collect();
        Self { world, ego, things, plants }
    }
}

fn place(thing: &Thing, index: usize, state: State) -> Placed<'_> {
    let [length, width, _] = thing.size_m;
    let reach_m = 0.5 * Vec2::new(length, width).norm();
    Placed { index, thing, state, reach_m, parts: parts(thing) }
}

/// Fractions of the annotated box a part takes: x range, y half, z range, kind.
type Shape = ((f64, f64), f64, (f64, f64), PartKind);

const CAR: [Shape; 2] = [
    ((-0.5, 0.5), 0.5, (0.0, 0.58), PartKind::Body),
    ((-0.42, 0.22), 0.45, (0.58, 1.0), PartKind::Cabin),
];
const TRUCK: [Shape; 3] = [
    ((-0.5, 0.5), 0.48, (0.0, 0.30), PartKind::Body),
    ((0.28, 0.5), 0.48, (0.30, 0.85), PartKind::Cabin),
    ((-0.5, 0.26), 0.5, (0.30, 1.0), PartKind::Cargo),
];
const BUS: [Shape; 1] = [((-0.5, 0.5), 0.5, (0.0, 1.0), PartKind::Coach)];
const PEDESTRIAN: [Shape; 3] = [
    ((-0.28, 0.28), 0.28, (0.0, 0.48), PartKind::Legs),
    ((-0.36, 0.36), 0.5, (0.48, 0.84), PartKind::Torso),
    ((-0.2, 0.2), 0.2, (0.84, 1.0), PartKind::Head),
];
const CONE: [Shape; 3] = [
    ((-0.5, 0.5), 0.5, (0.0, 0.08), PartKind::Cone),
    ((-0.3, 0.3), 0.3, (0.08, 0.55), PartKind::Cone),
    ((-0.15, 0.15), 0.15, (0.55, 1.0), PartKind::Cone),
];

fn parts(thing: &Thing) -> Vec<Part> {
    let shapes: &[Shape] = match thing.class {
        Class::Car => &CAR,
        Class::Truck => &TRUCK,
        Class::Bus => &BUS,
        Class::Pedestrian => &PEDESTRIAN,
        Class::Cone => &CONE,
    };
    let [length, width, height] = thing.size_m;
    let part = |&(x, y, z, kind): &Shape| Part {
        low: Vec2::new(x.0 * length, -y * width),
        high: Vec2::new(x.1 * length, y * width),
        z: (z.0 * height, z.1 * height),
        kind,
    };
    shapes.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stay_inside_the_annotated_box() {
        let world = World::new(0, 0);
        let snapshot = Snapshot::new(&world, 1.0);
        assert!(snapshot.things.len() > 20 && snapshot.plants.len() > 10);
        for placed in &snapshot.things {
            let [length, width, height] = placed.thing.size_m;
            for part in &placed.parts {
                assert!(part.high.x <= 0.5 * length && part.low.x >= -0.5 * length);
                assert!(part.high.y <= 0.5 * width && part.low.y >= -0.5 * width);
                assert!(part.z.0 >= 0.0 && part.z.1 <= height);
            }
        }
    }
}
