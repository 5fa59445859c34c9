//! mmdet3d info files: both generations of the bundle against the values that Python reads.

use drivetrain::index::{Codec, SampleTable, build_index, geometry};
use drivetrain::storage::StorageOptions;
use serde_json::{Value, json};

use crate::nuscenes::{expected, test_data};

fn index(path: &std::path::Path) -> drivetrain::Result<SampleTable> {
    build_index(path.to_str().unwrap(), "auto", None, &StorageOptions::default(), &())
}

fn flat(value: &Value) -> Vec<f64> {
    let rows = value.as_array().unwrap().iter();
    rows.flat_map(|row| row.as_array().unwrap().iter().map(|v| v.as_f64().unwrap())).collect()
}

fn assert_first_sample(t: &SampleTable, e: &Value) {
    assert_eq!(e["samples"], json!(t.len()));
    assert_eq!(e["first_sample"]["token"], json!(t.key(0)));
    let pose = t.pose(t.field("ego_pose").unwrap(), 0).unwrap().unwrap();
    assert_eq!(pose.matrix[..], flat(&e["ego2global"]));
    let lidar = t.calibration(t.field("LIDAR_TOP.calibration").unwrap(), 0).unwrap().unwrap();
    assert_eq!(lidar.sensor_to_ego[..], flat(&e["lidar_points"]["lidar2ego"]));
    let boxes = t.boxes(t.field("boxes").unwrap(), 0).unwrap().unwrap();
    assert_eq!(e["n_instances"], json!(boxes.geometry.len()));
    for (channel, camera) in e["cams"].as_object().unwrap() {
        let field = t.field(&format!("{channel}.calibration")).unwrap();
        let c = t.calibration(field, 0).unwrap().unwrap();
        assert_eq!(c.intrinsic.unwrap()[..], flat(&camera["cam2img"]), "{channel}");
        assert_eq!(c.sensor_to_ego[..], flat(&camera["cam2ego"]), "{channel}");
        // The chain over ego and global gives back what the file says directly.
        let to_global = geometry::multiply(&lidar.ego_to_global, &lidar.sensor_to_ego);
        let camera_to_global = geometry::multiply(&c.ego_to_global, &c.sensor_to_ego);
        let chain = geometry::multiply(&geometry::inverse_rigid(&camera_to_global), &to_global);
        for (a, b) in chain.iter().zip(flat(&camera["lidar2cam"])) {
            assert!((a - b).abs() < 1e-3, "{channel}: {a} {b}");
        }
    }
}

#[test]
fn the_demo_sample_has_its_files_and_boxes() {
    let Some(data) = test_data() else { return };
    let expected = expected(&data);
    let name = "nuscenes_demo/n015-2018-07-24-11-22-45+0800.pkl";
    let t = index(&data.join(name)).unwrap();
    assert_first_sample(&t, &expected["files"][name]["expected"]);
    assert!(t.notes().is_empty(), "{:?}", t.notes());
    assert_eq!(t.timestamp_ns(0), 1_532_402_927_647_951_000);
    assert_eq!(t.scene(0), "n015-2018-07-24-11-22-45+0800");
    let lidar = t.blob(t.field("LIDAR_TOP").unwrap(), 0).unwrap().unwrap();
    assert_eq!((lidar.length, lidar.codec), (34688 * 20, Codec::F32Records { columns: 5 }));
    let joins = &expected["joins"];
    for (channel, camera) in joins["nuscenes_lidar_to_camera"]["cams"].as_object().unwrap() {
        let blob = t.blob(t.field(channel).unwrap(), 0).unwrap().unwrap();
        let uri = t.source(blob.source).unwrap().uri;
        let entry = &expected["files"][format!("nuscenes_demo/{uri}")];
        assert_eq!((&entry["size"], blob.codec), (&json!(blob.length), Codec::Jpeg));
        let field = t.field(&format!("{channel}.calibration")).unwrap();
        let stamp = t.calibration(field, 0).unwrap().unwrap().timestamp_ns;
        let seconds = (stamp - t.timestamp_ns(0)) as f64 * 1e-9;
        let said = camera["camera_minus_lidar_seconds"].as_f64().unwrap();
        assert!((seconds - said).abs() < 1e-9, "{channel}");
    }
    let boxes = t.boxes(t.field("boxes").unwrap(), 0).unwrap().unwrap();
    let points = &joins["nuscenes_points_in_boxes"]["dataset_num_lidar_pts"];
    assert_eq!(json!(boxes.lidar_points), *points);
    assert_eq!((boxes.names[0].as_str(), boxes.frame.as_str()), ("pedestrian", "LIDAR_TOP"));
    assert_eq!(boxes.geometry[0][3..6], [0.669, 0.621, 1.642]);
    let speed = [0.035_741_292_733_375_9_f64, 1.258_390_282_897_789, 0.0].map(|v| v as f32);
    assert_eq!(boxes.velocity[1], speed);
}

