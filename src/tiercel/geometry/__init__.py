"""From a model's configuration to what a token's KV weighs, for every family. It never loads torch."""

from __future__ import annotations

from tiercel.geometry.dtypes import DTYPES, KVDtype, kv_dtype
from tiercel.geometry.model import GroupKind, KVGeometry, LayerGroup, StatePart

__all__ = ["DTYPES", "GroupKind", "KVDtype", "KVGeometry", "LayerGroup", "StatePart", "kv_dtype"]
