"""DataLoader on bad days: damaged samples, held batches, signals, closing, changed files."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import drivetrain as dt
import pytest
import torch
from data_factory import blobs, number, nuscenes, webdataset

native = dt._native


@pytest.fixture
def damaged(tmp_path):
    """A tree of six samples; the front camera of samples 1 and 4 is cut off."""
    root = nuscenes(tmp_path / "data")
    whole = dt.open(str(root), index=str(tmp_path / "whole.index.arrow"))
    keys = [sample["key"] for sample in whole]
    files = whole.table["CAM_FRONT"].to_pylist()
    sources = _sources(tmp_path / "whole.sources.arrow")
    for row in (1, 4):
        path = root / sources[files[row]["source"]]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    ds = dt.open(str(root), index=str(tmp_path / "damaged.index.arrow"))
    return ds, keys


def _sources(path):
    import pyarrow

    table = pyarrow.ipc.open_file(str(path)).read_all()
    return dict(zip(table["id"].to_pylist(), table["uri"].to_pylist()))


IMAGE = {"CAM_FRONT": dt.Image(size=(24, 40), dtype="uint8"), "LIDAR_TOP": dt.Points()}


def test_raise_names_the_file(damaged):
    ds, _ = damaged
    steps = iter(dt.DataLoader(ds, 3, fields=IMAGE))
    with pytest.raises(native.Corrupt, match=r"CAM_FRONT.*\.jpg"):
        next(steps)
    with pytest.raises(native.Closed):
        next(steps)


def test_mask_keeps_the_step_count(damaged, tmp_path):
    ds, keys = damaged
    report = tmp_path / "bad.jsonl"
    loader = dt.DataLoader(ds, 2, fields=IMAGE, on_error="mask", quarantine=report)
    batches = list(loader)
    assert [key for b in batches for key in b["key"]] == keys
    assert [ok for b in batches for ok in b["_valid"].tolist()] == [
        i not in (1, 4) for i in range(6)
    ]
    assert (batches[0]["CAM_FRONT"][1] == 0).all() and (batches[0]["CAM_FRONT"][0] != 0).any()
    offsets = batches[0]["LIDAR_TOP_offsets"]
    assert offsets[1] > 0 and offsets[2] == offsets[1]
    entries = loader.quarantine()
    assert [(e["key"], e["field"], e["action"]) for e in entries] == [
        (keys[1], "CAM_FRONT", "mask"),
        (keys[4], "CAM_FRONT", "mask"),
    ]
    assert all("jpg" in e["source"] and e["offset"] == 0 and e["reason"] for e in entries)
    assert [json.loads(line) for line in report.read_text().splitlines()] == entries
    assert loader.stats()["bad_samples"] == 2


@pytest.mark.parametrize("threads", [1, 3])
def test_replace_is_deterministic(damaged, threads):
    ds, keys = damaged
    loader = dt.DataLoader(ds, 2, fields=IMAGE, on_error="replace", threads=threads)
    got = [key for b in loader for key in b["key"]]
    assert got == [keys[i] for i in (0, 2, 2, 3, 5, 5)]
    assert [e["substitute"] for e in loader.quarantine()] == [keys[2], keys[5]]


def test_a_limit_turns_into_an_error(damaged):
    ds, keys = damaged
    loader = dt.DataLoader(ds, 2, fields=IMAGE, on_error="mask", on_error_limit=1)
    with pytest.raises(native.InvalidArgument, match=f"on_error_limit.*{keys[4]}"):
        list(loader)


def test_a_changed_source_is_named(tmp_path):
    path = webdataset(tmp_path / "a.tar", blobs(10))
    ds = dt.open(str(path), index=str(tmp_path / "a.index.arrow"))
    with open(path, "ab") as file:
        file.write(bytes(512))
    with pytest.raises(native.SourceChanged, match=r"a\.tar"):
        list(dt.DataLoader(ds, 2))


@pytest.fixture
def large(tmp_path):
    path = webdataset(tmp_path / "a.tar", blobs(64, 100_000))
    return dt.open(str(path), index=str(tmp_path / "a.index.arrow"))


def test_holding_every_batch_ends_with_one_warning(large):
    loader = dt.DataLoader(large, 4, memory_limit="2MiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(loader)
    assert len(batches) == 16
    assert [w.category for w in caught] == [ResourceWarning]
    expected = blobs(64, 100_000)
    for batch in batches:
        for key, value in zip(batch["key"], batch["bin"]):
            assert value == expected[number(key)]["bin"]
    assert loader.stats()["memory"]["held_batches"] == 16
    del batches, batch, value
    assert loader.stats()["memory"]["held_bytes"] == 0


def test_holding_every_batch_can_raise(large):
    loader = dt.DataLoader(large, 4, memory_limit="2MiB", on_held="raise")
    held, raised = [], 0
    steps = iter(loader)
    while True:
        try:
            held.append(next(steps))
        except native.MemoryHeld as error:
            assert f"{len(held)} batches" in str(error)
            held.clear()
            raised += 1
        except StopIteration:
            break
    assert raised >= 3 and loader.stats()["batches"] == 16


def test_close_wakes_a_waiting_thread(large):
    loader = dt.DataLoader(large, 4, memory_limit="2MiB", on_held="raise")
    steps, seen = iter(loader), []

    def consume():
        try:
            for batch in steps:
                seen.append(len(batch["key"]))
                time.sleep(0.01)
        except native.Closed:
            seen.append("closed")

    thread = threading.Thread(target=consume)
    thread.start()
    while not seen:
        time.sleep(0.001)
    loader.close()
    thread.join(30)
    assert not thread.is_alive() and seen[-1] == "closed"


def run(script, **popen):
    """Starts a Python process and waits for its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


