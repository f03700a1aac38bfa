
// Knobs added one by one. On a logarithmic axis the length of a bar is the factor that its knob saves.

const stepHeight = () => Math.max(26, Math.min(52, 350 / shown.waterfall.length)); // as high as the plot beside it

function waterfall() {
  if (!shown.waterfall) return null;
  const hasAccumulation = shown.waterfall.some((step) => step.is_accumulation);
  const legend = h(
    "div",
    { class: "legend" },
    swatch("bar good", "saved by this knob"),
    hasAccumulation ? swatch("bar accumulation", "saved by plain accumulation") : null,
    swatch("bar bad", "takes more"),
    swatch("bar rest", "what is left"),
  );
  return section("The waterfall: knobs added one by one", "Memory on a logarithmic scale: a bar's length is the factor saved. ≈: the speed of a disturbed point.", "",
    legend, drawing(drawWaterfall));
}

const swatch = (name, words) => key(s("rect", { width: 12, height: 12, class: name }), words);

function drawWaterfall(width) {
  const steps = shown.waterfall, height = 12 + steps.length * stepHeight();
  const frame = { left: Math.min(190, width * 0.28), top: 6, right: width - 178, bottom: height };
  const known = steps.map(({ point }) => shown.points[point].memory).filter((memory) => memory !== null);
  if (!known.length) return h("p", { class: "soft" }, "No point has a peak.");
  const x = scale([...known, Math.min(...known) * 0.8], frame.left, frame.right, { log: true });
  let before = null;
  const rows = steps.map((step, i) => {
    const point = shown.points[step.point], row = drawStep(step, point, before, x, frame, i);
    if (point.memory !== null && isOk(point)) before = point;
    return row;
  });
  return s(
    "svg",
    { width, height: height + 38 },
    x.ticks.map((tick) => [
      line(x(tick), frame.top, x(tick), height, "grid"),
      text(x(tick), height + 15, short(tick), { class: "tick", "text-anchor": "middle" }),
    ]),
    text((frame.left + frame.right) / 2, height + 32, `${shown.memory_title}, ${shown.unit} (log scale)`, { class: "soft", "text-anchor": "middle" }),
    rows,
  );
}

function drawStep(step, point, before, x, frame, i) {
  const high = stepHeight(), top = frame.top + i * high, middle = top + high / 2, first = shown.points[shown.waterfall[0].point];
  const words = i === 0 ? "baseline" : `+ ${step.added.join(" ")}`;
  const name = text(0, middle + 4, shortened(words, frame.left / 6.6), {});
  const attributes = mark(step.point);
  const back = s("rect", { class: "back", x: 0, y: top, width: frame.right + 178, height: high });
  if (point.memory === null || !isOk(point)) {
    return s("g", attributes, back, name, text(frame.left + 6, middle + 4, `${SIGNS[point.status] ?? "?"} ${point.status}`, { class: "soft" }));
  }
  const from = before?.memory ?? point.memory, kind = step.is_accumulation ? "accumulation" : from >= point.memory ? "good" : "bad";
  const [left, right] = [Math.min(from, point.memory), Math.max(from, point.memory)];
  const speed = ratioOf(point.speed, first.speed), less = ratioOf(first.memory, point.memory);
  const sign = [point, first].some((each) => each.disturbed) ? "≈ " : "";
  return s(
    "g",
    attributes,
    back,
    name,
    s("rect", { class: "bar rest", x: frame.left, y: top + 8, width: x(left) - frame.left, height: high - 16 }),
    s("rect", { class: `bar ${kind}`, x: x(left), y: top + 8, width: x(right) - x(left), height: high - 16 }),
    text(frame.right + 10, middle - 3, i === 0 ? withUnit(point.memory) : `${withUnit(point.memory)}: ${times(less)}`, {}),
    text(frame.right + 10, middle + 11, point.speed === null ? "" : `${sign}${i === 0 ? `${short(point.speed)} ${shown.speed_unit}/s` : `${short(speed)} × the speed`}`, { class: "soft", "font-size": 11 }),
  );
}
