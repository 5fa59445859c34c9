//! What is to be drawn: pictures, points and boxes of one sample with their frames.

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::index::geometry::Transform;
use crate::index::{BlobReader, Boxes, Calibration, Codec, FieldKind, SampleTable};
use crate::transform::image_size;

/// Name of the frame all sensors of a sample meet in.
const GLOBAL: &str = "global";
/// Text shown of one field.
const TEXT_BYTES_MAX: usize = 4096;

/// A sample with everything a page shows.
pub(super) struct Scene {
    pub(super) key: String,
    pub(super) name: String,
    pub(super) timestamp_ns: i64,
    pub(super) pictures: Vec<Picture>,
    pub(super) lidar: Option<Lidar>,
    pub(super) boxes: Option<Boxes>,
    /// Name and text of the other fields.
    pub(super) texts: Vec<(String, String)>,
}

/// A camera's picture, or why there is none.
pub(super) struct Picture {
    pub(super) name: String,
    pub(super) image: Result<Encoded>,
    pub(super) camera: Option<Camera>,
}

pub(super) struct Encoded {
    pub(super) bytes: Bytes,
    pub(super) media_type: &'static str,
    pub(super) width: u32,
    pub(super) height: u32,
}

/// Where a camera looks.
pub(super) struct Camera {
    /// camera ← global.
    pub(super) from_global: Transform,
    /// Row-major 3x3 in pixels.
    pub(super) intrinsic: [f64; 9],
    pub(super) timestamp_ns: i64,
}

pub(super) struct Lidar {
    pub(super) name: String,
    /// Points in the sensor's frame, metres.
    pub(super) points_m: Vec<[f64; 3]>,
    /// global ← LiDAR.
    pub(super) to_global: Option<Transform>,
}

impl Scene {
    pub(super) fn read(table: &SampleTable, row: usize, reader: &mut BlobReader) -> Result<Self> {
        let mut scene = Self {
            key: table.key(row).to_string(),
            name: table.scene(row).to_string(),
            timestamp_ns: table.timestamp_ns(row),
            pictures: Vec::new(),
            lidar: None,
            boxes: None,
            texts: Vec::new(),
        };
        for (field, spec) in table.fields().iter().enumerate() {
            match spec.kind {
                FieldKind::Image => scene.picture(table, row, field, reader)?,
                FieldKind::Points if scene.prefers(&spec.name) => {
                    scene.points(table, row, field, reader)?;
                }
                FieldKind::Boxes => scene.boxes = table.boxes(field, row)?,
                FieldKind::Text | FieldKind::Bytes | FieldKind::Tensor => {
                    scene.text(table, row, field, reader)?;
                }
                _ => {}
            }
        }
        Ok(scene)
    }

    /// One LiDAR is drawn: the top one where there are several.
    fn prefers(&self, name: &str) -> bool {
        self.lidar.is_none() || name == "LIDAR_TOP"
    }

    fn picture(
        &mut self,
        table: &SampleTable,
        row: usize,
        field: usize,
        reader: &mut BlobReader,
    ) -> Result<()> {
        let name = table.fields()[field].name.clone();
        let image = match table.blob(field, row) {
            Ok(None) => return Ok(()),
            Ok(Some(blob)) => reader.read(&blob).and_then(|bytes| {
                let (height, width) = image_size(&bytes, &blob.codec, &reader.name(&blob))?;
                let png = blob.codec == Codec::Png;
                let media_type = if png { "image/png" } else { "image/jpeg" };
                Ok(Encoded { bytes, media_type, width, height })
            }),
            Err(e) => Err(e),
        };
        let camera = calibration(table, row, &name)?.and_then(|c| {
            let to_global = sensor_to_global(&c).ok()?;
            let from_global = to_global.inverse();
            Some(Camera { from_global, intrinsic: c.intrinsic?, timestamp_ns: c.timestamp_ns })
        });
        self.pictures.push(Picture { name, image, camera });
        Ok(())
    }

