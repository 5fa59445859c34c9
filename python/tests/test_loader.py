"""DataLoader: values, order, state, tail, iterators, and what arguments mean."""

import json
import subprocess
import sys
import time

import drivetrain as dt
import numpy as np
import pytest
import torch
from data_factory import CAMERAS, blobs, number, nuscenes, webdataset


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nuscenes")
    return dt.open(str(nuscenes(folder / "data")), index=str(folder / "data.index.arrow"))


@pytest.fixture(scope="module")
def tar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tar")
    path = webdataset(folder / "a.tar", blobs(23))
    return dt.open(str(path), index=str(folder / "a.index.arrow"))


def keys(loader):
    return [key for batch in loader for key, ok in zip(batch["key"], batch["_valid"]) if ok]


def test_natural_forms_equal_the_data_sets(tree):
    loader = dt.DataLoader(tree, 3, threads=2)
    rows = {sample["key"]: sample for sample in tree}
    for batch in loader:
        for slot, key in enumerate(batch["key"]):
            sample = rows[key]
            for camera in CAMERAS:
                assert batch[camera].dtype == torch.uint8
                np.testing.assert_array_equal(batch[camera][slot].numpy(), sample[camera])
                calibration = batch[f"{camera}.calibration"][slot]
                expected = sample[f"{camera}.calibration"]
                np.testing.assert_array_equal(calibration.intrinsic, expected.intrinsic)
                np.testing.assert_array_equal(calibration.sensor_to_ego, expected.sensor_to_ego)
            lo, hi = batch["LIDAR_TOP_offsets"][slot : slot + 2].tolist()
            points = batch["LIDAR_TOP"][lo:hi].numpy()
            np.testing.assert_array_equal(points, sample["LIDAR_TOP"].array)
            np.testing.assert_array_equal(batch["ego_pose"][slot], sample["ego_pose"].matrix)
            lo, hi = batch["boxes_offsets"][slot : slot + 2].tolist()
            boxes = sample["boxes"]
            np.testing.assert_array_equal(batch["boxes"][lo:hi], boxes.geometry)
            np.testing.assert_array_equal(batch["boxes_velocity"][lo:hi], boxes.velocity)
            assert batch["boxes_names"][slot] == boxes.names
            assert batch["boxes_token"][slot] == boxes.token


def test_bytes_text_and_json_of_a_tar(tar):
    expected = blobs(23)
    for batch in dt.DataLoader(tar, 4, shuffle=True):
        for slot, key in enumerate(batch["key"]):
            sample = expected[number(key)]
            assert batch["bin"][slot] == sample["bin"] and batch["bin"][slot].readonly
            assert batch["txt"][slot] == sample["txt"].decode()
            assert json.loads(batch["json"][slot]) == {"i": number(key)}


