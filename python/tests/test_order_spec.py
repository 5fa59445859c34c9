"""docs/order.md implemented a second time, naively, from its text: the page's vectors must follow.

The engine's own test checks the Rust code against the same vectors, so the page, the code and this
reading of the page agree. Run as a program it prints the tables anew.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "order.md"
MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """One Philox4x32-10 block."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK32, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK32]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


def halves(value: int) -> list[int]:
    """Low and high 32 bits."""
    return [value & MASK32, value >> 32]


def words(seed: int, epoch: int, sample: int, operation: int, count: int) -> list[int]:
    """First `count` 32-bit words of a stream."""
    key = philox([*halves(epoch), operation, 0], halves(seed))[:2]
    blocks = [philox([*halves(b), *halves(sample)], key) for b in range(count // 4 + 1)]
    return [word for block in blocks for word in block][:count]


def words64(seed: int, epoch: int, sample: int, operation: int, count: int) -> list[int]:
    """First `count` 64-bit words of a stream."""
    w = words(seed, epoch, sample, operation, 2 * count)
    return [low | high << 32 for low, high in zip(w[::2], w[1::2], strict=True)]


def mix(digit: int, key: int) -> int:
    """The hash of a Feistel round."""
    z = digit ^ key
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK64
    return z ^ z >> 31


def permutation(n: int, keys: list[int], x: int) -> int:
    """Where the keyed bijection of 0..n sends x."""
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    while True:
        row, column = divmod(x, columns)
        for k in range(0, 8, 2):
            row = (row + (mix(column, keys[k]) * rows >> 64)) % rows
            column = (column + (mix(row, keys[k + 1]) * columns >> 64)) % columns
        x = row * columns + column
        if x < n:
            return x


def keys(seed: int, epoch: int, part: int, number: int) -> list[int]:
    """Round keys of one of the orders' permutations."""
    return words64(seed, epoch, part, 0xFFFF0000 + number, 8)


def block_order(n: int, seed: int, epoch: int, block: int, window: int) -> list[int]:
    """Block order as a table: cut, permute the blocks, permute inside each window."""
    count = -(-n // block)
    slot_keys = keys(seed, epoch, 0, 1)
    slots = [permutation(count, slot_keys, slot) for slot in range(count)]
    order = []
    for w in range(-(-count // window)):
        inside = [
            sample
            for b in slots[w * window : (w + 1) * window]
            for sample in range(b * block, min((b + 1) * block, n))
        ]
        window_keys = keys(seed, epoch, w, 2)
        order += [inside[permutation(len(inside), window_keys, i)] for i in range(len(inside))]
    assert sorted(order) == list(range(n))
    return order


def sample_at(shuffle: object, n: int, seed: int, epoch: int, position: int) -> int:
    """The sample at a position of an epoch."""
    if shuffle == "sequential":
        return position
    if shuffle == "full":
        return permutation(n, keys(seed, epoch, 0, 0), position)
    shape = shuffle["block"]  # type: ignore[index]
    return block_order(n, seed, epoch, shape["block"], shape["window"])[position]


def table(marker: str) -> list[list[str]]:
    """Cells of the table that follows a marker of the page."""
    lines = PAGE.read_text().split(f"<!-- vectors: {marker} -->")[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def numbers(cell: str) -> list[int]:
    """Whitespace-separated integers, decimal or hexadecimal."""
    return [int(word, 0) for word in cell.split()]


def stream_row(seed: int, epoch: int, sample: int, operation: int) -> list[str]:
    """The derived cells of a row of the stream table."""
    w = words(seed, epoch, sample, operation, 5)
    first, second = words64(seed, epoch, sample, operation, 2)
    u, v = (first >> 11) * 2.0**-53, (second >> 11) * 2.0**-53
    normal = math.sqrt(-2.0 * math.log(1.0 - u)) * math.cos(2.0 * math.pi * v)
    return [" ".join(f"0x{x:08x}" for x in w), repr(u), str(first * 1000 >> 64), repr(normal)]


def test_philox_vectors() -> None:
    for counter, key, block in table("philox"):
        assert philox(numbers(counter), numbers(key)) == numbers(block)


def test_stream_vectors() -> None:
    for row in table("stream"):
        assert stream_row(*(int(cell, 0) for cell in row[:4]))[:3] == row[4:7], row


def test_order_vectors() -> None:
    for shuffle, n, seed, epoch, positions, samples in table("order"):
        kind = json.loads(shuffle.strip("`"))
        found = [
            sample_at(kind, int(n, 0), int(seed, 0), int(epoch, 0), p) for p in numbers(positions)
        ]
        assert found == numbers(samples), (shuffle, n)


def print_tables() -> None:
    """Prints the stream and order tables, for a page that is written anew."""
    for key in [(0, 0, 0, 0), (1, 2, 3, 4), (2**64 - 1, 2**40 + 5, 2**33 + 7, 0xFFFEFFFF)]:
        cells = [hex(k) if k > 2**16 else str(k) for k in key]
        print("| " + " | ".join(cells + stream_row(*key)) + " |")
    small, wide = list(range(10)), [0, 1, 2, 50, 97, 98, 99]
    huge = [0, 1, 2**39, 999_999_999_988]
    full, block = "full", {"block": {"block": 8, "window": 3}}
    rows = [
        (full, 10, 0, 0, small),
        (full, 10, 0, 1, small),
        (full, 1000, 42, 7, [0, 1, 2, 500, 997, 998, 999]),
        (full, 999_999_999_989, 2**64 - 1, 2**32, huge),
        (block, 10, 0, 0, small),
        (block, 100, 3, 5, wide),
        ({"block": {"block": 128, "window": 32}}, 5000, 1, 0, [0, 1, 4095, 4096, 4999]),
        ("sequential", 10, 9, 9, [0, 5, 9]),
    ]
    for shuffle, n, seed, epoch, positions in rows:
        name = json.dumps(shuffle, separators=(",", ":"))
        samples = [sample_at(shuffle, n, seed, epoch, p) for p in positions]
        cells = [f"`{name}`", str(n), hex(seed) if seed > 2**16 else str(seed), str(epoch)]
        print("| " + " | ".join(cells + [" ".join(map(str, x)) for x in (positions, samples)]), "|")


if __name__ == "__main__":
    print_tables()
