//! What comes out is what the formulas say.

use drivetrain::index::{Codec, FieldKind};
use drivetrain::order::Shuffle;
use drivetrain::pipeline::{
    Batch, FieldData, FieldForm, FieldRequest, Loader, LoaderConfig, Ragged,
};
use drivetrain::transform::{DType, ImageSpec, PointsSpec};

use super::data::{boxes, cloud, files, jpeg, level, mixed, point, point_count, pose, raw, spec};
use super::{drain, floats, ragged};

fn request(name: &str, form: FieldForm) -> FieldRequest {
    FieldRequest { name: name.into(), form }
}

fn config(batch_size: u64, fields: Option<Vec<FieldRequest>>) -> LoaderConfig {
    LoaderConfig { fields, threads: Some(2), ..LoaderConfig::new(batch_size) }
}

/// Index of a sample from its key.
fn index(key: &str) -> usize {
    key[1..].parse().unwrap()
}

fn check_natural(batch: &Batch) {
    let ids: Vec<usize> = batch.keys.iter().map(|k| index(k)).collect();
    let Some(FieldData::Dense(cam)) = batch.field("cam") else { panic!("cam") };
    assert_eq!((cam.shape.clone(), cam.dtype), (vec![ids.len(), 48, 64, 3], DType::U8));
    for (item, i) in batch.bytes(cam).chunks_exact(cam.item_bytes()).zip(&ids) {
        assert!(item.iter().all(|v| v.abs_diff(level(*i)) <= 2), "{}", item[0]);
    }
    let (values, offsets, shape) = ragged(batch, "lidar");
    let expected: Vec<f32> =
        ids.iter().flat_map(|i| (0..point_count(*i)).flat_map(|k| point(*i, k))).collect();
    assert_eq!((values, shape), (expected, vec![*offsets.last().unwrap() as usize, 4]));
    for (pair, i) in offsets.windows(2).zip(&ids) {
        assert_eq!((pair[1] - pair[0]) as usize, point_count(*i));
    }
    let Some(FieldData::Blobs(blobs)) = batch.field("raw") else { panic!("raw") };
    let got: Vec<&[u8]> = blobs.iter().map(|a| batch.bytes(a)).collect();
    assert_eq!(got, ids.iter().map(|i| raw(*i)).collect::<Vec<_>>());
    check_inline(batch, &ids);
}

fn check_inline(batch: &Batch, ids: &[usize]) {
    let Some(FieldData::Poses(poses)) = batch.field("pose") else { panic!("pose") };
    let matrices: Vec<_> = poses.iter().map(|p| p.as_ref().unwrap().matrix).collect();
    assert_eq!(matrices, ids.iter().map(|i| pose(*i).matrix).collect::<Vec<_>>());
    let Some(FieldData::Boxes(all)) = batch.field("boxes") else { panic!("boxes") };
    assert_eq!(*all, ids.iter().map(|i| boxes(*i)).collect::<Vec<_>>());
    let Some(FieldData::Text(texts)) = batch.field("caption") else { panic!("caption") };
    assert_eq!(*texts, ids.iter().map(|i| format!("caption {i}")).collect::<Vec<_>>());
    let Some(FieldData::Scalars(speeds)) = batch.field("speed") else { panic!("speed") };
    assert_eq!(*speeds, ids.iter().map(|i| *i as f64 / 2.0).collect::<Vec<_>>());
    let Some(FieldData::Calibrations(calibrations)) = batch.field("calib") else { panic!("calib") };
    for (calibration, i) in calibrations.iter().zip(ids) {
        assert_eq!(calibration.as_ref().unwrap().timestamp_ns, *i as i64);
    }
}

