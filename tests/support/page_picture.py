"""The picture of the page in docs/serving-operations.md: python -m tests.support.page_picture

Eight requests that repeat, six of which share a prefix, beside a chat whose log-probabilities are looked at.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from paged import AsyncLLMEngine
from tests.support.chromium import chromium_page, find_chromium
from tests.support.served import Served, serving

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "page.png"
SHARED = "import os\nimport sys\n" * 24
HOVER = """(() => {
  document.querySelector('#messages').scrollTop = 0;
  const token = document.querySelectorAll('.token')[12];
  const {left, top} = token.getBoundingClientRect();
  const at = {clientX: left + 4, clientY: top + 8, bubbles: true};
  token.dispatchEvent(new PointerEvent('pointermove', at));
})()"""


def load(served: Served, number: int, is_over: threading.Event) -> None:
    """Send one request after another."""
    if number < 6:
        body = {"prompt": f"{SHARED}def f{number}(", "max_tokens": 500 + 150 * number}
    else:
        body = {"prompt": f"# {number}\n" * 10 * number, "n": 2, "max_tokens": 900}
    while not is_over.is_set():
        named = {"request_id": f"job-{number}", "ignore_eos": True, **body}
        served.request("POST", "/v1/completions", named)


def main() -> None:
    """Draw the picture."""
    program = find_chromium()
    if program is None:
        sys.exit("this needs Chromium: apt-get install chromium")
    engine = AsyncLLMEngine("demo", num_blocks=1024)
    is_over = threading.Event()
    with serving(engine) as served, chromium_page(program) as page:
        threads = [threading.Thread(target=load, args=(served, i, is_over)) for i in range(8)]
        page.open(served.url)
        page.wait("document.querySelector('#state')?.textContent === 'live'")
        page.wait("document.querySelector('#model option') !== null")
        page.run("document.getElementById('max_tokens').value = 200")
        page.run("document.getElementById('input').value = 'Write a function.'")
        page.run("document.getElementById('composer').requestSubmit()")
        page.wait("document.querySelector('.assistant .note')?.textContent.includes('tokens')")
        page.run(
            "[...document.querySelectorAll('.actions button')]"
            ".find((b) => b.textContent === 'Tokens').click()"
        )
        for thread in threads:
            thread.start()
        time.sleep(6)
        page.resize(1360, 900)
        time.sleep(0.6)  # the next picture of the engine is drawn in the new size
        page.run(HOVER)
        PICTURE.write_bytes(page.screenshot())
        assert page.errors == []
        is_over.set()
        for thread in threads:
            thread.join()
    engine.shutdown()


if __name__ == "__main__":
    main()
