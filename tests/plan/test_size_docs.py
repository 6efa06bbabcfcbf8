"""docs/sizing.md: outputs, tables and examples are what the code says today.

Run this file as a script to write the generated parts anew.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from tiercel.cli.size import command
from tiercel.geometry import DTYPES, KVGeometry, kv_dtype
from tiercel.plan.catalogue import UNCHECKED, find_model, models
from tiercel.plan.size import number
from tiercel.plan.size_text import both

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"
OUTPUT = re.compile(r"(<!-- output of: tiercel size (.+?) -->\n```text\n)(.*?)(```\n)", re.DOTALL)
TABLE = re.compile(r"(<!-- table of: (.+?) -->\n)((?:\|.*\n|\n)*)")
EXAMPLE = re.compile(r"`([^`]+)` ([\d,.]+)")


def output_of(arguments: str) -> str:
    done = CliRunner().invoke(command, shlex.split(arguments), catch_exceptions=False)
    return done.output


def dtype_table() -> str:
    model = find_model("llama-3.1-8b")
    assert model is not None
    geometry = KVGeometry.from_config(model.config)
    plain = geometry.bytes_per_token("bfloat16")
    rows = ["| `--kv-dtype` | B per token | of 16 bits | stored |", "|---|---|---|---|"]
    for name in DTYPES:
        if name.endswith("_ds_mla"):
            continue
        found = geometry.bytes_per_token(name)
        rows.append(f"| `{name}` | {found:,} | {found / plain:.1%} | {kv_dtype(name).note} |")
    return "\n".join(rows)


def model_table() -> str:
    rows = [
        "| model | grows, B per token | windowed, B per token | fixed, B | 32,768 tokens |",
        "|---|---|---|---|---|",
    ]
    for name, model in models().items():
        geometry = KVGeometry.from_config(model.config)
        mark = " *" if UNCHECKED in model.source else ""
        capped = geometry.window_bytes_per_token()
        window = f"{capped:,} × {geometry.window_tokens:,}" if geometry.window_tokens else "–"
        fixed = f"{geometry.fixed_state_bytes():,}" if geometry.fixed_state_bytes() else "–"
        grows = f"{number(geometry.bytes_per_token_exact()):,}"
        rows.append(
            f"| {name}{mark} | {grows} | {window} | {fixed} | {both(geometry.sequence_bytes(32_768))} |"
        )
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {"kv dtypes": dtype_table, "models": model_table}


def written_anew(page: str) -> str:
    page = OUTPUT.sub(lambda found: found[1] + output_of(found[2]) + found[4], page)
    return TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n", page).rstrip("\n") + "\n"


def test_generated_parts_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(OUTPUT.findall(page)) == 2
    assert len(TABLE.findall(page)) == 2
    assert written_anew(page) == page


def test_every_example_of_the_families_table_is_right() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("| family |") : page.index("Draft (MTP)")]
    examples = EXAMPLE.findall(table)
    assert len(examples) >= 30
    for name, figure in examples:
        model = find_model(name)
        assert model is not None, name
        exact = KVGeometry.from_config(model.config).bytes_per_token_exact()
        assert float(exact) == float(figure.replace(",", "")), name


def test_a_wrong_figure_would_be_seen() -> None:
    page = PAGE.read_text(encoding="utf-8").replace("131,072 B/token", "131,073 B/token", 1)
    assert written_anew(page) != page


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
