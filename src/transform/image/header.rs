//! What a JPEG says about itself before its first scan, and whether its end is there.
//!
//! Decoders disagree on damaged and rare files: libjpeg fills missing data with grey and warns,
//! zune-jpeg 0.5.15 says "success", and mixes up non-interleaved subsampled scans. So what can be
//! seen in the markers is judged here, the same for every decoder.

use crate::error::{Error, Result};

const SOI: u8 = 0xD8;
const EOI: u8 = 0xD9;
const SOS: u8 = 0xDA;
const APP14: u8 = 0xEE;

/// Segments before the first scan; real files have a dozen.
const SEGMENTS_MAX: usize = 4096;

/// What a JPEG's frame header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JpegHeader {
    /// Rows.
    pub height: u32,
    /// Columns.
    pub width: u32,
    /// 1 grey, 3 colour, 4 CMYK or YCCK.
    pub components: u8,
    /// Second byte of the start-of-frame marker: the coding process.
    pub process: u8,
    /// Some component has fewer samples than another.
    pub subsampled: bool,
    /// The first scan holds every component.
    pub interleaved: bool,
    /// An Adobe segment is there, so four components are stored inverted.
    pub adobe: bool,
    /// Four components that the Adobe segment calls YCCK.
    pub ycck: bool,
}

impl JpegHeader {
    /// True for arithmetic coding.
    pub fn arithmetic(&self) -> bool {
        matches!(self.process, 0xC9..=0xCF)
    }

    /// True for progressive coding.
    pub fn progressive(&self) -> bool {
        matches!(self.process, 0xC2 | 0xCA)
    }
}

/// Reads the markers up to the first scan and checks that the end marker is there.
pub fn read_header(jpeg: &[u8], file: &str) -> Result<JpegHeader> {
    let mut walk = Walk { jpeg, file, at: 0 };
    if jpeg.get(..2) != Some(&[0xFF, SOI]) {
        return Err(walk.corrupt("a JPEG start marker (FF D8)", describe(jpeg)));
    }
    walk.at = 2;
    let mut header = None;
    let (mut adobe, mut transform) = (false, 0);
    for _ in 0..SEGMENTS_MAX {
        let (marker, body) = walk.segment()?;
        match marker {
            0xC0..=0xC3 | 0xC5..=0xC7 | 0xC9..=0xCB | 0xCD..=0xCF => {
                header = Some(walk.frame(marker, body)?);
            }
            APP14 if body.starts_with(b"Adobe") => {
                (adobe, transform) = (true, body.get(11).copied().unwrap_or(0));
            }
            SOS => {
                let Some(header) = header else {
                    return Err(walk.corrupt("a frame header before the first scan", "none"));
                };
                let interleaved = body.first() == Some(&header.components);
                walk.end()?;
                let ycck = header.components == 4 && transform == 2;
                return Ok(JpegHeader { interleaved, adobe, ycck, ..header });
            }
            _ => {}
        }
    }
    Err(walk.corrupt(format!("a scan within {SEGMENTS_MAX} segments"), "none"))
}

fn describe(bytes: &[u8]) -> String {
    match bytes.get(..4) {
        Some(head) => format!("{head:02X?}"),
        None => format!("{} bytes in all", bytes.len()),
    }
}

struct Walk<'a> {
    jpeg: &'a [u8],
    file: &'a str,
    at: usize,
}

impl<'a> Walk<'a> {
    fn corrupt(&self, expected: impl std::fmt::Display, found: impl std::fmt::Display) -> Error {
        let advice = "the JPEG is damaged or cut off; fetch the file again or drop it";
        Error::corrupt(self.file, self.at as u64, expected, found, advice)
    }

    /// Next marker and its body; fill bytes before a marker are allowed.
    fn segment(&mut self) -> Result<(u8, &'a [u8])> {
        let rest = self.jpeg.get(self.at..).unwrap_or_default();
        let fill = rest.iter().take_while(|b| **b == 0xFF).count();
        let marker = match rest.get(fill) {
            Some(marker) if fill > 0 && *marker != 0 => *marker,
            Some(other) => {
                return Err(self.corrupt("a marker (FF xx)", format!("{other:02X}")));
            }
            None => return Err(self.corrupt("a marker", "the end of the data")),
        };
        self.at += fill + 1;
        if marker == EOI {
            return Err(self.corrupt("a scan", "the end marker"));
        }
        if matches!(marker, 0x01 | 0xD0..=SOI) {
            return Ok((marker, &[]));
        }
        let rest = self.jpeg.get(self.at..).unwrap_or_default();
        let length = match rest {
            [high, low, ..] => usize::from(u16::from_be_bytes([*high, *low])),
            _ => return Err(self.corrupt("a segment length", "the end of the data")),
        };
        let Some(body) = rest.get(2..length) else {
            let found = format!("{} bytes to the end of the data", rest.len());
            return Err(self.corrupt(format!("a segment of {length} bytes"), found));
        };
        self.at += length;
        Ok((marker, body))
    }

