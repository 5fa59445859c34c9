//! The synthetic dataset: same bytes for a seed, tables that link, points that hit the right
//! pixels.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use drivetrain::Error;
use drivetrain::synth::camera::{self, NOTHING};
use drivetrain::synth::cast::Column;
use drivetrain::synth::clock::{Clock, TURNS_PER_KEYFRAME};
use drivetrain::synth::math::Vec2;
use drivetrain::synth::rig::CAMERAS;
use drivetrain::synth::snapshot::Snapshot;
use drivetrain::synth::world::World;
use drivetrain::synth::{Config, TABLE_FOLDER, generate, lidar};
use serde_json::Value;

fn small(seed: u64, threads: usize) -> Config {
    Config {
        scenes: 2,
        keyframes: 2,
        seed,
        image_size: (96, 54),
        lidar_points: 32 * 60,
        threads,
        ..Config::default()
    }
}

fn make(config: &Config) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    generate(folder.path(), config, &|_| ()).unwrap();
    folder
}

fn files(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(root).unwrap().display().to_string();
                found.insert(name, std::fs::read(path).unwrap());
            }
        }
    }
    found
}

fn table(root: &Path, name: &str) -> Vec<Value> {
    let text = std::fs::read(root.join(TABLE_FOLDER).join(format!("{name}.json"))).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn by_token(rows: &[Value]) -> BTreeMap<&str, &Value> {
    rows.iter().map(|row| (row["token"].as_str().unwrap(), row)).collect()
}

#[test]
fn the_same_seed_gives_the_same_bytes_on_any_number_of_threads() {
    let (one, three) = (make(&small(7, 1)), make(&small(7, 3)));
    let (a, b) = (files(one.path()), files(three.path()));
    assert!(a == b, "files differ");
    let other = make(&small(8, 2));
    assert!(files(other.path()) != a, "the seed changes nothing");
}

/// If this changes, `synth` makes other data than the version before it did on some machine.
#[test]
fn the_bytes_are_pinned() {
    let folder = make(&small(7, 2));
    let mut all = Vec::new();
    for (name, bytes) in files(folder.path()) {
        all.extend(name.bytes());
        all.extend(xxhash_rust::xxh3::xxh3_64(&bytes).to_le_bytes());
    }
    assert_eq!(format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&all)), PINNED);
}

const PINNED: &str = "7a73611fca6379f4";

#[test]
fn a_dataset_is_never_overwritten_and_nonsense_is_refused() {
    let folder = make(&small(1, 2));
    let again = generate(folder.path(), &small(2, 2), &|_| ());
    assert!(matches!(again, Err(Error::AlreadyExists { .. })), "{again:?}");
    let config = Config { keyframes: 0, ..small(1, 1) };
    let none = generate(&folder.path().join("x"), &config, &|_| ());
    assert!(matches!(none, Err(Error::Invalid { .. })), "{none:?}");
}

#[test]
fn every_link_of_the_tables_resolves() {
    let folder = make(&small(3, 2));
    let root = folder.path();
    let links = [
        ("sample", "scene_token", "scene"),
        ("sample", "prev", "sample"),
        ("sample", "next", "sample"),
        ("scene", "log_token", "log"),
        ("scene", "first_sample_token", "sample"),
        ("scene", "last_sample_token", "sample"),
        ("sample_data", "sample_token", "sample"),
        ("sample_data", "ego_pose_token", "ego_pose"),
        ("sample_data", "calibrated_sensor_token", "calibrated_sensor"),
        ("sample_data", "prev", "sample_data"),
        ("sample_data", "next", "sample_data"),
        ("calibrated_sensor", "sensor_token", "sensor"),
        ("sample_annotation", "sample_token", "sample"),
        ("sample_annotation", "instance_token", "instance"),
        ("sample_annotation", "visibility_token", "visibility"),
        ("sample_annotation", "prev", "sample_annotation"),
        ("sample_annotation", "next", "sample_annotation"),
        ("instance", "category_token", "category"),
        ("instance", "first_annotation_token", "sample_annotation"),
        ("instance", "last_annotation_token", "sample_annotation"),
    ];
    for (from, field, to) in links {
        let rows = table(root, to);
        let targets = by_token(&rows);
        for row in table(root, from) {
            let token = row[field].as_str().unwrap();
            let end_of_chain = token.is_empty() && matches!(field, "prev" | "next");
            assert!(end_of_chain || targets.contains_key(token), "{from}.{field}: {token:?}");
        }
    }
    assert_eq!(table(root, "map")[0]["log_tokens"].as_array().unwrap().len(), 2);
}

