"""Compression of a training state by one thread: stored share, GB of raw bytes per CPU second.

Ours is measured by the bench of the codec (`cargo bench --bench codec -- FILE DTYPE`), the peer in
a process of its own. CPU seconds of the peer are those of its whole process, since it works in a
thread that it starts.
"""

import json
import pathlib
import statistics
import subprocess
import time

from registry import OURS, register

REPOSITORY = pathlib.Path(__file__).parents[2]
NUMBERS = 8 << 20
# Adam's moments of this many different parameters, after so many steps; repeated to the length.
DISTINCT, STEPS = 1 << 20, 200
PASSES = 5
TIMEOUT_S = 600
# name → dtype here, dtype there
FILES = {
    "params_bf16": ("BF16", "bfloat16"),
    "master_fp32": ("F32", "float32"),
    "exp_avg": ("F32", "float32"),
    "exp_avg_sq": ("F32", "float32"),
}
FIGURES = ("share", "encode_gb_s", "decode_gb_s")


def prepare(work):
    """Writes the files that are compressed, once."""
    import numpy as np

    folder = work / "compression"
    if (folder / "ready").exists():
        return folder
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(7)
    master = (rng.standard_normal(NUMBERS, np.float32) * 0.02).astype(np.float32)
    bits = master.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    rounded.astype(np.uint16).tofile(folder / "params_bf16")
    master.tofile(folder / "master_fp32")
    scale = np.exp(rng.standard_normal(DISTINCT, np.float32)) * np.float32(1e-3)
    mean, square = np.zeros(DISTINCT, np.float32), np.zeros(DISTINCT, np.float32)
    for _ in range(STEPS):
        gradient = rng.standard_normal(DISTINCT, np.float32) * scale
        mean += np.float32(0.1) * (gradient - mean)
        square += np.float32(0.001) * (gradient * gradient - square)
    np.tile(mean, NUMBERS // DISTINCT).tofile(folder / "exp_avg")
    np.tile(square, NUMBERS // DISTINCT).tofile(folder / "exp_avg_sq")
    (folder / "ready").touch()
    return folder


@register("compression", OURS)
def ours(path, dtypes):
    """Figures of the codec's own bench."""
    command = ["cargo", "bench", "--quiet", "--bench", "codec", "--", str(path), dtypes[0]]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    row = json.loads(done.stdout.splitlines()[-1])
    return row["stored_share"], row["encode_gb_s"], row["decode_gb_s"]


@register("compression", "zipnn")
def zipnn(path, dtypes):
    """Figures of ZipNN with its defaults for the dtype."""
    import zipnn

    raw = path.read_bytes()
    codec = zipnn.ZipNN(input_format="byte", bytearray_dtype=dtypes[1], threads=1)
    encode_s, decode_s = [], []
    for _ in range(PASSES):
        data = bytearray(raw)  # compress() writes to its input
        at = time.process_time()
        stored = codec.compress(data)
        encode_s.append(time.process_time() - at)
        at = time.process_time()
        back = codec.decompress(stored)
        decode_s.append(time.process_time() - at)
    if bytes(back) != raw:
        raise ValueError(f"{path} does not come back")
    speed = [len(raw) / statistics.median(seconds) / 1e9 for seconds in (encode_s, decode_s)]
    return len(stored) / len(raw), *speed


def time_contender(work, measure):
    """All figures of a contender."""
    folder = prepare(work)
    return {
        f"{name}_{figure}": value
        for name, dtypes in FILES.items()
        for figure, value in zip(FIGURES, measure(folder / name, dtypes), strict=True)
    }
