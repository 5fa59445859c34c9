"""`drivetrain ckpt convert` of DeepSpeed ZeRO folders, and what is refused."""

import json
import shutil
import subprocess
import sys

import drivetrain as dt
import pytest
from drivetrain import _native

torch = pytest.importorskip("torch")

from test_convert import MEMORY  # noqa: E402
from zero_folder import Training  # noqa: E402


def convert(*args):
    return _native.cli_main(["drivetrain", "ckpt", "convert", *map(str, args)])


def whole(folder, *args):
    """What was imported, as torch loads it."""
    assert convert(folder, folder.parent / "back.pt", "--to", "pt", *args) == 0
    return torch.load(folder.parent / "back.pt", weights_only=True)


def expected_model(training):
    model = dict(training.weights) | training.frozen | training.buffers
    return model | {name: model[of] for name, of in training.shared.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_and_number_of_ranks(tmp_path, stage, world):
    training = Training(seed=10 * stage + world)
    training.write(tmp_path / "theirs", stage, world)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
    assert _native.cli_main(["drivetrain", "ckpt", "verify", str(tmp_path / "ours")]) == 0
    found = whole(tmp_path / "ours")
    wanted = expected_model(training)
    assert set(found["model"]) == set(wanted)
    for name, tensor in wanted.items():
        got = found["model"][name]
        assert got.dtype == tensor.dtype and torch.equal(got, tensor), name
    tied = found["model"]
    assert tied["head.weight"].data_ptr() == tied["emb.weight"].data_ptr()
    state = found["optimizer"]["state"]
    assert set(state) == set(training.weights)
    for name, own in state.items():
        assert set(own) == {"step", "exp_avg", "exp_avg_sq"} and own["step"] == 12.0
        assert torch.equal(own["exp_avg"], training.exp_avg[name]), name
        assert torch.equal(own["exp_avg_sq"], training.exp_avg_sq[name]), name
    assert [g["params"] for g in found["optimizer"]["param_groups"]] == training.groups
    assert [g["lr"] for g in found["optimizer"]["param_groups"]] == [0.5, 0.25]
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.99)
    assert found["lr_scheduler"] == {"last_epoch": 12, "_last_lr": [0.5, 0.25]}
    assert found["client_state"]["epoch"] == 3
    assert torch.equal(found["client_state"]["seen"], torch.arange(4))
    own = found["deepspeed"]
    assert (own["zero_stage"], own["world_size"], own["global_steps"]) == (stage, world, 12)
    assert own["loss_scaler"]["state"] == {"cur_scale": 65536.0, "cur_iter": 7, "dynamic": True}
    assert json.loads((tmp_path / "ours/manifest.json").read_text())["step"] == 12


def test_parts_stay_where_ranks_had_them(tmp_path):
    """A chunk per rank and parameter, as a range of the flattened tensor: nothing is gathered."""
    Training().write(tmp_path / "theirs", 3, 3)
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--step", 4) == 0
    paths = pytest.importorskip("pyarrow.ipc")
    (table,) = (tmp_path / "ours").glob("*/tensors.arrow")
    rows = paths.open_file(str(table)).read_all().to_pylist()
    parts = [
        (row["flat_start"], row["flat_len"])
        for row in rows
        if row["path"] == '["model","emb.weight"]'
    ]
    assert sorted(parts) == [(0, 12), (12, 12), (24, 11)]


