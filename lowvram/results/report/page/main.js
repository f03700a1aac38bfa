
// The page: the first screen at once, the rest when that is painted. What compares is made again for another baseline.

const shown = JSON.parse(document.getElementById("data").textContent);
const isMerged = new Set(shown.points.map((point) => point.sweep)).size > 1;
let baseline = shown.baseline;

function setBaseline(i) {
  baseline = i;
  document.querySelector(".cards").replaceWith(cards());
  fillTable();
  drawAll(true);
}

function add(...sections) {
  document.getElementById("main").append(...sections.filter(Boolean));
}

function buildFirst() {
  document.getElementById("head").append(head());
  document.getElementById("main").before(cards());
  add(shown.waterfall ? waterfall() : effects(), scatter());
  drawAll(false);
}

function buildRest() {
  if (document.body.dataset.isComplete) return;
  add(isStacked() ? kinds() : null, failures(), shown.waterfall ? effects() : null, isStacked() ? null : kinds(), batchSizes(), overStep(), losses(), table());
  fillTable();
  drawAll(false);
  listen();
  addEventListener("resize", () => requestAnimationFrame(() => drawAll(false)));
  document.body.dataset.isComplete = "true";
}

buildFirst();
requestAnimationFrame(() => setTimeout(buildRest));
setTimeout(buildRest, 500);  // a page in a background tab isn't painted
