"""Pipeline stages and groups of experts: ranks that hold a part of a checkpoint's names.

A save unites the names of all stages (``src/checkpoint/commit/union.rs``). A restore narrows what
is stored to the names that this rank's targets have, so that names of other stages are neither
loaded nor reported.
"""

from collections.abc import Sequence
from typing import Any

from drivetrain._checkpoint import optimizer, typed_json
from drivetrain._checkpoint.fills import dict_items
from drivetrain._native import InvalidArgument


def checked_stage(
    ranks: Sequence[int] | None, rank: int, world_size: int
) -> tuple[int, ...] | None:
    """Ascending ranks of a stage, or None for no stages; `InvalidArgument` names bad ones."""
    if ranks is None:
        return None
    found = tuple(sorted(ranks)) if all(type(n) is int for n in ranks) else ()
    distinct = len(set(found)) == len(found)
    if not distinct or rank not in found or found[0] < 0 or found[-1] >= world_size:
        raise InvalidArgument(
            f"stage_ranks: expected different ranks below {world_size}, {rank} among them, found "
            f"{list(ranks)!r}"
        )
    return found


def narrow(tree: dict[str, Any], targets: dict[str, Any], names: optimizer.Names) -> None:
    """Leaves in a stored tree what the targets have, in place."""
    for name in [name for name in tree if name in targets]:
        _narrow(tree[name], targets[name], names)


def _narrow(node: Any, live: Any, names: optimizer.Names) -> None:
    items = dict_items(node)
    if items is None:
        return
    if optimizer.is_module(live):
        _keep(items, set(optimizer.unwrap(live).state_dict()))
    elif optimizer.is_optimizer(live):
        _narrow_optimizer(items, live, names)
    elif isinstance(live, dict):
        _keep(items, set(live))
        for text, child in items.items():
            _narrow(child, live[typed_json.decode_key(text)], names)


def _narrow_optimizer(items: dict[str, Any], live: Any, names: optimizer.Names) -> None:
    numbered = live.state_dict()
    if "param_groups" not in numbered:
        return
    own = set(optimizer.number_names(live, numbered, names).values())
    state = dict_items(items.get("state"))
    if state is not None:
        _keep(state, own)
    groups = items.get("param_groups")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), list):
            group["params"] = [name for name in group["params"] if name in own]


def _keep(items: dict[str, Any], keys: set[Any]) -> None:
    for text in [text for text in items if typed_json.decode_key(text) not in keys]:
        del items[text]