@pytest.mark.parametrize("dtype", [torch.float32, "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_images_are_normalised_in_every_dtype(tree, dtype, layout):
    mean, std = (123.0, 116.0, 103.0), (58.0, 57.0, 57.5)
    image = dt.Image(size=(48, 80), mean=mean, std=std, dtype=dtype, layout=layout, exact=True)
    batch = next(iter(dt.DataLoader(tree, 2, fields={"CAM_BACK": image})))
    got = batch["CAM_BACK"].float()
    if layout == "HWC":
        got = got.permute(0, 3, 1, 2)
    assert got.shape == (2, 3, 48, 80)
    source = torch.stack([torch.from_numpy(tree[i]["CAM_BACK"].copy()) for i in range(2)])
    source = source.permute(0, 3, 1, 2).float()
    want = torch.nn.functional.interpolate(
        source, (48, 80), mode="bilinear", antialias=True, align_corners=False
    )
    want = (want - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    tolerance = {"bfloat16": 0.03, "float16": 0.02}.get(dtype, 0.018)
    assert (got - want).abs().max() < tolerance


def test_uint8_images_and_crops(tree):
    crop = dt.Image(crop=(10, 20, 30, 40), dtype="uint8", layout="HWC")
    batch = next(iter(dt.DataLoader(tree, 2, fields={"CAM_FRONT": crop})))
    assert batch["CAM_FRONT"].shape == (2, 30, 40, 3)
    for slot in range(2):
        want = tree[slot]["CAM_FRONT"][10:40, 20:60]
        assert np.abs(batch["CAM_FRONT"][slot].numpy().astype(int) - want).max() <= 1


def test_sweeps_come_with_their_time(tree):
    one = next(iter(dt.DataLoader(tree, 6, fields={"LIDAR_TOP": dt.Points()})))
    many = next(iter(dt.DataLoader(tree, 6, fields={"LIDAR_TOP": dt.Points(sweeps=3)})))
    assert one["LIDAR_TOP"].shape[1] == many["LIDAR_TOP"].shape[1] == 6
    assert (one["LIDAR_TOP"][:, 5] == 0).all()
    for slot in range(1, 6):
        rows = many["LIDAR_TOP"][slice(*many["LIDAR_TOP_offsets"][slot : slot + 2].tolist())]
        times = rows[:, 5].unique()
        assert len(times) == 4 and times[0] == 0 and times[-1] > times[1] > 0
        key = one["LIDAR_TOP"][slice(*one["LIDAR_TOP_offsets"][slot : slot + 2].tolist())]
        assert torch.equal(rows[: len(key)], key)


def test_padded_points(tree):
    points = dt.Points(range=(-20, -20, -5, 20, 20, 5), ragged="pad", max_points=400)
    free = dt.Points(range=(-20, -20, -5, 20, 20, 5))
    pad = next(iter(dt.DataLoader(tree, 4, fields={"LIDAR_TOP": points})))
    ragged = next(iter(dt.DataLoader(tree, 4, fields={"LIDAR_TOP": free})))
    assert pad["LIDAR_TOP"].shape == (4, 400, 6) and pad["LIDAR_TOP_count"].dtype == torch.int64
    for slot in range(4):
        lo, hi = ragged["LIDAR_TOP_offsets"][slot : slot + 2].tolist()
        count = int(pad["LIDAR_TOP_count"][slot])
        assert count == min(400, hi - lo)
        assert torch.equal(pad["LIDAR_TOP"][slot, :count], ragged["LIDAR_TOP"][lo : lo + count])
        assert (pad["LIDAR_TOP"][slot, count:] == 0).all()


def test_every_sample_once_and_the_tail_is_marked(tar):
    loader = dt.DataLoader(tar, 4, shuffle=True, seed=5)
    assert len(loader) == 6
    first = keys(loader)
    assert sorted(number(k) for k in first) == list(range(23))
    second = keys(loader)
    assert sorted(second) == sorted(first) and second != first
    loader.set_epoch(0)
    assert keys(loader) == first
    last = list(dt.DataLoader(tar, 4, shuffle=False))[-1]
    assert last["_valid"].tolist() == [True] * 3 + [False]
    assert [number(k) for k in last["key"]] == [20, 21, 22, 0]
    assert len(keys(dt.DataLoader(tar, 4, drop_last=True))) == 20


@pytest.mark.parametrize("stop", range(4))
def test_a_stored_state_continues_on_another_world(tar, stop):
    seen, state = [], None
    for rank in range(2):
        loader = dt.DataLoader(tar, 3, shuffle=True, fields={}, rank=rank, world_size=2)
        steps = iter(loader)
        for _ in range(stop):
            batch = next(steps)
            seen += [k for k, ok in zip(batch["key"], batch["_valid"]) if ok]
        assert state in (None, loader.state_dict())
        state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    for rank in range(3):
        loader = dt.DataLoader(tar, 2, shuffle=True, fields={}, rank=rank, world_size=3)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        seen += keys(loader)
        assert loader.state_dict()["epoch"] == (1 if stop < 4 else 2)
        assert loader.state_dict()["position"] == 0
    if stop < 4:
        assert sorted(number(k) for k in seen) == list(range(23))


def test_state_at_every_step(tar):
    loader = dt.DataLoader(tar, 5, shuffle=True, fields={})
    assert loader.state_dict()["position"] == 0
    positions = []
    for _ in loader:
        state = loader.state_dict()
        positions.append((state["epoch"], state["position"]))
    assert positions == [(0, 5), (0, 10), (0, 15), (0, 20), (1, 0)]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"seed": 9}, "seed"), ({"shuffle": False}, "shuffle"), ({}, "fingerprint")],
)
def test_a_foreign_state_is_refused_by_name(tar, change, word):
    state = dt.DataLoader(tar, 4, shuffle=True).state_dict()
    ds = tar if change else tar.filter([0, 1, 2])
    loader = dt.DataLoader(ds, 4, **{"shuffle": True, **change})
    with pytest.raises(dt._native.InvalidArgument, match=word):
        loader.load_state_dict(state)


def test_break_restarts_and_older_iterators_raise(tar):
    loader = dt.DataLoader(tar, 4, shuffle=True, fields={})
    first = next(iter(loader))["key"]
    old = iter(loader)
    assert next(old)["key"] == first
    new = iter(loader)
    with pytest.raises(dt._native.InvalidArgument, match="newest"):
        next(old)
    assert next(new)["key"] == first
    assert len(loader) == 6


def test_only_keys_need_no_memory(tar):
    loader = dt.DataLoader(tar, 4, fields={})
    for batch in loader:
        assert set(batch) == {"key", "_valid"}
    assert loader.stats()["memory"]["arena_slabs"] == 0


