"""Where an option's value comes from: flag, FORESHARD_* in the environment, --config, default."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import click
from click.core import ParameterSource

from foreshard.cli.options.answer import answering
from foreshard.cli.options.flags import as_ours, canonical
from foreshard.cli.options.values import Text
from foreshard.cli.verbs import VERBS, commands, verb
from foreshard.errors import SpecError, did_you_mean, unknown
from foreshard.spec.codec import parse_toml, read_text

# A file of every option of every verb takes 20 kB.
MAX_CONFIG_BYTES = 2**20
_CONFIGURABLE = (str, int, float, bool)
_PREFIX = "FORESHARD_"
_OTHER_VARIABLES = ("FORESHARD_CONFIG", "FORESHARD_DEBUG", "FORESHARD_MEASURED", "FORESHARD_SECRET")
_CONFIG_PATH = "foreshard.config"
_SETTINGS = {"show_default": True, "token_normalize_func": canonical}


class _Verb(click.Command):
    """A verb that knows switches of other tools."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words, those of other tools as ours."""
        known = [option[2:] for param in self.params for option in param.opts if option.startswith("--")]
        switches = [
            param.opts[0][2:] for param in self.params if f"--no-{param.opts[0][2:]}" in param.secondary_opts
        ]
        return super().parse_args(ctx, as_ours(args, known, switches))


def verb_command(
    name: str,
    *options: Callable[[click.Command], None],
    output: str = "Also write the JSON object to a file.",
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return the decorator that makes a function a verb: with --json, -o, --config and FORESHARD_ variables.

    `options` add what other verbs have too; `output` is what -o writes.
    """

    def made(function: Callable[..., Any]) -> click.Command:
        command = click.command(name, cls=_Verb, context_settings=_SETTINGS)(function)
        for add in options:
            add(command)
        answering(command, output)
        return configurable(command)

    return made


def configurable(command: click.Command) -> click.Command:
    """Give every option of a verb its FORESHARD_ variable, and the verb its --config."""
    for param in command.params:
        if isinstance(param, click.Option) and param.envvar is None and param.name:
            flag = max(param.opts, key=len).lstrip("-")
            param.envvar = _PREFIX + flag.upper().replace("-", "_")
    command.params.append(
        click.Option(
            ["--config"],
            is_eager=True,
            expose_value=False,
            envvar="FORESHARD_CONFIG",
            callback=_read_config,
            metavar="FILE.toml",
            help="TOML file of options; keys before any table hold for all verbs, [VERB] for one.",
        )
    )
    for param in command.params:
        if param.type is click.STRING:
            param.type = Text()
    if command.callback is not None:
        command.callback = _naming_sources(command.callback)
    return command


def _naming_sources(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error about an option say where its value came from."""

    @wraps(callback)
    def call(*args: Any, **values: Any) -> Any:
        try:
            return callback(*args, **values)
        except SpecError as error:
            name_source(error, click.get_current_context())
            raise

    return call


def name_source(error: SpecError, ctx: click.Context) -> None:
    """Name an option in an error as the user wrote it: its flag, its variable, or the config file's key."""
    if error.file is not None or not error.key:
        return
    for param in ctx.command.params:
        flag = max(param.opts, key=len)
        if not isinstance(param, click.Option) or error.key not in (flag, param.name):
            continue
        error.key = flag
        source = ctx.get_parameter_source(param.name or "")
        if source is ParameterSource.ENVIRONMENT:
            error.key = str(param.envvar)
        elif source is ParameterSource.DEFAULT_MAP:
            error.file, error.key = ctx.meta.get(_CONFIG_PATH), flag.lstrip("-")
        return


def _reject_unknown_variables(command: click.Command) -> None:
    """Raise SpecError for a FORESHARD_ variable that no verb reads."""
    own = {param.envvar for param in command.params} | set(_OTHER_VARIABLES)
    strange = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in own)
    if not strange:
        return
    known = {str(param.envvar) for _, other in commands() for param in other.params if param.envvar}
    known |= set(_OTHER_VARIABLES)
    for name in strange:
        if name not in known:
            rule, fix = "FORESHARD_ variables are the flags in capitals:", f"Unset {name}"
            raise unknown("variable", name, sorted(known), key=name, rule=rule, otherwise=fix)


