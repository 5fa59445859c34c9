"""Contenders that load: torch DataLoader in two variants, LitData, and ours.

A factory gets (work folder, plan) and returns a function that yields one epoch as (array, units).
"""

import functools
import json

import dataset
import numpy as np
from registry import OURS, register

BATCH = 4
WORKERS = 2
HEIGHT, WIDTH = 256, 704
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
RANGE_M = (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0)
MAX_POINTS = 350_000
CLOSE_M = 1.0


# ---- images -------------------------------------------------------------------------------------
def normalise(pixels):
    """(3, H, W) uint8 tensor to normalised float32."""
    import torch

    mean = torch.tensor(MEAN).view(3, 1, 1)
    std = torch.tensor(STD).view(3, 1, 1)
    return pixels.to(torch.float32).sub_(mean).div_(std).contiguous()


def decode_torchvision(data):
    """libjpeg-turbo through torchvision, then torch's antialiased uint8 resize."""
    import torch
    import torchvision.io

    raw = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    image = torchvision.io.decode_jpeg(raw)[None]
    size = (HEIGHT, WIDTH)
    image = torch.nn.functional.interpolate(image, size, mode="bilinear", antialias=True)[0]
    return normalise(image)


def decode_pillow_draft(data):
    """Pillow with draft mode: DCT-scaled decode, then its antialiased bilinear resize."""
    import io

    import torch
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (WIDTH, HEIGHT))
    image = image.convert("RGB").resize((WIDTH, HEIGHT), Image.BILINEAR)
    return normalise(torch.from_numpy(np.array(image)).permute(2, 0, 1))


class Images:
    """Map-style dataset of six decoded cameras."""

    def __init__(self, plan, decode):
        self.plan, self.decode = plan, decode

    def __len__(self):
        return len(self.plan)

    def __getitem__(self, index):
        import torch

        paths = self.plan[index]["images"]
        return torch.stack([self.decode(open(p, "rb").read()) for p in paths])


def torch_loader(data, units, shuffle=True):
    """One epoch of torch's DataLoader after the other, workers kept."""
    import torch

    loader = torch.utils.data.DataLoader(
        data,
        batch_size=BATCH,
        shuffle=shuffle,
        num_workers=WORKERS,
        drop_last=True,
        persistent_workers=True,
    )

    def epoch():
        for batch in loader:
            yield batch, BATCH * units

    return epoch


@register("images", "torch_torchvision")
def torch_torchvision(work, root, plan):
    """torch DataLoader, two workers, torchvision's decoder."""
    return torch_loader(Images(plan, decode_torchvision), 6)


@register("images", "torch_pillow_draft")
def torch_pillow(work, root, plan):
    """torch DataLoader, two workers, Pillow's scaled decode."""
    return torch_loader(Images(plan, decode_pillow_draft), 6)


def litdata_images(sample):
    import torch

    return torch.stack([decode_torchvision(sample[f"f{i}"]) for i in range(6)])


def litdata_loader(folder, transform, units):
    import litdata

    data = litdata.StreamingDataset(
        str(folder), shuffle=True, drop_last=True, transform=functools.partial(transform)
    )
    loader = litdata.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
    )

    def epoch():
        for batch in loader:
            yield batch, BATCH * units

    return epoch


@register("images", "litdata_torchvision")
def litdata_torchvision(work, root, plan):
    """LitData's chunks and loader, two workers, torchvision's decoder."""
    return litdata_loader(dataset.litdata_folder(work, plan, "images"), litdata_images, 6)


def our_loader(root, fields, units, first_field):
    import drivetrain as dt

    data = dt.open(str(root))
    loader = dt.DataLoader(
        data, BATCH, fields=fields, shuffle=True, drop_last=True, threads=WORKERS
    )

    def epoch():
        for batch in loader:
            yield batch[first_field], BATCH * units

    return epoch


@register("images", OURS)
def our_images(work, root, plan):
    """Ours, decoding less where the target is smaller than half the source."""
    import drivetrain as dt

    fields = {f"CAM_{c}": image_spec(dt) for c in dataset.CAMERAS}
    return our_loader(root, fields, 6, "CAM_FRONT")


