"""The chart rendered by Helm's own code: values come in as JSON, what Helm says goes out as JSON.

A process of its own, because Helm's library brings Go's runtime with it, its threads and its signals.
"""

from __future__ import annotations

import json
import sys

from helm_python import HelmError, chart


def main(folder: str) -> None:
    values = json.load(sys.stdin)
    said: dict[str, object] = {}
    try:
        with chart.Chart.load(folder) as loaded:
            said["files"] = loaded.render(values=values, name="demo", namespace="inference")
        said["lint"] = chart.lint(folder, values, strict=True)
    except HelmError as refusal:
        said["refused"] = str(refusal)
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
