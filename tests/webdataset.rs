//! WebDataset tars: the real ones member by member, and tars made here byte by byte.

use std::fs;
use std::path::Path;

use drivetrain::index::{Codec, FieldKind, SampleTable, build_index};
use drivetrain::storage::StorageOptions;
use serde_json::json;

use crate::nuscenes::{expected, test_data};

fn index(path: &Path) -> drivetrain::Result<SampleTable> {
    build_index(path.to_str().unwrap(), "auto", None, &StorageOptions::default(), &())
}

#[test]
fn real_tars_have_the_expected_members() {
    let Some(data) = test_data() else { return };
    let expected = expected(&data);
    for name in ["mpdata.tar", "tendata.tar", "caltech256_256_ObjectCategories.tar"] {
        let e = &expected["files"][format!("wds/{name}")]["expected"];
        let t = index(&data.join("wds").join(name)).unwrap();
        assert_eq!(e["wds_samples_by_adjacent_key"], json!(t.len()), "{name}");
        let fields: Vec<_> = t.fields().iter().map(|f| f.name.as_str()).collect();
        assert_eq!(e["extensions"], json!(fields));
        let blobs: Vec<_> = (0..t.len()).map(|row| t.blob(0, row).unwrap().unwrap()).collect();
        assert_eq!(e["total_file_bytes"], json!(blobs.iter().map(|b| b.length).sum::<u64>()));
        for (row, head) in e["member_offsets_head"].as_array().unwrap().iter().enumerate() {
            let name = format!("{}.{}", t.key(row), fields[0]);
            assert_eq!(*head, json!([name, blobs[row].offset, blobs[row].length]));
        }
        let last = t.len() - 1;
        assert_eq!(e["last"], json!(format!("{}.{}", t.key(last), fields[0])));
        assert_eq!(t.scene(0), name);
    }
    let message = index(&data.join("wds/sample.tgz")).unwrap_err().to_string();
    assert!(message.contains("sample.tgz") && message.contains("decompress"), "{message}");
}

/// One member as POSIX writes it.
fn member(name: &str, kind: u8, contents: &[u8]) -> Vec<u8> {
    member_sized(name.as_bytes(), kind, contents, contents.len() as u64)
}

fn member_sized(name: &[u8], kind: u8, contents: &[u8], size: u64) -> Vec<u8> {
    let mut block = [0_u8; 512];
    block[..name.len()].copy_from_slice(name);
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut block);
    let mut all = block.to_vec();
    all.extend(contents);
    all.resize(all.len().next_multiple_of(512), 0);
    all
}

