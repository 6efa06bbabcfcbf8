"""What the pages say exists: links, commands and their options, files, settings, names in Python examples."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
from scripts.docs_pages import commands, subcommands
from tests.docs.pages import PAGES, ROOT, command_lines, fences, name_of, prose

from tiercel.cli import COMMANDS, load_command
from tiercel.config import Config
from tiercel.config.schema import entries
from tiercel.config.sources import variable_of
from tiercel.errors import TiercelError

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])(--?[a-z][\w-]*)")
SETTING = re.compile(r"(ram|tiers\.\d+|store|serve|model)\.[a-z_]+")
VARIABLE = re.compile(r"\bTIERCEL_[A-Z0-9_]+[A-Z0-9]\b")
FILE = re.compile(r"(?:src/|tests/|docs/|scripts/|benchmarks/|requirements/|plan/|\.ci/)[\w./-]+")
# Absolute paths of a particular machine; the examples use /models and /var/cache only.
MACHINE_PATH = re.compile(
    r"(?<![\w./:*~-])(?:file://)?/(?:data|home|media|mnt|opt|root|scratch|srv|tmp|Users|work)/[\w.-]+"
)

# The command that a page is about: an option named there without its command is one of these commands'.
COMMANDS_OF_PAGE = {
    "cache": ["cache ls", "cache verify", "cache clear", "cache copy", "cache warm"],
    "configuration": ["config"],
    "daemon": ["daemon", "daemon status"],
    "demo": ["demo"],
    "plan": ["plan", "dashboard"],
    "policies": ["cache clear", "serve", "explain", "cache pin"],
    "serve": ["serve"],
    "simulate": ["simulate", "simulate synth"],
    "sizing": ["size"],
    "quickstart": ["serve", "daemon", "dashboard"],
    "vllm": ["serve", "daemon", "daemon status"],
}
# Read by tiercel, but no setting: the page of the configuration lists them.
OTHER_VARIABLES = {"TIERCEL_CONFIG", "TIERCEL_CACHE_DIR", "TIERCEL_API_KEY"}
SETTINGS = {f"{'tiers.0' if e.section == 'tiers' else e.section}.{e.name}" for e in entries()}
# ruff's, vLLM's, SGLang's
OTHER_PROGRAMS_OPTIONS = {
    "--check", "--kv-transfer-config", "--kv-events-config", "--gpu-memory-utilization",
    "--hicache-storage-backend-extra-config", "--hicache-ratio", "--hicache-size", "--hicache-mem-layout",
    "--hicache-storage-prefetch-policy", "--enable-metrics", "--dcp-size",
}  # fmt: skip
# Pages about other programs, whose options they name; `test_migration.py` looks them up there.
ABOUT_OTHERS = {"migration"}


def of_pages(find: re.Pattern[str]) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for match in find.finditer(page.read_text("utf-8")):
            yield page, match[0]


# ---- links


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(page.read_text())))
    return {heading.strip().replace(" ", "-") for heading in plain}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        known = file.exists() and ROOT in file.parents
        if not known or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text("utf-8")) == []


def test_broken_links_are_found() -> None:
    text = "[a](no.md) [b](README.md#no) [c](https://example.org) [d](README.md#install) ![e](x.png)"
    assert broken_links(ROOT / "README.md", text) == ["no.md", "README.md#no", "x.png"]


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(page.read_text("utf-8"))
    }
    assert [name_of(page) for page in PAGES if page.parent != ROOT and page not in linked] == []


def test_the_readme_and_the_changelog_name_every_command() -> None:
    for page in ("README.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text("utf-8")
        assert [name for name in COMMANDS if f"`tiercel {name}" not in text] == [], page


# ---- commands


def spans(page: Path) -> Iterator[str]:
    yield from SPAN.findall(prose(page.read_text("utf-8")))


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words call, and its arguments. Raises KeyError if there is none of that name."""
    command, rest = load_command(words[0]), words[1:]
    below = subcommands(words[0], command)
    if rest and rest[0] in below:
        return below[rest[0]], rest[1:]
    if isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        raise KeyError(rest[0])
    return command, rest


def options_of(command: click.Command) -> set[str]:
    named = {
        name for p in command.params if isinstance(p, click.Option) for name in p.opts + p.secondary_opts
    }
    return named | {"--help", "-h"}


def check(words: list[str]) -> None:
    """Let click parse a whole command line, types and required arguments included, without running it."""
    if not words or words[0] in ("--help", "--version", "-h"):
        return
    command, rest = resolve(words)
    with suppress(click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):  # --help
        command.make_context("tiercel", list(rest))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_code_blocks_parse(page: Path) -> None:
    for words in command_lines(page):
        # In a synopsis, [X]... stands for what may be left out.
        words = [word for word in words if not word.startswith("[")]
        try:
            check(words)
        except (click.UsageError, KeyError) as fault:
            pytest.fail(f"tiercel {shlex.join(words)}: {fault}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_in_the_text_exist(page: Path) -> None:
    about = [resolve(name.split())[0] for name in COMMANDS_OF_PAGE.get(page.stem, [])]
    for span in spans(page):
        called, words = about, span.split()
        if words[0] == "tiercel" and len(words) > 1 and not words[1].startswith("-"):
            called = [resolve(words[1:])[0]]
        elif words[0] == "make" and "--" in span:
            called = [load_command(words[1])]
        elif not words[0].startswith("-") or page.stem in ABOUT_OTHERS:
            continue
        known = set().union(*map(options_of, called or [command for _, command in commands()]))
        known |= OTHER_PROGRAMS_OPTIONS
        assert set(OPTION.findall(span)) <= known, span


def test_commands_that_do_not_exist_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ A=1 tiercel size x --tokns 5 | head  # why\ntiercel no\n```\n")
    assert list(command_lines(page)) == [["size", "x", "--tokns", "5"]]
    with pytest.raises(click.UsageError, match="--tokns"):
        check(["size", "x", "--tokns", "5"])
    with pytest.raises(KeyError):
        check(["siez"])
    check(["size", "x", "--tokens", "5"])


def test_there_are_commands_to_check() -> None:
    assert {words[0] for page in PAGES for words in command_lines(page) if words} >= {
        "serve", "size", "plan", "simulate", "cache",
    }  # fmt: skip


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        match[1]
        for page in PAGES
        for match in re.finditer(r"(?:^\$ |`)make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE)
    }
    assert {"demo", "test"} <= named <= targets


def test_extras_that_pip_is_told_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for page in PAGES
        for match in re.finditer(r"pip install '[^'\[]*\[([\w,]+)\]'", page.read_text("utf-8"))
        for extra in match[1].split(",")
    }
    assert named
    assert named <= set(extras)


