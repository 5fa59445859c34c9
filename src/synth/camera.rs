//! Pictures: one ray per pixel, a lens and a sensor, then JPEG.

use jpeg_encoder::{ColorType, Encoder, SamplingFactor};

use super::cast::{Column, Surface};
use super::noise::mix2;
use super::paint::{Brush, colour};
use super::rig::Camera;
use super::snapshot::Snapshot;
use crate::error::{Error, Result};

/// Darkening of the picture's corners.
const VIGNETTE: f64 = 0.22;
/// Standard deviation of the sensor's noise is about 104 times this, in levels of 0..255.
const LUMA_NOISE: f32 = 0.0105;
const CHROMA_NOISE: f32 = 0.008;
/// [`Picture::things`] where no annotated thing is seen.
pub const NOTHING: u32 = u32::MAX;

/// A rendered picture.
#[derive(Debug, Clone)]
pub struct Picture {
    /// Pixels per row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Row-major RGB, `height * width * 3` bytes.
    pub rgb: Vec<u8>,
    /// Row-major index of the thing seen at each pixel (an index into the world's things), or
    /// [`NOTHING`]. The ground truth that tests compare projected points with.
    pub things: Vec<u32>,
}

/// Renders what a camera sees. `salt` seeds the sensor's noise.
pub fn render(snapshot: &Snapshot<'_>, camera: &Camera, size: (u32, u32), salt: u32) -> Picture {
    let (width, height) = size;
    let pixels = width as usize * height as usize;
    let mut picture =
        Picture { width, height, rgb: vec![0; pixels * 3], things: vec![NOTHING; pixels] };
    let [fx, fy, cx, cy] = camera.pinhole(width, height);
    let (origin, forward) = camera.view(&snapshot.ego);
    let left = forward.left();
    let mut column = Column::new(origin, camera.at_m[2]);
    let brush = Brush { snapshot, pixel_m: 1.0 / fx };
    for x in 0..width {
        let aside = (f64::from(x) + 0.5 - cx) / fx;
        let ray = forward.plus(left, -aside);
        let length = ray.norm();
        column.aim(snapshot, ray.plus(ray, 1.0 / length - 1.0));
        for y in 0..height {
            let slope = -(f64::from(y) + 0.5 - cy) / fy / length;
            let hit = column.hit(slope);
            let at = y as usize * width as usize + x as usize;
            if let Surface::Thing { placed, .. } = hit.surface {
                picture.things[at] = snapshot.things[usize::from(placed)].index as u32;
            }
            let light = lens(x, y, size);
            let paint = colour(brush, &column, slope, &hit);
            expose(&mut picture.rgb[at * 3..at * 3 + 3], paint.map(|c| c * light), x, y, salt);
        }
    }
    picture
}

/// How much light reaches a pixel.
#[inline]
fn lens(x: u32, y: u32, (width, height): (u32, u32)) -> f32 {
    let u = f64::from(x) / f64::from(width) - 0.5;
    let v = f64::from(y) / f64::from(height) - 0.5;
    (1.0 - VIGNETTE * (u * u + v * v)) as f32
}

/// Adds noise and rounds to levels.
#[inline]
fn expose(out: &mut [u8], paint: [f32; 3], x: u32, y: u32, salt: u32) {
    let bits = mix2(x as i32, y as i32, salt);
    let byte = |shift: u32| ((bits >> shift) & 255) as f32;
    let luma = (byte(0) + byte(8) - 255.0) * LUMA_NOISE;
    let chroma = [byte(16) - 127.5, 0.0, byte(24) - 127.5];
    for (channel, level) in out.iter_mut().enumerate() {
        let value = paint[channel] + luma + chroma[channel] * CHROMA_NOISE;
        *level = (value + 0.5).clamp(0.0, 255.0) as u8;
    }
}

/// Encodes as baseline JPEG 4:2:0, as driving cameras' files are.
pub fn encode(picture: &Picture, quality: u8) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(picture.rgb.len() / 8);
    let mut encoder = Encoder::new(&mut bytes, quality);
    encoder.set_sampling_factor(SamplingFactor::F_2_2);
    // Standard Huffman tables would cost 5 % of size; cameras' encoders have them too.
    let size = (u16::try_from(picture.width), u16::try_from(picture.height));
    let (Ok(width), Ok(height)) = size else {
        let found = format!("{}x{}", picture.width, picture.height);
        return Err(Error::invalid("picture size", "at most 65535 pixels a side", found));
    };
    encoder
        .encode(&picture.rgb, width, height, ColorType::Rgb)
        .map_err(|e| Error::invalid("picture", "something JPEG can hold", e.to_string()))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::rig::CAMERAS;
    use crate::synth::world::World;

    #[test]
    fn a_picture_has_sky_above_and_road_below() {
        let world = World::new(0, 0);
        let snapshot = Snapshot::new(&world, 0.5);
        let picture = render(&snapshot, &CAMERAS[0], (320, 180), 1);
        let mean = |rows: std::ops::Range<usize>| {
            let part = &picture.rgb[rows.start * 960..rows.end * 960];
            part.iter().map(|&b| f64::from(b)).sum::<f64>() / part.len() as f64
        };
        assert!(mean(0..20) > mean(150..170), "sky {} road {}", mean(0..20), mean(150..170));
        assert!(picture.things.iter().any(|&id| id != NOTHING), "no thing in sight");
        let jpeg = encode(&picture, 85).unwrap();
        assert!(jpeg.starts_with(&[0xff, 0xd8]) && jpeg.ends_with(&[0xff, 0xd9]));
    }
}
