"""Which steps stay: rules given as `dt.Keep`, metrics given to `save`."""

import json
import math

import drivetrain as dt
import numpy as np
import pytest


def test_the_best_steps_by_a_metric_stay(tmp_path):
    keep = dt.Keep(last=1, best=2, metric="val_loss", mode="min")
    losses = {1: 0.9, 2: 0.2, 3: math.nan, 4: np.float32(0.5), 5: 0.7, 6: 0.6}
    with dt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step, loss in losses.items():
            ckpt.save(step, {"n": step}, metrics={"val_loss": loss}).wait()
        assert ckpt.steps() == [2, 4, 6]
    manifest = json.loads((tmp_path / "step-00000004" / "manifest.json").read_text())
    assert manifest["metrics"] == {"val_loss": 0.5}
    with dt.Checkpointer(
        tmp_path, keep=dt.Keep(last=1, best=1, metric="val_loss", mode="max")
    ) as c:
        c.save(7, {"n": 7}).wait()
        assert c.steps() == [6, 7]


def test_time_rules_and_every(tmp_path):
    keep = dt.Keep(last=1, every=3, within="1h")
    with dt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, {"n": step}).wait()
        assert ckpt.steps() == [1, 2, 3, 4, 5]
    with dt.Checkpointer(tmp_path, keep=dt.Keep(last=1, every=3, interval="7d")) as ckpt:
        ckpt.save(6, {"n": 6}).wait()
        assert ckpt.steps() == [1, 3, 6]


@pytest.mark.parametrize(
    "rules",
    [
        {"best": 2},
        {"metric": "loss"},
        {"best": 0, "metric": "loss"},
        {"best": 1, "metric": "loss", "mode": "low"},
        {"within": "soon"},
        {"interval": -1},
    ],
)
def test_rules_that_make_no_sense_are_refused(rules):
    with pytest.raises(ValueError, match="Keep"):
        dt.Keep(**rules)


def test_metrics_must_be_numbers(tmp_path):
    with dt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(ValueError, match="val_loss"):
            ckpt.save(1, {"n": 1}, metrics={"val_loss": "low"})
        with pytest.raises(ValueError, match="metrics"):
            ckpt.save(1, {"n": 1}, metrics={3: 1.0})
        assert ckpt.steps() == []
