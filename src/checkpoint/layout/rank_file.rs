//! Plans safetensors files: which entry lies where, and the header that says so.
//!
//! The plan is made before any byte is copied, so that the staging slot can hold the file image
//! itself and writing is straight slices of it. Large entries start on a page, so that a reader can
//! map or DMA one by itself; the gaps are `__pad.<n>` entries, since the format allows no holes.
//! Small entries follow by falling alignment, which needs no gaps at all.

use std::collections::HashSet;
use std::fmt::Write as _;

use super::dtype::Dtype;
use super::names::rank_file;
use crate::checkpoint::flat::is_flat;
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};
use crate::memory::PAGE_BYTES;

/// Entries from this size on start on a page; below it the padding would cost more than 0.4 %.
const ALIGN_ENTRY_BYTES_MIN: u64 = 1 << 20;
/// Longest header text that one entry without its name and shape can have.
const ENTRY_TEXT_BYTES: usize = 160;

/// Data of one file that is compressed in memory before it is written: large enough for the disk,
/// and a second one could be in work within 256 MiB.
pub const WINDOW_DATA_BYTES_MAX: u64 = 128 << 20;

/// When to start another file. The format's own limit is a 100 MB header.
#[derive(Debug, Clone, Copy)]
pub struct RollLimits {
    /// Entries of one file, padding included.
    pub entries_max: usize,
    /// Header of one file.
    pub header_bytes_max: usize,
    /// Pieces of one file, with the padding between them; a longer piece has its own file.
    pub data_bytes_max: u64,
}

impl RollLimits {
    /// Files that can be compressed in memory.
    pub fn windows() -> Self {
        // Without the padding after the last piece.
        Self { data_bytes_max: WINDOW_DATA_BYTES_MAX - PAGE_BYTES as u64, ..Self::default() }
    }
}

impl Default for RollLimits {
    fn default() -> Self {
        Self { entries_max: 400_000, header_bytes_max: 90_000_000, data_bytes_max: u64::MAX }
    }
}

/// A piece of a tensor that this rank writes.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Compact JSON array of keys.
    pub path: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape of the whole tensor.
    pub shape: Vec<i64>,
    /// The rectangle of it that is written, or the flat range.
    pub rect: Rect,
    /// Bytes of that.
    pub length: u64,
    /// Which of the caller's tensors holds the bytes.
    pub source: usize,
    /// Where in that tensor's memory they start.
    pub source_start: u64,
}

impl Piece {
    /// Whether it is a range of the flattened tensor.
    pub fn is_flat(&self) -> bool {
        is_flat(&self.rect, &self.shape)
    }
}

/// Where a piece lies.
#[derive(Debug, Clone)]
pub struct Placed {
    /// Index of the piece; `None` for padding.
    pub piece: Option<usize>,
    /// Entry name in the header.
    pub entry: String,
    /// Offset from the start of the file.
    pub start: u64,
    /// Bytes.
    pub length: u64,
}

/// One planned file.
#[derive(Debug, Clone)]
pub struct FileImage {
    /// File name inside the attempt folder.
    pub name: String,
    /// Length prefix and header, padded with spaces to a page.
    pub header: Vec<u8>,
    /// Entries in the order they lie in the file, without gaps from the header's end on.
    pub entries: Vec<Placed>,
    /// Size of the file.
    pub size_bytes: u64,
}

/// Plans the files of a rank. There is always at least one, so that every rank leaves a trace.
pub fn plan_files(rank: u32, pieces: &[Piece], limits: RollLimits) -> Result<Vec<FileImage>> {
    let mut files = Vec::new();
    let mut file = Building::new();
    for index in placing_order(pieces) {
        let base = entry_name(&pieces[index])?;
        let text = ENTRY_TEXT_BYTES + 2 * base.len() + 24 * pieces[index].shape.len();
        // Two entries at most come in: the piece and the padding before it.
        let full = file.entries.len() + 2 > limits.entries_max
            || file.text.len() + ENTRY_TEXT_BYTES + text > limits.header_bytes_max
            || file.data_bytes.saturating_add(pieces[index].length) > limits.data_bytes_max;
        if full && !file.entries.is_empty() {
            files.push(file.finish(rank_file(rank, files.len())));
            file = Building::new();
        }
        file.place(index, &pieces[index], base, None);
    }
    files.push(file.finish(rank_file(rank, files.len())));
    Ok(files)
}

