"""The identity of one model's KV: everything that must be equal before a stored byte may be used.

It is made once per engine; nothing of it depends on the folder's place, the process or the machine.
"""

from __future__ import annotations

import torch

from tiercel.blocks import Identity
from tiercel.engines.transformers.layout import LAYOUT_VERSION, BlockLayout
from tiercel.engines.transformers.model import LoadedModel
from tiercel.errors import GeometryError
from tiercel.geometry import KVGeometry


def model_identity(model: LoadedModel, layout: BlockLayout) -> Identity:
    """Name the KV that `model` computes and keeps in `layout`.

    What computes is part of the layout's name (weights' dtype, attention, kind of device, torch release): it
    changes the last bits of the KV, and a hit must equal a recompute.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    torch_release = ".".join(torch.__version__.split(".")[:2])
    computed = f"{dtype}+{model.attention}+{model.device.type}+torch{torch_release}"
    return Identity(
        model=model.name,
        revision=model.revision,
        kv_dtype=str(model.kv_dtype).removeprefix("torch."),
        geometry=_geometry_digest(model, layout),
        layout=f"{LAYOUT_VERSION}+{computed}",
        block_tokens=layout.block_tokens,
    )


def _geometry_digest(model: LoadedModel, layout: BlockLayout) -> bytes:
    try:
        return KVGeometry.from_config(model.folder).digest()
    except GeometryError:
        # The engine has seen the real cache: that sizing does not know the family is no reason to refuse it.
        return layout.digest()