#[test]
fn chains_are_ordered_and_mutual_and_files_exist() {
    let folder = make(&small(3, 2));
    let root = folder.path();
    let rows = table(root, "sample_data");
    let data = by_token(&rows);
    let mut channels = BTreeSet::new();
    for row in data.values() {
        let path = row["filename"].as_str().unwrap();
        let bytes = std::fs::metadata(root.join(path)).unwrap().len();
        assert!(bytes > 0 && (row["fileformat"] != "pcd" || bytes.is_multiple_of(20)), "{path}");
        channels.insert(path.split('/').nth(1).unwrap().to_string());
        if let Some(next) = data.get(row["next"].as_str().unwrap()) {
            assert_eq!(next["prev"], row["token"]);
            assert!(next["timestamp"].as_i64() > row["timestamp"].as_i64());
        }
    }
    assert_eq!(channels.len(), 7);
    // 2 scenes x (6 cameras x 2 keyframes + 11 turns).
    assert_eq!(rows.len(), 2 * (12 + 11));
    assert_eq!(table(root, "ego_pose").len(), rows.len());
}

/// Rotation matrix of a quaternion w x y z, from the definition.
fn matrix(q: &Value) -> [[f64; 3]; 3] {
    let q: Vec<f64> = q.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    let (w, x, y, z) = (q[0], q[1], q[2], q[3]);
    [
        [1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - z * w), 2.0 * (x * z + y * w)],
        [2.0 * (x * y + z * w), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - x * w)],
        [2.0 * (x * z - y * w), 2.0 * (y * z + x * w), 1.0 - 2.0 * (x * x + y * y)],
    ]
}

fn translation(row: &Value) -> [f64; 3] {
    std::array::from_fn(|i| row["translation"][i].as_f64().unwrap())
}

/// Applies a row's pose to a point: parent ← child.
fn forward(row: &Value, p: [f64; 3]) -> [f64; 3] {
    let (r, t) = (matrix(&row["rotation"]), translation(row));
    std::array::from_fn(|i| (0..3).map(|j| r[i][j] * p[j]).sum::<f64>() + t[i])
}

/// Applies a row's inverse pose: child ← parent.
fn backward(row: &Value, p: [f64; 3]) -> [f64; 3] {
    let (r, t) = (matrix(&row["rotation"]), translation(row));
    std::array::from_fn(|i| (0..3).map(|j| r[j][i] * (p[j] - t[j])).sum())
}

/// How projected points compare with the picture.
#[derive(Debug, Default)]
struct Tally {
    right: u32,
    wrong: u32,
    hidden: u32,
}

/// Points of the sweep, projected with nothing but the tables, must fall on pixels that show the
/// thing they lie on. Two physical effects are taken out: things move between the two stamps, and
/// the camera sees some of them hidden behind nearer ones.
#[test]
fn projected_points_hit_the_pixels_of_their_thing() {
    let config = Config {
        scenes: 1,
        keyframes: 2,
        image_size: (800, 450),
        lidar_points: 32 * 720,
        ..small(5, 2)
    };
    let folder = make(&config);
    let mut tally = Tally::default();
    for keyframe in 0..config.keyframes {
        for camera in 0..CAMERAS.len() {
            project(folder.path(), &config, keyframe, camera, &mut tally);
        }
    }
    let share = f64::from(tally.right) / f64::from(tally.right + tally.wrong);
    println!("{share} {tally:?}");
    assert!(tally.right > 2000 && share > 0.99, "{share}: {tally:?}");
    assert!(tally.hidden < tally.right / 5, "{tally:?}");
}

