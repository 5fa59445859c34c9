//! Pickles written by CPython, name by name, and that no bytes panic.

use proptest::prelude::*;

use super::*;

/// `pickle.dumps({"a": [1, -2, 3.5, None, True, "é", b"\xff"], "t": (1, 2)}, 2)`
const PROTOCOL_2: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xff\
G@\x0c\x00\x00\x00\x00\x00\x00N\x88X\x02\x00\x00\x00\xc3\xa9q\x03c_codecs\nencode\nq\x04X\x02\x00\
\x00\x00\xc3\xbfq\x05X\x06\x00\x00\x00latin1q\x06\x86q\x07Rq\x08eX\x01\x00\x00\x00tq\tK\x01K\x02\
\x86q\nu.";

#[test]
fn plain_values_of_protocol_2() {
    let p = Pickle::parse(PROTOCOL_2).unwrap();
    let list: Vec<_> = p.root().get("a").unwrap().items().unwrap().collect();
    assert_eq!((list[0].as_i64(), list[1].as_i64()), (Some(1), Some(-2)));
    assert_eq!((list[2].as_f64(), list[3].is_none()), (Some(3.5), true));
    assert_eq!((list[4].as_i64(), list[5].as_str()), (Some(1), Some("é")));
    assert_eq!(list[6].kind(), "bytes");
    assert_eq!(p.root().get("t").unwrap().numbers(), Some([1.0, 2.0]));
    assert_eq!(p.root().get("t").unwrap().numbers::<3>(), None);
    assert_eq!(p.root().pairs().unwrap().len(), 2);
}

/// Protocol 4 with a frame, short text, memo without numbers, and a name from the stack.
#[test]
fn frames_and_stack_names_of_protocol_4() {
    let mut bytes = b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00".to_vec();
    bytes.extend(b"\x8c\x01x\x94]\x94(\x8a\x02\x00\x01\x8a\x01\xff\x8a\x00e\x86.");
    let p = Pickle::parse(&bytes).unwrap();
    let items: Vec<_> = p.root().items().unwrap().collect();
    assert_eq!(items[0].as_str(), Some("x"));
    assert_eq!(items[1].numbers(), Some([256.0, -1.0, 0.0]));
    let name = b"\x80\x04\x8c\x02os\x8c\x06system\x93.";
    assert!(Pickle::parse(name).unwrap_err().to_string().contains("os.system"));
}

#[test]
fn other_names_and_operations_are_refused_by_name() {
    let error = Pickle::parse(b"\x80\x02cposix\nsystem\n.").unwrap_err();
    assert!(error.to_string().contains("posix.system"), "{error}");
    let error = Pickle::parse(b"\x80\x02Pid\n.").unwrap_err();
    assert!(error.to_string().contains("0x50 at byte 2"), "{error}");
    let error = Pickle::parse(b"\x80\x09.").unwrap_err();
    assert!(error.to_string().contains("protocol 9"), "{error}");
}

#[test]
fn a_value_in_itself_ends() {
    let p = Pickle::parse(b"\x80\x02]q\x00h\x00a.").unwrap();
    assert_eq!(p.root().items().unwrap().len(), 1);
    assert_eq!(p.root().numbers::<4>(), None);
}

#[test]
fn broken_stacks_are_errors() {
    let broken: [&[u8]; 10] =
        [b"", b".", b"\x80", b"(.", b"K\x01(.", b"a.", b"t.", b"R.", b"]K\x01u.", b"h\x05."];
    for bytes in broken {
        assert!(Pickle::parse(bytes).is_err(), "{bytes:?}");
    }
    let long = b"X\xff\xff\xff\x7fabc";
    assert!(matches!(Pickle::parse(long), Err(Error::Truncated { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Pickle::parse(&bytes);
    }

    #[test]
    fn no_operations_panic(ops in proptest::collection::vec(
        proptest::sample::select(&b"(012N]}ltaeus\x85\x86\x87\x88\x94hqRb)d."[..]), 0..60,
    )) {
        let _ = Pickle::parse(&ops);
    }

    #[test]
    fn damaged_pickles_never_panic(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = PROTOCOL_2.to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(p) = Pickle::parse(&bytes) {
            let _ = (p.root().get("a").map(Value::numbers::<7>), p.root().kind());
        }
    }
}
