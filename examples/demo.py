"""The whole promise in a few minutes: driving data, training, kills, resume, and a report.

    python examples/demo.py [--data NUSCENES_ROOT] [--seed 0]

1. Makes driving data with `drivetrain synth` (or takes a nuScenes-layout root).
2. Trains on two ranks without a fault: the reference.
3. Trains again, and kills a rank with SIGKILL in the middle of a step and at several points of a
   save; each time the job starts anew from the newest checkpoint, at the end on one rank only.
4. Compares what both runs saw and computed, and writes `.demo/report.md`.

Exit code 0 means that every promise was kept.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import drivetrain as dt
from demo_logs import Attempt, read_attempt, tail
from demo_report import Facts, write_report
from driving_model import CAMERAS

HERE = Path(__file__).resolve().parent
PROGRAM = Path(sys.executable).parent / "drivetrain"
SYNTH = ["--scenes", "5", "--keyframes", "16", "--image-size", "800x450"]
LIDAR_POINTS = ["--lidar-points", "11200"]
EPOCHS = 3
BATCH_SIZE = 2
SAVE_EVERY = 4
#: Samples of one epoch: enough to learn, few enough for five minutes.
SAMPLES = 64
#: Samples of the last scene: each is also tested with the inputs of another one.
HELD_OUT_MIN = 2
#: What a sample must have.
FIELDS = {
    **dict.fromkeys(CAMERAS, "image"),
    "LIDAR_TOP": "points",
    "boxes": "boxes",
}
#: No launch of the training job may take longer.
LAUNCH_S = 240.0
POLL_S = 0.002


@dataclass(frozen=True)
class Kill:
    """One planned kill."""

    what: str
    rank: int
    step: int
    #: Script for the fault store, or None: the supervisor sends the signal.
    fault: str | None = None
    #: Event of the victim's log at which the supervisor sends it.
    event: str = ""


def plan(seed: int) -> list[Kill]:
    """Where the ranks die, in order; steps and ranks follow from the seed.

    Saves happen at steps 4, 8, 12, ...; each kill hits a later save than the one before, so the job
    gets on between kills, and all lie in the first 32 steps, which two ranks do.
    """
    dice = random.Random(seed)
    victim = dice.randrange(2)

    def at(action: str, operation: str, text: str, rank: int, step: int, what: str) -> Kill:
        script = f"rank={rank};{action}@{operation}:step-{step:08}/{text}"
        return Kill(what, rank, step, fault=script)

    # Rank 0 creates its data file first and tensors.arrow second.

    mid_step = Kill("mid-step", dice.randrange(2), dice.choice([6, 7]), event="begin")
    saves = [
        lambda step: at("kill", dice.choice(["write", "finish"]), "", victim, step, "data file"),
        lambda step: at("kill", dice.choice(["create", "finish"]), ":2", 0, step, "tensors"),
        lambda step: at("kill", "put_new", "manifest.json", 0, step, "before the manifest"),
        lambda step: at("kill-after", "put_new", "manifest.json", 0, step, "after the manifest"),
        lambda step: Kill("staging", dice.randrange(2), step, event="save"),
    ]
    dice.shuffle(saves)
    return [mid_step, *(save(12 + 4 * i) for i, save in enumerate(saves))]


class Supervisor:
    """Starts the training job under torchrun and, if asked, kills one of its ranks."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.attempts: list[Attempt] = []

    def launch(self, world: int, kill: Kill | None = None) -> Attempt:
        number = len(self.attempts)
        started = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["DRIVETRAIN_FAULT"] = f"uri={self.folder.name}/checkpoints;" + (
            (kill.fault or "") if kill else ""
        )
        log = self.folder / f"logs/operations-{number:02}-rank-{{rank}}.jsonl"
        environment["DRIVETRAIN_FAULT_LOG"] = str(log)
        output = (self.folder / f"logs/attempt-{number:02}.txt").open("w")
        with (
            output,
            subprocess.Popen(
                self.command(world, number),
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as job,
        ):
            try:
                self.watch(job, number, world, kill, started + LAUNCH_S)
            finally:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
        attempt = read_attempt(self.folder / "logs", number, world, kill)
        attempt.seconds = time.monotonic() - started
        attempt.exit_code = job.returncode
        self.attempts.append(attempt)
        say(f"    {attempt.describe()}")
        if not attempt.steps or (kill is None and not attempt.ended):
            said = Path(output.name).read_text().splitlines()[-30:]
            raise SystemExit("\n".join([*said, f"attempt {number} did not get on"]))
        return attempt

    def command(self, world: int, number: int) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        options = {
            "--data": self.args.data,
            "--out": self.folder / "checkpoints",
            "--events": self.folder / "logs",
            "--attempt": number,
            "--epochs": EPOCHS,
            "--batch-size": BATCH_SIZE,
            "--save-every": SAVE_EVERY,
            "--max-samples": SAMPLES,
            "--seed": self.args.seed,
        }
        words = [str(word) for pair in options.items() for word in pair]
        return [*torchrun, f"--nproc-per-node={world}", str(HERE / "train_ddp.py"), *words]

    def watch(
        self, job: subprocess.Popen, number: int, world: int, kill: Kill | None, deadline: float
    ) -> None:
        """Follows the logs until the job ends; sends the planned signal at its moment."""
        logs = [
            tail(self.folder / f"logs/attempt-{number:02}-rank-{r}.jsonl") for r in range(world)
        ]
        sent = kill is None or kill.fault is not None
        while job.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"attempt {number} took longer than {LAUNCH_S} s; see its logs")
            for rank, log in enumerate(logs):
                for line in log():
                    self.progress(rank, line)
                    due = not sent and (rank, line["event"]) == (kill.rank, kill.event)
                    if due and line.get("step") == kill.step:
                        os.kill(line["pid"], signal.SIGKILL)
                        sent = True
            time.sleep(POLL_S)
        if sys.stdout.isatty():
            print("\r\033[K", end="")

    def progress(self, rank: int, line: dict) -> None:
        if rank == 0 and line["event"] == "step" and sys.stdout.isatty():
            text = f"epoch {line['epoch']} step {line['step']} loss {line['loss']:.3f}"
            print(f"\r\033[K    {text}", end="", flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def make_data(args: argparse.Namespace) -> None:
    """Driving data from the seed, unless it is there or a root was given."""
    if args.data:
        return
    args.data = str(args.out / "data")
    want = " ".join([*SYNTH, *LIDAR_POINTS])
    stamp = args.out / "data.made"
    if stamp.is_file() and stamp.read_text() == want:
        say(f"1. driving data: {args.data} is there")
        return
    shutil.rmtree(args.data, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    say("1. driving data: making it from a seed")
    command = [str(PROGRAM), "synth", str(args.data), *SYNTH, *LIDAR_POINTS]
    subprocess.run(command, check=True)
    stamp.write_text(want)


def check_data(data: str) -> str:
    """Indexes the data, ends the demo with advice if it will not do, and returns a sample's key."""
    try:
        ds = dt.open(data)
        fields = {name: field.kind for name, field in ds.fields.items()}
        lacking = lacks(fields, [ds.row(i)["scene"] for i in range(len(ds))])
        lacking += [f"{name}: {count} files are missing" for name, count in missing(data).items()]
    except dt.DrivetrainError as error:
        raise SystemExit(f"the demo cannot use {data}: {error}") from None
    if lacking:
        raise SystemExit(
            "\n  ".join([f"the demo cannot use {data}:", *lacking])
            + "\nrun `make demo` without DATA= and it makes data of its own"
        )
    return ds.row(len(ds) // 2)["key"]


def lacks(fields: dict[str, str], scenes: list[str]) -> list[str]:
    """What a data set lacks for the demo, from its fields' kinds and each sample's scene."""
    found = [
        f"no field {name} of kind {kind}"
        for name, kind in FIELDS.items()
        if fields.get(name) != kind
    ]
    sizes = Counter(scenes)
    tested = sizes.pop(max(sizes), 0) if sizes else 0
    trained = sum(sizes.values())
    if trained < SAMPLES:
        found.append(
            f"{trained} samples in {len(sizes)} scenes to train on: {SAMPLES} are needed, besides "
            "the last scene, which is held out"
        )
    if tested < HELD_OUT_MIN:
        found.append(f"{tested} samples in the last scene: {HELD_OUT_MIN} are needed to test on")
    return found


def missing(data: str) -> dict[str, int]:
    """Files that the tables name and that are not there, per field the demo needs."""
    command = [str(PROGRAM), "--json", "info", data]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    fields = json.loads(told)["fields"]
    return {f["name"]: f["missing"] for f in fields if f["name"] in FIELDS and f["missing"]}


def picture_page(data: str | Path, key: str, page: Path) -> Path | None:
    """Writes a page that shows one sample; None if that failed."""
    command = [str(PROGRAM), "view", str(data), key, "--out", str(page)]
    return page if subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0 else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="root of a nuScenes-layout data set; default: make one")
    parser.add_argument("--out", type=Path, default=Path(".demo"), help="folder of everything")
    parser.add_argument("--seed", type=int, default=0, help="chooses where the ranks are killed")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    # Ended from outside, it still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    make_data(args)
    key = check_data(args.data)
    for name in ("reference", "killed"):
        shutil.rmtree(args.out / name, ignore_errors=True)
        (args.out / name / "logs").mkdir(parents=True)
    kills = plan(args.seed)
    say("2. training on two ranks, undisturbed: the reference")
    reference = Supervisor(args, args.out / "reference")
    reference.launch(2)
    say(f"3. the same again, with {len(kills)} kills")
    killed = Supervisor(args, args.out / "killed")
    for kill in kills:
        say(f"  two ranks, SIGKILL to rank {kill.rank}: {kill.what}, step {kill.step}")
        killed.launch(2, kill)
    say("  one rank, to the end")
    killed.launch(1)
    say("4. the report")
    page = picture_page(args.data, key, args.out / "sample.html")
    facts = Facts(
        reference.attempts[0],
        killed.attempts,
        EPOCHS,
        page,
        key,
        time.monotonic() - started,
        args.seed,
    )
    return write_report(args.out / "report.md", facts)


if __name__ == "__main__":
    sys.exit(main())