def test_close_and_with(tar):
    with dt.DataLoader(tar, 4) as loader:
        steps = iter(loader)
        batch = next(steps)
    with pytest.raises(dt._native.Closed):
        next(steps)
    with pytest.raises(dt._native.Closed):
        iter(loader)
    assert batch["bin"][0] == blobs(1)[0]["bin"]


def test_stats_name_the_bottleneck_and_count_by_engine(tar):
    loader = dt.DataLoader(tar, 4)
    assert loader.stats()["bottleneck"] == "unknown"
    list(loader)
    stats = loader.stats()
    assert stats["batches"] == 6 and stats["samples"] == 24
    assert stats["bottleneck"] in {"storage", "decode", "trainer", "start-up"}
    assert stats["io"]["uring_reads"] + stats["io"]["thread_reads"] >= stats["reads"] > 0
    assert stats["wanted_bytes"] <= stats["read_bytes"]
    seconds = stats["seconds"]
    assert {"plan", "fetch", "decode", "deliver_wait"} <= set(seconds)
    assert 0 < seconds["reading"] <= seconds["fetch"]
    assert 0 < seconds["start_wait"] <= seconds["deliver_wait"]


def test_a_slow_trainer_is_named_the_bottleneck(tar):
    loader = dt.DataLoader(tar, 4)
    for _ in loader:
        time.sleep(0.1)
    assert loader.stats()["bottleneck"] == "trainer"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"fields": {"nope": None}}, "nope"),
        ({"fields": {"bin": dt.Image(size=(8, 8))}}, "image"),
        ({"fields": {"bin": 3}}, "bin"),
        ({"shuffle": "fast"}, "shuffle"),
        ({"memory_limit": "two"}, "memory_limit"),
        ({"timeout": "soon"}, "timeout"),
        ({"on_error": "ignore"}, "on_error"),
        ({"on_held": "wait"}, "on_held"),
        ({"rank": 1}, "world_size"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"threads": 0}, "threads"),
        ({"output": "jax"}, "output"),
        ({"augment": object()}, "augment"),
        ({"on_error_limit": -1}, "on_error_limit"),
        ({"on_error_limit": 2.0}, "on_error_limit"),
    ],
)
def test_impossible_arguments_are_refused_by_name(tar, arguments, word):
    with pytest.raises(dt._native.DrivetrainError, match=word):
        dt.DataLoader(tar, **{"batch_size": 2, **arguments})


def test_cuda_is_refused_where_there_is_none(tar):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(dt._native.Unsupported, match="CUDA"):
        iter(dt.DataLoader(tar, 2, device="cuda"))


def test_numpy_output(tree):
    fields = {"CAM_BACK": dt.Image(size=(16, 32)), "LIDAR_TOP": None}
    torches = next(iter(dt.DataLoader(tree, 2, fields=fields)))
    arrays = next(iter(dt.DataLoader(tree, 2, fields=fields, output="numpy")))
    for name, value in arrays.items():
        if name != "key":
            assert isinstance(value, np.ndarray)
            np.testing.assert_array_equal(value, torches[name].numpy())


def test_block_shuffle_with_numbers(tar):
    loader = dt.DataLoader(tar, 4, shuffle=("block", 4, 2), fields={})
    assert sorted(number(k) for k in keys(loader)) == list(range(23))
    assert loader.state_dict()["shuffle"] == {"block": {"block": 4, "window": 2}}


def test_an_abandoned_iterator_gives_its_memory_back(tree):
    loader = dt.DataLoader(tree, 1, fields={"CAM_BACK": dt.Image(size=(64, 64))})
    batch = next(iter(loader))
    deadline = time.monotonic() + 30
    while loader.stats()["memory"]["used_bytes"] > loader.stats()["memory"]["held_bytes"]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert len(batch["key"]) == 1


def test_the_default_loader_reads_through_io_uring_where_it_can(tree):
    loader = dt.DataLoader(tree, 4)
    list(loader)
    io = loader.stats()["io"]
    findings = {f["name"]: f for f in json.loads(run_doctor())["findings"]}
    usable = findings["io_uring"]["good"]
    reads = ("uring_reads", "thread_reads")
    idle, busy = reads if not usable else reads[::-1]
    assert io[idle] == 0 and io[busy] > 0


def run_doctor():
    program = [sys.executable, "-m", "drivetrain._cli", "doctor", "--json"]
    return subprocess.run(program, capture_output=True, text=True, check=False).stdout


def test_tensors_are_writable_and_outlive_the_loader(tree):
    loader = dt.DataLoader(tree, 2, fields={"CAM_BACK": dt.Image(size=(16, 32))})
    batch = next(iter(loader))["CAM_BACK"]
    before = batch.clone()
    del loader
    batch += 1
    assert torch.equal(batch, before + 1)
