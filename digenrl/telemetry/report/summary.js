// The head of the page: what ran, how it ended, and the few numbers that matter.

function showHead(content) {
  byId("name").textContent = content.name;
  const marks = { finished: "\u2713", running: "\u2026", interrupted: "\u25a0", failed: "\u2717" };
  const words = content.status === "running" ? "running when this page was written" : content.status;
  byId("status").append(
    make("span", { class: `state ${content.status}` }, `${marks[content.status]} ${words}`),
    content.started ? `, started ${stamp(content.started)}` : "",
    content.digenrl ? `, digenrl ${content.digenrl}` : "",
  );
  for (const [what, words] of content.about) {
    byId("about").append(make("div", {}, make("dt", {}, what), make("dd", {}, words)));
  }
  for (const technique of content.techniques) {
    const state = technique.on ? `on${technique.setting ? `, ${technique.setting}` : ""}` : "off";
    byId("techniques").append(
      make("li", { class: technique.on ? "on" : "off", title: technique.words }, make("b", {}, technique.name), ` ${state}`),
    );
  }
}

function showHeadline(headline) {
  const add = (what, value, note) => {
    byId("headline").append(
      make("div", { class: "figure" },
        make("div", { class: "what" }, what), make("div", { class: "value" }, ...value), make("div", { class: "note" }, note)),
    );
  };
  if (headline.reward) {
    const steps = headline.reward_steps;
    const note = steps > 1 ? `mean of the first and last ${steps} steps` : "first and last step";
    add("Training reward", fromTo(headline.reward), note);
  }
  for (const [name, change] of Object.entries(headline.held_out)) {
    add(`Held-out ${metricWords(name)}`, fromTo(change), "first and last evaluation");
  }
  if (headline.samples_per_s !== null) add("Samples per second", [number(headline.samples_per_s)], "after the first step");
  if (headline.busy !== null) {
    const pools = Object.entries(headline.busy_by_pool).filter(([, share]) => share !== null);
    add(`${headline.busy_of} busy`, [percent(headline.busy)], pools.map(([pool, share]) => `${pool} ${percent(share)}`).join(", "));
  }
  if (headline.stale_share !== null) add("Stale samples", [percent(headline.stale_share)], "made with older weights");
  if (headline.helped_share !== null) add("Helped samples", [percent(headline.helped_share)], "made by the trainer");
  if (headline.prediction_error !== null) {
    add("Step time predicted", [`\u00b1${THIN}${percent(headline.prediction_error, 1)}`], "median error");
  }
}

function fromTo(change) {
  const [before, after] = numbersAlike(change.before, change.after);
  return [make("span", { class: "from" }, `${before} \u2192 `), after];
}

// A button that goes through the system's theme, light and dark.
function offerThemes() {
  const themes = ["system", "light", "dark"];
  let chosen = 0;
  const button = byId("theme");
  const show = () => {
    if (chosen) document.documentElement.dataset.theme = themes[chosen];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${themes[chosen]}`;
    repaintAll();
  };
  button.addEventListener("click", () => {
    chosen = (chosen + 1) % themes.length;
    show();
  });
  show();
}
