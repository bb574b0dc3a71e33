"""Holds the script of the page, which shows the numbers of the step at the pointer, in all charts at once."""

from __future__ import annotations

SCRIPT = """
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = Array.from(document.querySelectorAll("svg[data-name]"));
  const tip = document.getElementById("tip");
  const rows = data.rows, speeds = data.speeds, span = Math.max(data.high - data.low, 1);
  let at = rows.length - 1;

  const short = v => v === null ? "-" : String(Number(v.toPrecision(5)));
  const power = v => { const p = Math.log2(v); return v >= 1024 && Number.isInteger(p) ? "2^" + p : short(v); };
  const range = (low, high, how) => low === high ? how(low) : how(low) + " to " + how(high);

  function nearest(list, place, from, to) {
    let low = 0, high = list.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle][to] < place) low = middle + 1; else high = middle;
    }
    const before = list[low - 1];
    if (before && place - before[to] < list[low][from] - place) low -= 1;
    return low;
  }

  function words(row) {
    const [first, last, step, low, mean, high, scaleLow, scaleHigh, rate, skipped, bad, precision, recorded] = row;
    const many = last > first, lines = ["step " + step + (many ? "  (" + (last - first + 1) + " steps)" : "")];
    if (mean !== null) {
      const kind = recorded > 1 ? ", mean of " + recorded + " steps" : "";
      lines.push("loss " + short(mean) + kind + (low < high ? "  (" + range(low, high, short) + ")" : ""));
    }
    if (bad) lines.push("loss not finite in " + bad + (bad > 1 ? " steps" : " step"));
    if (scaleLow !== null) lines.push("loss scale " + range(scaleLow, scaleHigh, power));
    if (skipped) lines.push("skipped " + skipped + (skipped > 1 ? " steps" : " step"));
    if (rate !== null) lines.push("learning rate " + short(rate));
    const speed = speeds[nearest(speeds, last, 0, 1)];
    if (speed) lines.push(short(Number(speed[2].toPrecision(3))) + " steps/s");
    if (precision) lines.push(precision);
    const done = data.evaluations.filter(one => one[0] <= last);
    if (done.length) lines.push(done[done.length - 1][1]);
    return lines.join("\\n");
  }

  function show(left, top) {
    const row = rows[at], x = data.left + ((row[0] + row[1]) / 2 - data.low) / span * (data.right - data.left);
    for (const svg of charts) {
      const edge = "M" + x.toFixed(1) + " " + svg.dataset.top + "V" + svg.dataset.bottom;
      svg.querySelector(".pointer").setAttribute("d", edge);
    }
    tip.textContent = words(row);
    tip.hidden = false;
    const width = tip.offsetWidth, height = tip.offsetHeight;
    tip.style.left = Math.max(4, left + 16 + width > innerWidth ? left - width - 16 : left + 16) + "px";
    tip.style.top = Math.max(4, Math.min(top + 14, innerHeight - height - 4)) + "px";
  }

  function hide() {
    tip.hidden = true;
    for (const svg of charts) svg.querySelector(".pointer").setAttribute("d", "");
  }

  for (const svg of charts) {
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * data.width;
      const place = data.low + (x - data.left) / (data.right - data.left) * span;
      at = nearest(rows, place, 0, 1);
      show(event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -rows.length, End: rows.length };
      if (event.key === "Escape") hide();
      if (!(event.key in move)) return;
      event.preventDefault();
      at = Math.max(0, Math.min(rows.length - 1, at + move[event.key]));
      const box = svg.getBoundingClientRect();
      show(box.left + data.left / data.width * box.width, box.top);
    });
  }
})();
"""
