"""The frame of report.html: one file without scripts or network, light or dark as the reader's system is."""

from html import escape

# Nothing is loaded and no script runs, even if a model's text should ever slip through unescaped.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --page: #f6f6f3; --card: #fcfcfb; --ink: #1b1b19; --soft: #5c5b56; --line: #e1e0da;
  --s1: #2a78d6; --s2: #d95926; --s3: #1b9e77; --s4: #d99a00; --s5: #7b5cc9;
  --good: #0b7a3b; --bad: #c22f2f; --warn: #8a5a00; --model: #eaf2fc; }
@media (prefers-color-scheme: dark) { :root { --page: #131312; --card: #1c1c1a; --ink: #f0efe9; --soft: #a9a8a0;
  --line: #34342f; --s1: #5598e7; --s2: #e8764a; --s3: #2fb58d; --s4: #d9a62e; --s5: #9d85e6;
  --good: #4fc583; --bad: #f07b7b; --warn: #e0b050; --model: #1a2738; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 64px; max-width: 1400px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 26px; margin: 0 0 12px; overflow-wrap: anywhere; } h2 { font-size: 19px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 0; } h4 { font-size: 14px; margin: 0; } p { margin: 0 0 8px; }
figure, article, dl.metrics, dl.tiles > div { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
dl { margin: 0; } dt { color: var(--soft); } dd { margin: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; } .tiles > div { padding: 10px 16px; }
.tiles dt { font-size: 13px; } .tiles dd { font-size: 20px; font-weight: 600; white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px 8px; min-width: 0; } figcaption { font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 12.5px; color: var(--soft); min-height: 20px; }
.legend b, .facts b { color: var(--ink); font-weight: 600; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px;
  background: var(--c); }
.s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); } .s4 { --c: var(--s4); }
.s5 { --c: var(--s5); }
svg { display: block; width: 100%; height: auto; margin-top: 4px; }
svg text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.dense { stroke-width: 1; } .dashed { stroke-width: 1.5; stroke-dasharray: 2 5; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 2; } .bar { fill: var(--c); }
.tip { display: none; pointer-events: none; } .hover:hover .tip { display: inline; }
.tip line { stroke: var(--soft); stroke-width: 1; } .tip rect { fill: var(--card); stroke: var(--soft); }
svg .tip text { fill: var(--ink); }
.metrics { padding: 12px 16px; columns: 300px; column-gap: 36px; font-size: 13px; }
.metrics > div { display: flex; justify-content: space-between; gap: 12px; break-inside: avoid; padding: 2px 0;
  border-bottom: 1px solid var(--line); }
.metrics dd { font-variant-numeric: tabular-nums; white-space: nowrap; } .metrics dt { overflow-wrap: anywhere; }
.pair { margin-bottom: 20px; } .pair > summary { font-weight: 600; cursor: pointer; padding: 6px 0; }
.sides { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; align-items: start; }
@media (max-width: 800px) { .sides { grid-template-columns: minmax(0, 1fr); } }
article { padding: 12px 16px; } article > p { margin: 4px 0; }
.facts { color: var(--soft); font-size: 13px; } .id { color: var(--soft); font: 12px ui-monospace, monospace;
  overflow-wrap: anywhere; }
.chip { display: inline-block; font-size: 12px; font-weight: 600; padding: 0 8px; border: 1px solid currentColor;
  border-radius: 10px; color: var(--soft); margin-right: 6px; }
.chip.good { color: var(--good); } .chip.bad { color: var(--bad); } .chip.warn { color: var(--warn); }
h4 .chip { margin-left: 6px; }
.step { border-top: 1px solid var(--line); margin-top: 12px; padding-top: 10px; } .step .facts { margin: 0 0 4px; }
.said { display: grid; grid-template-columns: 130px minmax(0, 1fr); gap: 10px; padding: 3px 8px; border-radius: 6px;
  margin: 2px -8px; font-size: 13px; } .said.model { background: var(--model); }
.said > span { color: var(--soft); font-size: 12.5px; } .said p, .said pre { margin: 0; }
pre { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 28em; overflow-y: auto; margin: 4px 0; }
.none { color: var(--soft); font-style: italic; font-size: 13px; margin: 0; } .error { color: var(--bad); }
@media (max-width: 500px) { .said { grid-template-columns: minmax(0, 1fr); gap: 0; } }
"""


def render_page(title: str, body: str) -> str:
    """The whole document; `body` is HTML, `title` is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · training report</title><style>{STYLE}</style></head>\n<body>{body}</body></html>\n"
    )
