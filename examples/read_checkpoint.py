"""Reads a checkpoint without Drivetrain: written from docs/checkpoint-layout.md and
docs/checkpoint-state.md alone, to show that they say enough.

    python examples/read_checkpoint.py CHECKPOINT_ROOT/step-00001000

Needs pyarrow, for the table of chunks and for zstd, and nothing else. Tensors come back as (dtype,
shape, bytes).
"""

import array
import base64
import itertools
import json
import math
import pathlib
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple

import pyarrow
import pyarrow.ipc

Tensor = namedtuple("Tensor", "dtype shape data")
BLOCK_BYTES = 262_144
ELEMENT_BYTES = {"BOOL": 1, "BF16": 2, "C64": 8, "C128": 16}
TABLE = []
for value in range(256):
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli, bits reversed
    TABLE.append(value)


def crc32c(data):
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ TABLE[(value ^ byte) & 255]
    return value ^ 0xFFFFFFFF


def check(sum_, data, what):
    if sum_ != crc32c(data):
        raise ValueError(f"{what}: expected crc32c {sum_:08x}, found {crc32c(data):08x}")


def read_manifest(folder):
    raw = (folder / "manifest.json").read_bytes()
    manifest = json.loads(raw)
    check(int(manifest["crc32c"], 16), raw[: raw.rindex(b',"crc32c"')], "manifest.json")
    if (manifest["format"], manifest["format_version"]) != ("drivetrain-checkpoint", 1):
        raise ValueError("another format or a newer version")
    return manifest


def read_chunks(folder, manifest):
    """Rows of the table by tensor path."""
    record = manifest["files"][0]
    table = (folder / record["path"]).read_bytes()
    check(int(record["crc32c"], 16), table, record["path"])
    by_path = defaultdict(list)
    for row in pyarrow.ipc.open_file(table).read_all().to_pylist():
        if row["codec"] not in ("raw", "planes-zstd"):
            raise ValueError(f"{row['path']}: codec {row['codec']}")
        by_path[row["path"]].append(row)
    return by_path


def element_bytes(dtype):
    return ELEMENT_BYTES.get(dtype) or int(dtype.lstrip("UIF").split("_")[0]) // 8


def expanded(method, part, count):
    """A plane of `count` bytes."""
    if method == 0:
        return part
    if method == 1:
        return pyarrow.Codec("zstd").decompress(part, count, asbytes=True)
    return part * count