fn seal(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u32 = block[..512].iter().map(|b| u32::from(*b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (key, value) in records {
        let rest = format!(" {key}={value}\n");
        let mut len = rest.len() + 1;
        while format!("{len}{rest}").len() != len {
            len = format!("{len}{rest}").len();
        }
        body.extend(format!("{len}{rest}").into_bytes());
    }
    member("PaxHeaders/x", b'x', &body)
}

fn write(parts: &[Vec<u8>]) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.tar");
    fs::write(&path, parts.concat()).unwrap();
    (folder, path)
}

fn refusal(parts: &[Vec<u8>]) -> String {
    let (_folder, path) = write(parts);
    let message = index(&path).unwrap_err().to_string();
    assert!(message.contains("t.tar"), "{message}");
    message
}

fn end() -> Vec<u8> {
    vec![0; 1024]
}

#[test]
fn samples_fields_and_kinds() {
    let (_folder, path) = write(&[
        member("d/", b'5', b""),
        member("d/a.b/x.JPG", b'0', b"12345"),
        member("d/a.b/x.seg.png", b'0', b"1"),
        member("d/a.b/x.cls", 0, b"7"),
        member("README", b'0', b"no extension"),
        member("d/.hidden.txt", b'0', b"no key"),
        member("./y.json", b'0', b"{}"),
        member("y.npy", b'0', b""),
        member("link.txt", b'2', b""),
        member("d/a.b/x.txt", b'0', b"again"),
        end(),
    ]);
    let t = index(&path).unwrap();
    assert_eq!([0, 1, 2].map(|row| t.key(row)), ["d/a.b/x", "y", "d/a.b/x"]);
    let fields: Vec<_> = t.fields().iter().map(|f| (f.name.as_str(), f.kind)).collect();
    assert_eq!(
        fields,
        [
            ("cls", FieldKind::Text),
            ("jpg", FieldKind::Image),
            ("json", FieldKind::Text),
            ("npy", FieldKind::Tensor),
            ("seg.png", FieldKind::Image),
            ("txt", FieldKind::Text),
        ]
    );
    let jpg = t.blob(1, 0).unwrap().unwrap();
    let bytes = fs::read(&path).unwrap();
    let range = jpg.offset as usize..(jpg.offset + jpg.length) as usize;
    assert_eq!((&bytes[range], jpg.codec), (&b"12345"[..], Codec::Jpeg));
    assert_eq!(t.blob(1, 1).unwrap(), None);
    assert_eq!(t.blob(3, 1).unwrap().unwrap().length, 0);
    let notes = t.notes().join(" ");
    assert!(notes.contains("2 members without") && notes.contains("1 samples repeat"), "{notes}");
}

#[test]
fn long_names_sizes_and_cut_ends() {
    let long = format!("{}/x.txt", "d".repeat(150));
    let gnu = [format!("{long}\0").into_bytes()].concat();
    let huge = "9".repeat(30);
    let (_folder, path) = write(&[
        member("././@LongLink", b'L', &gnu),
        member(&long[..99], b'0', b"gnu"),
        pax(&[("path", "päx/y.txt"), ("size", "5"), ("comment", &huge)]),
        member_sized(b"short.txt", b'0', b"12345", 0),
        member("g.txt", b'0', b"z"),
    ]);
    let t = index(&path).unwrap();
    assert_eq!([0, 1, 2].map(|row| t.key(row)), [&long[..152], "päx/y", "g"]);
    assert_eq!(t.blob(0, 1).unwrap().unwrap().length, 5);
    // Base-256 says the same as octal.
    let mut base_256 = member("b.txt", b'0', b"abc");
    base_256[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
    seal(&mut base_256);
    let (_folder, path) = write(&[base_256, vec![0; 512]]);
    assert_eq!(index(&path).unwrap().blob(0, 0).unwrap().unwrap().length, 3);
}

#[test]
fn unsafe_names_are_refused() {
    let names: [&[u8]; 6] =
        [b"../x.txt", b"a/../x.txt", b"/etc/x.txt", b"\xff\xfe.txt", b"a//b.txt", b".."];
    for name in names {
        let message = refusal(&[member_sized(name, b'0', b"", 0), end()]);
        assert!(message.contains("unsafe name at byte 0"), "{message}");
    }
    let message = refusal(&[pax(&[("path", "../x.txt")]), member("ok.txt", b'0', b""), end()]);
    assert!(message.contains("unsafe name"), "{message}");
}

#[test]
fn damage_is_named_with_its_place() {
    let good = member("a.txt", b'0', &[7; 700]);
    let cut = refusal(&[good[..900].to_vec()]);
    assert!(cut.contains("tar member at byte 512") && cut.contains("700"), "{cut}");
    let half_header = refusal(&[good.clone(), good[..100].to_vec()]);
    assert!(half_header.contains("tar header at byte 1536"), "{half_header}");
    let mut flipped = good.clone();
    flipped[3] ^= 1;
    assert!(refusal(&[flipped]).contains("checksum"));
    let twice = refusal(&[member("a.txt", b'0', b"1"), member("a.txt", b'0', b"2")]);
    assert!(twice.contains("a second a.txt"), "{twice}");
    let joined = refusal(&[good.clone(), end(), good.clone(), end()]);
    assert!(joined.contains("zeros to the end"), "{joined}");
    let orphan = refusal(&[pax(&[("path", "x.txt")]), end()]);
    assert!(orphan.contains("announced"), "{orphan}");
    assert!(refusal(&[member("s.txt", b'S', b""), end()]).contains("type 'S'"));
    let sparse = refusal(&[pax(&[("GNU.sparse.major", "1")]), good]);
    assert!(sparse.contains("sparse"), "{sparse}");
    let gzip = refusal(&[vec![0x1f, 0x8b, 8, 0]]);
    assert!(gzip.contains("decompress"), "{gzip}");
}

#[test]
fn a_folder_of_tars_is_one_data_set() {
    let folder = tempfile::tempdir().unwrap();
    for shard in ["b.tar", "a.tar"] {
        let name = format!("{}0.txt", &shard[..1]);
        fs::write(folder.path().join(shard), member(&name, b'0', b"x")).unwrap();
    }
    let t = index(folder.path()).unwrap();
    assert_eq!((t.key(0), t.key(1), t.scene(1)), ("a0", "b0", "b.tar"));
    assert_eq!(t.source(1).unwrap().size_bytes, 1024);
}
