// One operator: its charts, its cases with commands that reproduce them, its kernel's proof and source.

const AT_ONCE = 50;
const FIGURES = [
  ["error", (c) => c.kernel_error === undefined ? "" : `${short(c.kernel_error)} (${data.against} ${short(c.aten_error)}), allowed ${short(c.bound)}`],
  ["tolerance", (c) => (c.rtol === undefined ? "" : `rtol ${short(c.rtol)}, atol ${short(c.atol)}`)],
  ["residual", (c) => (c.kernel_residual === undefined ? "" : `${short(c.kernel_residual)} (${data.against} ${short(c.aten_residual)}), allowed ${short(c.residual_bound)}`)],
  ["samples", (c) => (c.z === undefined ? (c.identical_draws ? `the same as ${data.against}'s` : "") : `${c.draws}, largest test ${short(c.z)}, allowed ${short(c.z_limit)}`)],
  ["times", (c) => (c.kernel_us === undefined ? "" : `${short(c.kernel_us, 4)} µs, ${data.against} ${short(c.aten_us, 4)} µs (${c.timed || "call"}, ${c.rounds} rounds)`)],
  ["speedup", (c) => interval(c.speedup, c.speedup_low, c.speedup_high) + (c.launch_bound ? " launch-bound" : "")],
  ["SOL", (c) => (c.sol_us === undefined ? "" : c.sol_bound === "latency" ? `latency-bound: ${bytes(c.sol_bytes)}, ${short(c.sol_flops)} operations` : `${short(c.sol_kernel)} % (${data.against} ${short(c.sol_aten)} %) of ${c.sol_bound}: ${bytes(c.sol_bytes)}, ${short(c.sol_flops)} operations`)],
  ["variants", (c) => (c.variants || []).join(", ")],
  ["source", (c) => c.source || ""],
];

const PROVEN = { op: "operator", dtypes: "dtypes", dimensions: "dimensions", elements: "elements", extents: "extents", layouts: "layouts", arguments: "other arguments", speed: "not slower at" };

let opened = null;
let drawn = null; // state of the open operator when it was drawn

