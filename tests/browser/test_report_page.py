"""The report in a real browser: it draws, answers to keys, and says nothing on the console."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from foreshard.advise.advice import improvements
from foreshard.report.pages import prediction_page

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
]
# Presses keys in the chart and writes what it finds into the page's title, where --dump-dom shows it.
PROBE = """<script>
setTimeout(() => {
  const chart = document.querySelector(".gantt");
  const rects = () => chart.querySelectorAll("rect").length;
  const keydown = (key) => new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true });
  const press = (key) => chart.dispatchEvent(keydown(key));
  const before = chart.querySelector("svg").innerHTML;
  press("+"); press("+"); press("ArrowRight");
  const moved = chart.querySelector("svg").innerHTML !== before;
  press("0");
  const back = chart.querySelector("svg").innerHTML === before;
  press("n");
  const told = document.querySelector(".told").textContent;
  document.title = JSON.stringify({ rects: rects(), moved, back, told });
}, 300);
</script></body>"""

WIDTHS = """<script>
setTimeout(() => {
  const frame = document.querySelector("iframe").contentDocument.documentElement;
  document.title = JSON.stringify([frame.scrollWidth, frame.clientWidth]);
}, 500);
</script>"""


@pytest.fixture
def page(answered, tmp_path):
    asked, prediction, timeline = answered
    path = tmp_path / "report.html"
    text = prediction_page.page(
        prediction_page.page_data(asked, prediction, timeline, improvements(asked, prediction))
    )
    path.write_text(text, encoding="utf-8")
    return path


def browse(path, tmp_path, *flags):
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, path.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_sections_are_drawn_and_the_console_is_empty(page, tmp_path):
    dom, console = browse(page, tmp_path, "--dump-dom")
    assert console == []
    for title in (
        "Where the time goes",
        "Memory by stage",
        "What would help",
        "The step as it runs",
        "The plan",
    ):
        assert f"<h2>{title}</h2>" in dom
    assert dom.count('class="meter"') == 4
    assert dom.count('class="stage"') == 4


def test_the_chart_answers_to_keys(page, tmp_path):
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    dom, console = browse(page, tmp_path, "--dump-dom")
    assert console == []
    found = re.search(r"<title>(.*?)</title>", dom)[1]
    assert '"moved":true' in found and '"back":true' in found
    assert "forward" in found and "rank 0" in found
    assert int(re.search(r'"rects":(\d+)', found)[1]) > 100


def test_a_report_prints(page, tmp_path):
    browse(page, tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_nothing_sticks_out_of_a_narrow_window(page, tmp_path):
    """A frame of 400 pixels: headless windows do not get that narrow themselves."""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="{page.name}" width="400" height="900"></iframe>{WIDTHS}', encoding="utf-8"
    )
    dom, _ = browse(frame, tmp_path, "--dump-dom", "--allow-file-access-from-files")
    needed, there = json.loads(re.search(r"<title>(.*?)</title>", dom)[1])
    assert 300 < there <= 400 and needed == there
