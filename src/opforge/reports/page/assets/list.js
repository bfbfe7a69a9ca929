// The runs of a folder, newest first.

function runsTable() {
  if (!data.runs.length) return make("p", { class: "empty" }, "No runs here yet.");
  const heads = ["run", "backend", "suite", "device", "started", "state", "cases", "correctness", "performance"];
  const rows = data.runs.map((run) => make("tr", {}, make("td", {}, make("a", { href: `run/${encodeURIComponent(run.name)}/` }, run.name)), [run.backend, run.suite, run.device, run.started].map((text) => make("td", {}, text ?? "")), make("td", {}, make("span", { class: `state s-${run.state}` }, run.state)), [run.cases, run.correctness, run.performance].map((text) => make("td", { class: "figure" }, text ?? ""))));
  return make("div", { class: "wide" }, make("table", { id: "runs" }, make("thead", {}, make("tr", {}, heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, rows)));
}
