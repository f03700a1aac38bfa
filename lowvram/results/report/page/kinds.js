
// What each peak consists of, with the planned peak beside it.

function kinds() {
  const present = shown.kinds.filter((kind, k) => shown.points.some((point) => point.by_kind?.[k]));
  const legend = h(
    "div",
    { class: "legend" },
    present.map((kind) => key(s("rect", { width: 12, height: 12, fill: `var(--${kind})` }), kind)),
    shown.points.some((point) => point.planned !== null) ? key(line(6, 0, 6, 13, "planned"), "planned") : null,
    shown.points.some((point) => restOf(point) > 0)
      ? key(s("rect", { width: 12, height: 12, class: "unknown" }), "kinds unknown") : null,
    shown.points.some((point) => point.memory === null && point.planned !== null)
      ? key(s("rect", { x: 1, y: 1, width: 10, height: 10, class: "missing" }), "only planned") : null,
  );
  const isBeside = isStacked() || (shown.waterfall && shown.effects.length);
  return section("What the peak is made of", "Bytes alive at the peak, largest first.", isBeside ? "" : "wide",
    legend, drawing(drawKinds, "tall"));
}

// Whether the choices and the peaks below them are together about as high as the plot beside both.
const isStacked = () => !shown.waterfall && shown.effects.length > 0 && 30 * shown.effects.length + 24 * shown.points.length < 480;

function drawKinds(width) {
  const size = (point) => point.memory ?? point.planned ?? 0;
  const order = shown.points.map((_, i) => i).sort((a, b) => size(shown.points[b]) - size(shown.points[a]));
  const rowHeight = order.length > 30 ? 16 : 24, height = order.length * rowHeight + 8;
  const longest = Math.max(...shown.points.map((point) => fullName(point).length));
  const left = Math.min(longest * 7.5 + 8, width * 0.34), right = width - 108;
  const x = scale(shown.points.map((point) => Math.max(size(point), point.planned ?? 0)), left, right, { zero: true, log: false });
  return s(
    "svg",
    { width: width - 4, height: height + 34 },
    x.ticks.map((tick) => [
      line(x(tick), 4, x(tick), height, "grid"),
      text(x(tick), height + 14, short(tick), { class: "tick", "text-anchor": "middle" }),
    ]),
    text((left + right) / 2, height + 30, `${shown.memory_title}, ${shown.unit}`, { class: "soft", "text-anchor": "middle" }),
    order.map((i, row) => kindsOf(shown.points[i], i, 4 + row * rowHeight, rowHeight, x, left, width)),
  );
}

function kindsOf(point, i, top, rowHeight, x, left, width) {
  const bar = { y: top + rowHeight * 0.15, height: rowHeight * 0.7 }, middle = top + rowHeight / 2 + 4;
  const label = isOk(point) ? "" : ` ${SIGNS[point.status] ?? "?"} ${point.status}`;
  const known = point.memory === null ? "" : withUnit(point.memory);
  const end = x(Math.max(point.memory ?? 0, point.planned ?? 0)) + 6;
  return s(
    "g",
    mark(i),
    s("rect", { class: "back", x: 0, y: top, width, height: rowHeight }),
    text(left - 6, middle, shortened(fullName(point), left / 7.5), { "text-anchor": "end" }),
    point.memory !== null ? segments(point, x, bar) : null,
    point.memory === null && point.planned !== null ? s("rect", { ...bar, class: "missing", x: x(0), width: x(point.planned) - x(0) }) : null,
    point.planned !== null ? line(x(point.planned), top + 1, x(point.planned), top + rowHeight - 1, "planned") : null,
    text(end, middle, `${known}${label}`.trim(), { class: isOk(point) ? "" : "soft" }),
  );
}

// What the kinds leave open of a peak: workspaces of CUDA's libraries, or all of it where nothing is known.
function restOf(point) {
  const rest = (point.memory ?? 0) - (point.by_kind ?? []).reduce((sum, size) => sum + size, 0);
  return rest > 0.005 * point.memory ? rest : 0;
}

function segments(point, x, bar) {
  let sum = 0;
  const segment = (size, attributes) => {
    if (!size) return null;
    const from = x(sum);
    sum += size;
    return s("rect", { ...bar, ...attributes, x: from, width: Math.max(0, x(sum) - from) });
  };
  const known = (point.by_kind ?? []).map((size, k) => segment(size, { fill: `var(--${shown.kinds[k]})` }));
  return [...known, segment(restOf(point), { class: "unknown" })];
}
