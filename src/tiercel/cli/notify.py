"""Telling a service manager that asks (systemd's `Type=notify`) how a process is; see sd_notify(3)."""

from __future__ import annotations

import logging
import os
import socket

NOTIFY_VARIABLE = "NOTIFY_SOCKET"


def notify(state: str) -> None:
    """Tell `state`, such as `READY=1`, if anybody asked. A manager that is not there is a warning."""
    address = os.environ.get(NOTIFY_VARIABLE, "")
    if not address:
        return
    address = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto(state.encode(), address)
    except OSError as fault:
        logging.getLogger("tiercel").warning("%s could not be told: %s", NOTIFY_VARIABLE, fault.strerror)
