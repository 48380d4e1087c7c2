"""The style sheet of the page; every rule is confined to the report's own element."""

CSS = """
.stamppruner-report {
  --ink: #1d242b; --soft: #5b6772; --paper: #ffffff; --panel: #f4f6f8; --line: #d8dee4;
  --kept: #12466f; --removed: #b9c3cd; --warn: #8a4b00; --warn-paper: #fff4e2;
  color-scheme: light dark; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  box-sizing: border-box; max-width: 64rem; margin: 0 auto; padding: 1.25rem 1rem 3rem;
}
:root:has(> body > .stamppruner-report) { background: #ffffff; }
@media (prefers-color-scheme: dark) {
  .stamppruner-report {
    --ink: #e6eaee; --soft: #a0abb5; --paper: #15191d; --panel: #1e2429; --line: #343c44;
    --kept: #86bdea; --removed: #47525c; --warn: #ffc069; --warn-paper: #33270f;
  }
  :root:has(> body > .stamppruner-report) { background: #15191d; }
}
.stamppruner-report *, .stamppruner-report *::before { box-sizing: border-box; }
.stamppruner-report h1, .stamppruner-report h2, .stamppruner-report h3 { padding: 0; }
.stamppruner-report h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
.stamppruner-report h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
.stamppruner-report h3 { font-size: .85rem; font-weight: 500; color: var(--soft); margin: 0; }
.stamppruner-report p { margin: .2rem 0; }
.stamppruner-report header p { color: var(--soft); }
.stamppruner-report .note { color: var(--soft); font-size: .85rem; margin-top: .5rem; }
.stamppruner-report code {
  font: .9em ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  color: inherit; background: none; padding: 0;
}
.stamppruner-report pre {
  margin: 0; padding: .6rem .9rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere; color: inherit;
}
.stamppruner-report .warnings {
  color: var(--warn); background: var(--warn-paper); border-left: 4px solid currentColor;
  border-radius: 4px; margin: 1rem 0; padding: .6rem 1rem;
}
.stamppruner-report .warnings h2 { margin: 0; font-size: 1rem; }
.stamppruner-report .warnings ul { margin: .2rem 0 0; padding-left: 1.1rem; }
.stamppruner-report .warnings li { overflow-wrap: anywhere; }
.stamppruner-report .cards {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem;
  margin-top: 1.25rem;
}
.stamppruner-report .card {
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem .9rem; break-inside: avoid;
}
.stamppruner-report .card .change { font-size: 1.05rem; }
.stamppruner-report .card .change strong { font-size: 1.3rem; white-space: nowrap; }
.stamppruner-report .card p:last-child { font-size: .85rem; color: var(--soft); }
.stamppruner-report .bar {
  display: inline-block; width: 4.5rem; height: .55em; border-radius: 2px; overflow: hidden;
  background: var(--removed); vertical-align: baseline; margin-left: .3rem;
}
.stamppruner-report .card .bar { display: block; width: 100%; height: .5rem; margin: .3rem 0; }
.stamppruner-report .bar i { display: block; height: 100%; background: var(--kept); }
.stamppruner-report .wide { overflow-x: auto; }
.stamppruner-report table {
  border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums;
  color: inherit; margin: 0;
}
.stamppruner-report tr, .stamppruner-report tbody tr:nth-child(n) { background: none; }
.stamppruner-report th, .stamppruner-report td {
  padding: .28rem .7rem; text-align: right; vertical-align: top; white-space: nowrap;
  border: 0; border-bottom: 1px solid var(--line);
}
.stamppruner-report thead th { color: var(--soft); font-weight: 500; }
.stamppruner-report th:first-child { text-align: left; padding-left: 0; font-weight: 500; }
.stamppruner-report table.layers { width: 100%; }
.stamppruner-report .layers th:nth-child(2), .stamppruner-report .layers td:nth-child(2),
.stamppruner-report .words th, .stamppruner-report .words td { text-align: left; }
.stamppruner-report .layers th:first-child, .stamppruner-report .words th:first-child {
  white-space: normal; overflow-wrap: anywhere; min-width: 8.5rem; max-width: 17rem;
}
.stamppruner-report .words td { white-space: normal; overflow-wrap: anywhere; }
.stamppruner-report .same { color: var(--soft); }
.stamppruner-report .networks .same { display: block; }
.stamppruner-report .networks thead th { white-space: normal; vertical-align: bottom; }
.stamppruner-report .networks th:first-child { white-space: normal; min-width: 6rem; }
.stamppruner-report .over { color: var(--warn); font-weight: 600; }
.stamppruner-report .within { color: var(--soft); }
.stamppruner-report svg { display: block; overflow: hidden; break-inside: avoid; }
.stamppruner-report svg svg { display: inline; }
.stamppruner-report svg .kept { fill: var(--kept); }
.stamppruner-report svg .removed { fill: var(--removed); }
.stamppruner-report svg text { fill: var(--ink); }
.stamppruner-report svg .share { fill: var(--soft); }
.stamppruner-report .plot .tick { fill: var(--soft); }
.stamppruner-report .plot .mark { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
.stamppruner-report .plot .grid { stroke: var(--line); }
.stamppruner-report .plot .axis { stroke: var(--soft); }
.stamppruner-report .plot .first { color: var(--kept); }
.stamppruner-report .plot .second { color: var(--warn); }
.stamppruner-report .plot .reference { color: var(--ink); }
@media screen and (max-width: 34rem) {
  .stamppruner-report th, .stamppruner-report td { padding: .28rem .4rem; }
  .stamppruner-report .cards { grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); }
  .stamppruner-report .pairs th { white-space: normal; }
  .stamppruner-report .layers tr > :nth-child(2), .stamppruner-report .layers tr > :nth-child(3),
  .stamppruner-report .layers tr > :nth-child(5), .stamppruner-report .layers tr > :nth-child(6),
  .stamppruner-report .layers .bar { display: none; }
  .stamppruner-report .networks th:first-child {
    position: sticky; left: 0; background: var(--paper); max-width: 7rem; overflow-wrap: anywhere;
  }
  .stamppruner-report svg text { font-size: 10px; }
  .stamppruner-report svg .share, .stamppruner-report svg .long { display: none; }
  .stamppruner-report svg .short { display: inline; }
}
@media print {
  .stamppruner-report {
    --ink: #000000; --soft: #444444; --paper: #ffffff; --panel: #ffffff; --line: #bbbbbb;
    --kept: #12466f; --removed: #b9c3cd; --warn: #6b3a00; --warn-paper: #ffffff;
    font-size: 10pt; line-height: 1.35; max-width: none; padding: 0; print-color-adjust: exact;
    -webkit-print-color-adjust: exact;
  }
  :root:has(> body > .stamppruner-report) { background: #ffffff; }
  .stamppruner-report .cards { grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); }
  .stamppruner-report h2, .stamppruner-report h2 + p { break-after: avoid; }
  .stamppruner-report tr { break-inside: avoid; }
  .stamppruner-report .wide { overflow: visible; }
  .stamppruner-report table { font-size: .9em; }
  .stamppruner-report .layers tr > *, .stamppruner-report .networks tr > * {
    padding: .15rem .35rem;
  }
  .stamppruner-report table tr > th:first-child { padding-left: 0; }
  .stamppruner-report .layers .bar { width: 2.5rem; }
}
"""
