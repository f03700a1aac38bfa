
// The memory of one step by kind, from its first event to its last: of the baseline, and of a point beside it.

let beside = null; // index of the point that is shown beside the baseline

function overStep() {
  const known = shown.points.map((_, i) => i).filter((i) => shown.points[i].over_step);
  if (!known.length) return null;
  const smallest = known.reduce((best, i) => (shown.points[i].memory < shown.points[best].memory ? i : best));
  beside ??= smallest;
  const choice = h(
    "select",
    { id: "beside", change: (event) => { beside = Number(event.target.value); drawAll(true); } },
    known.map((i) => h("option", { value: i, selected: i === beside }, fullName(shown.points[i]))),
  );
  const kinds = shown.kinds.filter((_, k) => known.some((i) => [shown.points[i].over_step.sizes[k]].flat().some((size) => size)));
  const legend = h("div", { class: "legend" }, kinds.map((kind) => key(s("rect", { width: 12, height: 12, fill: `var(--${kind})` }), kind)));
  return section(
    "Memory over one step", "What is alive after each allocation and release of a tensor's storage, in their order, by kind. The dashed line is the peak.", "wide",
    known.length > 1 ? h("label", { class: "soft" }, "the baseline beside ", choice) : null,
    legend,
    h("div", { class: "plots two" }, drawing((width) => drawOverStep(width, baseline, known)), drawing((width) => (beside === baseline ? h("div") : drawOverStep(width, beside, known)))),
  );
}

function drawOverStep(width, i, known) {
  const point = shown.points[i], height = 260, frame = { left: 60, top: 34, right: width - 12, bottom: height - 42 };
  const name = text(frame.left, 12, shortened(fullName(point), (width - 70) / 6.6), { class: "name" });
  if (!point.over_step) return s("svg", { width, height: 40 }, name, text(frame.left, 30, "not recorded", { class: "soft" }));
  const { events, phases, sizes } = point.over_step;
  const size = (k, n) => (Array.isArray(sizes[k]) ? sizes[k][n] : sizes[k]);
  const sums = events.map((_, n) => shown.kinds.reduce((sum, _, k) => sum + size(k, n), 0));
  const most = Math.max(...sums), peak = Math.abs(most / point.memory - 1) < 1e-3 ? point.memory : most; // sums are of rounded sizes
  const tallest = Math.max(...[baseline, beside].filter((j) => known.includes(j)).map((j) => shown.points[j].memory));
  const x = scale(events, frame.left, frame.right, { log: false }), y = scale([0, tallest, ...sums], frame.bottom, frame.top, { zero: true, log: false, gap: 45 });
  return s(
    "svg",
    { width, height, ...mark(i, "", false) },
    name,
    axes(x, y, frame, "allocations and releases", `memory, ${shown.unit}`),
    areas(events, size, x, y),
    phases.map(([phase, first, last]) => phaseOf(phase, x(events[first]), x(events[last]), frame)),
    line(frame.left, y(peak), frame.right, y(peak), "peak"),
    text(frame.right - 4, y(peak) + 14, withUnit(peak), { class: "halo", "text-anchor": "end" }),
  );
}

// An area for each kind, on top of those below it. What is alive stays so until the next event.
function areas(events, size, x, y) {
  const below = events.map(() => 0);
  return shown.kinds.map((kind, k) => {
    const above = below.map((sum, n) => sum + size(k, n));
    if (above.every((sum, n) => sum === below[n])) return null;
    const stairs = (sums) => sums.flatMap((sum, n) => [[x(events[n]), y(sum)], [x(events[n + 1] ?? events[n]), y(sum)]]);
    const points = [...stairs(above), ...stairs(below).reverse()].map(([at, up]) => `${at.toFixed(1)},${up.toFixed(1)}`).join(" ");
    below.splice(0, below.length, ...above);
    return s("polygon", { points, class: "area", fill: `var(--${kind})` }, s("title", {}, kind));
  });
}

function phaseOf(phase, left, right, { top, bottom }) {
  if (phase === "between") return null;
  return [
    line(left, top - 14, left, bottom, "phase"),
    right - left > phase.length * 6.6 ? text(left + 3, top - 4, phase, { class: "soft", "font-size": 11 }) : null,
  ];
}
