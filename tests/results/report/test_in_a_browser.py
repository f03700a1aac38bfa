"""The report in headless Chromium: what is drawn, what answers, and that nothing hostile runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lowvram.results import memory_over_step
from lowvram.results.report.report import save
from lowvram.results.row import Row, merge
from tests import synthetic
from tests.synthetic import HOSTILE, HOSTILE_FOLDER, failed, leave, point

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MOST_PAINT_MS = 10_000  # it takes less than one second; this is for machines that do other things too
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy".*?>', re.DOTALL)
pytestmark = [pytest.mark.skipif(BROWSER is None, reason="there is no Chromium"), pytest.mark.slow]


class Shown(HTMLParser):
    """What stands in a page once its script has run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.words: list[str] = []
        self._is_code = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.classes += (dict(attrs).get("class") or "").split()
        self._is_code = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._is_code:
            self.words.append(data.strip())


def opened(path: Path, profile: Path, width: int = 1280) -> str:
    """The page as a browser leaves it. Fails if its console tells an error."""
    assert BROWSER is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=5000",
    ]
    words = [BROWSER, *options, f"--window-size={width},800", "--enable-logging=stderr", "--dump-dom", path.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, re.findall(r".*CONSOLE.*", done.stderr)
    assert 'data-is-complete="true"' in done.stdout
    return done.stdout


def report(folder: Path, rows: list[Row]) -> Path:
    path = save(leave(folder, rows))
    assert path is not None
    return path


def after(path: Path, script: str) -> Path:
    """A copy of the page in which `script` runs when all is drawn; the page's own policy would refuse it."""
    wait = f"<script>setTimeout(() => {{{script}}}, 1000)</script></body>"
    copy = path.with_name("copy.html")
    copy.write_text(POLICY.sub("", path.read_text()).replace("</body>", wait))
    return copy


def test_all_figures_are_drawn(tmp_path: Path) -> None:
    fidelity = {"fidelity": {"gradient_error": 0.001, "loss_gap": 0.0}}
    rows = [merge(row, fidelity) for row in synthetic.waterfall()]
    shown = Shown(opened(report(tmp_path / "sweep", rows), tmp_path / "profile"))
    for title in ("The waterfall: knobs added one by one", "Memory and speed", "What each choice saved and cost",
                  "What the peak is made of", "Training loss", "All points"):  # fmt: skip
        assert title in shown.words
    assert "32.6 × less" in shown.words  # of the last point
    assert "+ ckpt=every1" in shown.words
    assert shown.classes.count("curve") == 3 * len(rows)  # over time, over tokens, and in the legend
    assert shown.classes.count("coloured") == len(rows)  # by fidelity
    assert shown.classes.count("accumulation") == 2  # the grey bar, and in the legend
    assert shown.tags.count("tr") == 1 + len(rows)
    assert "python train.py 3" in shown.words


def test_a_headline_on_a_disturbed_point_has_its_mark(tmp_path: Path) -> None:
    time = {"step_ms_p50": 100.0, "step_ms_p05": 80.0, "step_ms_p95": 200.0}
    rows = [point(0, {}), point(1, {"precision": "bf16"}, disturbed="other processes", time=time)]
    shown = Shown(opened(report(tmp_path / "sweep", rows), tmp_path / "profile"))
    assert shown.words.count("≈ disturbed") == 2  # the smallest peak, and the fastest
    assert "disturbed" in shown.classes
    assert shown.classes.count("error") == 2  # in the legend, and at the point
    both = report(tmp_path / "both", [point(0, {}, disturbed="x"), rows[1]])
    shown = Shown(opened(both, tmp_path / "another profile"))
    assert "≈ disturbed, and so is the baseline" in shown.words


@pytest.mark.parametrize("width", [600, 1400])
def test_the_table_fits_the_window_and_names_are_never_hidden(tmp_path: Path, width: int) -> None:
    act = """
      const table = document.getElementById("scroll"), heads = [...document.querySelectorAll("th")];
      const told = [table.scrollWidth <= table.clientWidth, document.documentElement.scrollWidth <= innerWidth];
      told.push(!heads[0].hidden, heads.some((head) => head.hidden));
      document.getElementById("whole").click();
      told.push(heads.some((head) => head.hidden), document.getElementById("dropped").textContent === "");
      document.title = told.join(" ");
    """
    more = {"fidelity": {"gradient_error": 0.001, "loss_gap": 0.0}, "eval": {"accuracy": 0.5, "perplexity": 9.0}}
    rows = [merge(row, more) for row in synthetic.grid(20)[:10]]
    page = opened(after(report(tmp_path / "sweep", rows), act), tmp_path / "profile", width)
    assert "<title>true true true true false true<" in page


def test_the_noise_scale_is_marked_beside_the_losses_of_batches(tmp_path: Path) -> None:
    rows = [
        point(i, {}, config={"train": {"batch_size": size}}, gradient={"noise_scale": 20.0})
        for i, size in enumerate((8, 16))
    ]
    shown = Shown(opened(report(tmp_path, rows), tmp_path / "profile"))
    assert shown.classes.count("noise") == 1
    assert "noise scale 20" in shown.words


def test_a_batch_that_was_swept_and_the_memory_over_a_step_are_drawn(tmp_path: Path) -> None:
    rows = [point(i, {}, config={"train": {"batch_size": size}}) for i, size in enumerate((8, 16, 32))]
    leave(tmp_path, rows)
    moments = [[n, "forward" if n < 5 else "backward", 2**20, n * 2**20] for n in range(10)]
    for row in rows[:2]:
        memory_over_step.write(tmp_path / row["id"], ["parameters", "activations"], moments)
    path = save(tmp_path)
    assert path is not None
    shown = Shown(opened(path, tmp_path / "profile"))
    assert {"The size of the batch", "Memory over one step", "forward", "backward"} <= set(shown.words)
    assert shown.classes.count("spot") == 3 * len(rows)
    assert shown.classes.count("area") == 2  # of both points the same peak: the baseline alone


def test_curves_have_names_at_their_ends(tmp_path: Path) -> None:
    rows = [point(i, {"ckpt": option}) for i, option in enumerate(("none", "every1", "every2"))]
    shown = Shown(opened(report(tmp_path / "sweep", rows), tmp_path / "profile", 1400))
    assert shown.classes.count("end") == len(rows)


def test_what_did_not_run_is_reported(tmp_path: Path) -> None:
    endings = ("oom", "incompatible", "killed", "skipped")
    rows = [point(0, {}), *(failed(i, status, f"why {i}") for i, status in enumerate(endings, start=1))]
    shown = Shown(opened(report(tmp_path / "sweep", rows), tmp_path / "profile"))
    assert "Points that did not run to their end (4 of 5)" in shown.words
    for i, status in enumerate(endings, start=1):
        assert f"{status}: why {i}" in shown.words
    assert shown.classes.count("missing") == 1 + 4  # planned, in the legend and as bars


def test_two_hundred_points_are_soon_painted(tmp_path: Path) -> None:
    tell = """
      const told = (entries) => { document.title = entries.getEntriesByName("first-contentful-paint")[0].startTime; };
      new PerformanceObserver(told).observe({ type: "paint", buffered: true });
    """
    page = opened(after(report(tmp_path / "sweep", synthetic.grid(200)), tell), tmp_path / "profile")
    match = re.search(r"<title>([\d.]+)", page)
    assert match
    assert float(match[1]) <= MOST_PAINT_MS
    assert Shown(page).tags.count("tr") == 201


def test_a_title_sorts_and_another_baseline_compares(tmp_path: Path) -> None:
    rows = [point(0, {}), point(1, {"ckpt": "every1"}), point(2, {"ckpt": "every2"}), failed(3, "oom", "why")]
    act = """
      const column = shown.columns.findIndex((each) => each.title.startsWith("peak"));
      const names = () => [...document.querySelectorAll("#rows tr")].map((row) => row.firstChild.textContent).join();
      const button = document.querySelectorAll("th button")[column], told = [names()];
      for (let i = 0; i < 2; i++) { button.click(); told.push(names()); }
      told.push(button.parentNode.getAttribute("aria-sort"));
      const choice = document.getElementById("baseline");
      choice.value = "1";
      choice.dispatchEvent(new Event("change"));
      told.push(document.querySelector("tr.reference").firstChild.textContent);
      told.push(document.querySelector(".card .which").textContent);
      told.push(document.querySelectorAll("#rows tr")[0].children[column].textContent);
      document.title = told.join(" ");
    """
    page = opened(after(report(tmp_path / "sweep", rows), act), tmp_path / "profile")
    # Without a peak it is the last in both directions.
    orders = "baseline,every1,every2,oom every1,every2,baseline,oom baseline,every2,every1,oom descending"
    assert f"<title>{orders} every1 every1 0.391+178 %<" in page


def test_a_mark_that_is_pointed_at_says_who_it_is(tmp_path: Path) -> None:
    act = """
      const dot = document.querySelector("circle.dot[data-point='1']");
      dot.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
      const lit = document.querySelectorAll(".on").length;
      document.title = `${document.getElementById("tooltip").textContent} lit ${lit > 3}`;
    """
    rows = [point(0, {}), point(1, {"ckpt": "every1"})]
    page = opened(after(report(tmp_path / "sweep", rows), act), tmp_path / "profile")
    (title,) = re.findall(r"<title>(.*?)</title>", page)[:1]
    assert title.startswith("every1peak memory 0.141 GiB")
    assert title.endswith("python train.py 1 lit true")


def test_nothing_hostile_becomes_an_element(tmp_path: Path) -> None:
    kind = {"precision": HOSTILE}
    rows = [
        point(0, {}, name=HOSTILE, provenance={"command": HOSTILE, "device_name": HOSTILE}),
        point(1, kind, name=HOSTILE, semantics_changed=HOSTILE),
        failed(2, "error", HOSTILE, choices=kind),
    ]
    page = opened(report(tmp_path / HOSTILE_FOLDER, rows), tmp_path / "profile")
    shown = Shown(page)
    assert "img" not in shown.tags
    assert shown.tags.count("script") == 2
    assert "pwned" not in re.findall(r"<title>(.*?)</title>", page)
    assert any(HOSTILE[:40] in words for words in shown.words)
