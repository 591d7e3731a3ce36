"""The pages in a real browser: no console message, all sections, nothing wider than the window."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sample_log
from pytest_npu.report.__main__ import main as render

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), "")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
]
SECTIONS = [
    "phases",
    "failures",
    "kernels",
    "topk",
    "ladder",
    "diagnosis",
    "cache",
    "performance",
    "tables",
    "retries",
    "tests",
    "records",
    "environment",
]

#: Loads the page in a frame of the wanted width, because a headless window cannot be narrower than 500 px.
FRAME = """<!doctype html><body>
<iframe id="f" src="{url}" style="border:0;width:{width}px;height:900px"></iframe>
<pre id="out"></pre><script>
document.getElementById("f").onload = event => {{
  const doc = event.target.contentDocument, root = doc.documentElement;
  for (const details of doc.querySelectorAll("details")) details.open = true;
  const right = e => e.getBoundingClientRect().right;
  const wide = [...doc.querySelectorAll("main *")]
    .filter(e => !e.closest(".wide, svg, pre") && right(e) > {width} + 0.5)
    .map(e => e.tagName + "." + e.className + " " + e.textContent.slice(0, 60));
  document.getElementById("out").textContent = JSON.stringify({{
    scroll: root.scrollWidth, wide,
    sections: [...doc.querySelectorAll("section[id]")].map(e => e.id),
    background: doc.defaultView.getComputedStyle(doc.body).backgroundColor,
    ink: doc.defaultView.getComputedStyle(doc.body).color,
    verdict: doc.getElementById("verdict")?.innerText ?? "",
    dots: doc.querySelectorAll("path.dot").length,
    thin: [...doc.querySelectorAll(".fill")].filter(e => e.getBoundingClientRect().height < 5).length}});
}};
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, some runs, one of them rendered after it was cut short."""
    root = tmp_path_factory.mktemp("pages") / "reports"
    for model, count in (("smollm2_135m", 3), ("a_model_with_a_rather_long_name_7b_instruct", 2)):
        for number in range(count):
            folder = root / model / f"20261130-10150{number}"
            folder.mkdir(parents=True)
            events = sample_log.events(model, 1.79e9 + 86400 * number)
            if number == 1:
                events = events[:-6]
            (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert render([str(root)]) == 0
    return root


def look(page: Path, width: int, dark: bool, folder: Path) -> dict:
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(url=page.as_uri(), width=width))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [CHROMIUM, *FLAGS, scheme, f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"]
    done = subprocess.run(
        [*command, "--dump-dom", "--virtual-time-budget=5000", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, flags=re.S)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    seen: dict = json.loads(html.unescape(found.group(1)))
    return seen


def brightness(colour: str) -> float:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_report_page(reports, tmp_path, width, dark):
    seen = look(reports / "smollm2_135m" / "20261130-101500" / "report.html", width, dark, tmp_path)
    assert seen["wide"] == []
    assert seen["scroll"] <= width
    assert seen["sections"] == SECTIONS
    assert seen["verdict"].startswith("FAIL")
    assert "twin (modelled)" in seen["verdict"]
    assert seen["dots"] == 60 + 64  # layers of two paths, tokens of two prompts
    assert seen["thin"] == 0
    assert (brightness(seen["background"]) < 60) == dark
    assert abs(brightness(seen["ink"]) - brightness(seen["background"])) > 120


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_index_page(reports, tmp_path, width, dark):
    seen = look(reports / "index.html", width, dark, tmp_path)
    assert seen["wide"] == []
    assert seen["scroll"] <= width
    assert (brightness(seen["background"]) < 60) == dark


def test_report_of_a_run_without_anything(tmp_path):
    folder = tmp_path / "reports" / "m" / "r"
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text(
        json.dumps({"v": 1, "seq": 0, "t": 1.79e9, "event": "session_start"}) + "\n"
    )
    assert render([str(folder)]) == 0
    seen = look(folder / "report.html", 390, False, tmp_path)
    assert (seen["wide"], seen["verdict"].split()[0]) == ([], "INCOMPLETE")


def test_pages_need_nothing_from_outside(reports):
    for page in reports.rglob("*.html"):
        text = page.read_text()
        loads = re.findall(r"""(?:src|href)=["']?([^"' >]+)|url\(([^)]*)\)|@import""", text)
        outside = [a or b for a, b in loads if (a or b).startswith(("http:", "https:", "//"))]
        assert outside == []
        assert "<script" not in text
