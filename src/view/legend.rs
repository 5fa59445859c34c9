//! What the colours mean: the scales of the drawings, and a key that says them on the page.

use std::fmt::Write;

use super::scene::Scene;

/// Depths between which points in pictures change colour, metres ahead of the camera.
pub(super) const DEPTHS_M: (f64, f64) = (0.0, 60.0);
/// Heights between which points seen from above change colour, metres above the LiDAR.
pub(super) const HEIGHTS_M: (f64, f64) = (-2.5, 3.0);
/// Colours of a scale.
pub(super) const SHADES: usize = 24;

/// A kind of object: what it is called, its colour, and what its names contain. The first that
/// fits counts.
struct Kind {
    name: &'static str,
    colour: &'static str,
    parts: &'static [&'static str],
}

const KINDS: [Kind; 5] = [
    Kind { name: "people", colour: "#6cf", parts: &["pedestrian", "human"] },
    Kind { name: "two-wheelers", colour: "#f6c", parts: &["cycle"] },
    Kind {
        name: "trucks and buses",
        colour: "#fa4",
        parts: &["truck", "bus", "trailer", "construction"],
    },
    Kind { name: "cars", colour: "#fd0", parts: &["car", "vehicle"] },
    Kind { name: "other objects", colour: "#8f8", parts: &[""] },
];

/// Red for 0 to blue for 1.
fn rainbow(value: f64) -> String {
    format!("hsl({:.0} 95% 55%)", 240.0 * value.clamp(0.0, 1.0))
}

/// Which of the [`SHADES`] a value on a scale has.
pub(super) fn shade(value: f64, (low, high): (f64, f64)) -> usize {
    ((value - low) / (high - low) * SHADES as f64).clamp(0.0, (SHADES - 1) as f64) as usize
}

/// Dots of a scale as SVG: one path of dots per shade, red at the `reds` end of the scale.
pub(super) fn dots(shades: &[String], reds: Reds) -> String {
    let mut svg = String::new();
    for (shade, path) in shades.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        // Writing to a String cannot fail.
        let _ = write!(svg, "<path stroke=\"{}\" d=\"{path}\"/>", shade_colour(shade, reds));
    }
    svg
}

/// The end of a scale that is red; the other one is blue.
#[derive(Clone, Copy)]
pub(super) enum Reds {
    Low,
    High,
}

fn shade_colour(shade: usize, reds: Reds) -> String {
    let value = shade as f64 / (SHADES - 1) as f64;
    match reds {
        Reds::Low => rainbow(value),
        Reds::High => rainbow(1.0 - value),
    }
}

/// Colour of a kind of object, whatever the data set calls it exactly.
pub(super) fn box_colour(name: &str) -> &'static str {
    kind_of(name).colour
}

fn kind_of(name: &str) -> &'static Kind {
    let fits = |kind: &&Kind| kind.parts.iter().any(|part| name.contains(part));
    // The last kind's part is in every name.
    KINDS.iter().find(fits).unwrap_or(&KINDS[KINDS.len() - 1])
}

/// The key of the pictures: depth of points, kinds of boxes with how many there are.
pub(super) fn of_pictures(scene: &Scene) -> String {
    let mut html = String::from("<p class=\"key\">");
    if scene.lidar.is_some() {
        html.push_str(&scale("points by depth", DEPTHS_M, Reds::Low));
    }
    if let Some(boxes) = &scene.boxes {
        for kind in &KINDS {
            let same = |name: &&String| std::ptr::eq(kind_of(name), kind);
            let count = boxes.names.iter().filter(same).count();
            if count > 0 {
                let _ = write!(
                    html,
                    "<span><i style=\"background:{}\"></i>{} {count}</span>",
                    kind.colour, kind.name
                );
            }
        }
        html.push_str("<span>the line inside a box points to its front</span>");
    }
    html + "</p>"
}

/// The key of the drawing from above.
pub(super) fn of_above(scene: &Scene) -> String {
    let mut html = String::from("<p class=\"key\">");
    if scene.lidar.is_some() {
        html.push_str(&scale("points by height over the LiDAR", HEIGHTS_M, Reds::High));
    }
    if scene.boxes.is_some() {
        html.push_str("<span><i class=\"line\"></i>way of one second</span>");
    }
    html + "</p>"
}

fn scale(what: &str, (low_m, high_m): (f64, f64), reds: Reds) -> String {
    let colours: Vec<_> = (0..SHADES).map(|shade| shade_colour(shade, reds)).collect();
    let colours = colours.join(",");
    format!(
        "<span>{what}: {low_m} m<i class=\"scale\" \
         style=\"background:linear-gradient(90deg,{colours})\"></i>{high_m} m</span>"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_a_kind() {
        let kind = |name| kind_of(name).name;
        assert_eq!(kind("human.pedestrian.construction_worker"), "people");
        assert_eq!(kind("vehicle.bicycle"), "two-wheelers");
        assert_eq!(kind("vehicle.bus.rigid"), "trucks and buses");
        assert_eq!(kind("vehicle.car"), "cars");
        assert_eq!(kind("emergency_vehicle"), "cars");
        assert_eq!(kind("movable_object.barrier"), "other objects");
        assert_eq!(kind(""), "other objects");
    }

    #[test]
    fn scales_end_where_they_say() {
        assert_eq!(shade(-7.0, HEIGHTS_M), 0);
        assert_eq!(shade(30.0, DEPTHS_M), SHADES / 2);
        assert_eq!(shade(1e9, DEPTHS_M), SHADES - 1);
        assert_eq!(shade_colour(0, Reds::Low), shade_colour(SHADES - 1, Reds::High));
        assert!(scale("x", (1.0, 2.5), Reds::Low).contains("x: 1 m<i"));
    }
}
