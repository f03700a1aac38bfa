
// What each choice did, over all pairs of points that differ in nothing else.

const EFFECT_HEIGHT = 30;

function effects() {
  if (!shown.effects.length) return null;
  return section(
    "What each choice saved and cost",
    "Medians over the pairs of points that differ in nothing else. Bars are logarithmic: half and twice are equally long. ≈: speeds of disturbed points.",
    "",
    h("div", { class: "tall" }, drawing(drawEffects)),
  );
}

function drawEffects(width) {
  const all = [...shown.effects].sort((a, b) => (a.memory_ratio ?? 1) - (b.memory_ratio ?? 1));
  const hasError = all.some((effect) => effect.gradient_error !== null), lossAt = width - (hasError ? 100 : 6);
  const nameWidth = Math.min(160, width * 0.32), room = (lossAt - 64 - nameWidth) / 2;
  const columns = [
    ratioColumn("memory", all.map((effect) => effect.memory_ratio), -1, nameWidth, room),
    ratioColumn("speed", all.map((effect) => effect.speed_ratio), 1, nameWidth + room, room),
  ];
  const title = (x, words) => text(x, 14, words, { class: "soft", "text-anchor": "end" });
  return s(
    "svg",
    { width, height: 26 + all.length * EFFECT_HEIGHT },
    columns.map((column) => title(column.end, column.title)),
    title(lossAt, "eval loss"),
    hasError ? title(width - 6, "gradient error") : null,
    all.map((effect, i) => drawEffect(effect, i, columns, nameWidth, lossAt, hasError ? width - 6 : null)),
    all.map((_, i) => line(0, 22 + i * EFFECT_HEIGHT, width, 22 + i * EFFECT_HEIGHT, "grid")),
  );
}

function drawEffect(effect, i, columns, nameWidth, lossAt, errorAt) {
  const top = 22 + i * EFFECT_HEIGHT, middle = top + EFFECT_HEIGHT / 2 + 4, number = effect.pairs.length;
  const disturbed = effect.pairs.filter((pair) => pair.some((j) => shown.points[j].disturbed)).length;
  const words = `${effect.name}=${effect.value}`;
  const against = `against ${effect.against}, ${number} pair${number > 1 ? "s" : ""}`;
  const [memory, speed] = columns.map((column) => change(column.ratios[i]));
  return s(
    "g",
    { role: "img", "aria-label": `${words} ${against}: memory ${memory}, speed ${speed}` },
    s("title", {}, `${words} ${against}${disturbed ? `, ${disturbed} with a disturbed point` : ""}`),
    text(0, middle - 6, shortened(words, nameWidth / 7), {}),
    text(0, middle + 7, shortened(against, nameWidth / 6), { class: "soft", "font-size": 10.5 }),
    columns.map((column) => ratioBar(column, i, top, column.title === "speed" && disturbed > 0)),
    text(lossAt, middle, change(effect.loss_ratio), { "text-anchor": "end" }),
    errorAt === null ? null : text(errorAt, middle, short(effect.gradient_error), { "text-anchor": "end" }),
  );
}

// A column of bars that start where nothing changes: to the left for less, to the right for more.
function ratioColumn(title, ratios, better, left, room) {
  const logs = ratios.filter((ratio) => ratio > 0).map(Math.log2), end = left + room - 4;
  const low = Math.min(-0.15, ...logs), high = Math.max(0.15, ...logs), span = room - 70;
  return { title, ratios, better, end, place: (log) => left + 8 + ((log - low) / (high - low)) * span };
}

function ratioBar({ ratios, better, end, place }, i, top, isDisturbed) {
  const ratio = ratios[i], zero = place(0), to = ratio > 0 ? place(Math.log2(ratio)) : zero;
  const bar = { x: Math.min(zero, to), y: top + 7, width: Math.abs(to - zero), height: EFFECT_HEIGHT - 14 };
  return [
    s("rect", { ...bar, class: `bar ${verdictName(ratio, better)}` }),
    line(zero, top + 3, zero, top + EFFECT_HEIGHT - 3, "axis"),
    text(end, top + EFFECT_HEIGHT / 2 + 4, `${isDisturbed ? "≈ " : ""}${change(ratio)}`, { "text-anchor": "end" }),
  ];
}