@register("images", f"{OURS}_exact")
def our_exact_images(work, root, plan):
    """Ours with a full-resolution decode of every picture."""
    import drivetrain as dt

    fields = {f"CAM_{c}": image_spec(dt, exact=True) for c in dataset.CAMERAS}
    return our_loader(root, fields, 6, "CAM_FRONT")


def image_spec(dt, **more):
    return dt.Image(size=(HEIGHT, WIDTH), mean=MEAN, std=STD, **more)


# ---- LiDAR --------------------------------------------------------------------------------------
def merge_sweeps(clouds, matrices, dt_s):
    """Ten clouds to one padded (MAX_POINTS, 5) in the keyframe frame, and their point count."""
    merged = []
    for i, points in enumerate(clouds):
        if i:
            points = points[~((abs(points[:, 0]) < CLOSE_M) & (abs(points[:, 1]) < CLOSE_M))]
            matrix = np.asarray(matrices[i], np.float32)
            points[:, :3] = points[:, :3] @ matrix[:3, :3].T + matrix[:3, 3]
        points[:, 4] = dt_s[i]
        merged.append(points)
    points = np.concatenate(merged)
    low, high = np.float32(RANGE_M[:3]), np.float32(RANGE_M[3:])
    points = points[((points[:, :3] > low) & (points[:, :3] < high)).all(1)]
    out = np.zeros((MAX_POINTS, 5), np.float32)
    out[: len(points)] = points
    return out, len(points)


class Sweeps:
    """Map-style dataset of merged clouds."""

    def __init__(self, plan):
        self.plan = plan

    def __len__(self):
        return len(self.plan)

    def __getitem__(self, index):
        item = self.plan[index]
        clouds = [np.fromfile(p, np.float32).reshape(-1, 5) for p in item["sweeps"]]
        return merge_sweeps(clouds, item["matrices"], item["dt_s"])


@register("lidar", "torch_numpy")
def torch_numpy(work, root, plan):
    """torch DataLoader, two workers, numpy."""
    return torch_loader(Sweeps(plan), 1)


@register("lidar", "torch_numpy_no_workers")
def torch_numpy_alone(work, root, plan):
    """torch DataLoader in the main process, numpy: no copy between processes."""
    import torch

    loader = torch.utils.data.DataLoader(Sweeps(plan), BATCH, shuffle=True, drop_last=True)

    def epoch():
        for batch in loader:
            yield batch, BATCH

    return epoch


def litdata_sweeps(sample):
    matrices, dt_s = json.loads(sample["matrices"])
    clouds = [
        np.frombuffer(sample[f"f{i}"], np.float32).reshape(-1, 5).copy() for i in range(len(dt_s))
    ]
    return merge_sweeps(clouds, matrices, dt_s)


@register("lidar", "litdata_numpy")
def litdata_numpy(work, root, plan):
    """LitData's chunks and loader, two workers, numpy; each sample stores its ten sweeps."""
    full = [item for item in plan if len(item["sweeps"]) == dataset.SWEEPS + 1]
    return litdata_loader(dataset.litdata_folder(work, full, "lidar"), litdata_sweeps, 1)


@register("lidar", OURS)
def our_sweeps(work, root, plan):
    """Ours."""
    import drivetrain as dt

    points = dt.Points(
        sweeps=dataset.SWEEPS,
        columns=("x", "y", "z", "intensity", "dt_s"),
        range=RANGE_M,
        remove_close_m=CLOSE_M,
        ragged="pad",
        max_points=MAX_POINTS,
    )
    return our_loader(root, {"LIDAR_TOP": points}, 1, "LIDAR_TOP")


def prepare(work, plan, workload):
    """Writes what contenders read that is not the data set itself, before any clock runs."""
    if workload == "images":
        dataset.litdata_folder(work, plan, "images")
    else:
        full = [item for item in plan if len(item["sweeps"]) == dataset.SWEEPS + 1]
        dataset.litdata_folder(work, full, "lidar")
