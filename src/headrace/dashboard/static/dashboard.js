// The dashboard: shows what /events sends, or the data inside a report.
//
// Everything that users name is untrusted and inserted as text, never as HTML.
"use strict";

// --- Formats, as in headrace.cli.formatting ------------------------------------------------------

const MISSING = "\u2013";

// Return a format that shows a dash for values that are unknown: null or undefined.
const orMissing = (format) => (value) => (value === null || value === undefined ? MISSING : format(value));
const toFixed = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

const formatNumber = orMissing((value) => toFixed(value, value >= 100 || Number.isInteger(value) ? 0 : value >= 1 ? 1 : 2));
const formatRate = orMissing((value) => `${formatNumber(value)}/s`);
const formatShare = orMissing((value) => `${Math.round(100 * value)}\u00a0%`);

const formatBytes = orMissing((value) => {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${toFixed(value, unit === 0 || value >= 100 ? 0 : 1)} ${units[unit]}`;
});
const formatByteRate = orMissing((value) => `${formatBytes(value)}/s`);

const formatDuration = orMissing((seconds) => {
  if (seconds < 0.1 && seconds > 0) return `${Math.max(1, Math.round(1000 * seconds))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  for (const [size, unit, smallerSize, smaller] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole >= size) {
      const rest = Math.floor((whole % size) / smallerSize);
      return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
    }
  }
  return `${whole} s`;
});
const formatAge = (seconds) => `${formatDuration(seconds)} ago`;

// Time of day, with the date unless it is today.
function formatTime(seconds) {
  const time = new Date(1000 * seconds);
  return time.toDateString() === new Date().toDateString() ? time.toLocaleTimeString("en-GB") : time.toLocaleString("en-GB");
}

const plural = (count, noun) => `${formatNumber(count)} ${noun}${count === 1 ? "" : "s"}`;

// --- Elements ------------------------------------------------------------------------------------

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svgElement = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Unchanged text keeps its node, so that selections and screen readers are not disturbed.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setContent(node, parts) {
  const text = parts.map((each) => each.textContent ?? each).join("");
  if (node.textContent !== text) node.replaceChildren(...parts);
}

function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function panel(title, ...children) {
  const id = `section-${title.toLowerCase().replace(/\W+/g, "-")}`;
  const heading = element("h2", { id }, title);
  const head = element("header", {}, heading);
  const made = element("section", { class: "panel", "aria-labelledby": id }, head, ...children);
  return Object.assign(made, { head, heading });
}

function block(title, ...children) {
  const heading = element("h3", {}, title);
  return Object.assign(element("div", { class: "block" }, heading, ...children), { heading });
}

function track(...parts) {
  const made = element("div", { class: "track", "aria-hidden": "true" });
  for (const kind of parts) made.append(element("span", kind ? { class: kind } : {}));
  return made;
}

