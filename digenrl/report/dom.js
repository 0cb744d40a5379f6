// Builds elements. Text from the run becomes text nodes only, so nothing in a prompt can become markup.

const SVG = "http://www.w3.org/2000/svg";

function byId(id) {
  return document.getElementById(id);
}

// An element with attributes and children; a child that is not a node becomes text.
function make(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function makeSvg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// The color of a variable of the style sheet in the current theme.
function color(name) {
  const probe = color.probe ?? (color.probe = document.body.appendChild(make("i", { hidden: true })));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// Resizes a canvas to the screen's resolution; returns its context, scaled to CSS pixels.
function sharpPen(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}

// Canvases must be repainted when sizes or the theme change.
const repainters = [];

function repaintWith(paint) {
  repainters.push(paint);
  paint();
}

function repaintAll() {
  for (const paint of repainters) paint();
}

// Places a tooltip near a point of its frame, inside the frame's width.
function placeTip(tip, x, y) {
  const frame = tip.parentElement;
  tip.hidden = false;
  const left = Math.max(0, Math.min(x + 14, frame.clientWidth - tip.offsetWidth - 2));
  tip.style.left = `${left}px`;
  tip.style.top = `${y + 16}px`;
}
