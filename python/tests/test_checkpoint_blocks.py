"""Dicts of plain tensors taken as one value: the same checkpoint as tensor by tensor."""

from collections import OrderedDict

import drivetrain as dt
import numpy as np
import pytest
import torch
from drivetrain import _native
from drivetrain._checkpoint.alike import split
from drivetrain._checkpoint.tree import Snapshot
from torch import nn

torch.set_num_threads(1)


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 3)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.body[0].weight


def tensors(count, start=0.0):
    return {f"t{i}": torch.full((2, 3), start + i) for i in range(count)}


def tied():
    shared = torch.arange(6.0)
    return {"a": {"x": shared, "y": torch.ones(2)}, "b": {"z": shared}, "c": [shared, shared[:2]]}


def stepped():
    model = WithBuffers()
    optimizer = torch.optim.Adam(model.parameters())
    model.head(model.body(torch.randn(5, 3))).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


STATES = {
    "flat": lambda: {"v": tensors(5)},
    "two": lambda: {"v": tensors(3), "w": tensors(2)},
    "nested": lambda: {"v": {"l1": tensors(2), "l2": {"deep": tensors(2)}, 7: tensors(1)}},
    "mixed": lambda: {"v": {"l1": tensors(2), "n": 3, "l2": [1.5, tensors(2)]}},
    "kinds": lambda: {
        "v": {
            "bf16": torch.ones(3, dtype=torch.bfloat16),
            "scalar": torch.tensor(2.5),
            "bool": torch.tensor([True, False]),
            "complex": torch.tensor([1 + 2j]),
            "i64": torch.arange(4),
        }
    },
    "keys": lambda: {
        "v": {key: torch.ones(2) for key in ["~tensor", "~5", 5, "5", "", "ä€", 'q"\\', "a\n", -1]}
    },
    "one odd key": lambda: {"v": {"~tensor": torch.ones(2)}},
    "ordered": lambda: {"v": OrderedDict(tensors(3))},
    "module": lambda: {"m": WithBuffers()},
    "optimizer": stepped,
    "tied outside": tied,
    "tied inside": lambda: (lambda t: {"v": {"a": t, "b": torch.ones(2), "c": t}})(torch.ones(3)),
    "views": lambda: (lambda t: {"v": {"a": t, "b": t[:2], "c": t[2:]}})(torch.arange(6.0)),
    "not plain": lambda: {
        "v": {"t": torch.ones(3, 2).t(), "e": torch.ones(1).expand(4), "z": torch.ones(0)},
        "w": {"conj": torch.tensor([1 + 2j]).conj(), "neg": torch.tensor([1 + 2j]).conj().imag},
        "x": {"own": torch.ones(4, dtype=torch.uint8).view(torch.float8_e4m3fnuz)},
    },
    "no tensors": lambda: {"v": {}, "w": {"a": {}, "b": {}}},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_same_text_as_tensor_by_tensor(state):
    values = state()
    one_by_one, as_blocks = Snapshot(0, 2), Snapshot(0, 2, known={})
    for snapshot in (one_by_one, as_blocks):
        snapshot.add_all(values)
    assert as_blocks.state_json() == one_by_one.state_json()
    rows = sum(len(found.block.rows) for found in as_blocks.found)
    assert rows + len(as_blocks.pieces) == len(one_by_one.pieces)
    again = Snapshot(0, 2, known={found.block.path: found.block for found in as_blocks.found})
    again.add_all(values)
    assert again.state_json() == one_by_one.state_json()
    assert [f.block for f in again.found] == [f.block for f in as_blocks.found]


def test_the_states_above_are_what_their_names_say():
    def found(name):
        snapshot = Snapshot(0, 1, known={})
        snapshot.add_all(STATES[name]())
        return [len(found.block.rows) for found in snapshot.found], len(snapshot.pieces)

    assert found("flat") == ([5], 0)
    assert found("nested") == ([5], 0)
    assert found("keys") == ([9], 0)
    assert found("tied inside") == ([2], 0)
    assert found("tied outside")[0] == [2]
    assert found("ordered") == ([3], 0)
    assert found("not plain")[0] == []


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_what_was_saved_comes_back(tmp_path, state):
    values = {name: v for name, v in state().items() if isinstance(v, dict)}

    def leaves(value, path=()):
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                yield from leaves(item, (*path, key))
        else:
            yield path, value

    with dt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, values, blocking=True, rng=False)
        wanted = dict(leaves(values))
        fresh = dict(leaves(ckpt.restore({name: {} for name in values}, strict=False).state))
        assert fresh.keys() == wanted.keys()
        for path, value in wanted.items():
            if torch.is_tensor(value):
                one, other = fresh[path].resolve_conj(), value.resolve_conj().resolve_neg()
                assert one.dtype == other.dtype and one.shape == other.shape
                if one.element_size() == 1:
                    one, other = one.view(torch.uint8), other.view(torch.uint8)
                assert torch.equal(one, other), path
            else:
                assert fresh[path] == value


