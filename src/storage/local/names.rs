//! From object paths to files, and listing.
//!
//! A path is relative, `/`-separated, and stays below the root: `..`, `.`, empty and absolute
//! parts are refused. Symbolic links inside the root are followed, since data sets are often
//! assembled from them.

use std::fs::{self, DirEntry, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::sys;
use crate::error::{Error, Result};
use crate::storage::ObjectMeta;

/// Longest path of an object, as the kernel limits it.
const PATH_BYTES_MAX: usize = 4095;
/// Deepest folder that listing enters.
const DEPTH_MAX: usize = 64;
/// Most objects one listing returns; more is a mistake in the prefix.
const LIST_OBJECTS_MAX: usize = 50_000_000;

/// The file of an object path.
pub fn object_path(root: &Path, path: &str) -> Result<PathBuf> {
    if path.is_empty() {
        return Err(refused(path));
    }
    folder_path(root, path)
}

/// The folder of a prefix; `""` is the root, one trailing `/` is fine.
pub fn folder_path(root: &Path, path: &str) -> Result<PathBuf> {
    let trimmed = path.strip_suffix('/').unwrap_or(path);
    if path.is_empty() {
        return Ok(root.to_path_buf());
    }
    let bad = |part: &str| part.is_empty() || part == "." || part == ".." || part.contains('\0');
    if path.len() > PATH_BYTES_MAX || trimmed.split('/').any(bad) {
        return Err(refused(path));
    }
    Ok(root.join(trimmed))
}

fn refused(path: &str) -> Error {
    let expected = "a relative path below the root without '..', '.' or empty parts";
    Error::invalid("object path", expected, format!("{path:?}"))
}

/// Metadata of a regular file; a folder is not an object.
pub fn metadata(path: &Path) -> Result<Metadata> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_file() => Ok(meta),
        Ok(_) => Err(missing(path, "it is not a regular file")),
        Err(e) => Err(not_found_or(path, "stat", e)),
    }
}

/// An OS error, as [`Error::NotFound`] where it means that.
pub fn not_found_or(path: &Path, op: &'static str, e: io::Error) -> Error {
    match e.kind() {
        io::ErrorKind::NotFound => missing(path, "check the name and the root"),
        io::ErrorKind::NotADirectory => missing(path, "a part of the path is a file"),
        _ => Error::io(op, path.display().to_string(), e),
    }
}

fn missing(path: &Path, advice: &str) -> Error {
    Error::NotFound { what: path.display().to_string(), advice: advice.into() }
}

/// All regular files below `prefix`, sorted by path; none if the folder does not exist.
pub fn list(root: &Path, prefix: &str) -> Result<Vec<ObjectMeta>> {
    let folder = folder_path(root, prefix)?;
    let mut walk = Walk { found: Vec::new(), ancestors: Vec::new() };
    walk.enter(&folder, prefix.strip_suffix('/').unwrap_or(prefix))?;
    walk.found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    Ok(walk.found)
}

struct Walk {
    found: Vec<ObjectMeta>,
    /// (device, inode) of the folders above, so that a link to one of them is not entered again.
    ancestors: Vec<(u64, u64)>,
}

impl Walk {
    fn enter(&mut self, folder: &Path, path: &str) -> Result<()> {
        let Some(identity) = folder_identity(folder)? else { return Ok(()) };
        if self.ancestors.contains(&identity) {
            return Ok(());
        }
        if self.ancestors.len() == DEPTH_MAX {
            let found = format!("a deeper one: {}", folder.display());
            return Err(Error::invalid("folder", format!("at most {DEPTH_MAX} levels"), found));
        }
        self.ancestors.push(identity);
        for entry in entries(folder)? {
            self.visit(&entry?, path)?;
        }
        self.ancestors.pop();
        Ok(())
    }

    fn visit(&mut self, entry: &Entry, parent: &str) -> Result<()> {
        let path =
            if parent.is_empty() { entry.name.clone() } else { format!("{parent}/{}", entry.name) };
        // Gone since it was listed, or a link to nowhere: not an object.
        let Ok(meta) = fs::metadata(&entry.path) else { return Ok(()) };
        if meta.is_dir() {
            return self.enter(&entry.path, &path);
        }
        if meta.is_file() {
            if self.found.len() == LIST_OBJECTS_MAX {
                let expected = format!("at most {LIST_OBJECTS_MAX} objects below a prefix");
                return Err(Error::invalid("list", expected, "more"));
            }
            self.found.push(sys::object_meta(&path, &meta));
        }
        Ok(())
    }
}

