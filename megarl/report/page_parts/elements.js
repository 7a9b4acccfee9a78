"use strict";
// Elements and numbers. All text of a run goes through `make`, which sets textContent and never parses markup.

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function section(title, id) {
  const whole = make("section", { id });
  whole.append(make("h2", { text: title }));
  document.getElementById("main").append(whole);
  document.getElementById("contents").append(make("a", { href: `#${id}`, text: title }));
  return whole;
}

function soft(text) {
  return make("p", { class: "soft", text });
}

function table(heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { text })));
  const body = make("tbody", {}, ...rows);
  const scroll = make("div", { class: "scroll", tabindex: "0" });
  scroll.append(make("table", {}, make("thead", {}, head), body));
  return scroll;
}

function tableRow(cells, properties = {}) {
  const shown = cells.map((cell) => (cell instanceof Node ? make("td", {}, cell) : make("td", { text: cell ?? "" })));
  return make("tr", properties, ...shown);
}

function shortNumber(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(digits));
}

function shortBytes(value) {
  if (value === null || value === undefined) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(value) >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${+value.toPrecision(4)} ${units[unit]}`;
}

function isPresent(value) {
  return value !== null && value !== undefined;
}

function last(values) {
  for (let index = values.length - 1; index >= 0; index--) if (isPresent(values[index])) return values[index];
  return null;
}
