
// The training loss of each point, over time and over what it has seen.

const COLOURS = ["var(--parameters)", "var(--gradients)", "var(--optimizer)", "var(--inputs)", "var(--activations)", "var(--bad)", "var(--text)", "var(--other)"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

function losses() {
  const drawn = shown.points.map((_, i) => i).filter((i) => shown.points[i].curve.loss.length > 1);
  if (!drawn.length) return null;
  const isMany = drawn.length > COLOURS.length;
  const style = new Map(drawn.map((i, n) => [i, isMany ? {} : { stroke: COLOURS[n], "stroke-dasharray": DASHES[n % DASHES.length] }]));
  const legend = isMany
    ? h("div", { class: "legend" }, `${drawn.length} curves: point at one to see whose it is. Bold: the baseline.`)
    : h("div", { class: "legend" }, drawn.map((i) => h("span", mark(i, "", false), s("svg", { width: 26, height: 12 }, s("line", { x1: 0, y1: 6, x2: 24, y2: 6, class: "curve", ...style.get(i) })), fullName(shown.points[i]))));
  const plot = (field, title) => drawing((width) => drawLosses(width, drawn, style, field, title));
  return section(
    "Training loss", "Over the time of its steps, and over what was seen: the same place on the right is the same work.", shown.waterfall ? "wide" : "",
    legend,
    h("div", { class: `curves ${isMany ? "many" : ""}` }, plot("seconds", "time of steps, s"), plot("seen", `${shown.speed_unit} seen`)),
  );
}

function drawLosses(width, drawn, style, field, title) {
  const height = 330, frame = { left: 54, top: 8, right: width - 24, bottom: height - 42 };
  const known = drawn.filter((i) => shown.points[i].curve[field]);
  if (!known.length) return h("p", { class: "soft" }, "No step was timed.");
  const xs = known.map((i) => shown.points[i].curve[field].at(-1));
  const x = scale([0, ...xs], frame.left, frame.right, { zero: true, log: false });
  const y = scale(drawn.flatMap((i) => shown.points[i].curve.loss), frame.bottom, frame.top, { log: false });
  const paths = known.map((i) => {
    const { loss, [field]: at } = shown.points[i].curve;
    const points = loss.map((value, n) => `${x(at[n]).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    return s("polyline", { ...mark(i, `curve ${i === baseline ? "reference" : ""}`, false), points, ...style.get(i) });
  });
  return s("svg", { width, height }, axes(x, y, frame, title, "training loss"), paths);
}
