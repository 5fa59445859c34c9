//! Points and boxes drawn into a picture, as SVG in the picture's pixels.

use std::fmt::Write;

use super::html::{box_colour, rainbow};
use super::scene::{Camera, Lidar, corners_m};
use crate::error::Result;
use crate::index::Boxes;
use crate::index::geometry::Transform;

/// Nothing nearer than this is drawn: it would be the car itself, or behind the camera.
const NEAR_M: f64 = 0.5;
/// Points further away have the last colour.
const FAR_M: f64 = 60.0;
/// Colours of points.
const SHADES: usize = 24;
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
                let shade = ((p[2] / FAR_M).min(1.0) * (SHADES - 1) as f64) as usize;
                // Writing to a String cannot fail.
                let _ = write!(shades[shade], "M{u:.0} {v:.0}h0");
            }
            drawn += 1;
        }
        let width = (self.width / 400.0).max(1.5);
        let mut svg =
            format!("<g fill=\"none\" stroke-linecap=\"round\" stroke-width=\"{width:.1}\">");
        for (shade, path) in shades.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
            let colour = rainbow(shade as f64 / (SHADES - 1) as f64);
            let _ = write!(svg, "<path stroke=\"{colour}\" d=\"{path}\"/>");
        }
        svg.push_str("</g>");
        (svg, drawn)
    }

    /// Wire frames of the boxes, which are in the LiDAR's frame.
    pub(super) fn boxes(&self, transform: &Transform, boxes: &Boxes) -> String {
        let width = (self.width / 600.0).max(1.0);
        let mut svg = format!("<g fill=\"none\" stroke-width=\"{width:.1}\">");
        for (geometry, name) in boxes.geometry.iter().zip(&boxes.names) {
            let corners = corners_m(geometry).map(|corner| transform.apply(corner));
            let mut lines = String::new();
            for ((u, v), (s, t)) in
                EDGES.iter().filter_map(|(a, b)| self.line(corners[*a], corners[*b]))
            {
                let _ = write!(lines, "M{u:.0} {v:.0}L{s:.0} {t:.0}");
            }
            if !lines.is_empty() {
                let colour = box_colour(name);
                let title = super::html::escape(name);
                let _ = write!(
                    svg,
                    "<path stroke=\"{colour}\" d=\"{lines}\"><title>{title}</title></path>"
                );
            }
        }
        svg.push_str("</g>");
        svg
    }

    /// An edge cut off at the near plane; `None` if all of it lies outside the picture.
    fn line(&self, a: [f64; 3], b: [f64; 3]) -> Option<((f64, f64), (f64, f64))> {
        let cut = |from: [f64; 3], to: [f64; 3]| {
            if from[2] >= NEAR_M || from[2] == to[2] {
                return from;
            }
            let t = (NEAR_M - from[2]) / (to[2] - from[2]);
            let axis = |i: usize| from[i] + t * (to[i] - from[i]);
            [axis(0), axis(1), NEAR_M]
        };
        if a[2] < NEAR_M && b[2] < NEAR_M {
            return None;
        }
        let (p, q) = (self.pixel(cut(a, b))?, self.pixel(cut(b, a))?);
        // Ends far outside would be huge numbers in the page; a box half in view is enough.
        let near = |(u, v): (f64, f64)| u.abs() < 20.0 * self.width && v.abs() < 20.0 * self.height;
        let seen = self.inside(p) || self.inside(q);
        (seen && near(p) && near(q)).then_some((p, q))
    }
}
