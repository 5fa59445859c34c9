//! Colours of annotated things, from where on the part a ray landed.

use super::cast::{Column, Face, Hit};
use super::math::Vec2;
use super::noise::{fractal, unit};
use super::paint::{Rgb, mix_rgb, scale};
use super::snapshot::{PartKind, Placed};
use super::world::World;

const CAR_PAINTS: [Rgb; 8] = [
    [226.0, 226.0, 224.0],
    [40.0, 42.0, 46.0],
    [142.0, 146.0, 150.0],
    [92.0, 96.0, 102.0],
    [150.0, 34.0, 30.0],
    [38.0, 62.0, 118.0],
    [196.0, 190.0, 176.0],
    [70.0, 88.0, 76.0],
];
const RUBBER: Rgb = [27.0, 27.0, 28.0];
const GLASS: Rgb = [38.0, 46.0, 54.0];
const WHEEL_M: f64 = 0.34;

/// A point of a thing, in the thing's frame.
#[derive(Debug, Clone, Copy)]
struct Spot {
    /// x forward, y left, from the centre, metres.
    at: Vec2,
    /// Height, metres.
    z: f64,
    /// Length, width, height of the thing, metres.
    size: [f64; 3],
    face: Face,
    paint: u32,
    /// Pixel size on the surface, metres.
    footprint: f64,
}

/// The colour of a hit on a thing.
pub fn colour(
    world: &World,
    placed: &Placed<'_>,
    kind: PartKind,
    face: Face,
    column: &Column,
    hit: &Hit,
    footprint: f64,
) -> Rgb {
    let at = column.at(hit.distance_m).minus(placed.state.position).unrotate(placed.state.axis);
    let thing = placed.thing;
    let spot = Spot { at, z: hit.z_m, size: thing.size_m, face, paint: thing.paint, footprint };
    let bare = match kind {
        PartKind::Body => body(spot),
        PartKind::Cabin => cabin(spot),
        PartKind::Cargo => cargo(spot),
        PartKind::Coach => coach(spot),
        PartKind::Legs => scale([52.0, 56.0, 78.0], 0.6 + 0.9 * unit(thing.paint)),
        PartKind::Torso => torso(spot),
        PartKind::Head => head(spot),
        PartKind::Cone => cone(spot),
    };
    let dirt = fractal(at.x + spot.z, at.y - spot.z, 0.5, 3, footprint, thing.paint);
    scale(bare, light(world, placed, face) * (1.0 + 0.1 * dirt))
}

fn light(world: &World, placed: &Placed<'_>, face: Face) -> f32 {
    let sun = world.sun.unrotate(placed.state.axis);
    let facing = match face {
        Face::Top => return 1.08,
        Face::Bottom => return 0.3,
        Face::Front => sun.x,
        Face::Back => -sun.x,
        Face::Left => sun.y,
        Face::Right => -sun.y,
    };
    0.68 + 0.36 * facing.max(0.0) as f32
}

fn car_paint(paint: u32) -> Rgb {
    CAR_PAINTS[(paint >> 5) as usize % CAR_PAINTS.len()]
}

fn is_side(face: Face) -> bool {
    matches!(face, Face::Left | Face::Right)
}

/// Wheels on the sides; `None` elsewhere.
fn wheel(spot: Spot, axle_m: f64) -> Option<Rgb> {
    let from_axle = spot.at.x.abs() - axle_m;
    let square = from_axle * from_axle + (spot.z - WHEEL_M) * (spot.z - WHEEL_M);
    if !is_side(spot.face) || square > WHEEL_M * WHEEL_M * 1.25 {
        return None;
    }
    let rim = square < 0.36 * WHEEL_M * WHEEL_M;
    let arch = square > WHEEL_M * WHEEL_M;
    Some(if rim {
        [120.0, 122.0, 126.0]
    } else if arch {
        [18.0; 3]
    } else {
        RUBBER
    })
}

fn body(spot: Spot) -> Rgb {
    let [length, width, height] = spot.size;
    let paint = car_paint(spot.paint);
    if let Some(tyre) = wheel(spot, 0.31 * length) {
        return tyre;
    }
    if spot.face == Face::Top {
        let seam = (spot.at.y.abs() - 0.4 * width).abs() < 0.02;
        return scale(paint, if seam { 0.8 } else { 1.0 });
    }
    let sill = 0.14 * height;
    if spot.z < sill {
        return [34.0, 34.0, 35.0];
    }
    if is_side(spot.face) {
        let door =
            (spot.at.x + 0.02 * length).abs() < 0.012 || (spot.at.x - 0.18 * length).abs() < 0.012;
        let crease = 0.9 + 0.2 * ((spot.z / height - 0.14) / 0.44) as f32;
        return scale(paint, if door { 0.6 } else { crease });
    }
    end_of_car(spot, paint, width, height)
}

