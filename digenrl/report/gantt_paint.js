// Paints the timeline. Stale work is striped, help has a thick edge, bubbles are dotted: never color alone.

const ROW = { heading: 24, foot: 26, top: 20, left: 118, leftNarrow: 74, right: 52 };

function ganttColors() {
  const names = ["paper", "ink", "faint", "rule", "idle-paper", "idle-dot", "elsewhere", "block-edge", "dark-edge",
    "help-edge", "chosen", "accent"];
  return Object.fromEntries(names.map((name) => [name, color(name)]));
}

// A repeating pattern; `draw` paints one tile.
function tile(size, draw) {
  const canvas = document.createElement("canvas");
  const ratio = window.devicePixelRatio || 1;
  const pen = sharpPen(canvas, size, size);
  draw(pen, size);
  const pattern = pen.createPattern(canvas, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

function idlePattern(colors) {
  return tile(6, (pen, size) => {
    pen.fillStyle = colors["idle-paper"];
    pen.fillRect(0, 0, size, size);
    pen.fillStyle = colors["idle-dot"];
    pen.beginPath();
    pen.arc(3, 3, 0.9, 0, 7);
    pen.fill();
  });
}

function stripes(fill) {
  return tile(8, (pen, size) => {
    pen.fillStyle = fill;
    pen.fillRect(0, 0, size, size);
    pen.strokeStyle = "#ffffff";
    pen.lineWidth = 2;
    pen.beginPath();
    for (const shift of [-size, 0, size]) {
      pen.moveTo(shift - 1, size + 1);
      pen.lineTo(shift + size + 1, -1);
    }
    pen.stroke();
  });
}

function ganttPaints(kinds) {
  const colors = ganttColors();
  return {
    colors,
    idle: idlePattern(colors),
    fills: kinds.map((kind) => (kind.stale ? stripes(kind.fill) : kind.fill)),
    dark: kinds.map((kind) => isDark(kind.fill)),
  };
}

// Very dark fills would be invisible on a dark background without an edge.
function isDark(hex) {
  const value = parseInt(hex.slice(1), 16);
  return (value >> 16) + ((value >> 8) & 255) + (value & 255) < 240;
}

// One block of work: fill, edge, and what marks stale and helped work.
function paintBlock(pen, paints, kind, place, x, y, width, height) {
  pen.fillStyle = paints.fills[place];
  pen.fillRect(x, y, width, height);
  if (width < 3) return;
  pen.lineWidth = 1;
  pen.strokeStyle = paints.dark[place] ? paints.colors["dark-edge"] : paints.colors["block-edge"];
  if (kind.helped) {
    pen.lineWidth = 2;
    pen.strokeStyle = paints.colors["help-edge"];
    pen.strokeRect(x + 1, y + 1, width - 2, height - 2);
  } else {
    pen.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  }
}

// Rows from top to bottom: a heading for each pool, then its lanes.
function ganttRows(lanes) {
  const pitch = lanes.length <= 24 ? 26 : lanes.length <= 60 ? 18 : 13;
  const rows = [];
  let y = ROW.top;
  let pool = null;
  for (const lane of lanes) {
    if (lane.pool !== pool) {
      pool = lane.pool;
      rows.push({ heading: pool, y });
      y += ROW.heading;
    }
    rows.push({ lane, y, height: pitch - 4 });
    y += pitch;
  }
  return { rows, bottom: y + 2, height: y + 2 + ROW.foot };
}

// The extent of the plot in a canvas of this width: names on the left, shares on the right.
function plotWithin(width) {
  const narrow = width < 640;
  return { left: narrow ? ROW.leftNarrow : ROW.left, right: width - (narrow ? 4 : ROW.right), narrow };
}

// Paints all visible work off screen; `presentGantt` then shows it.
function paintGantt(gantt) {
  const { canvas, layout } = gantt;
  const width = canvas.clientWidth;
  if (!width) return;
  gantt.plot = plotWithin(width);
  // In seconds, for tests.
  canvas.dataset.from = gantt.view.from / 1e6;
  canvas.dataset.to = gantt.view.to / 1e6;
  canvas.style.height = `${layout.height}px`;
  const pen = sharpPen(gantt.painted, width, layout.height);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  paintAxis(gantt, pen);
  for (const row of layout.rows) {
    if (row.heading !== undefined) paintHeading(gantt, pen, row);
    else paintLane(gantt, pen, row);
  }
  paintCommits(gantt, pen);
  pen.fillStyle = gantt.paints.colors.faint;
  pen.fillRect(gantt.plot.left, layout.bottom, gantt.plot.right - gantt.plot.left, 1);
  presentGantt(gantt);
}

// Shows what was painted, with the chosen work marked: cheap enough to follow the pointer.
function presentGantt(gantt) {
  const { canvas, painted, layout } = gantt;
  const pen = sharpPen(canvas, canvas.clientWidth, layout.height);
  pen.drawImage(painted, 0, 0, canvas.clientWidth, layout.height);
  if (gantt.chosen) paintChosen(gantt, pen);
}

function xOf(gantt, time) {
  const { left, right } = gantt.plot;
  return left + ((time - gantt.view.from) / (gantt.view.to - gantt.view.from)) * (right - left);
}

function timeOf(gantt, x) {
  const { left, right } = gantt.plot;
  return gantt.view.from + ((x - left) / (right - left)) * (gantt.view.to - gantt.view.from);
}

function paintAxis(gantt, pen) {
  const { view, layout, paints, plot } = gantt;
  const most = Math.max(2, Math.floor((plot.right - plot.left) / 90));
  const step = (gantt.end < LONG_RUN ? roundStep : roundTimeStep)(view.to - view.from, most);
  pen.textAlign = "center";
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
    const x = Math.round(xOf(gantt, time)) + 0.5;
    pen.fillStyle = paints.colors.rule;
    pen.fillRect(x - 0.5, ROW.top, 1, layout.bottom - ROW.top + 5);
    pen.fillStyle = paints.colors.faint;
    pen.fillText(clock(time, step, gantt.end >= LONG_RUN), x, layout.bottom + 15);
  }
  pen.textAlign = "left";
  pen.fillText(gantt.end < LONG_RUN ? "seconds" : "h:mm:ss", 0, layout.bottom + 15);
}

function paintHeading(gantt, pen, row) {
  pen.textAlign = "left";
  pen.fillStyle = gantt.paints.colors.ink;
  pen.save();
  pen.font = pen.font.replace(/^/, "600 ");
  pen.fillText(row.heading, 0, row.y + ROW.heading - 9);
  pen.restore();
}

function paintLane(gantt, pen, row) {
  const { lane, y, height } = row;
  const { view, plot, paints } = gantt;
  const { colors } = paints;
  const middle = y + height / 2 + 0.5;
  pen.fillStyle = colors.faint;
  pen.textAlign = "right";
  if (height >= 10) pen.fillText(fitted(pen, lane.name, plot.left - 8), plot.left - 8, middle);
  if (!plot.narrow && height >= 10) pen.fillText(percent(lane.busy), plot.right + 48, middle);
  pen.save();
  pen.beginPath();
  pen.rect(plot.left, y - 2, plot.right - plot.left, height + 4);
  pen.clip();
  paintIntervals(gantt, pen, lane.elsewhere, colors.elsewhere, y, height);
  paintIntervals(gantt, pen, lane.idle, paints.idle, y, height);
  const first = firstAbove(lane.lastEnd, view.from);
  const after = firstAbove(lane.start, view.to);
  const tooMany = after - first > (plot.right - plot.left) / 3;
  if (tooMany) paintShares(gantt, pen, lane, y, height);
  else paintSpans(gantt, pen, lane, first, after, y, height);
  pen.restore();
}

function fitted(pen, words, width) {
  if (pen.measureText(words).width <= width) return words;
  let kept = words.length;
  while (kept > 3 && pen.measureText(`\u2026${words.slice(-kept)}`).width > width) kept--;
  return `\u2026${words.slice(-kept)}`;
}

function paintIntervals(gantt, pen, intervals, fill, y, height) {
  pen.fillStyle = fill;
  for (let i = firstAbove(intervals.end, gantt.view.from); i < intervals.count; i++) {
    if (intervals.start[i] >= gantt.view.to) break;
    const x = xOf(gantt, intervals.start[i]);
    pen.fillRect(x, y, xOf(gantt, intervals.end[i]) - x, height);
  }
}

function paintSpans(gantt, pen, lane, first, after, y, height) {
  const concurrent = [];
  for (let i = first; i < after; i++) {
    if (gantt.kinds[lane.kind[i]].concurrent) concurrent.push(i);
    else paintSpan(gantt, pen, lane, i, y, height);
  }
  // Publishing runs concurrently with other work: a strip at the bottom, in front.
  for (const i of concurrent) paintSpan(gantt, pen, lane, i, y + 0.7 * height, 0.3 * height);
}

function paintSpan(gantt, pen, lane, i, y, height) {
  const place = lane.kind[i];
  const kind = gantt.kinds[place];
  const x = xOf(gantt, lane.start[i]);
  const width = Math.max(1, xOf(gantt, lane.end[i]) - x);
  paintBlock(pen, gantt.paints, kind, place, x, y, width, height);
  if (height < 12 || width < 22) return;
  const label = lane.group[i] >= 0 ? [`g${lane.group[i]} v${lane.version[i]}`, `g${lane.group[i]}`] : [kind.work];
  const fits = label.find((words) => pen.measureText(words).width + 8 <= width);
  if (!fits) return;
  pen.textAlign = "center";
  if (kind.stale) {
    pen.strokeStyle = kind.fill;
    pen.lineWidth = 4;
    pen.lineJoin = "round";
    pen.strokeText(fits, x + width / 2, y + height / 2 + 0.5);
  }
  pen.fillStyle = kind.ink;
  pen.fillText(fits, x + width / 2, y + height / 2 + 0.5);
}

// For too many spans to distinguish: every two pixels show the shares of their time, stacked from the bottom.
function paintShares(gantt, pen, lane, y, height) {
  const { left, right } = gantt.plot;
  const bins = Math.floor((right - left) / 2);
  const shares = sharesOverTime(lane, gantt.kinds, gantt.view.from, gantt.view.to, bins);
  const width = (right - left) / bins;
  for (let bin = 0; bin < bins; bin++) {
    let foot = y + height;
    for (let place = 0; place < gantt.kinds.length; place++) {
      const part = Math.min(1, shares[bin * gantt.kinds.length + place]) * height;
      if (part <= 0) continue;
      pen.fillStyle = gantt.paints.fills[place];
      pen.fillRect(left + bin * width, foot - part, width + 0.3, part);
      foot -= part;
    }
  }
}

function paintCommits(gantt, pen) {
  const { view, layout, paints } = gantt;
  let free = gantt.plot.left - 20;
  pen.save();
  pen.textAlign = "center";
  paintStepNames(gantt, pen);
  pen.setLineDash([4, 3]);
  const visible = gantt.steps.filter(([, , end]) => end >= view.from && end <= view.to);
  for (const [step, , end] of visible) {
    const x = Math.round(xOf(gantt, end)) + 0.5;
    if (visible.length < 120) {
      pen.strokeStyle = paints.colors.ink;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, ROW.top - 4);
      pen.lineTo(x, layout.bottom);
      pen.stroke();
    }
    const words = `v${step + 1}`;
    const half = pen.measureText(words).width / 2;
    const middle = Math.min(x, gantt.plot.right - half);
    if (middle - half < free) continue;
    pen.fillStyle = paints.colors.ink;
    pen.fillText(words, middle, ROW.top - 11);
    free = middle + half + 8;
  }
  pen.restore();
}

