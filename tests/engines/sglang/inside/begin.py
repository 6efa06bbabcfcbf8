"""A pytest plugin that puts SGLang in place before any of the tests here is imported.

No conftest: that would be imported, stand-ins and all, by whoever collects the tests outside.
"""

from __future__ import annotations

import warnings
from importlib import import_module

from tests.engines.sglang.inside.boot import boot

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    boot()
    import_module("tests.engines.sglang.inside.support")