    fn points(
        &mut self,
        table: &SampleTable,
        row: usize,
        field: usize,
        reader: &mut BlobReader,
    ) -> Result<()> {
        let name = table.fields()[field].name.clone();
        let blob = match table.blob(field, row) {
            Ok(Some(blob)) => blob,
            // A page without points is still worth showing; it says what is missing.
            Ok(None) => return Ok(()),
            Err(Error::NotFound { what, .. }) => {
                self.texts.push((name, format!("missing: {what}")));
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let Codec::F32Records { columns } = blob.codec else { return Ok(()) };
        let bytes = reader.read(&blob)?;
        let points_m = points_of(&bytes, columns as usize, &reader.name(&blob))?;
        let to_global =
            calibration(table, row, &name)?.map(|c| sensor_to_global(&c)).transpose()?;
        self.lidar = Some(Lidar { name, points_m, to_global });
        Ok(())
    }

    fn text(
        &mut self,
        table: &SampleTable,
        row: usize,
        field: usize,
        reader: &mut BlobReader,
    ) -> Result<()> {
        let name = table.fields()[field].name.clone();
        let text = if table.is_blob(field) {
            let Some(blob) = table.blob(field, row)? else { return Ok(()) };
            match blob.codec {
                Codec::Text | Codec::Json => {
                    let bytes = reader.read(&blob)?;
                    let head = &bytes[..bytes.len().min(TEXT_BYTES_MAX)];
                    String::from_utf8_lossy(head).into_owned()
                }
                codec => format!("{} bytes, {}", blob.length, codec.name()),
            }
        } else {
            let Some(text) = table.text(field, row)? else { return Ok(()) };
            text.chars().take(TEXT_BYTES_MAX).collect()
        };
        self.texts.push((name, text));
        Ok(())
    }
}

fn calibration(table: &SampleTable, row: usize, channel: &str) -> Result<Option<Calibration>> {
    match table.field(&format!("{channel}.calibration")) {
        Some(field) => table.calibration(field, row),
        None => Ok(None),
    }
}

/// global ← ego at the sensor's own time ← sensor.
fn sensor_to_global(c: &Calibration) -> Result<Transform> {
    let ego = format!("ego at {} ns", c.timestamp_ns);
    let mounted = Transform::new(&ego, &c.channel, c.sensor_to_ego);
    Transform::new(GLOBAL, &ego, c.ego_to_global).compose(&mounted)
}

fn points_of(bytes: &[u8], columns: usize, file: &str) -> Result<Vec<[f64; 3]>> {
    let record = columns * size_of::<f32>();
    if columns < 3 || !bytes.len().is_multiple_of(record) {
        return Err(Error::corrupt(
            file,
            0,
            format!("a multiple of {record} bytes"),
            format!("{} bytes", bytes.len()),
            "copy the file again",
        ));
    }
    let number = |record: &[u8], at: usize| {
        let bytes = record.get(at * 4..at * 4 + 4).and_then(|b| <[u8; 4]>::try_from(b).ok());
        bytes.map_or(f64::NAN, |b| f64::from(f32::from_le_bytes(b)))
    };
    let points = bytes.chunks_exact(record).map(|r| [number(r, 0), number(r, 1), number(r, 2)]);
    Ok(points.filter(|p| p.iter().all(|v| v.is_finite())).collect())
}

/// Corners of a box: bottom four, then top four, each once around; the first two are in front.
pub(super) fn corners_m(geometry: &[f32; 7]) -> [[f64; 3]; 8] {
    let [x, y, z, length, width, height, yaw] = geometry.map(f64::from);
    let (sin, cos) = yaw.sin_cos();
    std::array::from_fn(|i| {
        let [a, b] = [[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]][i % 4];
        let (dx, dy) = (a * length / 2.0, b * width / 2.0);
        let dz = if i < 4 { -height / 2.0 } else { height / 2.0 };
        [x + cos * dx - sin * dy, y + sin * dx + cos * dy, z + dz]
    })
}
