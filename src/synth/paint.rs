//! Colours of the surroundings: sky, ground, houses, plants. Things have `paint_things`.
//!
//! Colours are display values 0..255 per channel. `footprint` is the size of a pixel on the surface
//! in metres; textures finer than that fade out.

use super::cast::{Column, Hit, Surface};
use super::noise::{fractal, mix, mix2, unit, value, value3};
use super::paint_things;
use super::road::{CARRIAGEWAY_M, KERB_M, LANE_M, PAVEMENT_M};
use super::snapshot::Snapshot;

/// An RGB colour, 0..255 per channel.
pub type Rgb = [f32; 3];

const HAZE: Rgb = [203.0, 212.0, 222.0];
/// Distance at which haze takes half of the contrast, metres.
const HAZE_HALF_M: f64 = 420.0;
const FLOOR_M: f64 = 3.3;
const BAY_M: f64 = 2.7;

/// What painting needs to know besides the hit.
#[derive(Debug, Clone, Copy)]
pub struct Brush<'a> {
    /// The instant.
    pub snapshot: &'a Snapshot<'a>,
    /// Width of a pixel one metre away, metres.
    pub pixel_m: f64,
}

/// The colour of a hit.
#[inline]
pub fn colour(brush: Brush<'_>, column: &Column, slope: f64, hit: &Hit) -> Rgb {
    let footprint = brush.pixel_m * hit.distance_m;
    let world = brush.snapshot.world;
    let paint = match hit.surface {
        Surface::Sky => return sky(column, slope, world.salt),
        Surface::Ground => ground(brush, column, hit.distance_m),
        Surface::House { s, style, height_m } => {
            let normal = world.road.left_at(column.at(hit.distance_m));
            let light = 0.72 + 0.28 * normal.dot(world.sun).abs() as f32;
            scale(house(s, hit.z_m, style, height_m, footprint), light)
        }
        Surface::Trunk(_) => {
            let grain = fractal(hit.z_m, hit.distance_m, 0.2, 2, footprint, 5);
            scale([96.0, 84.0, 74.0], 1.0 + 0.3 * grain)
        }
        Surface::Crown(plant) => crown(brush, column, hit, usize::from(plant), footprint),
        Surface::Thing { placed, kind, face } => {
            let placed = &brush.snapshot.things[usize::from(placed)];
            paint_things::colour(world, placed, kind, face, column, hit, footprint)
        }
    };
    let haze = (hit.distance_m / (hit.distance_m + HAZE_HALF_M)) as f32;
    mix_rgb(paint, HAZE, haze)
}

/// `a` towards `b` by `t` in 0..1.
#[inline]
pub fn mix_rgb(a: Rgb, b: Rgb, t: f32) -> Rgb {
    [0, 1, 2].map(|i| a[i] + (b[i] - a[i]) * t)
}

/// All channels times `factor`.
#[inline]
pub fn scale(a: Rgb, factor: f32) -> Rgb {
    a.map(|c| c * factor)
}

fn sky(column: &Column, slope: f64, salt: u32) -> Rgb {
    let up = (slope / 0.7).clamp(0.0, 1.0) as f32;
    let clear = mix_rgb([206.0, 216.0, 228.0], [112.0, 156.0, 210.0], up);
    // Clouds lie on a plane; the offset keeps those at the horizon from shrinking to dust.
    let reach = 1.0 / (slope + 0.18);
    let (x, y) = (column.direction.x * reach, column.direction.y * reach);
    let cover = fractal(x, y, 1.4, 4, 0.02, salt);
    let cloud = ((cover + 0.1) * 2.2).clamp(0.0, 1.0);
    mix_rgb(clear, [238.0, 240.0, 243.0], cloud * (0.35 + 0.5 * up))
}

fn ground(brush: Brush<'_>, column: &Column, distance_m: f64) -> Rgb {
    let world = brush.snapshot.world;
    let (s, d) = world.road.locate(column.at(distance_m));
    // A pixel covers more ground lengthwise than across; textures fade by the mean of both.
    let across = brush.pixel_m * distance_m;
    let along = across * (distance_m / column.height_m).max(1.0);
    let grain = (across * along).sqrt();
    let side = d.abs();
    let paint = if side < KERB_M {
        asphalt(s, d, across, along, grain, world.salt)
    } else if side < PAVEMENT_M {
        pavement(s, d, side, grain, world.salt)
    } else {
        green(s, d, grain, world.salt)
    };
    let shaded = column.shadows.iter().any(|&(a, b)| distance_m > a && distance_m < b);
    scale(paint, if shaded { 0.52 } else { 1.0 })
}

