"""Run the benches and write their tables into the documentation: python scripts/doc_tables.py [NAME ...].

A table of a document stands between two markers, of which the first says what to run:

    <!-- bench NAME: python bench/bench_NAME.py --markdown -->
    <!-- /bench -->

The table that the command prints takes the place of what stood between them. Benches that no document names
are run too. Output is kept in build/bench, by the state of src and bench: an interrupted run goes on with
the parts that are missing. Parts named on the command line run whether or not they have.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/*.md", "bench/README.md")
MARKED = re.compile(
    r"^(<!-- bench (?P<name>[\w-]+): (?P<command>[^\n]+) -->\n)(?P<table>.*?)^(<!-- /bench -->)$", re.M | re.S
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A bench: its command, and the document that shows what it prints, if any does."""

    name: str
    command: str
    document: Path | None = None


def parts_of(root: Path) -> list[Part]:
    """Return the parts of all documents, then the benches that none of them names."""
    found: dict[str, Part] = {}
    for pattern in DOCUMENTS:
        for document in sorted(root.glob(pattern)):
            for match in MARKED.finditer(document.read_text(encoding="utf-8")):
                name = match["name"]
                if name in found:
                    raise SystemExit(f"two tables are named {name}: {found[name].document} and {document}")
                found[name] = Part(name=name, command=match["command"], document=document)
    named = " ".join(part.command for part in found.values())
    for script in sorted((root / "bench").glob("bench_*.py")):
        if script.name not in named:
            name = script.stem.removeprefix("bench_")
            found[name] = Part(name=name, command=f"python bench/{script.name}")
    return list(found.values())


def state_of(root: Path) -> str:
    """Return a name for the contents of src and bench."""
    digest = hashlib.sha256()
    kept = (".py", ".json", ".toml", ".csv")
    for path in sorted(p for part in ("src", "bench") for p in (root / part).rglob("*") if p.suffix in kept):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def run(part: Part, root: Path) -> str:
    """Return what the command of a part prints, shown as it comes; SystemExit where it fails."""
    words = shlex.split(part.command)
    words[0] = sys.executable if words[0] == "python" else words[0]
    lines = []
    with subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise SystemExit(f"{part.name}: {part.command} ended with exit code {process.returncode}")
    return "".join(lines)


def written(text: str, name: str, output: str) -> str:
    """Return a document with the table that a part printed between its markers."""

    def replaced(match: re.Match[str]) -> str:
        return match[0] if match["name"] != name else f"{match[1]}{table}{match[5]}"

    table = "".join(line for line in output.splitlines(keepends=True) if line.startswith("|"))
    return MARKED.sub(replaced, text)


def main() -> None:
    """Run the parts that are asked for, or those that have not run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="parts to run; default: all that are missing"
    )
    parser.add_argument("--list", action="store_true", help="print the parts and where their tables are")
    asked = parser.parse_args()
    parts, kept = parts_of(ROOT), ROOT / "build" / "bench" / state_of(ROOT)
    unknown = set(asked.names) - {part.name for part in parts}
    if unknown:
        names = ", ".join(part.name for part in parts)
        raise SystemExit(f"no bench is named {', '.join(sorted(unknown))}; there are {names}")
    kept.mkdir(parents=True, exist_ok=True)
    for part in parts:
        output = kept / f"{part.name}.txt"
        where = part.document.relative_to(ROOT) if part.document else "no document"
        if asked.list:
            print(f"{part.name:20} {'done' if output.exists() else '    '}  {where}: {part.command}")
        elif part.name in asked.names or (not asked.names and not output.exists()):
            print(f"== {part.name}: {part.command}", flush=True)
            printed = run(part, ROOT)
            output.write_text(printed, encoding="utf-8")
            if part.document:
                text = part.document.read_text(encoding="utf-8")
                part.document.write_text(written(text, part.name, printed), encoding="utf-8")


if __name__ == "__main__":
    main()
