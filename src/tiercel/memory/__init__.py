"""Host memory: the arena of fixed slots and the limits it must respect."""

from tiercel.memory.arena import Arena, ArenaKind
from tiercel.memory.limits import MemoryLimit, filesystem_free_bytes, host_limit

__all__ = ["Arena", "ArenaKind", "MemoryLimit", "filesystem_free_bytes", "host_limit"]
