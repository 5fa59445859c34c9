"""Saves that refer to what has not changed."""

import importlib.util
import json
import pathlib
import signal
import subprocess
import sys

import drivetrain as dt
import numpy as np
import pytest

torch = pytest.importorskip("torch")

HEADER = 4096  # of a rank file with few entries
FROZEN, TRAINED = 500 * 600 * 4, 600 * 4 + 4  # bytes of the parameters below
WORKER = """
import sys, numpy as np, drivetrain as dt
ckpt = dt.Checkpointer(sys.argv[1], keep=dt.Keep(last=1), delta=True)
step = max(ckpt.steps(), default=0)
while True:
    step += 1
    ckpt.save(step, {"frozen": np.full(300_000, 7.0), "n": step, "w": np.full(99, float(step))},
              rng=False).wait()
    print(step, flush=True)
"""


def fine_tune():
    torch.manual_seed(1)
    backbone, head = torch.nn.Linear(600, 500, bias=False), torch.nn.Linear(600, 1)
    backbone.weight.requires_grad_(False)
    return torch.nn.ModuleDict({"backbone": backbone, "head": head})


def rank_bytes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def manifest(root, step):
    return json.loads((root / f"step-{step:08}" / "manifest.json").read_text())


def test_a_fine_tune_writes_its_head(tmp_path):
    model = fine_tune()
    with dt.Checkpointer(tmp_path, keep=dt.Keep(last=1), delta=True) as ckpt:
        for step in range(1, 5):
            with torch.no_grad():
                model["head"].weight += step
            handle = ckpt.save(step, {"model": model}, rng=False)
            handle.wait()
            referred = FROZEN if step > 1 else 0  # the head's bias never changes, but is tiny
            assert handle.bytes.raw == FROZEN + TRAINED
            assert handle.bytes.referred == referred
            assert handle.bytes.written == HEADER + FROZEN + TRAINED - referred
            assert rank_bytes(tmp_path / f"step-{step:08}") == handle.bytes.written
        assert ckpt.steps() == [1, 4]
        assert ckpt.verify(4).ok
    assert manifest(tmp_path, 4)["refers_to"] == [1]
    live = fine_tune()
    with dt.Checkpointer(tmp_path) as ckpt:
        restored = ckpt.restore({"model": live})
        assert restored.step == 4
        for name, tensor in model.state_dict().items():
            assert torch.equal(live.state_dict()[name], tensor)
        # without delta nothing is referred to, and nothing more is kept
        handle = ckpt.save(5, {"model": model}, blocking=True)
        assert handle.bytes is None


def test_a_number_bounds_how_far_back_references_reach(tmp_path):
    state = {"w": np.arange(1000.0)}
    with dt.Checkpointer(tmp_path, keep=None, delta=1) as ckpt:
        for step in range(4):
            ckpt.save(step, state, blocking=True, rng=False)
    assert [manifest(tmp_path, step)["refers_to"] for step in range(4)] == [[], [0], [], [2]]
    for bad in (0, -1, 1.5, "yes", None):
        with pytest.raises(dt.InvalidArgument, match="delta"):
            dt.Checkpointer(tmp_path, delta=bad)


def test_a_damaged_reference_falls_back_and_names_the_file(tmp_path):
    with dt.Checkpointer(tmp_path, keep=None, delta=True) as ckpt:
        for step in range(3):
            frozen = 1.0 if step else 0.0
            state = {"frozen": np.full(5000, frozen), "n": np.full(9, step)}
            ckpt.save(step, state, blocking=True, rng=False)
    assert manifest(tmp_path, 2)["refers_to"] == [1]
    (file,) = (tmp_path / "step-00000001").rglob("*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[5000] ^= 1
    file.write_bytes(raw)
    live = {"frozen": np.zeros(5000), "n": np.zeros(9, np.int64)}
    with dt.Checkpointer(tmp_path) as ckpt:
        restored = ckpt.restore(live)
        assert restored.step == 0
        assert [step for step, _ in restored.skipped] == [2, 1]
        assert all("step-00000001/a-" in reason for _, reason in restored.skipped)
        assert not ckpt.verify(2).ok
    assert live["n"].max() == 0


def test_the_example_reader_follows_references(tmp_path):
    state = {"frozen": np.arange(5000.0), "n": np.full(9, 1)}
    with dt.Checkpointer(tmp_path, delta=True) as ckpt:
        ckpt.save(1, state, blocking=True)
        state["n"][:] = 2
        ckpt.save(2, state, blocking=True)
    example = pathlib.Path(__file__).parents[2] / "examples" / "read_checkpoint.py"
    spec = importlib.util.spec_from_file_location("read_checkpoint", example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.Reader(tmp_path / "step-00000002").state()
    assert found["frozen"].data == state["frozen"].tobytes()
    assert found["n"].data == state["n"].tobytes()


@pytest.mark.parametrize("delta", [False, True])
def test_compressed_saves_come_back_bit_for_bit(tmp_path, delta):
    rng = np.random.default_rng(3)
    state = {
        "weights": torch.from_numpy(rng.normal(0, 0.02, (400, 500)).astype(np.float32)),
        "half": torch.from_numpy(rng.normal(0, 1, 100_000).astype(np.float32)).bfloat16(),
        "noise": torch.from_numpy(rng.integers(0, 256, 90_000, np.uint8)),
        "n": 1,
    }
    raw = 400 * 500 * 4 + 2 * 100_000 + 90_000
    with dt.Checkpointer(tmp_path, keep=None, compress="planes-zstd", delta=delta) as ckpt:
        first = ckpt.save(1, state, rng=False)
        first.wait()
        assert first.bytes.raw == raw
        # bf16 saves about a third and fp32 a sixth; a sixteenth is asked for
        assert first.bytes.written < 0.88 * raw
        state["half"][7] = 9.0
        second = ckpt.save(2, state, rng=False)
        second.wait()
        assert second.bytes.referred == (raw - 200_000 if delta else 0)
        assert ckpt.verify(2).ok
    live = {name: torch.zeros_like(value) for name, value in list(state.items())[:3]} | {"n": 0}
    with dt.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(live).step == 2
    assert live["n"] == 1
    for name in ("weights", "half", "noise"):
        assert torch.equal(live[name], state[name])
    with pytest.raises(dt.InvalidArgument, match="compress"):
        dt.Checkpointer(tmp_path, compress="zstd")


def test_killed_again_and_again_every_step_that_is_left_is_whole(tmp_path):
    for run in range(3):
        command = [sys.executable, "-c", WORKER, str(tmp_path / "run")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            said = [int(process.stdout.readline()) for _ in range(3 + run)]
            process.send_signal(signal.SIGKILL)
        with dt.Checkpointer(tmp_path / "run", delta=True) as ckpt:
            assert ckpt.steps()[-1] >= said[-1]
            for step in ckpt.steps():
                assert ckpt.verify(step).ok
            live = {"frozen": np.zeros(300_000), "n": 0, "w": np.zeros(99)}
            step = ckpt.restore(live).step
            assert step >= said[-1] and live["n"] == step
            assert (live["frozen"] == 7.0).all() and (live["w"] == step).all()
