//! When each sensor of a scene fires, and the names that follow from it.
//!
//! The LiDAR turns at 20 Hz; every tenth turn is a keyframe. A turn's stamp is its end; a camera
//! is triggered while the beams pass its axis, so its own stamp is earlier.

use super::noise::hash64;
use super::rig::CAMERAS;

/// Microseconds between turns.
const TURN_US: i64 = 50_000;
/// Turns per keyframe.
pub const TURNS_PER_KEYFRAME: u32 = 10;
/// Largest deviation of a stamp from its plan.
const JITTER_US: i64 = 400;
/// First stamp of the first scene, and distance of scenes.
const EPOCH_US: i64 = 1_717_236_000_000_000;
const SCENE_US: i64 = 3_600_000_000;
const US_PER_S: f64 = 1e6;

/// The kinds of rows a token can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `scene`.
    Scene = 1,
    /// `sample`.
    Sample,
    /// `sample_data` of a camera; its `ego_pose` has the same token.
    CameraData,
    /// `sample_data` of the LiDAR.
    LidarData,
    /// `sample_annotation`.
    Annotation,
    /// `instance`.
    Instance,
    /// `calibrated_sensor`.
    Calibrated,
    /// `log`.
    Log,
    /// `sensor`, `category`, `attribute`, `map`.
    Fixed,
}

/// Names and times of one scene.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// The dataset's seed.
    pub seed: u64,
    /// Number of the scene.
    pub scene: u32,
}

impl Clock {
    /// A 32-hex token of a row of this scene.
    pub fn token(&self, kind: Kind, a: u64, b: u64) -> String {
        token(self.seed, u64::from(self.scene) + 1, kind, a, b)
    }

    /// End of a LiDAR turn, microseconds since the Unix epoch.
    pub fn turn_us(&self, turn: u32) -> i64 {
        self.start_us() + i64::from(turn) * TURN_US + self.jitter(0, turn)
    }

    /// When a camera is triggered for a keyframe.
    pub fn camera_us(&self, keyframe: u32, camera: usize) -> i64 {
        let turn = keyframe * TURNS_PER_KEYFRAME;
        self.turn_us(turn) + CAMERAS[camera].trigger_us + self.jitter(1 + camera as u64, turn)
    }

    /// Seconds after the scene's start, for the world.
    pub fn seconds(&self, stamp_us: i64) -> f64 {
        (stamp_us - self.start_us()) as f64 / US_PER_S
    }

    /// Name of the scene's log.
    pub fn log_name(&self) -> String {
        format!("synth-{:016x}-{:04}", self.seed, self.scene + 1)
    }

    /// Path of a file below the dataset's root.
    pub fn path(&self, folder: &str, channel: &str, stamp_us: i64, extension: &str) -> String {
        format!("{folder}/{channel}/{}__{channel}__{stamp_us}.{extension}", self.log_name())
    }

    fn start_us(&self) -> i64 {
        EPOCH_US + i64::from(self.scene) * SCENE_US
    }

    fn jitter(&self, stream: u64, turn: u32) -> i64 {
        let bits =
            hash64(&[self.seed, u64::from(self.scene), 0x0074_696d_6500, stream, u64::from(turn)]);
        (bits % (2 * JITTER_US as u64 + 1)) as i64 - JITTER_US
    }
}

/// A 32-hex token.
pub fn token(seed: u64, scene: u64, kind: Kind, a: u64, b: u64) -> String {
    let half = |salt: u64| hash64(&[salt, seed, scene, kind as u64, a, b]);
    format!("{:016x}{:016x}", half(0x6c6f_7700), half(0x6869_6768))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_ascend_and_cameras_fire_within_the_turn() {
        let clock = Clock { seed: 3, scene: 2 };
        assert!((1..100).all(|turn| clock.turn_us(turn) > clock.turn_us(turn - 1)));
        for camera in 0..CAMERAS.len() {
            let before = clock.turn_us(20) - clock.camera_us(2, camera);
            assert!((-JITTER_US..TURN_US).contains(&before), "{camera}: {before}");
        }
    }

    #[test]
    fn tokens_differ_by_everything_that_names_a_row() {
        let clock = Clock { seed: 0, scene: 0 };
        let all = [
            clock.token(Kind::Sample, 0, 0),
            clock.token(Kind::Sample, 1, 0),
            clock.token(Kind::Sample, 0, 1),
            clock.token(Kind::Scene, 0, 0),
            Clock { seed: 1, scene: 0 }.token(Kind::Sample, 0, 0),
            Clock { seed: 0, scene: 1 }.token(Kind::Sample, 0, 0),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert!(distinct.len() == all.len() && all.iter().all(|t| t.len() == 32));
    }
}