function setTrack(made, ...shares) {
  shares.forEach((share, index) => { made.children[index].style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`; });
}

// --- Tables --------------------------------------------------------------------------------------

// A table that is sorted by buttons in its header and shows the first rows until asked for all.
//
// A column has a label, `value(row)` to sort by and `text(row)` to show; a `meter` adds a bar whose
// share is the value, and `choose(row)` makes the text a button.
class DataTable {
  constructor({ noun, columns, key, sort, descending = false, limit = 20, empty = "" }) {
    Object.assign(this, { noun, columns, key, limit, sorted: sort, descending });
    this.rows = [];
    this.showsAll = false;
    this.filter = "";
    this.body = element("tbody");
    this.heads = columns.map((column) => this.makeHead(column));
    this.table = element("table", { "aria-label": noun }, element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    this.scroll = element("div", { class: "scroll", role: "region", "aria-label": `Table of ${noun}`, tabindex: "0" }, this.table);
    this.message = element("p", { class: "empty" }, empty);
    this.button = element("button", { type: "button", class: "show-all" });
    this.button.addEventListener("click", () => { this.showsAll = !this.showsAll; this.render(); });
    this.input = element("input", { type: "search", class: "filter", placeholder: `Filter ${noun}`, "aria-label": `Filter ${noun}` });
    this.input.addEventListener("input", () => { this.filter = this.input.value.toLowerCase(); this.render(); });
    this.count = element("span", { class: "quiet", role: "status" });
    this.more = element("div", { class: "more" }, this.button, this.input, this.count);
    this.root = element("div", {}, this.scroll, this.message, this.more);
    this.elements = new Map();
    this.render();
  }

  makeHead(column) {
    const button = element("button", { type: "button" }, column.label);
    button.addEventListener("click", () => {
      this.descending = this.sorted === column.label ? !this.descending : Boolean(column.numeric);
      this.sorted = column.label;
      this.render();
    });
    return element("th", { scope: "col", class: column.numeric ? "number" : "" }, button);
  }

  // Show rows, or if there are none, a message: texts and elements.
  update(rows, empty = null) {
    this.rows = rows;
    if (empty && !rows.length) setContent(this.message, empty);
    this.render();
  }

  render() {
    this.columns.forEach((column, index) => {
      const order = column.label === this.sorted ? (this.descending ? "descending" : "ascending") : "none";
      setAttribute(this.heads[index], "aria-sort", order);
    });
    this.hideEmptyColumns();
    const matching = this.filter ? this.rows.filter((row) => this.matches(row)) : this.rows;
    const ordered = this.order(matching);
    const shown = this.showsAll ? ordered : ordered.slice(0, this.limit);
    const seen = new Set();
    shown.forEach((row, index) => {
      const key = String(this.key(row));
      seen.add(key);
      let line = this.elements.get(key);
      if (!line) {
        line = this.makeRow();
        this.elements.set(key, line);
      }
      this.fillRow(line, row);
      if (this.body.children[index] !== line) this.body.insertBefore(line, this.body.children[index] || null);
    });
    for (const [key, line] of this.elements) {
      if (!seen.has(key)) {
        line.remove();
        this.elements.delete(key);
      }
    }
    this.scroll.hidden = this.rows.length === 0;
    this.message.hidden = this.rows.length > 0;
    const isLong = this.rows.length > this.limit;
    this.more.hidden = !isLong;
    this.button.hidden = matching.length <= this.limit;
    setText(this.button, this.showsAll ? `Show the first ${this.limit}` : `Show all ${formatNumber(matching.length)}`);
    setText(this.count, this.filter ? `${formatNumber(matching.length)} of ${formatNumber(this.rows.length)} match` : "");
  }

  // A column that is optional and empty in all rows takes no space.
  hideEmptyColumns() {
    this.columns.forEach((column, index) => {
      if (!column.optional) return;
      const name = `hide-${index}`;
      this.table.classList.toggle(name, !this.rows.some((row) => column.text(row)));
      this.heads[index].hidden = this.table.classList.contains(name);
    });
  }

  matches(row) {
    return this.columns.some((column) => column.text(row).toLowerCase().includes(this.filter));
  }

  order(rows) {
    const column = this.columns.find((each) => each.label === this.sorted);
    if (!column) return rows;
    const sign = this.descending ? -1 : 1;
    const values = new Map(rows.map((row) => [row, column.value(row)]));
    const compare = (one, other) => {
      const [a, b] = [values.get(one), values.get(other)];
      // Unknown values are last in both orders.
      if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
      if (b === null || b === undefined) return -1;
      return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    };
    return [...rows].sort(compare);
  }

  makeRow() {
    const line = element("tr");
    this.columns.forEach((column, index) => {
      const classes = [column.numeric && "number", column.wrap && "wrap", column.clip && "clip"].filter(Boolean).join(" ");
      const cell = element(index === 0 ? "th" : "td", index === 0 ? { scope: "row", class: classes } : { class: classes });
      if (column.choose) {
        cell.target = element("button", { type: "button", class: "choose" });
        cell.target.addEventListener("click", () => column.choose(line.row));
        cell.append(cell.target);
      } else if (column.meter !== undefined) {
        cell.target = element("span");
        cell.track = track(column.meter);
        cell.append(element("div", { class: "meter" }, cell.track, cell.target));
      } else {
        cell.target = cell;
      }
      line.append(cell);
    });
    return line;
  }

  fillRow(line, row) {
    line.row = row;
    setAttribute(line, "aria-current", row.isCurrent ? "true" : null);
    this.columns.forEach((column, index) => {
      const cell = line.children[index];
      const text = column.text(row);
      cell.hidden = this.heads[index].hidden;
      setText(cell.target, text);
      if (column.clip) setAttribute(cell, "title", text);
      if (cell.track) setTrack(cell.track, column.value(row));
      if (column.level) setAttribute(cell.target, "data-level", column.level(row));
    });
  }
}

const stateLevel = (row) => (["missing", "no reply", "draining"].includes(row.state) ? "warn" : null);
const textColumn = (label, value, more = {}) => ({ label, value, text: (row) => String(value(row) ?? ""), ...more });
const numberColumn = (label, value, format, more = {}) => ({ label, value, text: (row) => format(value(row)), numeric: true, ...more });

// --- Charts --------------------------------------------------------------------------------------

const CHART_HEIGHT = 132;
const PLOT = { left: 4, right: 4, top: 16, bottom: 18 };

// A chart of the measurements over time. Arrow keys or the pointer move the cursor.
class Chart {
  constructor({ title, series, format, maximum = null }) {
    Object.assign(this, { title, series, format, maximum });
    this.points = [];
    this.cursor = null;
    this.now = element("span", { class: "now" });
    const keys = series.length > 1 ? series.map((each) => element("span", { class: `key ${each.style || ""}` }, each.label)) : [];
    this.caption = element("figcaption", {}, element("span", {}, title), ...keys, this.now);
    this.svg = svgElement("svg", { role: "img", tabindex: "0" });
    this.root = element("figure", { class: "chart" }, this.caption, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.moveCursor(null));
    this.svg.addEventListener("blur", () => this.moveCursor(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.render()).observe(this.svg);
  }

  update(points, start, end, count) {
    Object.assign(this, { points, start, end, count });
    this.render();
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    this.moveCursor(this.timeAt(event.clientX - box.left, box.width));
  }

  key(event) {
    const step = (this.end - this.start) / 60;
    if (event.key === "ArrowLeft") this.moveCursor(Math.max(this.start, (this.cursor ?? this.end) - step));
    else if (event.key === "ArrowRight") this.moveCursor(Math.min(this.end, (this.cursor ?? this.end) + step));
    else if (event.key === "Escape") this.moveCursor(null);
    else return;
    event.preventDefault();
  }

  moveCursor(time) {
    this.cursor = time;
    this.render();
  }

  timeAt(x, width) {
    const share = (x - PLOT.left) / (width - PLOT.left - PLOT.right);
    return this.start + Math.min(1, Math.max(0, share)) * (this.end - this.start);
  }

  // Return the mean of a value in each of `count` equal intervals: null where nothing was measured,
  // NaN where there was nothing to measure, because the server did not reply or no client waited.
  means(key, count) {
    const sums = new Array(count).fill(0);
    const counts = new Array(count).fill(0);
    const without = new Set();
    const width = (this.end - this.start) / count;
    // Intervals begin at multiples of their width: the curve moves, but keeps its form.
    const first = Math.floor(this.end / width) - count + 1;
    for (const [time, values] of this.points) {
      const index = Math.floor(time / width) - first;
      if (index < 0 || index >= count) continue;
      if (!(key in values)) {
        without.add(index);
        continue;
      }
      sums[index] += values[key];
      counts[index] += 1;
    }
    return sums.map((sum, index) => (counts[index] ? sum / counts[index] : without.has(index) ? NaN : null));
  }

  render() {
    const width = this.svg.clientWidth;
    if (!width || !(this.end > this.start)) return;
    const inner = width - PLOT.left - PLOT.right;
    const count = this.count;
    const curves = this.series.map((each) => this.means(each.key, count));
    const largest = Math.max(0, ...curves.flat().filter((value) => value > 0));
    const top = this.maximum ?? niceMaximum(largest);
    const height = CHART_HEIGHT - PLOT.top - PLOT.bottom;
    const x = (index) => PLOT.left + ((index + 0.5) / count) * inner;
    const y = (value) => PLOT.top + height * (1 - Math.min(1, value / top));
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(svgElement("line", { class: "grid", x1: PLOT.left, x2: width - PLOT.right, y1: y(top * share), y2: y(top * share) }));
      // While all values are 0, the scale means nothing.
      if (share && (largest || this.maximum)) parts.push(svgElement("text", { x: PLOT.left, y: y(top * share) - 4 }, this.format(top * share)));
    }
    parts.push(svgElement("text", { x: PLOT.left, y: CHART_HEIGHT - 4 }, `${formatDuration(this.end - this.start)} ago`));
    parts.push(svgElement("text", { x: width - PLOT.right, y: CHART_HEIGHT - 4, "text-anchor": "end" }, "now"));
    curves.forEach((values, index) => {
      const style = this.series[index].style || "";
      for (const run of runs(values)) {
        const line = run.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
        const [first, last] = [x(run[0][0]), x(run[run.length - 1][0])];
        if (this.series.length === 1) parts.push(svgElement("path", { class: `area ${style}`, d: `M${first},${y(0)}L${line.join("L")}L${last},${y(0)}Z` }));
        // A single value is drawn as a short line.
        if (run.length === 1) line.push(`${(first + 2).toFixed(1)},${y(run[0][1]).toFixed(1)}`);
        parts.push(svgElement("path", { class: `curve ${style}`, d: `M${line.join("L")}` }));
      }
    });
    let index = count - 1;
    if (this.cursor !== null) {
      index = Math.min(count - 1, Math.floor(((this.cursor - this.start) / (this.end - this.start)) * count));
      parts.push(svgElement("line", { class: "cursor", x1: x(index), x2: x(index), y1: PLOT.top, y2: y(0) }));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${CHART_HEIGHT}`);
    this.svg.replaceChildren(...parts);
    this.describe(curves, index, largest, count);
  }

  describe(curves, index, largest, count) {
    const latest = this.points.length ? this.points[this.points.length - 1][1] : {};
    const shown = this.series.map((each, number) => {
      const value = this.cursor === null ? latest[each.key] : curves[number][index];
      return this.format(Number.isNaN(value) ? null : value ?? null);
    });
    const time = this.cursor === null ? "" : `${formatTime(this.start + ((index + 0.5) / count) * (this.end - this.start))}  `;
    setText(this.now, time + shown.join(" / "));
    setAttribute(this.svg, "aria-label", `${this.title}: ${shown.join(", ")}; maximum ${this.format(largest)}. Arrow keys show earlier values.`);
  }
}

