"""The `tiercel` command: one table of subcommands, loaded only when called.

It never imports a subcommand to print the help, so that `tiercel --help` starts at once, and it is the
only place where an error meant for the user becomes a line on stderr and an exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

import click

from tiercel import __version__
from tiercel.errors import TiercelError

EXIT_INTERRUPTED = 130
EXIT_FAULT = 1
EXIT_BROKEN_PIPE = 1  # as click itself has it for a write inside a command


class Row(NamedTuple):
    """Where a subcommand lives (`module:attribute`), its one line of help and its heading in `--help`."""

    target: str
    summary: str
    heading: str


TRY = "See it work"
SIZE = "Size and plan"
RUN = "Run and look after it"

# One row per command; the module is imported when the command is called, never before.
COMMANDS: dict[str, Row] = {
    "demo": Row("tiercel.cli.demo:command", "Conversations resumed from RAM, disk and after a restart.", TRY),
    "model-dir": Row(
        "tiercel.cli.model_dir:command", "Print the folder of the demo model, ready to use.", TRY
    ),
    "size": Row("tiercel.cli.size:command", "How large a model's KV cache is, and what fits.", SIZE),
    "plan": Row("tiercel.cli.plan:command", "What fits where, what it gains, what to set.", SIZE),
    "simulate": Row(
        "tiercel.cli.simulate:command", "Replay a request trace against caches you might buy.", SIZE
    ),
    "bench": Row("tiercel.cli.bench:command", "Workloads with offloading and without, side by side.", TRY),
    "eval": Row("tiercel.cli.eval:command", "What lossy KV does to answers, measured before use.", TRY),
    "serve": Row("tiercel.cli.serve:command", "An OpenAI-compatible server on a cached model.", RUN),
    "daemon": Row("tiercel.cli.daemon:command", "One store for all engines of this host.", RUN),
    "cache": Row(
        "tiercel.cli.cache:command", "List, verify, clear, copy, warm or steer what is cached.", RUN
    ),
    "explain": Row("tiercel.cli.explain:command", "What a server would do with a prompt, and why.", RUN),
    "dashboard": Row("tiercel.cli.dashboard:command", "Watch it in a browser; the planner beside it.", RUN),
    "top": Row("tiercel.cli.top:command", "Watch a running daemon or server in the terminal.", RUN),
    "doctor": Row("tiercel.cli.doctor:command", "Check this host, the configuration and what runs.", RUN),
    "migrate": Row(
        "tiercel.cli.migrate:command", "A configuration from LMCache's, or from vLLM's flags.", RUN
    ),
    "config": Row("tiercel.cli.config:command", "Show every setting and where it was set.", RUN),
}


def load_command(name: str) -> click.Command:
    """Import and return the command of a table row. Raises KeyError for a name not in the table."""
    module_name, _, attribute = COMMANDS[name].target.partition(":")
    command = getattr(import_module(module_name), attribute)
    if not isinstance(command, click.Command):
        raise TypeError(f"{COMMANDS[name].target} is a {type(command).__name__}, not a click command")
    return command


class LazyGroup(click.Group):
    """A click group whose subcommands come from `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # Click imports every command to guess what was meant; the table already knows the names.
        name = args[0]
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches  # only a misspelt command pays for it

        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "; see 'tiercel --help'"
        raise TiercelError(f"no such command '{name}'{hint}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in COMMANDS)
        for heading in (TRY, SIZE, RUN):
            rows = [(name.ljust(width), r.summary) for name, r in COMMANDS.items() if r.heading == heading]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="'tiercel COMMAND --help' explains a command.",
)
@click.version_option(__version__, prog_name="tiercel", message="%(prog)s %(version)s")
def cli() -> None:
    """Keep what a language model has already read.

    Tiercel stores the KV cache of long prompts in memory and on disk, so that a conversation that comes
    back, even after a restart, continues at once instead of being read again from the start.
    """


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; prints at most one line for an error of the user's."""
    try:
        result = cli.main(args=args, prog_name="tiercel", standalone_mode=False)
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
    except TiercelError as error:
        return _complain(str(error), error.exit_code)
    except click.Abort:  # what click makes of Ctrl-C
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "tiercel"
        return _complain(f"{error.format_message().rstrip('.')}; see '{path} --help'", error.exit_code)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # the reader (head, less) has gone
        return EXIT_BROKEN_PIPE
    except OSError as error:
        # What commands expect they name themselves; this is the rest, such as an output that is full.
        _drop_output()
        named = f"{error.filename}: " if error.filename is not None else ""
        return _complain(f"{named}{error.strerror or error}", EXIT_FAULT)
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Let what is still buffered go nowhere: the interpreter would complain again when it flushes at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, exit_code: int) -> int:
    # A foreign text inside the message must not turn one line into many.
    click.echo(f"tiercel: error: {' '.join(message.split())}", err=True)
    return exit_code


def main() -> NoReturn:
    """Entry point of the `tiercel` command."""
    sys.exit(run())
