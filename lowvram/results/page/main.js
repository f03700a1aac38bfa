
// The page: everything is made once, and what compares is made again when another baseline is chosen.

const shown = JSON.parse(document.getElementById("data").textContent);
const isMerged = new Set(shown.points.map((point) => point.sweep)).size > 1;
let baseline = shown.baseline;

function setBaseline(i) {
  baseline = i;
  document.querySelector(".cards")?.replaceWith(cards());
  fillTable();
  drawAll(true);
}

function build() {
  document.getElementById("head").append(head());
  const answer = shown.waterfall ? waterfall() : effects();
  const parts = [answer, scatter(), failures(), shown.waterfall ? effects() : null, kinds(), losses(), table()];
  const main = document.getElementById("main");
  main.before(cards());
  main.append(...parts.filter(Boolean));
  fillTable();
  drawAll(true);
  listen();
  addEventListener("resize", () => requestAnimationFrame(() => drawAll(false)));
}

build();
