// Navigation of the timeline by pointer, wheel, buttons and keys.

const NARROWEST_VIEW = 50; // microseconds

function showTimeline(timeline) {
  if (!timeline.lanes.some((lane) => lane.spans.length)) return;
  byId("timeline").hidden = false;
  const lanes = timeline.lanes.map(unpackLane);
  const gantt = {
    canvas: byId("gantt"), painted: document.createElement("canvas"), overview: byId("gantt-overview"), tip: byId("gantt-tip"),
    kinds: timeline.kinds, steps: timeline.steps, start: timeline.start, end: Math.max(timeline.start + 1, timeline.end), lanes,
    layout: ganttRows(lanes), view: { from: 0, to: 1 }, chosen: null,
  };
  gantt.view = initialView(gantt);
  gantt.repaint = oncePerFrame(() => {
    paintGantt(gantt);
    paintOverview(gantt);
  });
  byId("timeline-lead").textContent = timelineLead(gantt);
  repaintWith(() => {
    gantt.paints = ganttPaints(gantt.kinds);
  });
  showLegend(gantt);
  repaintWith(gantt.repaint);
  new ResizeObserver(gantt.repaint).observe(gantt.canvas.parentElement);
  addStepSelector(gantt);
  addButtons(gantt);
  addPointerHandlers(gantt);
  addOverviewHandlers(gantt);
  addKeyHandlers(gantt);
}

// However often it is called, the work is done once per frame.
function oncePerFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

function timelineLead(gantt) {
  const spans = gantt.lanes.reduce((sum, lane) => sum + lane.count, 0);
  const part = gantt.start ? `The last ${number(gantt.steps.length)} steps; trace.json has all. ` : "";
  return `${part}${number(spans)} spans on ${gantt.lanes.length} rows in ${duration(gantt.end - gantt.start)}. Dashed lines are commits: `
    + "after v3, the weights have been updated three times. The share on the right is a lane's busy share of the run.";
}

// All of a short run; three steps from the middle of a long one, where the schedule is in its steady state.
function initialView(gantt) {
  const { steps, start, end } = gantt;
  if (steps.length <= 4) return { from: start, to: end };
  const middle = Math.floor(steps.length / 2);
  return padded(gantt, steps[middle - 1][1], steps[middle + 1][2]);
}

function padded(gantt, from, to) {
  const pad = 0.02 * (to - from);
  return { from: Math.max(gantt.start, from - pad), to: Math.min(gantt.end, to + pad) };
}

function setView(gantt, from, to) {
  const width = Math.min(gantt.end - gantt.start, Math.max(NARROWEST_VIEW, to - from));
  const start = Math.max(gantt.start, Math.min(gantt.end - width, from));
  gantt.view = { from: start, to: start + width };
  hideTip(gantt);
  gantt.repaint();
  noteStep(gantt);
}

// Zooms around the share `at` of the view, which stays in place.
function zoom(gantt, factor, at = 0.5) {
  const { from, to } = gantt.view;
  const width = Math.min(gantt.end - gantt.start, Math.max(NARROWEST_VIEW, (to - from) * factor));
  const fixed = from + at * (to - from);
  setView(gantt, fixed - at * width, fixed + (1 - at) * width);
}

function pan(gantt, share) {
  const by = share * (gantt.view.to - gantt.view.from);
  setView(gantt, gantt.view.from + by, gantt.view.to + by);
}

function showStep(gantt, place) {
  const entry = gantt.steps[Math.max(0, Math.min(gantt.steps.length - 1, place))];
  if (!entry) return;
  const view = padded(gantt, entry[1], entry[2]);
  setView(gantt, view.from, view.to);
}

// The index of the step in the middle of the view.
function stepInView(gantt) {
  const middle = (gantt.view.from + gantt.view.to) / 2;
  const place = gantt.steps.findIndex(([, , end]) => end >= middle);
  return place < 0 ? gantt.steps.length - 1 : place;
}

