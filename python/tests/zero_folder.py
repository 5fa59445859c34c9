"""DeepSpeed ZeRO folders, laid out by hand with torch alone.

What is written is the published layout: stages 1 and 2 flatten each group of parameters, pad it to
a multiple of twice the number of ranks and cut it into equal parts, of which the last are stored
without the padding; stage 3 cuts each parameter into equal parts, padded at its end.
"""

import collections
import enum
import sys
import types
from pathlib import Path

import torch


class ZeroStageEnum(int, enum.Enum):
    one, two, three = 1, 2, 3


class DynamicLossScaler:
    def __init__(self):
        self.cur_scale, self.cur_iter, self.dynamic = 65536.0, 7, True


class fragment_address:
    def __init__(self, numel, start):
        self.numel, self.start = numel, start


CLASSES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": DynamicLossScaler,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


def save(value, path):
    """torch.save with classes that say they are DeepSpeed's."""
    kept = dict(sys.modules)
    for module, cls in CLASSES.items():
        parts = module.split(".")
        for n in range(len(parts)):
            name = ".".join(parts[: n + 1])
            if sys.modules.get(name) is kept.get(name):
                sys.modules[name] = types.ModuleType(name)
                sys.modules[name].__path__ = []
        cls.__module__ = module
        setattr(sys.modules[module], cls.__name__, cls)
    try:
        torch.save(value, path)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update({n: m for n, m in kept.items() if n.split(".")[0] == "deepspeed"})


class Training:
    """Weights and moments of a made-up training, whole; the folder is cut from them."""

    def __init__(self, seed=0):
        draw = torch.Generator().manual_seed(seed)
        groups = [
            {"emb.weight": (7, 5), "lin.weight": (3, 5, 2), "scale": ()},
            {"lin.bias": (3,), "norm.weight": (11,)},
        ]
        self.groups = [list(group) for group in groups]
        self.shapes = {n: torch.Size(s) for group in groups for n, s in group.items()}
        self.weights, self.exp_avg, self.exp_avg_sq = (
            {n: torch.randn(s, generator=draw) for n, s in self.shapes.items()} for _ in range(3)
        )
        self.frozen = {
            "frozen.a": torch.randn(5, 3, generator=draw).bfloat16(),
            "frozen.none": torch.zeros(0, 2).bfloat16(),
        }
        self.buffers = {"count": torch.tensor(9), "mean": torch.randn(4, generator=draw)}
        self.shared = {"head.weight": "emb.weight"}

    def _module(self, stage):
        empty = torch.zeros(0).bfloat16()
        of = lambda t: empty if stage == 3 else t.bfloat16()  # noqa: E731
        module = collections.OrderedDict((n, of(t)) for n, t in self.weights.items())
        module.update((n, of(t)) for n, t in self.frozen.items())
        module.update(self.buffers)
        module.update((n, module[of]) for n, of in self.shared.items())
        return module

    def _state(self, stage, rank, world):
        frozen = {n: t.shape for n, t in self.frozen.items()} if stage > 1 else None
        cut = lambda t: share(t.reshape(-1), rank, world) if stage == 3 else t  # noqa: E731
        return {
            "module": self._module(stage),
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [
                collections.OrderedDict((n, self.shapes[n]) for n in group) for group in self.groups
            ],
            "frozen_param_shapes": frozen,
            "frozen_param_fragments": frozen and {n: cut(t) for n, t in self.frozen.items()},
            "shared_params": self.shared,
            "lr_scheduler": {"last_epoch": 12, "_last_lr": [0.5, 0.25]},
            "global_steps": 12,
            "ds_config": {"train_batch_size": 8},
            "ds_version": "0.0.0",
            "epoch": 3,
            "seen": torch.arange(4),
        }

    def _vector(self, values, group, stage, rank, world, lean):
        names = self.groups[group]
        if stage == 3:
            return torch.cat([share(values[n].reshape(-1), rank, world) for n in names])
        flat = torch.cat([values[n].reshape(-1) for n in names])
        count = flat.numel()
        part = -(-count // (2 * world)) * 2
        padded = torch.cat([flat, torch.full((part * world - count,), -99.0)])
        own = padded[part * rank : part * (rank + 1)]
        return own[: max(0, count - part * rank)].clone() if lean else own.clone()

    def _optimizer(self, stage, rank, world, change):
        vectors = lambda values, lean: [  # noqa: E731
            self._vector(values, group, stage, rank, world, lean) for group in range(2)
        ]
        moments = zip(vectors(self.exp_avg, False), vectors(self.exp_avg_sq, False))
        base = {
            "state": {
                i: {"step": torch.tensor(12.0), "exp_avg": a, "exp_avg_sq": b}
                for i, (a, b) in enumerate(moments)
            },
            "param_groups": [
                {"lr": 0.5, "betas": (0.9, 0.99), "params": [0]},
                {"lr": 0.25, "betas": (0.9, 0.99), "params": [1]},
            ],
        }
        masters = vectors(self.weights, True)
        state = {
            "loss_scaler": DynamicLossScaler(),
            "dynamic_loss_scale": True,
            "overflow": False,
            "zero_stage": ZeroStageEnum(stage),
            "partition_count": world if stage == 3 else [world, world],
        }
        if stage == 3:
            state |= {"optimizer_state_dict": base, "fp32_flat_groups": masters}
        else:
            state |= {
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": masters,
                "param_slice_mappings": [{"emb.weight": fragment_address(5, 0)}],
            }
        change(state, rank)
        return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.0.0"}

    def write(
        self, root: Path, stage, world, *, change=lambda state, rank: None, tag="global_step12"
    ):
        """Writes the folder. `change(state, rank)` may spoil a rank's optimizer state."""
        folder = root / tag
        folder.mkdir(parents=True)
        (root / "latest").write_text(tag)
        for rank in range(world):
            end = f"_rank_{rank}_mp_rank_00_"
            prefix = "bf16_" if stage == 2 else ""
            save(
                self._optimizer(stage, rank, world, change),
                folder / f"{prefix}zero_pp{end}optim_states.pt",
            )
            if stage == 3:
                save(self._state(3, rank, world), folder / f"zero_pp{end}model_states.pt")
        if stage < 3:
            save(self._state(stage, 0, world), folder / "mp_rank_00_model_states.pt")
        return folder


def share(flat, rank, world):
    """A rank's part of a parameter in stage 3, padded."""
    part = -(-flat.numel() // world)
    padded = torch.cat([flat, torch.full((part * world - flat.numel(),), -99.0, dtype=flat.dtype)])
    return padded[part * rank : part * (rank + 1)].clone()
