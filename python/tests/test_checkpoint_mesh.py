"""Meshes: what any of them saves, any other restores, against the whole tensors."""

import pathlib

import pytest
from drivetrain._checkpoint import spread
from ranks import read_answers, run_ranks

torch = pytest.importorskip("torch")

WORKER = pathlib.Path(__file__).with_name("mesh_worker.py")
DEADLINE_S = 240


def launch(scenario, world, folder):
    """Runs a scenario on ranks of a gloo group and returns their answers, in rank order."""
    run_ranks(WORKER, scenario, world, folder)
    return read_answers(folder / f"{scenario}-{world}-{rank}.json" for rank in range(world))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    return folder, launch("save_all", 4, folder)


def test_every_kind_restores_what_every_other_saved(saved):
    for answer in saved[1]:
        assert answer["wrong"] == []
        assert len(answer["kinds"]) == 10


def test_fsdp_over_tensor_parallel_with_uneven_rows(saved):
    for answer in saved[1]:
        found = answer["fsdp_tp"]
        assert found["held by hand"] and found["again"] and found["strided"], found


def test_ddp_is_saved_under_the_names_of_the_bare_model(saved):
    for answer in saved[1]:
        assert answer["ddp"]["loaded"] == {"right": True, "doubled": True}
        assert answer["ddp"]["names"] == ["down.bias", "down.weight", "up.bias", "up.weight"]


def test_a_placement_with_two_readings_is_refused(saved):
    assert all(answer["ambiguous"] for answer in saved[1])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_other_numbers_of_ranks(saved, world):
    for answer in launch("restore_all", world, saved[0]):
        assert answer["wrong"] == []
        right = {"right": True, "doubled": True}
        assert answer["fsdp_tp"] == right
        assert answer["meta"] == right, "a model without memory"
        assert answer["ddp"] == answer["ddp as fsdp"] == answer["ddp as meta"] == right
        assert answer["fsdp_tp as ddp"] == right


def chunks(size, parts):
    """Lengths of torch.chunk's parts, with the empty ones it leaves out."""
    lengths = [len(part) for part in torch.arange(size).chunk(parts)] if size else []
    return lengths + [0] * (parts - len(lengths))


@pytest.mark.parametrize("size", [0, 1, 5, 7, 12, 27, 64])
def test_ranges_are_those_of_torch_chunk(size):
    everything = torch.arange(size)
    for parts in (1, 2, 3, 8):
        for index, length in enumerate(chunks(size, parts)):
            start, found = spread.chunk(size, parts, index)
            assert found == length
            if found:
                assert torch.equal(everything.chunk(parts)[index], everything[start:][:found])


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 2), (2, 4), (3, 2), (3, 4)])
def test_fully_sharded_ranges_are_cut_by_tp_first(dp, tp):
    """What fully_shard holds, chunk by chunk; a size with two readings may only be refused."""
    for size in range(1, 60):
        seen = []
        for rank in range(dp * tp):
            outer = torch.arange(size).chunk(tp)
            outer = outer[rank % tp] if rank % tp < len(outer) else torch.arange(0)
            inner = outer.chunk(dp) if len(outer) else ()
            want = inner[rank // tp].tolist() if rank // tp < len(inner) else []
            cuts = [(tp, dp, rank // tp), (1, tp, rank % tp)]
            ranges = spread.local_ranges(size, cuts, len(want))
            if ranges is not None:
                got = [start + i for start, length in ranges for i in range(length)]
                assert got == want, (size, rank)
                seen += got
        assert sorted(seen) == list(range(size)) or size in (27, 38, 50, 51), size