fn project(root: &Path, config: &Config, keyframe: u32, camera: usize, tally: &mut Tally) {
    let clock = Clock { seed: config.seed, scene: 0 };
    let world = World::new(config.seed, 0);
    let turn = clock.turn_us(keyframe * TURNS_PER_KEYFRAME);
    let stamp = clock.camera_us(keyframe, camera);
    let (t_lidar, t_camera) = (clock.seconds(turn), clock.seconds(stamp));
    let sweep =
        lidar::sweep(&Snapshot::new(&world, t_lidar), config.lidar_points / 32, turn as u32);
    let now = Snapshot::new(&world, t_camera);
    let picture = camera::render(&now, &CAMERAS[camera], config.image_size, stamp as u32);
    let (data, poses, sensors) =
        (table(root, "sample_data"), table(root, "ego_pose"), table(root, "calibrated_sensor"));
    let record = |stamp: i64, format: &str| {
        let of = |r: &&Value| r["timestamp"] == stamp && r["fileformat"] == format;
        let row = data.iter().find(of).unwrap();
        let pose = by_token(&poses)[row["ego_pose_token"].as_str().unwrap()];
        let sensor = by_token(&sensors)[row["calibrated_sensor_token"].as_str().unwrap()];
        (pose, sensor)
    };
    let (lidar_pose, lidar_sensor) = record(turn, "pcd");
    let (camera_pose, camera_sensor) = record(stamp, "jpg");
    for (point, &thing) in sweep.points.iter().zip(&sweep.things) {
        if thing == NOTHING {
            continue;
        }
        let local = [f64::from(point[0]), f64::from(point[1]), f64::from(point[2])];
        let seen = forward(lidar_pose, forward(lidar_sensor, local));
        let moved = carry(&world, thing as usize, t_lidar, t_camera, seen);
        let at = backward(camera_sensor, backward(camera_pose, moved));
        let k = &camera_sensor["camera_intrinsic"];
        let pixel =
            |i: usize| k[i][i].as_f64().unwrap() * at[i] / at[2] + k[i][2].as_f64().unwrap();
        let (u, v) = (pixel(0), pixel(1));
        let (width, height) = config.image_size;
        if at[2] < 1.0 || u < 0.0 || v < 0.0 || u >= width.into() || v >= height.into() {
            continue;
        }
        let shown = picture.things[v as usize * width as usize + u as usize];
        if shown == thing {
            tally.right += 1;
        } else if hidden(&now, camera, moved) {
            tally.hidden += 1;
        } else {
            tally.wrong += 1;
        }
    }
}

/// Where a point fixed to a thing is at another time.
fn carry(world: &World, thing: usize, from_s: f64, to_s: f64, p: [f64; 3]) -> [f64; 3] {
    let (from, to) = (world.thing(thing, from_s), world.thing(thing, to_s));
    let inside = Vec2::new(p[0], p[1]).minus(from.position).unrotate(from.axis);
    let at = to.position.plus(inside.rotate(to.axis), 1.0);
    [at.x, at.y, p[2]]
}

/// Whether something stands clearly in front of a point as a camera sees it.
fn hidden(snapshot: &Snapshot<'_>, camera: usize, p: [f64; 3]) -> bool {
    let (origin, _) = CAMERAS[camera].view(&snapshot.ego);
    let height_m = CAMERAS[camera].at_m[2];
    let to = Vec2::new(p[0], p[1]).minus(origin);
    let distance = to.norm();
    let mut column = Column::new(origin, height_m);
    column.aim(snapshot, Vec2::new(to.x / distance, to.y / distance));
    column.hit((p[2] - height_m) / distance).distance_m < distance - 0.2
}
