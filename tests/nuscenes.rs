//! nuScenes-layout trees: the real Lyft subset, a small tree made here with hand-computed
//! geometry, and damaged tables.

use std::fs;
use std::path::{Path, PathBuf};

use drivetrain::index::{Codec, FieldKind, SampleTable, build_index, geometry, open_dataset};
use drivetrain::storage::StorageOptions;
use serde_json::{Value, json};

/// Folder of the real files, if this checkout has them.
pub fn test_data() -> Option<PathBuf> {
    let fallback = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data");
    let path = std::env::var_os("DRIVETRAIN_TEST_DATA").map_or(fallback, PathBuf::from);
    if path.join("expected.json").exists() {
        return Some(path);
    }
    println!("skipped: no test data at DRIVETRAIN_TEST_DATA or ../shared/data");
    None
}

pub fn expected(data: &Path) -> Value {
    serde_json::from_slice(&fs::read(data.join("expected.json")).unwrap()).unwrap()
}

fn index(root: &Path) -> drivetrain::Result<SampleTable> {
    build_index(root.to_str().unwrap(), "auto", None, &StorageOptions::default(), &())
}

#[test]
fn the_lyft_subset_joins() {
    let Some(data) = test_data() else { return };
    let root = data.join("nuscenes_tables_lyft");
    let t = index(&root).unwrap();
    assert_eq!(t.len(), 1);
    assert_eq!(t.key(0), "199e3146d98e6a2047bafbc222b92f5b67c4640a69b0d1d35b710242de816679");
    assert_eq!(t.scene(0), "host-a101-lidar0-1240710366399037786-1240710391298976894");
    // 1556675185903083.2 µs is 1556675185903083.25 as an f64.
    assert_eq!(t.timestamp_ns(0), 1_556_675_185_903_083_250);
    let of_kind = |kind| t.fields().iter().filter(|f| f.kind == kind).count();
    assert_eq!((of_kind(FieldKind::Image), of_kind(FieldKind::Points)), (7, 3));
    assert_eq!((of_kind(FieldKind::Calibration), of_kind(FieldKind::Boxes)), (10, 1));
    let boxes = t.boxes(t.field("boxes").unwrap(), 0).unwrap().unwrap();
    assert_eq!(boxes.frame, "LIDAR_TOP");
    assert_eq!(boxes.names, ["car"; 4]);
    assert_eq!(boxes.lidar_points, [-1; 4]);
    // The pictures are not in the subset: each says which file is missing.
    let camera = t.field("CAM_FRONT").unwrap();
    let message = t.blob(camera, 0).unwrap_err().to_string();
    assert!(message.contains("images/host-a101_cam0_1240710385850000006.jpeg"), "{message}");
    assert!(t.notes()[0].starts_with("10 of 10 files are missing"), "{:?}", t.notes());
    let table_rows = |name: &str| {
        let path = format!("nuscenes_tables_lyft/v1.01-train/{name}.json");
        expected(&data)["files"][path]["expected"]["length"].as_u64().unwrap() as usize
    };
    assert_eq!(table_rows("sample"), t.len());
    assert_eq!(table_rows("sample_annotation"), boxes.geometry.len());
    assert_eq!(table_rows("sample_data"), of_kind(FieldKind::Image) + of_kind(FieldKind::Points));
}

