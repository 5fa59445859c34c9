"""Checkpoint folders on bad days, from outside: full disks, flipped bits, foreign files.

After each case the older checkpoint must still be there and load.
"""

import os
import shutil
import subprocess
import sys
import textwrap

import drivetrain as dt
import numpy as np
import pytest

#: A deadline for each case: a hang fails the test instead of stopping the run.
pytestmark = pytest.mark.timeout(120)

STEPS = (1, 2)


def state(step):
    """What is saved as `step`."""
    return {"w": np.full((40, 25), float(step)), "b": np.arange(9) + step, "n": step}


@pytest.fixture
def folder(tmp_path):
    """A root with two committed steps."""
    root = tmp_path / "run"
    with dt.Checkpointer(root) as ckpt:
        for step in STEPS:
            ckpt.save(step, {"v": state(step)}, blocking=True)
    return root


def holds(root, step, skipped=()):
    """Restores, and checks which step came and why others did not."""
    live = {"w": np.zeros((40, 25)), "b": np.zeros(9, dtype=np.int64), "n": 0}
    with dt.Checkpointer(root) as ckpt:
        r = ckpt.restore({"v": live})
        assert r.step == step
        assert [number for number, _ in r.skipped] == list(skipped)
    want = state(step)
    assert (live["w"] == want["w"]).all() and (live["b"] == want["b"]).all()
    assert live["n"] == step
    return r.skipped


def file_of(root, pattern, step=2):
    """The one file of a step that matches."""
    (path,) = (root / f"step-{step:08d}").glob(pattern)
    return path


KINDS = ["manifest.json", "*/tensors.arrow", "*/rank-00000.safetensors"]


@pytest.mark.parametrize("pattern", KINDS)
@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_one_flipped_bit_anywhere_is_found(folder, pattern, place):
    path = file_of(folder, pattern)
    data = bytearray(path.read_bytes())
    at = min(int(len(data) * place), len(data) - 1)
    data[at] ^= 4
    path.write_bytes(data)
    with dt.Checkpointer(folder) as ckpt:
        with pytest.raises(dt.CheckpointDamaged, match="step 2") as caught:
            ckpt.restore({"v": state(0)}, step=2)
        assert path.name in str(caught.value)
        found = ckpt.verify(2)
        assert not found.ok and any(path.name in p.file for p in found.problems)
    ((_, why),) = holds(folder, 1, skipped=[2])
    assert path.name in why


@pytest.mark.parametrize("pattern", KINDS)
@pytest.mark.parametrize("how", ["empty", "cut", "grown", "missing", "folder"])
def test_a_file_of_another_size_or_kind_is_found(folder, pattern, how):
    path = file_of(folder, pattern)
    data = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes({"empty": b"", "cut": data[:-1], "grown": data + b"\0"}[how])
    if how in ("missing", "folder") and pattern == "manifest.json":
        assert not holds(folder, 1)  # then there is no such commit
        return
    ((_, why),) = holds(folder, 1, skipped=[2])
    assert path.name in why


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"null", b"[" * 100_000, b'{"crc32c": "00000000"}']
)
def test_a_manifest_of_nonsense_is_skipped(folder, content):
    file_of(folder, "manifest.json").write_bytes(content)
    holds(folder, 1, skipped=[2])


def test_all_steps_damaged_is_one_error_with_each_reason(folder):
    for step in STEPS:
        file_of(folder, "manifest.json", step).write_bytes(b"{}")
    with dt.Checkpointer(folder) as ckpt:
        with pytest.raises(dt.CheckpointDamaged) as caught:
            ckpt.restore({"v": state(0)})
    assert all(f"step {step}: " in str(caught.value) for step in STEPS)


def test_foreign_files_outlive_retention(folder):
    foreign = [
        folder / "notes.txt",
        folder / "step-00000001" / "mine.txt",
        file_of(folder, "*/tensors.arrow", 1).with_name("evaluation.json"),
        folder / "step-1" / "manifest.json",
        folder / "step-00000099" / "notes.txt",
        folder / "best" / "model.safetensors",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with dt.Checkpointer(folder, keep=dt.Keep(last=1)) as ckpt:
        for step in (3, 4):
            ckpt.save(step, {"v": state(step)}, blocking=True)
        assert ckpt.steps() == [4]
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)
    assert not list((folder / "step-00000001").glob("*/rank-*"))
    holds(folder, 4)


