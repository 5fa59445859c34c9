"""Starts the ranks of a test as real processes, and runs a scenario in one of them."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import traceback


def run_ranks(worker, argument, world, folder, ranks=None, deadline_s=240, environment=None):
    """Runs `worker ARGUMENT RANK WORLD FOLDER PORT` for each rank; their exit codes, in order.

    Whoever still runs at the deadline or after an error is killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(worker), argument]
    started = []
    try:
        for rank in range(world) if ranks is None else ranks:
            own = {**os.environ, "RANK": str(rank), **(environment or {})}
            place = [str(rank), str(world), str(folder), port]
            started.append(subprocess.Popen([*command, *place], env=own))
        return [process.wait(deadline_s) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def read_answers(names):
    """What ranks wrote into these files; a crash in any of them fails the test."""
    found = [json.loads(pathlib.Path(name).read_text()) for name in names]
    for answer in found:
        assert "crash" not in answer, answer["crash"]
    return found


def answer_scenario(scenarios):
    """Of a worker: runs the scenario that the command line names and writes what it returns."""
    scenario, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder = pathlib.Path(sys.argv[4])
    try:
        answer = scenarios[scenario](rank, world, folder)
    except Exception:
        answer = {"crash": traceback.format_exc()}
    (folder / f"{scenario}-{world}-{rank}.json").write_text(json.dumps(answer))
