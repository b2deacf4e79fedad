"""Flags as users of other tools write them, in our spelling."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from foreshard.option_names import SWITCHES, option_name

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def canonical(name: str) -> str:
    """Return a flag (or a name that click looks up) as foreshard spells it.

    Examples
    --------
    >>> canonical("global_batch"), canonical("mbs"), canonical("tp")
    ('global-batch', 'micro-batch', 'tp')
    """
    return option_name(name) if len(name) > 1 else name


def as_ours(args: Sequence[str], options: Collection[str], switches: Collection[str] = ()) -> list[str]:
    """Return words of a command line with switches of other tools as our options of that value.

    `options` are those of the command, without dashes: what is none of them stays as it is; `switches` of
    them may have the value true or false. One dash before a name counts as two, and Megatron's three words of
    recomputation are one rule here.

    Examples
    --------
    >>> as_ours(["--bf16", "-tp", "2", "--gradient_checkpointing", "True"], ("dtype", "tp", "recompute"))
    ['--dtype', 'bf16', '--tp', '2', '--recompute', 'full']
    >>> as_ours(["--sp", "false"], ("sp",), ("sp",))
    ['--no-sp']
    >>> rule = ["--recompute-granularity", "full", "--recompute-method=block", "--recompute-num-layers", "4"]
    >>> as_ours(rule, ("recompute",))
    ['--recompute', 'full:block:4']
    """
    left, found = list(args), []
    while left and left[0] != "--":
        word = left.pop(0)
        name = canonical(word.lstrip("-").partition("=")[0]) if word.startswith("-") else ""
        ours, value = SWITCHES.get(name.lower(), ("", ""))
        stated = word.partition("=")[2] or (left[0] if left and "=" not in word else "")
        if ours in options and ("=" not in word or stated.lower() in _TRUE):
            found += [f"--{ours}", value]
            left = left[1:] if "=" not in word and stated.lower() in _TRUE else left
        elif name in switches and stated.lower() in (*_TRUE, *_FALSE):
            found.append(f"--{name}" if stated.lower() in _TRUE else f"--no-{name}")
            left = left[1:] if "=" not in word else left
        elif len(name) > 1 and word[1] != "-" and name in options:
            found.append(f"-{word}")
        else:
            found.append(word)
    return _one_rule([*found, *left]) if "recompute" in options else [*found, *left]


_RULE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")


def _one_rule(args: list[str]) -> list[str]:
    """Return the words with Megatron's full recomputation in three words as one rule."""
    parts: dict[str, str] = {}
    rest, left = [], list(args)
    while left:
        name, has, value = left.pop(0).partition("=")
        key = name.replace("_", "-")
        if key in _RULE and (has or left):
            parts[key] = value if has else left.pop(0)
        else:
            rest.append(f"{name}{has}{value}")
    if parts.keys() == set(_RULE):
        return [*rest, "--recompute", ":".join(parts[name] for name in _RULE)]
    return args
