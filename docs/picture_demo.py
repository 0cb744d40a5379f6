"""Takes the pictures of docs/images/demo from a finished run of the demo; needs Chromium.

python docs/picture_demo.py runs/demo-1
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
IMAGES = DOCS / "images" / "demo"
WIDTH, HEIGHT = 1180, 900
ENLARGED = 2  # the demo's pictures are small

sys.path.insert(0, str(DOCS.parent / "tests"))

from headless_browser import Page, browser_page, find_browser  # noqa: E402

from digenrl.report.page import write_report  # noqa: E402
from digenrl.run_folder.reading import read_run  # noqa: E402


def photograph(page: Page, first: str, last: str, target: Path) -> None:
    """The part of the page from one element to the end of another."""
    box = page.evaluate(
        f"(() => {{ const from = {first}.getBoundingClientRect(), to = {last}.getBoundingClientRect();"
        "return [from.top + scrollY, to.bottom + scrollY]; })()"
    )
    clip = {"x": 0, "y": max(0, box[0] - 24), "width": WIDTH, "height": box[1] - box[0] + 48, "scale": 1}
    taken = page.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    target.write_bytes(base64.b64decode(taken["data"]))
    Image.open(target).convert("P", palette=Image.Palette.ADAPTIVE, colors=255).save(target, optimize=True)


def main() -> None:
    """Writes all pictures."""
    run = Path(sys.argv[1])
    browser = find_browser()
    if browser is None:
        sys.exit("no Chromium found")
    IMAGES.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as profile, browser_page(browser, Path(profile)) as page:
        page.open(write_report(read_run(run)), width=WIDTH, height=HEIGHT)
        page.settle()
        top = "document.querySelector('header') ?? document.body.firstElementChild"
        photograph(page, f"({top})", "document.getElementById('samples')", IMAGES / "report.png")
        lanes = "document.getElementById('timeline')"
        photograph(page, lanes, lanes, IMAGES / "lanes.png")
    grids = sorted((run / "samples").glob("step_*.png"))
    for name, path in (("before", grids[0]), ("after", grids[-1])):
        grid = Image.open(path)
        larger = grid.resize((grid.width * ENLARGED, grid.height * ENLARGED), Image.Resampling.NEAREST)
        larger.save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
