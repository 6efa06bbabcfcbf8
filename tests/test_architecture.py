"""The rules of the house, checked over the source: who may import whom, what is never written, how long.

Every rule is also run on a small source that breaks it, so that a checker gone blind is noticed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tiercel"

# A package may import those to its right, never those to its left; inside functions too.
ORDER = (
    "__main__ cli testing web demo doctor engines plan eval bench attention service store tiers codecs "
    "memory blocks geometry models report migrate config errors"
).split()

# Who may import a heavy library: when the module is loaded, or only inside a function.
AT_ONCE: dict[str, set[str]] = {
    "torch": {"engines", "attention"},
    "transformers": {"engines", "attention"},
    "vllm": {"engines"},
    "starlette": {"web", "service"},
    "uvicorn": {"web", "service"},
    "opentelemetry": set(),
}
LAZILY = {
    "torch": {"cli", "web", "plan", "eval", "bench", "codecs", "memory", "models"},
    "transformers": {"cli", "plan", "eval", "bench", "models"},
    "vllm": {"cli", "bench"},
    "starlette": {"cli", "engines"},
    "uvicorn": {"cli", "engines"},
    "opentelemetry": {"web"},
}

# The places where a foreign library's exceptions are translated, where accounts of requests are kept, which
# must not cost anybody one, and where one answer's fault must not be another's; as `package/module.py`.
MAY_CATCH_EVERYTHING = frozenset(
    {
        "engines/transformers/model.py",
        "engines/transformers/batch.py",
        "engines/vllm/accounts.py",
        "store/lane.py",
        "store/reports.py",
    }
)
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

Rule = Callable[[str, ast.Module, str], Iterator[str]]


def imports(tree: ast.Module, module: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, absolute dotted name, lazily) of every import; `from a import b` yields `a.b`."""

    def visit(node: ast.AST, lazily: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, lazily) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = absolute(child, module)
                yield from ((child.lineno, f"{base}.{alias.name}", lazily) for alias in child.names)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(child)
                yield from visit(child, lazily or inside)

    yield from visit(tree, False)


def absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    package = module.removesuffix("/__init__.py").removesuffix(".py").split("/")
    drop = node.level - (1 if module.endswith("/__init__.py") else 0)
    return ".".join(["tiercel", *package[: len(package) - drop], *filter(None, [node.module])])


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def package_of(module: str) -> str:
    return module.split("/")[0].removesuffix(".py")


def imports_point_down(module: str, tree: ast.Module, text: str) -> Iterator[str]:
    own = package_of(module)
    if own not in ORDER and own != "__init__":
        yield f"1: package {own} has no place in the order"
        return
    for line, name, _ in imports(tree, module):
        parts = name.split(".")
        if parts[0] != "tiercel" or len(parts) < 2 or parts[1] == "__version__":
            continue
        if own == "__init__" or parts[1] not in ORDER or ORDER.index(parts[1]) < ORDER.index(own):
            yield f"{line}: {own} imports {name}, which is above it"


def heavy_libraries_stay_where_they_belong(module: str, tree: ast.Module, text: str) -> Iterator[str]:
    own = package_of(module)
    for line, name, lazily in imports(tree, module):
        library = name.split(".")[0]
        if library in AT_ONCE and own not in AT_ONCE[library] | (LAZILY[library] if lazily else set()):
            yield f"{line}: {own} imports {library}{' in a function' if lazily else ' when loaded'}"


def nothing_is_unpickled(module: str, tree: ast.Module, text: str) -> Iterator[str]:
    for line, name, _ in imports(tree, module):
        if name.split(".")[0] in PICKLES or name == "torch.load":
            yield f"{line}: imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            yield f"{node.lineno}: torch.load"
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            yield f"{node.value.lineno}: allow_pickle"


def keys_never_use_the_builtin_hash(module: str, tree: ast.Module, text: str) -> Iterator[str]:
    # It differs between processes; two hosts would never agree on a key.
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "hash":
            yield f"{node.lineno}: builtin hash"


def exceptions_are_caught_by_name(module: str, tree: ast.Module, text: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler) or module in MAY_CATCH_EVERYTHING:
            continue
        names = {ast.unparse(n) for n in ast.walk(node.type)} if node.type else {"everything"}
        if broad := names & {"everything", "Exception", "BaseException"}:
            yield f"{node.lineno}: except {broad.pop()}"


def modules_and_functions_are_short(module: str, tree: ast.Module, text: str) -> Iterator[str]:
    if (lines := text.count("\n")) > MODULE_LINES_MAX:
        yield f"1: module of {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: function {node.name} of {lines} lines"


def modules_say_what_they_are_for(module: str, tree: ast.Module, text: str) -> Iterator[str]:
    if text.strip() and not ast.get_docstring(tree):
        yield "1: no docstring"


RULES: tuple[Rule, ...] = (
    imports_point_down,
    heavy_libraries_stay_where_they_belong,
    nothing_is_unpickled,
    keys_never_use_the_builtin_hash,
    exceptions_are_caught_by_name,
    modules_and_functions_are_short,
    modules_say_what_they_are_for,
)


def broken(rule: Rule, root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        module, text = path.relative_to(root).as_posix(), path.read_text()
        found += [f"{module}:{problem}" for problem in rule(module, ast.parse(text), text)]
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Rule) -> None:
    assert broken(rule, SOURCE) == []