def test_a_model_and_an_optimizer_take_it_over(tmp_path):
    training = Training()
    training.write(tmp_path / "theirs", 2, 2)
    assert convert(tmp_path / "theirs/global_step12", tmp_path / "run/step-00000012") == 0
    model = torch.nn.ParameterDict(
        {
            n.replace(".", "_"): torch.nn.Parameter(torch.zeros_like(t))
            for n, t in training.weights.items()
        }
    )
    groups = [
        {"params": [model[n.replace(".", "_")] for n in group], "lr": 1.0}
        for group in training.groups
    ]
    optimizer = torch.optim.Adam(groups)
    rename = [
        (f"{a}.{n}", f"{a}.{n.replace('.', '_')}") for n in training.weights for a in ("model",)
    ]
    with dt.Checkpointer(tmp_path / "run") as ckpt:
        report = ckpt.restore(
            {"model": model, "optimizer": optimizer}, rng=False, strict=False, rename=dict(rename)
        )
    assert report.step == 12
    for name, tensor in training.weights.items():
        own = model[name.replace(".", "_")]
        assert torch.equal(own.detach(), tensor), name
        assert torch.equal(optimizer.state[own]["exp_avg"], training.exp_avg[name]), name
        assert optimizer.state[own]["step"] == 12.0
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25]


def test_values_without_a_form_are_left_out_and_named(tmp_path, capfd):
    def change(state, rank):
        state["base_optimizer_state"]["state"][0]["odd"] = {(1, 2): 3}
        state["strange"] = {(1, 2): torch.arange(3)}

    Training().write(tmp_path / "theirs", 1, 2, change=change)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
    assert "2 values left out" in capfd.readouterr().out
    left_out = whole(tmp_path / "ours")["deepspeed"]["left_out"]
    assert set(left_out) == {"optimizer.state.*.odd", "deepspeed.strange"}


def drop(name):
    return lambda folder: (folder / name).unlink()


def keep_optimizer_only(folder):
    for file in folder.glob("*model_states*"):
        file.unlink()


