"""torch.distributed.checkpoint on Drivetrain's storage, on several ranks, as real processes."""

import json
import pathlib

import pytest
from drivetrain import _native
from ranks import run_ranks

pytest.importorskip("torch.distributed.checkpoint")

WORKER = pathlib.Path(__file__).with_name("dcp_worker.py")
DEADLINE_S = 240


def launch(scenarios, world, folder):
    """Runs scenarios one after the other on each rank; answers by scenario, then by rank."""
    run_ranks(WORKER, ",".join(scenarios), world, folder)
    ranks = [json.loads((folder / f"answers-{rank}.json").read_text()) for rank in range(world)]
    for answers in ranks:
        for answer in answers.values():
            assert "crash" not in answer, answer["crash"]
    return {name: [answers[name] for answers in ranks] for name in scenarios}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    names = [
        "reshard",
        "fsdp",
        "ddp",
        "faults",
        "caching",
        "subgroups",
        "uncoordinated",
        "sharded_tensors",
        "orders",
        "load_errors",
        "async_modes",
    ]
    return folder, launch(names, 2, folder)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return folder, launch(["reshard", "fsdp", "two_dims"], 4, folder)


def data_bytes(folder):
    """Bytes of the elements that a checkpoint stores, without headers and padding."""
    opened = _native.open_checkpoint(str(folder))
    return sum(row[8] for row in _native.checkpoint_chunks(opened))


@pytest.mark.parametrize("world", ["two", "four"])
def test_any_placement_loads_as_any_other(request, world):
    folder, answers = request.getfixturevalue(world)
    for answer in answers["reshard"]:
        assert answer["wrong"] == [] and answer["rows"] == [0, 1, 2]
    assert answers["reshard"][0]["cases"] == {"two": 3, "four": 12}[world]
    assert _native.cli_main(["drivetrain", "ckpt", "verify", str(folder / "mesh")]) == 0
    # what is replicated is stored once
    cases = answers["reshard"][0]["cases"]
    assert data_bytes(folder / "mesh") == cases * 7 * 6 * 4 + 3 * 4


@pytest.mark.parametrize("world", ["two", "four"])
def test_sharded_models_and_optimizers_come_back(request, world):
    folder, answers = request.getfixturevalue(world)
    names = ["fsdp"] if world == "two" else ["fsdp", "hsdp"]
    for name in names:
        assert all(answer[name] for answer in answers["fsdp"]), name
        numel = answers["fsdp"][0][f"{name} numel"]
        # weights, two moments, and a step number of each of the four parameters
        assert data_bytes(folder / name) == 3 * numel * 4 + 4 * 4, name


def test_replicas_are_written_once(two):
    folder, answers = two
    assert all(answer["same"] and answer["epoch"] == 3 for answer in answers["ddp"])
    assert data_bytes(folder / "ddp") == answers["ddp"][0]["bytes"]


def test_a_failure_on_one_rank_is_everyones_and_commits_nothing(two):
    for answer in two[1]["faults"]:
        assert "no such tensor on rank 1" in answer["failed"]
        assert answer["no manifest"] and answer["loaded"]
        assert "already exists" in answer["again"]


def test_cached_plans_save_what_is_there_now(two):
    for answer in two[1]["caching"]:
        assert answer["right"] == [True] * 4
    attempts = set()
    for step in range(4):
        assert {p.suffix for p in (two[0] / f"cache-{step}").iterdir()} == {"", ".json"}
        attempts |= {p.name for p in (two[0] / f"cache-{step}").glob("a-*")}
    assert len(attempts) == 4, "each save has a folder of its own name"


def test_groups_save_by_themselves(two):
    assert all(answer["right"] for answer in two[1]["subgroups"])


def test_ranks_save_without_coordination(two):
    assert all(answer["right"] for answer in two[1]["uncoordinated"])


def test_async_saves_in_threads_and_processes(two):
    for answer in two[1]["async_modes"]:
        assert answer == {"thread": [True] * 3, "process": [True] * 3}


def test_older_sharded_tensors_load_under_any_spec(two):
    assert all(answer["wrong"] == [] for answer in two[1]["sharded_tensors"])


def test_orders_of_keys_and_coordinators_do_not_matter(two):
    assert all(answer == {"same": True, "led": True} for answer in two[1]["orders"])


def test_damage_that_one_rank_finds_is_everyones(two):
    for answer in two[1]["load_errors"]:
        assert answer["ranks"] == [1] and "crc32c" in answer["text"]


def test_strided_shards_come_back(four):
    assert all(answer == {"sharded": True, "plain": True} for answer in four[1]["two_dims"])


@pytest.mark.parametrize("world", ["two", "four"])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_one_process_loads_what_many_saved(request, world):
    import torch
    import torch.distributed.checkpoint as dcp
    from drivetrain.torch import StorageReader

    folder, answers = request.getfixturevalue(world)
    for i in range(answers["reshard"][0]["cases"]):
        target = {f"t{i}": torch.zeros(7, 6), "n": {"step": 0, "tags": ()}}
        dcp.load(target, storage_reader=StorageReader(folder / "mesh"))
        assert torch.equal(target[f"t{i}"], torch.arange(42.0).reshape(7, 6) + i)
        assert target["n"] == {"step": 5, "tags": ("a", 1)}
