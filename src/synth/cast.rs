//! The ray caster behind pictures and sweeps alike, so that their geometry agrees.
//!
//! Everything in the world stands upright, and both a pixel column of a level camera and the beams
//! of a spinning LiDAR at one instant share a vertical plane. So a [`Column`] solves the plane
//! geometry once (which boxes, walls, trunks and crowns it meets and how far away) and each ray in
//! it only compares heights.

use super::math::Vec2;
use super::noise::{mix2, unit, value3};
use super::road::{FAR_WALL_M, NEAR_WALL_M};
use super::snapshot::{PartKind, Placed, Snapshot};
use super::world::Plant;

/// Walls further away than this are lost in the haze.
const WALL_M: f64 = 450.0;
/// Length of one house front along the road.
const HOUSE_M: f64 = 18.0;
/// Share of leaf noise that lets a ray through a crown.
const LEAF_GAP: f32 = 0.38;
/// Tufts of leaves per metre.
const LEAVES_PER_M: f64 = 3.3;

/// A face of an upright box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Face {
    /// Looks along +x of the thing.
    Front,
    /// Looks along -x.
    Back,
    /// Looks along +y.
    Left,
    /// Looks along -y.
    Right,
    /// Looks up.
    Top,
    /// Looks down.
    Bottom,
}

/// What a ray met.
#[derive(Debug, Clone, Copy)]
pub enum Surface {
    /// Nothing.
    Sky,
    /// The ground at z = 0.
    Ground,
    /// Thing `placed` of the snapshot.
    Thing {
        /// Index into the snapshot's things.
        placed: u16,
        /// How it is painted there.
        kind: PartKind,
        /// Which face.
        face: Face,
    },
    /// A house front.
    House {
        /// Position along the road in metres.
        s: f64,
        /// Style of the house.
        style: u32,
        /// Its height in metres.
        height_m: f32,
    },
    /// A trunk or pole; the plant's index in the snapshot.
    Trunk(u16),
    /// A tree's crown; the plant's index in the snapshot.
    Crown(u16),
}

/// Where a ray met something.
#[derive(Debug, Clone, Copy)]
pub struct Hit {
    /// Distance in the plane, metres.
    pub distance_m: f64,
    /// Height, metres.
    pub z_m: f64,
    /// What is there.
    pub surface: Surface,
}

/// Something a column's plane meets between two distances.
#[derive(Debug, Clone, Copy)]
struct Span {
    near: f64,
    far: f64,
    low: f64,
    high: f64,
    solid: Solid,
}

#[derive(Debug, Clone, Copy)]
enum Solid {
    Part {
        placed: u16,
        kind: PartKind,
        face: Face,
    },
    House {
        s: f64,
        style: u32,
    },
    Trunk(u16),
    /// Chord of the crown in this plane: centre distance and height, radius.
    Crown {
        plant: u16,
        middle: f64,
        centre: f64,
        radius: f64,
        salt: u32,
    },
}

/// A vertical half plane starting at the sensor.
#[derive(Debug)]
pub struct Column {
    /// Where the sensor is.
    pub origin: Vec2,
    /// Its height, metres.
    pub height_m: f64,
    /// Unit vector of the half plane.
    pub direction: Vec2,
    /// Distances between which the ground lies in shadow.
    pub shadows: Vec<(f64, f64)>,
    spans: Vec<Span>,
}

impl Column {
    /// An empty column to be aimed; keeps its memory from aim to aim.
    pub fn new(origin: Vec2, height_m: f64) -> Self {
        let direction = Vec2::new(1.0, 0.0);
        Self { origin, height_m, direction, shadows: Vec::new(), spans: Vec::new() }
    }

    /// Solves the plane geometry for a direction.
    pub fn aim(&mut self, snapshot: &Snapshot<'_>, direction: Vec2) {
        self.direction = direction;
        self.spans.clear();
        self.shadows.clear();
        for (slot, placed) in snapshot.things.iter().enumerate() {
            self.add_thing(slot as u16, placed);
            self.add_shadow(placed, snapshot.world.sun);
        }
        for (slot, plant) in snapshot.plants.iter().enumerate() {
            self.add_plant(slot as u16, plant, snapshot.world.sun);
        }
        for (layer, lateral) in [NEAR_WALL_M, FAR_WALL_M].into_iter().enumerate() {
            self.add_walls(snapshot, layer as u32, lateral);
            self.add_walls(snapshot, layer as u32, -lateral);
        }
        self.spans.sort_by(|a, b| a.near.total_cmp(&b.near));
    }

    /// The point at a distance.
    pub fn at(&self, distance_m: f64) -> Vec2 {
        self.origin.plus(self.direction, distance_m)
    }

    /// First thing met by the ray that rises by `slope` metres per metre.
    #[inline]
    pub fn hit(&self, slope: f64) -> Hit {
        let mut best = if slope < 0.0 {
            let distance_m = -self.height_m / slope;
            Hit { distance_m, z_m: 0.0, surface: Surface::Ground }
        } else {
            Hit { distance_m: f64::INFINITY, z_m: 0.0, surface: Surface::Sky }
        };
        for span in &self.spans {
            if span.near >= best.distance_m {
                break;
            }
            if let Some((distance_m, surface)) = self.meet(span, slope)
                && distance_m < best.distance_m
            {
                best = Hit { distance_m, z_m: self.height_m + slope * distance_m, surface };
            }
        }
        best
    }

