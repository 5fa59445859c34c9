"""Hugging Face: a `TrainerCallback`, and the state of an `Accelerator`.

`Trainer(..., callbacks=[CheckpointCallback(root)])` commits the whole training state whenever the
Trainer saves, in the background, and takes it up again when training begins.
"""

from typing import Any

from transformers import TrainerCallback

from drivetrain._checkpoint.checkpointer import Checkpointer
from drivetrain._checkpoint.rng import rng_state, set_rng_state

#: Batch samplers within one another.
SAMPLERS_MAX = 8


class CheckpointCallback(TrainerCallback):
    """Commits model, optimizer, scheduler, random generators and the Trainer's counters.

    It saves at the Trainer's own save points (`save_steps`, `save_strategy`) on every rank, with
    the newest evaluation's numbers as metrics, and restores when training begins. Set
    `save_only_model=True` and a small `save_total_limit` to keep the Trainer's own files small.
    The order of samples goes on where it was: that of `loader`, if one is given, else that of
    Trainer's own loader, whose batches up to there are drawn again and left out. (With batches of
    another size, or a sampler without `set_epoch`, that loader starts its epoch again.)

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
        self._position = Position()
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
            if self._loader is None:
                dataloader = live.get("train_dataloader")
                self._position = Position.of(dataloader, counters)

    def on_step_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """The generators, which batches that were left out have moved on."""
        self._position.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """The Trainer counts epochs from where it began."""
        if state.epoch is not None:
            state.epoch += self._position.epochs_before

    def on_epoch_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Later epochs are whole."""
        self._position.epoch_ends()

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
            "batches_per_epoch": _length(live.get("train_dataloader")),
        }
        return found


class Position:
    """Where Trainer's own loader goes on: after so many epochs, and batches of the next."""

    def __init__(self, loader: Any = None, epochs: int = 0, batches: int = 0) -> None:
        self._loader, self._epochs = loader, epochs
        self._rng: dict[str, Any] | None = None
        #: What the Trainer's own count of epochs lacks.
        self.epochs_before = 0.0
        if loader is None:
            return
        self._rng = rng_state()
        self.epochs_before = epochs + batches / len(loader)
        loader.skip_batches = batches
        for sampler in _samplers(loader):
            self._shift(sampler)

    @classmethod
    def of(cls, loader: Any, counters: dict[str, Any]) -> "Position":
        """The position that was saved, if this loader can go there."""
        length, epoch = _length(loader), counters["epoch"] or 0.0
        if length is None or length != counters.get("batches_per_epoch"):
            return cls()
        if not hasattr(loader, "skip_batches") or not _samplers(loader):
            return cls()
        batches = round(epoch * length)
        return cls(loader, batches // length, batches % length)

    def _shift(self, sampler: Any) -> None:
        plain, epochs = sampler.set_epoch, self._epochs
        sampler.set_epoch = lambda epoch: plain(epoch + epochs)

    def step_begins(self) -> None:
        """The first step: what was drawn to get here was drawn before."""
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None

    def epoch_ends(self) -> None:
        """The first epoch may have been a part of one."""
        if self._loader is not None:
            self._loader.skip_batches = 0
            self.epochs_before = float(self._epochs)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None  # none, or of an unknown length


def _samplers(loader: Any) -> list[Any]:
    """Samplers below a loader whose order is a function of the epoch."""
    found: list[Any] = []
    level = getattr(loader, "batch_sampler", None)
    while level is not None and len(found) < SAMPLERS_MAX:
        found.append(getattr(level, "sampler", None))
        level = getattr(level, "batch_sampler", None)
    return [sampler for sampler in found if hasattr(sampler, "set_epoch")]


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
