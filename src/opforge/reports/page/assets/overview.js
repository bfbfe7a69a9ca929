// Head of a run's page: state, scores, charts, reasons for failures, and remarks.

function stateLine() {
  const { word, judged, planned, resume } = data.state;
  const told = { finished: `finished: ${judged} cases judged`, running: `running: ${judged} of ${planned} cases judged`, interrupted: `interrupted: ${judged} of ${planned} cases judged; continue with ` };
  const rest = word === "interrupted" ? [make("code", {}, resume), copyButton(resume)] : [];
  return make("p", { id: "state", class: `state s-${word}`, role: "status" }, told[word], ...rest);
}

function scoreCards() {
  return make("div", { class: "cards" }, data.scores.map((score) => make("div", { class: "card" }, make("h3", {}, score.title), make("p", { class: "value" }, score.value, score.interval ? make("small", {}, ` ${score.interval}`) : ""), make("p", { class: "remark" }, score.remark))));
}

/** The verdicts of all cases as one bar, with a legend below it. */
function verdictBar() {
  const counts = Object.entries(data.verdicts);
  if (!counts.length) return make("p", { class: "empty" }, "No case has been judged.");
  const bar = make("div", { class: "stack", "aria-hidden": "true" }, counts.map(([name, count]) => {
    const part = make("span", { class: `v-${name.replace(/[^a-z]/g, "-")}` });
    part.style.flexGrow = String(count);
    return part;
  }));
  return make("div", {}, bar, make("p", { class: "legend" }, "cases: ", counts.map(([name, count]) => badge(name, `${count} ${name}`))));
}

function alarmBox() {
  if (!data.alarms.length) return "";
  return make("section", { class: "alarm", "aria-label": "alarms" }, make("h2", {}, `ALARM: ${data.alarms.length} faster than the speed of light (SOL)`), make("p", {}, "These cases are no records and count in no score of speed."), make("ul", {}, data.alarms.slice(0, 20).map((a) => make("li", {}, make("b", {}, a.who), `: ${a.alarm} `, make("code", {}, a.case)))), data.alarms.length > 20 ? make("p", {}, "… the others: filter by “faster than SOL”.") : "");
}

function reasonsBox() {
  if (!data.reasons.length) return "";
  const rows = data.reasons.map((group) => make("li", {}, make("button", { type: "button", class: "group", on: { click: () => showGroup(group) } }, badge(group.verdict, `${group.count} ${group.verdict}`), make("span", { class: "why" }, group.reason), make("small", {}, ` ${group.units.length} ${group.units.length === 1 ? data.things.replace(/s$/, "") : data.things}`))));
  return fold("reasons", `Why cases failed (${data.reasons.length} kinds of reasons)`, () => [make("ol", { class: "reasons" }, rows)], true);
}

function showGroup(group) {
  change({ group: new Set(group.units.map((at) => units[at].key)), verdict: "all", query: "", speed: "any speed" });
  document.getElementById("search").value = "";
  document.getElementById("speed").value = "any speed";
  document.getElementById("table").scrollIntoView();
  document.getElementById("table").focus({ preventScroll: true });
}

/** A collapsible part; its body is created when it is first opened. */
function fold(id, title, body, open = false) {
  const part = make("details", { id, class: "fold", open }, make("summary", {}, make("h2", {}, title)));
  const once = async () => part.open && part.childElementCount === 1 && part.append(make("div", {}, await body()));
  part.addEventListener("toggle", once);
  return part;
}

async function pointsOf(name) {
  const [points] = await unpacked(name);
  if (!points) return [];
  return points.unit.map((unit, at) => ({ x: fromHundredths(points.x[at]), y: fromHundredths(points.y[at]), kind: kindOfVerdict(data.outcomes[points.verdict[at]]), unit, verdict: data.outcomes[points.verdict[at]] }));
}

const pickUnit = (point) => openUnit(units[point.unit]);

async function errorsBody() {
  const points = await pointsOf("errors");
  if (!points.length) return [make("p", {}, "No case has an error and a bound.")];
  return [make("p", {}, "Each point is a case: its error against float64, over the allowed error. Points above the line are wrong."), errorChart(points, (p) => `${units[p.unit].op} (${units[p.unit].kernelName}), ${p.verdict}: error ${tenTo(p.y)}, allowed ${tenTo(p.x)}`, pickUnit)];
}

async function rooflineBody() {
  const points = await pointsOf("roofline");
  if (!points.length) return [make("p", {}, "No timed case does arithmetic.")];
  const [low, high] = extent(points.map((point) => point.x));
  const guides = [];
  for (const [name, rate] of Object.entries(data.roofs?.bandwidths ?? {})) {
    const bandwidth = Math.log10(rate);
    guides.push({ from: [low, low + bandwidth], to: [high, high + bandwidth], name: `bandwidth of ${name}: ${short(rate / 1e9)} GB/s` });
  }
  for (const [name, rate] of Object.entries(data.roofs?.rates ?? {})) guides.push({ from: [low, Math.log10(rate)], to: [high, Math.log10(rate)], name: `${name}: ${short(rate / 1e9)} GFLOP/s` });
  const names = guides.map((guide) => guide.name).join(", ");
  return [make("p", {}, "Each point is a timed case: operations per second, over operations per byte. Lines are the device's measured peaks", names ? ` (${names})` : "", ". Cases without arithmetic, such as copies, are not shown."), chart({ points, guides, xTitle: "operations per byte", yTitle: "operations per second", xText: short, yText: short, label: "roofline", say: (p) => `${units[p.unit].op} (${units[p.unit].kernelName}): ${tenTo(p.y)} operations/s at ${tenTo(p.x)} operations per byte`, pick: pickUnit })];
}

function sectionsBoxes() {
  return data.sections.map((section, at) => fold(`section-${at}`, `${section.title} (${section.lines.length})`, () => [make("ul", {}, section.lines.map((line) => make("li", {}, line)))]));
}
