//! The scene from above: points by height and boxes, in the LiDAR's frame, as SVG in metres.

use std::fmt::Write;

use super::html::escape;
use super::legend::{HEIGHTS_M, Reds, SHADES, box_colour, dots, shade};
use super::scene::{Scene, corners_m, heading_m};

/// Half the side of the drawn square.
const RANGE_M: f64 = 60.0;
/// Radii of the circles around the sensor.
const RINGS_M: [u32; 3] = [20, 40, 60];
/// Points drawn; of more, every n-th.
const POINTS_MAX: usize = 40_000;
/// Seconds of movement that a box's velocity line shows.
const VELOCITY_S: f32 = 1.0;

/// The drawing. x is to the right and y up, as in the frame.
pub(super) fn svg(scene: &Scene) -> String {
    let mut svg = format!(
        "<svg class=\"above\" viewBox=\"{0} {0} {1} {1}\"><g transform=\"scale(1 -1)\">",
        -RANGE_M,
        2.0 * RANGE_M
    );
    for ring in RINGS_M {
        let _ = write!(svg, "<circle class=\"ring\" r=\"{ring}\"/>");
    }
    if let Some(lidar) = &scene.lidar {
        svg.push_str(&points(&lidar.points_m));
    }
    if let Some(boxes) = &scene.boxes {
        for (at, geometry) in boxes.geometry.iter().enumerate() {
            let velocity = boxes.velocity.get(at).copied().unwrap_or([f32::NAN; 3]);
            let name = boxes.names.get(at).map_or("", String::as_str);
            svg.push_str(&shape(geometry, velocity, name));
        }
    }
    svg.push_str("<path class=\"self\" d=\"M0 0h3M0 0v3\"/></g>");
    // Outside the group, which stands on its head.
    svg.push_str("<text x=\"3.3\" y=\".7\">x</text><text x=\"-.6\" y=\"-3.6\">y</text>");
    for ring in RINGS_M {
        let _ = write!(svg, "<text x=\".5\" y=\"{}\">{ring} m</text>", 2.2 - f64::from(ring));
    }
    svg.push_str("</svg>");
    svg
}

fn points(points_m: &[[f64; 3]]) -> String {
    let mut shades = vec![String::new(); SHADES];
    let step = points_m.len().div_ceil(POINTS_MAX).max(1);
    for [x, y, z] in points_m.iter().step_by(step) {
        if x.abs() < RANGE_M && y.abs() < RANGE_M {
            let _ = write!(shades[shade(*z, HEIGHTS_M)], "M{x:.1} {y:.1}h0");
        }
    }
    format!("<g class=\"points\">{}</g>", dots(&shades, Reds::High))
}

fn shape(geometry: &[f32; 7], velocity: [f32; 3], name: &str) -> String {
    let corners = corners_m(geometry);
    let mut path = String::new();
    for (at, [x, y, _]) in corners[..4].iter().enumerate() {
        let _ = write!(path, "{}{x:.2} {y:.2}", if at == 0 { "M" } else { "L" });
    }
    let [[x, y, _], front] = heading_m(&corners);
    let _ = write!(path, "ZM{x:.2} {y:.2}L{:.2} {:.2}", front[0], front[1]);
    let colour = box_colour(name);
    let title = escape(name);
    let mut svg = format!(
        "<path class=\"box\" stroke=\"{colour}\" d=\"{path}\"><title>{title}</title></path>"
    );
    let [vx, vy, _] = velocity.map(|v| f64::from(v * VELOCITY_S));
    if vx.hypot(vy) > 0.2 {
        let (ex, ey) = (x + vx, y + vy);
        let _ = write!(svg, "<path class=\"speed\" d=\"M{x:.2} {y:.2}L{ex:.2} {ey:.2}\"/>");
    }
    svg
}
