"""Bad data and bad arguments from outside: through the public API and the program alone.

Each case must end within a deadline in an error class of `drivetrain` that names the file and what
was expected; no panic, no value made of damaged bytes.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import drivetrain as dt
import numpy as np
import pytest

#: A deadline for each case: a hang fails the test instead of stopping the run.
pytestmark = pytest.mark.timeout(120)

POINTS = {"LIDAR_TOP": dt.Points()}
FRONT = {"CAM_FRONT": dt.Image(size=(18, 32))}


def program(*arguments, env=None):
    """Runs the installed program; gives its exit code and what it printed on either stream."""
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain._cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env=env,
    )
    said = done.stdout + done.stderr
    assert "panicked" not in said and "Traceback" not in said, said
    return done.returncode, said


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A tree of one scene, made by the program; tests copy it before they damage it."""
    root = tmp_path_factory.mktemp("made") / "nuscenes"
    size = ["--image-size", "320x180", "--lidar-points", "2000", "--threads", "1"]
    code, said = program("synth", root, "--scenes", "1", "--keyframes", "4", *size)
    assert code == 0, said
    return root


@pytest.fixture
def root(made, tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(made, tmp_path / "data"))


def opened(root):
    """The data set, with its index inside the test's folder."""
    return dt.open(root, index=root.parent / "data.index.arrow")


def file_of(root, ds, field, row=0):
    """Path of the file that a field of a row lies in."""
    import pyarrow

    sources = pyarrow.ipc.open_file(str(root.parent / "data.sources.arrow")).read_all()
    uris = dict(zip(sources["id"].to_pylist(), sources["uri"].to_pylist()))
    return root / uris[ds.table[field].to_pylist()[row]["source"]]


def refused(kind, *words):
    """Expects an error class of the package whose message has all the words."""
    return _Refused(kind, words)


class _Refused:
    def __init__(self, kind, words):
        self._kind, self._words = kind, words

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert error is not None, f"expected {self._kind.__name__}, found no error"
        if not isinstance(error, self._kind):
            return False
        assert isinstance(error, dt.DrivetrainError)
        for word in self._words:
            assert str(word) in str(error), f"{word!r} is not in: {error}"
        return True


# Damaged files of a tree


@pytest.mark.parametrize("how", ["half", "header", "empty", "garbage"])
def test_a_damaged_picture_is_named(root, how):
    ds = opened(root)
    path = file_of(root, ds, "CAM_FRONT")
    whole = path.read_bytes()
    damaged = {
        "half": whole[: len(whole) // 2],
        "header": whole[:20],
        "empty": b"",
        "garbage": bytes(len(whole)),
    }[how]
    path.write_bytes(damaged)
    # the index was made from the whole file; garbage of the same size is found by the decoder
    kind = dt.Corrupt if how == "garbage" else dt.SourceChanged
    with refused(kind, path.name):
        ds[0]
    with refused(kind, path.name, "CAM_FRONT"):
        list(dt.DataLoader(opened(root), 2, fields=FRONT))
    (root.parent / "data.index.arrow").unlink()
    fresh = dt.open(root, index=root.parent / "fresh.index.arrow")
    with refused(dt.Corrupt, path.name, "expected", "found"):
        fresh[0]
    with refused(dt.Corrupt, path.name, "CAM_FRONT"):
        list(dt.DataLoader(fresh, 2, fields=FRONT))
    masked = list(dt.DataLoader(fresh, 4, fields=FRONT, on_error="mask"))
    assert masked[0]["_valid"].tolist() == [False, True, True, True]
    assert not masked[0]["CAM_FRONT"][0].any() and masked[0]["CAM_FRONT"][1].any()


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_points_of_a_broken_record_are_refused(root, cut):
    path = file_of(root, opened(root), "LIDAR_TOP", 1)
    path.write_bytes(path.read_bytes()[:-cut])
    fresh = dt.open(root, index=root.parent / "fresh.index.arrow")
    with refused(dt.Corrupt, path.name, "20"):
        fresh[1]
    with refused(dt.Corrupt, path.name, "LIDAR_TOP"):
        list(dt.DataLoader(fresh, 2, fields=POINTS))
    code, said = program("check", root, "--json")
    assert code == 1 and path.name in said


def test_a_missing_file_is_named(root):
    ds = opened(root)
    path = file_of(root, ds, "CAM_FRONT", 2)
    path.unlink()
    with refused(dt.NotFound, path.name):
        ds[2]
    with refused(dt.NotFound, path.name, "CAM_FRONT"):
        list(dt.DataLoader(ds, 2, fields=FRONT))
    assert ds[1]["CAM_FRONT"].shape == (180, 320, 3)
    code, said = program("check", root)
    assert code == 1 and path.name in said


def test_a_source_that_changed_after_indexing_is_refused(root):
    ds = opened(root)
    path = file_of(root, ds, "LIDAR_TOP")
    before = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(20))
    with refused(dt.SourceChanged, path.name, before, before + 20, "index it again"):
        ds[0]
    with refused(dt.SourceChanged, path.name):
        list(dt.DataLoader(ds, 2, fields=POINTS))


