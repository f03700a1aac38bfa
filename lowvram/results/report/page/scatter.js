
// Memory against throughput: the frontier is what no other point beats in both.

const CIVIDIS = ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"];
const CROWD = 40; // points, among which only a few names can be read
const LEAST_ERROR = 1e-8; // an exact gradient on a logarithmic scale

function scatter() {
  const isColoured = shown.points.some((point) => point.gradient_error !== null);
  const legend = h(
    "div",
    { class: "legend" },
    key(s("circle", { cx: 6, cy: 6, r: 5, class: "dot best" }), "not beaten in both"),
    key(s("circle", { cx: 6, cy: 6, r: 5, class: "ring" }), "baseline"),
    shown.points.some((point) => !isOk(point) && point.planned !== null)
      ? key(cross(6, 6), "did not run, at its planned memory") : null,
    shown.points.some((point) => point.speed_range) ? key(s("path", { class: "error", d: "M6 1v11M2 1h8M2 12h8" }), "p05–p95 of the steps") : null,
    shown.points.some((point) => point.disturbed) ? key(s("circle", { cx: 6, cy: 6, r: 4.5, class: "dot plain disturbed" }), "disturbed") : null,
    isColoured ? errorLegend() : h("span", {}, "fidelity: not measured"),
  );
  return section("Memory and speed", "Up and left is better.", isStacked() ? "double" : "", legend, drawing((width) => drawScatter(width, isColoured)));
}

const key = (shape, words) => h("span", {}, s("svg", { width: 13, height: 13 }, shape), words);
const cross = (x, y) => s("path", { class: "dot none", d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` });

function errors() {
  return shown.points.map((point) => point.gradient_error).filter((error) => error !== null).map((error) => Math.max(error, LEAST_ERROR));
}

function colourOf(error) {
  const place = scale(errors(), 0, CIVIDIS.length - 1, { log: true });
  return CIVIDIS[Math.round(Math.min(CIVIDIS.length - 1, Math.max(0, place(Math.max(error, LEAST_ERROR)))))];
}

function errorLegend() {
  const [least, most] = [Math.min(...errors()), Math.max(...errors())];
  const boxes = CIVIDIS.map((fill, i) => s("rect", { x: i * 14, width: 14, height: 11, fill }));
  return h("span", {}, `fidelity, as error of the gradient: ${short(least)} `, s("svg", { width: 84, height: 11 }, boxes), short(most));
}

function drawScatter(width, isColoured) {
  const height = 400, frame = { left: 72, top: 10, right: width - 14, bottom: height - 44 };
  const placed = shown.points.map((point, i) => ({ point, i })).filter(({ point }) => point.memory !== null && point.speed !== null);
  const absent = shown.points.map((point, i) => ({ point, i })).filter(({ point }) => !isOk(point) && point.speed === null && (point.memory ?? point.planned) !== null);
  if (!placed.length) return h("p", { class: "soft" }, "No point has both a peak and a speed.");
  const x = scale([...placed, ...absent].map(({ point }) => point.memory ?? point.planned), frame.left, frame.right, { zero: true });
  const y = scale(placed.flatMap(({ point }) => [point.speed, ...(point.speed_range ?? [])]), frame.bottom - (absent.length ? 18 : 0), frame.top, { zero: true });
  placed.sort((a, b) => shown.frontier.includes(a.i) - shown.frontier.includes(b.i)); // the best lie on top
  const dots = placed.map(({ point, i }) => dot(point, i, x(point.memory), y(point.speed), isColoured));
  const edge = shown.frontier.map((i) => `${x(shown.points[i].memory)},${y(shown.points[i].speed)}`).join(" ");
  const base = shown.points[baseline];
  return s(
    "svg",
    { width, height },
    axes(x, y, frame, `${shown.memory_title}, ${shown.unit}${shown.memory_source ? ` (${shown.memory_source})` : ""}`, `${shown.speed_unit}/s`),
    s("polyline", { class: "frontier", points: edge }),
    placed.map(({ point }) => bar(x(point.memory), point.speed_range, y)),
    dots,
    absent.map(({ point, i }) => s("g", mark(i), cross(x(point.memory ?? point.planned), frame.bottom - 7))),
    base.memory !== null && base.speed !== null ? s("circle", { class: "ring", cx: x(base.memory), cy: y(base.speed), r: 9 }) : null,
    names(x, y, frame),
  );
}

function dot(point, i, cx, cy, isColoured) {
  const isBest = shown.frontier.includes(i), attributes = mark(i, `dot ${isBest ? "best" : "plain"} ${point.disturbed ? "disturbed" : ""}`);
  const hasError = isColoured && point.gradient_error !== null;
  const circle = s("circle", { ...attributes, cx, cy, r: isBest ? 6 : 5 });
  if (hasError) {
    circle.classList.add("coloured");
    circle.style.fill = colourOf(point.gradient_error);
  }
  return circle;
}

// Names of the baseline and the frontier, each where it covers no other.
function names(x, y, frame) {
  const boxes = [], ends = [shown.frontier[0], shown.frontier.at(-1)], most = shown.points.length > CROWD ? 5 : 14;
  const wanted = [...new Set([baseline, ...ends, ...shown.frontier])].filter((i) => i !== undefined).slice(0, most);
  const placed = wanted.filter((i) => shown.points[i].memory !== null && shown.points[i].speed !== null);
  const isOver = (box) => placed.some((i) => {
    const [cx, cy] = [x(shown.points[i].memory), y(shown.points[i].speed)];
    return cx > box[0] - 5 && cx < box[2] + 5 && cy > box[1] - 4 && cy < box[3] + 4;
  });
  return placed.map((i) => {
    const point = shown.points[i], words = shortened(fullName(point), 30), width = words.length * 6.6;
    const at = [x(point.memory), y(point.speed)];
    for (const [dx, dy] of [[13, 4], [-13 - width, 4], [-width / 2, -13], [-width / 2, 22]]) {
      const box = [at[0] + dx, at[1] + dy - 11, at[0] + dx + width, at[1] + dy + 3];
      const isFree = boxes.every((other) => box[0] > other[2] || box[2] < other[0] || box[1] > other[3] || box[3] < other[1]);
      if (!isFree || isOver(box) || box[0] < frame.left || box[2] > frame.right || box[1] < 0 || box[3] > frame.bottom) continue;
      boxes.push(box);
      return text(box[0], at[1] + dy, words, { class: "halo" });
    }
    return null;
  });
}