def test_a_refused_leaf_leaves_nothing_behind(folder):
    before = sorted(folder.rglob("*"))
    with dt.Checkpointer(folder) as ckpt:
        for blocking in (True, False):
            with pytest.raises(dt.Unsupported, match=r"v\.deep\[?\.?1"):
                ckpt.save(3, {"v": {"deep": [0, {1, 2}]}}, blocking=blocking)
        assert ckpt.steps() == list(STEPS)
    assert sorted(folder.rglob("*")) == before
    holds(folder, 2)


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for uri in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(dt.DrivetrainError, match="file"):
            dt.Checkpointer(uri)


@pytest.mark.parametrize("uri", ["nope://bucket/run", "s3://", "http//x\0y", ""])
def test_odd_roots_are_refused(tmp_path, uri, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dt.DrivetrainError) as caught:
        dt.Checkpointer(uri)
    assert str(caught.value)


@pytest.mark.parametrize("step", [-1, True, "3", 1.0, None, 2**63, 10**30])
def test_odd_steps_are_refused(folder, step):
    with dt.Checkpointer(folder) as ckpt:
        with pytest.raises(dt.InvalidArgument, match="step"):
            ckpt.save(step, {"v": state(3)}, blocking=True)
        assert ckpt.steps() == list(STEPS)
        if step is not None:
            with pytest.raises(dt.DrivetrainError, match="step"):
                ckpt.restore({"v": state(0)}, step=step)


@pytest.mark.parametrize("keep", [(0, None), (-1, None), (2**40, None), (1, 0), (1, -5)])
def test_odd_retention_is_refused(folder, keep):
    with pytest.raises(dt.InvalidArgument, match="Keep"):
        dt.Checkpointer(folder, keep=dt.Keep(last=keep[0], every=keep[1]))


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_the_program_names_the_damage(folder, verb):
    path = file_of(folder, "manifest.json")
    path.write_bytes(path.read_bytes()[:-9])
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain._cli", "ckpt", verb, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "manifest.json" in said and "panicked" not in said, said


# A file system of its own, that is full or read-only


def in_namespace(setup, script, folder):
    """Runs `script` where `setup` may mount what it likes on `folder`; skips where it may not."""
    if shutil.which("unshare") is None:
        pytest.skip("skipped: unshare is not installed")
    probe = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", str(folder)]
    if subprocess.run(probe, capture_output=True, timeout=30).returncode != 0:
        pytest.skip("skipped: this machine allows no mounts in a user namespace")
    shell = f'set -e; {setup}; exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", shell, sys.executable, textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "ROOT": str(folder)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "panicked" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("mib", [1, 6, 9])
def test_a_full_disk_keeps_the_older_step(tmp_path, blocking, mib):
    """A file system of 16 MiB: 5 MiB fit; what comes on top of `mib` foreign ones does not."""
    script = f"""
        import os, re
        import numpy as np
        import drivetrain as dt
        root = os.environ["ROOT"]
        small = {{"w": np.full(5 << 17, 1.0)}}
        with dt.Checkpointer(root, shm_dir=None) as ckpt:
            ckpt.save(1, {{"v": small}}, blocking=True)
            with open(root + "/foreign.bin", "wb") as file:
                file.write(bytes({mib} << 20))
            size = 12 << 17
            try:
                ckpt.save(2, {{"v": {{"w": np.full(size, 2.0)}}}}, blocking={blocking}).wait(60)
                raise SystemExit("it was saved")
            except dt.NoSpace as error:
                text = str(error)
            need, have = re.search(r"need (\\d+) bytes, have (\\d+) bytes", text).groups()
            assert int(need) > int(have) >= 0, text
            assert root in text or "step-00000002" in text, text
            assert ckpt.steps() == [1]
            live = {{"w": np.zeros(5 << 17)}}
            assert ckpt.restore({{"v": live}}).step == 1 and (live["w"] == 1).all()
            left = [os.path.join(a, f) for a, _, c in os.walk(root) for f in c if "00000002" in a]
            assert left == [], left
            os.unlink(root + "/foreign.bin")
            ckpt.save(2, {{"v": small}}, blocking=True)
            assert ckpt.steps() == [1, 2]
    """
    root = tmp_path / "disk"
    root.mkdir()
    in_namespace('mount -t tmpfs -o size=16m none "$ROOT"', script, root)