# Damaged tables


def table(root, name, change):
    """Rewrites one table of the tree."""
    (path,) = root.glob(f"v1.0-*/{name}.json")
    rows = json.loads(path.read_text())
    change(rows)
    path.write_text(json.dumps(rows))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("sample_data", "calibrated_sensor_token"),
        ("sample_data", "ego_pose_token"),
        ("sample_data", "sample_token"),
        ("calibrated_sensor", "sensor_token"),
        ("sample", "scene_token"),
        ("sample_annotation", "instance_token"),
        ("instance", "category_token"),
    ],
)
def test_a_dangling_token_is_named(root, name, column):
    def change(rows):
        rows[0][column] = "0123456789abcdef0123456789abcdef"

    table(root, name, change)
    with refused(dt.Corrupt, f"{name}.json", "0123456789abcdef0123456789abcdef"):
        opened(root)
    code, said = program("index", root, "--out", root.parent / "o.index.arrow")
    assert code == 1 and f"{name}.json" in said
    assert not (root.parent / "o.index.arrow").exists()


@pytest.mark.parametrize("content", [b"", b"[", b"{}", b"[1, 2]", b'[{"token": 3}]', b"\xff" * 9])
def test_a_damaged_table_is_named(root, content):
    (path,) = root.glob("v1.0-*/sample.json")
    path.write_bytes(content)
    with refused(dt.Corrupt, "sample.json"):
        opened(root)


def test_a_missing_table_is_named(root):
    (path,) = root.glob("v1.0-*/ego_pose.json")
    path.unlink()
    with refused(dt.DrivetrainError, "ego_pose.json"):
        opened(root)


@pytest.mark.parametrize("name", ["../outside.jpg", "/etc/hostname", "samples/../../x.jpg"])
def test_a_file_name_that_leaves_the_tree_is_refused(root, name):
    def change(rows):
        rows[0]["filename"] = name

    table(root, "sample_data", change)
    with refused(dt.Corrupt, "sample_data.json", name):
        opened(root)


# Tars


