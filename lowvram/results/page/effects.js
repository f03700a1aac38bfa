
// What each choice did, over all pairs of points that differ in nothing else.

const EFFECT_HEIGHT = 30;

function effects() {
  if (!shown.effects.length) return null;
  return section(
    "What each choice saved and cost",
    "Medians over the pairs of points that differ in nothing else. Bars are logarithmic: half and twice are equally long.",
    "",
    h("div", { class: "tall" }, drawing(drawEffects)),
  );
}

function drawEffects(width) {
  const all = [...shown.effects].sort((a, b) => (a.memory_ratio ?? 1) - (b.memory_ratio ?? 1));
  const hasError = all.some((effect) => effect.gradient_error !== null), lossAt = width - (hasError ? 152 : 66);
  const nameWidth = Math.min(170, width * 0.27), room = (lossAt - 62 - nameWidth) / 2;
  const columns = [
    { title: "memory", ratio: "memory_ratio", better: -1, left: nameWidth },
    { title: "speed", ratio: "speed_ratio", better: 1, left: nameWidth + room },
  ];
  const heads = [
    ...columns.map(({ title, left }) => text(left + room / 2, 14, title, { class: "soft", "text-anchor": "middle" })),
    text(lossAt, 14, "eval loss", { class: "soft", "text-anchor": "end" }),
    hasError ? text(width - 66, 14, "gradient error", { class: "soft", "text-anchor": "end" }) : null,
    text(width - 4, 14, "pairs", { class: "soft", "text-anchor": "end" }),
  ];
  const longest = (name) => Math.max(0.4, ...all.map((effect) => Math.abs(Math.log2(effect[name] ?? 1))));
  const rows = all.map((effect, i) => {
    const top = 22 + i * EFFECT_HEIGHT, middle = top + EFFECT_HEIGHT / 2 + 4;
    const words = `${effect.name}=${effect.value}`, against = `against ${effect.against}`;
    return s(
      "g",
      { role: "img", "aria-label": `${words} ${against}: memory ${change(effect.memory_ratio)}, speed ${change(effect.speed_ratio)}` },
      s("title", {}, `${words} ${against}`),
      line(0, top, width, top, "grid"),
      text(0, middle - 6, shortened(words, nameWidth / 6.8), {}),
      text(0, middle + 6, shortened(against, nameWidth / 6), { class: "soft", "font-size": 10.5 }),
      columns.map((column) => ratioBar(effect[column.ratio], column, room, longest(column.ratio), top)),
      text(lossAt, middle, change(effect.loss_ratio), { "text-anchor": "end" }),
      hasError ? text(width - 66, middle, short(effect.gradient_error), { "text-anchor": "end" }) : null,
      text(width - 4, middle, effect.pairs.length, { class: "soft", "text-anchor": "end" }),
    );
  });
  return s("svg", { width, height: 26 + all.length * EFFECT_HEIGHT }, heads, rows);
}

// From the middle of its column to the left where something became less, to the right where it became more.
function ratioBar(ratio, { better, left }, room, longest, top) {
  const centre = left + room / 2, middle = top + EFFECT_HEIGHT / 2;
  const axis = line(centre, top + 4, centre, top + EFFECT_HEIGHT - 4, "axis");
  if (ratio === null || ratio <= 0) return [axis, text(centre + 6, middle + 4, "–", { class: "soft" })];
  const end = centre + (Math.log2(ratio) / longest) * (room / 2 - 48), isLeft = ratio < 1;
  const bar = { x: Math.min(centre, end), y: top + 7, width: Math.abs(end - centre), height: EFFECT_HEIGHT - 14 };
  const words = { "text-anchor": isLeft ? "end" : "start" };
  return [
    s("rect", { ...bar, class: `bar ${verdictName(ratio, better)}` }),
    axis,
    text(end + (isLeft ? -5 : 5), middle + 4, change(ratio), words),
  ];
}