// Between two commits, where there is room.
function paintStepNames(gantt, pen) {
  pen.fillStyle = gantt.paints.colors.faint;
  for (const [step, start, end] of gantt.steps) {
    const [left, right] = [xOf(gantt, Math.max(start, gantt.view.from)), xOf(gantt, Math.min(end, gantt.view.to))];
    if (right - left > 110) pen.fillText(`step ${step}`, (left + right) / 2, ROW.top - 11);
  }
}

// An edge around the chosen span, and thinner ones around all work on the same group.
function paintChosen(gantt, pen) {
  const { lane: chosenLane, i: chosen } = gantt.chosen;
  pen.save();
  pen.beginPath();
  pen.rect(gantt.plot.left, 0, gantt.plot.right - gantt.plot.left, gantt.layout.bottom);
  pen.clip();
  pen.strokeStyle = gantt.paints.colors.chosen;
  for (const { lane, y, height } of gantt.layout.rows.filter((row) => row.lane)) {
    const first = firstAbove(lane.lastEnd, gantt.view.from);
    for (let i = first; i < lane.count && lane.start[i] < gantt.view.to; i++) {
      const itself = lane === chosenLane && i === chosen;
      const related = chosenLane.group[chosen] >= 0 && lane.group[i] === chosenLane.group[chosen] && lane.step[i] === chosenLane.step[chosen];
      if (!itself && !related) continue;
      const x = xOf(gantt, lane.start[i]);
      pen.lineWidth = itself ? 3 : 1.5;
      pen.strokeRect(x, y - 0.5, Math.max(1, xOf(gantt, lane.end[i]) - x), height + 1);
    }
  }
  pen.restore();
}

