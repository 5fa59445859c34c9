//! The page's parts by hand.

use super::html::{base64, escape};
use super::scene::corners_m;

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
}
