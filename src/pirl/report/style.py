"""How the page looks, and what it does under the pointer."""

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart. Two of them change with the
# ground: the dark blue is lost on black, the sky blue takes its place and yellow that of the sky blue.
STYLE = """
:root{color-scheme:light dark;--paper:#fdfdfc;--ink:#1c1e21;--soft:#63686f;--hair:#e4e4e0;--well:#f4f4f1;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#e69f00;--c5:#56b4e9;--good:#007d5b;--bad:#c04f00}
@media(prefers-color-scheme:dark){:root{--paper:#141618;--ink:#e8e6e1;--soft:#9aa0a6;--hair:#2d3135;--well:#1c1f22;
--c0:#56b4e9;--c1:#ee7a26;--c2:#1fb98d;--c5:#f0e442;--good:#2cc79b;--bad:#f08a3c}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.6 Inter,system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main{max-width:1040px;margin:0 auto;padding:72px 32px 96px}
header{max-width:800px}
h1{font-size:38px;line-height:1.15;letter-spacing:-.02em;font-weight:650;margin:0 0 20px}
h2{font-size:23px;line-height:1.3;letter-spacing:-.01em;font-weight:620;margin:0 0 10px}
h3{font-size:15px;font-weight:600;margin:0 0 10px}
.lead{font-size:20px;line-height:1.5;margin:0}
.subtitle{color:var(--soft);font-size:14px;margin:0 0 10px}
section{margin-top:72px}
section>p{max-width:720px;color:var(--soft);margin:0 0 24px}
figure{margin:0 0 36px}
figcaption{font-size:13.5px;line-height:1.5;color:var(--soft);max-width:720px;margin-top:10px}
svg{display:block;overflow:visible}
svg text{font-size:12px;fill:var(--soft)}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}
.plot{padding:6px 14px 40px 52px}
.grid{stroke:var(--hair)}.axis{stroke:var(--soft);opacity:.6}
text.y{text-anchor:end}text.x{text-anchor:middle}text.label{text-anchor:end;font-style:italic}
text.empty{text-anchor:middle;font-style:italic}
.lines *{vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round;fill:none}
.line{stroke:currentColor;stroke-width:1.8}
.line.faint{stroke-width:1;opacity:.3}
.line.dashed{stroke-dasharray:7 5}
.legend i.dashed{background:linear-gradient(90deg,currentColor 40%,transparent 40% 60%,currentColor 60%)}
.line.dotted{stroke-dasharray:1 5}
.dots{stroke:currentColor;stroke-width:6}
.lines .band{fill:currentColor;opacity:.15}
.whisker{stroke:currentColor;stroke-width:2;opacity:.5}
.mark line{stroke:currentColor;stroke-width:2}.mark text{text-anchor:end;fill:currentColor;font-weight:600}
.rollback line{stroke-dasharray:5 4}
.legend i.rollback{width:0;height:14px;border-left:2px dashed;background:none;border-radius:0}
.legend i.skipped{width:2px;height:9px;border-radius:0}.legend i.rollback,.legend i.skipped{color:var(--soft)}
.good{color:var(--good)}.bad{color:var(--bad)}
.bar-row{display:grid;grid-template:"label bar value"/210px 1fr 118px;column-gap:18px;align-items:center}
.bar-row>svg{grid-area:bar}.bar-label{grid-area:label}.bar-value{grid-area:value}
.bar-label,.bar-value{padding:3px 0;line-height:1.25;font-weight:600;font-size:15px}
.bar-value{text-align:right;white-space:nowrap}
.bars small{display:block;font-weight:400;font-size:12.5px;color:var(--soft)}
.bar rect{fill:currentColor;opacity:.88}
.bar .rest,.legend i.rest{color:var(--soft);opacity:.35}
.interval line{stroke:var(--ink);stroke-width:2;stroke-linecap:round}
.panels{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:28px 40px}
.panels figure{margin:0 0 12px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 22px;margin:0 0 22px;padding:10px 0;font-size:14px;
position:sticky;top:0;background:var(--paper);border-bottom:1px solid var(--hair);z-index:1}
.legend i{display:inline-block;width:18px;height:4px;border-radius:2px;background:currentColor;margin-right:8px;
vertical-align:middle}
.legend .note{color:var(--soft);font-style:italic}
table{border-collapse:collapse;width:100%;font-size:14px;line-height:1.4}
th,td{text-align:left;padding:9px 14px 9px 0;border-bottom:1px solid var(--hair);vertical-align:top;font-weight:400;
overflow-wrap:anywhere}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--soft);font-size:12.5px;vertical-align:bottom;overflow-wrap:normal}
tbody th{font-weight:600;overflow-wrap:normal}
.number{text-align:right;white-space:nowrap}
thead .number{white-space:normal}
.short{white-space:nowrap}
details{margin-top:36px}summary{cursor:pointer;color:var(--soft);font-size:14px;margin-bottom:14px}
.strip{display:grid;grid-auto-flow:column;grid-auto-columns:1fr;gap:2px}
.strip img{display:block;width:100%;max-height:150px;object-fit:contain}
.strip-frame{border-bottom:3px solid currentColor;margin-bottom:28px}
.code{position:relative;background:var(--well);border:1px solid var(--hair);border-radius:8px;margin-bottom:36px}
pre{margin:0;padding:18px 20px;overflow-x:auto;font:13.5px/1.65 ui-monospace,SFMono-Regular,Menlo,Consolas,
"DejaVu Sans Mono",monospace}
button{position:absolute;top:10px;right:10px;font:inherit;font-size:12.5px;padding:2px 10px;color:var(--soft);
background:var(--paper);border:1px solid var(--hair);border-radius:6px;cursor:pointer}
button:hover,button:focus-visible{color:var(--ink)}
#tip{position:fixed;pointer-events:none;background:var(--paper);border:1px solid var(--hair);border-radius:6px;
padding:6px 10px;font-size:12.5px;line-height:1.5;box-shadow:0 4px 16px #0002;z-index:2;white-space:nowrap}
#tip i{display:inline-block;width:8px;height:8px;border-radius:4px;background:currentColor;margin-right:7px}
@media(max-width:720px){
main{padding:40px 18px 64px}h1{font-size:29px}.lead{font-size:17.5px}section{margin-top:56px}
.panels{grid-template-columns:minmax(0,1fr)}.plot{padding-left:46px;padding-right:8px}
.bar-row{grid-template:"label value" "bar bar"/1fr auto;padding-bottom:8px}
.thirds img:not(:nth-child(3n+2)){display:none}
pre{padding-top:46px}
thead{display:none}table,tbody,tr,th,td{display:block}
tr{padding:14px 0;border-bottom:1px solid var(--hair)}
tbody th,tbody td{border:0;padding:2px 0;text-align:left;white-space:normal}
tbody th{font-size:15px}
tbody td{display:flex;justify-content:space-between;gap:20px;text-align:right}
tbody td[data-empty]{display:none}
tbody td::before{content:attr(data-label);color:var(--soft);text-align:left;flex:none}
tbody td[data-label=""],tbody td[data-label="What it is"]{display:block;text-align:left;color:var(--soft)}
tbody td[data-label="What it is"]::before{content:none}
}
"""