function niceMaximum(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((each) => each * power >= value);
}

const BRIDGED = 3;

// Return runs of values, each with its index. A few missing ones are bridged: samples of a busy
// server are some seconds apart.
function runs(values) {
  const found = [];
  let previous = -Infinity;
  values.forEach((value, index) => {
    if (Number.isNaN(value)) previous = -Infinity;
    if (value === null || Number.isNaN(value)) return;
    if (index - previous > BRIDGED + 1) found.push([]);
    found[found.length - 1].push([index, value]);
    previous = index;
  });
  return found;
}

// Seconds, label, and seconds between the points: those of the history, but two for rates that change slowly.
const RANGES = [[120, "2 min", 2], [600, "10 min", 5], [3600, "1 h", 30]];

// Charts with buttons for the range of time that they show.
class ChartPanel {
  constructor(charts) {
    this.seconds = 120;
    this.charts = charts.map((each) => new Chart(each));
    this.buttons = RANGES.map(([seconds, label]) => {
      const button = element("button", { type: "button", class: "button" }, label);
      button.addEventListener("click", () => { this.seconds = seconds; this.render(); });
      return [seconds, button];
    });
    this.root = panel("History", element("div", { class: "charts" }, ...this.charts.map((each) => each.root)));
    this.root.head.append(element("div", { class: "group end", role: "group", "aria-label": "Range of the charts" }, ...this.buttons.map(([, button]) => button)));
  }

  update(points, end) {
    Object.assign(this, { points, end });
    this.render();
  }

  render() {
    for (const [seconds, button] of this.buttons) setAttribute(button, "aria-pressed", String(seconds === this.seconds));
    const [, , interval] = RANGES.find(([seconds]) => seconds === this.seconds);
    for (const chart of this.charts) chart.update(this.points, this.end - this.seconds, this.end, this.seconds / interval);
  }
}

// --- Figures at the top --------------------------------------------------------------------------

class Tiles {
  constructor(labels) {
    this.items = labels.map((label) => {
      const [value, note] = [element("dd"), element("dd", { class: "note" })];
      return { value, note, root: element("div", {}, element("dt", {}, label), value, note) };
    });
    this.root = element("dl", { class: "tiles" }, ...this.items.map((each) => each.root));
  }

  // Each figure is a text, or a text with a note and a class.
  update(figures) {
    figures.forEach((figure, index) => {
      const [text, note = "", level = ""] = [].concat(figure);
      setText(this.items[index].value, text);
      setText(this.items[index].note, note);
      setAttribute(this.items[index].value, "class", level);
    });
  }
}

// --- Plan ----------------------------------------------------------------------------------------

const STEP = { height: 34, gapX: 16, gapY: 16, widest: 280, narrowest: 136 };

// Return layer and column of each step. Sources are on top; a step is centred below its inputs.
function placeSteps(steps) {
  const distance = new Array(steps.length).fill(0);
  for (let index = steps.length - 1; index >= 0; index -= 1) {
    for (const input of steps[index][1]) distance[input] = Math.max(distance[input], distance[index] + 1);
  }
  const deepest = Math.max(0, ...distance);
  const columns = new Array(steps.length).fill(null);
  let next = 0;
  steps.forEach(([, inputs], index) => {
    const known = inputs.filter((input, at) => inputs.indexOf(input) === at);
    columns[index] = known.length ? known.reduce((sum, input) => sum + columns[input], 0) / known.length : next++;
  });
  return { layers: distance.map((each) => deepest - each), columns, numLayers: deepest + 1, numColumns: Math.max(1, next) };
}

class PlanGraph {
  constructor() {
    this.root = element("div", { class: "plan", role: "region", "aria-label": "Plan", tabindex: "0" });
    this.drawn = "";
    new ResizeObserver(() => this.render()).observe(this.root);
  }

  update(steps, times) {
    Object.assign(this, { steps, times });
    this.render();
  }

