"""Hugging Face: a `TrainerCallback`, and the state of an `Accelerator`.

`Trainer(..., callbacks=[CheckpointCallback(root)])` commits the whole training state whenever the
Trainer saves, in the background, and takes it up again when training begins.
"""

from typing import Any

from transformers import TrainerCallback

from drivetrain._checkpoint.checkpointer import Checkpointer


class CheckpointCallback(TrainerCallback):
    """Commits model, optimizer, scheduler, random generators and the Trainer's counters.

    It saves at the Trainer's own save points (`save_steps`, `save_strategy`) on every rank, with
    the newest evaluation's numbers as metrics, and restores when training begins. Set
    `save_only_model=True` and a small `save_total_limit` to keep the Trainer's own files small.
    The order of samples goes on where it was only if `loader` is given; Trainer's own loader
    starts its epoch again.

    Args:
        root: folder or URI of the checkpoints.
        restore: take up the newest good step when training begins.
        loader: a `drivetrain.DataLoader` (or anything with `state_dict`) to save along.
        checkpointer: further arguments of `Checkpointer`, such as `keep`.
    """

    def __init__(
        self, root: str, *, restore: bool = True, loader: Any = None, **checkpointer: Any
    ) -> None:
        self._root, self._restore, self._loader = root, restore, loader
        self._options = checkpointer
        self._checkpointer: Checkpointer | None = None
        self._metrics: dict[str, float] = {}
        self.restored_step: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Opens the root, and restores the newest good step if there is one."""
        self._checkpointer = Checkpointer(self._root, **self._options)
        if not self._restore:
            return
        targets = self._state(state, live)
        restored = self._checkpointer.restore(targets, strict=False)
        self.restored_step = restored.step
        if restored.step is not None:
            counters = restored.state["trainer"]
            state.global_step, state.epoch = counters["global_step"], counters["epoch"]
            state.best_metric = counters["best_metric"]

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **live: Any
    ) -> None:
        """Keeps the numbers of the newest evaluation for the next save."""
        numbers = (metrics or {}).items()
        self._metrics = {k: float(v) for k, v in numbers if isinstance(v, (int, float))}

    def on_save(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Commits the state in the background."""
        if self._checkpointer is None:
            return
        step = state.global_step
        self._checkpointer.save(
            step,
            self._state(state, live),
            overwrite=step in self._checkpointer.steps(),
            metrics=self._metrics,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Waits for saves on their way; raises what made one fail."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _state(self, state: Any, live: dict[str, Any]) -> dict[str, Any]:
        found = {
            name: live[key]
            for name, key in (
                ("model", "model"),
                ("optimizer", "optimizer"),
                ("scheduler", "lr_scheduler"),
            )
            if live.get(key) is not None
        }
        # What Accelerate wraps: names of parameters and groups are those of the torch object.
        found = {name: getattr(value, "optimizer", value) for name, value in found.items()}
        if "scheduler" in found:
            found["scheduler"] = getattr(live["lr_scheduler"], "scheduler", live["lr_scheduler"])
        if self._loader is not None:
            found["loader"] = self._loader
        found["trainer"] = {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "best_metric": state.best_metric,
        }
        return found


def accelerate_state(accelerator: Any) -> dict[str, Any]:
    """What an `Accelerator` has prepared, for `Checkpointer.save` and `restore`.

    Models are unwrapped, optimizers and schedulers are torch's own; names are `model`, `model_1` …,
    in the order they were prepared. Objects given to `register_for_checkpointing` come along.
    """
    found: dict[str, Any] = {}

    def add(kind: str, values: list[Any]) -> None:
        for i, value in enumerate(values):
            found[kind if i == 0 else f"{kind}_{i}"] = value

    add("model", [accelerator.unwrap_model(model) for model in accelerator._models])
    add("optimizer", [getattr(o, "optimizer", o) for o in accelerator._optimizers])
    add("scheduler", [getattr(s, "scheduler", s) for s in accelerator._schedulers])
    add("custom", list(accelerator._custom_objects))
    return found
