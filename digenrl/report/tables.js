// The tables: lane utilization, predicted step times, and the recipe.

function showUtilization(utilization, timeline) {
  if (!timeline.kinds.length) return;
  byId("utilization").hidden = false;
  byId("utilization-lead").textContent = "Shares of the time each lane was present. Time without work is idle, a bubble. "
    + "Publishing runs concurrently with other work and is not part of the sum.";
  const choices = [["steady", "steady state", utilization.steady], ["run", "whole run", utilization.run]].filter((choice) => choice[2]);
  const buttons = choices.map(([id, label, shares]) => {
    const button = make("button", { type: "button", id: `utilization-${id}` }, `${label}, ${duration(shares.seconds * 1e6)}`);
    button.addEventListener("click", () => show(id));
    return button;
  });
  byId("utilization-choice").append(...buttons);
  const show = (id) => {
    choices.forEach(([each], index) => buttons[index].setAttribute("aria-pressed", each === id));
    fillUtilization(utilization[id].lanes, timeline);
    fillTotals(utilization[id].totals);
  };
  let shown = choices[0][0];
  for (const [id] of choices) byId(`utilization-${id}`).addEventListener("click", () => { shown = id; });
  repaintWith(() => show(shown));
}

// A column per kind of work, fresh and stale together.
function fillUtilization(shares, timeline) {
  const kinds = timeline.kinds.filter((kind) => !kind.concurrent);
  const works = [...new Set(kinds.map((kind) => kind.work))];
  const styles = new Map([...kinds.filter((kind) => kind.stale), ...kinds.filter((kind) => !kind.stale)].map((kind) => [kind.work, kind]));
  const present = timeline.lanes.filter((lane) => shares[lane.name]);
  const elsewhere = present.some((lane) => shares[lane.name].elsewhere > 5e-4);
  const publishing = present.some((lane) => shares[lane.name].publishing > 0);
  const heads = ["lane", "shares", "busy", "idle", ...works, elsewhere ? "other row" : null, publishing ? "publish" : null];
  const body = make("tbody");
  let pool = null;
  for (const lane of present) {
    if (lane.pool !== pool) {
      pool = lane.pool;
      body.append(make("tr", { class: "pool" }, make("th", { scope: "rowgroup", colspan: heads.length }, pool)));
    }
    const own = shares[lane.name];
    const numbers = [1 - own.idle, own.idle, ...works.map((work) => own.works[work] ?? 0)];
    if (elsewhere) numbers.push(own.elsewhere);
    if (publishing) numbers.push(own.publishing);
    body.append(make("tr", {},
      make("th", { scope: "row", title: lane.device || null }, lane.name),
      make("td", { class: "shares" }, shareBar(own, styles)),
      ...numbers.map((share) => make("td", { class: share ? null : "zero" }, share ? percent(share, 1) : NONE))));
  }
  const head = heads.filter((words) => words !== null).map((words) => make("th", { scope: "col", class: words === "shares" ? "shares" : null }, words));
  byId("utilization-table").replaceChildren(make("thead", {}, make("tr", {}, ...head)), body);
  for (const canvas of byId("utilization-table").querySelectorAll("canvas")) canvas.paint();
}

function shareBar(own, styles) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  canvas.paint = () => {
    const width = canvas.clientWidth;
    const pen = sharpPen(canvas, width, 16);
    const paints = ganttPaints([...styles.values()]);
    let x = 0;
    [...styles.entries()].forEach(([work, kind], index) => {
      const part = (own.works[work] ?? 0) * width;
      if (part > 0) paintBlock(pen, paints, kind, index, x, 0, part, 16);
      x += part;
    });
    for (const [share, fill] of [[own.elsewhere, paints.colors.elsewhere], [own.idle, paints.idle]]) {
      pen.fillStyle = fill;
      pen.fillRect(x, 0, share * width, 16);
      x += share * width;
    }
  };
  return canvas;
}

function showPrediction(prediction) {
  if (!prediction) return;
  byId("prediction").hidden = false;
  byId("prediction-lead").textContent = "The simulator predicts the time of a step from costs that the run "
    + "measured. Each step is compared with the newest prediction made before it ended.";
  showCharts(byId("prediction-chart"), [{
    title: "Seconds per step", x: prediction.steps, unit: "",
    series: [
      { name: "measured", y: prediction.measured_s, spread: null },
      { name: "predicted", y: prediction.predicted_s, spread: null },
    ],
  }], 220);
  const rows = [
    ["steps compared", String(prediction.steps.length)],
    ["median measured", `${number(median(prediction.measured_s))} s`],
    ["median predicted", `${number(median(prediction.predicted_s))} s`],
    ["median error", percent(prediction.median_error, 1)],
    ["median signed error", signedPercent(median(prediction.errors))],
    ["largest error", percent(Math.max(...prediction.errors.map(Math.abs)), 1)],
  ];
  byId("prediction-table").append(make("tbody", {}, ...rows.map(([label, value]) =>
    make("tr", {}, make("th", { scope: "row" }, label), make("td", {}, value)))));
  const heads = ["step", "measured", "predicted", "error"].map((words) => make("th", { scope: "col" }, words));
  byId("prediction-steps").append(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...prediction.steps.map((step, i) =>
    make("tr", {}, make("th", { scope: "row" }, String(step)), make("td", {}, `${number(prediction.measured_s[i])} s`),
      make("td", {}, `${number(prediction.predicted_s[i])} s`), make("td", {}, signedPercent(prediction.errors[i]))))));
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function showRecipe(content) {
  byId("recipe-text").textContent = content.recipe;
  byId("initial-state").hidden = !content.initial_state;
  byId("initial-state-text").textContent = content.initial_state;
}
