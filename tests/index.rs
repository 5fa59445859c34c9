//! The index file: what was put in comes out, from memory and from the mapped file; damaged and
//! foreign files are refused by name.

use std::collections::BTreeMap;

use drivetrain::index::{
    BlobRef, Boxes, Calibration, Codec, FieldKind, FieldSpec, IndexBuilder, IndexMeta, Layout,
    Pose, SampleTable, SequenceItem, Source, geometry::IDENTITY,
};
use proptest::prelude::*;

fn spec(name: &str, kind: FieldKind, frame: Option<&str>) -> FieldSpec {
    FieldSpec {
        name: name.into(),
        kind,
        frame: frame.map(String::from),
        columns: Vec::new(),
        extra: BTreeMap::new(),
    }
}

fn source(uri: &str, size_bytes: u64) -> Source {
    Source { uri: uri.into(), size_bytes, etag: String::new(), mtime_ns: 7 }
}

fn blob(source: u32, length: u64) -> BlobRef {
    BlobRef { source, offset: 3, length, codec: Codec::F32Records { columns: 5 } }
}

/// Two scenes, four rows: row 1 lacks everything, row 2's file was missing.
fn table() -> SampleTable {
    let fields = vec![
        (spec("CAM", FieldKind::Image, None), Layout::Blob),
        (spec("LIDAR", FieldKind::Points, Some("LIDAR")), Layout::Sequence),
        (spec("boxes", FieldKind::Boxes, Some("LIDAR")), Layout::Boxes),
        (spec("ego_pose", FieldKind::Pose, Some("global")), Layout::Pose),
        (spec("LIDAR.calibration", FieldKind::Calibration, None), Layout::Calibration),
        (spec("caption", FieldKind::Text, None), Layout::Text),
        (spec("speed", FieldKind::Scalar, None), Layout::Scalar),
    ];
    let mut b = IndexBuilder::new(fields).unwrap();
    let cam = b.add_source(source("a.jpg", 100));
    let lidar = b.add_source(source("b.bin", 200));
    let gone = b.add_source(source("gone.bin", Source::MISSING_BYTES));
    assert_eq!(b.add_source(source("a.jpg", 100)), cam);
    b.begin("k0", "s0", 10).unwrap();
    b.blob(0, &BlobRef { codec: Codec::Jpeg, ..blob(cam, 97) }, 9, &[]).unwrap();
    let sweep = |source, timestamp_ns| SequenceItem {
        blob: blob(source, 20),
        timestamp_ns,
        transform: std::array::from_fn(|i| i as f64),
    };
    b.blob(1, &blob(lidar, 40), 10, &[sweep(lidar, 5), sweep(gone, 1)]).unwrap();
    let boxes = Boxes {
        frame: "LIDAR".into(),
        geometry: vec![[1., 2., 3., 4., 5., 6., 7.], [0.; 7]],
        velocity: vec![[0.5, 0.25, f32::INFINITY], [0.; 3]],
        names: vec!["car".into(), "bus".into()],
        tokens: vec!["t0".into(), String::new()],
        lidar_points: vec![12, -1],
    };
    b.boxes(2, &boxes).unwrap();
    b.pose(3, &pose()).unwrap();
    b.calibration(4, &calibration()).unwrap();
    b.text(5, "naïve").unwrap();
    b.scalar(6, -1.5).unwrap();
    b.begin("k1", "s0", 20).unwrap();
    b.begin("k2", "s1", 30).unwrap();
    b.blob(1, &blob(gone, 0), 30, &[]).unwrap();
    b.begin("k3", "s1", -40).unwrap();
    b.boxes(2, &Boxes::default()).unwrap();
    let meta = IndexMeta { root: ".".into(), format: "test".into(), ..IndexMeta::default() };
    b.finish(&meta).unwrap()
}

