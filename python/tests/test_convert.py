"""`drivetrain ckpt convert` against the real libraries: torch, its DCP, safetensors."""

import collections
import json
import pickle
import struct
import subprocess
import sys
import threading
import zipfile

import drivetrain as dt
import numpy as np
import pytest
from drivetrain import _native

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
safetensors = pytest.importorskip("safetensors.torch")

from states import same, trained  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NAMES = (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 uint16 uint32 "
    "uint64 float8_e4m3fn float8_e5m2"
).split()


def convert(*args):
    return _native.cli_main(["drivetrain", "ckpt", "convert", *map(str, args)])


def verify(folder):
    return _native.cli_main(["drivetrain", "ckpt", "verify", str(folder)])


def bits(name, *shape):
    dtype = getattr(torch, name)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 2, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def training_state():
    base = torch.arange(24.0).reshape(2, 3, 4)
    return {
        **trained(1),
        "epoch": 3,
        "dtypes": {name: bits(name, 3, 5) for name in NAMES},
        "views": {"turned": base.permute(2, 0, 1), "part": base[:, 1], "strided": base[..., ::2]},
        "odd": {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)},
        "tied": {"a": base, "b": base},
        "plain": {
            "t": (1, (None, True)),
            "f": [float("inf"), float("nan"), -0.0, 1e-300],
            "big": [1 << 80, -(1 << 80), 2**63 - 1, -(2**63), 2**31],
            "bytes": b"\x00\xff\x80",
            "size": torch.Size([1, 2]),
            "dtype": torch.bfloat16,
            "device": torch.device("cuda:1"),
            "odict": collections.OrderedDict(x=1),
            "counter": collections.Counter("aab"),
            "ints": {1: "one", -2: "two", "~k": 0, "ü": "é\n"},
        },
    }


def restored(folder):
    """The state as a Checkpointer gives it."""
    step = folder.parent / "step-00000001"
    if folder != step:
        folder.rename(step)
    with dt.Checkpointer(step.parent) as ckpt:
        opened = json.loads((step / "manifest.json").read_text())["state"]
        names = [name for name in opened if not (name[0] == "~" and name[1:2].isalpha())]
        r = ckpt.restore({name: {} for name in names}, rng=False, strict=False)
    return r.state


def dcp_all(folder, reader=None):
    state = {}
    reader = reader or dcp.FileSystemReader(folder)
    _load_state_dict(state, reader, no_dist=True, planner=_EmptyStateDictLoadPlanner())
    return state


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_torch_files_come_in(tmp_path, legacy):
    state = training_state()
    if legacy:
        state["dtypes"] = {n: state["dtypes"][n] for n in NAMES[:11]}
    file = tmp_path / "file.pt"
    torch.save(state, file, _use_new_zipfile_serialization=not legacy)
    assert convert(file, tmp_path / "out/step-00000001") == 0
    assert verify(tmp_path / "out/step-00000001") == 0
    found = dcp_all(tmp_path, dt.torch.StorageReader(tmp_path / "out/step-00000001"))
    for part in ("dtypes", "views", "odd"):
        assert same(found[part], state[part]), part
    assert same(found["model"], dict(state["model"]))
    assert same(found["optimizer"], state["optimizer"]) or found["optimizer"]["state"]
    manifest = json.loads((tmp_path / "out/step-00000001/manifest.json").read_text())
    assert manifest["state"]["tied"]["b"]["~tensor"]["at"] == ["tied", "a"]


def test_a_torch_file_goes_through_a_checkpointer_and_out_again(tmp_path):
    state = training_state()
    torch.save(state, tmp_path / "file.pt")
    assert convert(tmp_path / "file.pt", tmp_path / "c") == 0
    assert convert(tmp_path / "c", tmp_path / "again.pt", "--to", "pt") == 0
    assert zipfile.ZipFile(tmp_path / "again.pt").testzip() is None
    found = torch.load(tmp_path / "again.pt", weights_only=True)
    for part in state:
        expected = dict(state[part]) if part == "model" else state[part]
        got = dict(found[part]) if part == "model" else found[part]
        assert same(got, expected), part
    assert found["tied"]["a"].data_ptr() == found["tied"]["b"].data_ptr()


