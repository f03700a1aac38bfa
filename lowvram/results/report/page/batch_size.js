
// Memory, throughput and loss against the size of the batch. A line joins the points that differ in nothing else.

function batchSizes() {
  const of = shown.batch_sizes;
  if (!of) return null;
  const lines = [...new Set(of.lines)];
  const legend = lines.length > 1
    ? h("div", { class: "legend low" }, lines.map((each, n) => h("span", {}, s("svg", { width: 26, height: 12 }, s("line", { x1: 0, y1: 6, x2: 24, y2: 6, class: "curve", ...style(n) })), each))) : null;
  const plot = (title, value, range) =>
    shown.points.some((point) => isOk(point) && value(point) !== null) ? drawing((width) => drawBatchSizes(width, title, value, range ?? (() => null), lines)) : null;
  return section(
    "The size of the batch", `A line joins points that differ in nothing else. Bars: the 5th to the 95th percentile of the steps' times. Hollow: disturbed.${of.noise_scale ? " Dashed: the gradient noise scale, the median of the points. Batches much larger than it gain little." : ""}`, "wide",
    legend,
    h(
      "div",
      { class: "plots three" },
      plot(`${shown.memory_title}, ${shown.unit}`, (point) => point.memory),
      plot(`${shown.speed_unit}/s`, (point) => point.speed, (point) => point.speed_range),
      plot("eval loss", (point) => point.loss),
    ),
  );
}

function drawBatchSizes(width, title, value, range, lines) {
  const { sizes, title: sizesTitle } = shown.batch_sizes, height = 260, frame = { left: 76, top: 10, right: width - 14, bottom: height - 42 };
  const placed = shown.points.map((_, i) => i).filter((i) => isOk(shown.points[i]) && sizes[i] !== null && value(shown.points[i]) !== null);
  const noise = title === "eval loss" ? shown.batch_sizes.noise_scale : null;
  const x = scale([...placed.map((i) => sizes[i]), noise ?? NaN], frame.left, frame.right, { log: true, ticks: [...new Set(placed.map((i) => sizes[i]))] });
  const all = placed.flatMap((i) => [value(shown.points[i]), ...(range(shown.points[i]) ?? [])]);
  const wide = [0.99 * Math.min(...all), 1.01 * Math.max(...all)]; // so that what is equal up to rounding looks equal
  const y = scale([...all, ...wide], frame.bottom, frame.top, { zero: title !== "eval loss", log: false, gap: 45 });
  const curves = lines.map((each, n) => {
    const own = placed.filter((i) => shown.batch_sizes.lines[i] === each).sort((a, b) => sizes[a] - sizes[b]);
    const points = own.map((i) => `${x(sizes[i])},${y(value(shown.points[i]))}`).join(" ");
    const dots = own.map((i) => [bar(x(sizes[i]), range(shown.points[i]), y), spot(i, x(sizes[i]), y(value(shown.points[i])), style(n).stroke)]);
    return [s("polyline", { class: "curve", points, ...style(n) }), dots];
  });
  return s("svg", { width, height }, axes(x, y, frame, sizesTitle, title), noise && noiseMark(x(noise), noise, frame), curves);
}

// Where the batch is as large as the noise scale; its name is on the side that has more room.
function noiseMark(at, noise, { left, top, right, bottom }) {
  const isLeft = at > (left + right) / 2;
  return s("g", {}, line(at, top, at, bottom, "noise"), text(at + (isLeft ? -5 : 5), top + 10, `noise scale ${short(noise)}`, { class: "soft", "text-anchor": isLeft ? "end" : "start" }));
}

function spot(i, cx, cy, colour) {
  return s("circle", { ...mark(i, "spot"), cx, cy, r: 4.5, stroke: colour, fill: shown.points[i].disturbed ? "var(--panel)" : colour });
}

// The range of a value, as a vertical bar with ends.
function bar(at, range, y) {
  if (!range) return null;
  const [low, high] = range.map(y);
  return s("path", { class: "error", d: `M${at} ${low}V${high}M${at - 4} ${low}h8M${at - 4} ${high}h8` });
}
