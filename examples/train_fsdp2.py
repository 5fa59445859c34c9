"""Trains the driving model with FSDP2: parameters and optimizer state are sharded over the ranks.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py --data ROOT --out CHECKPOINTS

A checkpoint holds what a DTensor is, not who had it: start it again on another number of ranks and
each reads its own part. SIGTERM to any rank stops all of them at one step, with that step saved.
"""

import argparse
import hashlib
import os

import drivetrain as dt
import torch
import torch.distributed as dist
from driving_model import DrivingModel, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from train_ddp import FIELDS, inputs, wanted


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="root of a nuScenes-layout data set")
    parser.add_argument("--out", required=True, help="folder or URI of the checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1, help="samples per rank and step")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    return parser.parse_args()


def digest(model: torch.nn.Module) -> str:
    """A hash over all parameters' bits, gathered: the same on any number of ranks."""
    total = hashlib.sha256()
    for value in model.state_dict().values():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        total.update(whole.contiguous().cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def main() -> None:
    args = arguments()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29512")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DrivingModel().to(device)
    fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader = dt.DataLoader(dt.open(args.data), args.batch_size, fields=FIELDS, shuffle=True)
    progress = {"steps": 0}
    state = {"model": model, "optimizer": optimizer, "loader": loader, "progress": progress}
    with dt.Checkpointer(args.out, keep=dt.Keep(last=3), timeout="5min") as ckpt:
        ckpt.preemption()
        restored = ckpt.restore(state)
        stopped = False
        while progress["steps"] < args.steps and not stopped:
            for batch in loader:
                if progress["steps"] >= args.steps or stopped:
                    break
                optimizer.zero_grad(set_to_none=True)
                parts = [part.to(device) for part in inputs(batch)]
                loss = loss_of(model(*parts), wanted(batch), batch["_valid"])
                loss.backward()
                optimizer.step()
                progress["steps"] += 1
                stopped = ckpt.should_stop
                last = stopped or progress["steps"] == args.steps
                if last or progress["steps"] % args.save_every == 0:
                    ckpt.save(progress["steps"], state)
        parameters = digest(model)
        if dist.get_rank() == 0:
            print(f"restored {restored.step}, at step {progress['steps']}, {parameters}")
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
