//! Bad samples, changed sources, stalled reads, closed loaders: a typed error or the documented
//! policy, never a hang.

use std::time::Duration;

use drivetrain::Error;
use drivetrain::index::{Codec, FieldKind};
use drivetrain::pipeline::{ErrorLimit, FieldData, Loader, LoaderConfig, OnError, Share};

use super::data::{Data, cloud, files, jpeg, level, spec};
use super::{drain, next, ragged};

/// Twelve pictures, of which 3 and 7 are cut off.
fn pictures() -> Data {
    let mut contents: Vec<Vec<u8>> = (0..12).map(|i| jpeg(level(i), 32, 24)).collect();
    for bad in [3, 7] {
        let half = contents[bad].len() / 2;
        contents[bad].truncate(half);
    }
    files(spec("jpg", FieldKind::Image), &Codec::Jpeg, &contents)
}

fn config(on_error: OnError) -> LoaderConfig {
    LoaderConfig { on_error, threads: Some(2), ..LoaderConfig::new(4) }
}

#[test]
fn raise_names_the_file_and_ends_the_pass() {
    let data = pictures();
    let loader = Loader::new(data.table.clone(), config(OnError::Raise)).unwrap();
    let pass = loader.begin_pass(Share::ALL).unwrap();
    let error = next(&loader, &pass).unwrap_err();
    assert!(
        matches!(error, Error::Corrupt { .. }) && error.to_string().contains("3.bin"),
        "{error}"
    );
    assert!(matches!(next(&loader, &pass), Err(Error::Closed { .. })));
    assert_eq!((loader.state().epoch, loader.state().position), (0, 0));
}

#[test]
fn mask_zeroes_the_sample_and_keeps_the_count() {
    let data = pictures();
    let loader = Loader::new(data.table.clone(), config(OnError::Mask)).unwrap();
    for _ in 0..2 {
        let batches = drain(&loader);
        let valid: Vec<bool> = batches.iter().flat_map(|b| b.valid.clone()).collect();
        assert_eq!(valid, (0..12).map(|i| i != 3 && i != 7).collect::<Vec<_>>());
        for (b, batch) in batches.iter().enumerate() {
            let Some(FieldData::Dense(array)) = batch.field("jpg") else { panic!("jpg") };
            for (slot, item) in batch.bytes(array).chunks_exact(array.item_bytes()).enumerate() {
                let i = b * 4 + slot;
                let want = if i == 3 || i == 7 { 0 } else { level(i) };
                assert!(item.iter().all(|v| v.abs_diff(want) <= 2));
            }
        }
    }
    let report = loader.quarantine();
    let keys: Vec<&str> = report.iter().map(|b| b.key.as_str()).collect();
    assert_eq!(keys, ["k3", "k7", "k3", "k7"]);
    assert_eq!((report[0].field.as_str(), report[0].source.as_str()), ("jpg", "3.bin"));
    assert_eq!(loader.stats().report.bad_samples, 4);
}

#[test]
fn replace_takes_the_next_position_of_the_order() {
    let mut contents: Vec<Vec<u8>> = (0..12).map(cloud).collect();
    // 11 and 0 are damaged: the substitute of 11 is the sample at position 1 of the epoch.
    contents[11].pop();
    contents[0].pop();
    let codec = Codec::F32Records { columns: 4 };
    let data = files(spec("lidar", FieldKind::Points), &codec, &contents);
    let loader = Loader::new(data.table.clone(), config(OnError::Replace)).unwrap();
    let batches = drain(&loader);
    assert_eq!(batches[0].keys, ["k1", "k1", "k2", "k3"]);
    assert_eq!(batches[2].keys, ["k8", "k9", "k10", "k1"]);
    assert!(batches.iter().all(|b| b.valid.iter().all(|v| *v)));
    let (values, offsets, _) = ragged(&batches[2], "lidar");
    let expected: Vec<u8> = [8, 9, 10, 1].into_iter().flat_map(cloud).collect();
    assert_eq!(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>(), expected);
    assert_eq!(offsets.len(), 5);
    let report = loader.quarantine();
    let tried: Vec<_> =
        report.iter().map(|b| (b.key.as_str(), b.substitute.as_deref().unwrap())).collect();
    assert_eq!(tried, [("k0", "k1"), ("k11", "k0"), ("k0", "k1")]);
}

