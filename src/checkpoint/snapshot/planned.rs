//! What follows from the tensors' names and shapes alone: who writes what, the files, and their
//! form in a slot's record. Training saves the same shapes again and again, so it is worked out
//! once and kept.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::image_starts;
use crate::checkpoint::layout::{Dtype, FileImage, Piece, Placed, RollLimits, plan_files};
use crate::checkpoint::plan::{Group, TensorIn, cut_long, plan};
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};

/// Longest piece of a file that is compressed in memory: several of them share the threads.
const PIECE_BYTES_MAX: u64 = 32 << 20;

/// Replicated tensors by the ranks that hold them.
pub type Groups = Vec<(Vec<u32>, Group)>;

/// A plan, and for which tensors it holds.
#[derive(Debug)]
pub struct Planned {
    tensors: Vec<(TensorIn<'static>, usize)>,
    /// Files, whose bytes lie one after the other in the slot.
    pub images: Arc<Vec<FileImage>>,
    /// Pieces that the files place.
    pub pieces: Arc<Vec<Piece>>,
    /// Replicated tensors.
    pub groups: Arc<Groups>,
    /// Bytes of all images in a slot.
    pub data_bytes: usize,
    /// The three above in a slot's record.
    pub layout: Vec<u8>,
}

impl Planned {
    /// Plans `rank`'s part of a save. `windows` makes pieces and files that can be compressed in
    /// memory, one after the other.
    pub fn new(
        rank: u32,
        world_size: u32,
        tensors: &[TensorIn<'_>],
        windows: bool,
    ) -> Result<Self> {
        let mut plan = plan(rank, world_size, tensors)?;
        let mut limits = RollLimits::default();
        if windows {
            limits = RollLimits::windows();
            plan.pieces = cut_long(plan.pieces, PIECE_BYTES_MAX);
        }
        let images = plan_files(rank, &plan.pieces, limits)?;
        let groups: Groups = plan.groups.into_iter().collect();
        let layout = Layout::encode(&images, &plan.pieces, &groups)?;
        let (_, data_bytes) = image_starts(&images);
        let shape = |t: &TensorIn<'_>| (TensorIn { data: &[], ..t.clone() }, t.data.len());
        Ok(Self {
            tensors: tensors.iter().map(shape).collect(),
            images: Arc::new(images),
            pieces: Arc::new(plan.pieces),
            groups: Arc::new(groups),
            data_bytes,
            layout,
        })
    }

    /// Bytes of all checksums in a slot's record.
    pub fn sums_bytes(&self) -> usize {
        self.images.iter().map(|image| 4 * (1 + image.entries.len())).sum()
    }

    /// Whether it is the plan for these tensors, too.
    pub fn fits(&self, tensors: &[TensorIn<'_>]) -> bool {
        let alike = |((a, bytes), b): (&(TensorIn<'_>, usize), &TensorIn<'_>)| {
            let TensorIn { path, dtype, shape, rect, data, replicas, pin_rank } = b;
            (&a.path, &a.dtype, &a.shape, &a.rect, *bytes, &a.replicas, &a.pin_rank)
                == (path, dtype, shape, rect, data.len(), replicas, pin_rank)
        };
        self.tensors.len() == tensors.len() && self.tensors.iter().zip(tensors).all(alike)
    }
}

/// Piece (none for padding), name, start, length.
type EntryRow = (Option<usize>, String, u64, u64);
/// Path, dtype, shape, offsets, extent, length.
type PieceRow = (String, String, Vec<i64>, Vec<i64>, Vec<i64>, u64);

/// The stored form of a plan.
#[derive(Debug, Serialize, Deserialize)]
pub struct Layout {
    /// Name, header bytes, size, entries.
    images: Vec<(String, usize, u64, Vec<EntryRow>)>,
    pieces: Vec<PieceRow>,
    groups: Vec<(Vec<u32>, Vec<String>)>,
}

impl Layout {
    fn encode(images: &[FileImage], pieces: &[Piece], groups: &Groups) -> Result<Vec<u8>> {
        let entry = |e: &Placed| (e.piece, e.entry.clone(), e.start, e.length);
        let image = |i: &FileImage| {
            let entries = i.entries.iter().map(entry).collect();
            (i.name.clone(), i.header.len(), i.size_bytes, entries)
        };
        let piece = |p: &Piece| {
            let Rect { offsets, extent } = p.rect.clone();
            (p.path.clone(), p.dtype.name.into(), p.shape.clone(), offsets, extent, p.length)
        };
        let layout = Self {
            images: images.iter().map(image).collect(),
            pieces: pieces.iter().map(piece).collect(),
            groups: groups.iter().map(|(ranks, g)| (ranks.clone(), g.lines.clone())).collect(),
        };
        serde_json::to_vec(&layout).map_err(|e| Error::invalid("plan of a save", "names", e))
    }

    /// Reads what [`Planned`] made.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|e| unreadable(&e.to_string()))
    }

    /// Files, pieces and groups again; `data` holds the images.
    pub fn restore(self, data: &[u8]) -> Result<(Vec<FileImage>, Vec<Piece>, Groups)> {
        let (mut images, mut headers) = (Vec::new(), Vec::new());
        for (name, header_bytes, size_bytes, entries) in self.images {
            if size_bytes > data.len() as u64 {
                return Err(unreadable("files beyond the slot"));
            }
            let entry = |(piece, entry, start, length)| Placed { piece, entry, start, length };
            let entries = entries.into_iter().map(entry).collect();
            images.push(FileImage { name, header: Vec::new(), entries, size_bytes });
            headers.push(header_bytes);
        }
        let (starts, _) = image_starts(&images);
        for ((image, start), header_bytes) in images.iter_mut().zip(starts).zip(headers) {
            let header = data.get(start..).and_then(|rest| rest.get(..header_bytes));
            image.header = header.ok_or_else(|| unreadable("files beyond the slot"))?.to_vec();
        }
        let mut pieces = Vec::new();
        for (path, dtype, shape, offsets, extent, length) in self.pieces {
            let (dtype, rect) = (Dtype::named(&dtype)?, Rect { offsets, extent });
            let (source, source_start) = (0, 0);
            pieces.push(Piece { path, dtype, shape, rect, length, source, source_start });
        }
        let groups = self.groups.into_iter().map(|(ranks, lines)| (ranks, Group { lines }));
        Ok((images, pieces, groups.collect()))
    }
}

fn unreadable(found: &str) -> Error {
    Error::corrupt("staged snapshot", 0, "a plan of this version", found, "it is not adopted")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor<'a>(path: &str, shape: &[i64], data: &'a [u8]) -> TensorIn<'a> {
        TensorIn {
            path: format!("[\"{path}\"]"),
            dtype: "U8".into(),
            shape: shape.to_vec(),
            rect: Rect::whole(shape),
            data: &data[..shape.iter().product::<i64>() as usize],
            replicas: vec![0, 1],
            pin_rank: None,
        }
    }

