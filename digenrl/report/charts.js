// Line charts over optimizer steps. All charts share one cursor: pointing at one shows the values of all.

const MARGIN = { left: 46, right: 10, top: 8, bottom: 22 };
// The width of a character of a tick label, and the gap to the plot, in pixels.
const TICK = { letter: 7.2, gap: 6 };
// From this many points on, a running mean is drawn in front of the points.
const MANY_POINTS = 60;
const allCharts = [];

function showCharts(holder, charts, height = 165) {
  for (const chart of charts) holder.append(chartFigure(chart, height));
}

function chartFigure(chart, height) {
  const readout = make("span", { class: "reading" });
  const svg = makeSvg("svg", { tabindex: 0, role: "img", "aria-label": describeChart(chart), height });
  const title = chart.title + (chart.unit === "share" ? "" : chart.unit ? `, ${chart.unit}` : "");
  const figure = make("figure", { class: "chart" },
    make("figcaption", {}, make("span", { class: "title", title }, title), readout), svg);
  if (chart.series.length > 1 || chart.series[0].spread) figure.append(chartKey(chart));
  const state = { chart, svg, readout, height, width: 0 };
  allCharts.push(state);
  svg.addEventListener("pointermove", (event) => readAll(stepAt(state, event.offsetX)));
  svg.addEventListener("pointerdown", (event) => readAll(stepAt(state, event.offsetX)));
  svg.addEventListener("pointerleave", () => readAll(null));
  svg.addEventListener("blur", () => readAll(null));
  svg.addEventListener("keydown", (event) => moveByKey(state, event));
  new ResizeObserver(() => drawChart(state)).observe(figure);
  return figure;
}

function chartKey(chart) {
  const key = make("div", { class: "key" });
  chart.series.forEach((series, place) => {
    const line = makeSvg("line", { x1: 0, x2: 26, y1: 5, y2: 5, class: `curve series-${place % 4}` });
    const words = series.spread ? `${series.name}, band: one standard deviation` : series.name;
    key.append(make("span", {}, makeSvg("svg", { "aria-hidden": "true", viewBox: "0 0 26 10" }, line), words));
  });
  return key;
}

function describeChart(chart) {
  const ends = chart.series.map((series) => {
    const known = series.y.filter((value) => value !== null);
    return `${series.name} from ${number(known[0])} to ${number(known[known.length - 1])}`;
  });
  return `${chart.title}: ${ends.join("; ")}`;
}

function chartScales(state) {
  const { chart, width, height } = state;
  const xs = chart.x;
  let [low, high] = valueRange(chart);
  if (chart.unit === "share") low = Math.min(0, low);
  if (low === 0 && high === 0) high = 1;
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const pad = 0.06 * (high - low);
  [low, high] = [low < 0 || low > pad ? low - pad : 0, high + pad];
  const first = xs[0];
  const last = Math.max(xs[xs.length - 1], first + 1);
  const ticks = valueTicks(chart, low, high, height > 200 ? 6 : 5);
  const longest = Math.max(0, ...ticks.map((tick) => tick.words.length));
  const left = Math.max(MARGIN.left, Math.ceil(longest * TICK.letter) + TICK.gap);
  return {
    low, high, first, last, left, ticks,
    x: (step) => left + ((step - first) / (last - first)) * (width - left - MARGIN.right),
    y: (value) => height - MARGIN.bottom - ((value - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom),
    step: (x) => first + ((x - left) / (width - left - MARGIN.right)) * (last - first),
  };
}

function valueTicks(chart, low, high, most) {
  const apart = roundStep(high - low, most);
  const ticks = [];
  for (let value = Math.ceil(low / apart) * apart; value <= high; value += apart) {
    const tidy = Math.abs(value) < apart / 1e6 ? 0 : Number(value.toPrecision(12));
    const words = chart.unit === "share" ? `${Number((100 * tidy).toPrecision(6))}${THIN}%` : tickLabel(tidy, apart);
    ticks.push({ value, words });
  }
  return ticks;
}

function valueRange(chart) {
  let low = Infinity;
  let high = -Infinity;
  for (const series of chart.series) {
    series.y.forEach((value, i) => {
      if (value === null) return;
      const spread = series.spread?.[i] ?? 0;
      low = Math.min(low, value - spread);
      high = Math.max(high, value + spread);
    });
  }
  return [low, high];
}

function drawChart(state) {
  const width = state.svg.clientWidth;
  if (!width) return;
  state.width = width;
  state.scales = chartScales(state);
  state.svg.setAttribute("viewBox", `0 0 ${width} ${state.height}`);
  state.cursor = makeSvg("g");
  state.svg.replaceChildren(axes(state), ...state.chart.series.map((_, place) => seriesMarks(state, place)), state.cursor);
  readOne(state, null);
}

function axes(state) {
  const { scales, width, height } = state;
  const group = makeSvg("g", { class: "axis" });
  const foot = height - MARGIN.bottom;
  for (const { value, words } of scales.ticks) {
    const y = scales.y(value);
    group.append(makeSvg("line", { x1: scales.left, x2: width - MARGIN.right, y1: y, y2: y }));
    group.append(makeSvg("text", { x: scales.left - TICK.gap, y: y + 3.5, "text-anchor": "end" }, words));
  }
  group.append(makeSvg("line", { class: "foot", x1: scales.left, x2: width - MARGIN.right, y1: foot, y2: foot }));
  const ticksX = Math.max(1, roundStep(scales.last - scales.first, Math.max(2, Math.floor(width / 80))));
  for (let step = Math.ceil(scales.first / ticksX) * ticksX; step <= scales.last; step += ticksX) {
    const words = String(step);
    // The label of the last step must not be cut off: 10000 would read 1000.
    const x = Math.min(scales.x(step), width - (words.length * TICK.letter) / 2);
    group.append(makeSvg("text", { x, y: foot + 16, "text-anchor": "middle" }, words));
  }
  return group;
}

function seriesMarks(state, place) {
  const { chart, scales } = state;
  const series = chart.series[place];
  const group = makeSvg("g");
  if (series.spread) {
    group.append(makeSvg("path", { class: `band fill-${place % 4}`, d: bandPath(chart.x, series, scales) }));
  }
  const many = chart.x.length >= MANY_POINTS;
  if (many) group.append(makeSvg("path", { class: `curve raw series-${place % 4}`, d: linePath(chart.x, series.y, scales) }));
  const line = many ? runningMean(series.y, Math.ceil(chart.x.length / 40)) : series.y;
  group.append(makeSvg("path", { class: `curve series-${place % 4}`, d: linePath(chart.x, line, scales) }));
  if (chart.x.length <= 30) {
    series.y.forEach((value, i) => {
      if (value !== null) group.append(dot(scales.x(chart.x[i]), scales.y(value), place, 2.4));
    });
  }
  return group;
}

function dot(x, y, place, r) {
  return makeSvg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r, class: `fill-${place % 4}` });
}

