"""The `foreshard` command: verbs loaded when called, and every failure turned into its exit code.

0 ok, 1 internal fault, 2 bad input, 3 nothing fits, 4 no plan meets a limit, 5 accuracy, 130 interrupted.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches

import click

from foreshard import __version__
from foreshard.cli.options.answer import dump
from foreshard.cli.options.group import VerbGroup
from foreshard.cli.options.missing import missing
from foreshard.cli.options.sources import name_source
from foreshard.cli.verbs import VERBS, commands, verb
from foreshard.errors import ForeshardError, SpecError, Terminated
from foreshard.option_names import meant
from foreshard.spec.plan import COMM_OPTIONS

INTERRUPTED = 130  # as shells report SIGINT: 128 + 2


@click.command(
    cls=VerbGroup,
    verbs=VERBS,
    load=verb,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, message="foreshard %(version)s")
def program() -> None:
    """Predict distributed training before it is deployed.

    MODEL is a catalog name, the path of an HF config.json, or module.py:factory. CLUSTER is a catalog name,
    a TOML file, or a shorthand such as 8x8xh100-sxm (nodes x devices per node x device).
    """


def run(args: Sequence[str]) -> int:
    """Run the command line and return its exit code; no exception leaves."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    args = _asked(list(args))
    try:
        outcome = program.main(args=args, prog_name="foreshard", standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _fail(_usage_error(error, args), args)
    except ForeshardError as error:
        return _fail(error, args)
    except (click.Abort, KeyboardInterrupt) as error:
        if isinstance(error.__cause__ or error, Terminated):  # click wraps it
            click.echo("terminated", err=True)
            return 128 + signal.SIGTERM
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except OSError as error:  # a full disk, a closed pipe: neither our fault nor bad input
        failed = ForeshardError(
            f"the operating system reports: {error.strerror or error}", file=error.filename
        )
        return _fail(failed, args)
    except Exception as error:  # the last line of defence: a fault of ours, never a traceback at the user
        return _fault(error, args)


def _asked(args: list[str]) -> list[str]:
    """Return the words with `help VERB` and `version` as the options that they are here."""
    if args[:1] == ["help"]:
        return [*args[1:], "--help"]
    return ["--version"] if args == ["version"] else args


def _of_other_verbs(option: str, command: str) -> str | None:
    """Return the fix that names the verbs which have an option, None where none has."""
    own = command.removeprefix("foreshard ")
    switch = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    if own == "plan" and switch in COMM_OPTIONS:
        return f"Write --comm {switch}: the search may then switch it, else it is the framework's"
    have = [
        name
        for name, other in commands()
        if name != own and any(option in param.opts for param in other.params)
    ]
    return (
        f"It is an option of {' and of '.join(repr(f'foreshard {name}') for name in have[:3])}"
        if have
        else None
    )


def _near_option(error: click.NoSuchOption) -> str | None:
    """Return the fix that names the option nearest to one that is none; dashes are alike in all."""
    named = {option.lstrip("-"): option for option in error.possibilities or ()}
    near = get_close_matches(error.option_name.lstrip("-"), named, n=1)
    return f"Did you mean {named[near[0]]!r}?" if near else None


def _value_rule(message: str, param: click.Parameter, ctx: click.Context | None) -> tuple[str, str]:
    """Return what is wrong with a value, and what the parameter takes, of the complaint of its type."""
    said = re.fullmatch(r"('.*') is (?:not (an? .+|one of .+)|no (.+))", message.rstrip("."), re.DOTALL)
    if said:
        return f"{said[1]} is not valid", f"Must be {said[2] or f'a {said[3]}'}"
    form = param.make_metavar(ctx or click.Context(click.Command("foreshard")))
    return message, f"It is written as {form}"


def _usage_rule(error: click.ClickException, command: str) -> str | None:
    """Return the rule of a command line that words on it break, None where it is the rule of a value."""
    if isinstance(error, click.NoSuchOption):
        return f"Options are those of {command} --help"
    if isinstance(error, click.BadOptionUsage):
        return "A switch has no value, any other option has one"
    if isinstance(error, click.UsageError) and not isinstance(error, click.BadParameter):
        return f"Arguments are those of {command} --help, and an option's value follows it"
    return None


def _rate_of_cluster(message: str, args: Sequence[str]) -> str | None:
    """Return the fix of a NIC rate or of nodes that stand apart from the cluster, None of other words."""
    extra = re.search(r"extra arguments? \((.+)\)", message)
    if extra is None:
        return None
    from foreshard.catalog.shorthand import read_shorthand

    rate = re.fullmatch(r"[0-9.]+ ?[kmgt]b(?:it)?(?:/s|ps)\S*", extra[1], re.IGNORECASE)
    for word in args:
        with suppress(SpecError):
            read_shorthand(word)
            if rate:
                return f"Write '{word}@{rate[0]}' for nodes with NICs of that rate"
            read_shorthand(extra[1])
            return f"Write '{word}+{extra[1]}' for both"
    return None


def _usage_error(error: click.ClickException, args: Sequence[str] = ()) -> SpecError:
    """Return click's complaint about words as one of ours."""
    known = missing(error) if isinstance(error, click.MissingParameter) else None
    if known is not None:
        return known
    param = getattr(error, "param", None)
    key = None
    if param is not None:
        key = max(param.opts, key=len) if isinstance(param, click.Option) else (param.metavar or param.name)
    ctx = getattr(error, "ctx", None)
    command = ctx.command_path if ctx is not None else "foreshard"
    key = key or getattr(error, "option_name", None)
    ours = meant(key) if key and isinstance(error, click.NoSuchOption) else None
    message = error.message or error.format_message()
    said = re.search(r"\. ((?:Did you mean|Write) .*)$", message)
    fix = said[1] if said else f"See {command} --help"
    if isinstance(error, click.NoSuchOption):
        fix = _of_other_verbs(error.option_name, command) or _near_option(error) or fix
    if re.search(r"extra arguments? \((true|false|yes|no|on|off|1|0)\b", message, re.IGNORECASE):
        fix = "A switch has no value: write --compile or --no-compile, as --help lists them"
    if assigned := re.search(r"extra arguments? \((?:--)?([a-z][a-z_-]*)=(\S+?)[ )]", message, re.IGNORECASE):
        fix = f"Write --{assigned[1]} {assigned[2]}"
    fix = _rate_of_cluster(message, args) or fix
    if isinstance(error, click.BadOptionUsage) and "does not take a value" in message:
        fix = f"Write {key} alone"
    fix = f"Write {ours}" if ours else fix
    quoted = re.match(r"'([^']*)'", message)
    what = message[: said.start()] if said else message
    rule = _usage_rule(error, command)
    if isinstance(error, click.BadParameter) and param is not None:
        what, rule = _value_rule(what, param, ctx)
    made = SpecError(what, key=key, value=quoted[1] if quoted else None, rule=rule, fix=fix)
    if ctx is not None:
        name_source(made, ctx)
    return made


def _fail(error: ForeshardError, args: Sequence[str]) -> int:
    """Say what went wrong, as an object under --json, and return the exit code."""
    if "--json" in args:
        with suppress(OSError):  # a full disk or a closed pipe takes no answer; the reason is said below
            click.echo(dump({"schema_version": 1, "error": error.to_dict()}))
    click.echo(f"foreshard: {error}", err=True)
    return error.exit_code


def _fault(error: Exception, args: Sequence[str]) -> int:
    if os.environ.get("FORESHARD_DEBUG"):
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    fault = ForeshardError(
        f"internal fault: {type(error).__name__}: {error}",
        rule="This is a bug in foreshard, not in your input",
        fix="Set FORESHARD_DEBUG=1 for the traceback, and report it with the command line",
    )
    return _fail(fault, args)
