"""Real ranks, real SIGKILL: whenever it comes, the next run restores a step bit for bit.

Each point has a number that draws who is killed and when: odd ones kill from outside at a moment,
even ones at an operation of the store. Then a launcher ends the other rank, or nobody does. A
failure prints the number; `DRIVETRAIN_KILL_POINT=N` runs that one alone.
"""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

WORKER = pathlib.Path(__file__).with_name("kill_worker.py")
LONG = bool(os.environ.get("DRIVETRAIN_LONG"))
ONE = os.environ.get("DRIVETRAIN_KILL_POINT")
FOLDER_POINTS = 40 if LONG else 5
S3_POINTS = 20 if LONG else 2
# Of this many points one lets the survivor find out by itself, at its deadline.
SURVIVOR_EVERY = 5
# The last two are rank 0's.
OPERATIONS = ["put_new", "create", "write", "finish", "delete", "sync_dir", "replace"]
# Backstop for a process of the test; its own waits are shorter.
PROCESS_SECONDS_MAX = 120


def points(first, count):
    every = range(first, first + count)
    return [int(ONE)] if ONE and int(ONE) // 1000 == first // 1000 else [] if ONE else every


class Ranks:
    """Both ranks of one run, and all that they printed."""

    def __init__(self, verb, uri, options, seed, shm, faults=("", "")):
        self.processes = []
        for rank in (0, 1):
            env = {**os.environ, "DRIVETRAIN_SHM_DIR": str(shm), "DRIVETRAIN_FAULT": faults[rank]}
            arguments = [verb, str(rank), uri, json.dumps(options), str(seed)]
            process = subprocess.Popen(
                [sys.executable, str(WORKER), *arguments], stdout=subprocess.PIPE, env=env
            )
            self.processes.append(process)

    def wait_ready(self):
        """Until both ranks have opened the root; what they print later is read later."""
        for process in self.processes:
            process.stdout.readline()

    def kill(self, ranks):
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGKILL)

    def end_survivor(self, seconds):
        """As a launcher does: when one rank is dead, the others are killed a little later."""
        while all(process.poll() is None for process in self.processes):
            time.sleep(0.02)
        if any(process.returncode for process in self.processes):
            time.sleep(seconds)
            self.kill(r for r, process in enumerate(self.processes) if process.poll() is None)

    def heard(self):
        """Per rank: the lines that it printed."""
        outputs = [p.communicate(timeout=PROCESS_SECONDS_MAX)[0] for p in self.processes]
        return [[json.loads(line) for line in out.splitlines()] for out in outputs]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()


def kill_one(uri, options, shm, seed, seconds):
    """Runs two ranks, kills by the seed, and returns the newest step that was known committed."""
    rng = random.Random(seed)
    victims = rng.choice([(0,), (1,), (0, 1)])
    faults = ["", ""]
    if seed % 2 == 0:
        for rank in victims:
            # Operations of that rank, and up to about what a run does of each.
            at = rng.choice(OPERATIONS[: None if rank == 0 else 5])
            most = 3 if at == "replace" else 20
            faults[rank] = f"{rng.choice(['kill', 'kill-after'])}@{at}:{rng.randint(1, most)}"
    ranks = Ranks("run", uri, options, seed, shm, faults)
    try:
        if seed % 2:
            ranks.wait_ready()
            time.sleep(rng.random() * seconds)
            ranks.kill(victims)
        if seed % SURVIVOR_EVERY:
            ranks.end_survivor(rng.random())
        heard = ranks.heard()
    finally:
        ranks.close()
    known = [line["committed"] for lines in heard for line in lines if "committed" in line]
    dead = [r for r, process in enumerate(ranks.processes) if process.returncode == -signal.SIGKILL]
    return max(known, default=0), dead, (victims, faults, heard)


def resume_both(uri, options, shm, seed):
    ranks = Ranks("resume", uri, options, seed, shm)
    try:
        return ranks.heard()
    finally:
        ranks.close()


def check_point(uri, options, shm, seed, seconds):
    """One point: killed, restored by two new ranks, gone on with. Returns whether one died."""
    known, dead, story = kill_one(uri, options, shm, seed, seconds)
    print(f"kill point {seed}: killed {dead}, committed {known}, {story[:2]}")
    first, second = resume_both(uri, options, shm, seed)
    where = f"kill point {seed}: {story}, then {first} and {second}"
    for lines in (first, second):
        assert not [line for line in lines if "error" in line], where
        found, after = lines
        assert found["right"], where
        # A step staged by both ranks or committed without its answer is newer than what was known.
        assert found["step"] >= known, where
        # Left out is only what was staged and not by all: it was never committed.
        assert all("staged snapshot" in why for _, why in found["skipped"]), where
        assert after["committed"] == found["step"] + 1 and after["ok"], where
        assert after["steps"][-1] == found["step"] + 1, where
    assert first[0]["step"] == second[0]["step"], where
    return bool(dead)


def run_seconds(uri, options, shm):
    """How long a run takes here, so that kills fall into it; it is also the control."""
    ranks = Ranks("run", uri, options, 999, shm)
    try:
        ranks.wait_ready()
        start = time.monotonic()
        heard = ranks.heard()
    finally:
        ranks.close()
    assert all(lines[-1] == {"committed": 12} for lines in heard), heard
    return time.monotonic() - start


def test_killed_ranks_on_a_folder(tmp_path):
    seconds = run_seconds(str(tmp_path / "clean"), {}, tmp_path)
    died = 0
    for seed in points(0, FOLDER_POINTS):
        died += check_point(str(tmp_path / f"run{seed}"), {}, tmp_path, seed, seconds)
    assert ONE or died >= FOLDER_POINTS // 2, "too few kills struck"


@pytest.fixture
def s3():
    """A moto server with one bucket: the options that reach it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = pathlib.Path(sys.executable).with_name("moto_server")
    if not program.is_file():
        pytest.skip("no moto_server beside this Python (make setup installs it)")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([str(program), "-H", "127.0.0.1", "-p", str(port)], **quiet)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        for _ in range(PROCESS_SECONDS_MAX * 10):
            try:
                urllib.request.urlopen(
                    urllib.request.Request(f"{endpoint}/kills", method="PUT"), timeout=30
                ).close()
                break
            except OSError:
                time.sleep(0.1)
        yield {
            "aws_endpoint": endpoint,
            "allow_http": "true",
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test-secret",
            "aws_region": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def test_killed_ranks_on_s3(tmp_path, s3):
    seconds = run_seconds("s3://kills/clean", s3, tmp_path)
    died = 0
    for seed in points(1000, S3_POINTS):
        died += check_point(f"s3://kills/run{seed}", s3, tmp_path, seed, seconds)
    assert ONE or died >= S3_POINTS // 2, "too few kills struck"