#[test]
fn substitutes_count_under_the_memory_limit() {
    // The bad sample is small, its substitute is large: the batch must not cost what it would
    // have, but what it does.
    let mut contents = vec![vec![7; 100]; 2];
    contents.push(vec![9; 300_000]);
    let data = files(spec("bin", FieldKind::Bytes), &Codec::Raw, &contents);
    std::fs::remove_file(data.folder.path().join("1.bin")).unwrap();
    let config = LoaderConfig { batch_size: 1, ..config(OnError::Replace) };
    let loader = Loader::new(data.table.clone(), config).unwrap();
    let pass = loader.begin_pass(Share::ALL).unwrap();
    next(&loader, &pass).unwrap().unwrap();
    let batch = next(&loader, &pass).unwrap().unwrap();
    assert_eq!((batch.keys[0].as_str(), batch.memory.bytes_len()), ("k2", 300_000));
    let stats = loader.stats();
    assert!(stats.held_bytes >= 300_000, "{stats:?}");
    assert_eq!(stats.report.private_bytes, 0);
    drop((batch, pass));
    while loader.stats().held_bytes > 0 {
        std::thread::yield_now();
    }
    loader.close();
    assert_eq!(loader.stats().memory_used_bytes, 0);
}

#[test]
fn too_many_bad_samples_are_an_error() {
    let data = pictures();
    let config = LoaderConfig { error_limit: ErrorLimit::Count(1), ..config(OnError::Mask) };
    let loader = Loader::new(data.table.clone(), config).unwrap();
    let pass = loader.begin_pass(Share::ALL).unwrap();
    assert!(next(&loader, &pass).unwrap().is_some());
    let error = next(&loader, &pass).unwrap_err().to_string();
    assert!(error.contains("on_error_limit") && error.contains("k7"), "{error}");
}

#[test]
fn only_bad_samples_end_in_an_error() {
    let contents = vec![vec![1, 2, 3]; 3];
    let data = files(spec("jpg", FieldKind::Image), &Codec::Jpeg, &contents);
    let loader = Loader::new(data.table.clone(), config(OnError::Replace)).unwrap();
    let pass = loader.begin_pass(Share::ALL).unwrap();
    assert!(next(&loader, &pass).unwrap_err().to_string().contains(".bin"));
}

#[test]
fn changed_and_missing_sources_are_named() {
    let contents: Vec<Vec<u8>> = (0..4).map(cloud).collect();
    let codec = Codec::F32Records { columns: 4 };
    let data = files(spec("lidar", FieldKind::Points), &codec, &contents);
    std::fs::write(data.folder.path().join("1.bin"), cloud(9)).unwrap();
    let loader = Loader::new(data.table.clone(), config(OnError::Raise)).unwrap();
    let pass = loader.begin_pass(Share::ALL).unwrap();
    let error = next(&loader, &pass).unwrap_err();
    assert!(matches!(&error, Error::Changed { file, .. } if file == "1.bin"), "{error}");
    std::fs::write(data.folder.path().join("1.bin"), cloud(1)).unwrap();
    std::fs::remove_file(data.folder.path().join("2.bin")).unwrap();
    let loader = Loader::new(data.table.clone(), config(OnError::Mask)).unwrap();
    assert_eq!(drain(&loader)[0].valid, [true, true, false, true]);
    assert!(loader.quarantine()[0].reason.contains("2.bin"));
}

#[test]
fn close_ends_waiting_and_later_calls() {
    let data = pictures();
    let loader = Loader::new(data.table.clone(), config(OnError::Mask)).unwrap();
    let pass = loader.begin_pass(Share::ALL).unwrap();
    let batch = next(&loader, &pass).unwrap().unwrap();
    loader.close();
    assert!(matches!(next(&loader, &pass), Err(Error::Closed { .. })));
    assert!(matches!(loader.begin_pass(Share::ALL), Err(Error::Closed { .. })));
    // A delivered batch outlives its loader.
    drop(loader);
    let Some(FieldData::Dense(array)) = batch.field("jpg") else { panic!("jpg") };
    assert!(batch.bytes(array)[0].abs_diff(level(0)) <= 2);
}

#[test]
fn a_stopped_wait_can_be_taken_up_again() {
    let data = pictures();
    let config = LoaderConfig { timeout: Some(Duration::ZERO), ..config(OnError::Mask) };
    let loader = Loader::new(data.table.clone(), config).unwrap();
    let pass = loader.begin_pass(Share::ALL).unwrap();
    let mut batches = 0;
    let mut ends = 0;
    while ends == 0 {
        match loader.next(&pass, &mut || true) {
            Ok(Some(batch)) => {
                assert_eq!(batch.step, batches);
                batches += 1;
            }
            Ok(None) => ends += 1,
            Err(Error::Timeout { what, .. }) => assert!(what.contains("step"), "{what}"),
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(batches, 3);
}
