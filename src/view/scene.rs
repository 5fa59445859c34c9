//! What is to be drawn: pictures, points and boxes of one sample with their frames.

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::index::geometry::Transform;
use crate::index::{BlobReader, BlobRef, Boxes, Calibration, Codec, FieldKind, SampleTable};
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

/// Where a field's value comes from.
struct Sample<'a> {
    table: &'a SampleTable,
    row: usize,
    reader: &'a mut BlobReader,
}

impl Sample<'_> {
    fn name(&self, field: usize) -> String {
        self.table.fields()[field].name.clone()
    }

    fn blob(&self, field: usize) -> Result<Option<BlobRef>> {
        self.table.blob(field, self.row)
    }

    fn calibration(&self, channel: &str) -> Result<Option<Calibration>> {
        match self.table.field(&format!("{channel}.calibration")) {
            Some(field) => self.table.calibration(field, self.row),
            None => Ok(None),
        }
    }

    fn image(&mut self, blob: &BlobRef) -> Result<Encoded> {
        let bytes = self.reader.read(blob)?;
        let (height, width) = image_size(&bytes, &blob.codec, &self.reader.name(blob))?;
        let media_type = if blob.codec == Codec::Png { "image/png" } else { "image/jpeg" };
        Ok(Encoded { bytes, media_type, width, height })
    }

    fn text(&mut self, field: usize) -> Result<Option<String>> {
        if !self.table.is_blob(field) {
            let text = self.table.text(field, self.row)?;
            return Ok(text.map(|text| text.chars().take(TEXT_BYTES_MAX).collect()));
        }
        let Some(blob) = self.blob(field)? else { return Ok(None) };
        Ok(Some(match blob.codec {
            Codec::Text | Codec::Json => {
                let bytes = self.reader.read(&blob)?;
                let head = &bytes[..bytes.len().min(TEXT_BYTES_MAX)];
                String::from_utf8_lossy(head).into_owned()
            }
            codec => format!("{} bytes, {}", blob.length, codec.name()),
        }))
    }
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
        let mut from = Sample { table, row, reader };
        for (field, spec) in table.fields().iter().enumerate() {
            match spec.kind {
                FieldKind::Image => scene.picture(&mut from, field)?,
                FieldKind::Points if scene.prefers(&spec.name) => scene.points(&mut from, field)?,
                FieldKind::Boxes => scene.boxes = table.boxes(field, row)?,
                FieldKind::Text | FieldKind::Bytes | FieldKind::Tensor => {
                    let text = from.text(field)?;
                    scene.texts.extend(text.map(|text| (spec.name.clone(), text)));
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

    fn picture(&mut self, from: &mut Sample, field: usize) -> Result<()> {
        let name = from.name(field);
        let image = match from.blob(field) {
            Ok(None) => return Ok(()),
            Ok(Some(blob)) => from.image(&blob),
            Err(e) => Err(e),
        };
        let camera = from.calibration(&name)?.and_then(|c| {
            let to_global = sensor_to_global(&c).ok()?;
            let from_global = to_global.inverse();
            Some(Camera { from_global, intrinsic: c.intrinsic?, timestamp_ns: c.timestamp_ns })
        });
        self.pictures.push(Picture { name, image, camera });
        Ok(())
    }

    fn points(&mut self, from: &mut Sample, field: usize) -> Result<()> {
        let name = from.name(field);
        let blob = match from.blob(field) {
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
        let bytes = from.reader.read(&blob)?;
        let points_m = points_of(&bytes, columns as usize, &from.reader.name(&blob))?;
        let to_global = from.calibration(&name)?.map(|c| sensor_to_global(&c)).transpose()?;
        self.lidar = Some(Lidar { name, points_m, to_global });
        Ok(())
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

/// The line that shows where a box looks: from the middle of its bottom to that of its front.
pub(super) fn heading_m(corners: &[[f64; 3]; 8]) -> [[f64; 3]; 2] {
    let middle = |a: usize, b: usize| {
        std::array::from_fn(|axis| f64::midpoint(corners[a][axis], corners[b][axis]))
    };
    [middle(0, 2), middle(0, 1)]
}
