//! Memory: the limit holds, held batches never hang, and everything comes back.

use drivetrain::Error;
use drivetrain::index::{Codec, FieldKind};
use drivetrain::pipeline::{FieldData, Loader, LoaderConfig, OnHeld, Share};

use super::data::{Data, files, spec};
use super::{drain, next};

const KIB: usize = 1 << 10;

/// Blobs of 1 KiB to 256 KiB, 16 of them per size.
fn blobs() -> (Data, Vec<Vec<u8>>) {
    let size = |i: usize| KIB << (i % 9);
    let contents: Vec<Vec<u8>> = (0..90).map(|i| vec![i as u8; size(i)]).collect();
    (files(spec("bin", FieldKind::Bytes), &Codec::Raw, &contents), contents)
}

fn config(limit: usize, on_held: OnHeld) -> LoaderConfig {
    LoaderConfig {
        memory_limit_bytes: limit as u64,
        on_held,
        threads: Some(2),
        ..LoaderConfig::new(3)
    }
}

#[test]
fn many_epochs_stay_under_the_limit_and_give_everything_back() {
    let (data, contents) = blobs();
    let limit = 2 << 20;
    let loader = Loader::new(data.table.clone(), config(limit, OnHeld::Copy)).unwrap();
    for _ in 0..20 {
        let pass = loader.begin_pass(Share::ALL).unwrap();
        let mut i = 0;
        while let Some(batch) = next(&loader, &pass).unwrap() {
            let Some(FieldData::Blobs(arrays)) = batch.field("bin") else { panic!("bin") };
            for array in arrays {
                assert_eq!(batch.bytes(array), contents[i]);
                i += 1;
            }
            let stats = loader.stats();
            assert!(stats.memory_used_bytes <= limit as u64);
            assert!(stats.arena.slabs_bytes <= limit);
            assert_eq!(stats.held_batches, 1);
        }
        assert_eq!(i, 90);
    }
    let stats = loader.stats();
    assert_eq!((stats.memory_used_bytes, stats.held_bytes, stats.arena.in_use_bytes), (0, 0, 0));
    assert_eq!(stats.report.copied_batches, 0);
}

#[test]
fn holding_everything_ends_with_copies() {
    let (data, contents) = blobs();
    let loader = Loader::new(data.table.clone(), config(1 << 20, OnHeld::Copy)).unwrap();
    let batches = drain(&loader);
    assert_eq!(batches.len(), 30);
    assert!(batches.iter().any(|b| b.copied) && batches.iter().any(|b| !b.copied));
    for (b, batch) in batches.iter().enumerate() {
        let Some(FieldData::Blobs(arrays)) = batch.field("bin") else { panic!("bin") };
        for (k, array) in arrays.iter().enumerate() {
            assert_eq!(batch.bytes(array), contents[b * 3 + k]);
        }
    }
    assert_eq!(loader.stats().held_batches, 30);
    drop(batches);
    let stats = loader.stats();
    assert_eq!((stats.held_batches, stats.held_bytes, stats.memory_used_bytes), (0, 0, 0));
}

#[test]
fn holding_everything_raises_on_request_and_goes_on_after_a_drop() {
    let (data, _) = blobs();
    let loader = Loader::new(data.table.clone(), config(1 << 20, OnHeld::Raise)).unwrap();
    let pass = loader.begin_pass(Share::ALL).unwrap();
    let mut held = Vec::new();
    let mut steps = 0;
    loop {
        match next(&loader, &pass) {
            Ok(Some(batch)) => {
                assert_eq!(batch.step, steps);
                steps += 1;
                held.push(batch);
            }
            Ok(None) => break,
            Err(Error::MemoryHeld { batches, bytes }) => {
                assert_eq!(batches, held.len());
                assert!(bytes > 0 && bytes <= 1 << 20);
                held.clear();
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(steps, 30);
}

#[test]
fn a_batch_larger_than_the_limit_is_refused_with_the_size_it_needs() {
    let data = files(
        spec("bin", FieldKind::Bytes),
        &Codec::Raw,
        &[vec![1; 900 * KIB], vec![2; 900 * KIB]],
    );
    let config = LoaderConfig { batch_size: 2, ..config(1 << 20, OnHeld::Copy) };
    let loader = Loader::new(data.table.clone(), config).unwrap();
    let pass = loader.begin_pass(Share::ALL).unwrap();
    let error = next(&loader, &pass).unwrap_err().to_string();
    assert!(error.contains("memory_limit") && error.contains("at least"), "{error}");
}