    #[inline]
    fn meet(&self, span: &Span, slope: f64) -> Option<(f64, Surface)> {
        let z = self.height_m + slope * span.near;
        match span.solid {
            Solid::Part { placed, kind, face } => {
                let (distance, face) = meet_box(span, slope, self.height_m, z, face)?;
                Some((distance, Surface::Thing { placed, kind, face }))
            }
            Solid::House { s, style } => {
                let height_m = span.high as f32;
                (z <= span.high && z >= 0.0)
                    .then_some((span.near, Surface::House { s, style, height_m }))
            }
            Solid::Trunk(plant) => {
                (z <= span.high && z >= 0.0).then_some((span.near, Surface::Trunk(plant)))
            }
            Solid::Crown { plant, middle, centre, radius, salt } => {
                let lift = self.height_m - centre;
                let half = (middle - slope * lift) / (1.0 + slope * slope);
                let rest =
                    (middle * middle + lift * lift - radius * radius) / (1.0 + slope * slope);
                let square = half * half - rest;
                if square < 0.0 {
                    return None;
                }
                // The front of the crown, or through a gap in the leaves its back.
                [half - square.sqrt(), half + square.sqrt()].into_iter().find_map(|distance| {
                    let leafy = distance > 0.0 && self.is_leaf(distance, slope, salt);
                    leafy.then_some((distance, Surface::Crown(plant)))
                })
            }
        }
    }

    fn is_leaf(&self, distance: f64, slope: f64, salt: u32) -> bool {
        let at = self.at(distance);
        let z = self.height_m + slope * distance;
        value3([at.x * LEAVES_PER_M, at.y * LEAVES_PER_M, z * LEAVES_PER_M], salt) > LEAF_GAP
    }

    fn add_thing(&mut self, slot: u16, placed: &Placed<'_>) {
        let to = placed.state.position.minus(self.origin);
        if self.direction.cross(to).abs() > placed.reach_m
            || self.direction.dot(to) < -placed.reach_m
        {
            return;
        }
        let origin = self.origin.minus(placed.state.position).unrotate(placed.state.axis);
        let direction = self.direction.unrotate(placed.state.axis);
        for part in &placed.parts {
            if let Some((near, far, face)) = cross_box(origin, direction, part.low, part.high) {
                let solid = Solid::Part { placed: slot, kind: part.kind, face };
                self.spans.push(Span { near, far, low: part.z.0, high: part.z.1, solid });
            }
        }
    }

    /// The shadow of a box, taken as its footprint pushed away from the sun and grown a little.
    fn add_shadow(&mut self, placed: &Placed<'_>, sun: Vec2) {
        let [length, width, height] = placed.thing.size_m;
        let centre = placed.state.position.plus(sun, -0.35 * height);
        let to = centre.minus(self.origin);
        if self.direction.cross(to).abs() > placed.reach_m + 0.4 {
            return;
        }
        let origin = self.origin.minus(centre).unrotate(placed.state.axis);
        let direction = self.direction.unrotate(placed.state.axis);
        let corner = Vec2::new(0.5 * length + 0.15, 0.5 * width + 0.15);
        let low = Vec2::new(-corner.x, -corner.y);
        if let Some((near, far, _)) = cross_box(origin, direction, low, corner) {
            self.shadows.push((near, far));
        }
    }

    fn add_plant(&mut self, slot: u16, plant: &Plant, sun: Vec2) {
        let to = plant.at.minus(self.origin);
        let (ahead, aside) = (self.direction.dot(to), self.direction.cross(to).abs());
        if aside < plant.trunk_m && ahead > plant.trunk_m {
            let near = ahead - (plant.trunk_m * plant.trunk_m - aside * aside).sqrt();
            let (far, high) = (ahead, plant.height_m);
            self.spans.push(Span { near, far, low: 0.0, high, solid: Solid::Trunk(slot) });
        }
        let Some((centre, crown_m)) = plant.crown else { return };
        if aside < crown_m && ahead > crown_m {
            let radius = (crown_m * crown_m - aside * aside).sqrt();
            let solid =
                Solid::Crown { plant: slot, middle: ahead, centre, radius, salt: plant.salt };
            let (near, far) = (ahead - radius, ahead + radius);
            self.spans.push(Span { near, far, low: 0.0, high: centre + crown_m, solid });
        }
        let shade = plant.at.plus(sun, -0.8 * centre).minus(self.origin);
        let (ahead, aside) = (self.direction.dot(shade), self.direction.cross(shade).abs());
        if aside < crown_m && ahead > 0.0 {
            let half = (crown_m * crown_m - aside * aside).sqrt();
            self.shadows.push((ahead - half, ahead + half));
        }
    }

