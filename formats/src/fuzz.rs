//! What a fuzzer feeds: every parser of untrusted bytes, from the bytes to the end. `cargo test`
//! replays the corpora in `fuzz/corpus` through these functions.

use crate::mmdet3d;
use crate::nuscenes::{TABLES, Tables};
use crate::pickle::{Pickle, View};
use crate::torch::{self, NAMES, NoTensors, zip};
use crate::webdataset::{Grouper, Walker};

/// Between the tables of one input to [`nuscenes`].
const TABLE_SEPARATOR: &[u8] = b"\n--- ";

/// Walks a tar.
pub fn tar(bytes: &[u8]) {
    let (mut walker, mut grouper) = (Walker::new(bytes.len() as u64), Grouper::default());
    while let Ok(Some((offset, length))) = walker.want() {
        let range = offset as usize..offset.saturating_add(length) as usize;
        let Some(fed) = bytes.get(range) else { return };
        match walker.feed(fed) {
            Ok(Some(member)) if grouper.push(&member).is_ok() => {}
            Ok(None) => {}
            _ => return,
        }
    }
    let _ = grouper.finish();
}

/// Reads a pickle, as an info file.
pub fn pickle(bytes: &[u8]) {
    // Whatever it is, reading must end; most inputs are errors.
    let _ = mmdet3d::parse(bytes);
}

/// Reads a file of `torch.save`: an archive, a legacy file, or a bare pickle.
pub fn torch(bytes: &[u8]) {
    let _ = torch::legacy(bytes);
    value(bytes);
    let tail = bytes.len().saturating_sub(zip::TAIL_BYTES_MAX as usize);
    let Ok(found) = zip::directory(&bytes[tail..], bytes.len() as u64) else { return };
    let range = found.offset as usize..(found.offset + found.bytes) as usize;
    let Ok(records) = zip::records(bytes.get(range).unwrap_or_default(), found) else { return };
    for record in records {
        let local = bytes.get(record.header as usize..).unwrap_or_default();
        let Ok(start) = zip::data_start(local, &record) else { continue };
        let end = start.saturating_add(record.bytes) as usize;
        value(bytes.get(start as usize..end).unwrap_or_default());
    }
}

fn value(bytes: &[u8]) {
    let Ok((pickle, _)) = Pickle::parse_symbolic(bytes, NAMES) else { return };
    let _ = torch::typed_json(pickle.root(), &[], &mut NoTensors);
    if let View::Object(object) = pickle.root().view() {
        let _ = torch::tensor_of(&object).map(|t| t.map(|t| t.is_contiguous()));
    }
    pickle.persistent().for_each(|id| drop(torch::storage_element(id)));
}

/// Reads the metadata of a distributed checkpoint.
pub fn dcp(bytes: &[u8]) {
    let _ = torch::dcp_metadata(bytes);
}

/// Reads tables, `--- name` before each, links them and asks for everything.
pub fn nuscenes(bytes: &[u8]) {
    let mut tables = Tables::default();
    for part in split(bytes) {
        let end = part.iter().position(|b| *b == b'\n').unwrap_or(part.len());
        let name = std::str::from_utf8(&part[..end]).unwrap_or_default();
        if TABLES.contains(&name) {
            let _ = tables.read(name, &part[end..]);
        }
    }
    let Ok(linked) = tables.link() else { return };
    for position in 0..linked.len() {
        let scene = linked.sample(position).and_then(|sample| linked.scene(sample));
        let _ = scene.map(|scene| linked.token(scene.token));
        for row in linked.annotations(position) {
            if let Some(annotation) = linked.annotation(row) {
                let _ = (linked.velocity_mps(annotation), linked.category(annotation));
            }
        }
    }
    for record in linked.channels().iter().flat_map(|channel| &channel.records) {
        if let Some(data) = linked.data(record.data) {
            let _ = (linked.filename(data), linked.ego_pose(data), linked.calibrated_sensor(data));
        }
    }
}

fn split(bytes: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    let mut start = 0;
    for at in 0..bytes.len() {
        if bytes[at..].starts_with(TABLE_SEPARATOR) {
            parts.push(&bytes[start..at]);
            start = at + TABLE_SEPARATOR.len();
        }
    }
    parts.push(&bytes[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    type Target = (&'static str, fn(&[u8]));

    #[test]
    fn the_corpora_replay_without_a_panic() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
        let targets: [Target; 5] = [
            ("tar", super::tar),
            ("pickle", super::pickle),
            ("nuscenes", super::nuscenes),
            ("torch", super::torch),
            ("dcp", super::dcp),
        ];
        for (name, target) in targets {
            let files = std::fs::read_dir(corpus.join(name)).unwrap();
            let mut count = 0;
            for file in files {
                let bytes = std::fs::read(file.unwrap().path()).unwrap();
                target(&bytes);
                // Every prefix too: a cut file is the commonest damage.
                (0..bytes.len().min(4096)).step_by(7).for_each(|cut| target(&bytes[..cut]));
                count += 1;
            }
            assert!(count >= 3, "{name}: {count} seeds");
        }
    }
}