/// A piece as it is stored in a file that does not hold all pieces, or not all as they are.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    /// Index of the piece.
    pub index: usize,
    /// The piece.
    pub piece: &'a Piece,
    /// Bytes of its packed form; `None` if it is stored as it is.
    pub packed: Option<u64>,
}

impl Stored<'_> {
    fn length(&self) -> u64 {
        self.packed.unwrap_or(self.piece.length)
    }

    /// As [`placing_order`], packed ones last: their lengths are odd.
    fn class(&self) -> u64 {
        match self.packed {
            _ if self.length() >= ALIGN_ENTRY_BYTES_MIN => 0,
            Some(_) => 64,
            None => 64 - entry_alignment(self.piece),
        }
    }
}

/// Plans one file of these pieces, which are some of a file that [`plan_files`] made: it is no
/// larger than that, nor is its header.
pub fn plan_packed(name: &str, pieces: &[Stored<'_>]) -> Result<FileImage> {
    let mut order: Vec<&Stored<'_>> = pieces.iter().collect();
    order.sort_by_key(|stored| stored.class());
    let mut file = Building::new();
    for stored in order {
        let base = entry_name(stored.piece)?;
        file.place(stored.index, stored.piece, base, stored.packed);
    }
    Ok(file.finish(name.into()))
}

/// Page-aligned pieces first, then the others by falling alignment of their type.
fn placing_order(pieces: &[Piece]) -> Vec<usize> {
    let class = |i: &usize| {
        let piece = &pieces[*i];
        if piece.length >= ALIGN_ENTRY_BYTES_MIN { 0 } else { 64 - entry_alignment(piece) }
    };
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(class);
    order
}

fn entry_alignment(piece: &Piece) -> u64 {
    piece.dtype.bytes
}

/// The path's keys joined by `.`, plus the offsets if the piece is only a part.
fn entry_name(piece: &Piece) -> Result<String> {
    let bad = || Error::invalid("tensor path", "a JSON array of strings and ints", &piece.path);
    let keys: Vec<serde_json::Value> = serde_json::from_str(&piece.path).map_err(|_| bad())?;
    let mut name = String::new();
    for (i, key) in keys.iter().enumerate() {
        if i > 0 {
            name.push('.');
        }
        match key {
            serde_json::Value::String(s) => name.push_str(s),
            serde_json::Value::Number(n) => name.push_str(&n.to_string()),
            _ => return Err(bad()),
        }
    }
    if piece.rect != Rect::whole(&piece.shape) {
        let offsets: Vec<_> = piece.rect.offsets.iter().map(ToString::to_string).collect();
        name.push('@');
        name.push_str(&offsets.join(","));
    }
    Ok(name)
}

struct Building {
    text: String,
    entries: Vec<Placed>,
    taken: HashSet<String>,
    data_bytes: u64,
    pads: usize,
}

impl Building {
    fn new() -> Self {
        Self {
            // `format` is what readers of the PyTorch world look for.
            text: r#"{"__metadata__":{"format":"pt","writer":"drivetrain"}"#.into(),
            entries: Vec::new(),
            taken: HashSet::from(["__metadata__".to_string()]),
            data_bytes: 0,
            pads: 0,
        }
    }

    fn place(&mut self, index: usize, piece: &Piece, base: String, packed: Option<u64>) {
        let length = packed.unwrap_or(piece.length);
        if length >= ALIGN_ENTRY_BYTES_MIN {
            self.pad_to(PAGE_BYTES as u64);
        }
        let name = self.free_name(base);
        if packed.is_none() && piece.dtype.in_safetensors && !piece.is_flat() {
            self.push(Some(index), name, piece.dtype.name, &piece.rect.extent, length);
        } else {
            self.push(Some(index), name, "U8", &[length as i64], length);
        }
    }

    fn pad_to(&mut self, alignment: u64) {
        let gap = self.data_bytes.next_multiple_of(alignment) - self.data_bytes;
        if gap > 0 {
            let name = self.free_name(format!("__pad.{}", self.pads));
            self.pads += 1;
            self.push(None, name, "U8", &[gap as i64], gap);
        }
    }

    /// `base`, or `base~1`, `base~2` … if an entry has that name already.
    fn free_name(&mut self, base: String) -> String {
        let mut name = base.clone();
        let mut n = 0;
        while !self.taken.insert(name.clone()) {
            n += 1;
            name = format!("{base}~{n}");
        }
        name
    }

    fn push(&mut self, piece: Option<usize>, entry: String, dtype: &str, shape: &[i64], n: u64) {
        let (start, end) = (self.data_bytes, self.data_bytes + n);
        let shape: Vec<_> = shape.iter().map(ToString::to_string).collect();
        let name = serde_json::Value::from(entry.as_str());
        // Writing to a string cannot fail.
        let _ = write!(
            self.text,
            r#",{name}:{{"dtype":"{dtype}","shape":[{}],"data_offsets":[{start},{end}]}}"#,
            shape.join(",")
        );
        self.entries.push(Placed { piece, entry, start, length: n });
        self.data_bytes = end;
    }

    /// Closes the header and turns offsets in the data into offsets in the file.
    fn finish(mut self, name: String) -> FileImage {
        self.text.push('}');
        let header_bytes = (8 + self.text.len()).next_multiple_of(PAGE_BYTES);
        let text_bytes = header_bytes - 8;
        let mut header = Vec::with_capacity(header_bytes);
        header.extend_from_slice(&(text_bytes as u64).to_le_bytes());
        header.extend_from_slice(self.text.as_bytes());
        header.resize(header_bytes, b' ');
        for entry in &mut self.entries {
            entry.start += header_bytes as u64;
        }
        let size_bytes = header_bytes as u64 + self.data_bytes;
        FileImage { name, header, entries: self.entries, size_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(path: &str, dtype: &str, shape: &[i64]) -> Piece {
        let dtype = Dtype::named(dtype).unwrap();
        Piece {
            path: path.into(),
            dtype,
            shape: shape.to_vec(),
            rect: Rect::whole(shape),
            length: super::super::shape_bytes(shape, dtype).unwrap(),
            source: 0,
            source_start: 0,
        }
    }

    /// Parses a header as the format's rules say, and returns entries by offset.
    fn parse(image: &FileImage) -> Vec<(String, String, Vec<i64>, u64, u64)> {
        let n = u64::from_le_bytes(image.header[..8].try_into().unwrap());
        assert_eq!(n as usize + 8, image.header.len());
        let json: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(&image.header[8..]).unwrap();
        let mut rows: Vec<_> = json
            .iter()
            .filter(|(k, _)| *k != "__metadata__")
            .map(|(k, v)| {
                let shape: Vec<i64> = serde_json::from_value(v["shape"].clone()).unwrap();
                let at: [u64; 2] = serde_json::from_value(v["data_offsets"].clone()).unwrap();
                (k.clone(), v["dtype"].as_str().unwrap().to_string(), shape, at[0], at[1])
            })
            .collect();
        rows.sort_by_key(|r| (r.3, r.4));
        rows
    }

    #[test]
    fn files_obey_the_formats_rules() {
        let pieces = [
            piece(r#"["a","b"]"#, "U8", &[3]),
            piece(r#"["a.b"]"#, "F64", &[2]),
            piece(r#"["big",0]"#, "BF16", &[1 << 19, 2]),
            piece(r#"["c"]"#, "C128", &[2]),
            piece(r#"["big",1]"#, "I8", &[(1 << 20) + 1]),
            piece(r#"["big",2]"#, "F32", &[1 << 20]),
            piece(r#"["s"]"#, "F32", &[]),
            piece(r#"["none"]"#, "I64", &[0, 3]),
            piece(r#"["__metadata__"]"#, "BOOL", &[1]),
        ];
        let images = plan_files(3, &pieces, RollLimits::default()).unwrap();
        assert_eq!(images.len(), 1);
        let rows = parse(&images[0]);
        let mut end = 0;
        for (name, dtype, shape, from, to) in &rows {
            assert_eq!(*from, end, "{name} leaves a hole");
            end = *to;
            let size = super::super::shape_bytes(shape, Dtype::named(dtype).unwrap()).unwrap();
            assert_eq!(to - from, size, "{name}");
        }
        assert_eq!(end + images[0].header.len() as u64, images[0].size_bytes);
        let names: HashSet<_> = rows.iter().map(|r| r.0.as_str()).collect();
        for name in ["a.b", "a.b~1", "big.0", "__metadata__~1", "__pad.0"] {
            assert!(names.contains(name), "{name} in {names:?}");
        }
        for placed in &images[0].entries {
            let Some(i) = placed.piece else { continue };
            assert_eq!(placed.start % pieces[i].dtype.bytes, 0, "{}", placed.entry);
            if placed.length >= ALIGN_ENTRY_BYTES_MIN {
                assert_eq!(placed.start % PAGE_BYTES as u64, 0, "{}", placed.entry);
            }
        }
    }

    #[test]
    fn parts_carry_their_offsets_and_files_roll() {
        let mut part = piece(r#"["w",7]"#, "F32", &[8, 4]);
        part.rect = Rect { offsets: vec![2, 0], extent: vec![3, 4] };
        part.length = 48;
        let roll = RollLimits::default();
        let limits = RollLimits { entries_max: 4, header_bytes_max: 10_000, ..roll };
        let many: Vec<_> = (0..10).map(|_| part.clone()).collect();
        let images = plan_files(1, &many, limits).unwrap();
        assert!(images.len() > 2);
        assert_eq!(images[0].name, "rank-00001.safetensors");
        assert_eq!(images[1].name, "rank-00001.1.safetensors");
        assert_eq!(images[0].entries[0].entry, "w.7@2,0");
        assert_eq!(images[0].entries[1].entry, "w.7@2,0~1");
        let total: usize = images.iter().map(|i| i.entries.len()).sum();
        assert_eq!(total, 10);
        assert!(images.iter().all(|i| i.entries.len() <= 4));
        let narrow = RollLimits { entries_max: 100, header_bytes_max: 700, ..roll };
        for image in plan_files(1, &many, narrow).unwrap() {
            assert!(image.header.len() <= 4096);
        }
        let short = RollLimits { data_bytes_max: 100, ..roll };
        let images = plan_files(1, &many, short).unwrap();
        assert!(images.iter().all(|i| i.entries.len() == 2), "two of 48 bytes");
        let long = RollLimits { data_bytes_max: 7, ..roll };
        assert_eq!(plan_files(1, &many, long).unwrap().len(), 10, "each by itself");
    }

    #[test]
    fn some_pieces_of_a_file_make_a_file_without_holes() {
        let pieces = [
            piece(r#"["big"]"#, "F32", &[1 << 19]),
            piece(r#"["packed"]"#, "F32", &[1 << 20]),
            piece(r#"["odd"]"#, "BF16", &[77]),
            piece(r#"["wide"]"#, "F64", &[3]),
        ];
        let stored = |index: usize, packed| Stored { index, piece: &pieces[index], packed };
        let some =
            [stored(2, Some(33)), stored(1, Some((1 << 20) + 5)), stored(3, None), stored(0, None)];
        let image = plan_packed("x", &some).unwrap();
        let rows = parse(&image);
        let mut end = 0;
        for (name, _, _, from, to) in &rows {
            assert_eq!(*from, end, "{name}");
            end = *to;
        }
        assert_eq!(image.size_bytes, image.header.len() as u64 + end);
        let found: Vec<_> =
            rows.iter().map(|r| (r.0.as_str(), r.1.as_str(), r.2[0], r.4 - r.3)).collect();
        assert_eq!(
            found,
            [
                ("packed", "U8", (1 << 20) + 5, (1 << 20) + 5),
                ("__pad.0", "U8", 4091, 4091),
                ("big", "F32", 1 << 19, 1 << 21),
                ("wide", "F64", 3, 24),
                ("odd", "U8", 33, 33),
            ]
        );
    }

    #[test]
    fn an_empty_rank_still_has_a_file() {
        let images = plan_files(0, &[], RollLimits::default()).unwrap();
        assert_eq!(images.len(), 1);
        assert!(parse(&images[0]).is_empty());
        assert!(plan_files(0, &[piece("[[1]]", "U8", &[1])], RollLimits::default()).is_err());
    }
}
