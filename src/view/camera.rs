//! Points and boxes drawn into a picture, as SVG in the picture's pixels.

use std::fmt::Write;

use super::html::escape;
use super::legend::{DEPTHS_M, Reds, SHADES, box_colour, dots, shade};
use super::scene::{Camera, Lidar, corners_m, heading_m};
use crate::error::Result;
use crate::index::Boxes;
use crate::index::geometry::Transform;

/// Nothing nearer than this is drawn: it would be the car itself, or behind the camera.
const NEAR_M: f64 = 0.5;
/// Points drawn into one picture; a spinning LiDAR puts a tenth of its 35 k into each.
const POINTS_MAX: usize = 20_000;
/// Edges of a box between its corners.
const EDGES: [(usize, usize); 12] = [
    (0, 1),
    (1, 2),
    (2, 3),
    (3, 0),
    (4, 5),
    (5, 6),
    (6, 7),
    (7, 4),
    (0, 4),
    (1, 5),
    (2, 6),
    (3, 7),
];

/// A camera's picture plane.
pub(super) struct Plane<'a> {
    pub(super) camera: &'a Camera,
    pub(super) width: f64,
    pub(super) height: f64,
}

impl Plane<'_> {
    /// Pixel of a point in the camera's frame; `None` too near or behind.
    fn pixel(&self, [x, y, z]: [f64; 3]) -> Option<(f64, f64)> {
        let k = &self.camera.intrinsic;
        (z >= NEAR_M).then(|| ((k[0] * x + k[1] * y) / z + k[2], (k[3] * x + k[4] * y) / z + k[5]))
    }

    fn inside(&self, (u, v): (f64, f64)) -> bool {
        (0.0..self.width).contains(&u) && (0.0..self.height).contains(&v)
    }

    /// camera ← LiDAR over the global frame, each at its own time.
    pub(super) fn lidar_to_camera(&self, lidar: &Lidar) -> Option<Result<Transform>> {
        let to_global = lidar.to_global.as_ref()?;
        Some(self.camera.from_global.compose(to_global))
    }

    /// Dots of the points, coloured by depth, and how many there are.
    pub(super) fn points(&self, transform: &Transform, points_m: &[[f64; 3]]) -> (String, usize) {
        let mut shades = vec![String::new(); SHADES];
        let mut drawn = 0;
        for point in points_m {
            let p = transform.apply(*point);
            let Some((u, v)) = self.pixel(p).filter(|pixel| self.inside(*pixel)) else { continue };
            if drawn < POINTS_MAX {
                // Writing to a String cannot fail.
                let _ = write!(shades[shade(p[2], DEPTHS_M)], "M{u:.0} {v:.0}h0");
            }
            drawn += 1;
        }
        let width = (self.width / 400.0).max(1.5);
        let dots = dots(&shades, Reds::Low);
        let group = "g fill=\"none\" stroke-linecap=\"round\" stroke-width";
        let svg = format!("<{group}=\"{width:.1}\">{dots}</g>");
        (svg, drawn)
    }

    /// Wire frames of the boxes, which are in the LiDAR's frame.
    pub(super) fn boxes(&self, transform: &Transform, boxes: &Boxes) -> String {
        let width = (self.width / 600.0).max(1.0);
        let mut svg = format!("<g fill=\"none\" stroke-width=\"{width:.1}\">");
        for (geometry, name) in boxes.geometry.iter().zip(&boxes.names) {
            let corners = corners_m(geometry).map(|corner| transform.apply(corner));
            let edges = EDGES.iter().map(|(a, b)| [corners[*a], corners[*b]]);
            let mut lines = String::new();
            for [(u, v), (s, t)] in
                edges.chain([heading_m(&corners)]).filter_map(|edge| self.line(edge))
            {
                let _ = write!(lines, "M{u:.0} {v:.0}L{s:.0} {t:.0}");
            }
            if !lines.is_empty() {
                let colour = box_colour(name);
                let title = escape(name);
                let _ = write!(
                    svg,
                    "<path stroke=\"{colour}\" d=\"{lines}\"><title>{title}</title></path>"
                );
            }
        }
        svg.push_str("</g>");
        svg
    }

    /// The part of an edge that is in the picture.
    fn line(&self, [a, b]: [[f64; 3]; 2]) -> Option<[(f64, f64); 2]> {
        if a[2] < NEAR_M && b[2] < NEAR_M {
            return None;
        }
        let cut = |from: [f64; 3], to: [f64; 3]| {
            if from[2] >= NEAR_M {
                return from;
            }
            let t = (NEAR_M - from[2]) / (to[2] - from[2]);
            let axis = |i: usize| from[i] + t * (to[i] - from[i]);
            [axis(0), axis(1), NEAR_M]
        };
        let (p, q) = (self.pixel(cut(a, b))?, self.pixel(cut(b, a))?);
        clip(p, q, (self.width, self.height))
    }
}

/// The part of the line from `p` to `q` inside a picture: the share of the way at which it comes
/// in and goes out, narrowed by each of the four sides.
pub(super) fn clip(
    p: (f64, f64),
    q: (f64, f64),
    (width, height): (f64, f64),
) -> Option<[(f64, f64); 2]> {
    let (du, dv) = (q.0 - p.0, q.1 - p.1);
    if !du.is_finite() || !dv.is_finite() {
        return None;
    }
    let (mut enter, mut leave) = (0.0_f64, 1.0_f64);
    for (step, room) in [(-du, p.0), (du, width - p.0), (-dv, p.1), (dv, height - p.1)] {
        if step == 0.0 && room < 0.0 {
            return None;
        }
        if step < 0.0 {
            enter = enter.max(room / step);
        } else if step > 0.0 {
            leave = leave.min(room / step);
        }
    }
    let at = |t: f64| (p.0 + t * du, p.1 + t * dv);
    (enter <= leave).then(|| [at(enter), at(leave)])
}