def tar_of(path, names, content=b"x" * 700):
    """A tar with one member per name (bytes names go in as they are)."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT, encoding="latin-1") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize(("cut", "at"), [(0, 0), (100, 0), (512, 512), (1000, 512), (2500, 2048)])
def test_a_truncated_tar_is_refused_with_its_offset(tmp_path, cut, at):
    path = tar_of(tmp_path / "a.tar", ["a.bin", "b.bin", "c.bin"])
    path.write_bytes(path.read_bytes()[:cut])
    with refused(dt.Corrupt, "a.tar", "truncated", f"byte {at}:"):
        dt.open(path, index=tmp_path / "a.index.arrow")
    assert not (tmp_path / "a.index.arrow").exists()


@pytest.mark.parametrize("cut", [1300, 1536])
def test_a_tar_that_ends_between_members_is_noted(tmp_path, cut):
    """Programs that are killed leave such tars, and so do some that are not: what is there is
    whole, so it is used, with a note."""
    path = tar_of(tmp_path / "a.tar", ["a.bin", "b.bin", "c.bin"])
    path.write_bytes(path.read_bytes()[:cut])
    ds = dt.open(path, index=tmp_path / "a.index.arrow")
    assert [bytes(sample["bin"]) for sample in ds] == [b"x" * 700]
    code, said = program("index", path, "--out", tmp_path / "b.index.arrow")
    assert code == 0 and "cut off" in said, said


@pytest.mark.parametrize("name", ["../../evil.bin", "/etc/evil.bin", "a/../../evil.bin"])
def test_a_member_that_leaves_the_tar_is_refused_or_only_a_name(tmp_path, name):
    path = tar_of(tmp_path / "a.tar", ["a.bin", name])
    with refused(dt.Corrupt, "a.tar", "evil.bin"):
        dt.open(path, index=tmp_path / "a.index.arrow")
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar"]


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    path = tar_of(tmp_path / "a.tar", ["a.bin", "caf\xe9.bin"])
    with refused(dt.Corrupt, "a.tar", "UTF-8"):
        dt.open(path, index=tmp_path / "a.index.arrow")


def test_a_flipped_header_is_refused(tmp_path):
    path = tar_of(tmp_path / "a.tar", ["a.bin", "b.bin"])
    data = bytearray(path.read_bytes())
    data[1536 + 125] ^= 4
    path.write_bytes(data)
    with refused(dt.Corrupt, "a.tar", "checksum", f"byte {1536 + 148}:"):
        dt.open(path, index=tmp_path / "a.index.arrow")


# Things that are no data set, and damaged indexes


@pytest.mark.parametrize("name", ["garbage.bin", "garbage.tar", "garbage.index.arrow", "x.pkl"])
@pytest.mark.parametrize("size", [0, 3, 5000])
def test_what_is_no_data_set_is_refused(tmp_path, name, size):
    path = tmp_path / name
    path.write_bytes(np.random.default_rng(7).bytes(size))
    with refused(dt.DrivetrainError, name):
        dt.open(path)
    code, said = program("info", path)
    assert code in (1, 2) and name in said


def test_an_empty_folder_and_nothing_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with refused(dt.NotFound, "empty"):
        dt.open(tmp_path / "empty")
    with refused(dt.NotFound, "nowhere"):
        dt.open(tmp_path / "nowhere")
    with refused(dt.InvalidArgument, "nonsense"):
        dt.open(tmp_path / "empty", format="nonsense")


@pytest.mark.parametrize("uri", ["nope://bucket/data", "http//x", "s3://", "://"])
def test_odd_uris_are_refused(tmp_path, uri, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(dt.DrivetrainError):
        dt.open(uri)


@pytest.mark.parametrize("which", ["index", "sources"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_index_is_refused_or_made_again(root, which, keep):
    count = len(opened(root))
    path = root.parent / f"data.{which}.arrow"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    index = root.parent / "data.index.arrow"
    with refused(dt.Corrupt, f"data.{which}.arrow"):
        dt.open(index)
    assert len(opened(root)) == count


def test_an_index_without_its_sources_says_so(root):
    opened(root)
    (root.parent / "data.sources.arrow").unlink()
    with refused(dt.DrivetrainError, "data.sources.arrow"):
        dt.open(root.parent / "data.index.arrow")


@pytest.mark.parametrize("which", ["index", "sources"])
def test_flipped_bits_in_an_index_never_crash(root, which):
    """Either it is refused by name, or what it gives can be read or is refused."""
    opened(root)
    path = root.parent / f"data.{which}.arrow"
    data = path.read_bytes()
    rng = np.random.default_rng(11)
    for at in rng.integers(0, len(data), 60).tolist():
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        try:
            ds = dt.open(root.parent / "data.index.arrow")
            for sample in ds:
                assert sample["CAM_FRONT"] is None or sample["CAM_FRONT"].ndim == 3
            for on_error in ("raise", "mask", "replace"):
                loader = dt.DataLoader(ds, 3, on_error=on_error, memory_limit="64MiB", threads=1)
                assert len(list(loader)) == 2
        except dt.DrivetrainError as error:
            assert str(error)


@pytest.mark.parametrize("name", ["a.tar", "a.index.arrow"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, name, kind):
    """Opening a pipe would wait for a writer that never comes."""
    path = tmp_path / name
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    code, said = program("info", path)
    assert code == 1 and "not a regular file" in said and name in said, said


def test_damage_inside_a_tar_is_placed_in_the_tar(tmp_path):
    """The offset that a message names can be looked up in the file that it names."""
    path = tar_of(tmp_path / "a.tar", ["a.txt", "b.txt"], b"caf\xe9")
    ds = dt.open(path, index=tmp_path / "a.index.arrow")
    with refused(dt.Corrupt, "a.tar", f"byte {512 + 3}:", "byte E9"):
        ds[0]
    with refused(dt.Corrupt, "a.tar", f"byte {1536 + 3}:", "byte E9"):
        ds[1]
    with refused(dt.Corrupt, "a.tar", f"byte {512 + 3}:"):
        list(dt.DataLoader(ds, 2))
    code, said = program("check", path)
    assert code == 1 and f"byte {1536 + 3}" in said, said


# Arguments


@pytest.mark.parametrize(
    ("field", "form"),
    [
        ("CAM_FRONT", dt.Image(size=(0, 10))),
        ("CAM_FRONT", dt.Image(size=(10**9, 10**9))),
        ("CAM_FRONT", dt.Image(size=(2**40, 2**40))),
        ("CAM_FRONT", dt.Image(size=(10, 10.5))),
        ("CAM_FRONT", dt.Image(size=10)),
        ("CAM_FRONT", dt.Image(size=(-1, 10))),
        ("CAM_FRONT", dt.Image(size=(10, 10), crop=(0, 0, 0, 5))),
        ("CAM_FRONT", dt.Image(size=(10, 10), mean=float("nan"))),
        ("CAM_FRONT", dt.Image(size=(10, 10), std=0)),
        ("CAM_FRONT", dt.Image(size=(10, 10), std=float("inf"))),
        ("CAM_FRONT", dt.Image(size=(10, 10), mean=(1, 2))),
        ("CAM_FRONT", dt.Image(size=(10, 10), mean="grey")),
        ("CAM_FRONT", dt.Image(size=(10, 10), dtype="int7")),
        ("CAM_FRONT", dt.Image(size=(10, 10), dtype="uint8", mean=3)),
        ("CAM_FRONT", dt.Image(size=(10, 10), layout="WHC")),
        ("CAM_FRONT", dt.Points()),
        ("LIDAR_TOP", dt.Image(size=(10, 10))),
        ("LIDAR_TOP", dt.Points(sweeps=-1)),
        ("LIDAR_TOP", dt.Points(sweeps=10**30)),
        ("LIDAR_TOP", dt.Points(sweeps=1.5)),
        ("LIDAR_TOP", dt.Points(range=(0, 0, 0, 1))),
        ("LIDAR_TOP", dt.Points(range=(float("nan"),) * 6)),
        ("LIDAR_TOP", dt.Points(range=(1, 1, 1, 0, 0, 0))),
        ("LIDAR_TOP", dt.Points(range="abcdef")),
        ("LIDAR_TOP", dt.Points(columns=["x", "colour"])),
        ("LIDAR_TOP", dt.Points(columns=[])),
        ("LIDAR_TOP", dt.Points(ragged="maybe")),
        ("LIDAR_TOP", dt.Points(ragged="pad")),
        ("LIDAR_TOP", dt.Points(ragged="pad", max_points=0)),
        ("LIDAR_TOP", dt.Points(ragged="pad", max_points=2**62)),
        ("LIDAR_TOP", dt.Points(remove_close_m=float("nan"))),
        ("LIDAR_TOP", dt.Points(remove_close_m=-1)),
        ("LIDAR_TOP", 17),
    ],
    ids=repr,
)
def test_odd_requests_are_refused_by_field(clean, field, form):
    with refused(dt.DrivetrainError, field):
        next(iter(dt.DataLoader(clean, 2, fields={field: form}, memory_limit="64MiB")))


@pytest.fixture(scope="session")
def clean(made, tmp_path_factory):
    """The undamaged data set."""
    return dt.open(made, index=tmp_path_factory.mktemp("index") / "c.index.arrow")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -3}, "batch_size"),
        ({"batch_size": 2**62}, "batch_size"),
        ({"batch_size": 10**30}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"threads": 0}, "threads"),
        ({"threads": -1}, "threads"),
        ({"threads": 10**9}, "threads"),
        ({"memory_limit": 0}, "memory_limit"),
        ({"memory_limit": "lots"}, "memory_limit"),
        ({"memory_limit": -5}, "memory_limit"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"rank": 0}, "world_size"),
        ({"rank": 0, "world_size": 0}, "world_size"),
        ({"shuffle": "maybe"}, "shuffle"),
        ({"shuffle": ("block", 0, 0)}, "shuffle"),
        ({"on_error": "ignore"}, "on_error"),
        ({"on_held": "drop"}, "on_held"),
        ({"on_error_limit": 1.5}, "on_error_limit"),
        ({"on_error_limit": float("nan")}, "on_error_limit"),
        ({"memory_limit": 10**30}, "memory_limit"),
        ({"memory_limit": "99999999999TiB"}, "memory_limit"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"output": "jax"}, "output"),
        ({"fields": {"CAM_FRNT": None}}, "CAM_FRONT"),
        ({"fields": ["lidar_top"]}, "LIDAR_TOP"),
        ({"fields": {"nothing like it": None}}, "nothing like it"),
    ],
    ids=repr,
)
def test_odd_loader_arguments_are_refused_by_name(clean, options, word):
    options = {"batch_size": 2, "memory_limit": "64MiB", **options}
    with refused(dt.DrivetrainError, word):
        next(iter(dt.DataLoader(clean, options.pop("batch_size"), **options)))


@pytest.mark.parametrize("state", [{}, {"epoch": -1}, [1], {"epoch": "x", "position": 0}, None])
def test_odd_loader_states_are_refused(clean, state):
    loader = dt.DataLoader(clean, 2, fields={})
    before = loader.state_dict()
    with refused(dt.DrivetrainError, "state"):
        loader.load_state_dict(state)
    for name, value in [("epoch", -1), ("position", 10**6), ("seed", 99), ("fingerprint", "00")]:
        if name in before:
            with refused(dt.DrivetrainError, name):
                loader.load_state_dict({**before, name: value})
    assert loader.state_dict() == before


def test_the_program_names_a_key_or_verb_that_is_not_there(made, tmp_path):
    page = tmp_path / "p.html"
    code, said = program("view", made, "no-such-key", "--out", page)
    assert code in (1, 2) and "no-such-key" in said and not page.exists()
    code, said = program("view", tmp_path / "nowhere", "k", "--out", page)
    assert code == 1 and "nowhere" in said
    assert program("frobnicate")[0] == 2
    assert program("synth", tmp_path / "x", "--image-size", "0x9")[0] == 2
    code, said = program("ckpt", "ls", tmp_path / "nowhere")
    assert code == 0 and "no committed step" in said and not (tmp_path / "nowhere").exists()
    assert program("ckpt", "verify", tmp_path / "nowhere")[0] == 1
    (tmp_path / "file").write_bytes(b"x")
    for verb in ("ls", "inspect", "verify"):
        code, said = program("ckpt", verb, tmp_path / "file")
        assert code in (1, 2) and "file" in said, (verb, said)


def test_an_index_that_cannot_be_written_is_named(made, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    out = tmp_path / "file" / "a.index.arrow"
    with refused(dt.DrivetrainError, "file"):
        dt.index(made, out=out)
    code, said = program("index", made, "--out", out)
    assert code == 1 and os.fspath(tmp_path / "file") in said
