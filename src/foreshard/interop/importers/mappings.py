"""Text of configuration files as mappings: JSON, YAML and TOML."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from foreshard.errors import ExtraMissingError, SpecError


def parsed(text: str, file: str) -> dict[str, Any]:
    """Return the mapping in a JSON text, or in a YAML text where it is not JSON.

    Raises
    ------
    SpecError
        When the text is neither, or holds no mapping.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith(("{", "[")):
            raise _malformed(file, "JSON", str(error)) from None
        value = _yaml(text, file)
    except RecursionError:
        raise _malformed(file, "JSON", "nested too deeply") from None
    return _mapping(value, file)


def parsed_toml(text: str, file: str) -> dict[str, Any]:
    """Return the mapping in a TOML text."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _malformed(file, "TOML", str(error)) from None


def _yaml(text: str, file: str) -> Any:
    try:
        import yaml
    except ImportError:
        what, rule = "YAML cannot be read here", "Reading YAML needs PyYAML"
        raise ExtraMissingError(what, file=file, rule=rule, fix="pip install 'foreshard[yaml]'") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise _malformed(file, "YAML", str(error).splitlines()[0]) from None


def _mapping(value: Any, file: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        rule = "A configuration is a table of keys and values"
        raise SpecError(
            f"the file holds a {type(value).__name__}", file=file, rule=rule, fix="Check which file it is"
        )
    return value


def _malformed(file: str, kind: str, error: str) -> SpecError:
    return SpecError(
        f"not valid {kind}: {error}", file=file, rule=f"The file is {kind}", fix="Mend it, or check --from"
    )
