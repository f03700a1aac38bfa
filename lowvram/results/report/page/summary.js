
// The head of the page: what was measured, and the answers in numbers.

const SLOWEST = 0.9; // of the baseline's speed that still counts as no slower

function head() {
  const options = shown.points.map((point, i) => [point, i]).filter(([point]) => point.memory !== null);
  const about = [...shown.about, shown.memory_source].filter(Boolean).join(" · ");
  return h(
    "div",
    { class: "top" },
    h("div", { class: "heading" }, h("h1", {}, shown.title), shown.sweeps.map(sweepLine), h("p", { class: "about" }, about)),
    !options.length ? null : h(
      "label",
      {},
      "baseline ",
      h(
        "select",
        { id: "baseline", change: (event) => setBaseline(Number(event.target.value)) },
        options.map(([point, i]) => h("option", { value: i, selected: i === baseline }, fullName(point))),
      ),
    ),
  );
}

// When a sweep ran, and how.
function sweepLine({ name, date, command }) {
  return h("p", { class: "about sweep" }, [date, name].filter(Boolean).join(" · "), command ? h("code", {}, command) : null);
}

function cards() {
  const points = shown.points.filter((point) => isOk(point) && point.memory !== null);
  const base = shown.points[baseline], fast = points.filter((point) => point.speed !== null);
  const smallest = (of) => of.reduce((best, point) => (best && best.memory <= point.memory ? best : point), null);
  const unslowed = smallest(fast.filter((point) => point.speed >= SLOWEST * base.speed));
  const fastest = fast.reduce((best, point) => (best && best.speed >= point.speed ? best : point), null);
  return h(
    "div",
    { class: "cards" },
    card(fastest === base ? "baseline, and the fastest" : "baseline", base, base),
    card(`smallest ${shown.memory_title}`, smallest(points), base),
    unslowed && unslowed !== base && unslowed !== smallest(points) ? card(`smallest at ${SLOWEST * 100} % of the baseline's speed or more`, unslowed, base) : null,
    fastest && fastest !== base ? card("fastest", fastest, base) : null,
    counts(),
  );
}

function card(what, point, base) {
  if (!point || point.memory === null) return null;
  const less = ratioOf(base.memory, point.memory), speed = ratioOf(point.speed, base.speed);
  const lines = [];
  if (point.speed !== null) {
    lines.push(h("span", {}, `${short(point.speed)} ${shown.speed_unit}/s`));
    if (point !== base && speed) lines.push(h("span", { class: verdictName(speed, 1) }, ` (${change(speed)})`));
  }
  if (point.loss !== null) lines.push(h("span", {}, `${lines.length ? ", " : ""}loss ${short(point.loss)}`));
  return h(
    "div",
    { class: "card", title: point.command },
    h("div", { class: "what" }, what),
    h("div", { class: "which", title: fullName(point) }, fullName(point)),
    h("div", { class: "number" }, point === base ? withUnit(point.memory) : times(less), " ",
      h("small", {}, point === base ? "" : withUnit(point.memory))),
    h("div", { class: "soft" }, lines),
    disturbedMark(point, base),
  );
}

// That a speed was measured while other programs ran, or while it went up and down; or that it is compared with such.
function disturbedMark(point, base) {
  const which = [point, ...(point === base ? [] : [base])].filter((each) => each.disturbed && each.speed !== null);
  if (!which.length) return null;
  const words = which.includes(point) ? (which.length > 1 ? `${DISTURBED}, and so is the baseline` : DISTURBED) : "≈ the baseline is disturbed";
  return h("div", { class: "disturbed", title: which.map((each) => `${fullName(each)}: ${each.disturbed}`).join("\n") }, words);
}

const times = (less) => (less === null ? "–" : short(less) === "1" ? "the same" : less >= 1 ? `${short(less)} × less` : `${short(1 / less)} × more`);

function counts() {
  const number = new Map();
  for (const point of shown.points) number.set(point.status, (number.get(point.status) ?? 0) + 1);
  return h(
    "div",
    { class: "card" },
    h("div", { class: "what" }, "points"),
    h("div", { class: "number" }, String(shown.points.length)),
    [...number].map(([status, count]) => h("div", { class: "soft" }, statusMark(status), ` ${count}`)),
  );
}

const statusMark = (status) =>
  h("span", { class: `status ${status === "ok" ? "" : "failed-point"}` }, `${SIGNS[status] ?? "?"} ${status}`);

// Points without a result, with their reasons.
function failures() {
  const failed = shown.points.map((point, i) => [point, i]).filter(([point]) => !isOk(point));
  if (!failed.length) return null;
  const items = failed.map(([point, i]) =>
    h("li", { ...mark(i), title: point.command }, statusMark(point.status), ` ${fullName(point)}: ${point.reason ?? "no reason is known"}`),
  );
  return section(`Points that did not run to their end (${failed.length} of ${shown.points.length})`, null, "wide",
    h("ul", { class: "failed tall" }, items));
}