/// The first Lyft box by hand: global → ego → sensor with the tables' own numbers.
#[test]
fn a_lyft_box_lands_where_the_tables_say() {
    let Some(data) = test_data() else { return };
    let root = data.join("nuscenes_tables_lyft");
    let table = |name: &str| -> Vec<Value> {
        let path = root.join(format!("v1.01-train/{name}.json"));
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    };
    let find = |name: &str, token: &Value| -> Value {
        table(name).into_iter().find(|r| r["token"] == *token).unwrap()
    };
    let numbers = |v: &Value| -> Vec<f64> {
        v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let matrix = |r: &Value| {
        let (q, t) = (numbers(&r["rotation"]), numbers(&r["translation"]));
        geometry::from_quaternion(q.try_into().unwrap(), t.try_into().unwrap()).unwrap()
    };
    let lidar = table("sample_data").into_iter().find(|r| {
        let mounted = find("calibrated_sensor", &r["calibrated_sensor_token"]);
        find("sensor", &mounted["sensor_token"])["channel"] == "LIDAR_TOP"
    });
    let lidar = lidar.unwrap();
    let ego = matrix(&find("ego_pose", &lidar["ego_pose_token"]));
    let mounted = matrix(&find("calibrated_sensor", &lidar["calibrated_sensor_token"]));
    let t = index(&root).unwrap();
    let boxes = t.boxes(t.field("boxes").unwrap(), 0).unwrap().unwrap();
    for (at, token) in boxes.tokens.iter().enumerate() {
        let annotation = find("sample_annotation", &json!(token));
        let [x, y, z, l, w, h, yaw] = boxes.geometry[at].map(f64::from);
        let back = geometry::apply(&ego, geometry::apply(&mounted, [x, y, z]));
        for (a, b) in back.iter().zip(numbers(&annotation["translation"])) {
            assert!((a - b).abs() < 1e-4, "{back:?}");
        }
        let size = numbers(&annotation["size"]);
        assert_eq!([w, l, h].map(|v| v as f32), [size[0], size[1], size[2]].map(|v| v as f32));
        // The box's x axis, turned back into the global frame, is the annotation's heading.
        let axis = geometry::rotate(&ego, geometry::rotate(&mounted, [yaw.cos(), yaw.sin(), 0.0]));
        let heading = geometry::yaw(&matrix(&annotation));
        assert!((axis[1].atan2(axis[0]) - heading).sin().abs() < 2e-3);
    }
    let pose = t.pose(t.field("ego_pose").unwrap(), 0).unwrap().unwrap();
    assert_eq!((pose.target.as_str(), pose.source.as_str()), ("global", "ego"));
    assert_eq!(pose.matrix, ego);
}

type Tables = std::collections::BTreeMap<String, Vec<Value>>;

/// A tree of one scene: keyframes every 0.5 s, sweeps every 0.1 s, the car moving along +x at
/// 10 m/s with the LiDAR one metre up, looking along the car; a box standing at x = 50.
pub struct Tree {
    pub folder: tempfile::TempDir,
    pub tables: Tables,
}

pub const IDENTITY_Q: [f64; 4] = [1.0, 0.0, 0.0, 0.0];

fn link(kind: &str, at: i64, count: i64) -> String {
    if (0..count).contains(&at) { format!("{kind}-{at}") } else { String::new() }
}

pub fn tree(keyframes: i64) -> Tree {
    let mut tree = Tree { folder: tempfile::tempdir().unwrap(), tables: Tables::new() };
    add_fixed(&mut tree, keyframes);
    (0..keyframes).for_each(|at| add_keyframe(&mut tree, at, keyframes));
    (0..=(keyframes - 1) * 5).for_each(|at| add_sweep(&mut tree, "l", at, keyframes));
    (0..keyframes).for_each(|at| add_sweep(&mut tree, "c", at, keyframes));
    tree
}

fn add_fixed(tree: &mut Tree, keyframes: i64) {
    tree.add("category", json!({"token": "c", "name": "vehicle.car"}));
    tree.add("attribute", json!({"token": "a", "name": "vehicle.parked"}));
    tree.add("visibility", json!({"token": "4", "level": "v80-100"}));
    tree.add("instance", json!({"token": "i", "category_token": "c"}));
    tree.add("log", json!({"token": "log", "logfile": ""}));
    tree.add("map", json!({"token": "m"}));
    let scene = json!({"token": "s", "name": "scene-0001", "log_token": "log",
        "nbr_samples": keyframes, "first_sample_token": "sample-0",
        "last_sample_token": format!("sample-{}", keyframes - 1)});
    tree.add("scene", scene);
    for (channel, modality) in [("LIDAR_TOP", "lidar"), ("CAM_FRONT", "camera")] {
        let sensor = json!({"token": channel, "channel": channel, "modality": modality});
        tree.add("sensor", sensor);
    }
    let lidar = json!({"token": "cs-l", "sensor_token": "LIDAR_TOP", "rotation": IDENTITY_Q,
        "translation": [0.0, 0.0, 1.0], "camera_intrinsic": []});
    tree.add("calibrated_sensor", lidar);
    let camera = json!({"token": "cs-c", "sensor_token": "CAM_FRONT",
        "rotation": [0.5, -0.5, 0.5, -0.5], "translation": [1.0, 0.0, 1.0],
        "camera_intrinsic": [[500, 0, 400], [0, 500, 225], [0, 0, 1]]});
    tree.add("calibrated_sensor", camera);
}

fn add_keyframe(tree: &mut Tree, at: i64, keyframes: i64) {
    let sample = json!({"token": format!("sample-{at}"), "timestamp": 1_000_000 + at * 500_000,
        "scene_token": "s", "prev": link("sample", at - 1, keyframes),
        "next": link("sample", at + 1, keyframes)});
    tree.add("sample", sample);
    let annotation = json!({"token": format!("ann-{at}"), "sample_token": format!("sample-{at}"),
        "instance_token": "i", "visibility_token": "4", "attribute_tokens": ["a"],
        "translation": [50.0 + at as f64, 2.0, 1.0], "size": [1.8, 4.5, 1.5],
        "rotation": IDENTITY_Q, "num_lidar_pts": 5, "num_radar_pts": 0,
        "prev": link("ann", at - 1, keyframes), "next": link("ann", at + 1, keyframes)});
    tree.add("sample_annotation", annotation);
}

/// One record of the LiDAR (`l`, ten a second) or the camera (`c`, two a second, 20 ms earlier).
fn add_sweep(tree: &mut Tree, kind: &str, at: i64, keyframes: i64) {
    let is_camera = kind == "c";
    let (tick, count) = if is_camera { (at * 5, keyframes) } else { (at, keyframes * 5 - 4) };
    let micros = 1_000_000 + tick * 100_000 - i64::from(is_camera) * 20_000;
    let pose = format!("pose-{kind}-{at}");
    let x = (micros - 1_000_000) as f64 * 1e-5;
    let row = json!({"token": pose, "timestamp": micros, "rotation": IDENTITY_Q,
        "translation": [x, 0.0, 0.0]});
    tree.add("ego_pose", row);
    let name = match (is_camera, tick % 5 == 0) {
        (true, _) => format!("samples/CAM_FRONT/{at}.jpg"),
        (false, true) => format!("samples/LIDAR_TOP/{at}.pcd.bin"),
        (false, false) => format!("sweeps/LIDAR_TOP/{at}.pcd.bin"),
    };
    let path = tree.root().join(&name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, vec![0; 20 * (at as usize + 1)]).unwrap();
    // A sweep between two samples belongs to the next one, as in nuScenes.
    let row = json!({"token": format!("{kind}-{at}"),
        "sample_token": format!("sample-{}", (tick + 4) / 5), "ego_pose_token": pose,
        "calibrated_sensor_token": format!("cs-{kind}"), "timestamp": micros,
        "fileformat": "pcd", "is_key_frame": tick % 5 == 0, "height": 0, "width": 0,
        "filename": name, "prev": link(kind, at - 1, count), "next": link(kind, at + 1, count)});
    tree.add("sample_data", row);
}

impl Tree {
    fn add(&mut self, table: &str, row: Value) {
        self.tables.entry(table.into()).or_default().push(row);
    }

    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    pub fn write(&self) -> &Self {
        let folder = self.root().join("v1.0-test");
        fs::create_dir_all(&folder).unwrap();
        for (name, rows) in &self.tables {
            let path = folder.join(format!("{name}.json"));
            fs::write(path, serde_json::to_vec(rows).unwrap()).unwrap();
        }
        self
    }

    pub fn set(&mut self, table: &str, row: usize, column: &str, value: Value) {
        self.tables.get_mut(table).unwrap()[row][column] = value;
    }
}

#[test]
fn keyframes_sweeps_boxes_and_poses() {
    let tree = tree(4);
    let t = index(tree.write().root()).unwrap();
    assert_eq!((t.len(), t.key(2), t.scene(2)), (4, "sample-2", "scene-0001"));
    assert_eq!(t.timestamp_ns(2), 2_000_000_000);
    assert!(t.notes().is_empty(), "{:?}", t.notes());
    let lidar = t.field("LIDAR_TOP").unwrap();
    let key = t.blob(lidar, 2).unwrap().unwrap();
    assert_eq!((key.length, key.codec), (20 * 11, Codec::F32Records { columns: 5 }));
    assert_eq!(t.source(key.source).unwrap().uri, "samples/LIDAR_TOP/10.pcd.bin");
    assert_eq!(t.fields()[lidar].columns, ["x", "y", "z", "intensity", "ring"]);
    assert_eq!(t.fields()[lidar].extra["stamp"], "end");
    // Ten sweeps at most, nearest first; a car that drove on sees older points further back.
    assert_eq!([0, 1, 2, 3].map(|row| t.sequence(lidar, row).unwrap().len()), [0, 5, 10, 10]);
    let sweeps = t.sequence(lidar, 3).unwrap();
    for (at, sweep) in sweeps.iter().enumerate() {
        let age_s = 0.1 * (at + 1) as f64;
        assert_eq!(sweep.timestamp_ns, t.timestamp_ns(3) - (at as i64 + 1) * 100_000_000);
        let origin = geometry::apply(&sweep.transform, [0.0; 3]);
        assert!((origin[0] + 10.0 * age_s).abs() < 1e-9 && origin[1] == 0.0, "{origin:?}");
    }
    let boxes = t.boxes(t.field("boxes").unwrap(), 2).unwrap().unwrap();
    // Car at x = 10, LiDAR one metre up, box at x = 52.
    assert_eq!(boxes.geometry, [[42.0, 2.0, 0.0, 4.5, 1.8, 1.5, 0.0]]);
    assert_eq!(boxes.velocity, [[2.0, 0.0, 0.0]]);
    assert_eq!(boxes.names, ["vehicle.car"]);
    let camera = t.field("CAM_FRONT.calibration").unwrap();
    let calibration = t.calibration(camera, 2).unwrap().unwrap();
    assert_eq!(calibration.channel, "CAM_FRONT");
    assert_eq!(calibration.intrinsic.unwrap()[..3], [500.0, 0.0, 400.0]);
    assert_eq!(calibration.timestamp_ns, 1_980_000_000);
    assert!((calibration.ego_to_global[3] - 9.8).abs() < 1e-9);
    let pose = t.pose(t.field("ego_pose").unwrap(), 2).unwrap().unwrap();
    assert_eq!((pose.matrix[3], pose.timestamp_ns), (10.0, 2_000_000_000));
}

#[test]
fn velocity_is_unknown_across_gaps_and_alone() {
    let mut tree = tree(3);
    tree.set("sample", 2, "timestamp", json!(4_000_000));
    tree.set("sample_annotation", 0, "next", json!(""));
    let t = index(tree.write().root()).unwrap();
    let speed = |row| t.boxes(t.field("boxes").unwrap(), row).unwrap().unwrap().velocity[0][0];
    assert!(speed(0).is_nan(), "no neighbour");
    // Centred over 3 s is still allowed, one-sided over 2.5 s is not.
    assert!((speed(1) - 2.0 / 3.0).abs() < 1e-6 && speed(2).is_nan());
}

/// What indexing says about a tree changed by `change`.
fn refusal(change: impl FnOnce(&mut Tree)) -> String {
    let mut tree = tree(3);
    change(&mut tree);
    index(tree.write().root()).unwrap_err().to_string()
}

#[test]
fn dangling_tokens_are_named() {
    let references = [
        ("sample", "scene_token", "scene"),
        ("sample_data", "sample_token", "sample"),
        ("sample_data", "ego_pose_token", "ego_pose"),
        ("sample_data", "calibrated_sensor_token", "calibrated_sensor"),
        ("calibrated_sensor", "sensor_token", "sensor"),
        ("sample_annotation", "sample_token", "sample"),
        ("sample_annotation", "instance_token", "instance"),
        ("sample_annotation", "visibility_token", "visibility"),
        ("instance", "category_token", "category"),
        ("scene", "log_token", "log"),
        ("scene", "first_sample_token", "sample"),
        ("sample_data", "prev", "sample_data"),
        ("sample_annotation", "next", "sample_annotation"),
        ("sample", "next", "sample"),
    ];
    for (table, column, target) in references {
        let row = usize::from(column == "prev");
        let message = refusal(|tree| tree.set(table, row, column, json!("nowhere")));
        let parts = [table, column, "nowhere", target, "v1.0-test"];
        assert!(parts.iter().all(|part| message.contains(part)), "{table}.{column}: {message}");
    }
}

#[test]
fn a_cut_scene_may_leave_the_tables() {
    let mut tree = tree(3);
    tree.set("scene", 0, "nbr_samples", json!(40));
    tree.set("scene", 0, "first_sample_token", json!("before"));
    tree.set("sample", 0, "prev", json!("before"));
    tree.set("sample_data", 0, "prev", json!("before"));
    tree.set("sample_annotation", 2, "next", json!("after"));
    assert_eq!(index(tree.write().root()).unwrap().len(), 3);
}

#[test]
fn cycles_and_broken_values_are_named() {
    let cycle = refusal(|tree| tree.set("sample_data", 0, "prev", json!("l-3")));
    assert!(cycle.contains("the record before it in time"), "{cycle}");
    let self_link = refusal(|tree| tree.set("sample", 1, "prev", json!("sample-1")));
    assert!(self_link.contains("sample-1"), "{self_link}");
    let twice = refusal(|tree| tree.set("sample", 1, "token", json!("sample-0")));
    assert!(twice.contains("unique"), "{twice}");
    let second = refusal(|tree| tree.set("sample_data", 1, "is_key_frame", json!(true)));
    assert!(second.contains("second key frame of LIDAR_TOP"), "{second}");
    let rotation = refusal(|tree| tree.set("ego_pose", 0, "rotation", json!([0, 0, 0, 0])));
    assert!(rotation.contains("quaternion") && rotation.contains("pose-l-0"), "{rotation}");
    let escape = refusal(|tree| tree.set("sample_data", 0, "filename", json!("../../etc/x")));
    assert!(escape.contains("below the data root"), "{escape}");
    let absolute = refusal(|tree| tree.set("sample_data", 0, "filename", json!("/etc/x")));
    assert!(absolute.contains("below the data root"), "{absolute}");
    let text = refusal(|tree| tree.set("sample", 0, "timestamp", json!("soon")));
    assert!(text.contains("sample.json") && text.contains("line 1"), "{text}");
    let gone = refusal(|tree| drop(tree.tables.remove("ego_pose")));
    assert!(gone.contains("ego_pose.json is missing"), "{gone}");
}

#[test]
fn missing_files_are_known_before_training() {
    let tree = tree(3);
    fs::remove_file(tree.root().join("sweeps/LIDAR_TOP/9.pcd.bin")).unwrap();
    fs::remove_file(tree.root().join("samples/CAM_FRONT/1.jpg")).unwrap();
    let t = index(tree.write().root()).unwrap();
    assert!(t.notes()[0].starts_with("2 of 14 files are missing"), "{:?}", t.notes());
    let lidar = t.field("LIDAR_TOP").unwrap();
    assert!(t.blob(lidar, 2).unwrap().is_some());
    let message = t.sweeps(lidar, 2, 1).unwrap_err().to_string();
    assert!(message.contains("sweeps/LIDAR_TOP/9.pcd.bin"), "{message}");
    let message = t.blob(t.field("CAM_FRONT").unwrap(), 1).unwrap_err().to_string();
    assert!(message.contains("samples/CAM_FRONT/1.jpg"), "{message}");
}

#[test]
fn an_index_is_kept_and_rebuilt_when_the_tables_change() {
    let mut tree = tree(3);
    let root = tree.write().root().to_str().unwrap().to_string();
    let path = tree.root().join("mine.index.arrow");
    let open = || open_dataset(&root, "auto", Some(&path), &StorageOptions::default()).unwrap();
    let first = open();
    assert_eq!((first.len(), first.path()), (3, Some(path.as_path())));
    let written = fs::metadata(&path).unwrap().modified().unwrap();
    let second = open();
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), written);
    assert_eq!(second.fingerprint(), first.fingerprint());
    tree.set("scene", 0, "name", json!("another-name"));
    tree.write();
    assert_eq!(open().scene(0), "another-name");
    fs::write(&path, b"ARROW1 damaged").unwrap();
    assert_eq!(open().len(), 3, "a damaged index is rebuilt");
    let direct = open_dataset(path.to_str().unwrap(), "auto", None, &StorageOptions::default());
    let direct = direct.unwrap();
    assert_eq!(direct.root(), root, "an index beside its data finds it by its own place");
}

#[test]
fn a_root_without_or_with_several_data_sets_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let message = index(folder.path()).unwrap_err().to_string();
    assert!(message.contains("v1.0-"), "{message}");
    let tree = tree(2);
    tree.write();
    fs::rename(tree.root().join("v1.0-test"), tree.root().join("v1.0-mini")).unwrap();
    tree.write();
    let message = index(tree.root()).unwrap_err().to_string();
    assert!(message.contains("v1.0-mini") && message.contains("v1.0-test"), "{message}");
    let root = tree.root().to_str().unwrap();
    let options = StorageOptions::default();
    assert_eq!(build_index(root, "nuscenes:v1.0-mini", None, &options, &()).unwrap().len(), 2);
    assert!(build_index(root, "nuscenes:v9", None, &options, &()).is_err());
}