def _read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    _reject_unknown_variables(ctx.command)
    if path is None:
        return
    ctx.meta[_CONFIG_PATH] = path
    data = _load(path)
    names = {
        option.name: option
        for option in ctx.command.params
        if isinstance(option, click.Option) and option.name and not option.is_eager
    }
    spelled = {max(option.opts, key=len).lstrip("-"): option for option in names.values()}
    shared = {key: value for key, value in data.items() if not isinstance(value, dict)}
    table = _words(ctx)
    own = _table_of(data, table)
    shared = {
        key: value for key, value in shared.items() if _flag(key) in spelled or not _known_elsewhere(key)
    }
    ctx.default_map = {
        **_named(shared, spelled, path, ""),
        **_named(own, spelled, path, ".".join((*table, ""))),
    }


def _words(ctx: click.Context) -> tuple[str, ...]:
    """Return the words that call a command, after the program's name."""
    above = _words(ctx.parent) if ctx.parent is not None and ctx.parent.parent is not None else ()
    return (*above, ctx.command.name or "")


def _table_of(data: dict[str, Any], words: tuple[str, ...]) -> dict[str, Any]:
    """Return the table of a command in a configuration file; [comm.predict] is that of `comm predict`."""
    for word in words:
        data = data.get(word, {})
    return data


def _flag(key: str) -> str:
    return key.replace("_", "-")


def _known_elsewhere(key: str) -> bool:
    """Return whether another verb has this option: a key for all verbs need not suit every one."""
    return any(f"--{_flag(key)}" in param.opts for _, other in commands() for param in other.params)


def _load(path: str) -> dict[str, Any]:
    data = parse_toml(read_text(path, max_bytes=MAX_CONFIG_BYTES), file=path, may_be_empty=True)
    tables = {key: value for key, value in data.items() if isinstance(value, dict) or key in VERBS}
    _check_tables(tables, VERBS, path, "")
    for name in VERBS:
        command = verb(name) if name in data else None
        if isinstance(command, click.Group):
            _check_tables(data[name], command.list_commands(click.Context(command)), path, f"{name}.")
    return data


def _check_tables(tables: dict[str, Any], known: Iterable[str], path: str, where: str) -> None:
    """Raise SpecError for a table that is no verb's, or for a value where a table belongs."""
    names = list(known)
    for key, value in tables.items():
        if key not in names or not isinstance(value, dict):
            name = f"{where}{key}"
            what = f"unknown table [{name}]" if isinstance(value, dict) else f"{name} is a value, not a table"
            rule = f"Tables are {', '.join(where + name for name in names)}"
            fix = did_you_mean(key, names, otherwise="Leave it out")
            raise SpecError(what, file=path, key=name, rule=rule, fix=fix)


def _named(table: dict[str, Any], spelled: dict[str, click.Option], path: str, where: str) -> dict[str, Any]:
    """Return the table by parameter name; keys are flags without dashes, `-` or `_` inside.

    A flag that may be repeated takes an array too.
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        flag = _flag(key)
        if flag not in spelled:
            rule = "Keys are the verb's flags without dashes:"
            raise unknown(
                "option", key, spelled, file=path, key=where + key, rule=rule, otherwise="Leave it out"
            )
        option = spelled[flag]
        values = value if option.multiple and isinstance(value, list) else [value]
        if not all(isinstance(one, _CONFIGURABLE) for one in values):
            several = ", or an array of them" if option.multiple else ""
            rule = f"A value is a number, a string, true or false{several}"
            fix = f"Write it as --{flag} takes it"
            raise SpecError(f"{value!r} is not a value", file=path, key=where + key, rule=rule, fix=fix)
        found[option.name or flag] = tuple(values) if option.multiple else value
    return found
