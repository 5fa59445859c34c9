"""Data sets: natural forms against the files and tables themselves, selection, pickling, Arrow."""

import json
import multiprocessing
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import drivetrain as dt
import numpy as np
import pytest
from drivetrain import _native
from PIL import Image

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(os.environ.get("DRIVETRAIN_TEST_DATA", REPOSITORY / "../shared/data"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A made-up nuScenes tree of 2 scenes with 3 keyframes."""
    folder = tmp_path_factory.mktemp("data") / "made"
    arguments = ["--scenes", "2", "--keyframes", "3", "--seed", "4"]
    arguments += ["--image-size", "160x90", "--lidar-points", "900", "--threads", "1", "--json"]
    assert _native.cli_main(["drivetrain", "synth", str(folder), *arguments]) == 0
    return folder


@pytest.fixture(scope="module")
def ds(root, tmp_path_factory):
    return dt.open(root, cache=tmp_path_factory.mktemp("cache"))


class Tables:
    """The JSON tables read plainly, as the reference."""

    def __init__(self, root):
        (self.folder,) = root.glob("v1.0-*")
        self.rows = {p.stem: json.loads(p.read_text()) for p in self.folder.glob("*.json")}
        self.by_token = {
            name: {row["token"]: row for row in rows} for name, rows in self.rows.items()
        }

    def channel(self, data):
        calibrated = self.by_token["calibrated_sensor"][data["calibrated_sensor_token"]]
        return self.by_token["sensor"][calibrated["sensor_token"]]["channel"]

    def keyframe(self, token, channel):
        (row,) = (
            d
            for d in self.rows["sample_data"]
            if d["sample_token"] == token and d["is_key_frame"] and self.channel(d) == channel
        )
        return row


def matrix(row):
    w, x, y, z = row["rotation"]
    out = np.eye(4)
    out[:3, :3] = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    out[:3, 3] = row["translation"]
    return out


def test_length_keys_and_order(root, ds):
    tables = Tables(root)
    assert len(ds) == 6 and {s["token"] for s in tables.rows["sample"]} == {s["key"] for s in ds}
    for i, sample in enumerate(ds):
        row = tables.by_token["sample"][sample["key"]]
        assert sample["timestamp_ns"] == row["timestamp"] * 1000
        assert sample["scene"] == tables.by_token["scene"][row["scene_token"]]["name"]
        assert ds.find(sample["key"]) == i
    with pytest.raises(KeyError):
        ds.find("nobody")


def test_images_are_the_files(root, ds):
    tables = Tables(root)
    sample = ds[1]
    for channel in ("CAM_FRONT", "CAM_BACK_LEFT"):
        file = root / tables.keyframe(sample["key"], channel)["filename"]
        want = np.asarray(Image.open(file).convert("RGB")).astype(int)
        got = sample[channel]
        assert got.dtype == np.uint8 and got.shape == (90, 160, 3)
        difference = abs(got.astype(int) - want)
        # Decoders interpolate subsampled colour in their own ways, which shows at hard edges.
        assert difference.max() <= 40 and difference.mean() < 1


def test_points_are_the_file(root, ds):
    sample = ds[2]
    file = root / Tables(root).keyframe(sample["key"], "LIDAR_TOP")["filename"]
    want = np.fromfile(file, "<f4").reshape(-1, 5)
    points = sample["LIDAR_TOP"]
    assert points.columns == ("x", "y", "z", "intensity", "ring") and points.frame == "LIDAR_TOP"
    assert len(points) == len(want) and (np.asarray(points) == want).all()
    assert (points.xyz == want[:, :3]).all() and (points["ring"] == want[:, 4]).all()
    assert np.asarray(points, dtype=np.float64).dtype == np.float64
    with pytest.raises(KeyError, match="intensity"):
        points["colour"]
    # Native memory belongs to the caller: writing to it changes nothing that is stored.
    points.xyz[:] = 0
    assert (ds[2]["LIDAR_TOP"].array == want).all()


def test_poses_and_calibration_are_the_tables(root, ds):
    tables = Tables(root)
    sample = ds[0]
    lidar = tables.keyframe(sample["key"], "LIDAR_TOP")
    camera = tables.keyframe(sample["key"], "CAM_FRONT")
    ego = tables.by_token["ego_pose"]
    pose = sample["ego_pose"]
    assert (pose.target, pose.source) == ("global", "ego")
    assert pose.timestamp_ns == ego[lidar["ego_pose_token"]]["timestamp"] * 1000
    np.testing.assert_allclose(pose.matrix, matrix(ego[lidar["ego_pose_token"]]), atol=1e-9)
    calibration = sample["CAM_FRONT.calibration"]
    row = tables.by_token["calibrated_sensor"][camera["calibrated_sensor_token"]]
    np.testing.assert_allclose(calibration.sensor_to_ego, matrix(row), atol=1e-12)
    np.testing.assert_allclose(calibration.intrinsic, row["camera_intrinsic"])
    np.testing.assert_allclose(
        calibration.ego_to_global, matrix(ego[camera["ego_pose_token"]]), atol=1e-9
    )
    assert sample["LIDAR_TOP.calibration"].intrinsic is None


def test_poses_compose_only_where_frames_meet(ds):
    pose = ds[0]["ego_pose"]
    round_trip = pose @ pose.inverse()
    assert (round_trip.target, round_trip.source) == ("global", "global")
    np.testing.assert_allclose(round_trip.matrix, np.eye(4), atol=1e-9)
    with pytest.raises(ValueError, match="frames do not meet"):
        pose @ pose


def test_boxes_are_the_annotations_in_the_lidar_frame(root, ds):
    tables = Tables(root)
    sample = ds[0]
    boxes = sample["boxes"]
    lidar = tables.keyframe(sample["key"], "LIDAR_TOP")
    calibrated = tables.by_token["calibrated_sensor"][lidar["calibrated_sensor_token"]]
    to_global = matrix(tables.by_token["ego_pose"][lidar["ego_pose_token"]]) @ matrix(calibrated)
    rows = [tables.by_token["sample_annotation"][token] for token in boxes.token]
    expected = [r for r in tables.rows["sample_annotation"] if r["sample_token"] == sample["key"]]
    assert boxes.frame == "LIDAR_TOP" and len(boxes) == len(expected) > 0
    for box, row in zip(boxes.geometry, rows):
        local = np.linalg.inv(to_global) @ matrix(row)
        np.testing.assert_allclose(box[:3], local[:3, 3], atol=1e-3)
        width, length, height = row["size"]
        np.testing.assert_allclose(box[3:6], [length, width, height], rtol=1e-6)
        turn = box[6] - np.arctan2(local[1, 0], local[0, 0])
        assert abs(np.sin(turn)) < 1e-4 and np.cos(turn) > 0
    assert boxes.geometry.dtype == np.float32 and boxes.velocity.shape == (len(boxes), 3)
    assert boxes.lidar_points.tolist() == [r["num_lidar_pts"] for r in rows]


def test_indexing_follows_python(ds):
    assert ds[-1]["key"] == ds[5]["key"] and ds[np.int64(2)]["key"] == ds[2]["key"]
    for outside in (6, -7):
        with pytest.raises(IndexError):
            ds[outside]
    with pytest.raises(TypeError):
        ds["boxes"]
    assert [s["key"] for s in ds[1:5:2]] == [ds[1]["key"], ds[3]["key"]]


def test_rows_read_only_what_is_looked_at(root, ds, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(root, moved)
    opened = dt.open(moved, cache=tmp_path / "cache")
    shutil.rmtree(moved / "samples" / "CAM_FRONT")
    row = opened.row(0)
    assert len(row["boxes"]) > 0 and row["CAM_BACK"].shape == (90, 160, 3)
    assert set(row) == {"key", "scene", "timestamp_ns", *opened.fields} and len(row) == len(
        set(row)
    )
    with pytest.raises(dt.NotFound, match="CAM_FRONT"):
        row["CAM_FRONT"]
    with pytest.raises(KeyError):
        row["nothing"]


def keys(dataset):
    return [dataset.row(i)["key"] for i in range(len(dataset))]


def test_filter_by_everything(ds):
    pyarrow_compute = pytest.importorskip("pyarrow.compute")
    polars = pytest.importorskip("polars")
    torch = pytest.importorskip("torch")
    scene = ds[0]["scene"]
    mask = [ds.row(i)["scene"] == scene for i in range(len(ds))]
    want = [k for k, m in zip(keys(ds), mask) if m]
    assert 0 < len(want) < len(ds)
    for condition in [
        mask,
        np.array(mask),
        torch.tensor(mask),
        np.flatnonzero(mask),
        [i for i, m in enumerate(mask) if m],
        lambda row: row["scene"] == scene,
        pyarrow_compute.field("scene") == scene,
        polars.col("scene") == scene,
    ]:
        assert keys(ds.filter(condition)) == want
    assert keys(ds.filter([-1, 0, 0])) == [keys(ds)[5], keys(ds)[0], keys(ds)[0]]
    assert len(ds.filter([])) == 0


def test_filter_refuses_what_has_no_meaning(ds):
    for condition in ([True], [0.5], np.zeros((2, 2), int)):
        with pytest.raises(dt.InvalidArgument, match="filter"):
            ds.filter(condition)
    with pytest.raises(IndexError):
        ds.filter([6])


def test_fingerprint_depends_on_the_samples_alone(ds):
    twice = ds.filter([5, 4, 3, 2]).filter([1, 3])
    assert twice.fingerprint == ds.filter([4, 2]).fingerprint != ds.fingerprint
    assert len(ds.fingerprint) == 32 and int(ds.fingerprint, 16) >= 0


def test_table_through_arrow(ds):
    pyarrow = pytest.importorskip("pyarrow")
    polars = pytest.importorskip("polars")
    table = ds.table
    assert isinstance(table, pyarrow.Table) and table.num_rows == 6
    assert table["key"].to_pylist() == keys(ds) == polars.DataFrame(ds)["key"].to_list()
    part = ds.filter([3, 1])
    assert part.table["key"].to_pylist() == keys(part)
    fields = ds.fields
    assert list(fields) == table.column_names[3:]
    assert fields["CAM_FRONT"].kind == "image" and fields["boxes"].frame == "LIDAR_TOP"
    assert fields["LIDAR_TOP"].columns[:3] == ("x", "y", "z")


def keys_and_mean(dataset):
    return keys(dataset), float(dataset[0]["CAM_FRONT"].mean()), dataset.fingerprint


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_travels_to_workers(ds, method):
    part = ds.filter([4, 1])
    want = keys_and_mean(part)
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(keys_and_mean, (part,)).get(timeout=60) == want


def test_pickle_refuses_a_changed_index(root, tmp_path):
    path = tmp_path / "made.index.arrow"
    opened = dt.index(root, out=path)
    assert keys(opened) == keys(dt.open(path))
    travelling = pickle.dumps(opened)
    assert len(pickle.loads(travelling)) == 6
    other = tmp_path / "other"
    shutil.copytree(root, other)
    (folder,) = other.glob("v1.0-*")
    sample = json.loads((folder / "sample.json").read_text())
    scenes = json.loads((folder / "scene.json").read_text())
    scenes[0]["name"] = "renamed"
    sample[0]["timestamp"] -= 1
    (folder / "scene.json").write_text(json.dumps(scenes))
    (folder / "sample.json").write_text(json.dumps(sample))
    dt.index(other, out=path)
    if dt.open(path).fingerprint != opened.fingerprint:
        with pytest.raises(dt.SourceChanged):
            pickle.loads(travelling)
    with pytest.raises(TypeError, match="index"):
        pickle.dumps(dt.index(root))


def damaged(root, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    opened = dt.open(copy, cache=tmp_path / "cache")
    tables = Tables(copy)
    names = {c: tables.keyframe(opened.row(0)["key"], c) for c in ("CAM_FRONT", "LIDAR_TOP")}
    change({channel: copy / row["filename"] for channel, row in names.items()})
    return copy, opened


def test_changed_sources_are_named(root, tmp_path):
    def append(files):
        with open(files["CAM_FRONT"], "ab") as file:
            file.write(b"more")

    _, opened = damaged(root, tmp_path, append)
    with pytest.raises(dt.SourceChanged, match="CAM_FRONT"):
        opened[0]
    assert opened[1]["key"]


def test_truncated_picture_and_broken_records_are_named(root, tmp_path):
    def cut(files):
        for file in files.values():
            os.truncate(file, file.stat().st_size - 7)

    copy, _ = damaged(root, tmp_path, cut)
    opened = dt.index(copy)
    row = opened.row(0)
    with pytest.raises(dt.Corrupt, match="CAM_FRONT"):
        row["CAM_FRONT"]
    with pytest.raises(dt.Corrupt, match="multiple of 20 bytes"):
        row["LIDAR_TOP"]


def test_nothing_there_is_said_plainly(tmp_path):
    with pytest.raises(dt.NotFound):
        dt.open(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        dt.open(tmp_path / "missing.index.arrow")
    with pytest.raises(dt.InvalidArgument, match="format"):
        dt.open(tmp_path, format="mystery")


def test_numpy_is_imported_only_for_values(root, tmp_path):
    code = (
        "import sys, drivetrain as dt\n"
        f"ds = dt.open({str(root)!r}, cache={str(tmp_path)!r})\n"
        "len(ds), ds.fields, ds.row(0)['key'], ds[1:3]\n"
        "loaded = {'numpy', 'torch', 'pyarrow', 'polars'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_real_tables_without_their_files_still_give_what_they_hold(tmp_path):
    folder = DATA / "nuscenes_tables_lyft"
    if not folder.exists():
        pytest.skip("skipped: no nuscenes_tables_lyft in the test data")
    opened = dt.open(folder, cache=tmp_path)
    tables = {p.stem: json.loads(p.read_text()) for p in (folder / "v1.01-train").glob("*.json")}
    row = opened.row(0)
    assert row["key"] == tables["sample"][0]["token"]
    assert sorted(row["boxes"].token) == sorted(a["token"] for a in tables["sample_annotation"])
    calibrations = [name for name in opened.fields if name.endswith(".calibration")]
    assert len(calibrations) == len(tables["calibrated_sensor"])
    with pytest.raises(dt.NotFound, match="lidar/"):
        row["LIDAR_TOP"]
