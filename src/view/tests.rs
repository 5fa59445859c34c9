//! The page's parts by hand.

use super::camera::clip;
use super::html::{base64, escape};
use super::scene::{corners_m, heading_m};

#[test]
fn base64_of_rfc_4648() {
    let pairs = [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")];
    for (plain, coded) in pairs {
        assert_eq!(base64(plain.as_bytes()), coded);
    }
}

#[test]
fn names_cannot_break_out_of_the_page() {
    assert_eq!(escape("<script>'\"&"), "&lt;script&gt;&#39;&quot;&amp;");
}

#[test]
fn corners_go_around_from_the_front() {
    let half_turn = std::f32::consts::FRAC_PI_2;
    let corners = corners_m(&[1.0, 2.0, 3.0, 4.0, 2.0, 1.0, half_turn]);
    let near = |a: [f64; 3], b: [f64; 3]| a.iter().zip(b).all(|(x, y)| (x - y).abs() < 1e-6);
    // Turned to face +y: the front is two metres ahead in y.
    assert!(near(corners[0], [0.0, 4.0, 2.5]), "{:?}", corners[0]);
    assert!(near(corners[1], [2.0, 4.0, 2.5]));
    assert!(near(corners[6], [2.0, 0.0, 3.5]));
    let [from, to] = heading_m(&corners);
    assert!(near(from, [1.0, 2.0, 2.5]) && near(to, [1.0, 4.0, 2.5]), "{from:?} {to:?}");
}

#[test]
fn lines_are_cut_off_at_the_picture() {
    let size = (100.0, 50.0);
    assert_eq!(clip((10.0, 10.0), (20.0, 20.0), size), Some([(10.0, 10.0), (20.0, 20.0)]));
    // Both ends outside, the middle inside: the edge of a near vehicle.
    assert_eq!(clip((-100.0, 25.0), (300.0, 25.0), size), Some([(0.0, 25.0), (100.0, 25.0)]));
    assert_eq!(clip((50.0, 150.0), (50.0, -150.0), size), Some([(50.0, 50.0), (50.0, 0.0)]));
    assert_eq!(clip((-10.0, 0.0), (10.0, 20.0), size), Some([(0.0, 10.0), (10.0, 20.0)]));
    for (p, q) in [((-1.0, 0.0), (-1.0, 50.0)), ((-30.0, 20.0), (20.0, -30.0))] {
        assert_eq!(clip(p, q, size), None, "{p:?} {q:?}");
    }
    assert_eq!(clip((f64::NAN, 0.0), (10.0, f64::NAN), size), None);
}
