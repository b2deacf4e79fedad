"""The exceptions foreshard raises, and the exit code of each.

ForeshardError (1, internal fault)
    SpecError (2)           bad input, invalid plan: carries file, key, value, rule, fix
        ExtraMissingError   an optional library is needed; names the extra
    InfeasibleError (3)     no plan fits memory or divisibility: names what binds and the nearest change
    LimitError (4)          plans exist, none meets a stated limit
    AccuracyError (5)       validation is worse than the stated limit
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MAX_NAME = 80  # longer ones are cut in messages


def did_you_mean(text: str, known: Iterable[str], *, otherwise: str | None = None) -> str | None:
    """Return the fix that names the known word nearest to another in any case, else `otherwise`.

    Examples
    --------
    >>> did_you_mean("megatron-cor", ["deepspeed", "megatron-core"])
    "Did you mean 'megatron-core'?"
    """
    from difflib import get_close_matches

    spelled = {word.lower(): word for word in known}
    near = get_close_matches(text.lower(), spelled, n=1)
    return f"Did you mean {spelled[near[0]]!r}?" if near else otherwise


class ForeshardError(Exception):
    """Anything foreshard raises on purpose."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        file: str | None = None,
        key: str | None = None,
        value: Any = None,
        rule: str | None = None,
        fix: str | None = None,
    ):
        self.what, self.file, self.key, self.value, self.rule, self.fix = what, file, key, value, rule, fix
        super().__init__(what)

    def __str__(self) -> str:
        """Join where, what, the rule and the fix into one line."""
        where = ": ".join(part for part in (self.file, self.key) if part)
        tail = " ".join(_sentence(part) for part in (self.what, self.rule, self.fix) if part)
        return f"{where}: {tail}" if where else tail

    def to_dict(self) -> dict[str, Any]:
        """Return the error object that ``--json`` prints."""
        return {
            "code": self.exit_code,
            "what": self.what,
            "file": self.file,
            "key": self.key,
            "value": self.value if isinstance(self.value, int | float | bool | None) else str(self.value),
            "rule": self.rule,
            "fix": self.fix,
        }


def _sentence(text: str) -> str:
    return text if text.endswith(("?", "!", "...")) else f"{text.rstrip('.')}."


class SpecError(ForeshardError):
    """Bad input: what (value), the rule it breaks, and the fix."""

    exit_code = 2


def unknown(
    kind: str,
    name: str,
    known: Iterable[str],
    *,
    key: str,
    file: str | None = None,
    rule: str = "Known",
    otherwise: str | None = None,
) -> SpecError:
    """Return the error of a name that is none of the known ones, to be raised; the nearest one is the fix.

    Examples
    --------
    >>> print(unknown("verb", "pln", ["plan", "run"], key="verb", rule="Verbs are"))
    verb: unknown verb 'pln'. Verbs are plan, run. Did you mean 'plan'?
    """
    words, shown = list(known), name[:_MAX_NAME]
    fix = did_you_mean(shown, words, otherwise=otherwise or "Use one of them")
    what = f"unknown {kind} {shown!r}"
    return SpecError(what, file=file, key=key, value=shown, rule=f"{rule} {', '.join(words)}", fix=fix)


class ExtraMissingError(SpecError):
    """An optional library is not installed; the fix names the extra."""


class InfeasibleError(ForeshardError):
    """Nothing fits: names the binding constraint and the nearest change that fits."""

    exit_code = 3


class LimitError(ForeshardError):
    """Plans exist, but none meets a stated limit."""

    exit_code = 4


class Terminated(KeyboardInterrupt):
    """SIGTERM ended a command at once: it is answered as Ctrl-C is, with the exit code of its own signal."""


class AccuracyError(ForeshardError):
    """Predictions are further from the measurements than allowed."""

    exit_code = 5
