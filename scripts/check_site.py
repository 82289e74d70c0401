"""Open every page of the built documentation in headless Chromium.

    make docs && python scripts/check_site.py

Each page is opened at the widths of a desktop and of a phone, light and dark. It fails, with a line for each,
where a page logs an error or a warning, lacks a picture, or is wider than its window. Links are checked when
the site is built. Needs `chromium` or `google-chrome`, or the path of one in $CHROMIUM.
"""

import argparse
import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "site"
WIDTHS = (1440, 390)
SCHEMES = ("default", "slate")
OVERFLOW = 1  # a browser rounds widths

HARNESS = Path(__file__).with_suffix(".js")
SCROLLS = ".md-typeset__scrollwrap, .calculator-tables, pre"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing is logged."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--browser", action="store_true", help="only see whether Chromium is there")
    options = parser.parse_args(arguments)
    browser = _browser()
    if options.browser:
        return
    pages = sorted({str(path.relative_to(SITE)) for path in SITE.rglob("*.html")} - {"harness.html"})
    if not pages:
        raise SystemExit(f"{SITE} has no pages; run `make docs` first")
    names = {"PAGES": pages, "WIDTHS": WIDTHS, "SCHEMES": SCHEMES, "OVERFLOW": OVERFLOW, "SCROLLS": SCROLLS}
    constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in names.items())
    script = constants + HARNESS.read_text(encoding="utf-8")
    (SITE / "harness.html").write_text(
        f"<!doctype html><body><script>{script}</script></body>", encoding="utf-8"
    )
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        wrong = _found(browser, address)
        server.shutdown()
    (SITE / "harness.html").unlink()
    print("\n".join(wrong) or f"{len(pages)} pages: no errors or overflow")
    sys.exit(bool(wrong))


def _browser() -> list[str]:
    names = (os.environ.get("CHROMIUM", ""), "chromium", "google-chrome", "chromium-browser")
    path = next(filter(None, map(shutil.which, filter(None, names))), None)
    if path is None:
        raise SystemExit("It needs Chromium: apt install chromium, or give the path of one in $CHROMIUM.")
    return [path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]


def _found(browser: list[str], address: str) -> list[str]:
    dump = ["--dump-dom", "--virtual-time-budget=3000000", "--timeout=900000", address + "harness.html"]
    done = subprocess.run([*browser, *dump], capture_output=True, text=True)
    text = re.search("<pre>(.*)</pre>", done.stdout, re.DOTALL)
    if text is None:
        raise SystemExit(f"Chromium did not finish:\n{done.stderr[-2000:]}")
    return json.loads(html.unescape(text[1]))


if __name__ == "__main__":
    main()
