//! Data sets whose every byte has a formula.

use std::path::Path;

use drivetrain::index::{
    BlobRef, Boxes, Calibration, Codec, FieldKind, FieldSpec, IndexBuilder, IndexMeta, Layout,
    Pose, SampleTable, SequenceItem, Source, geometry::IDENTITY,
};
use tempfile::TempDir;

/// Columns of a point record.
pub const COLUMNS: u32 = 4;

pub fn spec(name: &str, kind: FieldKind) -> FieldSpec {
    FieldSpec {
        name: name.into(),
        kind,
        frame: Some("LIDAR".into()),
        columns: Vec::new(),
        extra: std::collections::BTreeMap::new(),
    }
}

/// Points of sample `i`: a few more for later ones.
pub fn point_count(i: usize) -> usize {
    10 + i % 7
}

/// Point `k` of sample `i`.
pub fn point(i: usize, k: usize) -> [f32; 4] {
    [i as f32, k as f32, (i + k) as f32, 0.5]
}

pub fn cloud(i: usize) -> Vec<u8> {
    (0..point_count(i)).flat_map(|k| point(i, k)).flat_map(f32::to_le_bytes).collect()
}

/// Byte `k` of the raw field of sample `i`.
pub fn raw(i: usize) -> Vec<u8> {
    (0..(i * 37) % 1000).map(|k| (i + k) as u8).collect()
}

/// Grey level of the picture of sample `i`.
pub fn level(i: usize) -> u8 {
    (i * 11 % 200) as u8 + 20
}

pub fn jpeg(level: u8, width: u16, height: u16) -> Vec<u8> {
    let mut out = Vec::new();
    let pixels = vec![level; usize::from(width) * usize::from(height) * 3];
    let encoder = jpeg_encoder::Encoder::new(&mut out, 95);
    encoder.encode(&pixels, width, height, jpeg_encoder::ColorType::Rgb).unwrap();
    out
}

pub fn pose(i: usize) -> Pose {
    let mut matrix = IDENTITY;
    matrix[3] = i as f64;
    Pose { target: "LIDAR".into(), source: String::new(), matrix, timestamp_ns: i as i64 }
}

pub fn boxes(i: usize) -> Boxes {
    let n = i % 3;
    Boxes {
        frame: "LIDAR".into(),
        geometry: (0..n).map(|k| [i as f32, k as f32, 0., 1., 2., 3., 0.1]).collect(),
        velocity: vec![[1., 0., 0.]; n],
        names: vec!["car".into(); n],
        tokens: (0..n).map(|k| format!("{i}-{k}")).collect(),
        lidar_points: vec![5; n],
    }
}

/// A folder of data and its table.
pub struct Data {
    pub folder: TempDir,
    pub table: SampleTable,
}

/// A file that blobs are appended to.
struct Shard {
    bytes: Vec<u8>,
    source: u32,
}

impl Shard {
    fn push(&mut self, blob: &[u8], codec: Codec) -> BlobRef {
        let offset = self.bytes.len() as u64;
        self.bytes.extend_from_slice(blob);
        BlobRef { source: self.source, offset, length: blob.len() as u64, codec }
    }
}

fn finish(folder: &TempDir, name: &str, shard: &Shard, builder: IndexBuilder) -> SampleTable {
    std::fs::write(folder.path().join(name), &shard.bytes).unwrap();
    let root = folder.path().display().to_string();
    let table =
        builder.finish(&IndexMeta { root, format: "test".into(), ..IndexMeta::default() }).unwrap();
    assert_eq!(table.source(shard.source).unwrap().size_bytes, shard.bytes.len() as u64);
    table
}

