//! The tables' reader on its own: streams, numbers, and that no input panics.

use proptest::prelude::*;

use super::*;

fn read(table: &str, json: &str) -> Result<Tables, crate::Error> {
    let mut tables = Tables::default();
    tables.read(table, json.as_bytes()).map(|()| tables)
}

fn time_of(micros: &str) -> Result<i64, crate::Error> {
    let json = format!(
        r#"[{{"token":"p","timestamp":{micros},"rotation":[1,0,0,0],"translation":[0,0,0]}}]"#
    );
    read("ego_pose", &json).map(|t| t.ego_pose.rows[0].timestamp_ns)
}

#[test]
fn microseconds_become_nanoseconds_exactly() {
    assert_eq!(time_of("1532402927647951"), Ok(1_532_402_927_647_951_000));
    assert_eq!(time_of("1556675185850000.0"), Ok(1_556_675_185_850_000_000));
    assert_eq!(time_of("1556675185903083.2"), Ok(1_556_675_185_903_083_250));
    assert_eq!(time_of("-5"), Ok(-5000));
    for bad in ["1e300", "9223372036854775807", "18446744073709551615", "null", "\"1\"", "[]"] {
        assert!(matches!(time_of(bad), Err(crate::Error::Json { what: "ego_pose", .. })), "{bad}");
    }
}

#[test]
fn the_error_says_where_in_the_file() {
    let json = "[{\"token\":\"a\"},\n{\"name\":\"x\"}]";
    let error = read("category", json).unwrap_err().to_string();
    assert!(error.contains("category, line 2") && error.contains("token"), "{error}");
    for bad in ["", "{}", "[", "[{\"token\":\"a\"}", "[{\"token\":\"a\"}] x", "[1]", "[{}]"] {
        assert!(read("category", bad).is_err(), "{bad}");
    }
    assert!(read("no_such_table", "[]").unwrap_err().to_string().contains("sample_data"));
}

#[test]
fn unknown_columns_and_deep_nesting() {
    assert!(read("category", r#"[{"token":"a","new":{"x":[1,2]}}]"#).is_ok());
    let deep = format!(r#"[{{"token":"a","new":{}{}}}]"#, "[".repeat(5000), "]".repeat(5000));
    // Ignored values are skipped without recursion, so depth costs no stack.
    assert!(read("category", &deep).is_ok());
}

#[test]
fn unreadable_bytes_are_an_error() {
    struct Broken;
    impl std::io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("disk on fire"))
        }
    }
    let error = Tables::default().read("sample", Broken).unwrap_err();
    assert!(error.to_string().contains("disk on fire"), "{error}");
}

#[test]
fn table_folders() {
    for yes in ["v1.0-mini", "v1.0-trainval", "v1.01-train", "v1.0-synth"] {
        assert!(is_table_folder(yes), "{yes}");
    }
    for no in ["samples", "v1.0", "v2.0-x", "maps"] {
        assert!(!is_table_folder(no), "{no}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(
        table in 0..TABLES.len(),
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut tables = Tables::default();
        let _ = tables.read(TABLES[table], &bytes[..]);
        let _ = tables.link();
    }

    #[test]
    fn damaged_records_never_panic(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut json = br#"[{"token":"t","sample_token":"s","ego_pose_token":"e","timestamp":12,
            "calibrated_sensor_token":"c","is_key_frame":true,"filename":"a/b.jpg"}]"#.to_vec();
        let at = at.index(json.len());
        json[at] = byte;
        let mut tables = Tables::default();
        let _ = tables.read("sample_data", &json[..]);
        for table in TABLES.iter().filter(|table| **table != "sample_data") {
            let _ = tables.read(table, &b"[]"[..]);
        }
        let _ = tables.link();
    }
}
