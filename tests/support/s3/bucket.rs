//! Objects and unfinished uploads of the in-process server, in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use xxhash_rust::xxh3::xxh3_128;

/// Smallest part that S3 takes, except the last one.
const PART_BYTES_MIN: usize = 5 << 20;

/// One stored object.
#[derive(Debug, Clone)]
pub struct Object {
    pub data: Bytes,
    /// A hash of the content, as S3's is: equal bytes have equal etags.
    pub etag: String,
    pub modified: SystemTime,
}

impl Object {
    pub fn new(data: Bytes) -> Self {
        let etag = format!("{:032x}", xxh3_128(&data));
        Self { data, etag, modified: SystemTime::now() }
    }
}

/// A multipart upload that is neither complete nor aborted.
#[derive(Debug)]
pub struct Upload {
    pub key: String,
    pub started: SystemTime,
    parts: BTreeMap<i32, Object>,
}

/// Why a request is refused, as S3 names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    NoSuchKey,
    NoSuchUpload,
    PreconditionFailed,
    InvalidPart,
    EntityTooSmall,
}

/// What must hold for an object to be stored.
#[derive(Debug, Clone, Default)]
pub struct Condition {
    /// Nothing of that name.
    pub absent: bool,
    /// The object of that name has this etag.
    pub etag: Option<String>,
}

/// One page of a listing.
#[derive(Debug, Default)]
pub struct Page {
    pub objects: Vec<(String, Object)>,
    pub folders: BTreeSet<String>,
    /// The key after which the next page starts.
    pub more_after: Option<String>,
}

/// One bucket.
#[derive(Debug, Default)]
pub struct Bucket {
    pub objects: BTreeMap<String, Object>,
    pub uploads: BTreeMap<String, Upload>,
    /// The keys and objects that stale listings show.
    frozen: BTreeMap<String, Object>,
    uploads_started: u64,
}

impl Bucket {
    /// Stale listings show what is there now.
    pub fn freeze(&mut self) {
        self.frozen = self.objects.clone();
    }

    pub fn put(&mut self, key: &str, data: Bytes, if_: &Condition) -> Result<String, Refusal> {
        let existing = self.objects.get(key);
        if if_.absent && existing.is_some() {
            return Err(Refusal::PreconditionFailed);
        }
        if let Some(wanted) = &if_.etag {
            match existing {
                None => return Err(Refusal::NoSuchKey),
                Some(object) if object.etag != *wanted => {
                    return Err(Refusal::PreconditionFailed);
                }
                Some(_) => {}
            }
        }
        let object = Object::new(data);
        let etag = object.etag.clone();
        self.objects.insert(key.into(), object);
        Ok(etag)
    }

    pub fn start_upload(&mut self, key: &str) -> String {
        self.uploads_started += 1;
        let id = format!("upload-{}", self.uploads_started);
        let started = SystemTime::now();
        self.uploads
            .insert(id.clone(), Upload { key: key.into(), started, parts: BTreeMap::new() });
        id
    }

    pub fn put_part(&mut self, id: &str, number: i32, data: Bytes) -> Result<String, Refusal> {
        let upload = self.uploads.get_mut(id).ok_or(Refusal::NoSuchUpload)?;
        let part = Object::new(data);
        let etag = part.etag.clone();
        upload.parts.insert(number, part);
        Ok(etag)
    }

    /// Joins the parts that the caller names, in its order.
    pub fn complete(
        &mut self,
        id: &str,
        named: &[(i32, Option<String>)],
        if_: &Condition,
    ) -> Result<String, Refusal> {
        let upload = self.uploads.get(id).ok_or(Refusal::NoSuchUpload)?;
        let mut whole = BytesMut::new();
        for (i, (number, etag)) in named.iter().enumerate() {
            let part = upload.parts.get(number).ok_or(Refusal::InvalidPart)?;
            if etag.as_ref().is_some_and(|etag| *etag != part.etag) {
                return Err(Refusal::InvalidPart);
            }
            if i + 1 < named.len() && part.data.len() < PART_BYTES_MIN {
                return Err(Refusal::EntityTooSmall);
            }
            whole.extend_from_slice(&part.data);
        }
        let key = upload.key.clone();
        let etag = self.put(&key, whole.freeze(), if_)?;
        self.uploads.remove(id);
        Ok(etag)
    }