#[test]
fn natural_forms_hold_for_every_batch_of_several_epochs() {
    let data = mixed(23);
    let loader =
        Loader::new(data.table.clone(), LoaderConfig { shuffle: Shuffle::Full, ..config(4, None) })
            .unwrap();
    for epoch in 0..3 {
        let batches = drain(&loader);
        assert_eq!(batches.len(), 6);
        for batch in &batches {
            assert_eq!(batch.epoch, epoch);
            check_natural(batch);
        }
        let mut keys: Vec<&String> = batches
            .iter()
            .flat_map(|b| b.keys.iter().zip(&b.valid).filter(|(_, v)| **v).map(|(k, _)| k))
            .collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), 23);
    }
    let stats = loader.stats();
    assert_eq!(stats.report.batches, 18);
    assert!(stats.report.read_bytes > 0 && stats.arena.slabs_bytes > 0);
}

#[test]
fn pictures_are_resized_normalised_and_laid_out() {
    let data = mixed(5);
    let image =
        ImageSpec { size: Some((12, 16)), mean: [100.0; 3], std: [2.0; 3], ..ImageSpec::default() };
    let fields = vec![request("cam", FieldForm::Image(image))];
    let loader = Loader::new(data.table.clone(), config(5, Some(fields))).unwrap();
    let batches = drain(&loader);
    let Some(FieldData::Dense(cam)) = batches[0].field("cam") else { panic!("cam") };
    assert_eq!((cam.shape.clone(), cam.dtype), (vec![5, 3, 12, 16], DType::F32));
    assert_eq!(cam.offset_bytes % 64, 0);
    let values = floats(&batches[0], cam);
    for (i, item) in values.chunks_exact(3 * 12 * 16).enumerate() {
        let want = (f32::from(level(i)) - 100.0) / 2.0;
        assert!(item.iter().all(|v| (v - want).abs() <= 1.5), "{} {want}", item[0]);
    }
}

#[test]
fn sweeps_are_moved_timed_and_filtered() {
    let data = mixed(8);
    let spec = PointsSpec {
        sweeps: 3,
        // Keeps y (the point's number) 1..=5: strictly inside 0 and 5.5.
        range: Some([-100.0, 0.0, -100.0, 100.0, 5.5, 100.0]),
        ..PointsSpec::default()
    };
    let form = FieldForm::Points { spec, ragged: Ragged::Offsets };
    let loader =
        Loader::new(data.table.clone(), config(3, Some(vec![request("lidar", form)]))).unwrap();
    for batch in drain(&loader) {
        let (values, offsets, shape) = ragged(&batch, "lidar");
        assert_eq!(shape[1], 5);
        let mut expected = Vec::new();
        for (key, pair) in batch.keys.iter().zip(offsets.windows(2)) {
            let i = index(key);
            let own = (1..=5).map(|k| (point(i, k), 0.0, 0.0));
            let earlier = (1..=5).filter(|_| i > 0).map(|k| (point(i - i.min(1), k), 1.0, 0.5));
            let rows: Vec<_> = own.chain(earlier).collect();
            assert_eq!((pair[1] - pair[0]) as usize, rows.len());
            for ([x, y, z, intensity], dx, dt_s) in rows {
                expected.extend([x + dx, y, z, intensity, dt_s]);
            }
        }
        assert_eq!(values, expected);
    }
}

#[test]
fn padded_clouds_are_cut_and_zeroed() {
    let data = mixed(9);
    for max_points in [12, 100] {
        let form =
            FieldForm::Points { spec: PointsSpec::default(), ragged: Ragged::Pad { max_points } };
        let fields = Some(vec![request("lidar", form)]);
        let loader = Loader::new(data.table.clone(), config(4, fields)).unwrap();
        for batch in drain(&loader) {
            let Some(FieldData::Padded { values, count }) = batch.field("lidar") else { panic!() };
            assert_eq!(values.shape, [4, max_points, 5]);
            let all = floats(&batch, values);
            for (slot, key) in batch.keys.iter().enumerate() {
                let i = index(key);
                let kept = point_count(i).min(max_points);
                assert_eq!(count[slot] as usize, kept);
                let mut want: Vec<f32> =
                    (0..kept).flat_map(|k| point(i, k).into_iter().chain([0.0])).collect();
                want.resize(max_points * 5, 0.0);
                assert_eq!(all[slot * max_points * 5..][..max_points * 5], want);
            }
        }
    }
}

