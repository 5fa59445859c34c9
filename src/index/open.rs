//! From a URI to a table: an index file is opened, anything else is indexed once and the index is
//! kept in the user's cache (or where the caller says).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::inputs::Inputs;
use super::progress::Progress;
use super::schema::META_INPUTS;
use super::table::SampleTable;
use super::{INDEX_SUFFIX, mmdet3d, nuscenes, transport, webdataset};
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::{StorageOptions, Store, open_store};

/// What is to be indexed: a root to which sources are relative, and what in it.
#[derive(Debug)]
struct Target {
    store: Arc<dyn Store>,
    root: String,
    what: What,
}

#[derive(Debug, PartialEq, Eq)]
enum What {
    /// nuScenes tables in this folder below the root.
    NuScenes { folder: String },
    /// These tars below the root, sorted.
    WebDataset { tars: Vec<String>, name: String },
    /// This info file below the root.
    Mmdet3d { path: String },
}

impl What {
    /// Name of the index file, and of the format as it is stored.
    fn name(&self) -> String {
        match self {
            Self::NuScenes { folder } if folder.is_empty() => "nuscenes".into(),
            Self::NuScenes { folder } => format!("nuscenes-{folder}"),
            Self::WebDataset { name, .. } => format!("webdataset-{name}"),
            Self::Mmdet3d { path } => format!("mmdet3d-{path}"),
        }
    }
}

/// Builds the index of the data set at `uri`, writes it to `out` if given, and returns it (opened
/// from there). `format` is `auto`, `nuscenes` (or `nuscenes:<table folder>`),
/// `webdataset` or `mmdet3d`.
///
/// Blocks; not for the runtime's own threads.
pub fn build_index(
    uri: &str,
    format: &str,
    out: Option<&Path>,
    options: &StorageOptions,
    progress: &dyn Progress,
) -> Result<SampleTable> {
    let target = find(uri, format, options)?;
    let table = build(&target, &target.root, progress)?;
    let Some(out) = out else { return Ok(table) };
    write_and_open(&target, &table, out)
}

/// Opens what `uri` names: an index file, or a data set whose index is opened from `index` (or the
/// cache) and made there if it is missing or older than the data set's tables.
///
/// Blocks; not for the runtime's own threads.
pub fn open_dataset(
    uri: &str,
    format: &str,
    index: Option<&Path>,
    options: &StorageOptions,
) -> Result<SampleTable> {
    let progress: &dyn Progress = &();
    if uri.ends_with(INDEX_SUFFIX) && !uri.contains("://") {
        return SampleTable::open(Path::new(uri), None);
    }
    if transport::is_compressed(uri) && !uri.contains("://") {
        return transport::open(Path::new(uri));
    }
    let target = find(uri, format, options)?;
    let path = index.map_or_else(|| cache_path(&target), |path| Some(path.to_path_buf()));
    let Some(path) = path else { return build(&target, &target.root, progress) };
    if let Some(table) = open_fresh(&target, &path)? {
        return Ok(table);
    }
    let table = build(&target, &target.root, progress)?;
    match write_and_open(&target, &table, &path) {
        // A cache that cannot be written costs time, not correctness.
        Err(e) if index.is_none() => {
            tracing::warn!("the index is not kept: {e}");
            Ok(table)
        }
        result => result,
    }
}

/// The index at `path`, if it is one and the files it was made from are unchanged.
fn open_fresh(target: &Target, path: &Path) -> Result<Option<SampleTable>> {
    if !path.exists() {
        return Ok(None);
    }
    // A damaged or older index is rebuilt; a file that is no index at all stays: it is not ours.
    let table = match SampleTable::open(path, Some(&target.root)) {
        Ok(table) => table,
        Err(Error::Corrupt { .. }) if is_ours(path) => return Ok(None),
        Err(e) => return Err(e),
    };
    let fresh = Inputs::are_fresh(table.metadata(META_INPUTS), &target.store)?;
    Ok(fresh.then_some(table))
}

fn is_ours(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.ends_with(INDEX_SUFFIX))
}

fn build(target: &Target, root: &str, progress: &dyn Progress) -> Result<SampleTable> {
    match &target.what {
        What::NuScenes { folder } => nuscenes::build(&target.store, folder, root, progress),
        What::WebDataset { tars, .. } => webdataset::build(&target.store, tars, root, progress),
        What::Mmdet3d { path } => mmdet3d::build(&target.store, path, root, progress),
    }
}

