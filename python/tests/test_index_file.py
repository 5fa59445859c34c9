"""The index and sources files as other programs see them: pyarrow and polars open both by path."""

import io
import os
import pathlib
import subprocess
import sys
import tarfile

import drivetrain as dt
import pyarrow as pa
import pyarrow.ipc
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(os.environ.get("DRIVETRAIN_TEST_DATA", REPOSITORY / "../shared/data"))


def read(path: pathlib.Path) -> pa.Table:
    """The table in an Arrow IPC file, mapped, with every value checked."""
    table = pyarrow.ipc.open_file(pa.memory_map(str(path))).read_all()
    table.validate(full=True)
    return table


@pytest.fixture
def tar(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tar of three samples; the second has no text."""
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as out:
        for name, data in [("a.bin", b"123"), ("a.txt", b"x"), ("b.bin", b""), ("c.txt", b"yz")]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def test_pyarrow_reads_ranges_that_hold_the_bytes(tar: pathlib.Path) -> None:
    index = tar.with_name("t.index.arrow")
    ds = dt.index(tar, out=index)
    table = read(index)
    assert table["key"].to_pylist() == ["a", "b", "c"]
    assert table["scene"].to_pylist() == ["t.tar"] * 3
    assert pa.types.is_dictionary(table.schema.field("scene").type)
    meta = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
    assert meta["drivetrain.version"] == "1"
    assert meta["drivetrain.fingerprint"] == ds.fingerprint
    assert table.schema.field("txt").metadata == {b"drivetrain.kind": b"text"}
    raw = tar.read_bytes()
    texts = [row and raw[row["offset"] :][: row["length"]] for row in table["txt"].to_pylist()]
    assert texts == [b"x", None, b"yz"]
    sources = read(tar.with_name("t.sources.arrow"))
    assert sources["uri"].to_pylist() == ["t.tar"]
    assert sources["size"].to_pylist() == [len(raw)]
    assert sources["id"].type == pa.uint32()


def test_polars_reads_both_files(tar: pathlib.Path) -> None:
    pl = pytest.importorskip("polars")
    index = tar.with_name("t.index.arrow")
    dt.index(tar, out=index)
    frame = pl.read_ipc(index)
    assert frame["key"].to_list() == ["a", "b", "c"]
    assert frame["bin"].struct.field("length").to_list() == [3, 0, None]
    assert pl.scan_ipc(index).select(pl.len()).collect().item() == 3
    assert pl.read_ipc(tar.with_name("t.sources.arrow"))["uri"].to_list() == ["t.tar"]


def test_boxes_and_poses_are_lists_of_numbers(tmp_path: pathlib.Path) -> None:
    info = DATA / "nuscenes_demo/n015-2018-07-24-11-22-45+0800.pkl"
    if not info.exists():
        pytest.skip("no test data at DRIVETRAIN_TEST_DATA")
    pl = pytest.importorskip("polars")
    index = tmp_path / "n.index.arrow"
    dt.index(info, out=index)
    for row in (read(index).to_pylist()[0], pl.read_ipc(index).to_dicts()[0]):
        assert len(row["boxes"]) == 69
        assert row["boxes"][0]["name"] == "pedestrian"
        assert len(row["boxes"][0]["geometry"]) == 7
        assert len(row["ego_pose"]["matrix"]) == 16
        assert row["ego_pose"]["matrix"][12:] == [0.0, 0.0, 0.0, 1.0]
        assert len(row["CAM_FRONT.calibration"]["intrinsic"]) == 9
        assert row["LIDAR_TOP.calibration"]["intrinsic"] is None
        assert row["LIDAR_TOP"]["codec"] == "f32x5"
        assert row["LIDAR_TOP"]["length"] == 34688 * 20


def test_a_compressed_copy_opens_from_where_it_was_moved(tar, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index = tar.with_name("t.index.arrow")
    program = [sys.executable, "-m", "drivetrain._cli", "index", str(tar)]
    subprocess.run([*program, "--out", str(index), "--compress"], check=True, timeout=60)
    wanted = dt.open(str(index)).fingerprint
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in (index, tar.with_name("t.sources.arrow")):
        copy = file.with_name(file.name + ".zst")
        with pa.input_stream(str(copy), compression="zstd") as stream:
            assert stream.read() == file.read_bytes()
        copy.rename(moved / copy.name)
        file.unlink()
    tar.rename(moved / tar.name)
    for _ in range(2):  # expanded, then found in the cache
        ds = dt.open(str(moved / "t.index.arrow.zst"))
        assert ds.fingerprint == wanted and bytes(ds[0]["bin"]) == b"123"


def test_a_damaged_compressed_copy_is_refused_by_name(tar, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index = tar.with_name("t.index.arrow")
    program = [sys.executable, "-m", "drivetrain._cli", "index", str(tar)]
    subprocess.run([*program, "--out", str(index), "--compress"], check=True, timeout=60)
    copy = tar.with_name("t.index.arrow.zst")
    copy.write_bytes(copy.read_bytes()[:-20])
    with pytest.raises(dt.Corrupt, match=r"t\.index\.arrow\.zst"):
        dt.open(str(copy))
