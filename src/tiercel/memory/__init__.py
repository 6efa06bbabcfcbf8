"""Host memory: the arena of fixed slots, pages for records of any length, and the limits for both."""

from tiercel.memory.arena import Arena, ArenaKind
from tiercel.memory.limits import MemoryLimit, filesystem_free_bytes, host_limit
from tiercel.memory.pages import PageNumbers, Pages
from tiercel.memory.slab import check_host

__all__ = [
    "Arena",
    "ArenaKind",
    "MemoryLimit",
    "PageNumbers",
    "Pages",
    "check_host",
    "filesystem_free_bytes",
    "host_limit",
]
