//! Names, and that no bytes panic or loop. The engine's tests cover whole tars.

use proptest::prelude::*;

use super::*;

/// Feeds a tar to the walker as a reader of a file would; the number of members.
fn walk(bytes: &[u8]) -> crate::Result<usize> {
    let mut walker = Walker::new(bytes.len() as u64);
    let mut grouper = Grouper::default();
    let (mut members, mut steps) = (0, 0);
    while let Some((offset, length)) = walker.want()? {
        let range = offset as usize..(offset + length) as usize;
        if let Some(member) = walker.feed(&bytes[range])? {
            assert!(member.offset + member.length <= bytes.len() as u64);
            grouper.push(&member)?;
            members += 1;
        }
        steps += 1;
        assert!(steps <= bytes.len() / 512 + 1, "the walker moves on");
    }
    Ok(members)
}

fn block(name: &[u8], kind: u8, size: &[u8]) -> Vec<u8> {
    let mut block = vec![0_u8; 512];
    block[..name.len()].copy_from_slice(name);
    block[124..124 + size.len()].copy_from_slice(size);
    block[156] = kind;
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

#[test]
fn keys_end_at_the_first_dot_of_the_base_name() {
    assert_eq!(split_name("a.b/c.seg.PNG"), Some(("a.b/c", "seg.png".into())));
    assert_eq!(split_name("000.jpg"), Some(("000", "jpg".into())));
    assert_eq!(split_name("a/.x.txt"), None);
    assert_eq!(split_name("README"), None);
    assert_eq!(split_name("x."), Some(("x", String::new())));
}

#[test]
fn sizes_past_the_file_are_truncation() {
    let octal = block(b"a.txt", b'0', b"77777777777");
    assert!(walk(&octal).unwrap_err().to_string().contains("tar member"));
    let base_256 = block(b"a.txt", b'0', &[0x80, 0, 0, 0, 0x7f, 255, 255, 255, 255, 255, 255, 255]);
    assert!(walk(&base_256).unwrap_err().to_string().contains("truncated"));
    let negative = block(b"a.txt", b'0', &[0xff; 12]);
    assert!(walk(&negative).is_err());
    let extension = block(b"x", b'x', b"77777777777");
    assert!(walk(&extension).unwrap_err().to_string().contains("limit"));
    assert!(walk(&[]).unwrap_err().to_string().contains("tar header"));
    assert_eq!(walk(&block(b"dir/", b'5', b"00000000000")), Ok(0));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2048)) {
        let _ = walk(&bytes);
    }

    #[test]
    fn sealed_headers_never_panic(
        parts in proptest::collection::vec(
            (
                proptest::collection::vec(any::<u8>(), 0..90),
                proptest::sample::select(&b"0x5LKg27S"[..]),
                proptest::collection::vec(proptest::sample::select(&b"01\0 \x80\xff7"[..]), 0..12),
                proptest::collection::vec(any::<u8>(), 0..600),
            ),
            1..6,
        ),
    ) {
        let mut bytes = Vec::new();
        for (name, kind, size, body) in parts {
            bytes.extend(block(&name, kind, &size));
            bytes.extend(body);
        }
        let _ = walk(&bytes);
    }
}
