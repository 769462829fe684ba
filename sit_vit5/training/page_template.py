"""The frame of run.html: what is said around the values, and its style."""

STYLE = """
:root { --paper: #fff; --card: #f5f6f8; --ink: #1c1f24; --soft: #646b76; --rule: #d9dde3;
  --accent: #2563c9; --good: #1a7f45; --bad: #b3261e; --warn: #9a5b00; --mark: #fff0b8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --card: #1d2127; --ink: #e6e8eb; --soft: #98a0ab; --rule: #343a43;
    --accent: #7fb0ff; --good: #5fd08f; --bad: #ff8a80; --warn: #f0b75a; --mark: #4d421a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 20px 16px 48px; color: var(--ink);
  background: var(--paper); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 36px 0 10px; }
header { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: baseline; }
header p, figcaption, dt, th, .soft { color: var(--soft); font-size: .85rem; }
header p { margin: 0; }
.state { font-weight: 600; font-size: .85rem; padding: 1px 10px; border-radius: 99px;
  border: 1px solid; color: var(--accent); }
.state.finished { color: var(--good); }
.state.failed { color: var(--bad); }
.state.interrupted { color: var(--warn); }
progress { display: block; width: 100%; height: 8px; margin: 14px 0; accent-color: var(--accent); }
dl { margin: 0; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; }
.numbers div { background: var(--card); border-radius: 8px; padding: 8px 12px; }
.numbers dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.facts { margin-top: 14px; }
.facts div { display: flex; gap: 10px; }
.facts dt { flex: 0 0 70px; line-height: 1.6; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 14px; }
.grids { display: flex; flex-wrap: wrap; gap: 18px; }
.grids figure { max-width: min(100%, 520px); }
figure { margin: 0; min-width: 0; }
.curves figure { background: var(--card); border-radius: 8px; padding: 10px 10px 4px; }
figcaption { margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
@media (max-width: 600px) { svg text { font-size: 17px; } }
.grid { stroke: var(--rule); fill: none; }
.curve, .mean { stroke: var(--accent); stroke-linejoin: round; stroke-linecap: round; fill: none; }
.curve { stroke-width: 1; opacity: .35; }
.mean { stroke-width: 2; }
.mark { stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 4 4; fill: none; }
.hover rect { fill: transparent; }
.hover circle { fill: none; }
.hover:hover circle { fill: var(--accent); }
img { max-width: 100%; border-radius: 6px; }
a { color: var(--accent); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; font-weight: 500; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  overflow-wrap: anywhere; }
.events td:nth-child(-n+3) { white-space: nowrap; font-variant-numeric: tabular-nums; }
.events td:nth-child(4) { min-width: 240px; }
.warning td:nth-child(3), .skipped td:nth-child(3), .interrupted td:nth-child(3) {
  color: var(--warn); }
.failed td:nth-child(3) { color: var(--bad); }
.started td:nth-child(3), .resumed td:nth-child(3) { color: var(--accent); }
.done td:nth-child(3) { color: var(--good); }
pre { background: var(--card); border-radius: 8px; padding: 10px 12px; overflow-x: auto;
  font-size: .84rem; line-height: 1.5; margin: 8px 0; }
mark { background: var(--mark); color: inherit; border-radius: 3px; padding: 0 3px; }
summary { cursor: pointer; margin-top: 12px; }
"""

# `$name` and the like are filled in, escaped already.
PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$name: $state</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>$name</h1><span class="state $state">$state</span><p>written $written</p></header>
<progress value="$progress" max="1"></progress>
<dl class="numbers">
$numbers
</dl>
<dl class="facts">
$facts
</dl>
<h2>Curves</h2>
<p class="soft">every row of metrics.jsonl, of long runs the span; the thick line is a mean over up
to a hundredth of the run; dashed: resumed</p>
<div class="curves">
$curves
</div>
<h2>Grids</h2>
$grids
<h2>Commands</h2>
<p class="soft">to continue, draw, sample and evaluate, from the folder the run was started in</p>
<pre>$commands</pre>
<h2>Events</h2>
<div class="scroll"><table class="events">
<tr><th>step</th><th>time</th><th>kind</th><th>what</th></tr>
$events
</table></div>
<h2>Configuration</h2>
<div class="scroll"><table>
<tr><th>option that differs</th><th>value</th><th>default</th></tr>
$changes
</table></div>
<details><summary>all of it</summary>
<pre>$config</pre>
</details>
</body>
</html>
"""