// The whole run in one strip: how busy all lanes were, and the visible part.
function paintOverview(gantt) {
  const { overview, paints, view, start, end } = gantt;
  const width = overview.clientWidth;
  const height = overview.clientHeight;
  if (!width) return;
  const pen = sharpPen(overview, width, height);
  const { left, right } = plotWithin(width);
  const x = (time) => left + ((time - start) / (end - start)) * (right - left);
  const bins = Math.floor((right - left) / 2);
  if (gantt.busy?.length !== bins) gantt.busy = busyOverTime(gantt.lanes, start, end, bins);
  pen.fillStyle = paints.colors["idle-paper"];
  pen.fillRect(left, 0, right - left, height);
  pen.fillStyle = paints.colors["idle-dot"];
  gantt.busy.forEach((share, bin) => {
    pen.fillRect(left + 2 * bin, height - share * (height - 4), 2, share * (height - 4));
  });
  pen.fillStyle = paints.colors.accent;
  pen.globalAlpha = 0.18;
  pen.fillRect(x(view.from), 0, Math.max(3, x(view.to) - x(view.from)), height);
  pen.globalAlpha = 1;
  pen.strokeStyle = paints.colors.accent;
  pen.lineWidth = 1.5;
  pen.strokeRect(x(view.from), 0.75, Math.max(3, x(view.to) - x(view.from)), height - 1.5);
}

function showLegend(gantt) {
  const entries = gantt.kinds.map((kind, place) => [kind.label, (pen, paints) => paintBlock(pen, paints, kind, place, 0, 0, 22, 14)]);
  entries.push(["idle: a bubble", (pen, paints) => plainSwatch(pen, paints.idle)]);
  if (gantt.lanes.some((lane) => lane.elsewhere.count)) {
    entries.push(["the card works in another row", (pen, paints) => plainSwatch(pen, paints.colors.elsewhere)]);
  }
  for (const [label, paint] of entries) {
    const swatch = make("canvas", { "aria-hidden": "true" });
    byId("gantt-legend").append(make("li", {}, swatch, label));
    repaintWith(() => paint(sharpPen(swatch, 22, 14), gantt.paints));
  }
}

function plainSwatch(pen, fill) {
  pen.fillStyle = fill;
  pen.fillRect(0, 0, 22, 14);
}
