
"use strict";
// Elements are only ever made here. What comes from outside becomes text or an attribute's value, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const text = (x, y, words, attributes) => s("text", { x, y, ...attributes }, String(words));
const line = (x1, y1, x2, y2, name) => s("line", { x1, y1, x2, y2, class: name });

// `words` in so many characters: without their middle, as names of points often differ at their ends alone.
function shortened(words, most) {
  const kept = Math.max(2, Math.floor(most) - 1), last = Math.floor(kept / 2);
  return words.length > most ? `${words.slice(0, kept - last)}…${words.slice(words.length - last)}` : words;
}

// A section of the page: its title, what it says below, and what it holds.
function section(title, about, name, ...children) {
  return h("section", { class: name }, h("h2", {}, title), about ? h("p", { class: "soft" }, about) : null, ...children);
}

// What is drawn to the width that it has; redrawn when that changes.
const drawings = [];

function drawing(draw, name) {
  const place = h("div", { class: name });
  drawings.push({ place, draw, width: 0 });
  return place;
}

// All widths are read before anything is written, so that the page is laid out once.
function drawAll(isForced) {
  const widths = drawings.map(({ place }) => place.clientWidth);
  drawings.forEach((one, i) => {
    if (!widths[i] || (!isForced && one.width === widths[i])) return;
    one.width = widths[i];
    one.place.replaceChildren(one.draw(widths[i]));
  });
  fitColumns();
  findMarks();
}