fn pose() -> Pose {
    Pose {
        target: "global".into(),
        source: String::new(),
        matrix: std::array::from_fn(|i| 1.0 / (i as f64 + 1.0)),
        timestamp_ns: i64::MAX,
    }
}

fn calibration() -> Calibration {
    Calibration {
        channel: String::new(),
        sensor_to_ego: IDENTITY,
        ego_to_global: std::array::from_fn(|i| i as f64 * 1e6),
        intrinsic: Some(std::array::from_fn(|i| i as f64)),
        timestamp_ns: 11,
    }
}

fn assert_contents(t: &SampleTable) {
    assert_eq!(t.len(), 4);
    assert_eq!((t.key(2), t.scene(2), t.timestamp_ns(3)), ("k2", "s1", -40));
    assert_eq!((t.key(4), t.scene(4)), ("", ""));
    assert_eq!(t.field("boxes"), Some(2));
    let cam = t.blob(0, 0).unwrap().unwrap();
    assert_eq!((cam.source, cam.offset, cam.length, cam.codec), (0, 3, 97, Codec::Jpeg));
    assert_eq!(t.blob_timestamp_ns(0, 0).unwrap(), Some(9));
    assert_eq!(t.blob(0, 1).unwrap(), None);
    let sweeps = t.sweeps(1, 0, 1).unwrap();
    assert_eq!((sweeps.len(), sweeps[0].timestamp_ns, sweeps[0].transform[15]), (1, 5, 15.0));
    let message = t.sequence(1, 0).unwrap_err().to_string();
    assert!(message.contains("gone.bin (LIDAR of sample k0)"), "{message}");
    assert!(t.blob(1, 2).unwrap_err().to_string().contains("gone.bin"));
    let boxes = t.boxes(2, 0).unwrap().unwrap();
    assert_eq!(boxes.geometry[0], [1., 2., 3., 4., 5., 6., 7.]);
    assert_eq!((boxes.names[1].as_str(), boxes.tokens[0].as_str()), ("bus", "t0"));
    assert_eq!((boxes.lidar_points[1], boxes.velocity[0][2]), (-1, f32::INFINITY));
    assert_eq!(t.boxes(2, 1).unwrap(), None);
    assert_eq!(t.boxes(2, 3).unwrap().unwrap().geometry.len(), 0);
    assert_eq!(t.pose(3, 0).unwrap(), Some(pose()));
    assert_eq!(t.calibration(4, 0).unwrap(), Some(calibration()));
    assert_eq!(t.text(5, 0).unwrap().as_deref(), Some("naïve"));
    assert_eq!(t.scalar(6, 0).unwrap(), Some(-1.5));
    assert_eq!(t.scalar(6, 2).unwrap(), None);
    assert!(t.scalar(0, 0).unwrap_err().to_string().contains("field CAM"));
    assert!(t.blob(0, 4).is_err() && t.blob(9, 0).is_err());
    assert_eq!(t.source(1).unwrap().size_bytes, 200);
    assert!(t.source(2).unwrap().is_missing());
    assert!(t.source(3).is_err());
}

#[test]
fn values_survive_memory_and_file() {
    let built = table();
    assert_contents(&built);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.index.arrow");
    built.write(&path).unwrap();
    let opened = SampleTable::open(&path, None).unwrap();
    assert_contents(&opened);
    assert_eq!(opened.fingerprint(), built.fingerprint());
    assert_eq!(opened.fingerprint().len(), 32);
    assert_eq!(opened.root(), folder.path().to_str().unwrap());
    assert_eq!(SampleTable::open(&path, Some("s3://b")).unwrap().root(), "s3://b");
    assert_eq!(opened.fields(), built.fields());
    let names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), 2, "no temporary files: {names:?}");
}

