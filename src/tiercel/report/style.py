"""The look of reports: one style sheet, light and dark, wide and narrow. Nothing in it loads anything."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--ink:#1b2330;--soft:#5b6675;--line:#dfe4ea;--ground:#f6f8fa;--card:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa6b5;--line:#323b47;--ground:#12161c;--card:#1a2028}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 14px 48px}
h1{font-size:1.5rem;line-height:1.25;margin:.4rem 0}
h2{font-size:1.08rem;margin:0 0 .5rem}
.source{color:var(--soft);overflow-wrap:anywhere;margin:0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:10px;margin:18px 0;padding:0}
.facts div,section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px}
.facts dt{color:var(--soft);font-size:.86rem}
.facts dd{margin:0;font-size:1.3rem;font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}
section{min-width:0}
section>svg{width:100%;height:auto;display:block}
svg text{fill:var(--ink);font:13px system-ui,sans-serif}
.grid{stroke:var(--line);stroke-width:1}
.note{color:var(--soft);font-size:.9rem;margin:.6rem 0 0}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:.4rem 0 0;padding:0;font-size:.92rem}
.legend svg{width:28px;height:8px;margin-right:6px;vertical-align:middle}
.wide{margin-top:14px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{color:var(--soft);font-weight:600}
ul.assumptions{margin:0;padding-left:1.2rem}
dl.how{display:grid;grid-template-columns:minmax(110px,190px) 1fr;gap:4px 16px;margin:0;font-size:.92rem}
dl.how dt{color:var(--soft)}dl.how dd{margin:0;overflow-wrap:anywhere}
@media(max-width:560px){dl.how{grid-template-columns:1fr;gap:0}dl.how dd{margin-bottom:8px}}
"""
