// Numbers as people read them, and elements.

const UNITS = ["TiB", "GiB", "MiB", "KiB", "bytes"];
const FOUR_DIGITS = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, roundingMode: "halfEven", useGrouping: false });

// A size as the logs and the command line show it (core/sizes.show_size).
export function bytes(value) {
  const place = UNITS.findIndex((_, index) => value >= 1024 ** (4 - index) || index === 4);
  return `${FOUR_DIGITS.format(value / 1024 ** (4 - place))} ${UNITS[place]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${0 < value && value < 0.01 ? (value * 1e3).toFixed(1) : Math.round(value * 1e3)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return value < 600 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`;
}

export function ago(value) {
  return value === 0 ? "now" : `−${Math.round(value)} s`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

// An element with attributes and children; texts are never read as HTML.
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function drawing(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function table(target, headings, rows) {
  const head = element("tr", {}, ...headings.map((text) => element("th", {}, text)));
  const body = rows.map((row) => element("tr", {}, ...row.map((text) => element("td", {}, String(text)))));
  target.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}