  render() {
    if (!this.steps || !this.root.clientWidth) return;
    const { layers, columns, numLayers, numColumns } = placeSteps(this.steps);
    const width = this.root.clientWidth;
    const wide = Math.max(STEP.narrowest, Math.min(STEP.widest, (width - (numColumns - 1) * STEP.gapX - 2) / numColumns));
    const total = this.times.reduce((sum, each) => sum + each.seconds, 0);
    const most = this.times.length ? this.times[0].name : null;
    const drawn = JSON.stringify([this.steps, this.times.map((each) => [each.name, Math.round(100 * each.seconds / total), each.threads.toFixed(1)]), wide]);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const x = (index) => 1 + columns[index] * (wide + STEP.gapX);
    const y = (index) => 1 + layers[index] * (STEP.height + STEP.gapY);
    const edges = [];
    const nodes = [];
    const used = new Set();
    this.steps.forEach(([name, inputs], index) => {
      for (const input of inputs) {
        const [fromX, fromY] = [x(input) + wide / 2, y(input) + STEP.height];
        const [toX, toY] = [x(index) + wide / 2, y(index)];
        const bend = Math.min(12, (toY - fromY) / 2);
        edges.push(svgElement("path", { d: `M${fromX},${fromY}C${fromX},${fromY + bend} ${toX},${toY - bend} ${toX},${toY}` }));
      }
      // Steps with the same name are measured together; the first one shows the time.
      const time = used.has(name) ? undefined : this.times.find((each) => each.name === name);
      used.add(name);
      nodes.push(this.drawStep(name, time, total, name === most && Boolean(time), x(index), y(index), wide));
    });
    const size = [numColumns * (wide + STEP.gapX) - STEP.gapX + 2, numLayers * (STEP.height + STEP.gapY) - STEP.gapY + 2];
    const label = `Plan with ${plural(this.steps.length, "step")}; the table of steps has the same figures`;
    this.root.replaceChildren(svgElement("svg", { width: size[0], height: size[1], role: "img", "aria-label": label }, ...edges, ...nodes));
  }

  drawStep(name, time, total, isMost, left, top, wide) {
    const [kind, place] = splitStep(name);
    const share = time && total ? time.seconds / total : 0;
    const figure = time && total ? formatShare(share) : "";
    const room = Math.floor((wide - 26 - 7 * figure.length) / 6.8) - kind.length - 1;
    const shownPlace = place.length > room ? (room > 3 ? `${place.slice(0, room - 1)}\u2026` : "") : place;
    const middle = top + STEP.height / 2 + 4;
    return svgElement("g", { class: isMost ? "most" : "" },
      svgElement("title", {}, time ? `${name}: ${formatDuration(time.seconds)}, ${time.threads.toFixed(1)} threads` : name),
      svgElement("rect", { x: left, y: top, width: wide, height: STEP.height, rx: 6 }),
      svgElement("rect", { class: "share", x: left, y: top, width: Math.max(share * wide, 0), height: STEP.height, rx: 6 }),
      svgElement("rect", { class: "frame", x: left, y: top, width: wide, height: STEP.height, rx: 6 }),
      svgElement("text", { x: left + 10, y: middle }, svgElement("tspan", { class: "kind" }, clip(kind, Math.floor(wide / 9))), svgElement("tspan", { class: "place", dx: 6 }, shownPlace)),
      svgElement("text", { x: left + wide - 10, y: middle, "text-anchor": "end" }, figure));
  }
}

const capitalize = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const clip = (text, length) => (text.length > length ? `${text.slice(0, Math.max(1, length - 1))}\u2026` : text);

function splitStep(name) {
  const at = name.indexOf(" at ");
  return at < 0 ? [name, ""] : [name.slice(0, at), name.slice(at + 4)];
}

// --- One job -------------------------------------------------------------------------------------

// Peer of the picture "who waits for whom": its name, and shares of its time.
class Peer {
  constructor(parts) {
    this.title = element("strong");
    this.track = track(...parts.map((each) => each.style));
    this.track.classList.add("large");
    this.items = parts.map((each) => {
      const value = element("span");
      return { value, root: element("li", { class: each.style || "" }, each.label, value) };
    });
    this.root = element("div", { class: "peer" }, this.title, this.track, element("ul", {}, ...this.items.map((each) => each.root)));
  }

  update(title, shares) {
    setText(this.title, title);
    setTrack(this.track, ...shares);
    this.items.forEach((each, index) => setText(each.value, formatShare(shares[index])));
  }
}

