"""The style sheet of the page: light and dark themes, phones and paper. Text only."""

from __future__ import annotations

from whale.planner.report.colours import BLUE, ORANGE, PAINT, SKY, VERMILION

__all__ = ["STYLE"]

_LIGHT = (
    "--page:#fff;--ink:#1b1f24;--quiet:#59636e;--rule:#d5dae0;--idle:#e9ecef;--panel:#f6f8fa"
    f";--over:#b54708;--dot:{BLUE}"
)
_DARK = (
    "--page:#14171c;--ink:#e8ebee;--quiet:#a3adb8;--rule:#3a414a;--idle:#2a2f37;--panel:#1b2027"
    f";--over:#ff9b5c;--dot:{SKY}"
)

_PAINT = "".join(f".{name}{{fill:{colour};background:{colour}}}\n" for name, colour in PAINT.items())

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box;print-color-adjust:exact;-webkit-print-color-adjust:exact}}
body{{margin:0 auto;padding:1.5rem 1rem 4rem;max-width:70rem;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}
h1{{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem;overflow-wrap:anywhere}}
h2{{font-size:1.2rem;margin:2.5rem 0 .25rem}}
p{{margin:.4rem 0;max-width:50rem;overflow-wrap:anywhere}}
a{{color:inherit}}
nav{{display:flex;flex-wrap:wrap;gap:.25rem 1rem;margin:.75rem 0;font-size:.9rem}}
dl{{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.5rem;margin:1rem 0}}
dl div{{background:var(--panel);border:1px solid var(--rule);border-radius:6px;padding:.5rem .75rem}}
dt{{font-size:.8rem;color:var(--quiet)}}
dd{{margin:0;font-size:1.05rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}}
dd small{{display:block;color:var(--quiet);font-size:.8rem}}
.note{{border-left:4px solid var(--over);padding:.25rem .75rem;background:var(--panel)}}
.scroll{{overflow-x:auto;margin:.75rem 0}}
.picture{{display:block;width:100%;min-width:46rem;height:auto;
 font:11px/1 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-variant-numeric:tabular-nums}}
.picture :where(text:not([fill])){{fill:var(--ink)}}
.picture .quiet{{fill:var(--quiet)}}
.picture .strong{{font-weight:600}}
.picture .over{{fill:var(--over);font-weight:600}}
.picture .in{{font-size:9px}}
.grid{{stroke:var(--rule);stroke-width:.5}}
.limit{{stroke:var(--ink);stroke-width:1.5;fill:none}}
.bound{{stroke:var(--quiet);stroke-dasharray:4 3}}
{_PAINT}.idle{{fill:var(--idle);background:var(--idle)}}
.awaited{{fill:{ORANGE};fill-opacity:.4;background:{ORANGE}66}}
.box{{stroke:var(--page);stroke-width:.5}}
.swatch{{stroke:var(--quiet);stroke-width:.75}}
.node{{fill:var(--panel);stroke:var(--rule)}}
.unused{{fill:none;stroke:var(--quiet);stroke-dasharray:3 3}}
.fits{{fill:var(--dot);fill-opacity:.8;stroke:var(--page);stroke-width:.5}}
.refused{{stroke:var(--quiet);stroke-width:1;stroke-opacity:.55;fill:none}}
.front{{stroke:var(--dot);stroke-width:1.5;fill:none}}
.candidate{{fill:none;stroke:var(--ink);stroke-width:1.5}}
.best{{fill:{VERMILION};stroke:var(--ink);stroke-width:1.5}}
.legend{{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;padding:0;margin:.5rem 0;font-size:.85rem}}
.legend .colour{{display:inline-block;width:.85rem;height:.85rem;border-radius:2px;border:1px solid var(--rule);
 margin-right:.35rem;vertical-align:-.1rem}}
.key{{width:.9rem;height:.9rem;vertical-align:-.1rem}}
table{{border-collapse:collapse;font-size:.85rem;width:100%}}
caption{{text-align:left;font-weight:600;padding:.25rem 0}}
th,td{{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid var(--rule)}}
th{{color:var(--quiet);font-weight:600}}
td{{min-width:3rem;overflow-wrap:break-word}}
.long{{min-width:15rem}}
.number{{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}}
footer{{margin-top:3rem;color:var(--quiet);font-size:.8rem}}
@media print{{:root{{color-scheme:light;{_LIGHT}}}
 body{{max-width:none;padding:0;font-size:10pt}}nav{{display:none}}.scroll{{overflow:visible}}.picture,table,.long{{min-width:0}}
 h2{{break-after:avoid}}tr,dl div{{break-inside:avoid}}}}
"""
