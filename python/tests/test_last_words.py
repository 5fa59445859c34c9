"""A rank that does not answer: the error on all others says what it was doing last."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

WORKER = pathlib.Path(__file__).with_name("rank_worker.py")
WORLD = 3
BAD = 1
DEADLINE_S = 120
#: Rank 1 stands still before its second slice of 8 MiB, of 3 in all.
FAULT = f"rank={BAD};delay=60000ms@write:rank-0000{BAD}:2"


def start(folder):
    started = []
    for rank in range(WORLD):
        own = {**os.environ, "RANK": str(rank), "DRIVETRAIN_FAULT": FAULT}
        own["DRIVETRAIN_SHM_DIR"] = str(folder)
        place = ["large_save", str(rank), str(WORLD), str(folder)]
        started.append(subprocess.Popen([sys.executable, str(WORKER), *place], env=own))
    return started


def wait_for_word(folder, started):
    """Until rank 1 has said that it writes; ranks without a store meet through files."""
    limit = time.monotonic() + DEADLINE_S
    while time.monotonic() < limit and all(process.poll() is None for process in started):
        for file in (folder / "run" / ".meet").glob(f"*words-{BAD}"):
            try:
                if "writing" in file.read_text():
                    return
            except FileNotFoundError:
                pass
        time.sleep(0.05)
    raise AssertionError("no word of rank 1")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, None], ids=str)
def test_the_error_on_all_ranks_says_what_the_missing_one_was_doing(tmp_path, number):
    started = start(tmp_path)
    try:
        wait_for_word(tmp_path, started)
        if number is not None:
            started[BAD].send_signal(number)
        healthy = [rank for rank in range(WORLD) if rank != BAD]
        assert [started[rank].wait(DEADLINE_S) for rank in healthy] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    answers = [
        json.loads((tmp_path / f"large_save-{WORLD}-{rank}.json").read_text()) for rank in healthy
    ]
    for answer in answers:
        assert answer["kind"] == "DeadlineExceeded", answer
        said = re.search(
            r"writing its part of step 1 by rank 1 \(its last word, (\d+) s ago: saving step 1: "
            r"writing rank-00001\.safetensors, 8\.4 of 20\.\d MB( \(for (\d+) s\))?\)",
            answer["text"],
        )
        assert said, answer["text"]
        # a rank that lives goes on saying the same
        assert (int(said[1]) <= 6) == (number is None) or number is None, answer["text"]
        assert answer["steps"] == []
    assert answers[0]["text"] == answers[1]["text"]
    # whoever lived to do so has taken its word back
    left = {file.name for file in (tmp_path / "run" / ".meet").glob("*words-*")}
    assert all(name.endswith(f"words-{BAD}") for name in left), left
