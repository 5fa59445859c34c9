//! Writes zip archives with stored records, as `torch.save` lays them out.

/// A record of an archive being written.
#[derive(Debug, Clone)]
struct Listed {
    name: String,
    header: u64,
    bytes: u64,
    crc32: u32,
}

/// Headers and directory of a zip archive whose records' data the caller writes in between.
#[derive(Debug, Default)]
pub struct ZipWriter {
    at: u64,
    listed: Vec<Listed>,
}

/// Size from which a record needs 64-bit fields.
const WIDE: u64 = 0xffff_ffff;
/// torch starts the data of records at multiples of this.
const DATA_ALIGNMENT: u64 = 64;
/// Tag of torch's padding.
const PADDING_TAG: [u8; 2] = *b"FB";

impl ZipWriter {
    /// The header of the next record; its data of `bytes` must follow, then [`ZipWriter::end`].
    pub fn begin(&mut self, name: &str, bytes: u64) -> Vec<u8> {
        let wide = bytes >= WIDE;
        let mut extra = Vec::new();
        if wide {
            extra.extend_from_slice(&[1, 0, 16, 0]);
            extra.extend_from_slice(&bytes.to_le_bytes());
            extra.extend_from_slice(&bytes.to_le_bytes());
        }
        let fixed = 30 + name.len() as u64 + extra.len() as u64 + 4;
        let pad = (self.at + fixed).next_multiple_of(DATA_ALIGNMENT) - self.at - fixed;
        extra.extend_from_slice(&PADDING_TAG);
        extra.extend_from_slice(&(pad as u16).to_le_bytes());
        extra.resize(extra.len() + pad as usize, b'Z');
        let size = if wide { WIDE as u32 } else { bytes as u32 };
        // Flag 3: the checksum follows the data.
        let mut out =
            b"PK\x03\x04\x2d\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00".to_vec();
        out.extend_from_slice(&size.to_le_bytes());
        out.extend_from_slice(&size.to_le_bytes());
        out.extend_from_slice(&(name.len() as u16).to_le_bytes());
        out.extend_from_slice(&(extra.len() as u16).to_le_bytes());
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(&extra);
        self.listed.push(Listed { name: name.into(), header: self.at, bytes, crc32: 0 });
        self.at += out.len() as u64 + bytes;
        out
    }

    /// What follows a record's data, whose CRC-32 is `crc32`.
    pub fn end(&mut self, crc32: u32) -> Vec<u8> {
        let mut out = b"PK\x07\x08".to_vec();
        out.extend_from_slice(&crc32.to_le_bytes());
        if let Some(last) = self.listed.last_mut() {
            last.crc32 = crc32;
            if last.bytes >= WIDE {
                out.extend_from_slice(&last.bytes.to_le_bytes());
                out.extend_from_slice(&last.bytes.to_le_bytes());
            } else {
                out.extend_from_slice(&(last.bytes as u32).to_le_bytes());
                out.extend_from_slice(&(last.bytes as u32).to_le_bytes());
            }
        }
        self.at += out.len() as u64;
        out
    }

    /// The directory and the end records.
    pub fn finish(self) -> Vec<u8> {
        let mut out = Vec::new();
        for record in &self.listed {
            let (wide, far) = (record.bytes >= WIDE, record.header >= WIDE);
            let mut extra = Vec::new();
            if wide {
                extra.extend_from_slice(&record.bytes.to_le_bytes());
                extra.extend_from_slice(&record.bytes.to_le_bytes());
            }
            if far {
                extra.extend_from_slice(&record.header.to_le_bytes());
            }
            let short = |value: u64, narrow: bool| if narrow { value as u32 } else { u32::MAX };
            out.extend_from_slice(b"PK\x01\x02\x2d\x00\x2d\x00\x08\x00\x00\x00\x00\x00\x00\x00");
            out.extend_from_slice(&record.crc32.to_le_bytes());
            out.extend_from_slice(&short(record.bytes, !wide).to_le_bytes());
            out.extend_from_slice(&short(record.bytes, !wide).to_le_bytes());
            out.extend_from_slice(&(record.name.len() as u16).to_le_bytes());
            let extra_bytes = if extra.is_empty() { 0 } else { extra.len() as u16 + 4 };
            out.extend_from_slice(&extra_bytes.to_le_bytes());
            out.extend_from_slice(&[0; 10]);
            out.extend_from_slice(&short(record.header, !far).to_le_bytes());
            out.extend_from_slice(record.name.as_bytes());
            if !extra.is_empty() {
                out.extend_from_slice(&[1, 0]);
                out.extend_from_slice(&(extra.len() as u16).to_le_bytes());
                out.extend_from_slice(&extra);
            }
        }
        self.end_records(&mut out);
        out
    }

    fn end_records(&self, out: &mut Vec<u8>) {
        let (bytes, count) = (out.len() as u64, self.listed.len() as u64);
        let end = self.at + bytes;
        out.extend_from_slice(b"PK\x06\x06");
        out.extend_from_slice(&44_u64.to_le_bytes());
        out.extend_from_slice(&[0x2d, 0, 0x2d, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for number in [count, count, bytes, self.at] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(b"PK\x06\x07\x00\x00\x00\x00");
        out.extend_from_slice(&end.to_le_bytes());
        out.extend_from_slice(&1_u32.to_le_bytes());
        let short = count.min(0xffff) as u16;
        out.extend_from_slice(b"PK\x05\x06\x00\x00\x00\x00");
        out.extend_from_slice(&short.to_le_bytes());
        out.extend_from_slice(&short.to_le_bytes());
        out.extend_from_slice(&(bytes.min(WIDE) as u32).to_le_bytes());
        out.extend_from_slice(&(self.at.min(WIDE) as u32).to_le_bytes());
        out.extend_from_slice(&[0, 0]);
    }
}
