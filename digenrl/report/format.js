// Formats numbers and times.

const NONE = "\u2013";
const MINUS = "\u2212";
const THIN = "\u202f";

// Three significant digits, more for large integer parts; very small numbers in scientific notation.
function number(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  const sign = value < 0 ? MINUS : "";
  if (size >= 1e6 || size < 1e-3) {
    const [digits, power] = size.toExponential(1).split("e");
    return `${sign}${Number(digits)}e${Number(power) < 0 ? MINUS : ""}${Math.abs(Number(power))}`;
  }
  if (size >= 1000) return sign + Math.round(size).toString().replace(/\B(?=(\d{3})+$)/g, THIN);
  return sign + Number(size.toPrecision(3)).toString();
}

// A measured value, including trailing zeros.
function reading(value, digits = 3) {
  const size = Math.abs(value ?? 0);
  if (value === null || size >= 1000 || size < 1e-3) return number(value);
  return value.toPrecision(digits).replace("-", MINUS);
}

// Two numbers with the same number of decimals.
function numbersAlike(first, second) {
  const largest = Math.max(Math.abs(first), Math.abs(second));
  if (largest === 0 || largest >= 100 || largest < 0.01) return [number(first), number(second)];
  const decimals = largest >= 10 ? 1 : largest >= 1 ? 2 : 3;
  return [first, second].map((value) => value.toFixed(decimals).replace("-", MINUS));
}

// A share in percent; only exact values read 0 % or 100 %.
function percent(share, decimals = 0) {
  if (share === null || share === undefined) return NONE;
  const least = 10 ** -decimals;
  let value = 100 * share;
  if (share > 0 && value < least) return `<${THIN}${least}${THIN}%`;
  if (share < 1 && value > 100 - least) value = 100 - least;
  return `${value.toFixed(decimals).replace("-", MINUS)}${THIN}%`;
}

function signedPercent(share) {
  return (share > 0 ? "+" : "") + `${(100 * share).toFixed(1).replace("-", MINUS)}${THIN}%`;
}

// A duration, given in microseconds.
function duration(us) {
  const s = us / 1e6;
  if (s >= 3600) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
  if (s >= 600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s >= 100) return `${s.toFixed(1)} s`;
  if (s >= 1) return `${Number(s.toFixed(2))} s`;
  if (s >= 1e-3) return `${Number((1000 * s).toPrecision(3))} ms`;
  return `${us} \u00b5s`;
}

// A point of time on an axis whose ticks are `step` apart: seconds, or h:mm:ss in long runs.
function clock(us, step, long) {
  const decimals = step >= 1e6 ? 0 : Math.min(6, Math.ceil(-Math.log10(step / 1e6)));
  if (!long) return (us / 1e6).toFixed(decimals);
  const whole = Math.floor(us / 1e6);
  const two = (value) => String(value).padStart(2, "0");
  const rest = decimals ? (us / 1e6 - whole).toFixed(decimals).slice(1) : "";
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}${rest}`;
}

// The smallest of 1, 2, 5, 10, ... that divides `extent` into at most `most` parts.
function roundStep(extent, most) {
  const rough = extent / most;
  const decade = 10 ** Math.floor(Math.log10(rough));
  return decade * [1, 2, 5, 10].find((factor) => factor * decade >= rough * 0.999999);
}

// The same for long runs, whose ticks should fall on whole minutes and hours.
function roundTimeStep(us, most) {
  const seconds = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];
  const rough = us / most / 1e6;
  if (rough <= 1) return roundStep(us, most);
  return 1e6 * (seconds.find((step) => step >= rough) ?? 86400 * Math.ceil(rough / 86400));
}

// A tick's value with as many decimals as its distance to the next one requires.
function tickLabel(value, step) {
  const size = Math.abs(value);
  if (size > 0 && (size < 1e-3 || size >= 1000)) return number(value);
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9))).replace("-", MINUS);
}

function metricLabel(name) {
  return name === "reward_mean" ? "reward" : name.replace(/^reward\//, "");
}

function stamp(iso) {
  return iso.replace("T", " ").replace(/\.\d+/, "").replace(/\+00:00$|Z$/, " UTC");
}