/// `n` samples with a picture, a cloud with one earlier sweep, raw bytes and inline values.
pub fn mixed(n: usize) -> Data {
    let folder = TempDir::new().unwrap();
    // Two passes over the same formula: the source's size must be known before its blobs.
    let size = |i: usize| jpeg(level(i), 64, 48).len() + cloud(i).len() + raw(i).len();
    let total: usize = (0..n).map(size).sum();
    let fields = vec![
        (spec("cam", FieldKind::Image), Layout::Blob),
        (spec("lidar", FieldKind::Points), Layout::Sequence),
        (spec("raw", FieldKind::Bytes), Layout::Blob),
        (spec("pose", FieldKind::Pose), Layout::Pose),
        (spec("boxes", FieldKind::Boxes), Layout::Boxes),
        (spec("calib", FieldKind::Calibration), Layout::Calibration),
        (spec("caption", FieldKind::Text), Layout::Text),
        (spec("speed", FieldKind::Scalar), Layout::Scalar),
    ];
    let mut builder = IndexBuilder::new(fields).unwrap();
    let uri = "shard.bin".to_string();
    let source = builder.add_source(Source {
        uri,
        size_bytes: total as u64,
        etag: String::new(),
        mtime_ns: 0,
    });
    let mut shard = Shard { bytes: Vec::new(), source };
    let mut before: Option<BlobRef> = None;
    for i in 0..n {
        builder.begin(&format!("k{i}"), "scene", i as i64 * 1_000_000_000).unwrap();
        let cam = shard.push(&jpeg(level(i), 64, 48), Codec::Jpeg);
        builder.blob(0, &cam, 0, &[]).unwrap();
        let lidar = shard.push(&cloud(i), Codec::F32Records { columns: COLUMNS });
        builder.blob(1, &lidar, i as i64 * 1_000_000_000, &sweep(before.as_ref(), i)).unwrap();
        before = Some(lidar);
        let blob = shard.push(&raw(i), Codec::Raw);
        builder.blob(2, &blob, 0, &[]).unwrap();
        inline(&mut builder, i);
    }
    let table = finish(&folder, "shard.bin", &shard, builder);
    Data { folder, table }
}

/// The cloud of the sample before, half a second earlier, moved by one metre in x.
fn sweep(before: Option<&BlobRef>, i: usize) -> Vec<SequenceItem> {
    let mut transform = IDENTITY;
    transform[3] = 1.0;
    let timestamp_ns = i as i64 * 1_000_000_000 - 500_000_000;
    before
        .map(|blob| SequenceItem { blob: blob.clone(), timestamp_ns, transform })
        .into_iter()
        .collect()
}

fn inline(builder: &mut IndexBuilder, i: usize) {
    builder.pose(3, &pose(i)).unwrap();
    builder.boxes(4, &boxes(i)).unwrap();
    let calibration = Calibration {
        channel: String::new(),
        sensor_to_ego: IDENTITY,
        ego_to_global: pose(i).matrix,
        intrinsic: None,
        timestamp_ns: i as i64,
    };
    builder.calibration(5, &calibration).unwrap();
    builder.text(6, &format!("caption {i}")).unwrap();
    builder.scalar(7, i as f64 / 2.0).unwrap();
}

/// Samples of one field, one file each.
pub fn files(field: FieldSpec, codec: &Codec, contents: &[Vec<u8>]) -> Data {
    let folder = TempDir::new().unwrap();
    let mut builder = IndexBuilder::new(vec![(field, Layout::Blob)]).unwrap();
    for (i, bytes) in contents.iter().enumerate() {
        let uri = format!("{i}.bin");
        std::fs::write(folder.path().join(Path::new(&uri)), bytes).unwrap();
        let size_bytes = bytes.len() as u64;
        let source =
            builder.add_source(Source { uri, size_bytes, etag: String::new(), mtime_ns: 0 });
        builder.begin(&format!("k{i}"), "scene", i as i64).unwrap();
        let blob = BlobRef { source, offset: 0, length: size_bytes, codec: codec.clone() };
        builder.blob(0, &blob, 0, &[]).unwrap();
    }
    let root = folder.path().display().to_string();
    let meta = IndexMeta { root, format: "test".into(), ..IndexMeta::default() };
    Data { table: builder.finish(&meta).unwrap(), folder }
}
