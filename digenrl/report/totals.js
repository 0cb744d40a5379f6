// Who did what: the samples and the seconds of every lane, and their sums.

const WHO_SAMPLES = [["samples generated", "generated"], ["samples trained", "trained"]];
const WHO_SECONDS = [["generating", "generating_s"], ["training", "training_s"], ["other work", "other_s"], ["idle", "idle_s"]];

function fillTotals(totals) {
  byId("who-did-what").hidden = !totals.length;
  if (!totals.length) return;
  byId("who-lead").textContent = "Samples that each lane generated and trained, and how long. Other work is scoring, commits, "
    + "role switches, sending gradients, evaluations and checkpoints. Work that had to be repeated counts each time.";
  const sum = { name: "all" };
  for (const [, key] of [...WHO_SAMPLES, ...WHO_SECONDS]) sum[key] = totals.reduce((all, each) => all + each[key], 0);
  const heads = ["lane", ...WHO_SAMPLES.map(([words]) => words), ...WHO_SECONDS.map(([words]) => words)];
  const body = make("tbody");
  let pool = null;
  for (const each of totals) {
    if (each.pool !== pool) {
      pool = each.pool;
      body.append(make("tr", { class: "pool" }, make("th", { scope: "rowgroup", colspan: heads.length }, pool)));
    }
    body.append(totalsRow(each, sum));
  }
  body.append(totalsRow(sum, sum, "sum"));
  const head = heads.map((words) => make("th", { scope: "col" }, words));
  byId("who-table").replaceChildren(make("thead", {}, make("tr", {}, ...head)), body);
}

function totalsRow(totals, sum, kind = null) {
  const samples = WHO_SAMPLES.map(([, key]) => {
    const share = totals === sum ? null : make("span", { class: "of" }, ` (${percent(totals[key] / sum[key])})`);
    return totals[key] ? make("td", {}, number(totals[key]), share) : emptyCell();
  });
  const seconds = WHO_SECONDS.map(([, key]) => (totals[key] > 5e-4 ? make("td", {}, duration(totals[key] * 1e6)) : emptyCell()));
  return make("tr", { class: kind }, make("th", { scope: "row" }, totals.name), ...samples, ...seconds);
}

function emptyCell() {
  return make("td", { class: "zero" }, NONE);
}