def test_every_save_sees_what_is_there_then(tmp_path):
    """The kept description is used for what still looks the same, and for nothing else."""
    changes = [
        lambda v: v["l"].update(a=v["l"].pop("a")),  # the order of the keys
        lambda v: v["l"].update(c=torch.full((2, 2), 9.0)),
        lambda v: v["l"].pop("b"),
        lambda v: v["l"].update(a=v["l"]["a"].reshape(1, 6)),
        lambda v: v["l"].update(a=v["l"]["a"].to(torch.float64)),
        lambda v: v["l"].update(a=torch.full((6,), 4.0), d=torch.full((6,), 5.0)),
        lambda v: v["l"].update(d=v["l"]["a"]),  # now tied
        lambda v: v["l"].update(d=v["l"]["a"].clone()),
        lambda v: v["l"].update({1: torch.ones(3)}),
        lambda v: v["l"]["a"].add_(1),
        lambda v: setattr(v["l"]["a"], "data", torch.full((3, 2), 8.0)),
        lambda v: v["l"].update(n=5),
        lambda v: v["l"].pop("n"),
        lambda v: v.update(k=v["l"]["a"]),
    ]
    value = {"l": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}}
    with dt.Checkpointer(tmp_path, keep=None) as ckpt:
        for step, change in enumerate(changes):
            change(value)
            ckpt.save(step, {"v": value}, blocking=True, rng=False)
            got = ckpt.restore({"v": {}}, strict=False).state["v"]
            assert list(got["l"]) == list(value["l"])
            for key, want in value["l"].items():
                if key == "n":
                    assert got["l"][key] == want
                else:
                    assert torch.equal(got["l"][key], want), (step, key)
                    assert got["l"][key].dtype is want.dtype
            ties = [k for k in value["l"] if value["l"][k] is value["l"]["a"]]
            assert all(got["l"][k] is got["l"]["a"] for k in ties)
        assert got["k"] is got["l"]["a"]


def test_a_key_of_another_type_is_refused_though_it_is_equal(tmp_path):
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"v": {1: torch.ones(2)}}, blocking=True)
        with pytest.raises(_native.Unsupported, match="keys of dicts"):
            ckpt.save(2, {"v": {True: torch.ones(2)}})


def test_buffers_of_a_module_are_written_by_rank_0():
    module = WithBuffers()
    with_buffers, without = Snapshot(0, 2, known={}), Snapshot(0, 2, known={})
    with_buffers.add_all({"m": module})
    without.add_all({"m": dict(module.state_dict())})
    pinned = with_buffers.found[0].block.pinned
    assert {k for k in pinned} == {
        "body.1.running_mean",
        "body.1.running_var",
        "body.1.num_batches_tracked",
    }
    assert without.found[0].block.pinned == frozenset()
    known = {f.block.path: f.block for f in without.found}
    again = Snapshot(0, 2, known=known)
    again.add_all({"m": module})
    assert again.found[0].block is not without.found[0].block


@pytest.mark.parametrize("guard", ["version", "checksum"])
def test_a_change_inside_a_block_during_the_copy_is_noticed(tmp_path, guard):
    values = {"l": tensors(4)}
    with dt.Checkpointer(tmp_path, guard=guard) as ckpt:
        ckpt.save(1, {"v": values}, blocking=True)
        native = ckpt._native

        class Meddling:
            def __getattr__(self, name):
                return getattr(native, name)

            def save(self, *args, check, **options):
                def late():
                    values["l"]["t2"].add_(1)
                    check()

                return native.save(*args, check=late, **options)

        ckpt._native = Meddling()
        with pytest.raises(_native.Corrupt, match=r"v\.l\.t2: expected no change"):
            ckpt.save(2, {"v": values})
        ckpt._native = native
        assert ckpt.steps() == [1]
        ckpt.save(3, {"v": values}, blocking=True)
        assert ckpt.steps() == [1, 3]


def test_tensors_of_inference_mode_are_saved_and_restored(tmp_path):
    with torch.inference_mode():
        values = tensors(3)
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"v": values}, blocking=True)
        with torch.inference_mode():
            live = tensors(3, start=50.0)
        ckpt.restore({"v": live})
    assert all(torch.equal(live[key], values[key]) for key in values)


