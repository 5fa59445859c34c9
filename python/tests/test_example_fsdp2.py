"""The FSDP2 example: trained on two ranks, taken up again on one, the same parameters."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "train_fsdp2.py"
DEADLINE_S = 240


def train(world, data, out, steps):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(EXAMPLE), "--data", str(data), "--out", str(out)]
    children = [
        subprocess.Popen(
            [*command, "--steps", str(steps), "--save-every", "2"],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(world)
    ]
    try:
        texts = [child.communicate(timeout=DEADLINE_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * world
    found = re.search(r"restored (\w+), at step (\d+), (\w+)", texts[0])
    return found.groups()


def test_two_ranks_then_one(tmp_path):
    pytest.importorskip("torch")
    from drivetrain._cli import main

    data = tmp_path / "data"
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; from {main.__module__} import main; sys.exit(main())",
            "synth",
            str(data),
            "--scenes",
            "1",
            "--keyframes",
            "4",
            "--seed",
            "1",
        ],
        check=False,
    )
    assert made.returncode == 0
    restored, step, parameters = train(2, data, tmp_path / "out", 3)
    assert (restored, step) == ("None", "3")
    assert train(1, data, tmp_path / "out", 3) == ("3", "3", parameters)
    restored, step, later = train(1, data, tmp_path / "out", 4)
    assert (restored, step) == ("3", "4") and later != parameters