    pub fn abort(&mut self, id: &str) -> Result<(), Refusal> {
        self.uploads.remove(id).map(|_| ()).ok_or(Refusal::NoSuchUpload)
    }

    /// Keys below `prefix` after `after`, those with the delimiter in their rest as folders.
    pub fn list(
        &self,
        prefix: &str,
        delimiter: Option<&str>,
        after: &str,
        most: usize,
        stale: bool,
    ) -> Page {
        let objects = if stale { &self.frozen } else { &self.objects };
        let mut page = Page::default();
        for (key, object) in objects.range(prefix.to_string()..) {
            let Some(rest) = key.strip_prefix(prefix) else { break };
            let cut = delimiter.and_then(|d| rest.find(d).map(|at| at + d.len()));
            let shown = cut.map_or(key.as_str(), |cut| &key[..prefix.len() + cut]);
            if shown <= after || page.folders.contains(shown) {
                continue;
            }
            if page.objects.len() + page.folders.len() == most {
                let last = page.objects.last().map(|(key, _)| key.clone());
                page.more_after = last.max(page.folders.last().cloned());
                return page;
            }
            if cut.is_some() {
                page.folders.insert(shown.to_string());
            } else {
                page.objects.push((key.clone(), object.clone()));
            }
        }
        page
    }
}

#[test]
fn pages_join_to_the_whole_listing() {
    let mut bucket = Bucket::default();
    for key in ["a", "b/1", "b/2", "c/1", "d", "e/f/g"] {
        bucket.put(key, Bytes::new(), &Condition::default()).unwrap();
    }
    let walk = |prefix: &str, delimiter, most| {
        let (mut names, mut after) = (Vec::new(), String::new());
        loop {
            let page = bucket.list(prefix, delimiter, &after, most, false);
            names.extend(page.objects.into_iter().map(|(key, _)| key).chain(page.folders));
            match page.more_after {
                Some(next) => after = next,
                None => return names,
            }
        }
    };
    for most in 1..8 {
        let mut top = walk("", Some("/"), most);
        top.sort();
        assert_eq!(top, ["a", "b/", "c/", "d", "e/"], "{most} a page");
        assert_eq!(walk("", None, most), ["a", "b/1", "b/2", "c/1", "d", "e/f/g"]);
        assert_eq!(walk("e/", Some("/"), most), ["e/f/"]);
    }
    assert!(bucket.list("", None, "", 9, true).objects.is_empty(), "never frozen");
}

#[test]
fn conditions_and_parts_are_those_of_s3() {
    let mut bucket = Bucket::default();
    let absent = Condition { absent: true, etag: None };
    let one = bucket.put("k", Bytes::from_static(b"1"), &absent).unwrap();
    let again = bucket.put("k", Bytes::from_static(b"2"), &absent);
    assert_eq!(again, Err(Refusal::PreconditionFailed));
    let matching = |etag: &str| Condition { absent: false, etag: Some(etag.into()) };
    let two = bucket.put("k", Bytes::from_static(b"2"), &matching(&one)).unwrap();
    let stale = bucket.put("k", Bytes::new(), &matching(&one));
    assert_eq!(stale, Err(Refusal::PreconditionFailed));
    assert_eq!(bucket.put("none", Bytes::new(), &matching(&two)), Err(Refusal::NoSuchKey));
    let id = bucket.start_upload("big");
    bucket.put_part(&id, 2, Bytes::from_static(b"tail")).unwrap();
    bucket.put_part(&id, 1, Bytes::from(vec![7; PART_BYTES_MIN])).unwrap();
    let none = Condition::default();
    let small = bucket.complete(&id, &[(2, None), (1, None)], &none);
    assert_eq!(small, Err(Refusal::EntityTooSmall));
    assert_eq!(bucket.complete(&id, &[(3, None)], &none), Err(Refusal::InvalidPart));
    bucket.complete(&id, &[(1, None), (2, None)], &none).unwrap();
    assert!(bucket.objects["big"].data.ends_with(b"\x07tail"));
    assert_eq!(bucket.complete(&id, &[(1, None)], &none), Err(Refusal::NoSuchUpload));
    assert_eq!(bucket.abort(&id), Err(Refusal::NoSuchUpload));
}