def unpacked(stored):
    """The elements of a compressed chunk."""
    raw_bytes, version, width, rotated = struct.unpack_from("<QBBB", stored, len(stored) - 16)
    if version != 1 or stored[-4:] != b"dtpz":
        raise ValueError("not a compressed chunk of this version")
    row = struct.Struct(f"<{1 + width}I")
    at, whole = 0, bytearray()
    table = len(stored) - 16 - -(-raw_bytes // BLOCK_BYTES) * row.size
    for crc, *words in row.iter_unpack(stored[table:-16]):
        raw = bytearray(min(BLOCK_BYTES, raw_bytes - len(whole)))
        count = len(raw) // width
        for plane, word in enumerate(words):
            part, at = stored[at : at + word % (1 << 24)], at + word % (1 << 24)
            raw[plane : count * width : width] = expanded(word >> 24, part, count)
        rest = len(raw) - count * width
        raw[count * width :], at = stored[at : at + rest], at + rest
        if rotated:
            numbers = array.array({2: "H", 4: "I", 8: "Q"}[width], bytes(raw[: count * width]))
            back = (n >> 1 | (n & 1) << (8 * width - 1) for n in numbers)
            raw[: count * width] = array.array(numbers.typecode, back).tobytes()
        check(crc, raw, "a block")
        whole += raw
    return whole


def read_tensor(folder, rows):
    """All chunks of one tensor, put in place."""
    dtype, shape = rows[0]["dtype"], rows[0]["shape"]
    size = element_bytes(dtype)
    whole, filled = bytearray(math.prod(shape) * size), 0
    for row in rows:
        step = row["step_ref"]  # the chunk lies in the folder of this step, beside ours
        there = folder if step is None else folder.absolute().parent / f"step-{step:08}"
        with open(there / row["file"], "rb") as file:
            file.seek(row["start"])
            data = file.read(row["length"])
        check(row["crc32c"], data, row["entry"])
        data = unpacked(data) if row["codec"] == "planes-zstd" else data
        filled += len(data)
        if row["flat_start"] is not None or not shape:
            start = (row["flat_start"] or 0) * size
            whole[start : start + len(data)] = data
            continue
        offsets, extent = row["offsets"], row["extent"]
        run = extent[-1] * size
        starts = itertools.product(*(range(o, o + e) for o, e in zip(offsets[:-1], extent[:-1])))
        for number, index in enumerate(starts if run else ()):
            at = 0
            for i, length in zip((*index, offsets[-1]), shape):
                at = at * length + i
            whole[at * size : at * size + run] = data[number * run : (number + 1) * run]
    if filled != len(whole):
        raise ValueError(f"{rows[0]['path']}: chunks of {filled} bytes for {len(whole)}")
    return Tensor(dtype, tuple(shape), bytes(whole))


class Reader:
    """The state of one rank."""

    def __init__(self, folder, rank=0):
        self.folder = pathlib.Path(folder)
        self.manifest = read_manifest(self.folder)
        self.chunks = read_chunks(self.folder, self.manifest)
        self.own = self.manifest["per_rank"][rank]

    def state(self):
        """The nested state, tensors included."""
        return {name: self.decode(v, (name,)) for name, v in self.manifest["state"].items()}

    def decode(self, node, path):
        if isinstance(node, list):
            return [self.decode(item, (*path, i)) for i, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if len(node) == 1 and (tag := next(iter(node)))[:1] == "~" and tag[1:2].isalpha():
            return self.tagged(tag[1:], node[tag], path)
        keys = {text: self.key(text) for text in node}
        return {key: self.decode(node[text], (*path, key)) for text, key in keys.items()}

    @staticmethod
    def key(text):
        if not text.startswith("~"):
            return text
        return text[1:] if text.startswith("~~") else int(text[1:])

    def tagged(self, tag, content, path):
        if tag == "tensor":
            return self.tensor(content, path)
        if tag == "rank":
            return self.decode(self.own[path_text(path)], path)
        if tag in ("tuple", "size"):
            return tuple(self.decode(content, path))
        if tag in ("odict", "counter"):
            return {"odict": OrderedDict, "counter": Counter}[tag](self.decode(content, path))
        simple = {
            "ddict": lambda: self.decode(content[1], path),
            "float": lambda: float(content),
            "int": lambda: int(content, 16),
            "bytes": lambda: base64.b64decode(content),
            "str": lambda: base64.b64decode(content).decode("utf-8", "surrogatepass"),
            "numpy": lambda: self.decode(content[1], path),
        }
        return simple[tag]() if tag in simple else content  # names of dtypes and devices

    def tensor(self, content, path):
        shape = tuple(content["shape"])
        if "data" in content:
            found = Tensor(content["dtype"], shape, base64.b64decode(content["data"]))
        else:
            found = read_tensor(self.folder, self.chunks[path_text(content.get("at", path))])
        return found._replace(dtype=content.get("own") or found.dtype, shape=shape)


def path_text(path):
    return json.dumps(list(path), ensure_ascii=False, separators=(",", ":"))


def show(value, indent=""):
    """Prints a nested state."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, Tensor):
            print(f"{indent}{key}: {item.dtype} {list(item.shape)}, {len(item.data)} bytes")
        elif isinstance(item, (dict, list, tuple)):
            print(f"{indent}{key}:")
            show(item, indent + "  ")
        else:
            print(f"{indent}{key}: {item!r:.70}")


if __name__ == "__main__":
    show(Reader(sys.argv[1]).state())
