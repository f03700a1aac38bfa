
// All numbers, with their change from the baseline. A column's title sorts, by mouse or by keyboard.

let sorted = { column: null, isDescending: false };

function table() {
  const rows = h("tbody", { id: "rows" });
  const heads = shown.columns.map((column, c) =>
    h(
      "th",
      { scope: "col", class: column.values ? "number" : "", "aria-sort": "none" },
      h("button", { type: "button", class: column.title.length > 14 ? "long" : "", click: () => sortBy(c) }, column.title),
    ),
  );
  const filter = h("input", { type: "search", placeholder: "filter", "aria-label": "filter the rows", input: filterRows, id: "filter" });
  return section(
    "All points", "Below each number its change from the baseline, for the better in blue, for the worse in orange. Choose the baseline above.", "wide",
    filter,
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), rows)),
    shown.notes.length ? h("ul", { class: "notes" }, shown.notes.map((note) => h("li", {}, note))) : null,
  );
}

function fillTable() {
  document.getElementById("rows")?.replaceChildren(...order().map(tableRow));
  document.querySelectorAll("th").forEach((head, c) => {
    const direction = sorted.isDescending ? "descending" : "ascending";
    head.setAttribute("aria-sort", c === sorted.column ? direction : "none");
  });
  filterRows();
}

function tableRow(i) {
  const cells = shown.columns.map((column) => {
    const words = column.texts[i];
    if (column.values) return numberCell(column, i);
    if (column.title === "status") return h("td", {}, statusMark(shown.points[i].status));
    if (column.title === "command") return commandCell(words);
    return h("td", { class: column.title === "reason" ? "reason" : "" }, words);
  });
  return h("tr", { "data-point": i, class: i === baseline ? "reference" : "" }, cells);
}

function numberCell(column, i) {
  const isFair = !column.is_of_training || shown.points[i].num_steps === shown.points[baseline].num_steps;
  const ratio = i === baseline || !isFair ? null : ratioOf(column.values[i], column.values[baseline]);
  return h(
    "td",
    { class: `number ${column.best.includes(i) ? "best" : ""}` },
    column.texts[i],
    ratio === null ? null : h("small", { class: verdictName(ratio, column.better) || "soft" }, change(ratio)),
  );
}

function commandCell(words) {
  if (!words) return h("td", {});
  const copy = h("button", { type: "button", title: "copy the command" }, "copy");
  copy.addEventListener("click", () => navigator.clipboard?.writeText(words).then(() => copy.replaceChildren("copied"), () => selectText(copy.nextSibling)) ?? selectText(copy.nextSibling));
  return h("td", { class: "command" }, copy, h("code", { title: words }, words));
}

const selectText = (element) => getSelection().selectAllChildren(element);

function order() {
  const indexes = shown.points.map((_, i) => i);
  if (sorted.column === null) return indexes;
  const { values, texts } = shown.columns[sorted.column], sign = sorted.isDescending ? -1 : 1;
  const isEmpty = (i) => (values ? values[i] === null : texts[i] === "");
  const compare = (a, b) => (values ? values[a] - values[b] : texts[a].localeCompare(texts[b], "en", { numeric: true }));
  return indexes.sort((a, b) => isEmpty(a) - isEmpty(b) || (isEmpty(a) ? 0 : sign * compare(a, b)) || a - b);
}

function sortBy(column) {
  sorted = { column, isDescending: sorted.column === column && !sorted.isDescending };
  fillTable();
  findMarks();
}

function filterRows() {
  const wanted = (document.getElementById("filter")?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of document.getElementById("rows")?.children ?? []) {
    const text = row.textContent.toLowerCase();
    row.hidden = !wanted.every((word) => text.includes(word));
  }
}
