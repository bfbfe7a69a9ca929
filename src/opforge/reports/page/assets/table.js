// The table of operators: sorted, searched, filtered; only visible rows are in the document.

const COLUMNS = [
  { key: "op", title: "operator", value: (unit) => unit.op },
  { key: "kernel", title: "kernel", value: (unit) => unit.kernelName },
  { key: "verdict", title: "verdict", value: (unit) => unit.grade },
  { key: "passed", title: "passed", value: (unit) => (unit.cases ? unit.passed / unit.cases : null) },
  { key: "speedup", title: "speedup", value: (unit) => unit.speedup },
  { key: "sol", title: "% of SOL", value: (unit) => unit.sol },
];
const GRADES = ["cheated", "crashed", "timed_out", "wrong", "contract", "error", "unsupported", "not judged", "no kernel", "declined", "passed"];
const SPEEDS = {
  "any speed": () => true,
  "significantly faster": (unit) => unit.low > 1,
  "significantly slower": (unit) => unit.high !== null && unit.high < 1,
  "timed": (unit) => unit.speedup !== null,
  "not timed": (unit) => unit.speedup === null,
  "faster than SOL": (unit) => unit.marks.includes("ALARM"),
  "launch-bound": (unit) => unit.marks.includes("launch-bound"),
};
const BEYOND = 8;

const view = { sort: "verdict", down: false, query: "", verdict: "all", speed: "any speed", group: null, chosen: null };
let units = [];
let shown = [];
let present = new Map();

/** Convert the page's columns to one record per operator. */
function readUnits() {
  const columns = data.units;
  const names = Object.keys(columns);
  const count = names.length ? columns[names[0]].length : 0;
  return Array.from({ length: count }, (_, at) => {
    const unit = { at };
    for (const name of names) unit[name] = columns[name][at];
    unit.kernelName = unit.kernel >= 0 ? data.kernels[unit.kernel].name : "";
    unit.grade = GRADES.indexOf(unit.verdict);
    unit.key = `${unit.op}|${unit.kernelName}`;
    unit.text = `${unit.op} ${unit.kernelName} ${unit.verdict} ${unit.marks}`.toLowerCase();
    return unit;
  });
}

function matches(unit) {
  if (view.verdict === "not right" && (unit.verdict === "passed" || !unit.cases || unit.verdict === "declined")) return false;
  if (!["all", "not right"].includes(view.verdict) && unit.verdict !== view.verdict && !unit.counts[view.verdict]) return false;
  if (view.group && !view.group.has(unit.key)) return false;
  return SPEEDS[view.speed](unit) && view.query.split(" ").every((word) => unit.text.includes(word));
}

/** Sort by a column, rows without a value last; break ties by operator name. */
function ordered(chosen) {
  const { value } = COLUMNS.find((column) => column.key === view.sort);
  const sign = view.down ? -1 : 1;
  return chosen.sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === b || (a === null && b === null)) return one.op < other.op ? -1 : one.op > other.op ? 1 : one.at - other.at;
    if (a === null || b === null) return a === null ? 1 : -1;
    return (a < b ? -1 : 1) * sign;
  });
}

function tableSection() {
  const search = make("input", { type: "search", id: "search", placeholder: "search operators and kernels ( / )", "aria-label": "search operators and kernels", autocomplete: "off", spellcheck: "false" });
  search.addEventListener("input", () => change({ query: search.value.trim().toLowerCase() }));
  const speed = make("select", { id: "speed", "aria-label": "by speed" }, Object.keys(SPEEDS).map((name) => make("option", {}, name)));
  speed.addEventListener("change", () => change({ speed: speed.value }));
  const rows = make("div", { id: "rows", role: "rowgroup" });
  const grid = make("div", { id: "table", role: "grid", tabindex: 0, "aria-label": "operators" }, make("div", { class: "row head", role: "row" }, COLUMNS.map(heading)), rows);
  grid.addEventListener("keydown", moveInTable);
  rows.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) openUnit(units[Number(row.dataset.at)]);
  });
  return make("section", { "aria-label": "operators" }, make("div", { class: "bar" }, search, make("div", { id: "verdicts", class: "chips", role: "group", "aria-label": "by verdict" }), speed, make("span", { id: "count", role: "status" })), grid);
}

function heading(column) {
  const button = make("button", { type: "button" }, column.title);
  button.addEventListener("click", () => change(view.sort === column.key ? { down: !view.down } : { sort: column.key, down: ["speedup", "sol"].includes(column.key) }));
  return make("div", { role: "columnheader", class: `c-${column.key}`, "data-key": column.key }, button);
}