@pytest.mark.parametrize(
    ("options", "fill", "told"),
    [
        # No byte left; and bytes enough, but no file may be made any more.
        ("size=1m", "file.write(bytes(2 << 20))", "need 5 bytes, have 0 bytes"),
        ("size=1m,nr_inodes=2", "pass", "no inodes left"),
    ],
)
def test_a_root_without_any_room_is_refused_at_once(tmp_path, options, fill, told):
    root = tmp_path / "disk"
    root.mkdir()
    script = f"""
        import contextlib, os
        import drivetrain as dt
        root = os.environ["ROOT"]
        with contextlib.suppress(OSError), open(root + "/foreign.bin", "wb", 0) as file:
            {fill}
        for place in (root, root + "/run"):
            try:
                dt.Checkpointer(place, shm_dir=None)
            except dt.NoSpace as error:
                assert {told!r} in str(error) and root in str(error), error
            else:
                raise SystemExit("it was accepted")
        left = [os.path.join(a, f) for a, _, c in os.walk(root) for f in c]
        assert left == [root + "/foreign.bin"], left
        os.unlink(root + "/foreign.bin")
        dt.Checkpointer(root, shm_dir=None).close()
        assert [f for _, _, c in os.walk(root) for f in c] == []
    """
    in_namespace(f'mount -t tmpfs -o {options} none "$ROOT"', script, root)


def test_a_root_without_any_room_by_script(tmp_path, monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_FAULT", "enospc@put_new:1")
    with pytest.raises(dt.NoSpace, match=r"need 5 bytes, have 0 bytes"):
        dt.Checkpointer(tmp_path / "run")
    assert [f for f in (tmp_path / "run").rglob("*") if f.is_file()] == []


def test_a_read_only_root_is_refused_at_once(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    script = """
        import os
        import drivetrain as dt
        try:
            dt.Checkpointer(os.environ["ROOT"])
        except dt.StorageError as error:
            assert os.environ["ROOT"] in str(error), error
            assert "writable" in str(error), error
        else:
            raise SystemExit("it was accepted")
    """
    in_namespace('mount -t tmpfs -o size=1m,ro none "$ROOT"', script, root)


RESTORES_ALL_THE_SAME = """
    import os
    import numpy as np
    import drivetrain as dt
    with dt.Checkpointer(os.environ["ROOT"]) as ckpt:
        w = np.zeros(1000)
        r = ckpt.restore({"w": w})
        assert r.step == 1 and (w == 7).all(), r
        try:
            ckpt.save(2, {"w": np.zeros(3_000_000, np.uint8)})
        except dt.StorageError as error:
            CHECK
        else:
            raise SystemExit("it was saved")
        assert ckpt.steps() == [1]
        AFTER
"""
SAVES_ONE_STEP = (
    "import os, numpy as np, drivetrain as dt; "
    "dt.Checkpointer(os.environ['ROOT']).save(1, {'w': np.full(1000, 7.0)}, blocking=True)"
)


def test_a_read_only_root_with_a_step_restores_it_and_refuses_to_save(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    setup = (
        'mount -t tmpfs -o size=1m none "$ROOT" && '
        f'"{sys.executable}" -c "{SAVES_ONE_STEP}" && mount -o remount,ro "$ROOT"'
    )
    check = 'assert os.environ["ROOT"] in str(error) and "writable" in str(error), error'
    in_namespace(
        setup, RESTORES_ALL_THE_SAME.replace("CHECK", check).replace("AFTER", "pass"), root
    )


def test_a_full_root_restores_and_saves_again_when_there_is_room(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    setup = (
        'mount -t tmpfs -o size=4m none "$ROOT" && '
        f'"{sys.executable}" -c "{SAVES_ONE_STEP}" && '
        '{ cat /dev/zero > "$ROOT/ballast" 2>/dev/null || true; }'
    )
    check = (
        'assert isinstance(error, dt.NoSpace) and "have 0 bytes" in str(error), error; '
        'need = int(str(error).split("need ")[1].split()[0]); assert need >= 3_000_000, error'
    )
    after = (
        'os.remove(os.environ["ROOT"] + "/ballast"); '
        'assert ckpt.save(2, {"w": np.zeros(3_000_000, np.uint8)}, blocking=True).wait() == 2; '
        "assert ckpt.failed_saves == 1"
    )
    in_namespace(setup, RESTORES_ALL_THE_SAME.replace("CHECK", check).replace("AFTER", after), root)


def test_a_full_staging_folder_means_private_memory(tmp_path):
    root = tmp_path / "shm"
    root.mkdir()
    script = """
        import os, tempfile, warnings
        import numpy as np
        import drivetrain as dt
        with tempfile.TemporaryDirectory() as home, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with dt.Checkpointer(home, shm_dir=os.environ["ROOT"]) as ckpt:
                ckpt.save(1, {"v": {"w": np.full(8 << 17, 3.0)}}, blocking=True)
                live = {"w": np.zeros(8 << 17)}
                assert ckpt.restore({"v": live}).step == 1 and (live["w"] == 3).all()
        assert any("private memory" in str(w.message) for w in seen), seen
    """
    in_namespace('mount -t tmpfs -o size=2m none "$ROOT"', script, root)