/// The same projection as the reference's: which points fall into each picture.
#[test]
fn lidar_points_fall_into_the_cameras() {
    let Some(data) = test_data() else { return };
    let t = index(&data.join("nuscenes_demo/n015-2018-07-24-11-22-45+0800.pkl")).unwrap();
    let lidar = t.field("LIDAR_TOP").unwrap();
    let uri = t.source(t.blob(lidar, 0).unwrap().unwrap().source).unwrap().uri;
    let bytes = std::fs::read(data.join("nuscenes_demo").join(uri)).unwrap();
    let f = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().unwrap()));
    let points: Vec<_> =
        bytes.chunks_exact(20).map(|r| [f(&r[0..4]), f(&r[4..8]), f(&r[8..12])]).collect();
    let pose = |name: &str| {
        let field = t.field(&format!("{name}.calibration")).unwrap();
        let c = t.calibration(field, 0).unwrap().unwrap();
        (geometry::multiply(&c.ego_to_global, &c.sensor_to_ego), c.intrinsic)
    };
    let (lidar_to_global, _) = pose("LIDAR_TOP");
    let expected = expected(&data);
    let cams = expected["joins"]["nuscenes_lidar_to_camera"]["cams"].as_object().unwrap().clone();
    for (channel, camera) in cams {
        let (camera_to_global, k) = pose(&channel);
        let k = k.unwrap();
        let m = geometry::multiply(&geometry::inverse_rigid(&camera_to_global), &lidar_to_global);
        let inside = points.iter().filter(|p| {
            let [x, y, z] = geometry::apply(&m, **p);
            let (u, v) = (k[0] * x / z + k[2], k[4] * y / z + k[5]);
            z > 1.0 && u > 1.0 && u < 1599.0 && v > 1.0 && v < 899.0
        });
        // Both chains are exact to f32's rounding of the infos: a point at an edge may differ.
        let said = camera["points_in_image"].as_i64().unwrap();
        assert!((inside.count() as i64 - said).abs() <= 3, "{channel}");
    }
}

#[test]
fn the_older_generation_with_sweeps() {
    let Some(data) = test_data() else { return };
    let t = index(&data.join("nuscenes/nus_info.pkl")).unwrap();
    let expected = expected(&data);
    assert_first_sample(&t, &expected["files"]["nuscenes/nus_info.pkl"]["expected"]);
    let lidar = t.field("LIDAR_TOP").unwrap();
    // The info says four columns; the file has five.
    let key = t.blob(lidar, 1).unwrap().unwrap();
    assert_eq!((key.length, key.codec), (2000, Codec::F32Records { columns: 5 }));
    assert_eq!(t.source(key.source).unwrap().uri.split('/').next(), Some("samples"));
    let sweeps = t.sequence(lidar, 1).unwrap();
    assert_eq!(sweeps.len(), 2);
    let result = &expected["joins"]["nuscenes_multi_sweep"]["results"];
    let result = &result["exact_inverse,remove_close=False"]["first_of_sweep"];
    let first = [-3.087_846_755_981_445_3, -0.368_829_399_347_305_3, -1.849_642_276_763_916];
    let moved = geometry::apply(&sweeps[0].transform, first);
    for (axis, value) in moved.iter().enumerate() {
        assert!((value - result[axis].as_f64().unwrap()).abs() < 1e-6);
    }
    let seconds = (t.timestamp_ns(1) - sweeps[0].timestamp_ns) as f64 * 1e-9;
    assert!((seconds - result[4].as_f64().unwrap()).abs() < 1e-6);
    assert!(
        t.blob(t.field("CAM_FRONT").unwrap(), 0).unwrap_err().to_string().contains("CAM_FRONT")
    );
}

#[test]
fn a_foreign_pickle_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("evil.pkl");
    std::fs::write(&path, b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.").unwrap();
    let message = index(&path).unwrap_err().to_string();
    assert!(message.contains("posix.system") && message.contains("evil.pkl"), "{message}");
    std::fs::write(&path, b"\x80\x02]q\x00.").unwrap();
    assert!(index(&path).unwrap_err().to_string().contains("metainfo"));
}
