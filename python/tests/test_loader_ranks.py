"""Rank and world size: arguments, device mesh, torch.distributed, environment, in this order."""

import json
import os
import subprocess
import sys
import textwrap

import drivetrain as dt
import pytest
from data_factory import nuscenes
from drivetrain._ranks import resolve_rank


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    root = nuscenes(folder / "data", scenes=1, keyframes=7)
    return root, folder / "a.index.arrow"


def test_arguments_then_environment_then_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert resolve_rank(None, None, None, ("dp",)) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolve_rank(None, None, None, ("dp",)) == (2, 4)
    assert resolve_rank(0, 8, None, ("dp",)) == (0, 8)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(dt._native.InvalidArgument, match="RANK"):
        resolve_rank(None, None, None, ("dp",))


class FakeMesh:
    """The part of a DeviceMesh that is asked."""

    def __init__(self, sizes, coordinate, names):
        self.sizes, self.coordinate, self.mesh_dim_names = sizes, coordinate, names
        self.ndim = len(sizes)

    def get_coordinate(self):
        return self.coordinate

    def size(self, dim):
        return self.sizes[dim]


def test_mesh_dimensions_multiply_in_the_order_of_dp_dims():
    mesh = FakeMesh((2, 3, 4), [1, 2, 3], ("replicate", "shard", "tp"))
    assert resolve_rank(None, None, mesh, ("replicate", "shard")) == (5, 6)
    assert resolve_rank(None, None, mesh, ("shard",)) == (2, 3)
    assert resolve_rank(None, None, mesh, "replicate") == (1, 2)
    with pytest.raises(dt._native.InvalidArgument, match="replicate"):
        resolve_rank(None, None, mesh, ("dp",))
    assert resolve_rank(None, None, FakeMesh((5,), [4], None), ("dp",)) == (4, 5)
    with pytest.raises(dt._native.InvalidArgument, match="mesh_dim_names"):
        resolve_rank(None, None, FakeMesh((2, 2), [0, 0], None), ("dp",))
    with pytest.raises(dt._native.InvalidArgument, match="part of"):
        resolve_rank(None, None, FakeMesh((2,), None, ("dp",)), ("dp",))


RANK = """
    import json, os, sys
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    import drivetrain as dt

    dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=int(os.environ["ME"]),
                            world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ds = dt.open(os.environ["DATA"], index=os.environ["INDEX"])
    keys = {}
    for name, extra in (("mesh", {"mesh": mesh}), ("world", {})):
        loader = dt.DataLoader(ds, 2, fields={}, shuffle=True, threads=1, **extra)
        keys[name] = [list(zip(b["key"], b["_valid"].tolist())) for b in loader]
    print(json.dumps({"coordinate": mesh.get_coordinate(), **keys}))
    dist.destroy_process_group()
"""


def test_a_2x2_mesh_feeds_tensor_parallel_peers_the_same_samples(tree, tmp_path):
    root, index = tree
    ds = dt.open(str(root), index=str(index))
    meet = f"file://{tmp_path}/meet"
    ranks = []
    for me in range(4):
        environment = {
            **os.environ,
            "ME": str(me),
            "MEET": meet,
            "DATA": str(root),
            "INDEX": str(index),
            "OMP_NUM_THREADS": "1",
        }
        code = textwrap.dedent(RANK)
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
            )
        )
    outputs = []
    try:
        for rank in ranks:
            out, _ = rank.communicate(timeout=180)
            assert rank.returncode == 0
            outputs.append(json.loads(out.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
    by_dp = {}
    for output in outputs:
        by_dp.setdefault(output["coordinate"][0], []).append(output["mesh"])
    assert all(first == second for first, second in by_dp.values())
    expected = sorted(sample["key"] for sample in ds)
    for groups in ([by_dp[0][0], by_dp[1][0]], [output["world"] for output in outputs]):
        seen = [key for steps in groups for step in steps for key, ok in step if ok]
        assert sorted(seen) == expected
        assert len({len(steps) for steps in groups}) == 1
