// Entry point: draws the page from its data, handles keys, and polls for new results while a run goes on.

let data = JSON.parse(document.getElementById("data").textContent);
const POLL_MS = 1500;
const HELP = "Keys: / searches, arrows or j and k choose an operator, Enter opens it, [ and ] go to its neighbours, Esc closes, t switches light and dark.";

function pageHead() {
  return make("header", { class: "top" }, make("h1", {}, data.title, data.device ? make("small", {}, ` ${data.device}`) : ""), themeSwitch());
}

function drawRun() {
  document.title = `${data.title} – opforge`;
  document.getElementById("main").replaceChildren(
    pageHead(),
    make("div", { id: "overview" }),
    fold("errors", "Error against bound", errorsBody),
    fold("roofline", "Roofline", rooflineBody),
    make("div", { id: "why" }),
    tableSection(),
    make("div", { id: "beside" }),
    make("footer", {}, make("p", {}, HELP)),
    detailDialog());
  refresh();
  addEventListener("scroll", () => requestAnimationFrame(showRows), { passive: true });
  addEventListener("resize", () => requestAnimationFrame(showRows));
  addEventListener("hashchange", openAddressed);
  openAddressed();
}

/** Redraw the parts that depend on results; parts that were opened and typed text stay. */
function refresh() {
  units = readUnits();
  const open = new Set([...document.querySelectorAll("#why details[open], #beside details[open]")].map((part) => part.id));
  const first = !document.getElementById("overview").childElementCount;
  document.getElementById("overview").replaceChildren(...[stateLine(), alarmBox(), scoreCards(), verdictBar()].filter(Boolean));
  document.getElementById("why").replaceChildren(...[reasonsBox()].filter(Boolean));
  document.getElementById("beside").replaceChildren(...sectionsBoxes(), fold("about", "About this run", () => [list(data.about)]));
  if (!first) for (const part of document.querySelectorAll("#why details, #beside details")) part.open = open.has(part.id);
  change();
}

function drawList() {
  document.title = `runs – opforge`;
  document.getElementById("main").replaceChildren(pageHead(), runsTable());
}

/** Poll for new data; the server answers 204 if there is none. */
async function ask() {
  if (document.visibilityState !== "hidden") {
    try {
      const answer = await fetch(`data?since=${encodeURIComponent(data.version)}`);
      if (answer.status === 200) {
        data = { ...(await answer.json()), embedded: false };
        data.kind === "run" ? refresh() : drawList();
        nameSwitch();
      }
      if (data.kind === "run") await refreshOpened();
      document.body.classList.remove("away");
    } catch {
      document.body.classList.add("away");
    }
  }
  setTimeout(ask, POLL_MS);
}

addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "t") switchTheme();
  if (data.kind !== "run" || document.getElementById("detail").open) return;
  if (event.key === "/") {
    document.getElementById("search").focus();
    event.preventDefault();
  } else if (["ArrowDown", "ArrowUp", "j", "k", "Enter"].includes(event.key) && document.activeElement === document.body) {
    document.getElementById("table").focus({ preventScroll: true });
    moveInTable(event);
  }
});

data.kind === "run" ? drawRun() : drawList();
nameSwitch();
if (!data.embedded) setTimeout(ask, POLL_MS);