/// An index that lies in its data's root says so relatively, so that both can be moved together.
fn write_and_open(target: &Target, table: &SampleTable, path: &Path) -> Result<SampleTable> {
    let root = target.store.capabilities().local_root;
    let parent = path.parent().and_then(|p| std::path::absolute(p).ok());
    let inside = root.is_some_and(|root| parent.is_some_and(|parent| parent == root));
    let table = if inside { table.with_root(".")? } else { table.clone() };
    table.write(path)?;
    SampleTable::open(path, None)
}

/// `$XDG_CACHE_HOME/drivetrain/<hash of the root>/<name>.index.arrow`, or below `~/.cache`.
fn cache_path(target: &Target) -> Option<PathBuf> {
    let hash = xxhash_rust::xxh3::xxh3_128(target.root.as_bytes());
    let name = format!("{}{INDEX_SUFFIX}", target.what.name());
    Some(cache_base()?.join(format!("{hash:032x}")).join(name))
}

/// Where indexes are kept that nobody said where to keep.
pub(super) fn cache_base() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME")
        .filter(|p| p.is_absolute())
        .or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("drivetrain"))
}

fn find(uri: &str, format: &str, options: &StorageOptions) -> Result<Target> {
    let (format, version) = match format.split_once(':') {
        Some((format, version)) => (format, Some(version)),
        None => (format, None),
    };
    if !FORMATS.contains(&format) {
        return Err(Error::invalid("format", FORMATS.join(", "), format));
    }
    let wants = |name: &str| format == "auto" || format == name;
    let uri = uri.trim_end_matches('/');
    let base = uri.rsplit('/').next().unwrap_or(uri);
    match webdataset::is_tar(base) {
        Some(true) => return Err(webdataset::refuse_compressed(uri)),
        Some(false) if wants("webdataset") => {
            let (store, root) = parent(uri, options)?;
            let what = What::WebDataset { tars: vec![base.to_string()], name: base.to_string() };
            return Ok(Target { store, root, what });
        }
        _ => {}
    }
    if wants("mmdet3d") && base.strip_suffix(".pkl").is_some() {
        let (store, root) = parent(uri, options)?;
        return Ok(Target { store, root, what: What::Mmdet3d { path: base.to_string() } });
    }
    find_in_folder(uri, &wants, version, options)
}

/// Formats by the names that `format` accepts.
const FORMATS: [&str; 4] = ["auto", "nuscenes", "webdataset", "mmdet3d"];

/// Store over the folder that holds the file `uri`.
fn parent(uri: &str, options: &StorageOptions) -> Result<(Arc<dyn Store>, String)> {
    let folder = match uri.rsplit_once('/') {
        Some(("", _)) => "/",
        Some((folder, _)) => folder,
        None => ".",
    };
    let store = open_store(folder, options)?;
    let root = store.uri().to_string();
    Ok((store, root))
}

fn find_in_folder(
    uri: &str,
    wants: &dyn Fn(&str) -> bool,
    version: Option<&str>,
    options: &StorageOptions,
) -> Result<Target> {
    let store = open_store(if uri.is_empty() { "/" } else { uri }, options)?;
    let root = store.uri().to_string();
    if wants("nuscenes")
        && let Some(folder) = nuscenes::find_tables(&store, version)?
    {
        // Given the table folder itself, the data lies beside it.
        let (store, root, folder) = match uri.rsplit_once('/') {
            Some((_, base)) if folder.is_empty() => {
                let (store, root) = parent(uri, options)?;
                (store, root, base.to_string())
            }
            _ => (store, root, folder),
        };
        return Ok(Target { store, root, what: What::NuScenes { folder } });
    }
    if wants("webdataset") {
        let names = block_on(store.list_names(""))??;
        let is_tar = |name: &&String| webdataset::is_tar(name) == Some(false);
        let mut tars: Vec<_> = names.iter().filter(is_tar).cloned().collect();
        tars.sort();
        if !tars.is_empty() {
            let what = What::WebDataset { tars, name: "folder".into() };
            return Ok(Target { store, root, what });
        }
        if let Some(name) = names.iter().find(|name| webdataset::is_tar(name).is_some()) {
            return Err(webdataset::refuse_compressed(name));
        }
    }
    Err(Error::NotFound {
        what: format!("a data set in {root}"),
        advice: "give a folder with nuScenes tables (v1.0-…/) or tars, a .tar, or an info .pkl"
            .into(),
    })
}
