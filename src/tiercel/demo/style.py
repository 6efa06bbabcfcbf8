"""The look of the report: one style sheet, light and dark, wide and narrow. Nothing in it loads anything."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--ink:#1b2330;--soft:#5b6675;--line:#dfe4ea;--ground:#f6f8fa;--card:#fff;
--prefill:#d4691e;--ram:#12936b;--disk:#2667c9;--answer:#98a3b3;--store:#d9a514;--hatch:#eedccb;--hatch2:#d9b496;
--band:#e8ebf0;--good:#0d7a57;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa6b5;--line:#323b47;--ground:#12161c;
--card:#1a2028;--prefill:#e8853f;--ram:#2fbd8f;--disk:#5b96f0;--answer:#6d7888;--store:#e0b83c;--hatch:#3a2f27;
--hatch2:#6b4c35;--band:#252d37;--good:#4fcf9f;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 14px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .3rem}
h2{font-size:1.08rem;margin:0 0 .6rem}
.lead{color:var(--soft);margin:0 0 1rem;max-width:70ch}
.verdict{font-weight:600;margin:.2rem 0 1rem}
.problem{color:var(--bad);font-weight:600}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin-top:14px;
min-width:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tiles dt{color:var(--soft);font-size:.86rem}
.tiles dd{margin:0;font-size:1.45rem;font-weight:650;font-variant-numeric:tabular-nums}
.tiles small{display:block;font-size:.8rem;font-weight:400;color:var(--soft)}
.scroll{overflow-x:auto}
svg.timeline{display:block;width:100%;min-width:760px;height:auto}
svg text{fill:var(--ink);font:12.5px system-ui,sans-serif}
svg text.soft{fill:var(--soft)}svg text.name{font-weight:600;font-size:13px}
svg text.flag{font-size:12px;paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--line);stroke-width:1}
.gap{fill:var(--band)}.gap.flush{fill:var(--store);opacity:.35}
svg line.idle{stroke:var(--line);stroke-width:4}
svg rect.prefill{fill:var(--prefill)}svg rect.ram{fill:var(--ram)}svg rect.disk{fill:var(--disk)}
svg rect.answer{fill:var(--answer)}svg rect.store{fill:var(--store)}svg rect.compare{fill:url(#hatch)}
.hatch-ground{fill:var(--hatch)}.hatch-line{fill:var(--hatch2)}
svg line.pole{stroke-width:2;stroke:var(--soft)}
svg line.pole.ram{stroke:var(--ram)}svg line.pole.disk{stroke:var(--disk)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;margin:.7rem 0 0;padding:0;font-size:.9rem}
.legend i{display:inline-block;width:18px;height:11px;border-radius:2px;margin-right:7px}
i.prefill{background:var(--prefill)}i.ram{background:var(--ram)}i.disk{background:var(--disk)}
i.answer{background:var(--answer)}i.store{background:var(--store)}
i.compare{background:repeating-linear-gradient(135deg,var(--hatch) 0 3px,var(--hatch2) 3px 5px)}
i.idle{background:linear-gradient(var(--line),var(--line)) center/100% 4px no-repeat}
i.restart{background:var(--band)}
.note{color:var(--soft);font-size:.9rem;margin:.6rem 0 0}
.bars{display:grid;gap:14px}
.bars p{margin:0 0 3px;font-weight:600;font-size:.95rem}
.bar{display:flex;align-items:center;gap:8px;font-size:.9rem;font-variant-numeric:tabular-nums}
.bar+.bar{margin-top:3px}
.bar span.fill{flex:none;display:flex;height:16px;min-width:3px;border-radius:2px;overflow:hidden}
.fill i{display:block;height:100%;min-width:2px}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 8px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:170px}
th{color:var(--soft);font-weight:600;vertical-align:bottom;white-space:normal;line-height:1.25}
td.yes{color:var(--good);font-weight:600}td.no{color:var(--bad);font-weight:700}
dl.facts{display:grid;grid-template-columns:minmax(110px,190px) 1fr;gap:4px 16px;margin:0;font-size:.92rem}
dl.facts dt{color:var(--soft)}dl.facts dd{margin:0;overflow-wrap:anywhere}
details{border-top:1px solid var(--line);padding:8px 0}
summary{cursor:pointer;font-weight:600}
blockquote{margin:.3rem 0 .7rem;padding-left:12px;border-left:3px solid var(--line);overflow-wrap:anywhere}
@media(max-width:560px){h1{font-size:1.35rem}section{padding:12px}.tiles{grid-template-columns:1fr 1fr}
.tiles dd{font-size:1.2rem}dl.facts{grid-template-columns:1fr;gap:0}dl.facts dd{margin-bottom:8px}
th,td{padding:6px 7px}}
"""
