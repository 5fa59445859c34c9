"""Pipeline stages: ranks that hold different names save one checkpoint, read by any stages."""

import pathlib

import drivetrain as dt
import pytest
from ranks import read_answers, run_ranks
from safetensors import safe_open

WORKER = pathlib.Path(__file__).parent / "stage_worker.py"


def run(scenario, world, folder):
    assert run_ranks(WORKER, scenario, world, folder) == [0] * world
    return read_answers(folder / f"{scenario}-{world}-{rank}.json" for rank in range(world))


def test_stages_save_one_checkpoint_that_other_stages_and_one_process_restore(tmp_path):
    run("save", 4, tmp_path)
    expected = {"step": 1, "same": True, "at": 5, "unexpected": []}
    assert run("restore", 3, tmp_path) == [expected] * 3
    assert run("restore", 1, tmp_path) == [expected]
    # what the two ranks of a stage both hold is written once
    files = sorted((tmp_path / "run").glob("step-*/a-*/rank-*.safetensors"))
    entries = [name for file in files for name in safe_open(file, "pt").keys()]
    weights = sorted(name for name in entries if name.startswith("model.layers"))
    assert len(files) == 4
    assert weights == sorted(f"model.layers.{n}.{p}" for n in range(6) for p in ("weight", "bias"))
    with dt.Checkpointer(tmp_path / "run", rank=0, world_size=1) as ckpt:
        assert ckpt.verify(1).problems == ()


def test_stages_that_disagree_are_refused_by_name(tmp_path):
    answers = run("differ", 4, tmp_path)
    for answer in answers:
        between, within, twice = answer["errors"]
        assert "state at key at" in between and "rank 2" in between
        assert "state at key at" in within and "rank 0 differs from ranks [1" in within
        assert "shared" in twice and "more than one rank wrote" in twice
        assert answer["steps"] == []


@pytest.mark.parametrize("ranks", [[1], [0, 0], [0, 2], [-1, 0], ["0"]])
def test_a_stage_holds_its_own_rank_and_others_of_this_world(tmp_path, ranks):
    with pytest.raises(dt.InvalidArgument, match="stage_ranks"):
        dt.Checkpointer(tmp_path / "run", rank=0, world_size=2, stage_ranks=ranks)