    fn frame(&self, process: u8, body: &[u8]) -> Result<JpegHeader> {
        let [precision, h1, h0, w1, w0, components, rest @ ..] = body else {
            let found = format!("{} bytes", body.len());
            return Err(self.corrupt("a frame header of at least 6 bytes", found));
        };
        self.supported(process, *precision)?;
        let height = u32::from(u16::from_be_bytes([*h1, *h0]));
        let width = u32::from(u16::from_be_bytes([*w1, *w0]));
        if height == 0 || width == 0 {
            return Err(self.corrupt("a height and a width", format!("{height} x {width}")));
        }
        if !matches!(components, 1 | 3 | 4) || rest.len() < 3 * usize::from(*components) {
            let found = format!("{components} components in {} bytes", rest.len());
            return Err(self.corrupt("1, 3 or 4 components of 3 bytes", found));
        }
        let sampling = |i: usize| rest[3 * i + 1];
        let subsampled = (1..usize::from(*components)).any(|i| sampling(i) != sampling(0));
        Ok(JpegHeader {
            height,
            width,
            components: *components,
            process,
            subsampled,
            interleaved: true,
            adobe: false,
            ycck: false,
        })
    }

    fn supported(&self, process: u8, precision: u8) -> Result<()> {
        let what = match process {
            0xC3 | 0xCB => "lossless JPEG",
            0xC5..=0xC7 | 0xCD..=0xCF => "hierarchical JPEG",
            _ if precision != 8 => "JPEG with 12 bits per sample",
            _ => return Ok(()),
        };
        let advice = "convert it to 8-bit baseline or progressive JPEG".into();
        Err(Error::Unsupported { what: format!("{}: {what}", self.file), advice })
    }

    /// Entropy-coded data never holds FF D9, so a file without one behind its first scan is cut.
    fn end(&mut self) -> Result<()> {
        let scans = self.jpeg.get(self.at..).unwrap_or_default();
        if scans.ends_with(&[0xFF, EOI]) || scans.windows(2).rev().any(|w| w == [0xFF, EOI]) {
            return Ok(());
        }
        self.at = self.jpeg.len();
        Err(self.corrupt("a JPEG end marker (FF D9)", "the end of the data"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(w: u16, h: u16) -> Vec<u8> {
        let mut out = Vec::new();
        let pixels = vec![99; usize::from(w) * usize::from(h) * 3];
        let encoder = jpeg_encoder::Encoder::new(&mut out, 90);
        encoder.encode(&pixels, w, h, jpeg_encoder::ColorType::Rgb).unwrap();
        out
    }

    #[test]
    fn reads_size_and_components() {
        let header = read_header(&encoded(31, 17), "a.jpg").unwrap();
        assert_eq!((header.height, header.width, header.components), (17, 31, 3));
        assert!(header.interleaved && !header.arithmetic() && !header.progressive());
    }

    #[test]
    fn every_truncation_is_an_error_that_names_the_file() {
        let whole = encoded(8, 8);
        for cut in 0..whole.len() {
            let error = read_header(&whole[..cut], "a.jpg").unwrap_err();
            assert!(error.to_string().contains("a.jpg"), "{error}");
        }
    }

    #[test]
    fn twelve_bit_and_lossless_are_refused_by_name() {
        let mut jpeg = encoded(8, 8);
        let at = jpeg.windows(2).position(|w| w == [0xFF, 0xC0]).unwrap();
        jpeg[at + 4] = 12;
        assert!(read_header(&jpeg, "a").unwrap_err().to_string().contains("12 bits"));
        jpeg[at + 1] = 0xC3;
        assert!(read_header(&jpeg, "a").unwrap_err().to_string().contains("lossless"));
    }

    proptest! {
        #[test]
        fn no_input_panics(
            mut bytes in prop::collection::vec(0_u8.., 0..200), marked in any::<bool>(),
        ) {
            if marked && bytes.len() > 3 {
                bytes[..3].copy_from_slice(&[0xFF, SOI, 0xFF]);
            }
            let _ = read_header(&bytes, "x");
        }

        #[test]
        fn no_flipped_byte_panics(at in 0_usize..600, value in 0_u8..) {
            let mut jpeg = encoded(8, 8);
            let at = at % jpeg.len();
            jpeg[at] = value;
            let _ = read_header(&jpeg, "x");
        }
    }
}
