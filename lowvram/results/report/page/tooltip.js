
// What belongs to a point says who it is, and lights up everywhere when one of its marks is pointed at.

let marks = new Map(); // index of a point -> its elements

const isOk = (point) => point.status === "ok";
const SIGNS = { ok: "●", oom: "▲", incompatible: "⊘", nonfinite: "∞", timeout: "◷", killed: "✕", interrupted: "‖",
  skipped: "»", error: "!", unfinished: "…" };
const DISTURBED = "≈ disturbed";
const rangeText = (point) => (point.speed_range ? ` (${point.speed_range.map(short).join(" to ")})` : "");
const withUnit = (value) => `${short(value)} ${shown.unit}`;
const fullName = (point) => (isMerged ? `${point.sweep}: ${point.name}` : point.name);

// The attributes of an element that stands for point `i`.
function mark(i, name, isFocusable = true) {
  const about = isFocusable ? { tabindex: 0, role: "img", "aria-label": facts(shown.points[i]).join(", ") } : {};
  return { class: `point ${name ?? ""}`, "data-point": i, ...about };
}

// What is known of a point, in lines.
function facts(point) {
  const lines = [fullName(point)];
  if (!isOk(point)) lines.push(`${point.status}${point.reason ? `: ${point.reason}` : ""}`);
  if (point.memory !== null) lines.push(`${shown.memory_title} ${withUnit(point.memory)}`);
  if (point.planned !== null && point.planned !== point.memory) lines.push(`planned ${withUnit(point.planned)}`);
  if (point.speed !== null) lines.push(`${short(point.speed)} ${shown.speed_unit}/s${rangeText(point)}`);
  if (point.disturbed) lines.push(`${DISTURBED}: ${point.disturbed}`);
  if (point.loss !== null) lines.push(`loss of the evaluation ${short(point.loss)}`);
  if (point.gradient_error !== null) lines.push(`relative error of the gradient ${short(point.gradient_error)}`);
  return lines;
}

function findMarks() {
  marks = new Map();
  for (const element of document.querySelectorAll("[data-point]")) {
    const i = Number(element.dataset.point);
    if (!marks.has(i)) marks.set(i, []);
    marks.get(i).push(element);
  }
}

let lit = null;

function light(i) {
  for (const [which, isOn] of [[lit, false], [i, true]]) {
    for (const element of marks.get(which) ?? []) element.classList.toggle("on", isOn);
  }
  lit = i;
}

function tell(element, x, y) {
  const box = document.getElementById("tooltip"), i = Number(element.dataset.point), point = shown.points[i];
  light(i);
  if (element.tagName === "TR") {
    box.hidden = true;
    return;
  }
  const [name, ...others] = facts(point);
  box.replaceChildren(h("b", {}, name), ...others.map((each) => h("span", {}, each)), h("code", {}, point.command ?? ""));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y + height + 22 > innerHeight ? Math.max(4, y - height - 12) : y + 14}px`;
}

function hush() {
  light(null);
  document.getElementById("tooltip").hidden = true;
}

// Two listeners for all points.
function listen() {
  const pointOf = (event) => event.target.closest?.("[data-point]");
  document.addEventListener("mouseover", (event) => {
    const element = pointOf(event);
    if (element) tell(element, event.clientX, event.clientY);
    else hush();
  });
  document.addEventListener("focusin", (event) => {
    const element = pointOf(event);
    if (!element) return hush();
    const { right, bottom } = element.getBoundingClientRect();
    tell(element, right, bottom);
  });
}