function addStepSelector(gantt) {
  const select = byId("gantt-step");
  for (const [step] of gantt.steps) select.append(make("option", { value: step }, String(step)));
  select.addEventListener("change", () => showStep(gantt, select.selectedIndex));
  noteStep(gantt);
}

function noteStep(gantt) {
  byId("gantt-step").selectedIndex = stepInView(gantt);
}

function addButtons(gantt) {
  const actions = {
    "gantt-previous": () => showStep(gantt, stepInView(gantt) - 1),
    "gantt-next": () => showStep(gantt, stepInView(gantt) + 1),
    "gantt-in": () => zoom(gantt, 0.5),
    "gantt-out": () => zoom(gantt, 2),
    "gantt-left": () => pan(gantt, -0.5),
    "gantt-right": () => pan(gantt, 0.5),
    "gantt-whole": () => setView(gantt, gantt.start, gantt.end),
  };
  for (const [id, act] of Object.entries(actions)) byId(id).addEventListener("click", act);
}

function addPointerHandlers(gantt) {
  const { canvas } = gantt;
  const down = new Map();
  let moved = false;
  canvas.addEventListener("pointerdown", (event) => {
    down.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
    moved = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!down.has(event.pointerId)) {
      pointAt(gantt, event.offsetX, event.offsetY);
      return;
    }
    const before = [...down.values()];
    down.set(event.pointerId, event.offsetX);
    moved ||= Math.abs(event.offsetX - before[0]) > 2;
    if (moved) canvas.classList.add("dragging");
    dragView(gantt, before, [...down.values()]);
  });
  const release = (event) => {
    if (down.delete(event.pointerId) && !moved && event.type === "pointerup") pointAt(gantt, event.offsetX, event.offsetY);
    canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => choose(gantt, null));
  canvas.addEventListener("wheel", (event) => wheel(gantt, event), { passive: false });
}

// One pointer moves the view; two zoom it, and the times under them stay there.
function dragView(gantt, before, after) {
  const [a, b] = [timeOf(gantt, before[0]), timeOf(gantt, before[1] ?? before[0])];
  const { left, right } = gantt.plot;
  if (before.length < 2 || Math.abs(after[1] - after[0]) < 8) {
    pan(gantt, (before[0] - after[0]) / (right - left));
    return;
  }
  const perPixel = Math.abs((b - a) / (after[1] - after[0]));
  const from = a - (after[0] - left) * perPixel;
  setView(gantt, from, from + (right - left) * perPixel);
}

// The plain wheel scrolls the page; with a modifier, or horizontally, it moves the timeline.
function wheel(gantt, event) {
  const { left, right } = gantt.plot;
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(gantt, 1.002 ** event.deltaY, Math.max(0, Math.min(1, (event.offsetX - left) / (right - left))));
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    pan(gantt, (event.deltaX || event.deltaY) / (right - left));
  }
}

function addOverviewHandlers(gantt) {
  const { overview } = gantt;
  const center = (event) => {
    const { left, right } = gantt.plot;
    const time = gantt.start + ((event.offsetX - left) / (right - left)) * (gantt.end - gantt.start);
    const half = (gantt.view.to - gantt.view.from) / 2;
    setView(gantt, time - half, time + half);
  };
  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    center(event);
  });
  overview.addEventListener("pointermove", (event) => {
    if (event.buttons) center(event);
  });
}

function rowAt(gantt, y) {
  return gantt.layout.rows.find((row) => row.lane && y >= row.y - 2 && y < row.y + row.height + 2);
}

function pointAt(gantt, x, y) {
  const row = rowAt(gantt, y);
  const inside = x >= gantt.plot.left && x <= gantt.plot.right;
  if (!row || !inside) {
    choose(gantt, null);
    return;
  }
  const time = timeOf(gantt, x);
  const i = spanAt(row.lane, gantt.kinds, time);
  choose(gantt, i < 0 ? null : { lane: row.lane, i });
  if (i < 0) gantt.tip.textContent = describeGap(row.lane, time);
  if (gantt.tip.textContent) placeTip(gantt.tip, x, row.y + row.height - 8);
}