class JobPanel {
  constructor() {
    this.bar = track("");
    this.bar.classList.add("large");
    this.progress = element("div", { class: "progress" }, this.bar);
    this.headline = element("p");
    this.progress.append(this.headline);
    this.facts = element("dl", { class: "facts" });
    this.dispatcher = element("div", { class: "peer" }, element("strong", {}, "Dispatcher"));
    this.workers = new Peer([{ label: "produce" }, { label: "wait for splits", style: "second" }, { label: "wait for clients", style: "wait" }]);
    this.clients = new Peer([{ label: "consume" }, { label: "wait for elements", style: "wait" }]);
    this.arrow = element("div", { class: "arrow" });
    this.flow = element("div", { class: "flow" }, this.dispatcher, element("div", { class: "arrow" }, "splits \u2192"), this.workers.root, this.arrow, this.clients.root);
    this.verdict = element("p", { class: "verdict" });
    this.graph = new PlanGraph();
    this.noPlan = element("p", { class: "empty" }, "The dispatcher does not know the steps of this plan: the client is of an earlier release, or the plan has more than 200 steps.");
    this.steps = new DataTable({
      noun: "steps", key: (row) => row.name, sort: "time", descending: true, limit: 12,
      empty: "No step has been measured yet.",
      columns: [
        textColumn("step", (row) => row.name, { clip: true }),
        numberColumn("threads", (row) => row.threads, (value) => value.toFixed(1)),
        numberColumn("time", (row) => row.seconds, formatDuration),
        numberColumn("share", (row) => row.share, formatShare, { meter: "" }),
      ],
    });
    this.tasks = new DataTable({
      noun: "tasks", key: (row) => row.id, sort: "worker", limit: 10, empty: "No task is running.",
      columns: [
        textColumn("worker", (row) => row.worker),
        textColumn("waits for", (row) => row.waiting_for),
        numberColumn("for clients", (row) => row.client_wait, formatShare, { meter: "wait" }),
        numberColumn("for splits", (row) => row.split_wait, formatShare, { meter: "second" }),
        numberColumn("elements", (row) => row.elements, formatRate),
        numberColumn("splits", (row) => row.splits, formatNumber),
        numberColumn("buffered", (row) => row.buffered, formatNumber),
      ],
    });
    this.readers = new DataTable({
      noun: "clients", key: (row) => row.id, sort: "waiting", descending: true, limit: 10, empty: "No client reads this epoch.",
      columns: [
        textColumn("client", (row) => row.name, { clip: true }),
        numberColumn("waiting", (row) => row.wait, formatShare, { meter: "wait" }),
        numberColumn("waited", (row) => row.wait_seconds, formatDuration),
        numberColumn("elements", (row) => row.elements, formatRate),
        numberColumn("received", (row) => row.total, formatNumber),
        numberColumn("buffered", (row) => row.buffered, formatNumber),
        numberColumn("heartbeat", (row) => row.heartbeat, formatAge),
      ],
    });
    this.taskBlock = block("Tasks", this.tasks.root);
    this.clientBlock = block("Clients", this.readers.root);
    this.active = element("div", { class: "job" },
      block("Who waits for whom", element("div", { class: "waits" }, this.flow, this.verdict)),
      element("div", { class: "split" },
        element("div", { class: "job" },
          block("Progress", this.progress, this.facts),
          block("Time of the workers by step", this.steps.root)),
        block("Plan, with the share of the time in each step", this.graph.root, this.noPlan)),
      this.taskBlock, this.clientBlock);
    this.idle = element("p", { class: "empty" });
    this.root = panel("Job", this.idle, this.active);
    this.subtitle = element("span", { class: "quiet" });
    this.root.head.append(this.subtitle);
  }

  update(job, plans) {
    this.root.hidden = !job;
    if (!job) return;
    const epoch = shownEpoch(job);
    setText(this.root.heading, `Job ${jobName(job)}`);
    setText(this.subtitle, `${job.mode}, dataset ${job.dataset}, ${plural(job.num_epochs, "epoch")}`);
    this.active.hidden = !epoch;
    this.idle.hidden = Boolean(epoch);
    setText(this.idle, "No epoch of this job is remembered.");
    if (!epoch) return;
    this.updateProgress(job, epoch);
    this.updateWaits(job, epoch);
    const steps = plans[job.dataset] || [];
    const total = epoch.steps.reduce((sum, each) => sum + each.seconds, 0);
    this.graph.root.hidden = steps.length === 0;
    this.noPlan.hidden = steps.length > 0;
    this.graph.update(steps, epoch.steps);
    this.steps.update(epoch.steps.map((each) => ({ ...each, share: total ? each.seconds / total : 0 })));
    // The dashboard leaves some out if there are very many in all jobs.
    setText(this.taskBlock.heading, epoch.tasks.length < epoch.num_tasks ? `Tasks: the ${epoch.tasks.length} slowest of ${formatNumber(epoch.num_tasks)}` : "Tasks");
    setText(this.clientBlock.heading, epoch.clients.length < epoch.num_clients ? `Clients: the ${epoch.clients.length} that wait most of ${formatNumber(epoch.num_clients)}` : "Clients");
    this.tasks.update(epoch.tasks);
    this.readers.update(epoch.clients);
  }

  updateProgress(job, epoch) {
    setTrack(this.bar, epoch.progress);
    const name = epoch.name ? `Epoch ${epoch.name}` : "Epoch";
    const parts = [`${name}: ${epoch.finished ? "finished" : formatShare(epoch.progress)}`];
    if (epoch.remaining !== null && !epoch.finished) parts.push(`${formatDuration(epoch.remaining)} left`);
    setText(this.headline, parts.join(", "));
    const facts = [
      ["rate", `${formatRate(epoch.elements_per_second)}, ${formatByteRate(epoch.bytes_per_second)}`],
      ["elements", `${formatNumber(epoch.elements)} (${formatBytes(epoch.bytes)}) in ${formatDuration(epoch.elapsed)}`],
    ];
    if (epoch.num_splits !== null) {
      const total = epoch.num_splits < 0 ? "infinitely many" : formatNumber(epoch.num_splits);
      facts.push(["splits", `${formatNumber(epoch.assigned)} of ${total} assigned, ${formatNumber(epoch.in_progress)} in progress`]);
      if (epoch.abandoned) facts.push(["abandoned", plural(epoch.abandoned, "split")]);
    }
    if (job.path) facts.push(["directory", job.path]);
    if (epoch.failure) facts.push(["failure", epoch.failure]);
    setFacts(this.facts, facts);
  }

  updateWaits(job, epoch) {
    const forClients = epoch.task_client_wait ?? 0;
    const forSplits = epoch.task_split_wait ?? 0;
    const producing = epoch.num_tasks ? Math.max(0, 1 - forClients - forSplits) : null;
    this.workers.update(`Workers, ${plural(epoch.num_tasks, "task")}`, [producing, epoch.task_split_wait, epoch.task_client_wait]);
    const waiting = epoch.client_wait;
    this.clients.root.hidden = Boolean(job.path);
    this.arrow.hidden = Boolean(job.path);
    this.clients.update(plural(epoch.num_clients, "client"), [waiting === null ? null : 1 - waiting, waiting]);
    setText(this.arrow, "elements \u2192");
    this.verdict.hidden = epoch.bound_by === null;
    setAttribute(this.verdict, "data-level", epoch.bound_by === "nothing" ? null : "wait");
    setText(this.verdict, `Bound by ${epoch.bound_by}.${epoch.advice ? ` ${capitalize(epoch.advice)}.` : ""}`);
  }
}

function setFacts(list, facts) {
  while (list.children.length > 2 * facts.length) list.lastChild.remove();
  facts.forEach(([label, text], index) => {
    if (!list.children[2 * index]) list.append(element("dt"), element("dd"));
    setText(list.children[2 * index], label);
    setText(list.children[2 * index + 1], text);
  });
}

