"""Trains a small driving model on one or more ranks, and survives SIGKILL at any point.

    torchrun --nproc-per-node 2 examples/train_ddp.py --data ROOT --out CHECKPOINTS

Everything a restart needs is in one checkpoint: model, optimizer, scheduler, random generators and
the exact position in the data. Start it again after a crash, on the same or another number of
ranks, and it goes on with exactly the next samples. On the same number of ranks the result is the
same bits as without the crash.
"""

import argparse
import hashlib
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import drivetrain as dt
import torch
import torch.distributed as dist
from driving_model import CAMERAS, DrivingModel, loss_of, targets
from torch.nn.parallel import DistributedDataParallel

IMAGE_SIZE = (64, 176)
FIELDS = {
    **{
        camera: dt.Image(
            size=IMAGE_SIZE, mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4), dtype="float32"
        )
        for camera in CAMERAS
    },
    "LIDAR_TOP": dt.Points(sweeps=2),
    "boxes": None,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="root of a nuScenes-layout data set")
    parser.add_argument("--out", required=True, help="folder or URI of the checkpoints")
    parser.add_argument("--events", help="folder for one JSON-lines file per rank")
    parser.add_argument("--attempt", type=int, default=0, help="number of this start, for the logs")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2, help="samples per rank and step")
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--held-out-scenes", type=int, default=1, help="scenes kept for testing")
    parser.add_argument("--max-samples", type=int, help="train on the first so many samples only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-limit", default="512MiB")
    return parser.parse_args()


class Log:
    """One JSON line per event; a line is with the kernel as soon as it is written."""

    def __init__(self, folder: str | None, attempt: int, rank: int) -> None:
        self._file = None
        if folder:
            path = Path(folder) / f"attempt-{attempt:02}-rank-{rank}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", buffering=1)

    def __call__(self, event: str, **values: Any) -> None:
        if self._file:
            line = {"event": event, "time": time.time(), "pid": os.getpid(), **values}
            self._file.write(json.dumps(line) + "\n")


def split(ds: dt.Dataset, held_out_scenes: int) -> tuple[dt.Dataset, dt.Dataset]:
    """Training and held-out samples, by scene."""
    scenes = [ds.row(i)["scene"] for i in range(len(ds))]
    held_out = set(sorted(set(scenes))[-held_out_scenes:])
    rows = range(len(ds))
    return (
        ds.filter([i for i in rows if scenes[i] not in held_out]),
        ds.filter([i for i in rows if scenes[i] in held_out]),
    )


def inputs(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures (B, 6, 3, H, W), points (N, 6) and their offsets (B + 1)."""
    pictures = torch.stack([batch[camera] for camera in CAMERAS], dim=1)
    return pictures, batch["LIDAR_TOP"], batch["LIDAR_TOP_offsets"]


def wanted(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets of a batch."""
    names = [name for sample in batch["boxes_names"] for name in sample]
    return targets(batch["boxes"], batch["boxes_offsets"], names)


def bits(value: torch.Tensor) -> str:
    """A float32 as 8 hex digits: equal text is equal bits."""
    return struct.pack(">f", value.item()).hex()


def digest(model: torch.nn.Module) -> str:
    """A hash over all parameters' bits."""
    total = hashlib.sha256()
    for value in model.state_dict().values():
        total.update(value.contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


class Job:
    """What a checkpoint holds, and the loop around it."""

    def __init__(self, args: argparse.Namespace, train: dt.Dataset, log: Log) -> None:
        self.args, self.log = args, log
        self.model = DrivingModel()
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.985)
        self.loader = dt.DataLoader(
            train,
            args.batch_size,
            fields=FIELDS,
            shuffle=True,
            seed=args.seed,
            memory_limit=args.memory_limit,
            threads=1,
            timeout="2min",
        )
        self.extra = {"steps_done": 0}
        self.checkpointer = dt.Checkpointer(args.out, keep=dt.Keep(last=3), timeout="1min")

    def state(self) -> dict[str, Any]:
        return {
            "model": self.ddp,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "extra": self.extra,
        }

    def restore(self) -> None:
        restored = self.checkpointer.restore(self.state())
        self.log(
            "start",
            restored=restored.step,
            skipped=[list(item) for item in restored.skipped],
            world=dist.get_world_size(),
            params=digest(self.model),
            loader=self.loader.state_dict(),
            samples=len(self.loader.dataset),
        )

    def run(self) -> None:
        while (epoch := self.loader.state_dict()["epoch"]) < self.args.epochs:
            asked = time.perf_counter()
            for batch in self.loader:
                self.step(epoch, batch, time.perf_counter() - asked)
                if self.extra["steps_done"] % self.args.save_every == 0:
                    self.save()
                asked = time.perf_counter()
        self.checkpointer.close()
        self.log("stats", stats=self.loader.stats())

    def step(self, epoch: int, batch: dict[str, Any], waited_s: float) -> None:
        number = self.extra["steps_done"] + 1
        self.log("begin", step=number, epoch=epoch, keys=batch["key"])
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.ddp(*inputs(batch)), wanted(batch), batch["_valid"])
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.extra["steps_done"] = number
        self.log(
            "step",
            step=number,
            epoch=epoch,
            keys=batch["key"],
            valid=batch["_valid"].tolist(),
            loss=loss.item(),
            loss_bits=bits(loss.detach()),
            params=digest(self.model),
            waited_ms=waited_s * 1e3,
            computed_ms=(time.perf_counter() - started) * 1e3,
        )

    def save(self) -> None:
        step = self.extra["steps_done"]
        self.log("save", step=step)
        started = time.perf_counter()
        handle = self.checkpointer.save(step, self.state())
        stopped_ms = (time.perf_counter() - started) * 1e3
        staged_ms = handle.staged() * 1e3
        self.log("staged", step=step, stopped_ms=stopped_ms, staged_ms=staged_ms)


@torch.no_grad()
def held_out_loss(model: DrivingModel, held_out: dt.Dataset) -> dict[str, float]:
    """Mean loss on own inputs, and with pictures, points or both of another sample."""
    model.eval()
    with dt.DataLoader(held_out, 1, fields=FIELDS, rank=0, world_size=1, threads=1) as loader:
        batches = list(loader)
    sums = {"own": 0.0, "other_pictures": 0.0, "other_points": 0.0, "other": 0.0}
    for i, batch in enumerate(batches):
        other = batches[(i + len(batches) // 2) % len(batches)]
        (pictures, *points), (pictures2, *points2) = inputs(batch), inputs(other)
        pairs = {
            "own": (pictures, points),
            "other_pictures": (pictures2, points),
            "other_points": (pictures, points2),
            "other": (pictures2, points2),
        }
        for name, (seen, scanned) in pairs.items():
            loss = loss_of(model(seen, *scanned), wanted(batch), batch["_valid"])
            sums[name] += loss.item() / len(batches)
    return sums


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = Log(args.events, args.attempt, rank)
    train, held_out = split(dt.open(args.data), args.held_out_scenes)
    if args.max_samples:
        train = train[: args.max_samples]
    job = Job(args, train, log)
    job.restore()
    job.run()
    if rank == 0:
        log("held_out", **held_out_loss(job.model, held_out))
    log("end", step=job.extra["steps_done"])
    job.loader.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
