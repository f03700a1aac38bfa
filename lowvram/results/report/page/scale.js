
// Numbers: how they are written, and where on an axis they lie.

const LOG_FROM = 12; // times between the smallest and the largest: on a linear axis the small ones lie on top of each other

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

// The change that a ratio means, in percent.
function change(ratio) {
  if (ratio === null || ratio === undefined) return "–";
  const percent = (ratio - 1) * 100;
  const digits = Math.abs(percent) < 9.95 ? 1 : 0;
  const size = Math.abs(percent).toFixed(digits);
  return Number(size) === 0 ? "±0 %" : `${percent < 0 ? "−" : "+"}${size} %`;
}

const ratioOf = (value, base) => (value === null || value === undefined || !base ? null : value / base);

// Whether a change is for the better (1), the worse (−1) or can't be told from none (0).
function verdict(ratio, better) {
  if (ratio === null || !better || Math.abs(ratio - 1) < 0.0005) return 0;
  return Math.sign(ratio - 1) * better;
}

const verdictName = (ratio, better) => ["bad", "", "good"][verdict(ratio, better) + 1];

// A function from values to places between `from` and `to`, with `ticks` and `isLog`. `ticks`: the values to name, if there is room; else one about every `gap` pixels.
function scale(values, from, to, { zero = false, log = null, ticks = null, gap = 80 } = {}) {
  const known = values.filter((value) => Number.isFinite(value));
  const least = Math.min(...known), most = Math.max(...known);
  const isLog = log ?? (least > 0 && most / least > LOG_FROM);
  const warp = isLog ? Math.log10 : (value) => value;
  let low = warp(zero && !isLog ? Math.min(0, least) : least), high = warp(most);
  if (!(high > low)) [low, high] = isLog ? [low - 0.3, high + 0.3] : [Math.min(low, 0), high || 1];
  const room = (high - low) * 0.04;
  low -= zero && !isLog && least >= 0 ? 0 : room;
  high += room;
  const place = (value) => from + ((warp(value) - low) / (high - low)) * (to - from);
  place.isLog = isLog;
  place.ticks = ticks && ticks.length <= Math.abs(to - from) / 30 ? ticks : (isLog ? logTicks : linearTicks)(low, high, Math.abs(to - from) / gap);
  return place;
}

function linearTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(wanted, 2), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, wanted) {
  const decades = high - low, digits = decades > wanted ? [1] : decades > wanted / 3 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const digit of digits) {
      const at = power + Math.log10(digit);
      if (at >= low && at <= high) ticks.push(Number((digit * 10 ** power).toPrecision(3)));
    }
  }
  return ticks;
}

// Grid, ticks and titles of a plot whose frame is {left, top, right, bottom}.
function axes(x, y, { left, top, right, bottom }, xTitle, yTitle) {
  const middle = (top + bottom) / 2, note = (place) => (place.isLog ? " (log scale)" : "");
  return s(
    "g",
    {},
    x.ticks.map((tick) => [
      line(x(tick), top, x(tick), bottom, "grid"),
      text(x(tick), bottom + 16, short(tick), { class: "tick", "text-anchor": "middle" }),
    ]),
    y.ticks.map((tick) => [
      line(left, y(tick), right, y(tick), "grid"),
      text(left - 6, y(tick) + 4, short(tick), { class: "tick", "text-anchor": "end" }),
    ]),
    line(left, bottom, right, bottom, "axis"),
    line(left, top, left, bottom, "axis"),
    text((left + right) / 2, bottom + 34, xTitle + note(x), { class: "soft", "text-anchor": "middle" }),
    text(0, 0, yTitle + note(y), {
      class: "soft", "text-anchor": "middle", transform: `translate(13 ${middle}) rotate(-90)`,
    }),
  );
}