const jobName = (job) => job.name || (job.path ? `save into ${job.path}` : "(anonymous)");

// Return the epoch that a job is in, or else its last one.
function shownEpoch(job) {
  return job.epochs.find((each) => !each.finished) || job.epochs[job.epochs.length - 1] || null;
}

const noWorker = (command) => ["No worker is registered. Start one with ", element("code", {}, command), "."];

// --- Dispatcher ----------------------------------------------------------------------------------

class DispatcherPage {
  constructor() {
    this.chosen = null;
    this.tiles = new Tiles(["Workers", "Clients", "Throughput", "Data", "Clients wait", "Elements so far", "Workers lost", "Refused peers"]);
    this.charts = new ChartPanel([
      { title: "Throughput", series: [{ key: "elements" }], format: formatRate },
      { title: "Data", series: [{ key: "bytes", style: "second" }], format: formatByteRate },
      { title: "Clients wait", series: [{ key: "wait", style: "wait" }], format: formatShare, maximum: 1 },
      { title: "Workers", series: [{ key: "workers" }], format: formatNumber },
    ]);
    this.jobs = new DataTable({
      noun: "jobs", key: (row) => row.job.id, sort: "progress", limit: 10,
      columns: [
        textColumn("job", (row) => jobName(row.job), { clip: true, choose: (row) => { this.chosen = row.job.id; this.render(); } }),
        numberColumn("progress", (row) => row.epoch?.progress ?? null, formatShare, { meter: "" }),
        numberColumn("time left", (row) => (row.epoch && !row.epoch.finished ? row.epoch.remaining : null), formatDuration),
        textColumn("epoch", (row) => row.epoch?.name ?? ""),
        textColumn("mode", (row) => row.job.mode, { clip: true }),
        numberColumn("elements", (row) => row.rate, formatRate),
        numberColumn("data", (row) => row.bytes, formatByteRate),
        numberColumn("clients wait", (row) => row.wait, formatShare, { meter: "wait" }),
        numberColumn("tasks", (row) => row.job.tasks, formatNumber),
        numberColumn("clients", (row) => row.job.clients, formatNumber),
        textColumn("bound by", (row) => row.epoch?.bound_by ?? "", { clip: true }),
      ],
    });
    this.job = new JobPanel();
    this.workers = new DataTable({
      noun: "workers", key: (row) => row.id, sort: "worker", limit: 20,
      columns: [
        textColumn("worker", (row) => row.address),
        textColumn("state", (row) => row.state, { level: stateLevel }),
        numberColumn("tasks", (row) => row.tasks, formatNumber),
        numberColumn("elements", (row) => row.elements, formatRate),
        numberColumn("data", (row) => row.bytes, formatByteRate),
        numberColumn("buffered", (row) => row.buffered, formatNumber),
        numberColumn("buffered data", (row) => row.buffered_bytes, formatBytes),
        numberColumn("heartbeat", (row) => row.heartbeat, formatAge),
        textColumn("tags", (row) => row.tags, { clip: true, optional: true }),
      ],
    });
    this.lost = new DataTable({
      noun: "lost workers", key: (row) => `${row.address} ${row.number}`, sort: "lost", limit: 10, empty: "No worker was lost.",
      columns: [
        textColumn("worker", (row) => row.address),
        numberColumn("lost", (row) => row.seconds_ago, formatAge),
        textColumn("reason", (row) => row.reason, { wrap: true }),
      ],
    });
    this.peers = element("p", { class: "quiet" });
    this.root = [
      this.tiles.root, this.charts.root, panel("Jobs", this.jobs.root), this.job.root,
      panel("Workers", this.workers.root), panel("Lost and refused peers", this.lost.root, this.peers),
    ];
  }

  update(view, model) {
    Object.assign(this, { view, model });
    this.render();
  }

  render() {
    const { view, model } = this;
    const values = model.values;
    const draining = view.workers.filter((each) => each.state === "draining").length;
    const wanted = view.wanted_workers;
    const isShort = view.workers.length - draining < wanted;
    const notes = [
      wanted && `${formatNumber(wanted)} wanted`,
      draining && `${formatNumber(draining)} draining`,
      view.slots && `${formatNumber(view.occupied_slots)} of ${plural(view.slots, "slot")}`,
    ];
    this.tiles.update([
      [formatNumber(view.workers.length), notes.filter(Boolean).join(", "), isShort ? "warn" : ""],
      [formatNumber(view.clients), plural(view.jobs.length, "job")],
      [formatRate(values.elements ?? null), "elements"],
      [formatByteRate(values.bytes ?? null), "from workers"],
      [formatShare(values.wait ?? null), "mean of clients"],
      [formatNumber(view.elements), formatBytes(view.bytes)],
      [formatNumber(view.num_lost), view.lost.length ? `last ${formatDuration(view.lost[0].seconds_ago)} ago` : "", view.num_lost ? "warn" : ""],
      [formatNumber(view.refused), view.refused ? "wrong key or protocol" : "", view.refused ? "warn" : ""],
    ]);
    this.charts.update(model.points, model.time);
    const rows = view.jobs.map((job) => this.describe(job));
    // An unfinished job is more interesting than a finished one.
    const chosen = rows.find((row) => row.job.id === this.chosen) || rows.find((row) => row.epoch && !row.epoch.finished) || rows[0];
    if (chosen) chosen.isCurrent = true;
    const call = `dataset.apply(hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, "${model.address}"))`;
    this.jobs.update(rows, ["No job yet. A program starts one when it iterates over ", element("code", {}, call), "."]);
    this.job.update(chosen?.job, model.plans);
    this.workers.update(view.workers, noWorker(`headrace worker --dispatcher ${model.address}`));
    this.lost.update(view.lost.map((each, index) => ({ ...each, number: view.num_lost - index })));
    setText(this.peers, view.refused ? `${plural(view.refused, "connection")} refused because of a wrong key or an unknown protocol.` : "No connection was refused.");
  }

  describe(job) {
    const epoch = shownEpoch(job);
    const active = job.epochs.filter((each) => !each.finished);
    const sum = (key) => active.reduce((total, each) => total + each[key], 0);
    return { job, epoch, rate: sum("elements_per_second"), bytes: sum("bytes_per_second"), wait: active.length ? active[0].client_wait : null };
  }
}