function linePath(xs, ys, scales) {
  let path = "";
  let pen = "M";
  ys.forEach((value, i) => {
    if (value === null) {
      pen = "M";
      return;
    }
    path += `${pen}${scales.x(xs[i]).toFixed(1)} ${scales.y(value).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

function bandPath(xs, series, scales) {
  const at = (i, sign) => `${scales.x(xs[i]).toFixed(1)} ${scales.y(series.y[i] + sign * series.spread[i]).toFixed(1)}`;
  const known = xs.map((_, i) => i).filter((i) => series.y[i] !== null && series.spread[i] !== null);
  if (!known.length) return "";
  return `M${known.map((i) => at(i, 1)).join("L")}L${known.reverse().map((i) => at(i, -1)).join("L")}Z`;
}

// The mean over up to `reach` known points on each side.
function runningMean(ys, reach) {
  return ys.map((value, i) => {
    if (value === null) return null;
    const near = ys.slice(Math.max(0, i - reach), i + reach + 1).filter((each) => each !== null);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}

function stepAt(state, x) {
  return state.scales ? state.scales.step(x) : null;
}

function moveByKey(state, event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const last = state.chart.x.length - 1;
  const place = Math.max(0, Math.min(last, (state.place ?? last) + by));
  readAll(state.chart.x[place]);
}

function readAll(step) {
  for (const state of allCharts) readOne(state, step);
}

// Shows a chart's values at the step nearest to `step`, or the last ones.
function readOne(state, step) {
  const { chart, scales } = state;
  if (!scales) return;
  const last = chart.x.length - 1;
  state.place = step === null ? null : nearestPlace(chart.x, step);
  const place = state.place ?? last;
  const whole = chart.series.every((series) => series.y.every(Number.isInteger));
  const write = (value) => (whole ? number(value) : reading(value, 4));
  const known = chart.series.filter((series) => series.y[place] !== null);
  const words = (known.length ? known : chart.series).map((series) => {
    const spread = series.spread?.[place];
    const name = chart.series.length > 1 ? `${series.name} ` : "";
    const value = chart.unit === "share" ? percent(series.y[place], 1) : write(series.y[place]);
    return `${name}${value}${spread ? ` \u00b1 ${reading(spread, 4)}` : ""}`;
  });
  state.readout.textContent = `step ${chart.x[place]}: ${words.join(", ")}`;
  state.cursor.replaceChildren();
  if (step === null) return;
  const x = scales.x(chart.x[place]);
  state.cursor.append(makeSvg("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: state.height - MARGIN.bottom }));
  chart.series.forEach((series, i) => {
    if (series.y[place] !== null) state.cursor.append(dot(x, scales.y(series.y[place]), i, 3.6));
  });
}

function nearestPlace(xs, step) {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - xs[low - 1] < xs[low] - step ? low - 1 : low;
}
