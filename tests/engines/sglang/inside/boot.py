"""SGLang on a machine without a GPU: its storage interface, host pools and controller.

SGLang's own `__init__` patches transformers, so it is left out. What is GPU code only (triton), draws
pictures (torchvision) or pages (IPython) gets a stand-in that can be imported and never runs. For a process
of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

# Where `make setup` puts it: not among our own packages, whose versions it would change.
HOME = Path(sys.prefix) / "sglang"
STOOD_IN = ("triton", "torchvision", "IPython")


class StandIn(types.ModuleType):
    """A module in which every name is there: a class, or a decorator that changes nothing."""

    __path__ = ()
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[0].isupper() else StandIn(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return lambda function: function


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds them, after everybody else has looked."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in STOOD_IN:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def installed(home: Path = HOME) -> str | None:
    """The release of SGLang in `home`; None if it is not there."""
    found = sorted(home.glob("sglang-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").removeprefix("sglang-") if found else None


def boot(home: Path = HOME) -> None:
    """Make `import sglang` find what is in `home`."""
    release = installed(home)
    assert release is not None
    sys.path.append(str(home))
    bare = types.ModuleType("sglang")
    bare.__path__ = [str(home / "sglang")]
    bare.__version__ = release  # type: ignore[attr-defined]
    sys.modules["sglang"] = bare
    # Both look for some of these themselves, and must not find a stand-in.
    import_module("torch._inductor.runtime.hints")
    from transformers.utils import is_torchvision_available

    is_torchvision_available()
    sys.meta_path.append(StandIns())
