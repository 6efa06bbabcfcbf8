"""The store as a process of its own: daemon, protocol, client. `connect` is an engine's way in."""

from tiercel.service.client import RemoteStore
from tiercel.service.connecting import connect
from tiercel.service.daemon import Daemon

__all__ = ["Daemon", "RemoteStore", "connect"]