// --- Coordinator and parameter servers -----------------------------------------------------------

function serverTable() {
  return new DataTable({
    noun: "parameter servers", key: (row) => row.address, sort: "server", limit: 20, empty: "No parameter servers.",
    columns: [
      textColumn("server", (row) => (row.index === undefined ? row.address : `${row.index}${row.address ? ` at ${row.address}` : ""}`)),
      textColumn("state", (row) => (row.problem ? `${row.state}: ${row.problem}` : row.roles || row.state), { clip: true, level: stateLevel }),
      numberColumn("busy", (row) => row.busy, formatShare, { meter: "" }),
      numberColumn("requests", (row) => row.requests, formatRate),
      numberColumn("in", (row) => row.in, formatByteRate),
      numberColumn("out", (row) => row.out, formatByteRate),
      numberColumn("waiting", (row) => row.waiting, formatNumber),
      numberColumn("failed", (row) => row.failed, formatNumber),
      numberColumn("shards", (row) => row.shards, formatNumber),
      numberColumn("tables", (row) => row.tables, formatNumber),
      numberColumn("rows", (row) => row.rows, formatNumber),
      numberColumn("memory", (row) => row.stored, formatBytes),
    ],
  });
}

const SERVER_CHARTS = [
  { title: "Server requests", series: [{ key: "requests" }], format: formatRate },
  { title: "Data", series: [{ key: "in", label: "in" }, { key: "out", label: "out", style: "second" }], format: formatByteRate },
  { title: "Servers busy", series: [{ key: "busy", style: "second" }], format: formatShare, maximum: 1 },
  { title: "Memory", series: [{ key: "stored" }], format: formatBytes },
];

class CoordinatorPage {
  constructor() {
    this.tiles = new Tiles(["Functions done", "Queued", "In flight", "Staleness", "Workers", "Worker losses", "Retried", "Failed"]);
    this.charts = new ChartPanel([
      { title: "Functions done", series: [{ key: "functions" }], format: formatRate },
      { title: "Functions", series: [{ key: "queued", label: "queued", style: "wait" }, { key: "in_flight", label: "in flight" }], format: formatNumber },
      { title: "Staleness", series: [{ key: "gap", style: "wait" }], format: formatNumber },
      { title: "Workers", series: [{ key: "workers" }], format: formatNumber },
      ...SERVER_CHARTS,
    ]);
    this.facts = element("dl", { class: "facts" });
    this.workers = new DataTable({
      noun: "workers", key: (row) => row.number, sort: "worker", limit: 20,
      columns: [
        { label: "worker", value: (row) => row.number, text: (row) => `${row.number} at ${row.address}` },
        textColumn("state", (row) => row.state, { level: stateLevel }),
        textColumn("running", (row) => row.reason || row.running.map((each) => `${each.name} ${formatDuration(each.seconds)}`).join(", ") || "nothing", { wrap: true }),
        numberColumn("in flight", (row) => row.in_flight, formatNumber),
        numberColumn("done", (row) => row.finished, formatNumber),
        numberColumn("losses", (row) => row.losses, formatNumber),
        numberColumn("in state", (row) => row.seconds_in_state, formatDuration),
      ],
    });
    this.servers = serverTable();
    this.root = [
      this.tiles.root, this.charts.root, panel("Functions", this.facts),
      panel("Workers", this.workers.root), panel("Parameter servers", this.servers.root),
    ];
  }

  update(view, model) {
    const missing = view.workers.filter((each) => each.state === "missing").length;
    this.tiles.update([
      [formatNumber(view.finished), formatRate(view.per_second)],
      formatNumber(view.queued),
      formatNumber(view.in_flight),
      [formatNumber(view.gap), view.staleness === null ? "no limit" : `limit ${view.staleness}`],
      [formatNumber(view.workers.length - missing), missing ? `${missing} missing` : "connected", missing ? "warn" : ""],
      [formatNumber(view.num_lost), "", view.num_lost ? "warn" : ""],
      [formatNumber(view.retried), view.retried ? "after losses" : "", view.retried ? "warn" : ""],
      [formatNumber(view.failed), "", view.failed ? "bad" : ""],
    ]);
    const facts = [
      ["staleness", `oldest unfinished function ${formatNumber(view.gap)} behind the newest, ${formatNumber(view.max_gap)} at most so far`],
      ["mean time", view.returned ? formatDuration(view.total_seconds / view.returned) : MISSING],
    ];
    if (view.longest) {
      const median = view.longest.median === null ? "" : `; median ${formatDuration(view.longest.median)}`;
      facts.push(["longest", `${view.longest.name} on worker ${view.longest.worker} for ${formatDuration(view.longest.seconds)}${median}`]);
    }
    if (view.failure) facts.push(["error", `raised by the next schedule, join or done: ${view.failure}`]);
    setFacts(this.facts, facts);
    this.charts.update(model.points, model.time);
    this.workers.update(view.workers, noWorker(`headrace server --coordinator ${model.address}`));
    this.servers.update(view.servers);
  }
}

class ServerPage {
  constructor() {
    this.tiles = new Tiles(["Requests", "Busy", "Received", "Sent", "Waiting", "Failed", "Memory", "Rows"]);
    this.charts = new ChartPanel(SERVER_CHARTS);
    this.servers = serverTable();
    this.operations = new DataTable({
      noun: "operations", key: (row) => row.name, sort: "count", descending: true, limit: 20, empty: "No operations yet.",
      columns: [textColumn("operation", (row) => row.name), numberColumn("count", (row) => row.count, formatNumber)],
    });
    this.root = [this.tiles.root, this.charts.root, panel("Parameter server", this.servers.root), panel("Operations", this.operations.root)];
  }

  update(view, model) {
    const [server] = view.servers;
    this.tiles.update([
      [formatRate(server.requests), `${formatNumber(server.total)} so far`],
      formatShare(server.busy), formatByteRate(server.in), formatByteRate(server.out),
      formatNumber(server.waiting), [formatNumber(server.failed), "", server.failed ? "bad" : ""],
      [formatBytes(server.stored), plural(server.shards, "shard")], [formatNumber(server.rows), plural(server.tables, "table")],
    ]);
    this.charts.update(model.points, model.time);
    this.servers.update(view.servers);
    this.operations.update(view.operations);
  }
}