# A button beside what is to be copied, and the values under the pointer, read back from the drawn lines.
SCRIPT = """
for (const block of navigator.clipboard ? document.querySelectorAll('.code') : []) {
  const button = block.appendChild(document.createElement('button'));
  button.textContent = 'Copy';
  button.onclick = () => navigator.clipboard.writeText(block.querySelector('code').textContent)
    .then(() => { button.textContent = 'Copied'; });
}
const tip = document.createElement('div');
tip.id = 'tip';
const show = value => Number(value.toPrecision(4)).toLocaleString('en', {maximumSignificantDigits: 4});
for (const chart of document.querySelectorAll('svg.chart')) {
  const [x0, x1] = chart.dataset.x.split(' ').map(Number), [y0, y1] = chart.dataset.y.split(' ').map(Number);
  const between = (low, high, y) => high - y / 1000 * (high - low);
  const value = y => chart.dataset.log === '1' ? 10 ** between(Math.log10(y0), Math.log10(y1), y) : between(y0, y1, y);
  const lines = new Map();
  for (const line of chart.querySelectorAll('.line:not(.faint), .dots')) {
    const text = line.getAttribute('points') || line.getAttribute('d').replace(/M|h0/g, ' ');
    const points = text.trim().split(/\\s+/).map(point => point.split(',').map(Number));
    const found = lines.get(line.dataset.name) || {line, points: []};
    found.points.push(...points);
    lines.set(line.dataset.name, found);
  }
  chart.onpointermove = event => {
    const box = chart.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * 1000;
    const near = [...lines].map(([name, {line, points}]) =>
      [name, line, points.reduce((a, b) => Math.abs(a[0] - at) <= Math.abs(b[0] - at) ? a : b)]);
    if (!near.length || at < -20 || at > 1020) return tip.remove();
    const x = Math.min(...near.map(([, , point]) => Math.abs(point[0] - at)));
    const rows = near.filter(([, , point]) => Math.abs(point[0] - at) <= x + 20);
    tip.replaceChildren(`${chart.dataset.unit} ${show(x0 + rows[0][2][0] / 1000 * (x1 - x0))}`);
    for (const [name, line, point] of rows) {
      const row = tip.appendChild(document.createElement('div'));
      row.append(document.createElement('i'), `${name}: ${show(value(point[1]))}`);
      row.firstChild.style.color = getComputedStyle(line).color;
    }
    document.body.append(tip);
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + 'px';
  };
  chart.onpointerleave = () => tip.remove();
}
"""
