//! The map file the `map` table names: readers of the schema insist that it exists. It is a grey
//! PNG without content, written by hand because nothing else here makes PNGs.

use std::path::Path;

use crc_fast::{CrcAlgorithm, checksum};

use super::tables::{MAP_FILE, io};
use crate::error::Result;

const SIDE_PX: u32 = 16;

/// Writes the map below `root`.
pub fn write(root: &Path) -> Result<()> {
    let path = root.join(MAP_FILE);
    std::fs::write(&path, png()).map_err(|e| io("write", &path, e))
}

/// An 8-bit grey picture in a zlib stream of one stored block.
fn png() -> Vec<u8> {
    let side = SIDE_PX.to_be_bytes();
    let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
    chunk(&mut out, *b"IHDR", &[&side[..], &side, &[8, 0, 0, 0, 0]].concat());
    let row = [&[0_u8][..], &[128; SIDE_PX as usize]].concat();
    let raw = row.repeat(SIDE_PX as usize);
    let length = raw.len() as u16;
    let head = [&[0x78, 0x01, 0x01][..], &length.to_le_bytes(), &(!length).to_le_bytes()].concat();
    let check = adler32(&raw).to_be_bytes();
    chunk(&mut out, *b"IDAT", &[&head[..], &raw, &check].concat());
    chunk(&mut out, *b"IEND", &[]);
    out
}

fn chunk(out: &mut Vec<u8>, kind: [u8; 4], data: &[u8]) {
    out.extend((data.len() as u32).to_be_bytes());
    let body = [&kind[..], data].concat();
    out.extend(&body);
    out.extend((checksum(CrcAlgorithm::Crc32IsoHdlc, &body) as u32).to_be_bytes());
}

fn adler32(data: &[u8]) -> u32 {
    let (mut a, mut b) = (1_u32, 0_u32);
    for &byte in data {
        a = (a + u32::from(byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    b << 16 | a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_checksums() {
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
        // Every PNG ends with these bytes.
        assert!(png().ends_with(b"\0\0\0\0IEND\xae\x42\x60\x82"));
    }
}
