"""`python -m tiercel.config`: print the reference page of all settings, for docs/configuration.md."""

from __future__ import annotations

import sys

from tiercel.config.reference import reference_page

sys.stdout.write(reference_page())