    #[test]
    fn a_plan_comes_back_from_its_record() {
        let zeros = vec![0; 20 << 20];
        let tensors = [tensor("a", &[20, 1 << 20], &zeros), tensor("b", &[3], &zeros)];
        let planned = Planned::new(1, 2, &tensors, false).unwrap();
        let mut data = vec![0; planned.data_bytes];
        let (starts, _) = image_starts(&planned.images);
        for (image, start) in planned.images.iter().zip(starts) {
            data[start..start + image.header.len()].copy_from_slice(&image.header);
        }
        let layout = Layout::decode(&planned.layout).unwrap();
        let (images, pieces, groups) = layout.restore(&data).unwrap();
        assert_eq!(format!("{images:?}"), format!("{:?}", planned.images));
        assert_eq!(format!("{groups:?}"), format!("{:?}", planned.groups));
        let bare = |pieces: &[Piece]| -> Vec<_> {
            let bare = |p: &Piece| Piece { source: 0, source_start: 0, ..p.clone() };
            pieces.iter().map(bare).map(|p| format!("{p:?}")).collect()
        };
        assert_eq!(bare(&pieces), bare(&planned.pieces));
        assert!(Layout::decode(b"{}").is_err());
        assert!(Layout::decode(&planned.layout).unwrap().restore(&data[..10]).is_err());
    }

    #[test]
    fn a_plan_holds_for_its_own_tensors_only() {
        let zeros = vec![0; 100];
        let tensors = [tensor("a", &[4, 5], &zeros), tensor("b", &[3], &zeros)];
        let planned = Planned::new(0, 2, &tensors, false).unwrap();
        assert!(planned.fits(&tensors));
        assert!(!planned.fits(&tensors[..1]));
        let wrong: [fn(&mut TensorIn<'_>); 5] = [
            |t| t.path = "[\"c\"]".into(),
            |t| t.shape = vec![5, 4],
            |t| t.dtype = "I8".into(),
            |t| t.pin_rank = Some(1),
            |t| t.replicas = vec![],
        ];
        for change in wrong {
            let mut other = tensors.clone();
            change(&mut other[0]);
            assert!(!planned.fits(&other));
        }
    }
}