fn asphalt(s: f64, d: f64, across: f64, along: f64, grain: f64, salt: u32) -> Rgb {
    let patch = fractal(s * 0.35, d, 2.6, 3, grain, salt ^ 1);
    let stones = fractal(s, d, 0.11, 2, grain, salt ^ 2);
    let lane = (d / LANE_M).floor() * LANE_M + 0.5 * LANE_M;
    let track = (1.0 - ((d - lane).abs() - 0.8).abs() * 2.5).max(0.0) as f32;
    let mut base = 104.0 + 15.0 * patch + 18.0 * stones - 9.0 * track;
    if d.abs() > CARRIAGEWAY_M {
        base -= 13.0;
    }
    let road = [base, base * 0.995, base * 0.985];
    let (white, yellow) = markings(s, d, across, along);
    let worn = (0.82 + 0.5 * patch).clamp(0.35, 1.0);
    let painted = mix_rgb(road, [226.0, 226.0, 220.0], white * worn);
    mix_rgb(painted, [214.0, 168.0, 44.0], yellow * worn)
}

/// How much of the pixel is white and yellow paint.
fn markings(s: f64, d: f64, across: f64, along: f64) -> (f32, f32) {
    let line = |centre: f64, half: f64| {
        (((half - (d.abs() - centre).abs()) / across + 0.5).clamp(0.0, 1.0)
            * (2.0 * half / across).min(1.0)) as f32
    };
    let dashes = |period: f64, length: f64| {
        let phase = (s / period - (s / period).floor()) * period;
        let edge = (0.5 * length - (phase - 0.5 * length).abs()) / along;
        // Where a whole period fits into a pixel, its mean.
        if along > period { (length / period) as f32 } else { (edge + 0.5).clamp(0.0, 1.0) as f32 }
    };
    let yellow = line(0.16, 0.06);
    let lanes = line(LANE_M, 0.075) * dashes(9.0, 3.0);
    let edges = line(CARRIAGEWAY_M - 0.15, 0.075);
    let slots = if d.abs() > CARRIAGEWAY_M { dashes(6.5, 0.12) } else { 0.0 };
    let zebra = zebra(s, d, across);
    (lanes.max(edges).max(slots).max(zebra), yellow * (1.0 - zebra))
}

fn zebra(s: f64, d: f64, across: f64) -> f32 {
    let block = s / 96.0;
    let inside = (block - block.floor()) * 96.0;
    if inside > 3.6 || d.abs() > CARRIAGEWAY_M {
        return 0.0;
    }
    let phase = d - d.floor();
    ((0.25 - (phase - 0.5).abs()) / across + 0.5).clamp(0.0, 1.0) as f32
}

fn pavement(s: f64, d: f64, side: f64, grain: f64, salt: u32) -> Rgb {
    if side < KERB_M + 0.18 {
        return scale([178.0, 176.0, 170.0], 1.0 + 0.1 * fractal(s, d, 0.8, 2, grain, salt));
    }
    let (tx, ty) = (s / 1.2, d / 1.2);
    let (fx, fy) = (tx - tx.floor(), ty - ty.floor());
    let joint = fx < 0.03 || fy < 0.03;
    let tile = unit(mix2(tx.floor() as i32, ty.floor() as i32, salt)) - 0.5;
    let texture = fractal(s, d, 0.3, 3, grain, salt ^ 3);
    let base = 152.0 + 14.0 * tile + 20.0 * texture;
    let base = if joint && grain < 0.12 { base * 0.74 } else { base };
    [base, base * 0.985, base * 0.95]
}

fn green(s: f64, d: f64, grain: f64, salt: u32) -> Rgb {
    let meadow = fractal(s, d, 2.0, 3, grain, salt ^ 4);
    let blades = fractal(s, d, 0.12, 2, grain, salt ^ 5);
    let light = 1.0 + 0.28 * meadow + 0.3 * blades;
    scale(mix_rgb([88.0, 112.0, 58.0], [134.0, 126.0, 84.0], 0.5 + 0.5 * meadow), light)
}

const WALLS: [Rgb; 6] = [
    [158.0, 96.0, 78.0],
    [196.0, 182.0, 158.0],
    [172.0, 172.0, 168.0],
    [206.0, 196.0, 176.0],
    [132.0, 118.0, 106.0],
    [182.0, 146.0, 112.0],
];