def test_the_source_is_really_read() -> None:
    assert len(list(SOURCE.rglob("*.py"))) > 10
    names = {name for _, name, _ in imports(ast.parse((SOURCE / "models.py").read_text()), "models.py")}
    assert "tiercel.errors.ModelError" in names


LONG_FUNCTION = "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX

BREACHES: list[tuple[Rule, str, str]] = [
    (imports_point_down, "store/a.py", "from tiercel.engines import b"),
    (imports_point_down, "store/a.py", "import tiercel.engines.b"),
    (imports_point_down, "store/a.py", "from tiercel import service"),
    (imports_point_down, "store/a.py", "def f():\n    from tiercel.cli import main"),
    (imports_point_down, "store/policy/a.py", "from ...engines import b"),
    (imports_point_down, "store/__init__.py", "from ..engines import b"),
    (imports_point_down, "config/a.py", "from tiercel.geometry import b"),
    (imports_point_down, "errors.py", "from tiercel.config import b"),
    (imports_point_down, "misc/a.py", ""),
    (imports_point_down, "__init__.py", "from tiercel.store import b"),
    (heavy_libraries_stay_where_they_belong, "store/a.py", "def f():\n    import torch"),
    (heavy_libraries_stay_where_they_belong, "cli/a.py", "import torch.nn"),
    (heavy_libraries_stay_where_they_belong, "geometry/a.py", "from transformers import AutoConfig"),
    (heavy_libraries_stay_where_they_belong, "tiers/a.py", "import uvicorn"),
    (heavy_libraries_stay_where_they_belong, "web/a.py", "from opentelemetry import trace"),
    (heavy_libraries_stay_where_they_belong, "plan/a.py", "try:\n    import vllm\nexcept ImportError: pass"),
    (nothing_is_unpickled, "tiers/a.py", "import pickle"),
    (nothing_is_unpickled, "tiers/a.py", "def f():\n    from pickle import loads"),
    (nothing_is_unpickled, "engines/a.py", "import torch\ntorch.load('x')"),
    (nothing_is_unpickled, "engines/a.py", "from torch import load"),
    (nothing_is_unpickled, "engines/a.py", "np.load('x', allow_pickle=True)"),
    (keys_never_use_the_builtin_hash, "blocks/a.py", "key = hash((1, 2))"),
    (keys_never_use_the_builtin_hash, "blocks/a.py", "keys = map(hash, [1])"),
    (exceptions_are_caught_by_name, "store/a.py", "try: pass\nexcept: pass"),
    (exceptions_are_caught_by_name, "store/a.py", "try: pass\nexcept Exception: pass"),
    (exceptions_are_caught_by_name, "store/a.py", "try: pass\nexcept (OSError, BaseException) as e: pass"),
    (modules_and_functions_are_short, "store/a.py", "x = 1\n" * (MODULE_LINES_MAX + 1)),
    (modules_and_functions_are_short, "store/a.py", LONG_FUNCTION),
    (modules_and_functions_are_short, "store/a.py", "class A:\n " + LONG_FUNCTION.replace("\n", "\n ")),
    (modules_say_what_they_are_for, "store/a.py", "x = 1\n"),
]

KEPT: list[tuple[Rule, str, str]] = [
    (imports_point_down, "store/a.py", "from tiercel.tiers import b\nfrom . import c\nfrom .d import e"),
    (imports_point_down, "cli/a.py", "from tiercel import __version__\nfrom tiercel.web import b"),
    (imports_point_down, "config/a.py", "from tiercel.errors import ConfigError"),
    (heavy_libraries_stay_where_they_belong, "engines/a.py", "import torch"),
    (heavy_libraries_stay_where_they_belong, "cli/a.py", "def f():\n    import torch"),
    (
        heavy_libraries_stay_where_they_belong,
        "codecs/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ),
    (nothing_is_unpickled, "tiers/a.py", "import json\nnp.load('x', allow_pickle=False)"),
    (keys_never_use_the_builtin_hash, "blocks/a.py", "class A:\n    def __hash__(self): return self.hash()"),
    (exceptions_are_caught_by_name, "store/a.py", "try: pass\nexcept (OSError, ValueError): pass"),
    (modules_and_functions_are_short, "store/a.py", LONG_FUNCTION.removesuffix("    pass\n")),
    (modules_say_what_they_are_for, "store/a.py", '"""Why."""\nx = 1\n'),
]


@pytest.mark.parametrize(("rule", "module", "text"), BREACHES)
def test_a_source_that_breaks_the_rule_is_found(tmp_path: Path, rule: Rule, module: str, text: str) -> None:
    write(tmp_path / module, text)
    assert len(broken(rule, tmp_path)) == 1


@pytest.mark.parametrize(("rule", "module", "text"), KEPT)
def test_a_source_that_keeps_the_rule_is_left_alone(
    tmp_path: Path, rule: Rule, module: str, text: str
) -> None:
    write(tmp_path / module, text)
    assert broken(rule, tmp_path) == []


def test_every_rule_is_shown_to_bite() -> None:
    assert {rule for rule, _, _ in BREACHES} == set(RULES) == {rule for rule, _, _ in KEPT}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