// --- Page ----------------------------------------------------------------------------------------

const PAGES = { dispatcher: DispatcherPage, coordinator: CoordinatorPage, server: ServerPage };
const KINDS = { dispatcher: "Dispatcher", coordinator: "Coordinator", server: "Parameter server" };
const HISTORY_SECONDS = 3600;

class Dashboard {
  constructor() {
    this.model = { points: [], plans: {}, values: {}, time: 0 };
    this.status = null;
    this.lostAt = null;
    this.isReport = false;
    this.kind = null;
    this.notices = new Map();
  }

  receiveHistory(points) {
    this.model.points = points;
  }

  receivePlans(plans) {
    this.model.plans = plans;
  }

  receiveStatus(status) {
    this.status = status;
    const { points } = this.model;
    if (!points.length || status.time > points[points.length - 1][0] + 0.5) points.push([status.time, status.values]);
    while (points.length && points[0][0] < status.time - HISTORY_SECONDS) points.shift();
    Object.assign(this.model, { time: status.time, address: status.address });
    if (!status.problem) this.model.values = status.values;
    this.render();
  }

  connectionLost() {
    this.lostAt ??= Date.now() / 1000;
    this.renderState();
  }

  connected() {
    this.lostAt = null;
    this.renderState();
  }

  render() {
    const { view, address } = this.status;
    if (view) {
      if (view.kind !== this.kind) {
        this.kind = view.kind;
        this.page = new PAGES[view.kind]();
        document.getElementById("main").replaceChildren(...this.page.root);
      }
      this.page.update(view, this.model);
      setText(document.getElementById("target"), `${KINDS[view.kind]} at ${address}, up ${formatDuration(view.uptime)}`);
      document.title = `${KINDS[view.kind]} ${address} \u2013 Headrace`;
      view.mismatches.forEach((text, index) => this.notice(`version ${index}`, text));
      for (const name of [...this.notices.keys()]) {
        if (name.startsWith("version ") && Number(name.slice(8)) >= view.mismatches.length) this.notice(name, "");
      }
    } else if (!this.page) {
      setText(document.getElementById("target"), address);
      setText(document.getElementById("waiting"), "The data appear here as soon as the server replies.");
    }
    this.renderState();
  }

  renderState() {
    const status = this.status;
    const silent = status?.unreachable_since ?? null;
    let [state, label] = ["live", "Live"];
    if (this.isReport) [state, label] = ["report", `Report of ${new Date(1000 * status.time).toLocaleString("en-GB")}`];
    else if (this.lostAt !== null) [state, label] = ["lost", "Reconnecting"];
    else if (!status) [state, label] = ["starting", "Connecting"];
    else if (silent !== null) [state, label] = ["no-reply", "No reply"];
    setAttribute(document.getElementById("state"), "data-state", state);
    setText(document.getElementById("state"), label);
    this.notice("lost", this.lostAt === null ? "" : `The connection to the dashboard was lost at ${formatTime(this.lostAt)}; reconnecting.${this.page ? " The page shows the last data." : ""}`, "bad");
    // Without the seconds that have passed: a screen reader would read each change aloud.
    const since = silent === null ? "" : `No reply from ${status.address} since ${formatTime(silent)}.${this.page ? " The page shows the last data." : ""} Reason: ${status.problem}`;
    this.notice("silent", since, "wait");
  }

  notice(name, text, level = "wait") {
    let found = this.notices.get(name);
    if (!text) {
      found?.remove();
      this.notices.delete(name);
      return;
    }
    if (!found) {
      found = element("p", { class: "notice", "data-level": level });
      this.notices.set(name, found);
      document.getElementById("notices").append(found);
    }
    setText(found, text);
  }
}

// --- Connection ----------------------------------------------------------------------------------

const SILENCE_MS = 15000;
const RECONNECT_MS = 2000;

// Follows the events; also after the server was restarted, or the connection died without notice.
//
// A hidden tab closes its connection: browsers open six to a host, and the seventh tab would stay
// blank. When it is shown again, the stream begins with the history.
function follow(dashboard) {
  let lastEvent = Date.now();
  let source = null;
  const open = () => {
    source?.close();
    source = null;
    if (document.hidden) return;
    lastEvent = Date.now();
    source = new EventSource("events");
    const on = (name, receive) => source.addEventListener(name, (event) => {
      lastEvent = Date.now();
      dashboard.connected();
      receive(JSON.parse(event.data));
    });
    on("history", (data) => dashboard.receiveHistory(data));
    on("plans", (data) => dashboard.receivePlans(data));
    on("status", (data) => dashboard.receiveStatus(data));
    source.addEventListener("error", () => dashboard.connectionLost());
  };
  open();
  document.addEventListener("visibilitychange", open);
  setInterval(() => {
    if (!source) return;
    const isSilent = Date.now() - lastEvent > SILENCE_MS;
    if (isSilent) dashboard.connectionLost();
    if (isSilent || source.readyState === EventSource.CLOSED) open();
  }, RECONNECT_MS);
}

// --- Theme ---------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];
const THEME_KEY = "headrace-theme";

function readTheme() {
  try {
    const kept = localStorage.getItem(THEME_KEY);
    return THEMES.includes(kept) ? kept : "auto";
  } catch {
    return "auto"; // files have no storage in some browsers
  }
}

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  setText(document.getElementById("theme"), `Theme: ${theme}`);
}

function changeTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  showTheme(theme);
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // The theme lasts until the page is closed.
  }
}

// --- Start ---------------------------------------------------------------------------------------

function start() {
  showTheme(readTheme());
  document.getElementById("theme").addEventListener("click", changeTheme);
  const dashboard = new Dashboard();
  const report = document.getElementById("report");
  if (!report) {
    dashboard.renderState();
    follow(dashboard);
    return;
  }
  const { status, history, plans } = JSON.parse(report.textContent);
  dashboard.isReport = true;
  document.getElementById("save").hidden = true;
  dashboard.receiveHistory(history);
  dashboard.receivePlans(plans);
  dashboard.receiveStatus(status);
}

start();
