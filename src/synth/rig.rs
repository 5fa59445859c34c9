//! The ego car's sensors: one spinning LiDAR and six level cameras, placed about where the
//! nuScenes cars have theirs.
//!
//! Frames: ego x forward, y left, z up, origin on the ground below the rear axle; LiDAR x right,
//! y forward, z up; camera x right, y down, z forward.

use super::math::{Vec2, sin_cos, yaw_quaternion};
use super::world::State;

/// Cameras on the car.
pub const CAMERAS: [Camera; 6] = [
    camera("CAM_FRONT", 0.0, [1.72, 0.0, 1.51], 1266.0, -35_200),
    camera("CAM_FRONT_RIGHT", -56.0, [1.58, -0.50, 1.50], 1260.0, -27_100),
    camera("CAM_BACK_RIGHT", -110.0, [1.05, -0.48, 1.57], 1259.0, -19_500),
    camera("CAM_BACK", 180.0, [0.05, 0.0, 1.57], 809.0, -10_000),
    camera("CAM_BACK_LEFT", 108.0, [1.05, 0.48, 1.58], 1257.0, -200),
    camera("CAM_FRONT_LEFT", 55.0, [1.57, 0.50, 1.51], 1272.0, -42_800),
];
/// Channel of the LiDAR.
pub const LIDAR_CHANNEL: &str = "LIDAR_TOP";
/// Place of the LiDAR in the ego frame, metres.
pub const LIDAR_AT_M: [f64; 3] = [0.94, 0.0, 1.84];
/// Yaw of the LiDAR frame in the ego frame, degrees.
const LIDAR_YAW_DEG: f64 = -90.0;
/// The picture size for which focal lengths are given.
const FOCAL_SIZE: (f64, f64) = (1600.0, 900.0);
/// Principal point as a fraction of the picture.
const PRINCIPAL: (f64, f64) = (0.51, 0.5456);

/// One camera.
#[derive(Debug, Clone, Copy)]
pub struct Camera {
    /// Channel name.
    pub channel: &'static str,
    /// Direction it looks in, degrees to the left of the car's.
    pub yaw_deg: f64,
    /// Place in the ego frame, metres.
    pub at_m: [f64; 3],
    /// Focal length in pixels of a 1600x900 picture.
    focal_px: f64,
    /// When it is triggered after the end of the LiDAR's turn, microseconds.
    pub trigger_us: i64,
}

const fn camera(
    channel: &'static str,
    yaw_deg: f64,
    at_m: [f64; 3],
    focal_px: f64,
    trigger_us: i64,
) -> Camera {
    Camera { channel, yaw_deg, at_m, focal_px, trigger_us }
}

impl Camera {
    /// Pinhole parameters (fx, fy, cx, cy) for a picture size. Pixel (i, j) covers [i, i+1) x
    /// [j, j+1) of the image plane.
    pub fn pinhole(&self, width: u32, height: u32) -> [f64; 4] {
        let (w, h) = (f64::from(width), f64::from(height));
        let (fx, fy) = (self.focal_px * w / FOCAL_SIZE.0, self.focal_px * h / FOCAL_SIZE.1);
        [fx, fy, PRINCIPAL.0 * w, PRINCIPAL.1 * h]
    }

    /// Quaternion w x y z: ego ← camera.
    pub fn rotation(&self) -> [f64; 4] {
        let [c, _, _, s] = yaw_quaternion(self.yaw_deg.to_radians());
        // Yaw times the turn from optical axes to x forward, which is (0.5, -0.5, 0.5, -0.5).
        [0.5 * (c + s), -0.5 * (c + s), 0.5 * (c - s), -0.5 * (c - s)]
    }

    /// Position in the global plane and direction of view.
    pub fn view(&self, ego: &State) -> (Vec2, Vec2) {
        let forward = Vec2::heading(self.yaw_deg.to_radians()).rotate(ego.axis);
        (mount(ego, self.at_m), forward)
    }
}

/// Global position in the plane of something mounted on the car.
pub fn mount(ego: &State, at_m: [f64; 3]) -> Vec2 {
    ego.position.plus(Vec2::new(at_m[0], at_m[1]).rotate(ego.axis), 1.0)
}

/// Quaternion w x y z: ego ← LiDAR.
pub fn lidar_rotation() -> [f64; 4] {
    let (s, c) = sin_cos(0.5 * LIDAR_YAW_DEG.to_radians());
    [c, 0.0, 0.0, s]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rotates a vector by a unit quaternion, written out from the definition q v q*.
    fn turn(q: [f64; 4], v: [f64; 3]) -> [f64; 3] {
        let [w, x, y, z] = q;
        let rows = [
            [1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - z * w), 2.0 * (x * z + y * w)],
            [2.0 * (x * y + z * w), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - x * w)],
            [2.0 * (x * z - y * w), 2.0 * (y * z + x * w), 1.0 - 2.0 * (x * x + y * y)],
        ];
        rows.map(|row| row.iter().zip(v).map(|(a, b)| a * b).sum())
    }

    fn near(a: [f64; 3], b: [f64; 3]) -> bool {
        a.iter().zip(b).all(|(x, y)| (x - y).abs() < 1e-9)
    }

    #[test]
    fn cameras_look_where_they_say() {
        for camera in &CAMERAS {
            let (sin, cos) = camera.yaw_deg.to_radians().sin_cos();
            let q = camera.rotation();
            assert!(near(turn(q, [0.0, 0.0, 1.0]), [cos, sin, 0.0]), "{}", camera.channel);
            assert!(near(turn(q, [1.0, 0.0, 0.0]), [sin, -cos, 0.0]), "{}", camera.channel);
            assert!(near(turn(q, [0.0, 1.0, 0.0]), [0.0, 0.0, -1.0]), "{}", camera.channel);
        }
    }

    #[test]
    fn the_lidar_has_x_to_the_right() {
        assert!(near(turn(lidar_rotation(), [1.0, 0.0, 0.0]), [0.0, -1.0, 0.0]));
    }
}
