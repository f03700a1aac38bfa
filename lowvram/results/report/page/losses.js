
// The training loss of each point, over time and over what it has seen.

const NUM_COLOURS = 8, DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const MOST_STYLES = NUM_COLOURS * DASHES.length, MOST_NAMES = 12; // curves that can be told apart; that can be named beside their ends

// The n-th style of a line: no two of the first 32 are the same, and neighbours differ in colour and dashes.
const style = (n) => ({ stroke: `var(--curve-${n % NUM_COLOURS})`, "stroke-dasharray": DASHES[(n + Math.floor(n / NUM_COLOURS)) % DASHES.length] });

function losses() {
  const drawn = shown.points.map((_, i) => i).filter((i) => shown.points[i].curve.loss.length > 1);
  if (!drawn.length) return null;
  const isMany = drawn.length > MOST_STYLES, styles = new Map(drawn.map((i, n) => [i, isMany ? {} : style(n)]));
  const legend = isMany
    ? h("div", { class: "legend" }, `${drawn.length} curves: point at one to see whose it is. Bold: the baseline.`)
    : h("div", { class: "legend low" }, drawn.map((i) => h("span", mark(i, "", false), s("svg", { width: 26, height: 12 }, s("line", { x1: 0, y1: 6, x2: 24, y2: 6, class: "curve", ...styles.get(i) })), fullName(shown.points[i]))));
  const plot = (field, title, isNamed) => drawing((width) => drawLosses(width, drawn, styles, field, title, isNamed));
  return section(
    "Training loss", "Over the time of its steps, and over what was seen: the same place on the right is the same work. Point at a name to see its curve.", "wide",
    legend,
    h("div", { class: `plots two curves ${isMany ? "many" : ""}` }, plot("seconds", "time of steps, s", false), plot("seen", `${shown.speed_unit} seen`, true)),
  );
}

function drawLosses(width, drawn, styles, field, title, isNamed) {
  const groups = Map.groupBy(drawn, (i) => shown.points[i].curve.loss.join());
  const hasNames = isNamed && groups.size <= MOST_NAMES && width > 420, room = hasNames ? Math.min(190, width * 0.3) : 24;
  const height = 340, frame = { left: 54, top: 8, right: width - room, bottom: height - 42 };
  const known = drawn.filter((i) => shown.points[i].curve[field]);
  if (!known.length) return h("p", { class: "soft" }, "No step was timed.");
  const xs = known.map((i) => shown.points[i].curve[field].at(-1));
  const x = scale([0, ...xs], frame.left, frame.right, { zero: true, log: false });
  const y = scale(drawn.flatMap((i) => shown.points[i].curve.loss), frame.bottom, frame.top, { log: false });
  const paths = known.map((i) => {
    const { loss, [field]: at } = shown.points[i].curve;
    const points = loss.map((value, n) => `${x(at[n]).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    return s("polyline", { ...mark(i, `curve ${i === baseline ? "reference" : ""}`, false), points, ...styles.get(i) });
  });
  return s("svg", { width, height }, axes(x, y, frame, title, "training loss"), paths, hasNames ? endNames([...groups.values()], field, styles, x, y, frame, room) : null);
}

// The names of the curves beside their ends, moved apart where those lie close together. Curves that are the same have
// one name.
function endNames(groups, field, styles, x, y, frame, room) {
  const known = groups.map((group) => group.filter((i) => shown.points[i].curve[field])).filter((group) => group.length);
  const ends = known.map(([i, ...others]) => ({ i, others, at: x(shown.points[i].curve[field].at(-1)), end: y(shown.points[i].curve.loss.at(-1)) }));
  ends.sort((a, b) => a.end - b.end);
  const high = 13;
  let free = frame.top + 4;
  for (const one of ends) {
    one.name = Math.max(one.end, free);
    free = one.name + high;
  }
  let lowest = frame.bottom;
  for (const one of ends.toReversed()) {
    one.name = Math.min(one.name, lowest);
    lowest = one.name - high;
  }
  const left = frame.right + 14;
  const words = ({ i, others }) => {
    const more = others.length ? ` and ${others.length} alike` : "";
    return shortened(fullName(shown.points[i]), (room - 16) / 6.3 - more.length) + more;
  };
  return ends.map(({ i, others, at, end, name }) =>
    s("g", mark(i, "end", false),
      s("path", { class: "leader", d: `M${at + 2} ${end}L${frame.right + 4} ${name}H${left - 3}`, stroke: styles.get(i).stroke }),
      text(left, name + 4, words({ i, others }), { "font-size": 11 })));
}