#[test]
fn selections_share_and_differ() {
    let t = table();
    let some = t.select(&[3, 0, 0]).unwrap();
    assert_eq!((some.len(), some.key(0), some.key(2)), (3, "k3", "k0"));
    assert_ne!(some.fingerprint(), t.fingerprint());
    assert_eq!(some.batch().unwrap().num_rows(), 3);
    let again = some.select(&[1]).unwrap();
    assert_eq!((again.key(0), again.rows().unwrap()), ("k0", &[0u64][..]));
    assert_eq!(again.boxes(2, 0).unwrap().unwrap().names[0], "car");
    assert!(t.select(&[4]).unwrap_err().to_string().contains("0..4"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("y.index.arrow");
    some.write(&path).unwrap();
    let opened = SampleTable::open(&path, None).unwrap();
    assert_eq!((opened.len(), opened.key(0)), (3, "k3"));
    assert_eq!(opened.fingerprint(), some.fingerprint());
}

#[test]
fn names_are_checked() {
    let twice = vec![
        (spec("a", FieldKind::Scalar, None), Layout::Scalar),
        (spec("a", FieldKind::Scalar, None), Layout::Scalar),
    ];
    assert!(IndexBuilder::new(twice).is_err());
    assert!(IndexBuilder::new(vec![(spec("key", FieldKind::Text, None), Layout::Text)]).is_err());
    let mut b =
        IndexBuilder::new(vec![(spec("a", FieldKind::Scalar, None), Layout::Scalar)]).unwrap();
    b.begin("k", "s", 0).unwrap();
    b.scalar(0, 1.0).unwrap();
    assert!(b.scalar(0, 2.0).is_err());
    let folder = tempfile::tempdir().unwrap();
    let t = b.finish(&IndexMeta::default()).unwrap();
    assert!(t.write(&folder.path().join("no-suffix.arrow")).is_err());
}

#[test]
fn an_empty_table_opens() {
    let b =
        IndexBuilder::new(vec![(spec("a", FieldKind::Points, None), Layout::Sequence)]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("e.index.arrow");
    b.finish(&IndexMeta::default()).unwrap().write(&path).unwrap();
    assert!(SampleTable::open(&path, None).unwrap().is_empty());
}

#[test]
fn an_index_is_not_read_with_other_sources() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.index.arrow");
    table().select(&[1]).unwrap().write(&path).unwrap();
    let sources = std::fs::read(folder.path().join("x.sources.arrow")).unwrap();
    table().write(&path).unwrap();
    std::fs::write(folder.path().join("x.sources.arrow"), sources).unwrap();
    let message = SampleTable::open(&path, None).unwrap_err().to_string();
    assert!(message.contains("the sources of index"), "{message}");
}

#[test]
fn foreign_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.index.arrow");
    for bytes in [&b""[..], b"ARROW1", b"not an arrow file at all, but long enough"] {
        std::fs::write(&path, bytes).unwrap();
        let message = SampleTable::open(&path, None).unwrap_err().to_string();
        assert!(message.contains("x.index.arrow"), "{message}");
    }
    let missing = SampleTable::open(&folder.path().join("z.index.arrow"), None).unwrap_err();
    assert!(missing.to_string().contains("z.index.arrow"));
}

/// Reads all that can be read; only errors may come, never a panic.
fn read_all(path: &std::path::Path) {
    let Ok(t) = SampleTable::open(path, None) else { return };
    for row in 0..t.len().min(16) {
        let _ = (t.key(row), t.scene(row), t.timestamp_ns(row));
        for field in 0..t.fields().len() {
            let _ = (t.blob(field, row), t.sequence(field, row), t.boxes(field, row));
            let _ = (t.pose(field, row), t.calibration(field, row), t.text(field, row));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(400)
    })]

    #[test]
    fn damaged_files_never_panic(
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in proptest::option::of(any::<prop::sample::Index>()),
        which in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.index.arrow");
        table().write(&path).unwrap();
        let victim = if which { path.clone() } else { folder.path().join("x.sources.arrow") };
        let mut bytes = std::fs::read(&victim).unwrap();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        std::fs::write(&victim, bytes).unwrap();
        read_all(&path);
    }
}