# ---- files and settings


def test_files_named_in_the_text_exist() -> None:
    named = {
        (page, match[0].rstrip("."))
        for page in PAGES
        for span in spans(page)
        if "<" not in span
        for match in FILE.finditer(span)
        if match.start() == 0 or span[match.start() - 1] in " ='"
    }
    missing = [
        f"{name_of(page)}: {name}"
        for page, name in named
        if not (ROOT / name).exists() and not (ROOT / "src" / "tiercel" / name).exists()
    ]
    assert named
    assert missing == []


def test_modules_and_scripts_that_python_runs_exist() -> None:
    for page, call in of_pages(re.compile(r"python (-m )?(benchmarks|scripts|tests)[\w./]*")):
        name = call.split()[-1]
        file = ROOT / (name.replace(".", "/") + ".py" if "-m" in call else name)
        assert file.is_file(), f"{name_of(page)}: {call}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_and_variables_exist(page: Path) -> None:
    for span in spans(page):
        name = span.removeprefix("--set ").partition("=")[0]
        if SETTING.fullmatch(name):
            assert re.sub(r"^tiers\.\d+", "tiers.0", name) in SETTINGS, span
    variables = {variable_of(key) for key in SETTINGS} | OTHER_VARIABLES
    assert set(VARIABLE.findall(page.read_text("utf-8"))) <= variables


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_configurations_are_accepted(page: Path, tmp_path: Path) -> None:
    for text in fences(page, "toml"):
        (tmp_path / "tiercel.toml").write_text(text)
        Config.load(tmp_path / "tiercel.toml")


def test_settings_given_by_flag_in_code_blocks_are_accepted() -> None:
    for page in PAGES:
        for words in command_lines(page):
            pairs = [b for a, b in pairwise(words) if a == "--set"]
            Config.load(overrides=dict(pair.split("=", 1) for pair in pairs))
    with pytest.raises(TiercelError):
        Config.load(overrides={"tiers.0.pth": "x"})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_json_is_json(page: Path) -> None:
    for text in fences(page, "json"):
        for line in text.splitlines():
            json.loads(line)


# ---- Python


def names_in(module: str) -> set[str] | None:
    """What a module of tiercel defines or imports at its top, without importing it; None if there is none."""
    base = ROOT / "src" / Path(*module.split("."))
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not file.is_file():
        return None
    names: set[str] = {sub.stem for sub in base.iterdir()} if base.is_dir() else set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def unknown_imports(text: str) -> list[str]:
    unknown = []
    for node in ast.walk(ast.parse(text)):
        wanted: list[tuple[str, list[str]]] = []
        if isinstance(node, ast.ImportFrom):
            wanted = [(node.module or "", [alias.name for alias in node.names])]
        elif isinstance(node, ast.Import):
            wanted = [(alias.name, []) for alias in node.names]
        for module, names in wanted:
            if module.split(".")[0] != "tiercel":
                found: set[str] | None = (
                    set(names) if importlib.util.find_spec(module.split(".")[0]) else None
                )
            else:
                found = names_in(module)
            if found is None:
                unknown.append(module)
            else:
                unknown += [f"{module}.{name}" for name in names if name not in found]
    return unknown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_compile_and_import_what_exists(page: Path) -> None:
    for text in fences(page, "python", "py"):
        assert unknown_imports(text) == []


def test_imports_of_what_does_not_exist_are_found() -> None:
    text = "from tiercel.config import Config, Confg\nimport tiercel.nothing\nimport json\nimport jsn_"
    assert unknown_imports(text) == ["tiercel.config.Confg", "tiercel.nothing", "jsn_"]


# ---- metrics


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_metrics_that_pages_name_are_in_the_table(page: Path) -> None:
    table = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    # A name that ends in `_` or is followed by `…` or `*` stands for several.
    named = re.findall(r"`(tiercel_[a-z_]*[a-z])(?=[`{])", page.read_text("utf-8"))
    assert [name for name in named if f"`{name}" not in table and f"`{name}_" not in table] == []


# ---- no particular machine


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_path_of_a_particular_machine(page: Path) -> None:
    assert MACHINE_PATH.findall(page.read_text("utf-8")) == []


def test_paths_of_a_particular_machine_are_found() -> None:
    text = "see /home/me/x, `/tmp/a`, file:///opt/b and /models/m, /var/cache/tiercel, a/work/b, https://x.org/data/y"
    assert MACHINE_PATH.findall(text) == ["/home/me", "/tmp/a", "file:///opt/b"]
