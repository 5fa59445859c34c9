"""Targets that would be stored with the very text that is stored: nothing of it is decoded.

The text of a dict of plain tensors follows from their names, dtypes and shapes, and says all of
them. If that of a live dict or module stands in the checkpoint, each of its tensors fits.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from drivetrain._checkpoint import blocks, optimizer, typed_json

_decode_at = json.JSONDecoder().raw_decode


@dataclass(eq=False)
class Alike:
    """A target that fits as it is."""

    found: blocks.Found
    loaded: Any
    """Its containers anew, with the live tensors."""


def split(text: str, targets: dict[str, Any]) -> tuple[Any, dict[str, Alike]]:
    """The stored state without the values that targets are alike to, and those targets."""
    texts = {}
    taken: set[int] = set()
    for name, live in targets.items():
        if (one := _of(name, live)) is None:
            continue
        wanted, alike = one
        # memory that is shared by two targets is filled in the general way
        if taken.isdisjoint(alike.found.addresses):
            taken.update(alike.found.addresses)
            texts[name] = wanted, alike
    if texts:
        try:
            return _split(text, texts)
        except (ValueError, IndexError, RecursionError):
            pass  # not spelled as a save spells it
    return typed_json.loads(text), {}


def _split(text: str, texts: dict[str, tuple[str, Alike]]) -> tuple[Any, dict[str, Alike]]:
    tree: dict[str, Any] = {}
    found: dict[str, Alike] = {}
    at = 0
    while text[at] == ("," if at else "{"):
        key, at = _decode_at(text, at + 1)
        if type(key) is not str or text[at] != ":" or key in tree or key in found:
            raise ValueError(key)
        at += 1
        wanted, alike = texts.get(key, ("", None))
        if alike is not None and text.startswith(wanted, at):
            found[key] = alike
            at += len(wanted)
        else:
            tree[key], at = _decode_at(text, at)
    if text[at:] != "}":
        raise ValueError(at)
    return tree, found


def _of(name: Any, live: Any) -> tuple[str, Alike] | None:
    if type(name) is not str:
        return None
    tree = live
    if optimizer.is_module(live):
        module = optimizer.unwrap(live)
        if has_hooks(module):
            return None
        tree = dict(module.state_dict())
    elif type(live) is OrderedDict:
        tree = dict(live)
    found = blocks.find(tree, (name,), [])
    if found is None:
        return None
    loaded = _containers(tree)
    if type(live) is OrderedDict:
        return f'{{"~odict":{found.block.text}}}', Alike(found, OrderedDict(loaded))
    return found.block.text, Alike(found, loaded)


def _containers(tree: dict) -> dict:
    if type(next(iter(tree.values()), None)) is not dict:
        return dict(tree)
    return {key: _containers(value) for key, value in tree.items()}


def has_hooks(module: Any) -> bool:
    """True when loading means more to a module than filling its tensors."""
    return any(
        part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks
        for part in module.modules()
    )
