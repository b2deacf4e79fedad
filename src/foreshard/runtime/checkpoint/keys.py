"""Items by the keys that a checkpoint has them under: the same whatever the plan was."""

from __future__ import annotations

from foreshard.runtime.state.shard_keys import Held, Item

_FOLDERS = {"value": "layers", "frozen": "frozen", "buffer": "buffers"}


def key_of(kind: str, layer: int, name: str) -> str:
    """Return the key of an item.

    Examples
    --------
    >>> key_of("value", 3, "up.weight@1/4"), key_of("state", 3, "up.weight/step")
    ('layers.3.up.weight@1/4', 'optimizer.3.up.weight.step')
    """
    if kind == "state":
        owner, _, key = name.rpartition("/")
        return f"optimizer.{layer}.{owner}.{key}"
    return f"{_FOLDERS[kind]}.{layer}.{name}"


def item_of(key: str) -> Item:
    """Return the item of a key."""
    folder, layer, name = key.split(".", 2)
    if folder == "optimizer":
        owner, _, state = name.rpartition(".")
        return "state", int(layer), f"{owner}/{state}"
    return next(kind for kind, told in _FOLDERS.items() if told == folder), int(layer), name


def is_wanted(key: str, wanted: Held) -> bool:
    """Return whether a key belongs to one of the pieces wanted, each named as a whole."""
    kind, layer, name = item_of(key)
    if kind == "state":
        return ("state", layer, name.rpartition("/")[0]) in wanted
    return ((kind, layer, name) if kind == "value" else ("frame", layer, "")) in wanted