def test_ctrl_c_ends_a_wait(tmp_path):
    path = webdataset(tmp_path / "a.tar", blobs(8))
    # Reads are delayed by half a minute each, so that next() waits when the signal comes.
    script = f"""
        import drivetrain as dt
        ds = dt.open({str(path)!r}, index={str(tmp_path / "a.index.arrow")!r})
        import os
        os.environ["DRIVETRAIN_FAULT"] = "delay=30000ms@read"
        steps = iter(dt.DataLoader(ds, 2, output="numpy"))
        try:
            print("ready", flush=True)
            next(steps)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            os._exit(0)
    """
    process = run(script)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "interrupted\n"), err


def test_a_timeout_names_the_source_and_can_be_repeated(tmp_path):
    path = webdataset(tmp_path / "a.tar", blobs(8))
    script = f"""
        import drivetrain as dt
        ds = dt.open({str(path)!r}, index={str(tmp_path / "a.index.arrow")!r})
        import os
        os.environ["DRIVETRAIN_FAULT"] = "delay=1500ms@read:1"
        loader = dt.DataLoader(ds, 2, output="numpy", timeout="100ms")
        steps = iter(loader)
        print("ready", flush=True)
        told = []
        for step in range(4):
            while True:
                try:
                    batch = next(steps)
                    break
                except TimeoutError as error:
                    told.append(str(error))
        # A busy machine may also be late before the read begins or after it ended.
        assert any("a.tar" in text for text in told), told
        assert all("step" in text for text in told), told
        assert loader.state_dict()["epoch"] == 1
        print("done", flush=True)
    """
    out, err = run(script).communicate(timeout=60)
    assert out == "done\n", err


def test_a_forked_child_makes_its_own_pipeline(large):
    loader = dt.DataLoader(large, 4)
    steps = iter(loader)
    first = next(steps)
    expected = [number(k) for k in next(steps)["key"]]
    loader.load_state_dict({**loader.state_dict(), "position": 4})
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with pytest.raises(native.DrivetrainError):
                next(steps)
            got = [number(k) for k in next(iter(loader))["key"]]
            status = 0 if got == expected else 2
            del first
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert [number(k) for k in next(iter(loader))["key"]] == expected


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_workers_deliver_the_native_order(tmp_path, method):
    path = webdataset(tmp_path / "a.tar", blobs(23))
    ds = dt.open(str(path), index=str(tmp_path / "a.index.arrow"))
    loader = dt.DataLoader(ds, 4, shuffle=True, threads=1)
    expected = [(b["key"], [bytes(v) for v in b["bin"]]) for b in loader]
    loader.set_epoch(0)
    workers = torch.utils.data.DataLoader(
        dt.torch.as_iterable(loader),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
    )
    assert [(b["key"], b["bin"]) for b in workers] == expected
    loader.set_epoch(0)
    alone = torch.utils.data.DataLoader(dt.torch.as_iterable(loader), batch_size=None)
    assert [b["key"] for b in alone] == [keys for keys, _ in expected]


def test_as_map_serves_torchs_sampler(tmp_path):
    path = webdataset(tmp_path / "a.tar", blobs(9))
    ds = dt.open(str(path), index=str(tmp_path / "a.index.arrow"))
    loader = torch.utils.data.DataLoader(
        dt.torch.as_map(ds), batch_size=4, collate_fn=lambda samples: samples
    )
    got = [sample for batch in loader for sample in batch]
    assert [s["txt"] for s in got] == [f"sample {i}" for i in range(9)]
    assert len(dt.torch.as_map(ds)) == 9