def test_dcp_folders_come_in_and_go_out(tmp_path):
    state = training_state()
    state["views"] = {k: v.contiguous() for k, v in state["views"].items()}
    state["kept"] = {"set": {1, 2}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs", thread_count=2))
    expected = dcp_all(tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--from", "dcp") == 0
    assert verify(tmp_path / "ours") == 0
    assert same(dcp_all(tmp_path, dt.torch.StorageReader(tmp_path / "ours")), expected)
    assert convert(tmp_path / "ours", tmp_path / "back", "--to", "dcp") == 0
    assert same(dcp_all(tmp_path / "back"), expected)
    target = {"odd": {"scalar": torch.zeros(()), "empty": torch.zeros(0, 3)}, "epoch": 0}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "back"))
    assert target["odd"]["scalar"] == 2.5 and target["epoch"] == 3


def test_dcp_shards_become_whole_tensors(tmp_path):
    """A folder whose tensor is in four rectangles, written by hand through DCP's own classes."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys, torch, torch.distributed as d, torch.distributed.checkpoint as dcp\n"
        "from torch.distributed.device_mesh import init_device_mesh as m\n"
        "from torch.distributed.tensor import distribute_tensor as t, Shard\n"
        "from drivetrain.torch import StorageWriter\n"
        "rank, folder = int(sys.argv[1]), sys.argv[2]\n"
        "d.init_process_group('gloo', f'file://{folder}/meet', rank=rank, world_size=2)\n"
        "w = torch.arange(42.0).reshape(7, 6)\n"
        "mesh = m('cpu', (2,))\n"
        "state = {'r': t(w, mesh, [Shard(0)]), 'c': t(w, mesh, [Shard(1)])}\n"
        "dcp.save(state, checkpoint_id=folder + '/theirs')\n"
        "dcp.save(state, storage_writer=StorageWriter(folder + '/direct'))\n"
        "d.barrier()\n"
        "os._exit(0)\n"  # gloo may abort a process that ends a little after the other
    )
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    whole = torch.arange(42.0).reshape(7, 6)
    assert convert(tmp_path / "theirs", tmp_path / "imported") == 0
    for source in ("imported", "direct"):
        out = tmp_path / f"{source}.safetensors"
        assert convert(tmp_path / source, out, "--to", "safetensors") == 0
        found = safetensors.load_file(out)
        assert torch.equal(found["r"], whole) and torch.equal(found["c"], whole), source
        assert convert(tmp_path / source, tmp_path / f"{source}.pt", "--to", "pt") == 0
        assert same(torch.load(tmp_path / f"{source}.pt"), {"r": whole, "c": whole})


def test_safetensors_come_in_and_go_out_in_shards(tmp_path):
    state = {f"layers.{i}.w": torch.randn(100, 10) for i in range(5)}
    state |= {f"x.{name}": bits(name, 3, 5) for name in NAMES if name != "complex64"}
    safetensors.save_file(state, tmp_path / "one.safetensors", metadata={"note": "kept"})
    assert convert(tmp_path / "one.safetensors", tmp_path / "c") == 0
    manifest = json.loads((tmp_path / "c/manifest.json").read_text())
    assert "kept" in manifest["state"]["~safetensors"]
    assert (
        convert(tmp_path / "c", tmp_path / "hf", "--to", "safetensors", "--shard-size", 9000) == 0
    )
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    found = {}
    for file in files:
        found |= safetensors.load_file(tmp_path / "hf" / file)
    assert same(dict(sorted(found.items())), dict(sorted(state.items())))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert convert(tmp_path / "hf", tmp_path / "d", "--under", "model", "--step", 9) == 0
    loaded = {"model": {name: torch.zeros_like(t) for name, t in state.items()}}
    dcp.load(loaded, storage_reader=dt.torch.StorageReader(tmp_path / "d"))
    assert same(loaded["model"], state)
    assert json.loads((tmp_path / "d/manifest.json").read_text())["step"] == 9
    assert convert(tmp_path / "d", tmp_path / "w", "--to", "safetensors", "--under", "model") == 0
    assert same(
        dict(sorted(safetensors.load_file(tmp_path / "w/model.safetensors").items())),
        dict(sorted(state.items())),
    )


def test_a_checkpointers_state_goes_out(tmp_path):
    model = torch.nn.Linear(3, 2)
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    with dt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(5, {"model": model, "extra": {"a": array, "n": (1, 2)}}, blocking=True)
        ckpt.save(6, {"model": model, "extra": {"a": array, "n": (3,)}}, blocking=True)
    assert convert(tmp_path / "run", tmp_path / "f.pt", "--to", "pt", "--step", 5) == 0
    found = torch.load(tmp_path / "f.pt", weights_only=True)
    assert torch.equal(found["model"]["weight"], model.weight)
    assert found["extra"]["n"] == (1, 2)
    assert torch.equal(found["extra"]["a"], torch.from_numpy(array))
    out = tmp_path / "m.safetensors"
    assert convert(tmp_path / "run", out, "--to", "safetensors", "--under", "model") == 0
    assert same(safetensors.load_file(out), {k: v for k, v in model.state_dict().items()}) or set(
        safetensors.load_file(out)
    ) == {"weight", "bias"}
    assert convert(tmp_path / "run", tmp_path / "dcp", "--to", "dcp") == 0
    target = {"model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}}
    dcp.load(
        target,
        storage_reader=dcp.FileSystemReader(tmp_path / "dcp"),
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    assert torch.equal(target["model"]["weight"], model.weight)


def test_parts_of_every_form_become_whole_tensors(tmp_path):
    """Ranges of the flattened tensor, columns, and odd rectangles, from two ranks."""
    whole = np.arange(7 * 6 * 5, dtype=np.float32).reshape(7, 6, 5)
    flat = whole.reshape(-1)

    def parts(rank):
        first, last = ((0, 53), (53, 210))[rank]
        columns = whole[:, 2 * rank : 2 + 4 * rank]
        deep = whole[..., 3 * rank : 3 + 2 * rank]
        return {
            "flat": dt.Sharded.flat(flat[first:last].copy(), whole.shape, first),
            "columns": dt.Sharded(columns.copy(), whole.shape, (0, 2 * rank, 0)),
            "deep": dt.Sharded(deep.copy(), whole.shape, (0, 0, 3 * rank)),
        }

    def save(rank):
        with dt.Checkpointer(tmp_path / "run", rank=rank, world_size=2, timeout="60s") as ckpt:
            ckpt.save(1, parts(rank), rng=False, blocking=True)

    ranks = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    out = tmp_path / "m.safetensors"
    assert convert(tmp_path / "run", out, "--to", "safetensors") == 0
    found = safetensors.load_file(out)
    for name in ("flat", "columns", "deep"):
        assert np.array_equal(found[name].numpy(), whole), name
    (file,) = (tmp_path / "run").glob("step-*/a-*/rank-00001.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    assert convert(tmp_path / "run", tmp_path / "bad.safetensors", "--to", "safetensors") == 1
    assert not (tmp_path / "bad.safetensors").exists()


class Hostile:
    def __reduce__(self):
        return (print, ("this must never run",))


def hostile_files(folder):
    good = folder / "good.pt"
    torch.save({"w": torch.arange(1000.0)}, good)
    raw = good.read_bytes()
    torch.save({"x": Hostile()}, folder / "runs.pt")
    with zipfile.ZipFile(folder / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        with zipfile.ZipFile(good) as source:
            for name in source.namelist():
                packed.writestr(name, source.read(name))
    with zipfile.ZipFile(folder / "climbs.pt", "w") as climbs:
        climbs.writestr("../data.pkl", b"\x80\x02}.")
    with zipfile.ZipFile(folder / "small.pt", "w") as small:
        with zipfile.ZipFile(good) as source:
            for name in source.namelist():
                data = source.read(name)
                small.writestr(name, data[:100] if name.endswith("data/0") else data)
    (folder / "cut.pt").write_bytes(raw[:-500])
    (folder / "empty.pt").write_bytes(b"")
    (folder / "text.pt").write_text("no checkpoint at all" * 10)
    torch.save({"w": torch.ones(9)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    old = (folder / "old.pt").read_bytes()
    (folder / "old-cut.pt").write_bytes(old[:-7])
    st = folder / "good.safetensors"
    safetensors.save_file({"a": torch.ones(4), "b": torch.ones(2)}, st)
    head = st.read_bytes()
    (folder / "st-cut.safetensors").write_bytes(head[:-3])
    (folder / "st-head.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + head[8:])
    wrong = head.replace(b'"shape":[4]', b'"shape":[5]')
    (folder / "st-shape.safetensors").write_bytes(wrong)
    (folder / "st-overlap.safetensors").write_bytes(head.replace(b"[0,16]", b"[0,24]"))
    return [p for p in sorted(folder.iterdir()) if p.stem not in ("good", "old")]


def test_hostile_files_give_errors_and_leave_nothing(tmp_path, capfd):
    (tmp_path / "in").mkdir()
    files = hostile_files(tmp_path / "in")
    assert len(files) == 12
    for i, file in enumerate(files):
        assert convert(file, tmp_path / f"out-{i}") == 1, file
        out = capfd.readouterr()
        assert "drivetrain: error:" in out.err and "panicked" not in out.err, file
        assert "this must never run" not in out.out
        assert not list((tmp_path / f"out-{i}").rglob("manifest.json")), file
    assert convert(tmp_path / "in/good.pt", tmp_path / "fine") == 0
    assert convert(tmp_path / "in/good.pt", tmp_path / "fine") == 1
    assert "already exists" in capfd.readouterr().err
    assert convert(tmp_path / "in/old.pt", tmp_path / "fine", "--overwrite") == 0


def test_hostile_dcp_folders(tmp_path, capfd):
    state = {"w": torch.arange(12.0).reshape(3, 4), "n": 1}
    dcp.save(state, checkpoint_id=tmp_path / "good")
    metadata = dcp.FileSystemReader(tmp_path / "good").read_metadata()

    def refused(change, word):
        changed = pickle.loads(pickle.dumps(metadata))
        change(changed)
        folder = tmp_path / f"bad-{word}"
        folder.mkdir()
        for file in (tmp_path / "good").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(changed))
        assert convert(folder, tmp_path / "out") == 1
        error = capfd.readouterr().err
        assert word in error and "panicked" not in error, error

    def move(**place):
        def change(m):
            for info in m.storage_data.values():
                for name, value in place.items():
                    setattr(info, name, value)

        return change

    def shrink(m):
        m.state_dict_metadata["w"].chunks[0].sizes = torch.Size([2, 4])

    def run(m):
        m.planner_data = Hostile()

    refused(move(relative_path="../good/__0_0.distcp"), "..")
    refused(move(offset=10**12), "bytes from")
    refused(move(length=5), "zip")
    refused(shrink, "exactly once")
    refused(run, "builtins.print")


MEMORY = """
import resource, sys, threading, time
from drivetrain import _native

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

