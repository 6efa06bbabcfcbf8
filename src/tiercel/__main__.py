"""`python -m tiercel`: the same as the `tiercel` command."""

from __future__ import annotations

from tiercel.cli import main

main()
