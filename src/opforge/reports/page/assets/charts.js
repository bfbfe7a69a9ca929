// Scatter charts as SVG. All points of one kind are one path, so that 100,000 points are drawn at once.

const MARGIN = { left: 66, right: 12, top: 10, bottom: 40 };
const TALL = 260;
const NOUGHT = -32768;
const ENDLESS = 32767;

/**
 * Draw a chart into a box, and redraw it whenever its width changes.
 * points: {x, y, low, high, kind, at}; x and y are powers of ten, null is drawn at the lower end and
 * Infinity at the upper; guides: {from: [x, y], to: [x, y], name}; say(point) describes a point,
 * pick(point) opens it.
 */
function chart({ points, guides = [], xTitle, yTitle, xText, yText, xBase, say, pick, label }) {
  const words = make("p", { class: "readout", "aria-live": "polite" }, "\u00a0");
  const plot = make("div", { class: "plot" });
  const box = make("figure", { class: "chart" }, plot, words);
  const paint = () => paintChart(plot, words, { points, guides, xTitle, yTitle, xText, yText, xBase, say, pick, label });
  let wide = 0;
  new ResizeObserver(() => {
    if (plot.clientWidth && plot.clientWidth !== wide) {
      wide = plot.clientWidth;
      paint();
    }
  }).observe(plot);
  return box;
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const room = Math.max((high - low) * 0.05, 0.1);
  return [low - room, high + room];
}

function scale([low, high], from, to) {
  return (value) => {
    if (value === null) return from;
    if (value === Infinity) return to;
    return from + ((value - low) / (high - low)) * (to - from);
  };
}

/** Return the positions of grid lines as powers of ten: powers of the base, or even steps if the range has few. */
function ticks([low, high], most, base = 10) {
  const unit = Math.log10(base);
  const whole = [];
  for (let at = Math.ceil(low / unit); at * unit <= high; at++) whole.push(at);
  if (whole.length >= 3) {
    const every = Math.ceil(whole.length / most);
    return whole.filter((at) => at % every === 0).map((at) => at * unit);
  }
  const [from, to] = [10 ** low, 10 ** high];
  const rough = (to - from) / Math.min(most, 6);
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((times) => times * size >= rough) * size;
  const even = [];
  for (let at = Math.ceil(from / step); at * step <= to; at++) if (at > 0) even.push(Math.log10(at * step));
  return even;
}

function paintChart(plot, words, { points, guides, xTitle, yTitle, xText, yText, xBase, say, pick, label }) {
  const wide = plot.clientWidth;
  const xRange = extent(points.map((point) => point.x));
  const yRange = extent(points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]).concat(guides.flatMap((guide) => (guide.keep ? [guide.from[1]] : []))));
  const x = scale(xRange, MARGIN.left, wide - MARGIN.right);
  const y = scale(yRange, TALL - MARGIN.bottom, MARGIN.top);
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  const inner = draw("g", { "clip-path": `url(#${clip})` });
  const svg = draw("svg", { viewBox: `0 0 ${wide} ${TALL}`, width: wide, height: TALL, role: "img", "aria-label": label });
  svg.append(draw("clipPath", { id: clip }, draw("rect", { x: MARGIN.left - 5, y: MARGIN.top - 5, width: Math.max(wide - MARGIN.left - MARGIN.right + 10, 0), height: TALL - MARGIN.top - MARGIN.bottom + 10 })));
  for (const tick of ticks(xRange, Math.floor(wide / 90), xBase)) {
    svg.append(draw("line", { class: "grid", x1: x(tick), x2: x(tick), y1: MARGIN.top, y2: TALL - MARGIN.bottom }));
    svg.append(draw("text", { class: "tick", x: x(tick), y: TALL - MARGIN.bottom + 15, "text-anchor": "middle" }, xText(10 ** tick)));
  }
  for (const tick of ticks(yRange, 8)) {
    svg.append(draw("line", { class: "grid", x1: MARGIN.left, x2: wide - MARGIN.right, y1: y(tick), y2: y(tick) }));
    svg.append(draw("text", { class: "tick", x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, yText(10 ** tick)));
  }
  svg.append(draw("text", { class: "axis", x: (MARGIN.left + wide - MARGIN.right) / 2, y: TALL - 6, "text-anchor": "middle" }, xTitle));
  svg.append(draw("text", { class: "axis", transform: `translate(11 ${TALL / 2 - 15}) rotate(-90)`, "text-anchor": "middle" }, yTitle));
  for (const guide of guides) {
    const ends = { x1: x(guide.from[0]), y1: y(guide.from[1]), x2: x(guide.to[0]), y2: y(guide.to[1]) };
    inner.append(draw("line", { class: "guide", ...ends }, draw("title", {}, guide.name)));
  }
  const places = placed(points, x, y);
  for (const [kind, { bars, dots }] of places.paths) {
    if (bars) inner.append(draw("path", { class: `bars k-${kind}`, d: bars }));
    inner.append(draw("path", { class: `dots k-${kind}`, d: dots }));
  }
  svg.append(inner);
  svg.addEventListener("pointermove", (event) => {
    const point = nearest(points, places, svg, event);
    words.textContent = point ? say(point) : "\u00a0";
    svg.classList.toggle("over", Boolean(point && pick));
  });
  svg.addEventListener("click", (event) => {
    const point = nearest(points, places, svg, event);
    if (point && pick) pick(point);
  });
  plot.replaceChildren(svg);
}

