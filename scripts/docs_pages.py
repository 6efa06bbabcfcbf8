"""Make the pages and pictures of the documentation that come from the code: `python -m scripts.docs_pages`.

A test compares what is in `docs/` with what this makes, so neither can drift from the other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from scripts import docs_pictures
from tiercel.cli import COMMANDS, cli, load_command
from tiercel.config.reference import reference_page

DOCS = Path(__file__).parents[1] / "docs"

_HEAD = """\
# Commands

<!-- Made by `make docs` from the commands themselves; a test fails when it is out of date. -->

Every command has `-h` and `--help`. A mistake is one line on stderr and exit code 2; Ctrl-C ends with 130.
What may follow `--set` is in [configuration](configuration.md).
"""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and subcommand with its name, in the order of `tiercel --help`."""
    headings = list(dict.fromkeys(row.heading for row in COMMANDS.values()))
    for name in sorted(COMMANDS, key=lambda name: headings.index(COMMANDS[name].heading)):
        command = load_command(name)
        yield name, command
        for sub, one in subcommands(name, command).items():
            yield f"{name} {sub}", one


def subcommands(name: str, command: click.Command) -> dict[str, click.Command]:
    """The commands under one of `tiercel`'s."""
    if isinstance(command, click.Group):
        return dict(command.commands)
    if name == "simulate":  # takes a trace or the word `synth`, so it is no click group
        from tiercel.cli.simulate import synth

        return {"synth": synth}
    return {}


def commands_page() -> str:
    """The page of all commands as Markdown."""
    parts = [_HEAD]
    heading = ""
    for name, command in commands():
        row = COMMANDS[name.split()[0]]
        if row.heading != heading:
            heading = row.heading
            parts.append(f"\n## {heading}\n")
        parts.append(f"\n### `tiercel {name}`\n\n{_about(name, command)}")
    return "".join(parts)


def _about(name: str, command: click.Command) -> str:
    context = command.make_context(
        name, [], parent=click.Context(cli, info_name="tiercel"), resilient_parsing=True
    )
    context.show_default = True
    usage = " ".join(["tiercel", name, *command.collect_usage_pieces(context)])
    text = f"```text\n{usage}\n```\n\n{_prose(command.help or '')}"
    rows = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
    rows = [(option, what) for option, what in rows if what and not option.endswith("--help")]
    if not rows:
        return text
    table = "".join(f"| `{_cell(option)}` | {_cell(_escaped(what))} |\n" for option, what in rows)
    return f"{text}\n| option | what it is |\n|---|---|\n{table}"


def _prose(text: str) -> str:
    r"""A docstring as Markdown: paragraphs, and those after `\b` as they stand."""
    out = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            out.append(f"```sh\n{paragraph.removeprefix(chr(8)).strip(chr(10))}\n```\n")
        else:
            out.append(_escaped(" ".join(paragraph.split())) + "\n")
    return "\n".join(out)


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("<", "&lt;")


def _cell(text: str) -> str:
    # Not every Markdown takes an escaped bar within code.
    return " ".join(text.split()).replace("|", ", ")


PAGES: dict[str, Callable[[], str]] = {"cli.md": commands_page, "configuration.md": reference_page}
PAGES |= {f"images/{name}.svg": picture for name, picture in docs_pictures.PICTURES.items()}


def main() -> None:
    """Write every page and picture, and name those that changed."""
    for name, made in PAGES.items():
        file, text = DOCS / name, made()
        if not file.is_file() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")
            sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