before, peak, done = anonymous(), [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
codes = [
    _native.cli_main(["drivetrain", "ckpt", "convert", *args.split("|")]) for args in sys.argv[1:]
]
done.set()
thread.join()
assert codes == [0] * len(codes), codes
print(peak[0] - before)
"""


def test_memory_stays_at_a_few_windows(tmp_path):
    """600 MB through each direction; torch is not even loaded."""
    tensors = {f"w{i}": torch.full((50_000_000,), i, dtype=torch.float32) for i in range(3)}
    torch.save(tensors, tmp_path / "big.pt")
    steps = [
        f"{tmp_path}/big.pt|{tmp_path}/a",
        f"{tmp_path}/a|{tmp_path}/b.safetensors|--to|safetensors",
        f"{tmp_path}/a|{tmp_path}/c|--to|dcp",
        f"{tmp_path}/c|{tmp_path}/d",
        f"{tmp_path}/b.safetensors|{tmp_path}/e",
        f"{tmp_path}/e|{tmp_path}/f.pt|--to|pt",
    ]
    script = tmp_path / "memory.py"
    script.write_text(MEMORY)
    done = subprocess.run(
        [sys.executable, str(script), *steps], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.splitlines()[-1]) < 256 << 20
    found = torch.load(tmp_path / "f.pt", weights_only=True, mmap=True)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_neither_side_ours_is_refused_with_the_way_out(tmp_path, capfd):
    torch.save({"w": torch.zeros(3)}, tmp_path / "weights.pt")
    assert convert(tmp_path / "weights.pt", tmp_path / "out", "--to", "dcp") != 0
    assert "two steps" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_root_of_ours_without_a_wanted_kind_says_what_to_name(tmp_path, capfd):
    with dt.Checkpointer(tmp_path / "run", rank=0, world_size=1) as ckpt:
        ckpt.save(1, {"w": torch.ones(3)}, blocking=True)
    assert convert(tmp_path / "run", tmp_path / "out") != 0
    assert "--to safetensors" in capfd.readouterr().err
