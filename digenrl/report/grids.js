// The grids of held-out samples: the first evaluation on the left, any later one on the right. Edits have their
// source images before them.

function showGrids(grids) {
  const shown = grids.shown;
  if (!shown.length) return;
  byId("samples").hidden = false;
  const before = byId("grid-before");
  const after = byId("grid-after");
  if (grids.others) byId("samples-lead").append(` ${grids.others} with other settings ${grids.others === 1 ? "is" : "are"} not shown.`);
  if (grids.sources) showSources(grids.sources, shown[0]);
  before.append(make("div", { class: "grid-head" }, make("h3", {}, gridTitle(shown[0], shown[0].step ? "First" : "Before"))));
  before.append(cellsOf(shown[0]));
  if (shown.length === 1) return;

  const title = make("h3");
  const head = make("div", { class: "grid-head" }, title);
  after.append(head, make("div"));
  const show = (place) => {
    title.textContent = gridTitle(shown[place], place === shown.length - 1 ? "After" : "During");
    after.lastElementChild.replaceWith(cellsOf(shown[place]));
  };
  if (shown.length > 2) head.append(evaluationSlider(shown, show, grids.written));
  show(shown.length - 1);
}

function showSources(image, first) {
  const holder = byId("grid-source");
  holder.hidden = false;
  const cells = first.cells.map(({ prompt }) => ({ prompt, parts: {}, isSource: true }));
  holder.append(make("div", { class: "grid-head" }, make("h3", {}, "Source")), cellsOf({ ...first, image, cells }));
}

function gridTitle(entry, when) {
  const reward = entry.reward === null ? "" : `, reward ${reading(entry.reward)}`;
  return `${when}: step ${entry.step}${reward}`;
}

// A slider over the evaluations after the first, with a button at each end.
function evaluationSlider(shown, show, written) {
  const last = shown.length - 1;
  const slider = make("input", { type: "range", min: 1, max: last, value: last, id: "grid-chooser", "aria-label": "evaluation" });
  const go = (place) => {
    slider.value = place;
    slider.setAttribute("aria-valuetext", `step ${shown[slider.value].step}`);
    earlier.disabled = Number(slider.value) <= 1;
    later.disabled = Number(slider.value) >= last;
    show(Number(slider.value));
  };
  const earlier = make("button", { type: "button", "aria-label": "earlier evaluation" }, "\u2039");
  const later = make("button", { type: "button", "aria-label": "later evaluation" }, "\u203a");
  earlier.addEventListener("click", () => go(Number(slider.value) - 1));
  later.addEventListener("click", () => go(Number(slider.value) + 1));
  slider.addEventListener("input", () => go(Number(slider.value)));
  queueMicrotask(() => go(last));
  const omitted = written > shown.length ? `${shown.length} of ${written} evaluations can be selected` : null;
  return make("span", { class: "choose", title: omitted }, earlier, slider, later);
}

function cellsOf(entry) {
  const columns = entry.cells.length ? entry.columns : 1;
  const cells = entry.cells.length ? entry.cells : [null];
  const holder = make("div", { class: "cells" });
  holder.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  const canvases = cells.map((cell, place) => {
    const canvas = make("canvas", { role: "img", "aria-label": cell ? describeCell(cell) : "grid of samples" });
    holder.append(cellFigure(cell, canvas, place));
    if (cell && cell.clip) showClip(cell, canvas);
    return canvas;
  });
  cutInto(canvases, entry, columns);
  return holder;
}

// Puts the clip in the place of its middle frame. Browsers that cannot play it keep the image.
function showClip(cell, canvas) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const video = make("video", { src: cell.clip, loop: true, autoplay: !still, controls: still, playsinline: true, "aria-label": describeCell(cell) });
  video.muted = true;
  video.addEventListener("loadeddata", () => canvas.replaceWith(video), { once: true });
}

function cellFigure(cell, canvas, place) {
  const figure = make("figure", { class: "cell", tabindex: cell ? 0 : null, "data-place": place }, canvas);
  if (!cell) return figure;
  const reward = cell.isSource ? "source" : cell.reward === null ? "no reward" : reading(cell.reward);
  figure.append(
    make("figcaption", {},
      make("span", { class: "reward" }, reward),
      make("span", { class: "prompt" }, cell.prompt)),
  );
  const tip = make("div", { class: "tip", hidden: true }, describeCell(cell));
  figure.append(tip);
  const open = () => {
    placeTip(tip, 0, figure.firstElementChild.offsetHeight - 10);
    const right = figure.getBoundingClientRect().left + tip.offsetWidth;
    tip.style.left = `${Math.min(0, document.documentElement.clientWidth - 12 - right)}px`;
    markTwins(place, true);
  };
  const close = () => {
    tip.hidden = true;
    markTwins(place, false);
  };
  figure.addEventListener("pointerenter", open);
  figure.addEventListener("pointerleave", close);
  figure.addEventListener("focus", open);
  figure.addEventListener("blur", close);
  return figure;
}

// The same prompt in both grids.
function markTwins(place, marked) {
  for (const twin of document.querySelectorAll(`.cell[data-place="${place}"]`)) twin.classList.toggle("twin", marked);
}

function describeCell(cell) {
  const parts = Object.entries(cell.parts).map(([name, value]) => `${name} ${number(value)}`);
  const reward = cell.isSource || cell.reward === null ? [] : [`reward ${reading(cell.reward)}`];
  return [cell.prompt, [...reward, ...parts].join(", ")].join("\n");
}

// Paints each canvas with its part of the grid; cells have the same size, row by row.
function cutInto(canvases, entry, columns) {
  const { image, gap } = entry;
  const picture = new Image();
  picture.addEventListener("load", () => {
    const rows = Math.ceil(canvases.length / columns);
    const width = (picture.naturalWidth - gap) / columns - gap;
    const height = (picture.naturalHeight - gap) / rows - gap;
    canvases.forEach((canvas, place) => {
      canvas.width = Math.round(width);
      canvas.height = Math.round(height);
      canvas.classList.toggle("tiny", width < 80);
      const left = gap + (place % columns) * (width + gap);
      const top = gap + Math.floor(place / columns) * (height + gap);
      canvas.getContext("2d").drawImage(picture, left, top, width, height, 0, 0, canvas.width, canvas.height);
    });
  });
  picture.src = image;
}
