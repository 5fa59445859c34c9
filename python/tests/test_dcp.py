"""torch.distributed.checkpoint on Drivetrain's storage, in one process."""

import collections
import enum
import json
import pathlib
import pickle
import subprocess
import sys
import warnings

import drivetrain as dt
import pytest
from drivetrain import _native

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from drivetrain.torch import Stager, StorageReader, StorageWriter  # noqa: E402
from states import same, trained  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Color(enum.Enum):
    RED = 1


def save(state, folder, **options):
    return dcp.save(state, storage_writer=StorageWriter(folder, **options))


def load(state, folder, **options):
    dcp.load(state, storage_reader=StorageReader(folder), **options)
    return state


def load_all(folder):
    """Every value of a checkpoint, nested as it was saved."""
    state = {}
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(
        state, StorageReader(folder), no_dist=True, planner=_EmptyStateDictLoadPlanner()
    )
    return state


def model_state():
    return {**trained(3), "step": 7}


def zeroed(state):
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeroed(value) for value in state]
    return state if isinstance(state, str) else type(state)()


def test_a_training_state_comes_back(tmp_path):
    state = model_state()
    save(state, tmp_path / "step-00000012")
    assert same(load_all(tmp_path / "step-00000012")["model"], dict(state["model"]))
    again = load(zeroed(state), tmp_path / "step-00000012")
    assert same(again["model"], dict(state["model"])) and again["step"] == 7
    assert again["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    manifest = json.loads((tmp_path / "step-00000012/manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"]) == (12, 1)
    assert pickle.dumps({})[:1] not in (tmp_path / "step-00000012/manifest.json").read_bytes()


def test_the_command_line_verifies_it_and_a_checkpointer_restores_it(tmp_path):
    from drivetrain._cli import main

    state = {"model": {"w": torch.arange(6.0).reshape(2, 3), "7": 3}, "extra": {"a": (1, 2)}}
    save(state, tmp_path / "step-00000012")
    assert _native.cli_main(["drivetrain", "ckpt", "verify", str(tmp_path / "step-00000012")]) == 0
    assert main is not None
    target = {"model": {"w": torch.zeros(2, 3), "7": 0}, "extra": {}}
    with dt.Checkpointer(tmp_path) as ckpt:
        restored = ckpt.restore(target, rng=False)
    assert restored.step == 12 and same(target["model"], state["model"])
    assert target["extra"] == {"a": (1, 2)}


def test_a_flipped_bit_is_found(tmp_path):
    save({"w": torch.arange(1000.0)}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("a-*/rank-00000.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-17] ^= 4
    file.write_bytes(raw)
    with pytest.raises(CheckpointException, match="crc32c"):
        load({"w": torch.zeros(1000)}, tmp_path / "c")
    assert _native.cli_main(["drivetrain", "ckpt", "verify", str(tmp_path / "c")]) == 1


def test_a_checkpointers_folder_loads_through_dcp(tmp_path):
    import numpy as np

    odd = np.zeros(2, dtype=[("x", "<f4"), ("y", "<i2")])
    state = {"model": torch.nn.Linear(3, 2), "extra": {"lr": 0.5, "ids": [1, 2], "t": (1,)}}
    state["arrays"] = {"plain": np.arange(3), "odd": odd}
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(4, state, blocking=True)
    target = {"model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, "extra": {"lr": 0.0}}
    load(target, tmp_path / "step-00000004")
    assert torch.equal(target["model"]["weight"], state["model"].weight)
    assert torch.equal(target["model"]["bias"], state["model"].bias)
    assert target["extra"]["lr"] == 0.5
    everything = load_all(tmp_path / "step-00000004")
    assert everything["extra"] == {"lr": 0.5, "ids": [1, 2], "t": (1,)}
    assert everything["arrays"]["plain"].tolist() == [0, 1, 2]


PLAIN = [
    None,
    True,
    -(2**63),
    1 << 100,
    -(1 << 100),
    1.5,
    float("inf"),
    -0.0,
    1e300,
    "text ü ~x",
    b"\x00\xff",
    (1, (2.5, None)),
    [],
    (),
    [1, "a", [2]],
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    torch.device("cpu"),
    # inside tuples, since the planner takes lists and dicts apart
    (collections.OrderedDict(a=1, b=(2,)),),
    (collections.defaultdict(list, {"a": [1]}),),
    (collections.Counter("abca"),),
    ({1: "int", "~1": "tilde", "": 0},),
]
FOREIGN = [Color.RED, {1, 2}, frozenset("a"), (torch.arange(3), 1), range(3), 1j]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_typed_json(tmp_path, value):
    save({"x": {"value": value}}, tmp_path / "c")
    manifest = json.loads((tmp_path / "c/manifest.json").read_text())
    assert "foreign_pickle" not in json.dumps(manifest)
    found = load_all(tmp_path / "c")["x"]["value"]
    assert same(found, value) and repr(found) == repr(value)


def test_other_values_are_kept_and_flagged(tmp_path):
    state = {f"v{i}": value for i, value in enumerate(FOREIGN)}
    save(state, tmp_path / "c")
    manifest = json.loads((tmp_path / "c/manifest.json").read_text())
    for name in state:
        assert manifest["state"][name]["~tensor"]["foreign_pickle"] is True, name
    found = load_all(tmp_path / "c")
    assert same(found["v3"], state["v3"]) and found["v0"] is Color.RED
    assert {n: found[n] for n in state if n != "v3"} == {n: state[n] for n in state if n != "v3"}


DTYPES = [
    getattr(torch, name)
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 "
        "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
        "float8_e8m0fnu"
    ).split()
]


def test_tensors_of_every_dtype_and_shape(tmp_path):
    def bits(dtype, *shape):
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2, (count,), dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)

    state = {str(dtype): bits(dtype, 3, 5) for dtype in DTYPES}
    base = torch.arange(24.0).reshape(2, 3, 4)
    state |= {"turned": base.permute(2, 0, 1), "strided": base[:, ::2], "scalar": torch.tensor(3.0)}
    state |= {"empty": torch.zeros(0, 3), "conj": torch.tensor([1 + 2j]).conj()}
    state |= {"last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    state |= {"learns": torch.nn.Parameter(torch.ones(2))}
    saved = save(state, tmp_path / "c")
    found = load_all(tmp_path / "c")
    for name, value in state.items():
        assert same(found[name], value.detach().resolve_conj()), name
    # targets that are not plain memory
    targets = {
        "turned": torch.zeros(2, 3, 4).permute(2, 0, 1),
        "strided": torch.zeros(2, 3, 4)[:, ::2],
        "torch.float32": torch.zeros(3, 5, dtype=torch.float64),
    }
    load(targets, tmp_path / "c")
    assert torch.equal(targets["turned"], state["turned"])
    assert torch.equal(targets["strided"], state["strided"])
    assert torch.equal(targets["torch.float32"], state["torch.float32"].double())
    metadata = StorageReader(tmp_path / "c").read_metadata()
    assert metadata.state_dict_metadata == saved.state_dict_metadata
    assert list(metadata.state_dict_metadata) == list(saved.state_dict_metadata)
    assert metadata.planner_data == saved.planner_data
    assert metadata.version == saved.version
    assert metadata.state_dict_metadata["learns"].properties.requires_grad
    assert set(metadata.storage_data) == {
        MetadataIndex(name, chunk.offsets)
        for name, item in metadata.state_dict_metadata.items()
        for chunk in item.chunks
    }


def test_names_lists_and_flat_planners(tmp_path):
    state = {
        "a.b/c d": {"ü": torch.ones(2), "~t": torch.ones(1), 'q"\\': torch.ones(3)},
        "list": [torch.zeros(2), {"x": torch.ones(1), "n": 5}, 3],
        "plain": [1, 2, {"three": 3}],
    }
    metadata = save(state, tmp_path / "nested")
    found = load_all(tmp_path / "nested")
    assert same(found["a.b/c d"], state["a.b/c d"])
    assert same(found["list"][1], state["list"][1]) and found["plain"] == state["plain"]
    kinds = {TensorStorageMetadata: 0, BytesStorageMetadata: 0}
    for item in metadata.state_dict_metadata.values():
        kinds[type(item)] += 1
    assert kinds == {TensorStorageMetadata: 5, BytesStorageMetadata: 5}
    flat = {"m.w": torch.ones(3), "m": 4}
    dcp.save(
        flat,
        storage_writer=StorageWriter(tmp_path / "flat"),
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    target = {"m.w": torch.zeros(3), "m": 0}
    load(target, tmp_path / "flat", planner=planner)
    assert same(target, flat)


def test_a_missing_name_is_refused_and_a_partial_load_is_not(tmp_path):
    save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"a": torch.zeros(2), "z": torch.zeros(1)}, tmp_path / "c")
    target = {"a": torch.zeros(2), "z": torch.full((1,), 5.0)}
    load(target, tmp_path / "c", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(target["a"], torch.ones(2)) and target["z"] == 5
    only = {"b": torch.zeros(3)}
    assert torch.equal(load(only, tmp_path / "c")["b"], torch.ones(3))
    with pytest.raises(CheckpointException, match=r"(?i)size|shape"):
        load({"a": torch.zeros(5)}, tmp_path / "c")


def test_a_checkpoint_is_replaced_only_on_demand(tmp_path):
    folder = tmp_path / "c"
    save({"a": torch.ones(2)}, folder)
    with pytest.raises(CheckpointException, match="already exists"):
        save({"a": torch.zeros(2)}, folder)
    assert torch.equal(load({"a": torch.zeros(2)}, folder)["a"], torch.ones(2))
    save({"a": torch.full((2,), 3.0)}, folder, overwrite=True)
    assert torch.equal(load({"a": torch.zeros(2)}, folder)["a"], torch.full((2,), 3.0))
    assert len(list(folder.glob("a-*"))) == 1, "the replaced attempt is gone"
    with pytest.raises(CheckpointException, match=r"(?i)not found|no such"):
        load({"a": torch.zeros(2)}, tmp_path / "nothing")


class FailingPlanner(DefaultSavePlanner):
    """Fails when its second tensor is resolved."""

    resolved = 0

    def resolve_data(self, write_item):
        self.resolved += 1
        if self.resolved == 2:
            raise RuntimeError("this tensor is gone")
        return super().resolve_data(write_item)


def test_a_failed_save_leaves_no_checkpoint(tmp_path):
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    with pytest.raises(CheckpointException, match="this tensor is gone"):
        dcp.save(state, storage_writer=StorageWriter(tmp_path / "c"), planner=FailingPlanner())
    assert not list((tmp_path / "c").rglob("*.json"))
    assert not list((tmp_path / "c").rglob("*.safetensors"))
    save(state, tmp_path / "c")
    assert torch.equal(load({"b": torch.zeros(3)}, tmp_path / "c")["b"], torch.ones(3))


KILLED = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
from drivetrain.torch import StorageWriter
dcp.save({"w": torch.ones(3_000_000)}, storage_writer=StorageWriter(sys.argv[1]))
"""


@pytest.mark.parametrize("operation", [1, 3, 6])
def test_a_killed_save_leaves_no_checkpoint(tmp_path, operation):
    import os

    env = os.environ | {"DRIVETRAIN_FAULT": f"kill@{operation}"}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "c")], env=env)
    assert done.returncode != 0
    assert not (tmp_path / "c/manifest.json").exists()
    save({"w": torch.ones(2)}, tmp_path / "c")


def test_cached_plans_do_not_write_over_older_saves(tmp_path):
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step in range(4):
        state = {"w": torch.full((3,), float(step)), "n": step}
        writer = StorageWriter(tmp_path / f"{step}")
        dcp.save(state, storage_writer=writer, planner=planner)
    for step in range(4):
        found = load({"w": torch.zeros(3), "n": 0}, tmp_path / f"{step}")
        assert same(found, {"w": torch.full((3,), float(step)), "n": step})
        names = {p.name for p in (tmp_path / f"{step}").iterdir()}
        assert len(names) == 2, names
    assert len({p.name for p in tmp_path.glob("*/a-*")}) == 4
    for cache in ("_cached_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(DefaultSavePlanner, cache).clear()
    for cache in ("_cached_metadata", "_cached_final_save_plan"):
        getattr(DefaultSavePlanner, cache).clear()


def test_leftovers_of_killed_saves_are_removed(tmp_path):
    import os
    import time

    def attempt(name, file, age_s):
        (tmp_path / "c" / name).mkdir(parents=True)
        path = tmp_path / "c" / name / file
        path.write_bytes(b"left over")
        os.utime(path, (time.time() - age_s,) * 2)
        return path

    old = attempt("a-0123456789abcdef", "rank-00000.safetensors", 7200)
    young = attempt("a-fedcba9876543210", "rank-00000.safetensors", 60)
    foreign = attempt("a-00000000000000aa", "notes.txt", 7200)
    other = attempt("notes", "rank-00000.safetensors", 7200)
    save({"a": torch.ones(2)}, tmp_path / "c")
    assert not old.parent.exists()
    assert young.exists() and foreign.exists() and other.exists()


def test_async_save_in_a_thread_keeps_the_state_of_the_call(tmp_path):
    weights = torch.arange(200_000.0)
    stager = Stager()
    futures = []
    for step in range(5):
        weights.fill_(step)
        writer = StorageWriter(tmp_path / f"{step}")
        futures.append(dcp.async_save({"w": weights}, storage_writer=writer, async_stager=stager))
    weights.fill_(-1)
    for future in futures:
        future.result()
    stager.close()
    for step in range(5):
        found = load({"w": torch.zeros(200_000)}, tmp_path / f"{step}")
        assert bool((found["w"] == step).all()), step


def test_a_stager_waits_for_a_free_slot(tmp_path):
    stager = Stager(timeout="50ms")
    held = [stager.stage({"w": torch.ones(3)}) for _ in range(2)]
    with pytest.raises(dt.DeadlineExceeded, match="staging slot"):
        stager.stage({"w": torch.ones(3)})
    assert torch.equal(held[0]["w"], torch.ones(3))
    held.clear()
    assert torch.equal(stager.stage({"w": torch.zeros(3)})["w"], torch.zeros(3))
    stager.close()
    with pytest.raises(dt.Closed):
        stager.stage({})


def test_both_halves_travel_between_processes_and_check_their_ids(tmp_path):
    writer = pickle.loads(pickle.dumps(StorageWriter(tmp_path / "c")))
    reader = StorageReader(tmp_path / "c")
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    reader.read_metadata()
    again = pickle.loads(pickle.dumps(reader))
    target = {"a": torch.zeros(2)}
    dcp.load(target, storage_reader=again)
    assert torch.equal(target["a"], torch.ones(2))
    for good in ("/a/b", pathlib.Path("x"), "s3://b/c", "file:///x", "memory://x"):
        assert StorageWriter.validate_checkpoint_id(good)
        assert StorageReader.validate_checkpoint_id(good)
    assert not StorageWriter.validate_checkpoint_id("gs://b/c")
    assert writer.checkpoint_id == str(tmp_path / "c")
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "d", storage_writer=StorageWriter())
    dcp.load(target, checkpoint_id=tmp_path / "d", storage_reader=StorageReader())
    with pytest.raises(CheckpointException, match="checkpoint_id"):
        dcp.save({"a": torch.ones(2)}, storage_writer=StorageWriter())


def test_planner_data_without_a_stored_form_is_refused(tmp_path):
    class Planner(DefaultSavePlanner):
        def create_global_plan(self, plans):
            plans, metadata = super().create_global_plan(plans)
            metadata.planner_data = {"x": Color.RED}
            return plans, metadata

    with pytest.raises(CheckpointException, match="planner data"):
        dcp.save(
            {"a": torch.ones(2)}, storage_writer=StorageWriter(tmp_path / "c"), planner=Planner()
        )
    assert not (tmp_path / "c/manifest.json").exists()


def test_get_and_set_state_dict(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (seed + 1))
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = build(0)
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optim": moments}, tmp_path / "c")
    other, other_optimizer = build(1)
    state = dict(zip(("model", "optim"), get_state_dict(other, other_optimizer)))
    load(state, tmp_path / "c")
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])
    assert other_optimizer.param_groups[0]["lr"] == 0.01


def test_stateful_objects_and_keys_by_name(tmp_path):
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    class Counter:
        def __init__(self, value):
            self.value, self.calls = value, 0

        def state_dict(self):
            return {"value": self.value, "t": torch.full((2,), float(self.value))}

        def load_state_dict(self, state):
            self.value, self.calls = state["value"], self.calls + 1

    save({"a": Counter(3), "b": {"x": {"y": torch.ones(2), "n": 1}}}, tmp_path / "c")
    target = {"a": Counter(0), "b": {"x": {"y": torch.zeros(2), "n": 0}}}
    counter = target["a"]
    load(target, tmp_path / "c")
    assert target["a"] is counter and (counter.value, counter.calls) == (3, 1)
    assert same(target["b"], {"x": {"y": torch.ones(2), "n": 1}})
    found = _load_state_dict_from_keys("b.x", storage_reader=StorageReader(tmp_path / "c"))
    assert same(found, {"b": {"x": {"y": torch.ones(2), "n": 1}}})
    save({}, tmp_path / "empty")
    assert load({}, tmp_path / "empty") == {}


def test_objects_on_stores_and_uncoordinated_saves(tmp_path):
    state = {"w": torch.arange(4.0), "n": 1}
    save(state, "memory://dcp-test/run/5")
    assert same(load(zeroed(state), "memory://dcp-test/run/5"), state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            state,
            storage_writer=StorageWriter(tmp_path / "alone"),
            use_collectives=False,
            no_dist=True,
        )
        target = zeroed(state)
        dcp.load(
            target,
            storage_reader=StorageReader(tmp_path / "alone"),
            no_dist=True,
        )
    assert same(target, state)


class OtherBytes(DefaultSavePlanner):
    """Hands over a tensor of another dtype than it planned."""

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        return found.double() if isinstance(found, torch.Tensor) else found


def test_data_that_is_not_as_planned_is_refused_by_name(tmp_path):
    writer = StorageWriter(tmp_path / "one")
    with pytest.raises(CheckpointException, match=r"layer\.w.*float32.*planned.*float64"):
        dcp.save({"layer": {"w": torch.zeros(3)}}, storage_writer=writer, planner=OtherBytes())
    assert not (tmp_path / "one" / "manifest.json").exists()