fn house(s: f64, z: f64, style: u32, height_m: f32, footprint: f64) -> Rgb {
    let wall = WALLS[(style >> 11) as usize % WALLS.len()];
    let rough = fractal(s, z, 0.7, 4, footprint, style);
    let stains = fractal(s, z * 0.3, 4.0, 2, footprint, style ^ 9);
    let mut paint = scale(wall, 1.0 + 0.2 * rough + 0.12 * stains);
    if brick(style) && footprint < 0.06 {
        paint = scale(paint, bricks(s, z));
    }
    if f64::from(height_m) - z < 0.5 {
        return scale(wall, 0.78);
    }
    let (floor, bay) = ((z / FLOOR_M).floor(), (s / BAY_M).floor());
    let (v, u) = (z / FLOOR_M - floor, s / BAY_M - bay);
    let bits = mix2(bay as i32, floor as i32, style);
    if floor == 0.0 {
        return shop(paint, u, v, mix2(bay as i32 >> 1, 0, style), s, z, footprint);
    }
    let wide = if style & 4 == 0 { 0.3 } else { 0.42 };
    if (u - 0.5).abs() < wide && (0.24..0.82).contains(&v) {
        let frame = wide - (u - 0.5).abs() < 0.03 || !(0.27..0.79).contains(&v);
        return if frame { scale(wall, 1.18) } else { pane(v, bits, s, z, footprint) };
    }
    if (0.17..0.24).contains(&v) { scale(paint, 1.12) } else { paint }
}

fn brick(style: u32) -> bool {
    matches!((style >> 11) % 6, 0 | 5)
}

fn bricks(s: f64, z: f64) -> f32 {
    let row = (z / 0.09).floor();
    let shift = 0.5 * (row - 2.0 * (row * 0.5).floor());
    let (v, u) = (z / 0.09 - row, s / 0.26 + shift);
    let joint = v < 0.16 || u - u.floor() < 0.07;
    if joint { 1.1 } else { 0.94 + 0.12 * unit(mix2(u.floor() as i32, row as i32, 77)) }
}

fn shop(wall: Rgb, u: f64, v: f64, bits: u32, s: f64, z: f64, footprint: f64) -> Rgb {
    if v > 0.78 {
        let sign = [bits & 255, (bits >> 8) & 255, (bits >> 16) & 255].map(|c| c as f32 * 0.6);
        let text = value(s * 5.0, z * 4.0, bits) > 0.7 && (0.83..0.94).contains(&v);
        return if text { [230.0, 228.0, 220.0] } else { mix_rgb(sign, [70.0; 3], 0.35) };
    }
    if (0.06..0.94).contains(&u) && v > 0.12 {
        let goods = fractal(s, z, 0.5, 3, footprint, bits);
        return scale([84.0, 82.0, 78.0], 0.8 + 0.6 * goods);
    }
    wall
}

fn pane(v: f64, bits: u32, s: f64, z: f64, footprint: f64) -> Rgb {
    if unit(mix(bits)) < 0.16 {
        return scale([214.0, 206.0, 190.0], 0.85 + 0.1 * value(s * 9.0, z, bits));
    }
    let sky = (0.25 + 0.5 * unit(bits)) * v as f32;
    let dark = mix_rgb([44.0, 52.0, 60.0], [158.0, 178.0, 196.0], sky);
    scale(dark, 1.0 + 0.25 * fractal(s, z, 0.8, 2, footprint, bits))
}

fn crown(brush: Brush<'_>, column: &Column, hit: &Hit, plant: usize, footprint: f64) -> Rgb {
    let plant = brush.snapshot.plants[plant];
    let at = column.at(hit.distance_m);
    let (centre, radius) = plant.crown.unwrap_or((hit.z_m, 1.0));
    let tufts = value3([at.x * 4.0, at.y * 4.0, hit.z_m * 4.0], plant.salt ^ 1) - 0.5;
    let leaves = value3([at.x * 15.0, at.y * 15.0, hit.z_m * 15.0], plant.salt ^ 2) - 0.5;
    let leaves = 0.9 * tufts + if footprint < 0.07 { 0.8 * leaves } else { 0.0 };
    let out = at.minus(plant.at);
    let sunny = (out.dot(brush.snapshot.world.sun) + hit.z_m - centre) / radius;
    let light = (0.72 + 0.3 * sunny as f32 + leaves).clamp(0.2, 1.6);
    let tint = unit(plant.salt);
    scale(mix_rgb([62.0, 92.0, 44.0], [106.0, 108.0, 52.0], tint), light)
}
