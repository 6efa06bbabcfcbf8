"""From figures to the tables in docs/benchmarks.md and their plot. Text outside the markers is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: made by make bench -->", "<!-- end of figures -->"


def write_page(results: dict[str, Any]) -> None:
    made = tables(results["core"], results["ttft"])
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, made))


def between(text: str, begin: str, end: str, made: str) -> str:
    """`text` with `made` in place of what was between the two markers."""
    before, rest = text.split(begin, 1)
    _, after = rest.split(end, 1)
    return f"{before}{begin}\n\n{made}\n{end}{after}"


def tables(core: dict[str, Any], ttft: dict[str, Any]) -> str:
    arena, files, lookup, copies = core["arena"], core["files"], core["lookup"], ttft["kv_copies"]
    rows = [
        ("TTFT from RAM against recompute", "≥ 20×", f"{ttft['from_ram']['speedup']:.1f}×"),
        (
            "TTFT from disk in a new process against recompute",
            "≥ 12×",
            f"{ttft['from_disk_new_process']['speedup']:.1f}×",
        ),
        ("store work on the cold run, share of its TTFT", "≤ 3 %", f"{ttft['store_overhead']:.2%}"),
        (
            "recompute in blocks against one plain prefill step",
            "–",
            times(ttft["recompute"], ttft["one_shot_prefill"]),
        ),
        ("arena: load, of plain memcpy", "≥ 70 %", f"{arena['load_from_arena']['of_plain']:.0%}"),
        (
            "arena: store without checksum, of plain memcpy",
            "≥ 70 %",
            f"{arena['store_copy_alone']['of_plain']:.0%}",
        ),
        ("arena: store with checksum, of plain memcpy", "–", f"{arena['store_into_arena']['of_plain']:.0%}"),
        (
            "KV restored into the model's cache, of plain memcpy",
            "≥ 70 %",
            f"{copies['restore_of_plain']:.0%}",
        ),
        ("KV saved from the model's cache, of plain memcpy", "≥ 70 %", f"{copies['save_of_plain']:.0%}"),
        ("files tier: write, of bare direct I/O", "≥ 80 %", f"{files['tier_write']['of_bare']:.0%}"),
        ("files tier: read, of bare direct I/O", "≥ 80 %", f"{files['tier_read']['of_bare']:.0%}"),
        (
            "files tier through the store, verified, of two bare threads",
            "–",
            f"{files['load_through_store']['of_bare']:.0%}",
        ),
        (
            "lookup of 32k tokens in a million blocks",
            "< 1 ms",
            f"{lookup['lookup']['median_s'] * 1e3:.3f} ms",
        ),
        ("the same, keys computed too", "< 1 ms", f"{lookup['name_and_lookup']['median_s'] * 1e3:.3f} ms"),
        ("index memory per block", "≤ 300 bytes", f"{lookup['index_bytes_per_block']:.0f} bytes"),
    ]
    lines = ["| what | target | measured |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)]
    return "\n".join([*lines, "", raw(core, ttft), "", ran_on(core, ttft), ""])


def raw(core: dict[str, Any], ttft: dict[str, Any]) -> str:
    arms = {
        "one plain prefill step (transformers alone)": ttft["one_shot_prefill"],
        "recompute, in blocks": ttft["recompute"],
        "cold, with the store": ttft["cold_with_store"],
        "from RAM": ttft["from_ram"],
        "from disk, new process": ttft["from_disk_new_process"],
    }
    lines = [
        f"| TTFT at {ttft['prompt_tokens']} tokens | median s | min | max |",
        "|---|---|---|---|",
        *(
            f"| {name} | {a['median_s']:.3f} | {a['min_s']:.3f} | {a['max_s']:.3f} |"
            for name, a in arms.items()
        ),
        "",
        "| rate | GB/s |",
        "|---|---|",
        f"| plain memcpy of blocks | {core['arena']['plain_copy']['gb_per_s']:.1f} |",
        f"| checksum (xxh3-128) | {core['arena']['checksum']['gb_per_s']:.1f} |",
        f"| bare direct read, one thread | {core['files']['bare_read']['gb_per_s']:.2f} |",
        f"| load through the store, two threads | {core['files']['load_through_store']['gb_per_s']:.2f} |",
        f"| bare direct write, one thread | {core['files']['bare_write']['gb_per_s']:.2f} |",
        f"| files tier write | {core['files']['tier_write']['gb_per_s']:.2f} |",
    ]
    return "\n".join(lines)


def ran_on(core: dict[str, Any], ttft: dict[str, Any]) -> str:
    one = ttft["machine"]
    return (
        f"{one['when']}, {one['cpu']}, {one['cores']} cores, Python {one['python']}, "
        f"Linux {one['kernel']}; load before: "
        f"{core['machine']['load_before']:.1f} (store), {one['load_before']:.1f} (TTFT). "
        f"Same first token in every arm: {'yes' if ttft['same_first_token'] else 'NO'}."
    )


def times(one: dict[str, float], other: dict[str, float]) -> str:
    return f"{one['median_s'] / other['median_s']:.2f} × its time"


def write_plot(ttft: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = [
        ("recompute", ttft["recompute"], "#9aa3ad"),
        ("from disk,\nnew process", ttft["from_disk_new_process"], "#2f6fb2"),
        ("from RAM", ttft["from_ram"], "#1a9a6c"),
    ]
    figure, axes = pyplot.subplots(figsize=(7, 2.6), dpi=150)
    for place, (_, arm, colour) in enumerate(arms):
        spread = [[arm["median_s"] - arm["min_s"]], [arm["max_s"] - arm["median_s"]]]
        axes.barh(
            place, arm["median_s"], color=colour, xerr=spread, error_kw={"ecolor": "#444", "capsize": 3}
        )
        label = f"{arm['median_s']:.2f} s" + (f"   {arm['speedup']:.0f}× faster" if "speedup" in arm else "")
        axes.text(arm["max_s"] * 1.01, place, f"  {label}", va="center", fontsize=9)
    axes.set_yticks(range(len(arms)), [name for name, _, _ in arms], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, ttft["recompute"]["max_s"] * 1.2)
    axes.set_xlabel(
        f"time to first token, s, {ttft['prompt_tokens']} prompt tokens (median, min–max)", fontsize=9
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target)