/// Lights, grille and number plate.
fn end_of_car(spot: Spot, paint: Rgb, width: f64, height: f64) -> Rgb {
    let (outer, level) = (spot.at.y.abs() / width, spot.z / height);
    let lamp = outer > 0.3 && (0.38..0.5).contains(&level);
    let plate = outer < 0.14 && (0.26..0.34).contains(&level);
    let front = spot.face == Face::Front;
    match (lamp, plate, front) {
        (true, _, true) => [238.0, 238.0, 226.0],
        (true, _, false) => [196.0, 28.0, 24.0],
        (_, true, _) => [224.0, 222.0, 208.0],
        (_, _, true) if outer < 0.28 && (0.36..0.48).contains(&level) => [30.0, 31.0, 33.0],
        _ => scale(paint, 0.95),
    }
}

fn glass(spot: Spot) -> Rgb {
    let sky = ((spot.z / spot.size[2]) - 0.55).clamp(0.0, 0.4) as f32;
    let glint = fractal(spot.at.x + spot.at.y, spot.z, 0.6, 2, spot.footprint, spot.paint);
    mix_rgb(GLASS, [150.0, 168.0, 184.0], (sky * 1.1 + 0.25 * glint).clamp(0.0, 0.7))
}

fn cabin(spot: Spot) -> Rgb {
    let [length, width, height] = spot.size;
    let paint = car_paint(spot.paint);
    let level = spot.z / height;
    if spot.face == Face::Top || level > 0.95 {
        return paint;
    }
    let pillar = if is_side(spot.face) {
        let x = spot.at.x / length;
        x > 0.205 && length < 5.5 || x < -0.395 || (x + 0.1).abs() < 0.012
    } else {
        spot.at.y.abs() > 0.42 * width
    };
    if pillar || level < 0.6 && length < 5.5 { scale(paint, 0.92) } else { glass(spot) }
}

fn cargo(spot: Spot) -> Rgb {
    let [length, _, height] = spot.size;
    let base = if spot.paint & 1 == 0 { [222.0, 222.0, 218.0] } else { car_paint(spot.paint) };
    let level = spot.z / height;
    if is_side(spot.face) {
        let rib = spot.at.x * 1.6 - (spot.at.x * 1.6).floor() < 0.06;
        let stripe = (0.55..0.7).contains(&level) && spot.at.x.abs() < 0.2 * length;
        if stripe {
            return car_paint(spot.paint.rotate_left(7));
        }
        return scale(base, if rib { 0.82 } else { 1.0 });
    }
    let door = spot.at.y.abs() < 0.02;
    scale(base, if door { 0.5 } else { 0.97 })
}

fn coach(spot: Spot) -> Rgb {
    let [length, width, height] = spot.size;
    if let Some(tyre) = wheel(spot, 0.3 * length) {
        return tyre;
    }
    let base = car_paint(spot.paint);
    let level = spot.z / height;
    let bay = spot.at.x / 1.5 - (spot.at.x / 1.5).floor();
    let pillar = if is_side(spot.face) { bay < 0.07 } else { spot.at.y.abs() > 0.45 * width };
    if spot.face != Face::Top && (0.42..0.82).contains(&level) && !pillar {
        return glass(spot);
    }
    if !is_side(spot.face)
        && spot.face != Face::Top
        && level > 0.84
        && spot.at.y.abs() < 0.3 * width
    {
        return [30.0, 28.0, 24.0];
    }
    if level < 0.12 { [40.0, 40.0, 42.0] } else { base }
}

fn torso(spot: Spot) -> Rgb {
    let shirt = CAR_PAINTS[(spot.paint >> 9) as usize % CAR_PAINTS.len()];
    let arm = spot.at.y.abs() > 0.32 * spot.size[1];
    let folds = fractal(spot.at.x + spot.at.y, spot.z, 0.25, 2, spot.footprint, spot.paint);
    scale(shirt, (if arm { 0.82 } else { 1.0 }) * (1.0 + 0.25 * folds))
}

fn head(spot: Spot) -> Rgb {
    let level = spot.z / spot.size[2];
    let hair = level > 0.95 || spot.face != Face::Front && level > 0.9;
    if hair {
        [48.0, 38.0, 30.0]
    } else {
        scale([214.0, 172.0, 146.0], 0.7 + 0.4 * unit(spot.paint))
    }
}

fn cone(spot: Spot) -> Rgb {
    let level = spot.z / spot.size[2];
    let band = (0.35..0.5).contains(&level) || (0.68..0.8).contains(&level);
    if level < 0.08 {
        [52.0, 48.0, 46.0]
    } else if band {
        [236.0, 236.0, 232.0]
    } else {
        [228.0, 92.0, 28.0]
    }
}