    fn add_walls(&mut self, snapshot: &Snapshot<'_>, layer: u32, lateral: f64) {
        let road = &snapshot.world.road;
        let Some((first, second)) = road.crossings(self.origin, self.direction, lateral) else {
            return;
        };
        for near in [first, second] {
            if !(0.0..WALL_M).contains(&near) {
                continue;
            }
            let (s, _) = road.locate(self.at(near));
            let side = layer * 2 + u32::from(lateral < 0.0);
            let house = (s / HOUSE_M).floor() as i32;
            let style = mix2(house, side as i32, snapshot.world.salt);
            let high = house_height(style, layer);
            if high > 0.0 {
                let solid = Solid::House { s: s * road.stretch(lateral), style };
                self.spans.push(Span { near, far: near, low: 0.0, high, solid });
            }
        }
    }
}

/// Height of a house; 0 for a gap. The far row is taller and closed more often.
fn house_height(style: u32, layer: u32) -> f64 {
    let gap = if layer == 0 { 0.3 } else { 0.12 };
    if unit(style) < gap {
        return 0.0;
    }
    let floors = 2 + (style >> 3) % 4 + layer * (3 + (style >> 7) % 6);
    f64::from(floors) * 3.3 + 0.7
}

/// Entry, exit and entry face of a ray through an upright box, in the box's frame.
fn cross_box(origin: Vec2, direction: Vec2, low: Vec2, high: Vec2) -> Option<(f64, f64, Face)> {
    let slab = |o: f64, u: f64, low: f64, high: f64| {
        if u.abs() < 1e-12 {
            let inside = o >= low && o <= high;
            return if inside { (f64::NEG_INFINITY, f64::INFINITY) } else { (1.0, -1.0) };
        }
        let (a, b) = ((low - o) / u, (high - o) / u);
        if a < b { (a, b) } else { (b, a) }
    };
    let x = slab(origin.x, direction.x, low.x, high.x);
    let y = slab(origin.y, direction.y, low.y, high.y);
    let (near, far) = (x.0.max(y.0), x.1.min(y.1));
    if near > far || near <= 0.0 {
        return None;
    }
    let face = match (x.0 > y.0, direction.x > 0.0, direction.y > 0.0) {
        (true, true, _) => Face::Back,
        (true, false, _) => Face::Front,
        (false, _, true) => Face::Right,
        (false, _, false) => Face::Left,
    };
    Some((near, far, face))
}

/// The height comparisons of a ray with a box whose plane crossing is known.
#[inline]
fn meet_box(span: &Span, slope: f64, eye: f64, z: f64, face: Face) -> Option<(f64, Face)> {
    if z > span.high {
        let distance = (span.high - eye) / slope;
        return (slope < 0.0 && distance < span.far).then_some((distance, Face::Top));
    }
    if z < span.low {
        let distance = (span.low - eye) / slope;
        return (slope > 0.0 && distance < span.far).then_some((distance, Face::Bottom));
    }
    Some((span.near, face))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_entered_through_the_face_that_looks_back() {
        let (low, high) = (Vec2::new(-2.0, -1.0), Vec2::new(2.0, 1.0));
        let from_behind = cross_box(Vec2::new(-10.0, 0.2), Vec2::new(1.0, 0.0), low, high);
        assert_eq!(from_behind, Some((8.0, 12.0, Face::Back)));
        let from_left = cross_box(Vec2::new(0.5, 6.0), Vec2::new(0.0, -1.0), low, high);
        assert_eq!(from_left, Some((5.0, 7.0, Face::Left)));
        assert_eq!(cross_box(Vec2::new(-10.0, 3.0), Vec2::new(1.0, 0.0), low, high), None);
    }

    #[test]
    fn heights_decide_between_side_and_roof() {
        let solid = Solid::Trunk(0);
        let span = Span { near: 5.0, far: 9.0, low: 0.0, high: 1.0, solid };
        let meet = |slope: f64| meet_box(&span, slope, 2.0, 2.0 + slope * 5.0, Face::Back);
        assert_eq!(meet(-0.3), Some((5.0, Face::Back)));
        assert_eq!(meet(-0.125), Some((8.0, Face::Top)));
        assert_eq!(meet(-0.05), None);
    }

    #[test]
    fn a_hit_lies_on_its_ray() {
        let world = crate::synth::world::World::new(2, 0);
        let snapshot = Snapshot::new(&world, 0.0);
        let mut column = Column::new(snapshot.ego.position, 1.8);
        let mut things = 0;
        for i in 0..400 {
            column.aim(&snapshot, Vec2::heading(f64::from(i) * 0.0157));
            for slope in [-0.4, -0.1, -0.02, 0.05, 0.3] {
                let hit = column.hit(slope);
                things += u32::from(matches!(hit.surface, Surface::Thing { .. }));
                if hit.distance_m.is_finite() {
                    assert!((1.8 + slope * hit.distance_m - hit.z_m).abs() < 1e-9);
                    assert!(hit.z_m > -1e-9);
                }
            }
        }
        assert!(things > 30, "{things}");
    }
}