@pytest.mark.parametrize("odd", ["sparse", "nested", "meta"])
def test_tensors_without_plain_memory_are_refused_by_name(tmp_path, odd):
    value = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": lambda: torch.ones(2, device="meta"),
    }[odd]()
    with dt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(_native.Unsupported, match=r"v\.odd: "):
            ckpt.save(1, {"v": {"plain": torch.ones(2), "odd": value}})


def test_a_restore_of_what_is_alike_fills_the_live_tensors(tmp_path):
    values = {"l1": tensors(3), "l2": tensors(2, start=10.0)}
    module = WithBuffers()
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(
            1, {"n": 3, "v": values, "m": module, "o": OrderedDict(values["l1"])}, blocking=True
        )
        live = {"l1": tensors(3, start=90.0), "l2": tensors(2, start=90.0)}
        other, ordered = WithBuffers(), OrderedDict(tensors(3, start=70.0))
        before = {key: (t, t._version) for key, t in live["l1"].items()}
        targets = {"v": live, "m": other, "o": ordered, "n": 0}
        plan = ckpt.plan(targets)
        restored = ckpt.restore(targets)
    assert "v.l2.t1" in plan.loaded and "m.head.bias" in plan.loaded and not plan.missing
    # six floats each: three, two and three tensors; the module has one tied pair
    own = {t.data_ptr(): t.nbytes for t in module.state_dict().values()}
    assert plan.nbytes == 8 * 24 + sum(own.values())
    for name, group in values.items():
        for key, want in group.items():
            assert torch.equal(live[name][key], want)
    for key, (tensor, version) in before.items():
        assert live["l1"][key] is tensor and tensor._version > version
        assert restored.state["v"]["l1"][key] is tensor
    assert restored.state["v"] is not live and type(restored.state["o"]) is OrderedDict
    assert all(torch.equal(ordered[key], want) for key, want in values["l1"].items())
    assert all(map(torch.equal, other.state_dict().values(), module.state_dict().values()))
    assert targets["n"] == 3


def test_what_differs_is_reported_as_ever(tmp_path):
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"v": tensors(3)}, blocking=True)
        live = tensors(3)
        live["t1"] = torch.zeros(6)
        live["more"] = live.pop("t2")
        with pytest.raises(_native.InvalidArgument, match=r"v\.more.*v\.t1 \(the target"):
            ckpt.restore({"v": live})


def test_targets_in_the_same_memory_are_filled_in_turn(tmp_path):
    shared = torch.arange(4.0)
    with dt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"a": {"w": shared.clone()}, "b": {"w": shared.clone() + 1}}, blocking=True)
        live = torch.zeros(4)
        ckpt.restore({"a": {"w": live}, "b": {"w": live}})
    assert torch.equal(live, shared + 1)


def test_state_that_others_spelled_is_read_in_full():
    values = {"v": {"w": torch.ones(2)}}
    node = '{"w":{"~tensor":{"dtype":"F32","shape":[2]}}}'
    tree, alike = split(f'{{"n":[1,2],"v":{node},"m":null}}', values)
    assert tree == {"n": [1, 2], "m": None} and set(alike) == {"v"}
    for text in (f'{{"v": {node}}}', f'{{"v":{node},"v":{node}}}', f' {{"v":{node}}}'):
        tree, alike = split(text, values)
        assert set(tree) == {"v"} and not alike
    for text in (f'{{"v":{node}', f'{{"v":{node}}}x', f'{{"v":{node},}}', "", "{"):
        with pytest.raises(_native.Corrupt):
            split(text, values)


def test_rows_are_used_by_one_and_with_all_their_addresses(tmp_path):
    rows = _native.TensorRows(['["a"]'], [0], [("F32", [2], 8)], [0], [])
    array = np.ones(2, np.float32)
    native = _native.Checkpointer(str(tmp_path), 0, 1)
    address = array.ctypes.data
    for wrong in ([], [address] * 2, [0]):
        with pytest.raises(_native.InvalidArgument, match="addresses"):
            native.save(1, [], "{}", "{}", blocking=True, overwrite=False, blocks=[(rows, wrong)])
    native.save(2, [], "{}", "{}", blocking=True, overwrite=False, blocks=[(rows, [address])])
    native.save(3, [], "{}", "{}", blocking=True, overwrite=False, blocks=[(rows, [address])])
    got = np.zeros(2, np.float32)
    native.open(3).read_into([], blocks=[(rows, [got.ctypes.data])])
    assert got.tolist() == [1, 1]
    with pytest.raises(_native.InvalidArgument, match="nobody else"):
        native.open(3).read_into([], blocks=[(rows, [got.ctypes.data])])
    with pytest.raises(_native.InvalidArgument, match="kind"):
        _native.TensorRows(['["a"]'], [1], [("F32", [2], 8)], [0], [])
    native.close()