// Describes a lane at a time at which its own row has no work.
function describeGap(lane, time) {
  for (const [intervals, words] of [[lane.idle, "idle"], [lane.elsewhere, "the card works in another row"]]) {
    const i = firstAbove(intervals.end, time);
    if (i < intervals.count && intervals.start[i] <= time) {
      return `${words}, ${duration(intervals.end[i] - intervals.start[i])}\n${lane.name}, from `
        + `${(intervals.start[i] / 1e6).toFixed(3)} s to ${(intervals.end[i] / 1e6).toFixed(3)} s`;
    }
  }
  return "";
}

function choose(gantt, chosen) {
  const same = gantt.chosen?.lane === chosen?.lane && gantt.chosen?.i === chosen?.i;
  gantt.chosen = chosen;
  gantt.tip.textContent = chosen ? describeSpan(chosen.lane, gantt.kinds, chosen.i) : "";
  if (!chosen) gantt.tip.hidden = true;
  if (!same && gantt.plot) presentGantt(gantt);
}

function hideTip(gantt) {
  gantt.chosen = null;
  gantt.tip.hidden = true;
}

function addKeyHandlers(gantt) {
  const act = (key, shift) => {
    if (shift && key === "ArrowLeft") return pan(gantt, -0.25);
    if (shift && key === "ArrowRight") return pan(gantt, 0.25);
    const actions = {
      ArrowLeft: () => chooseNeighbor(gantt, -1), ArrowRight: () => chooseNeighbor(gantt, 1),
      ArrowUp: () => changeLane(gantt, -1), ArrowDown: () => changeLane(gantt, 1),
      "+": () => zoom(gantt, 0.5), "=": () => zoom(gantt, 0.5), "-": () => zoom(gantt, 2),
      "[": () => showStep(gantt, stepInView(gantt) - 1), "]": () => showStep(gantt, stepInView(gantt) + 1),
      0: () => setView(gantt, gantt.start, gantt.end), Escape: () => choose(gantt, null),
    };
    if (!actions[key]) return false;
    actions[key]();
    return true;
  };
  gantt.canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (act(event.key, event.shiftKey) !== false) event.preventDefault();
  });
  gantt.canvas.addEventListener("blur", () => choose(gantt, null));
}

// Chooses the lane's next or previous span; the view follows.
function chooseNeighbor(gantt, by) {
  const { lane, i } = gantt.chosen ?? { lane: gantt.lanes[0], i: null };
  const start = i === null ? Math.min(firstAbove(lane.start, gantt.view.from), lane.count - 1) : i + by;
  if (start >= 0 && start < lane.count) chooseAndFollow(gantt, lane, start);
}

// Chooses a span at about the same time on the next lane that has any.
function changeLane(gantt, by) {
  const time = gantt.chosen ? gantt.chosen.lane.start[gantt.chosen.i] : (gantt.view.from + gantt.view.to) / 2;
  let place = gantt.chosen ? gantt.lanes.indexOf(gantt.chosen.lane) + by : 0;
  while (gantt.lanes[place] && !gantt.lanes[place].count) place += by;
  const lane = gantt.lanes[place];
  if (lane) chooseAndFollow(gantt, lane, Math.max(0, firstAbove(lane.start, time) - 1));
}

function chooseAndFollow(gantt, lane, i) {
  const { from, to } = gantt.view;
  const middle = (lane.start[i] + lane.end[i]) / 2;
  if (middle < from || middle > to) setView(gantt, middle - (to - from) / 2, middle + (to - from) / 2);
  choose(gantt, { lane, i });
  const row = gantt.layout.rows.find((each) => each.lane === lane);
  placeTip(gantt.tip, Math.max(gantt.plot.left, xOf(gantt, lane.start[i])), row.y + row.height - 8);
  byId("gantt-spoken").textContent = gantt.tip.textContent;
}