fn folder_identity(folder: &Path) -> Result<Option<(u64, u64)>> {
    match fs::metadata(folder) {
        Ok(meta) if meta.is_dir() => Ok(Some((meta.dev(), meta.ino()))),
        Ok(_) => Ok(None),
        Err(e) if is_absent(&e) => Ok(None),
        Err(e) => Err(Error::io("list", folder.display().to_string(), e)),
    }
}

fn is_absent(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

struct Entry {
    name: String,
    path: PathBuf,
}

fn entries(folder: &Path) -> Result<impl Iterator<Item = Result<Entry>>> {
    let shown = folder.display().to_string();
    let listed = fs::read_dir(folder).map_err(|e| Error::io("list", shown.clone(), e))?;
    Ok(listed.map(move |entry| {
        let entry = entry.map_err(|e| Error::io("list", shown.clone(), e))?;
        named(&entry)
    }))
}

fn named(entry: &DirEntry) -> Result<Entry> {
    let path = entry.path();
    let name = entry.file_name().into_string().map_err(|name| {
        let found = format!("{} in {}", name.display(), path.display());
        Error::invalid("file name", "UTF-8", found)
    })?;
    Ok(Entry { name, path })
}

/// Names directly below `prefix`, folders with a trailing `/`, sorted.
pub fn list_names(root: &Path, prefix: &str) -> Result<Vec<String>> {
    let folder = folder_path(root, prefix)?;
    if folder_identity(&folder)?.is_none() {
        return Ok(Vec::new());
    }
    let mut names = Vec::new();
    for entry in entries(&folder)? {
        let mut entry = entry?;
        let Ok(meta) = fs::metadata(&entry.path) else { continue };
        if meta.is_dir() {
            entry.name.push('/');
        }
        names.push(entry.name);
    }
    names.sort_unstable();
    Ok(names)
}

/// Creates the folders above `file` and returns those that had to be made, outermost first.
pub fn make_folders(file: &Path) -> Result<Vec<PathBuf>> {
    let Some(parent) = file.parent() else { return Ok(Vec::new()) };
    let made: Vec<_> = parent.ancestors().take_while(|p| !p.exists()).map(PathBuf::from).collect();
    if !made.is_empty() {
        fs::create_dir_all(parent).map_err(|e| sys::write_error("create folder", parent, 0, e))?;
    }
    Ok(made.into_iter().rev().collect())
}

/// Removes a file; a missing one is fine.
pub fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if !is_absent(&e) => Err(Error::io("delete", path.display().to_string(), e)),
        _ => Ok(()),
    }
}

/// Removes a folder if it is empty; a missing or filled one is fine.
pub fn remove_folder(path: &Path) -> Result<()> {
    match fs::remove_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty || is_absent(&e) => Ok(()),
        Err(e) => Err(Error::io("remove folder", path.display().to_string(), e)),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_below_the_root() {
        let root = Path::new("/data");
        for bad in ["", "/etc/passwd", "a/../b", "..", "a//b", "./a", "a/.", "a\0b", "a//"] {
            assert!(object_path(root, bad).is_err(), "{bad:?}");
        }
        assert_eq!(object_path(root, "a/..b/c.").unwrap(), Path::new("/data/a/..b/c."));
        assert_eq!(folder_path(root, "a/").unwrap(), Path::new("/data/a"));
        assert_eq!(folder_path(root, "").unwrap(), root);
    }

    #[test]
    fn listing_is_sorted_by_path_and_survives_link_loops() {
        let root = tempfile::tempdir().unwrap();
        for name in ["b/x", "b.txt", "a/y/z", "b-1"] {
            let file = root.path().join(name);
            make_folders(&file).unwrap();
            fs::write(file, name).unwrap();
        }
        std::os::unix::fs::symlink(root.path(), root.path().join("a/up")).unwrap();
        std::os::unix::fs::symlink("nowhere", root.path().join("dangling")).unwrap();
        let listed = list(root.path(), "").unwrap();
        let paths: Vec<_> = listed.iter().map(|o| o.path.as_str()).collect();
        assert_eq!(paths, ["a/y/z", "b-1", "b.txt", "b/x"]);
        assert_eq!(list_names(root.path(), "").unwrap(), ["a/", "b-1", "b.txt", "b/"]);
        assert_eq!(list(root.path(), "none").unwrap(), []);
        assert_eq!(list(root.path(), "a/y").unwrap()[0].path, "a/y/z");
    }
}