/** Return the positions of points and a path for each kind; points at the same spot are drawn once. */
function placed(points, x, y) {
  const [xs, ys] = [new Float32Array(points.length), new Float32Array(points.length)];
  const [seen, parts] = [new Set(), new Map()];
  points.forEach((point, at) => {
    [xs[at], ys[at]] = [x(point.x), y(point.y)];
    const spot = `${point.kind} ${Math.round(xs[at])} ${Math.round(ys[at])}`;
    if (seen.has(spot)) return;
    seen.add(spot);
    if (!parts.has(point.kind)) parts.set(point.kind, { bars: [], dots: [] });
    const part = parts.get(point.kind);
    part.dots.push(`M${xs[at].toFixed(1)} ${ys[at].toFixed(1)}h0`);
    if (point.low !== undefined) part.bars.push(`M${xs[at].toFixed(1)} ${y(point.low).toFixed(1)}V${y(point.high).toFixed(1)}`);
  });
  return { xs, ys, paths: [...parts].map(([kind, part]) => [kind, { bars: part.bars.join(""), dots: part.dots.join("") }]) };
}

function nearest(points, { xs, ys }, svg, event) {
  const frame = svg.getBoundingClientRect();
  const [left, top] = [event.clientX - frame.left, event.clientY - frame.top];
  let [best, far] = [null, 14 ** 2];
  for (let at = 0; at < points.length; at++) {
    const distance = (xs[at] - left) ** 2 + (ys[at] - top) ** 2;
    if (distance < far) [best, far] = [points[at], distance];
  }
  return best;
}

/** Return the logarithm for a chart: null at the lower end, Infinity at the upper. */
function power(value) {
  const known = Number(value);
  return known > 0 ? Math.log10(known) : known <= 0 ? null : Infinity;
}

function fromHundredths(value) {
  return value === NOUGHT ? null : value === ENDLESS ? Infinity : value / 100;
}

function tenTo(value) {
  return value === null ? "0" : value === Infinity ? "∞" : short(10 ** value);
}

/** Chart of errors against their bounds: points above the line are wrong. */
function errorChart(points, say, pick) {
  const [low, high] = extent(points.map((point) => point.x));
  const guides = [{ from: [low, low], to: [high, high], name: "error = bound" }];
  return chart({ points, guides, xTitle: "allowed", yTitle: "error", xText: short, yText: short, say, pick, label: "error of the kernel over the allowed error" });
}
