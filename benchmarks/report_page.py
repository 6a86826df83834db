"""How a report on 20,000 operations opens in a browser: ``python -m benchmarks.report_page [folder]``.

A step of a litgpt model as LLaMA has it, 62 layers of small widths (the number of operations is what counts),
unfused, planned by MemEfficient, explained, saved as a page and opened by headless Chromium. Two times are
taken, each several times: from an empty page until the report is loaded and laid out in a frame of it, and from
the start of the browser until a picture of the report is written, which an empty page takes most of too. Writes
``benchmarks/results/report_page.json``; the page, the snapshot and the picture stay in the folder, if one is given.
Compiling takes Thunder some minutes.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import thunder
import torch
from rich.console import Console

from benchmarks.models import llama_step
from thunder_mem import MemEfficient, explain

RESULTS = Path(__file__).parent / "results"
LAYERS = 62
RUNS = 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Opens the page in a frame, and says when it is loaded and laid out.
_WATCH = """<!doctype html><body><script>
const start = performance.now(), frame = document.createElement("iframe");
frame.style = "width: 1280px; height: 1024px";
frame.onload = () => {
  const height = frame.contentDocument.documentElement.getBoundingClientRect().height;
  document.title = "laid out in " + (performance.now() - start) + " ms, " + height + " pixels high";
};
frame.src = "report.html";
document.body.append(frame);
</script></body>"""


def layout_ms(browser: str, folder: Path) -> float:
    """Milliseconds from an empty page to `report.html` of the folder, loaded and laid out."""
    (folder / "watch.html").write_text(_WATCH)
    found = re.search(r"laid out in ([\d.]+) ms", _chromium(browser, "--dump-dom", (folder / "watch.html").as_uri()))
    if found is None:
        raise RuntimeError("the browser did not open the page")
    return float(found[1])


def picture_s(browser: str, page: Path, picture: Path) -> float:
    """Seconds from starting the browser to the picture of the page, written."""
    start = time.perf_counter()
    _chromium(browser, "--hide-scrollbars", "--window-size=1280,2600", f"--screenshot={picture}", page.as_uri())
    return time.perf_counter() - start


def _chromium(browser: str, *words: str) -> str:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    return subprocess.run([browser, *options, *words], capture_output=True, text=True, timeout=120).stdout


def opened(folder: Path) -> dict[str, object]:
    """What opening `report.html` of the folder takes; nothing where there is no Chromium."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return {}
    empty = folder / "empty.html"
    empty.write_text("<!doctype html><body></body>")
    times: dict[str, list[float]] = {"layout": [], "picture": [], "empty": []}
    for _ in range(RUNS):  # in turn, so that what else runs on the machine meets all three
        times["layout"].append(layout_ms(browser, folder))
        times["picture"].append(picture_s(browser, folder / "report.html", folder / "report.png"))
        times["empty"].append(picture_s(browser, empty, folder / "empty.png"))
    return {
        "browser": _chromium(browser, "--version").strip(),
        "layout_ms": round(statistics.median(times["layout"])),
        "layout_ms_each": [round(t) for t in times["layout"]],
        "browser_to_picture_s": round(statistics.median(times["picture"]), 2),
        "browser_to_picture_s_each": [round(t, 2) for t in times["picture"]],
        "browser_to_picture_of_an_empty_page_s": round(statistics.median(times["empty"]), 2),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    console = Console()
    program = llama_step(
        layers=LAYERS, tokens=64, width=32, heads=2, mlp_width=64, checkpointing=False, loss_inside=True
    )
    step = thunder.jit(program.fn, executors=[], transforms=[MemEfficient(strict=True)])
    spent: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.process_time()
        with console.status(name):
            yield
        spent[f"{name}_s"] = round(time.process_time() - start, 2)

    with timed("compile_and_explain"):
        report = explain(step, *program.args, bounds=False)
    with timed("page"):
        report.save(folder / "report.html")
    with timed("snapshot"):
        report.save(folder / "snapshot.pickle")
    page = (folder / "report.html").read_text()
    record = {
        "command": "python -m benchmarks.report_page",
        "torch": torch.__version__,
        "layers": LAYERS,
        "operations": len(report.prediction.timeline),
        "storages": len(report.prediction.storages),
        "page_bytes": len(page.encode()),
        "shapes": len(re.findall(r"<(?:rect|path|circle|text)\b", page)),
        "snapshot_bytes": (folder / "snapshot.pickle").stat().st_size,
        **spent,
        **opened(folder),
    }
    console.print(record)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "report_page.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
