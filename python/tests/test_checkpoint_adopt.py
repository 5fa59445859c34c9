"""Snapshots that outlive their process: SIGKILLed trainers, and what the next ones find."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import drivetrain as dt
import numpy as np
import pytest
from ranks import read_answers, run_ranks

WORKER = pathlib.Path(__file__).with_name("adopt_worker.py")
DEADLINE_S = 120
KILL_AT_FIRST_BYTE = "kill@any:step-00000002"
WORLDS = pytest.mark.parametrize("world", [1, 2])


def launch(scenario, world, folder, killed=False, **environment):
    """Runs all ranks of a scenario; what each answered, or nothing from ranks to be killed."""
    (folder / "shm").mkdir(exist_ok=True)
    codes = run_ranks(WORKER, scenario, world, folder, None, DEADLINE_S, environment)
    assert codes == [-signal.SIGKILL if killed else 0] * world
    if killed:
        return []
    return read_answers(folder / f"{scenario}-{world}-{rank}.json" for rank in range(world))


def slots(folder):
    return sorted((folder / "shm").iterdir())


def check(answers, step, adopted, steps):
    for answer in answers:
        found = {key: answer[key] for key in ("step", "adopted", "steps")}
        assert found == {"step": step, "adopted": adopted, "steps": steps}, answer
        assert answer.get("right", True) and answer["goes on"] == [3, False, []], answer
    # what was adopted is a slot of the new process now; nothing else may be left
    assert len(answers[0]["slots"]) <= 2 * len(answers)


@WORLDS
def test_killed_before_the_first_byte_was_written(tmp_path, world):
    launch("one_then_killed_writing", world, tmp_path, True, DRIVETRAIN_FAULT=KILL_AT_FIRST_BYTE)
    assert not list((tmp_path / "run").glob("step-00000002/*/*"))
    answers = launch("restore", world, tmp_path)
    check(answers, step=2, adopted=True, steps=[1, 2])
    assert all(answer["skipped"] == [] for answer in answers)
    assert slots(tmp_path) == []


@WORLDS
def test_the_very_first_save_is_adopted_as_soon_as_it_is_staged(tmp_path, world):
    launch("killed_when_staged", world, tmp_path, True)
    check(launch("restore", world, tmp_path), step=2, adopted=True, steps=[2])


@WORLDS
def test_a_half_staged_snapshot_is_never_adopted(tmp_path, world):
    launch("killed_while_staging", world, tmp_path, True)
    answers = launch("restore", world, tmp_path)
    check(answers, step=1, adopted=False, steps=[1])
    for answer in answers:
        assert [step for step, _ in answer["skipped"]] == [2] * (world - 1)
        assert all("ranks 0 have none" in why for _, why in answer["skipped"])
    assert slots(tmp_path) == []


@pytest.mark.parametrize("world, rank", [(1, 0), (2, 1)])
def test_a_flipped_bit_in_shared_memory_means_the_older_step(tmp_path, world, rank):
    launch("one_then_killed_writing", world, tmp_path, True, DRIVETRAIN_FAULT=KILL_AT_FIRST_BYTE)
    (slot,) = [p for p in slots(tmp_path) if f"-default-{rank}-" in p.name and is_staged(p)]
    data = bytearray(slot.read_bytes())
    data[4096 + 300_000] ^= 0x10
    slot.write_bytes(data)
    answers = launch("restore", world, tmp_path)
    check(answers, step=1, adopted=False, steps=[1])
    for answer in answers:
        assert all(step == 2 for step, _ in answer["skipped"])
        assert any("crc32c" in why for _, why in answer["skipped"]), answer


def is_staged(slot):
    with open(slot, "rb") as file:
        return file.read(8) == b"dt-slot1"


@pytest.mark.parametrize("old, new", [(2, 1), (2, 3), (3, 2), (1, 2)])
def test_another_world_size_adopts_what_all_ranks_had_staged(tmp_path, old, new):
    launch("one_then_killed_writing", old, tmp_path, True, DRIVETRAIN_FAULT=KILL_AT_FIRST_BYTE)
    assert not list((tmp_path / "run").glob("step-00000002/*/*"))
    answers = launch("restore_elsewhere", new, tmp_path, STAGED_BY=str(old))
    check(answers, step=2, adopted=True, steps=[1, 2])
    for answer in answers:
        assert answer["saved by"] == old and answer["whole"] and answer["skipped"] == [], answer
    assert slots(tmp_path) == []


def test_killed_while_adopting_leaves_all_parts_to_the_next_processes(tmp_path):
    launch("one_then_killed_writing", 2, tmp_path, True, DRIVETRAIN_FAULT=KILL_AT_FIRST_BYTE)
    staged = {"STAGED_BY": "2"}
    fault = "kill@put_new:step-00000002"
    launch("restore_elsewhere", 1, tmp_path, True, DRIVETRAIN_FAULT=fault, **staged)
    assert not (tmp_path / "run" / "step-00000002" / "manifest.json").exists()
    answers = launch("restore_elsewhere", 3, tmp_path, **staged)
    check(answers, step=2, adopted=True, steps=[1, 2])
    assert slots(tmp_path) == []


def test_an_error_while_adopting_keeps_the_parts_until_it_works(tmp_path):
    launch("one_then_killed_writing", 2, tmp_path, True, DRIVETRAIN_FAULT=KILL_AT_FIRST_BYTE)
    program = (
        "import sys, drivetrain as dt\n"
        "c = dt.Checkpointer(sys.argv[1], shm_dir=sys.argv[2])\n"
        "r = c.restore({'extra': {}}, strict=False, rng=False)\n"
        "assert r.step == 1 and not r.adopted, r\n"
        "assert [s for s, _ in r.skipped] == [2] and 'injected' in r.skipped[0][1], r.skipped\n"
    )
    command = [sys.executable, "-c", program, tmp_path / "run", tmp_path / "shm"]
    faulty = {**os.environ, "DRIVETRAIN_FAULT": "eio@create:step-00000002"}
    subprocess.run(command, check=True, timeout=DEADLINE_S, env=faulty)
    assert len(slots(tmp_path)) == 2, "both parts"
    (answer,) = launch("restore_elsewhere", 1, tmp_path, STAGED_BY="2")
    check([answer], step=2, adopted=True, steps=[1, 2])


@pytest.mark.parametrize("new", [1, 3])
def test_another_world_size_takes_nothing_over_when_a_part_is_lost(tmp_path, new):
    launch("one_then_killed_writing", 2, tmp_path, True, DRIVETRAIN_FAULT=KILL_AT_FIRST_BYTE)
    for slot in slots(tmp_path):
        if "-default-1-" in slot.name and is_staged(slot):
            slot.unlink()
    answers = launch("restore_elsewhere", new, tmp_path, STAGED_BY="2")
    check(answers, step=1, adopted=False, steps=[1])
    for answer in answers:
        ((step, why),) = answer["skipped"]
        assert step == 2 and "ranks 1 of 2 have none" in why, answer
    assert slots(tmp_path) == []


def test_a_new_folder_of_the_old_name_takes_nothing_over(tmp_path):
    launch("one_then_killed_writing", 1, tmp_path, True, DRIVETRAIN_FAULT=KILL_AT_FIRST_BYTE)
    shutil.rmtree(tmp_path / "run")
    (answer,) = launch("restore", 1, tmp_path)
    assert answer["step"] is None and not answer["adopted"] and answer["steps"] == []
    assert [step for step, _ in answer["skipped"]] == [2]
    assert "earlier folder" in answer["skipped"][0][1]


def test_a_snapshot_that_was_committed_after_all_is_dropped(tmp_path):
    fault = "kill-after@put_new:step-00000002"
    launch("one_then_killed_writing", 1, tmp_path, True, DRIVETRAIN_FAULT=fault)
    assert (tmp_path / "run" / "step-00000002" / "manifest.json").exists()
    (answer,) = launch("restore", 1, tmp_path)
    check([answer], step=2, adopted=False, steps=[1, 2])
    assert answer["skipped"] == []


@pytest.mark.parametrize("world, slow", [(1, 0), (2, 1)])
def test_a_third_save_is_skipped_on_all_ranks_when_one_is_busy(tmp_path, world, slow):
    fault = f"rank={slow};delay=700ms@create:step-00000001:1"
    for answer in launch("three_saves", world, tmp_path, DRIVETRAIN_FAULT=fault):
        assert answer["waited"] == [1, 2, None] and answer["skipped"] == [False, False, True]
        assert answer["steps"] == [1, 2, 4] and answer["stats"] == 1
        assert answer["shown"] == "<save of step 3: skipped>"


def test_memory_is_warmed_for_states_like_the_newest(tmp_path):
    (tmp_path / "shm").mkdir()
    options = {"shm_dir": tmp_path / "shm"}
    with dt.Checkpointer(tmp_path / "run", **options) as ckpt:
        ckpt.prepare()
        assert slots(tmp_path) == []
        ckpt.save(1, {"w": np.zeros(1 << 20, np.float32)}, blocking=True)
    with dt.Checkpointer(tmp_path / "run", **options) as ckpt:
        ckpt.prepare()
        limit = time.monotonic() + 20
        while len(slots(tmp_path)) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
        assert all(slot.stat().st_size > 4 << 20 for slot in slots(tmp_path))
        ckpt.save(2, {"w": np.ones(1 << 20, np.float32)}, blocking=True)
        assert len(slots(tmp_path)) == 2
    assert slots(tmp_path) == []


def test_many_saves_leave_memory_descriptors_and_segments_flat(tmp_path):
    count = 1000 if os.environ.get("DRIVETRAIN_LONG") else 250
    (answer,) = launch("many_saves", 1, tmp_path, SAVES=str(count))
    early, late = answer["marks"]
    assert late["rss_kib"] - early["rss_kib"] < 8 * 1024, answer
    assert late["threads"] <= early["threads"] + 8, answer  # blocking threads come and go
    for key in ("descriptors", "slots", "maps"):
        assert late[key] <= early[key] + 1, (key, answer)
    assert late["slots"] <= 2 and answer["left"] == [] and answer["steps"] == [count - 2, count - 1]
