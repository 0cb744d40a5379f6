// The data of the timeline: unpacked lanes, searchable by time. Times are microseconds.

const NUMBERS_PER_SPAN = 8;
const LONG_RUN = 7200e6; // from two hours on, times are shown as h:mm:ss

function unpackLane(packed) {
  const count = packed.spans.length / NUMBERS_PER_SPAN;
  const lane = {
    name: packed.name, pool: packed.pool, device: packed.device, busy: packed.busy, counted: packed.counted, count,
    start: new Float64Array(count), end: new Float64Array(count), lastEnd: new Float64Array(count),
    kind: new Uint8Array(count), step: new Int32Array(count), group: new Int32Array(count),
    first: new Int32Array(count), size: new Int32Array(count), version: new Int32Array(count),
    idle: unpackIntervals(packed.idle), elsewhere: unpackIntervals(packed.elsewhere),
  };
  let at = 0;
  let lastEnd = 0;
  for (let i = 0, p = 0; i < count; i++) {
    at += packed.spans[p++];
    lane.start[i] = at;
    lane.end[i] = at + packed.spans[p++];
    lane.kind[i] = packed.spans[p++];
    lane.step[i] = packed.spans[p++];
    lane.group[i] = packed.spans[p++];
    lane.first[i] = packed.spans[p++];
    lane.size[i] = packed.spans[p++];
    lane.version[i] = packed.spans[p++];
    lane.lastEnd[i] = lastEnd = Math.max(lastEnd, lane.end[i]);
  }
  return lane;
}

function unpackIntervals(packed) {
  const count = packed.length / 2;
  const intervals = { count, start: new Float64Array(count), end: new Float64Array(count) };
  let at = 0;
  for (let i = 0; i < count; i++) {
    at += packed[2 * i];
    intervals.start[i] = at;
    intervals.end[i] = at + packed[2 * i + 1];
  }
  return intervals;
}

// The first index whose value is above `limit`; values are sorted.
function firstAbove(values, limit) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The index of a lane's span at a time, or -1; concurrent work is found only where there is nothing else.
function spanAt(lane, kinds, time) {
  let found = -1;
  for (let i = firstAbove(lane.lastEnd, time - 1); i < lane.count && lane.start[i] <= time; i++) {
    if (lane.end[i] < time) continue;
    if (found < 0 || kinds[lane.kind[found]].concurrent || !kinds[lane.kind[i]].concurrent) found = i;
  }
  return found;
}

// The share of each of `bins` equal parts of [from, to) that the lane spent on each kind, bin after bin.
function sharesOverTime(lane, kinds, from, to, bins) {
  const shares = new Float32Array(bins * kinds.length);
  const width = (to - from) / bins;
  for (let i = firstAbove(lane.lastEnd, from); i < lane.count && lane.start[i] < to; i++) {
    if (kinds[lane.kind[i]].concurrent) continue;
    forEachBin(lane.start[i] - from, lane.end[i] - from, width, bins, (bin, share) => {
      shares[bin * kinds.length + lane.kind[i]] += share;
    });
  }
  return shares;
}

// The mean busy share of all cards in each of `bins` equal parts of [from, to); one row of each counts.
function busyOverTime(rows, from, to, bins) {
  const busy = new Float32Array(bins).fill(1);
  const lanes = rows.filter((lane) => lane.counted);
  for (const { idle } of lanes) {
    for (let i = 0; i < idle.count; i++) {
      forEachBin(idle.start[i] - from, idle.end[i] - from, (to - from) / bins, bins, (bin, share) => {
        busy[bin] -= share / lanes.length;
      });
    }
  }
  return busy;
}

// Calls `take` with every bin that [start, end) touches, and the share of the bin that it fills.
function forEachBin(start, end, width, bins, take) {
  const last = Math.min(bins - 1, Math.floor(end / width));
  for (let bin = Math.max(0, Math.floor(start / width)); bin <= last; bin++) {
    const inside = Math.min(end, (bin + 1) * width) - Math.max(start, bin * width);
    if (inside > 0) take(bin, inside / width);
  }
}

// All facts about a span, in lines.
function describeSpan(lane, kinds, i) {
  const kind = kinds[lane.kind[i]];
  const ids = [`step ${lane.step[i]}`];
  if (lane.group[i] >= 0) ids.push(`group ${lane.group[i]}`);
  if (lane.size[i] === 1) ids.push(`sample ${lane.first[i]}`);
  if (lane.size[i] > 1) ids.push(`samples ${lane.first[i]} to ${lane.first[i] + lane.size[i] - 1}`);
  const age = lane.step[i] - lane.version[i];
  const stale = kind.stale ? `, stale: ${age} ${age === 1 ? "version" : "versions"} behind` : "";
  const length = duration(lane.end[i] - lane.start[i]);
  return [
    `${kind.label}, ${length}`,
    ids.join(", "),
    `weights version ${lane.version[i]}${stale}`,
    `${lane.name}, from ${(lane.start[i] / 1e6).toFixed(3)} s to ${(lane.end[i] / 1e6).toFixed(3)} s`,
  ].join("\n");
}
