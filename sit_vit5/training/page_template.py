"""The frame of run.html: what is said around the values, and its style."""

from sit_vit5.page import document

_STYLE = """
.state { font-weight: 600; font-size: .85rem; padding: 1px 10px; border-radius: 99px;
  border: 1px solid; color: var(--accent); }
.state.finished { color: var(--good); }
.state.failed { color: var(--bad); }
.state.interrupted { color: var(--warn); }
progress { display: block; width: 100%; height: 8px; margin: 14px 0; accent-color: var(--accent); }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 14px; }
.grids { display: flex; flex-wrap: wrap; gap: 18px; }
.grids figure { max-width: min(100%, 520px); }
.curves figure { background: var(--card); border-radius: 8px; padding: 10px 10px 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
@media (max-width: 600px) { svg text { font-size: 17px; } }
.grid { stroke: var(--rule); fill: none; }
.curve, .mean { stroke: var(--accent); stroke-linejoin: round; stroke-linecap: round; fill: none; }
.curve { stroke-width: 1; opacity: .35; }
.mean { stroke-width: 2; }
.mark { stroke: var(--warn); stroke-width: 1.5; stroke-dasharray: 4 4; fill: none; }
.beside { stroke: var(--good); stroke-width: 1.5; stroke-dasharray: 6 4; fill: none; }
.dot { fill: var(--good); }
.hover rect { fill: transparent; }
.hover circle { fill: none; }
.hover:hover circle { fill: var(--accent); }
.events td:nth-child(-n+3) { white-space: nowrap; font-variant-numeric: tabular-nums; }
.events td:nth-child(4) { min-width: 240px; }
.warning td:nth-child(3), .skipped td:nth-child(3), .interrupted td:nth-child(3) {
  color: var(--warn); }
.failed td:nth-child(3) { color: var(--bad); }
.started td:nth-child(3), .resumed td:nth-child(3) { color: var(--accent); }
.done td:nth-child(3) { color: var(--good); }
"""

# `$name` and the like are filled in, escaped already.
_BODY = """\
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
</details>"""

PAGE = document(title="$name: $state", style=_STYLE, body=_BODY)