#[test]
fn pictures_of_several_sizes_come_as_a_list_and_equal_ones_as_one_array() {
    let contents: Vec<Vec<u8>> = (0..8)
        .map(|i| if i < 4 { jpeg(level(i), 40, 24) } else { jpeg(level(i), 16 + i as u16, 8) })
        .collect();
    let data = files(spec("jpg", FieldKind::Image), &Codec::Jpeg, &contents);
    let loader = Loader::new(data.table.clone(), config(4, None)).unwrap();
    for _ in 0..2 {
        let batches = drain(&loader);
        let Some(FieldData::Dense(first)) = batches[0].field("jpg") else { panic!("first") };
        assert_eq!(first.shape, [4, 24, 40, 3]);
        let Some(FieldData::List(second)) = batches[1].field("jpg") else { panic!("second") };
        for (slot, array) in second.iter().enumerate() {
            assert_eq!(array.shape, [8, 20 + slot, 3]);
            let want = level(4 + slot);
            assert!(batches[1].bytes(array).iter().all(|v| v.abs_diff(want) <= 2));
        }
    }
}

#[test]
fn smaller_equal_pictures_are_one_strided_array() {
    let contents: Vec<Vec<u8>> = (0..8)
        .map(|i| if i < 4 { jpeg(level(i), 40, 24) } else { jpeg(level(i), 16, 8) })
        .collect();
    let data = files(spec("jpg", FieldKind::Image), &Codec::Jpeg, &contents);
    let loader = Loader::new(data.table.clone(), config(4, None)).unwrap();
    let batches = drain(&loader);
    let Some(FieldData::Dense(small)) = batches[1].field("jpg") else { panic!("small") };
    assert_eq!(
        (small.shape.clone(), small.first_stride_bytes),
        (vec![4, 8, 16, 3], Some(40 * 24 * 3))
    );
    let bytes = batches[1].bytes(small);
    for slot in 0..4 {
        let item = &bytes[slot * 40 * 24 * 3..][..16 * 8 * 3];
        assert!(item.iter().all(|v| v.abs_diff(level(4 + slot)) <= 2));
    }
}

#[test]
fn no_fields_is_only_keys_and_no_memory() {
    let data = mixed(7);
    let loader = Loader::new(data.table.clone(), config(3, Some(vec![]))).unwrap();
    let batches = drain(&loader);
    assert_eq!(batches[2].keys, ["k6", "k0", "k1"]);
    assert_eq!(batches[2].valid, [true, false, false]);
    let stats = loader.stats();
    assert_eq!((stats.arena.slabs_bytes, stats.report.reads), (0, 0));
    assert!(batches.iter().all(|b| b.fields.is_empty()));
}

#[test]
fn unknown_and_unfit_fields_are_refused_by_name() {
    let data = mixed(2);
    let refuse = |name: &str, form: FieldForm| {
        let fields = Some(vec![request(name, form)]);
        Loader::new(data.table.clone(), config(1, fields)).unwrap_err().to_string()
    };
    assert!(refuse("kam", FieldForm::Natural).contains("the data set has cam, lidar"));
    assert!(refuse("lidar", FieldForm::Image(ImageSpec::default())).contains("kind image"));
    let form = FieldForm::Points { spec: PointsSpec::default(), ragged: Ragged::Offsets };
    assert!(refuse("raw", form).contains("kind points or radar"));
}

#[test]
fn records_are_checked() {
    let mut contents: Vec<Vec<u8>> = (0..4).map(cloud).collect();
    contents[2].pop();
    let codec = Codec::F32Records { columns: 4 };
    let data = files(spec("lidar", FieldKind::Points), &codec, &contents);
    let loader = Loader::new(data.table.clone(), config(4, None)).unwrap();
    let pass = loader.begin_pass(drivetrain::pipeline::Share::ALL).unwrap();
    let error = super::next(&loader, &pass).unwrap_err().to_string();
    assert!(error.contains("2.bin") && error.contains("multiple of 16"), "{error}");
    assert!(super::next(&loader, &pass).unwrap_err().to_string().contains("closed"));
}
