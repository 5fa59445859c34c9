//! WebDataset tars: each sample is a row, each extension a field, each member a byte range.

use std::collections::BTreeMap;
use std::sync::Arc;

use drivetrain_formats::webdataset::{Grouper, Sample, Walker};

use super::builder::{IndexBuilder, IndexMeta};
use super::files::source_of;
use super::input::Input;
use super::inputs::Inputs;
use super::progress::Progress;
use super::schema::Layout;
use super::table::SampleTable;
use super::types::{BlobRef, Codec, FieldSpec, Source};
use crate::error::{Error, Result};
use crate::storage::Store;

/// Header reads fetch this much: small members share a read, large ones cost little more than
/// their header.
const CHUNK_BYTES: u64 = 64 << 10;
/// Different extensions in one data set.
const FIELDS_MAX: usize = 1024;
/// First bytes of a gzip stream.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Whether the name says a tar, and whether it is a compressed one.
pub(super) fn is_tar(name: &str) -> Option<bool> {
    let lower = name.to_ascii_lowercase();
    let compressed = [".tgz", ".tar.gz", ".tar.zst", ".tar.xz", ".tar.bz2"];
    if compressed.iter().any(|ending| lower.ends_with(ending)) {
        return Some(true);
    }
    lower.strip_suffix(".tar").map(|_| false)
}

pub(super) fn refuse_compressed(name: &str) -> Error {
    Error::Unsupported {
        what: format!("random access into the compressed tar {name}"),
        advice: "decompress it first (gunzip), JPEG and PNG members gain nothing from it".into(),
    }
}

struct Tar {
    source: Source,
    samples: Vec<Sample>,
}

/// Indexes the tars at `paths` below the store's root.
pub(super) fn build(
    store: &Arc<dyn Store>,
    paths: &[String],
    root: &str,
    progress: &dyn Progress,
) -> Result<SampleTable> {
    let keep_etag = store.capabilities().local_root.is_none();
    let (mut tars, mut inputs, mut notes) = (Vec::new(), Inputs::default(), Vec::new());
    progress.stage("indexing tars", Some(paths.len() as u64));
    for path in paths {
        let mut input = Input::with_chunk(store, path, CHUNK_BYTES)?;
        inputs.add(input.meta());
        let source = source_of(path, input.meta(), keep_etag);
        let samples = walk(&mut input, &mut notes)?;
        tars.push(Tar { source, samples });
        progress.advance(1);
    }
    let (fields, names) = fields(&tars)?;
    let mut builder = IndexBuilder::new(fields)?;
    for tar in tars {
        let scene = tar.source.uri.clone();
        let source = builder.add_source(tar.source);
        for sample in tar.samples {
            builder.begin(&sample.key, &scene, 0)?;
            for (extension, offset, length) in sample.members {
                let (codec, _) = Codec::from_extension(&extension);
                let Some(field) = names.get(&extension) else { continue };
                let blob = BlobRef { source, offset, length, codec };
                builder.blob(*field, &blob, 0, &[])?;
            }
        }
    }
    let format = "webdataset".to_string();
    builder.finish(&IndexMeta { root: root.to_string(), format, inputs: inputs.to_json(), notes })
}

fn walk(input: &mut Input, notes: &mut Vec<String>) -> Result<Vec<Sample>> {
    let name = input.name().to_string();
    if input.exact(0, GZIP_MAGIC.len() as u64)? == GZIP_MAGIC {
        return Err(refuse_compressed(&name));
    }
    let format = |e| Error::Format { file: name.clone(), source: Box::new(e) };
    let (mut walker, mut grouper) = (Walker::new(input.size_bytes()), Grouper::default());
    let mut samples = Vec::new();
    while let Some((offset, length)) = walker.want().map_err(format)? {
        let bytes = input.exact(offset, length)?;
        if let Some(member) = walker.feed(bytes).map_err(format)? {
            samples.extend(grouper.push(&member).map_err(format)?);
        }
    }
    samples.extend(grouper.finish());
    if !walker.end_was_marked() {
        notes.push(format!(
            "{name}: ends without two zero blocks, so members may have been cut off"
        ));
    }
    if grouper.skipped() > 0 {
        notes
            .push(format!("{name}: {} members without extension are no sample", grouper.skipped()));
    }
    if grouper.reopened() > 0 {
        let n = grouper.reopened();
        notes
            .push(format!("{name}: {n} samples repeat a key that came before with others between"));
    }
    Ok(samples)
}

type FieldList = Vec<(FieldSpec, Layout)>;

/// A field per extension, by name.
fn fields(tars: &[Tar]) -> Result<(FieldList, BTreeMap<String, usize>)> {
    let mut names = BTreeMap::new();
    for sample in tars.iter().flat_map(|tar| &tar.samples) {
        for (extension, ..) in &sample.members {
            if !names.contains_key(extension) {
                names.insert(extension.clone(), 0);
            }
        }
        if names.len() > FIELDS_MAX {
            return Err(Error::invalid(
                "extensions in the tars",
                format!("at most {FIELDS_MAX}; everything after the first dot is the extension"),
                format!("{} by {}", names.len(), sample.key),
            ));
        }
    }
    names.values_mut().enumerate().for_each(|(at, field)| *field = at);
    let spec = |extension: &String| {
        let (_, kind) = Codec::from_extension(extension);
        // The table's own columns keep their names.
        let own = matches!(extension.as_str(), "key" | "scene" | "timestamp_ns" | "");
        let name = if own { format!(".{extension}") } else { extension.clone() };
        FieldSpec { name, kind, frame: None, columns: Vec::new(), extra: BTreeMap::new() }
    };
    Ok((names.keys().map(|extension| (spec(extension), Layout::Blob)).collect(), names))
}