def cut(name):
    def act(folder):
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[: len(raw) // 2])

    return act


def also(name):
    return lambda folder: (folder / name).write_bytes(b"x")


ZERO = "zero_pp_rank_{}_mp_rank_00_{}_states.pt"


@pytest.mark.parametrize(
    ("stage", "act", "words"),
    [
        (1, drop(ZERO.format(1, "optim")), ["zero_pp_rank_1_mp_rank_00_optim_states.pt"]),
        (1, drop(ZERO.format(2, "optim")), ["zero_pp_rank_2_mp_rank_00_optim_states.pt"]),
        (1, drop("mp_rank_00_model_states.pt"), ["mp_rank_00_model_states.pt"]),
        (3, drop(ZERO.format(2, "model")), ["zero_pp_rank_2_mp_rank_00_model_states.pt"]),
        (3, cut(ZERO.format(1, "optim")), ["zero_pp_rank_1_mp_rank_00_optim_states.pt"]),
        (3, cut(ZERO.format(1, "model")), ["zero_pp_rank_1_mp_rank_00_model_states.pt"]),
        (1, also(ZERO.format(3, "optim")), ["3"]),
        (1, also("bf16_" + ZERO.format(1, "optim")), ["one file of a rank"]),
        (1, also("mp_rank_01_model_states.pt"), ["model-parallel", "Checkpointer"]),
        (1, also("layer_01-model_00-model_states.pt"), ["pipeline stages"]),
        (1, also("layer_0_expert_1_mp_rank_00_model_states.pt"), ["experts"]),
        (1, lambda folder: (folder / "zero").mkdir(), ["universal"]),
        (1, lambda folder: (folder.parent / "latest").write_text("../other"), [".."]),
        (1, lambda folder: (folder.parent / "latest").write_text("gone"), ["gone"]),
    ],
)
def test_folders_that_are_refused(tmp_path, capfd, stage, act, words):
    folder = Training().write(tmp_path / "theirs", stage, 3)
    act(folder)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 1
    error = capfd.readouterr().err
    assert all(word in error for word in words) and "panicked" not in error, error
    assert not list((tmp_path / "ours").rglob("manifest.json"))


def setting(key, value, of=0):
    def change(state, rank):
        if rank == of:
            state[key] = value

    return change


def shorten(key, of):
    def change(state, rank):
        if rank == of:
            state[key][0] = state[key][0][:-7].clone()

    return change


def shorten_moment(state, rank):
    if rank == 1:
        base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        base["state"][1]["exp_avg"] = torch.zeros(2)


def forget_moment(state, rank):
    if rank == 1:
        del state["optimizer_state_dict"]["state"][0]["exp_avg"]


@pytest.mark.parametrize(
    ("stage", "change", "words"),
    [
        (2, setting("zero_stage", 7), ["stage 7", "rank_0"]),
        (2, setting("zero_stage", 0), ["stage 0", "rank_0"]),
        (2, setting("partition_count", [2, 2], of=1), ["over 3 ranks", "rank_1"]),
        (2, setting("partition_count", [3, 2]), ["different numbers of ranks"]),
        (2, setting("partition_count", 4), ["zero_pp_rank_3_mp_rank_00_optim_states.pt"]),
        (2, setting("partition_count", "three"), ["partition_count"]),
        (2, shorten("single_partition_of_fp32_groups", 1), ["66 elements"]),
        (3, shorten("fp32_flat_groups", 1), ["rank_1"]),
        (3, setting("fp32_flat_groups", [torch.zeros(3)] * 2, of=1), ["rank_1"]),
        (2, shorten_moment, ["exp_avg", "rank_1"]),
        (3, forget_moment, ["exp_avg", "rank_1"]),
        (1, setting("param_alignment_paddings", [[0], [0]]), ["padding"]),
    ],
)
def test_numbers_that_disagree(tmp_path, capfd, stage, change, words):
    Training().write(tmp_path / "theirs", stage, 3, change=change)
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 1
    error = capfd.readouterr().err
    assert all(word in error for word in words) and "panicked" not in error, error


def test_padding_between_parameters(tmp_path):
    """A newer layout that aligns parameters says how much it put between them."""
    training = Training()

    def change(state, rank):
        state["param_alignment_paddings"] = [[5, 2, 0], [0, 0]]
        flat = [training.weights[n].reshape(-1) for n in training.groups[0]]
        padded = torch.cat(
            [flat[0], torch.full((5,), -1.0), flat[1], torch.full((2,), -1.0), flat[2]]
        )
        part = -(-padded.numel() // 4) * 2
        state["single_partition_of_fp32_groups"][0] = padded[
            part * rank : part * rank + part
        ].clone()
        state["base_optimizer_state"]["state"] = {}

    training.write(tmp_path / "theirs", 1, 2, change=change)
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--under", "all") == 0
    found = whole(tmp_path / "ours")["all"]
    for name, tensor in training.weights.items():
        assert torch.equal(found["model"][name], tensor), name
    assert found["optimizer"]["state"] == {}


def test_real_deepspeed_agrees(tmp_path):
    """DeepSpeed's own reading of a folder of ours gives the same weights."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: its own reader not asked")
    reader = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    for stage in (1, 2, 3):
        training = Training(seed=stage)
        training.write(tmp_path / f"theirs-{stage}", stage, 3)
        theirs = reader.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / f"theirs-{stage}"))
        assert convert(tmp_path / f"theirs-{stage}", tmp_path / f"ours-{stage}") == 0
        ours = whole(tmp_path / f"ours-{stage}")["model"]
        for name, tensor in theirs.items():
            assert torch.equal(ours[name].float(), tensor.float()), (stage, name)
        (tmp_path / "back.pt").unlink()
        shutil.rmtree(tmp_path / f"theirs-{stage}")


def test_memory_stays_at_a_few_windows(tmp_path):
    """480 MB of weights and moments of two ranks; torch is not even loaded."""
    training = Training()
    training.groups[0].append("big")
    training.shapes["big"] = torch.Size((10_000, 4_000))
    for values in (training.weights, training.exp_avg, training.exp_avg_sq):
        values["big"] = torch.full((10_000, 4_000), 2.5)
    training.write(tmp_path / "theirs", 3, 2)
    (tmp_path / "memory.py").write_text(MEMORY)
    step = f"{tmp_path}/theirs|{tmp_path}/ours"
    command = [sys.executable, str(tmp_path / "memory.py"), step]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 256 << 20
