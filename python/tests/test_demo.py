"""The demo: its accounting on made-up logs, and a small kill and resume of the real job."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402
import demo_logs  # noqa: E402


def attempt(number, restored, steps, world=1):
    """An attempt whose ranks each saw one sample per step."""
    events = [
        [
            {"event": "start", "restored": restored},
            *(
                {"event": "step", "step": s, "epoch": 0, "keys": [f"{s}-{rank}"], "valid": [True]}
                for s in steps
            ),
        ]
        for rank in range(world)
    ]
    return demo_logs.Attempt(number, world, None, events)


def test_history_strikes_what_a_resume_goes_back_over():
    chain = [
        attempt(0, None, [1, 2, 3, 4, 5], world=2),
        attempt(1, 4, [5, 6, 7], world=2),
        attempt(2, 4, [5, 6]),
    ]
    told = demo_logs.history(chain)
    assert sorted(told.surviving) == [1, 2, 3, 4, 5, 6]
    # 10 + 6 + 2 samples; struck: step 5 of the first start, steps 5 to 7 of the second
    assert (told.total, told.struck, told.replayed) == (18, 2 + 6, 2 + 2)
    keys = [key for records in told.surviving.values() for key in demo_logs.samples(records)]
    assert len(keys) == len(set(keys)) == 10


def test_padding_does_not_count():
    record = {"keys": ["a", "b", "a"], "valid": [True, True, False]}
    assert demo_logs.samples([record]) == ["a", "b"]


@pytest.mark.parametrize(
    ("events", "operations", "words"),
    [
        (["begin"], [], "inside step 7"),
        (["begin", "step", "save"], [], "staging of step 7"),
        (
            ["staged", "begin"],
            [("before", "write", "step-00000004/ab/rank-00001.safetensors")],
            "inside step 7, while before write of data file rank-00001.safetensors of "
            "step-00000004",
        ),
        (
            ["begin"],
            [
                ("before", "put_new", "step-00000008/manifest.json"),
                ("kill", "put_new", "step-00000008/manifest.json"),
            ],
            "before the manifest of step-00000008 was created",
        ),
        (
            ["begin"],
            [
                ("before", "put_new", "step-00000008/manifest.json"),
                ("after", "put_new", "step-00000008/manifest.json"),
                ("kill", "put_new", "step-00000008/manifest.json"),
            ],
            "after the manifest of step-00000008 was created",
        ),
        (["begin", "end"], [], ""),
    ],
)
def test_what_a_kill_hit_in_words(events, operations, words):
    lines = [{"event": event, "step": 7} for event in events]
    done = [{"n": 1, "stage": s, "op": op, "path": path} for s, op, path in operations]
    assert demo_logs.what_was_hit(lines, done) == words


def test_every_seed_plans_a_kill_of_each_kind_at_its_own_save():
    kinds = {
        "mid-step",
        "data file",
        "tensors",
        "before the manifest",
        "after the manifest",
        "staging",
    }
    orders = set()
    for seed in range(40):
        kills = demo.plan(seed)
        assert {kill.what for kill in kills} == kinds
        steps = [kill.step for kill in kills]
        assert steps == sorted(set(steps)) and all(s % demo.SAVE_EVERY == 0 for s in steps[1:])
        assert steps[-1] < demo.SAMPLES // (2 * demo.BATCH_SIZE) * demo.EPOCHS
        orders.add(tuple(kill.what for kill in kills))
    assert len(orders) > 10


GOOD = [scene for scene in "abcde" for _ in range(16)]


@pytest.mark.parametrize(
    ("change", "scenes", "words"),
    [
        ({}, GOOD, []),
        ({"CAM_BACK": None}, GOOD, ["no field CAM_BACK of kind image"]),
        ({"LIDAR_TOP": "bytes"}, GOOD, ["no field LIDAR_TOP of kind points"]),
        ({}, GOOD[1:], ["63 samples in 4 scenes to train on: 64 are needed"]),
        ({}, ["a"] * 200, ["0 samples in 0 scenes to train on"]),
        ({}, ["a"] * 64 + ["b"], ["1 samples in the last scene"]),
        ({}, [], ["0 samples in 0 scenes", "0 samples in the last scene"]),
    ],
)
def test_what_a_data_set_lacks_is_named(change, scenes, words):
    told = demo.lacks({**demo.FIELDS, **change}, scenes)
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told)), told


def refused(folder, data):
    """Runs the demo on data that will not do, and returns what it said."""
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(folder / "out")]
    done = subprocess.run(
        [*command, "--data", str(data)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert not (folder / "out").exists()
    return done.stderr


def test_the_demo_refuses_data_that_will_not_do(tmp_path):
    root = tmp_path / "it's a drive"
    command = [str(demo.PROGRAM), "synth", str(root), "--scenes", "2", "--keyframes", "3"]
    subprocess.run(
        [*command, "--image-size", "160x90", "--lidar-points", "640"], check=True, timeout=120
    )
    next((root / "samples" / "CAM_BACK").iterdir()).unlink()
    said = refused(tmp_path, root)
    assert "3 samples in 1 scenes to train on: 64 are needed" in said
    assert "CAM_BACK: 1 files are missing" in said
    said = refused(tmp_path, tmp_path / "nothing here")
    assert "the demo cannot use" in said and "nothing here" in said


def test_targets_of_boxes_worked_out_by_hand():
    torch = pytest.importorskip("torch")
    import driving_model as model

    nan = float("nan")
    boxes = torch.tensor(
        [
            # Ahead of the car, across its way: 4 m long, from x = -2 to 2, at y = 10.
            [0.0, 10.0, 0.0, 4.0, 1.0, 1.5, 0.0],
            [5.0, 5.0, 0.0, 1.0, 1.0, 1.8, 0.0],
            [nan, 5.0, 0.0, 4.0, 2.0, 1.5, 0.0],
            # Of the second sample: behind the car, 20 m away.
            [-1.0, -20.0, 0.0, 4.0, 2.0, 1.5, 0.0],
        ]
    )
    names = ["vehicle.car", "human.pedestrian.adult", "vehicle.car", "vehicle.truck"]
    grid, near = model.targets(boxes, torch.tensor([0, 3, 4]), names)
    # Cells of 4 m from -32 m: row of y, column of x.
    assert grid.nonzero().tolist() == [[0, 10, 8], [1, 3, 7]]
    # The first spans 11 degrees to both sides of ahead: the two strips in the middle of the first
    # camera, 17.5 degrees each. The truck is not near.
    assert near.nonzero().tolist() == [[0, 1], [0, 2]]


def run(folder, name, attempt_number, fault=""):
    """Starts the training job on one rank, on very little data; returns its exit code and log."""
    environment = {
        **os.environ,
        "DRIVETRAIN_FAULT": fault,
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(EXAMPLES / "train_ddp.py"), "--data", str(folder / "data")]
    options = ["--out", str(folder / name / "checkpoints"), "--events", str(folder / name)]
    numbers = ["--attempt", str(attempt_number), "--epochs", "2", "--save-every", "2"]
    done = subprocess.run(
        [*command, *options, *numbers], env=environment, capture_output=True, text=True, timeout=300
    )
    log = folder / name / f"attempt-{attempt_number:02}-rank-0.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return done.returncode, events, done.stderr


def test_a_killed_job_goes_on_with_the_same_bits(tmp_path):
    pytest.importorskip("torch")
    make = [str(demo.PROGRAM), "synth", str(tmp_path / "data"), "--scenes", "2", "--keyframes", "6"]
    subprocess.run(
        [*make, "--image-size", "352x198", "--lidar-points", "1600"], check=True, timeout=120
    )
    code, whole, said = run(tmp_path, "whole", 0)
    assert code == 0, said
    code, first, _ = run(tmp_path, "killed", 0, "kill@put_new:step-00000004/manifest.json")
    assert code == -signal.SIGKILL
    code, second, said = run(tmp_path, "killed", 1)
    assert code == 0, said
    start = next(e for e in second if e["event"] == "start")
    # Staged and sealed before it was killed: the next process adopts what no manifest names yet.
    assert start["restored"] == 4
    told = ("step", "keys", "loss_bits", "params")

    def facts(events):
        return [[e[name] for name in told] for e in events if e["event"] == "step"]

    assert facts(first)[:4] + facts(second) == facts(whole)
    assert [e["step"] for e in second if e["event"] == "end"] == [6]
