// Elements are created only here. Text stays text: no string is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element: `on` holds listeners, other fields are attributes, children are nodes or text. */
function make(tag, fields = {}, ...children) {
  return fill(document.createElement(tag), fields, children);
}

function draw(tag, fields = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), fields, children);
}

function fill(element, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== "") element.append(child);
  }
  return element;
}

/** A verdict as text; the colour only adds to it. */
function badge(word, text = word) {
  return make("span", { class: `badge v-${word.replace(/[^a-z]/g, "-")}` }, text.replaceAll("_", " "));
}

function number(value) {
  return value === null || value === undefined ? null : Number(value);
}

function short(value, digits = 3) {
  const known = number(value);
  if (known === null || Number.isNaN(known)) return known === null ? "" : "NaN";
  if (!Number.isFinite(known)) return known > 0 ? "∞" : "−∞";
  if (known !== 0 && (Math.abs(known) < 1e-3 || Math.abs(known) >= 1e6)) return Number(known.toPrecision(digits)).toExponential();
  return String(Number(known.toPrecision(digits)));
}

function interval(value, low, high) {
  return value === null || value === undefined ? "" : `${Number(value).toFixed(3)} [${Number(low).toFixed(3)}, ${Number(high).toFixed(3)}]`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = Number(value);
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${short(size)} ${units[unit]}`;
}

/** Copy text to the clipboard; over plain HTTP from another machine, browsers only allow `execCommand`. */
async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not allowed here, but `execCommand` may be
    }
  }
  const area = make("textarea", { class: "aside", readonly: true });
  area.value = text;
  (document.querySelector("dialog[open]") || document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

function copyButton(text) {
  const button = make("button", { type: "button", class: "copy" }, "copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text)) ? "copied" : "select it and copy";
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
  return button;
}