/** Apply new settings or new results, and update the table. */
function change(settings = {}) {
  Object.assign(view, settings);
  shown = ordered(units.filter(matches));
  present = new Map();
  const rows = document.getElementById("rows");
  rows.style.height = `calc(var(--row) * ${Math.max(shown.length, 1)})`;
  document.getElementById("table").setAttribute("aria-rowcount", shown.length + 1);
  for (const head of document.querySelectorAll("[role=columnheader]")) {
    head.setAttribute("aria-sort", head.dataset.key !== view.sort ? "none" : view.down ? "descending" : "ascending");
  }
  const of = view.group ? " with this reason" : "";
  document.getElementById("count").replaceChildren(`${shown.length} of ${units.length} ${data.things}${of} `, view.group ? make("button", { type: "button", on: { click: () => change({ group: null }) } }, "show all") : "");
  showChips();
  showRows();
}

function showChips() {
  const present = GRADES.filter((grade) => units.some((unit) => unit.verdict === grade || unit.counts[grade]));
  const counts = { all: units.length, "not right": units.filter((unit) => unit.cases && !["passed", "declined"].includes(unit.verdict)).length };
  for (const grade of present) counts[grade] = units.filter((unit) => unit.verdict === grade || unit.counts[grade]).length;
  const box = document.getElementById("verdicts");
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.verdict : null;
  box.replaceChildren(...Object.entries(counts).map(([name, count]) => make("button", { type: "button", "data-verdict": name, class: `v-${name.replace(/[^a-z]/g, "-")}`, "aria-pressed": String(view.verdict === name), on: { click: () => change({ verdict: name }) } }, `${name.replaceAll("_", " ")} ${count}`)));
  if (focused) box.querySelector(`[data-verdict="${focused}"]`)?.focus();
}

/** Put the visible rows into the document; elements of existing rows are reused. */
function showRows() {
  const rows = document.getElementById("rows");
  if (!rows) return;
  const tall = rowHeight();
  const top = rows.getBoundingClientRect().top;
  const first = Math.max(0, Math.floor(-top / tall) - BEYOND);
  const last = Math.min(shown.length, Math.ceil((innerHeight - top) / tall) + BEYOND);
  const wanted = new Map();
  for (let at = first; at < last; at++) {
    const key = `${at} ${view.chosen === shown[at].key}`;
    wanted.set(key, present.get(key) || rowOf(shown[at], at));
  }
  if (!shown.length) wanted.set("", make("p", { class: "empty" }, units.length ? "No matches." : "No operators."));
  for (const row of [...rows.children]) if (![...wanted.values()].includes(row)) row.remove();
  let before = null;
  for (const row of wanted.values()) {
    if (row.parentNode !== rows) before ? before.after(row) : rows.prepend(row);
    before = row;
  }
  present = wanted;
  document.getElementById("table").setAttribute("aria-activedescendant", view.chosen ? "chosen" : "");
}

function rowHeight() {
  return Number.parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));
}

function rowOf(unit, at) {
  const chosen = view.chosen === unit.key;
  const sol = unit.sol === null ? "" : `${short(unit.sol, 2)} (${short(unit.aten_sol, 2)})`;
  const cells = {
    op: unit.op,
    kernel: unit.kernelName,
    verdict: badge(unit.verdict, unit.verdict === "passed" || !unit.cases ? unit.verdict : countsText(unit)),
    passed: unit.cases ? `${unit.passed}/${unit.cases}` : "",
    speedup: [interval(unit.speedup, unit.low, unit.high), unit.marks ? make("small", {}, ` ${unit.marks}`) : ""],
    sol,
  };
  const row = make("div", { class: `row${chosen ? " chosen" : ""}`, id: chosen ? "chosen" : null, role: "row", "aria-rowindex": at + 2, "aria-selected": String(chosen), "data-at": unit.at, title: unit.op }, COLUMNS.map((column) => make("div", { role: "gridcell", class: `c-${column.key}` }, cells[column.key])));
  row.style.top = `calc(var(--row) * ${at})`;
  return row;
}

function countsText(unit) {
  if (unit.verdict === "declined") return "declined";
  return GRADES.filter((grade) => grade !== "passed" && unit.counts[grade]).map((grade) => `${unit.counts[grade]} ${grade}`).join(", ");
}

function moveInTable(event) {
  const page = Math.max(1, Math.floor(innerHeight / rowHeight()) - 3);
  const steps = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  if (event.target.closest("button") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" && view.chosen) {
    const unit = shown.find((other) => other.key === view.chosen);
    if (unit) openUnit(unit);
  } else if (event.key in steps) {
    choose(steps[event.key]);
  } else {
    return;
  }
  event.preventDefault();
}

/** Move the selection up or down, and keep the row visible. */
function choose(step) {
  if (!shown.length) return null;
  const before = shown.findIndex((unit) => unit.key === view.chosen);
  const at = Math.min(shown.length - 1, Math.max(0, before < 0 && step > 0 && Number.isFinite(step) ? 0 : before + step));
  view.chosen = shown[at].key;
  const [tall, rows] = [rowHeight(), document.getElementById("rows")];
  const top = rows.getBoundingClientRect().top + at * tall;
  if (top < tall * 2) scrollBy(0, top - tall * 2);
  if (top + tall > innerHeight) scrollBy(0, top + tall * 2 - innerHeight);
  showRows();
  return shown[at];
}
