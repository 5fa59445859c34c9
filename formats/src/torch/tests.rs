//! Pickles and archives that torch 2.15 wrote, byte for byte, and damaged ones.

use super::*;
use crate::pickle::Pickle;

fn plain(bytes: &[u8]) -> crate::Result<String> {
    let (pickle, _) = Pickle::parse_symbolic(bytes, NAMES)?;
    typed_json(pickle.root(), &[], &mut NoTensors)
}

/// `pickle.dumps({"a": (1, -2.5), 5: [None, True], "~k": OrderedDict(x=torch.Size([2, 3])),
///  "b": b"\xff\x00\x01", "big": 1 << 70, "neg": -(1 << 70), "d": torch.bfloat16}, 2)`
const PLAIN: &[u8] =
    b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01G\xc0\x04\x00\x00\x00\x00\x00\x00\
\x86q\x02K\x05]q\x03(N\x88eX\x02\x00\x00\x00~kq\x04ccollections\nOrderedDict\nq\x05)Rq\x06X\x01\
\x00\x00\x00xq\x07ctorch\nSize\nq\x08K\x02K\x03\x86q\t\x85q\nRq\x0bsX\x01\x00\x00\x00bq\x0cc_codecs\
\nencode\nq\rX\x04\x00\x00\x00\xc3\xbf\x00\x01q\x0eX\x06\x00\x00\x00latin1q\x0f\x86q\x10Rq\x11X\x03\
\x00\x00\x00bigq\x12\x8a\t\x00\x00\x00\x00\x00\x00\x00\x00@X\x03\x00\x00\x00negq\x13\x8a\t\x00\x00\
\x00\x00\x00\x00\x00\x00\xc0X\x01\x00\x00\x00dq\x14ctorch\nbfloat16\nq\x15u.";

#[test]
fn plain_values_become_typed_json() {
    let expected = concat!(
        r#"{"a":{"~tuple":[1,-2.5]},"~5":[null,true],"~~k":{"~odict":{"x":{"~size":[2,3]}}},"#,
        r#""b":{"~bytes":"/wAB"},"big":{"~int":"0x400000000000000000"},"#,
        r#""neg":{"~int":"-0x400000000000000000"},"d":{"~dtype":"bfloat16"}}"#
    );
    assert_eq!(plain(PLAIN).unwrap(), expected);
}

#[test]
fn other_names_and_deep_or_repeated_values_are_refused() {
    let error = plain(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.").unwrap_err();
    assert!(error.to_string().contains("os.system"), "{error}");
    let deep: Vec<u8> = [vec![b']'; 60], vec![b'a'; 59], vec![b'.']].concat();
    assert!(plain(&deep).unwrap_err().to_string().contains("deep"));
    // Ten values each of which holds ten times the one before: 10^10 values in some bytes.
    let mut bomb = b"\x80\x02]q\x00".to_vec();
    for level in 0..10_u8 {
        bomb.extend([b']', b'q', level + 1, b'(']);
        (0..10).for_each(|_| bomb.extend([b'h', level]));
        bomb.push(b'e');
    }
    bomb.push(b'.');
    assert!(plain(&bomb).is_err());
}

#[test]
fn a_tensor_outside_its_storage_is_refused() {
    let head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage\
ctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ";
    let tensor = |offset: u8, rows: u8| {
        let mut bytes = head.to_vec();
        bytes.extend([b'K', offset, b'K', rows, b'K', 3, 0x86, b'K', 3, b'K', 1, 0x86]);
        bytes.extend(b"\x89ccollections\nOrderedDict\n)RtR.");
        let (pickle, _) = Pickle::parse_symbolic(&bytes, NAMES).unwrap();
        let crate::pickle::View::Object(object) = pickle.root().view() else { panic!() };
        tensor_of(&object)
    };
    let good = tensor(0, 2).unwrap().unwrap();
    assert_eq!((good.shape.as_slice(), good.storage.bytes), (&[2, 3][..], 24));
    assert!(good.is_contiguous() && good.dtype.name == "F32");
    assert!(tensor(1, 2).unwrap_err().to_string().contains("28 bytes of 24"));
    assert!(tensor(0, 200).is_err());
}

fn archive(names: &[&str], method: u8) -> Vec<u8> {
    let (mut out, mut central) = (Vec::new(), Vec::new());
    for name in names {
        let at = out.len() as u32;
        out.extend(b"PK\x03\x04\x00\x00\x00\x00");
        out.extend([method, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 5, 0, 0, 0]);
        out.extend([name.len() as u8, 0, 0, 0]);
        out.extend(name.bytes());
        out.extend(b"12345");
        central.extend(b"PK\x01\x02\x00\x00\x00\x00\x00\x00");
        central.extend([method, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 5, 0, 0, 0]);
        central.extend([name.len() as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        central.extend(at.to_le_bytes());
        central.extend(name.bytes());
    }
    let at = out.len() as u32;
    let n = names.len() as u8;
    out.extend(&central);
    out.extend([b"PK\x05\x06\x00\x00\x00\x00".as_slice(), &[n, 0, n, 0]].concat());
    out.extend((central.len() as u32).to_le_bytes());
    out.extend(at.to_le_bytes());
    out.extend([0, 0]);
    out
}

fn records_of(bytes: &[u8]) -> crate::Result<Vec<zip::Record>> {
    let tail = bytes.len().saturating_sub(zip::TAIL_BYTES_MAX as usize);
    let found = zip::directory(&bytes[tail..], bytes.len() as u64)?;
    let range = found.offset as usize..(found.offset + found.bytes) as usize;
    zip::records(&bytes[range], found)
}

#[test]
fn archives_are_read_and_hostile_ones_refused() {
    let good = archive(&["x/data.pkl", "x/data/0"], 0);
    let all = records_of(&good).unwrap();
    assert_eq!(all.iter().map(|r| r.name.as_str()).collect::<Vec<_>>(), ["x/data.pkl", "x/data/0"]);
    let start = zip::data_start(&good[all[1].header as usize..], &all[1]).unwrap() as usize;
    assert_eq!(&good[start..start + 5], b"12345");
    for name in ["../x", "/x", "a/../b", "a\\b", ""] {
        assert!(records_of(&archive(&[name], 0)).is_err(), "{name:?}");
    }
    let packed = records_of(&archive(&["x"], 8)).unwrap_err();
    assert!(packed.to_string().contains("method 8"), "{packed}");
    for cut in 0..good.len() {
        assert!(records_of(&good[..cut]).is_err(), "cut at {cut}");
    }
    // A record that claims the bytes of the next one.
    let mut overlapping = good.clone();
    let central = overlapping.windows(4).position(|w| w == b"PK\x01\x02").unwrap();
    overlapping[central + 20] = 90;
    overlapping[central + 24] = 90;
    assert!(records_of(&overlapping).is_err());
}
