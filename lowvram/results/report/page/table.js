
// All numbers, with their change from the baseline. A column's title sorts, by mouse or by keyboard.

let sorted = { column: null, isDescending: false };
let isWhole = false; // whether all columns are shown, however narrow the window is
let visible = new Set(); // the columns that are shown

function table() {
  const rows = h("tbody", { id: "rows" });
  const heads = shown.columns.map((column, c) =>
    h(
      "th",
      { scope: "col", class: column.values ? "number" : "", "aria-sort": "none" },
      h("button", { type: "button", click: () => sortBy(c) }, column.title),
    ),
  );
  const filter = h("input", { type: "search", placeholder: "filter", "aria-label": "filter the rows", input: filterRows, id: "filter" });
  return section(
    "All points", "Below each number its change from the baseline, for the better in blue, for the worse in orange. Choose the baseline above.", "wide",
    h("div", { class: "controls" }, filter, h("label", {}, h("input", { type: "checkbox", id: "whole", change: showWhole }), " all columns"), h("span", { class: "soft", id: "dropped" })),
    h("div", { class: "scroll", id: "scroll" }, h("table", { id: "table" }, h("thead", {}, h("tr", {}, heads)), rows)),
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
  fitColumns();
}

function showWhole(event) {
  isWhole = event.target.checked;
  fitColumns();
}

// Hides the least important columns that the window has no room for, and says which; never the names.
function fitColumns() {
  const heads = [...document.querySelectorAll("th")], width = document.getElementById("scroll")?.clientWidth;
  if (!width) return;
  const longest = Math.max(...shown.points.map((point) => fullName(point).length));
  document.getElementById("table").style.setProperty("--names", `${Math.min(longest, 34) + 2}ch`);
  show(new Set(heads.keys()));
  const widths = heads.map((head) => head.offsetWidth);
  let room = width - widths[0];
  const kept = new Set([0]);
  for (const c of [...heads.keys()].slice(1).sort((a, b) => shown.columns[a].rank - shown.columns[b].rank)) {
    if (!isWhole && widths[c] > room) continue;
    kept.add(c);
    room -= widths[c];
  }
  show(kept);
  const dropped = shown.columns.filter((_, c) => !kept.has(c)).map(({ title }) => title);
  document.getElementById("dropped").textContent = dropped.length ? `no room for ${dropped.join(", ")}` : "";
}

function show(columns) {
  visible = columns;
  for (const row of document.querySelectorAll("#scroll tr")) [...row.children].forEach((cell, c) => { cell.hidden = !visible.has(c); });
}

function tableRow(i) {
  const cells = shown.columns.map((column) => {
    const words = column.texts[i];
    if (column.values) return numberCell(column, i);
    if (column.title === "status") return h("td", { title: shown.points[i].reason }, statusMark(shown.points[i].status));
    if (column.title === "command") return commandCell(words);
    return h("td", {}, words);
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

// A button that copies the command. Where a page may not copy, the command is shown, selected.
function commandCell(words) {
  if (!words) return h("td", {});
  const code = h("code", { hidden: true }, words), copy = h("button", { type: "button", title: words }, "copy");
  const reveal = () => { code.hidden = false; selectText(code); };
  copy.addEventListener("click", () => navigator.clipboard?.writeText(words).then(() => copy.replaceChildren("copied"), reveal) ?? reveal());
  return h("td", { class: "command" }, copy, code);
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