function detailDialog() {
  const dialog = make("dialog", { id: "detail", "aria-label": "an operator" });
  dialog.addEventListener("close", () => {
    if (dialog.open) return; // opened again before this event arrived
    opened = null;
    if (location.hash) history.replaceState(null, "", location.pathname + location.search);
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("keydown", (event) => {
    const step = { "]": 1, "[": -1 }[event.key];
    if (!step || event.target.closest("input, select")) return;
    const unit = choose(step);
    if (unit) openUnit(unit);
  });
  return dialog;
}

/** Show an operator, and put its name into the URL. */
async function openUnit(unit) {
  const dialog = document.getElementById("detail");
  opened = view.chosen = unit.key;
  drawn = null;
  showRows();
  history.replaceState(null, "", `#${encodeURIComponent(unit.key)}`);
  const body = make("div", { class: "body" }, make("p", {}, "…"));
  const close = make("button", { type: "button", class: "close", "aria-label": "close (Esc)", on: { click: () => dialog.close() } }, "×");
  dialog.replaceChildren(make("header", {}, make("h2", {}, unit.op), badge(unit.verdict), close), body);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  await fillUnit(unit, body);
}

/** Draw an operator's body; if it was drawn before, the elements of its case rows are reused. */
async function fillUnit(unit, body) {
  const seen = stateOf(unit);
  const cases = unit.cases ? await casesOf(unit.at) : [];
  const kernel = await kernelSections(unit);
  if (opened !== unit.key || !body.isConnected) return;
  const before = [...body.querySelectorAll(".case")];
  const [focused, place] = [document.activeElement, placeIn(body)];
  body.replaceChildren(...facts(unit), ...unitCharts(cases), casesSection(unit, cases, before), ...kernel);
  if (focused !== document.activeElement) (body.contains(focused) ? focused : document.querySelector("dialog .close")).focus({ preventScroll: true });
  place();
  drawn = seen;
}

/** Return a key that changes when an operator must be redrawn: its figures, and the run's end (then it has proofs). */
function stateOf(unit) {
  return JSON.stringify([unit, data.kernels[unit.kernel], data.state.word]);
}

/** Redraw the open operator if it has changed; open parts and the scroll position stay. */
async function refreshOpened() {
  const unit = opened !== null && units.find((other) => other.key === opened);
  if (!unit || drawn === stateOf(unit)) return;
  const dialog = document.getElementById("detail");
  dialog.querySelector("header .badge").replaceWith(badge(unit.verdict));
  await fillUnit(unit, dialog.querySelector(".body"));
}

/** Return a function that restores the scroll position: the first visible case, or else the offset. */
function placeIn(body) {
  const dialog = body.parentElement;
  const top = dialog.scrollTop;
  const row = [...body.querySelectorAll(".case")].find((other) => other.getBoundingClientRect().bottom > 0);
  const before = row?.getBoundingClientRect().top;
  const anchored = row && before < innerHeight && top > 0;
  return () => { dialog.scrollTop = anchored && row.isConnected ? dialog.scrollTop + row.getBoundingClientRect().top - before : top; };
}

function openAddressed() {
  const key = decodeURIComponent(location.hash.slice(1));
  const unit = key && units.find((other) => other.key === key);
  if (unit) openUnit(unit);
}

function facts(unit) {
  const rows = [
    ["kernel", unit.kernelName || "none"],
    ["cases", unit.cases ? `${unit.passed} of ${unit.cases} passed${unit.passed < unit.cases ? `: ${countsText(unit).replaceAll("_", " ")}` : ""}` : unit.verdict],
    [`× ${data.against}`, `${interval(unit.speedup, unit.low, unit.high)} ${unit.marks}`.trim()],
    ["% of SOL", unit.sol === null ? "" : `${short(unit.sol)} (${data.against} ${short(unit.aten_sol)})`],
    ["ATen calls", unit.calls],
    ["surviving mutants", unit.weak],
  ];
  return [list(rows)];
}

function list(rows) {
  return make("dl", {}, rows.filter(([, text]) => text).map(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
}

function unitCharts(cases) {
  const charts = [];
  const timed = cases.filter((c) => c.speedup && c.sol_bytes);
  if (timed.length) {
    const points = timed.map((c) => ({ x: power(c.sol_bytes), y: power(c.speedup), low: power(c.speedup_low), high: power(c.speedup_high), kind: c.alarm ? "wrong" : c.launch_bound ? "faint" : "passed", of: c }));
    const [low, high] = extent(points.map((point) => point.x));
    charts.push(make("h3", {}, "Speedup over size"), chart({ points, guides: [{ from: [low, 0], to: [high, 0], name: `as fast as ${data.against}`, keep: true }], xTitle: "bytes moved", yTitle: `× ${data.against}`, xText: bytes, yText: short, xBase: 2, label: "speedup over size", say: ({ of }) => `${interval(of.speedup, of.speedup_low, of.speedup_high)} at ${bytes(of.light_bytes)}: ${of.case}` }));
  }
  const bounded = cases.filter((c) => c.bound && c.kernel_error !== undefined);
  if (bounded.length) {
    const points = bounded.map((c) => ({ x: power(c.bound), y: power(c.kernel_error), kind: kindOfVerdict(c.verdict), of: c }));
    charts.push(make("h3", {}, "Error against bound"), errorChart(points, ({ of }) => `${of.verdict}: error ${short(of.kernel_error)}, allowed ${short(of.bound)}: ${of.case}`));
  }
  return charts;
}

function kindOfVerdict(verdict) {
  return verdict === "passed" ? "passed" : "wrong";
}

/** List cases in steps, failing ones first; existing rows are reused. */
function casesSection(unit, cases, before = []) {
  if (!cases.length) return make("p", {}, unit.verdict === "no kernel" ? "No kernel implements this operator." : "None of its cases has been judged.");
  const sorted = cases.map((c, at) => [GRADES.indexOf(c.verdict), at, c]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , c]) => c);
  const failing = sorted.filter((c) => c.verdict !== "passed").length;
  const box = make("div", { class: "cases" });
  const more = make("button", { type: "button" });
  const rows = new Map(before.map((row) => [row.dataset.key, row]));
  const rowFor = (c) => {
    const row = rows.get(caseKey(c)) || caseRow(unit, c);
    rows.delete(caseKey(c));
    return row;
  };
  let count = 0;
  const grow = (some) => {
    box.append(...sorted.slice(count, count + some).map(rowFor));
    count = Math.min(count + some, sorted.length);
    more.textContent = `show more (${sorted.length - count} left)`;
    more.hidden = count === sorted.length;
  };
  more.addEventListener("click", () => grow(AT_ONCE));
  grow(Math.max(AT_ONCE, before.length));
  if (failing && !before.length) box.firstElementChild.open = true;
  return make("section", { "aria-label": "cases" }, make("h3", {}, failing ? `Cases: ${failing} of ${cases.length} failed` : `Cases: all ${cases.length} right`), box, more);
}

function caseKey(c) {
  return `${c.id} ${c.phase}`;
}

function caseRow(unit, c) {
  const row = make("details", { class: "case", "data-key": caseKey(c) }, make("summary", {}, badge(c.verdict), c.phase === "performance" ? make("span", { class: "phase" }, "timed") : "", make("code", {}, c.case)));
  row.addEventListener("toggle", () => row.open && row.childElementCount === 1 && row.append(caseBody(unit, c)));
  return row;
}

function caseBody(unit, c) {
  const command = `${data.reproduce} ${c.id}${unit.option}`;
  return make("div", {},
    c.reason ? make("p", { class: "reason" }, c.reason) : "",
    c.alarm ? make("p", { class: "reason" }, `ALARM: ${c.alarm}`) : "",
    make("pre", { class: "call" }, c.case),
    list(FIGURES.map(([name, text]) => [name, text(c)])),
    (c.notes || []).length ? make("ul", {}, c.notes.map((note) => make("li", {}, note))) : "",
    make("p", {}, "Judge this case again:"),
    make("div", { class: "command" }, make("code", {}, command), copyButton(command)));
}

async function kernelSections(unit) {
  const section = make("section", { "aria-label": "kernel" });
  const kernel = data.kernels[unit.kernel];
  if (!kernel) return [];
  section.append(make("h3", {}, "Kernel"), list([["name", kernel.name], ["file", kernel.file], ["digest", kernel.digest], ["reference", kernel.reference], ["hints", (kernel.hints || []).join("; ")]]));
  if (!kernel.file) return [section];
  const [source] = await unpacked(`kernel:${unit.kernel}`);
  if (source?.remark) section.append(make("p", { class: "remark" }, source.remark));
  if (source?.text) section.append(sourceCode(source.text, kernel.file));
  return [proofSection(unit, source?.proof ?? {}), section];
}

/** Show what is proven of a kernel, the open operator first, or why nothing is. */
function proofSection(unit, { remark, about = [], rows = [], without = {} }) {
  const section = make("section", { "aria-label": "proof" }, make("h3", {}, "Proven"));
  if (remark) section.append(make("p", { class: "remark" }, remark));
  const names = Object.entries(PROVEN);
  const lines = [...rows.filter((row) => row.op === unit.op), ...rows.filter((row) => row.op !== unit.op)].map((row) => make("tr", {}, names.map(([name]) => make("td", { class: `p-${name}` }, row[name]))));
  const heads = make("tr", {}, names.map(([, title]) => make("th", { scope: "col" }, title)));
  if (lines.length) section.append(make("div", { class: "wide" }, make("table", { class: "proof" }, make("thead", {}, heads), make("tbody", {}, lines))));
  const absent = Object.entries(without);
  if (absent.length) section.append(make("p", {}, "Not proven:"), list(absent));
  if (about.length) section.append(list(about));
  return section;
}
