"""Failing saves, changing tensors, damaged files: each is named and none is lost."""

import drivetrain as dt
import numpy as np
import pytest
import torch
from drivetrain import _native
from torch import nn


class Meddling:
    """The native checkpointer, with a tensor that changes after the copy."""

    def __init__(self, native, change):
        self._native, self._change = native, change

    def __getattr__(self, name):
        return getattr(self._native, name)

    def save(self, *args, check, **options):
        def check_late():
            self._change()
            check()

        return self._native.save(*args, check=check_late, **options)


def meddled(folder, change, **options):
    ckpt = dt.Checkpointer(folder, **options)
    ckpt._native = Meddling(ckpt._native, change)
    return ckpt


def test_a_tensor_that_changes_during_the_copy_fails_the_save(tmp_path):
    weight, array = nn.Parameter(torch.zeros(100)), np.zeros(100)

    def step():
        with torch.no_grad():
            weight.add_(1)

    with meddled(tmp_path, step) as ckpt:
        with pytest.raises(_native.Corrupt, match=r"v\.w"):
            ckpt.save(1, {"v": {"n": array, "w": weight}})
        assert ckpt.steps() == [] and ckpt.failed_saves == 1
    with meddled(tmp_path, lambda: array.__iadd__(1)) as ckpt:
        ckpt.save(2, {"v": {"n": array, "w": weight}}, blocking=True)
    with meddled(tmp_path, lambda: array.__iadd__(1), guard="checksum") as ckpt:
        with pytest.raises(_native.Corrupt, match=r"v\.n"):
            ckpt.save(3, {"v": {"n": array, "w": weight}})
        assert ckpt.steps() == [2]
    with meddled(tmp_path, step, guard=None) as ckpt:
        ckpt.save(4, {"v": {"w": weight}}, blocking=True)
    with meddled(tmp_path, step, on_error="warn") as ckpt:
        with pytest.warns(RuntimeWarning, match=r"step 5 was not committed.*v\.w"):
            handle = ckpt.save(5, {"v": {"w": weight}}, blocking=True)
        with pytest.raises(_native.Corrupt):
            handle.wait()
        with pytest.raises(_native.Corrupt):
            handle.staged()
        assert handle.done() and ckpt.failed_saves == 1


def test_a_save_is_copied_anew_when_a_tensor_changed_meanwhile(tmp_path):
    weight, counter = nn.Parameter(torch.zeros(100)), {"n": 0}

    def twice():
        if counter["n"] < 2:
            counter["n"] += 1
            with torch.no_grad():
                weight.add_(1)

    state = {"v": {"w": weight}, "extra": counter}
    with meddled(tmp_path / "a", twice) as ckpt:
        handle = ckpt.save(1, state)
        assert handle.wait() == 1 and handle.recopies == 2
        assert ckpt.stats()["recopied_saves"] == 2 and ckpt.failed_saves == 0
        # all of it was collected again, what is no tensor, too
        counter["n"] = 0
        live = {"v": {"w": torch.zeros(100)}, "extra": {}}
        assert ckpt.restore(live).step == 1
        assert live["extra"] == {"n": 2} and (live["v"]["w"] == 2).all()
        assert ckpt.save(2, state, blocking=True).recopies == 2
    counter["n"] = 0
    with meddled(tmp_path / "b", twice, recopies=1) as ckpt:
        with pytest.raises(_native.Corrupt, match=r"v\.w"):
            ckpt.save(1, state)
        assert ckpt.stats()["recopied_saves"] == 1 and ckpt.steps() == []
        # the calls of all ranks are counted alike, however often one was repeated
        assert ckpt.save(2, state, blocking=True).recopies == 0
    for recopies in (-1, 17, 1.0):
        with pytest.raises(_native.InvalidArgument, match="recopies"):
            dt.Checkpointer(tmp_path / "c", recopies=recopies)


class Failing:
    """A native handle whose save failed in the background."""

    staged_seconds = 0.0

    def done(self):
        return True

    def wait(self, timeout_s):
        raise _native.StorageError("the disk went away")


class FailingNative(Meddling):
    def save(self, *args, **options):
        return Failing()


@pytest.mark.parametrize("seen_by", ["save", "close", "wait"])
def test_a_failed_background_save_is_never_lost(tmp_path, seen_by):
    def fail_one(**options):
        ckpt = dt.Checkpointer(tmp_path / str(len(options)), **options)
        good, ckpt._native = ckpt._native, FailingNative(ckpt._native, None)
        handle = ckpt.save(1, {"n": 1})
        ckpt._native = good
        see = {"save": lambda: ckpt.save(2, {"n": 2}), "close": ckpt.close, "wait": handle.wait}
        return ckpt, see[seen_by]

    ckpt, see = fail_one()
    with pytest.raises(OSError, match="disk went away"):
        see()
    assert ckpt.failed_saves == 1
    assert ckpt._closed or seen_by == "wait" or ckpt._pending[0].wait() == 2
    ckpt.close()
    ckpt, see = fail_one(on_error="warn")
    if seen_by == "wait":
        with pytest.raises(OSError, match="disk went away"):
            see()
    else:
        with pytest.warns(RuntimeWarning, match="step 1 was not committed"):
            see()
    assert ckpt.failed_saves == 1
    ckpt.close()


def flip(folder, step, pattern, mask=1):
    """Flips one bit in the middle of a file of a step."""
    (file,) = (folder / f"step-{step:08d}").glob(pattern)
    data = bytearray(file.read_bytes())
    at = len(data) * 3 // 4
    data[at] ^= mask
    file.write_bytes(data)


def test_damaged_steps_are_skipped_with_reasons_until_none_is_left(tmp_path):
    live = {"w": np.zeros(5000), "n": 0}
    with dt.Checkpointer(tmp_path, keep=None) as ckpt:
        for step in (1, 2, 3, 4):
            state = {"w": np.full(5000, float(step)), "n": step}
            ckpt.save(step, {"v": state}, blocking=True)
        flip(tmp_path, 4, "manifest.json")
        flip(tmp_path, 3, "*/rank-00000.safetensors")
        found = ckpt.verify(3)
        assert not found.ok and found.problems[0].tensor == "v.w"
        assert "rank-00000.safetensors" in found.problems[0].file and found.problems[0].reason
        r = ckpt.restore({"v": live})
        assert r.step == 2 and [step for step, _ in r.skipped] == [4, 3]
        assert "manifest.json" in r.skipped[0][1] and "rank-00000" in r.skipped[1][1]
        assert (live["w"] == 2).all() and live["n"] == 2
        for step in (3, 4):
            with pytest.raises(_native.CheckpointDamaged, match=f"step {step}"):
                ckpt.restore({"v": live}, step=step)
        flip(tmp_path, 2, "*/rank-00000.safetensors")
        flip(tmp_path, 1, "*/tensors.arrow")
        with pytest.raises(_native.CheckpointDamaged, match="partly overwritten") as caught:
            ckpt.restore({"v": live})
        assert all(f"step {step}: " in str(caught.value) for step in (1, 2, 3, 4))


def test_a_damaged_manifest_alone_leaves_the_targets_alone(tmp_path):
    live = {"w": np.zeros(50), "n": 0}
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"v": {"w": np.ones(50), "n": 1}}, blocking=True)
        flip(tmp_path, 1, "manifest.json")
        with pytest.raises(_native.CheckpointDamaged) as caught:
            ckpt.restore({"v": live})
    assert "overwritten" not in str(caught.value)
    assert live["n"] == 0 and not live["w"].any()
