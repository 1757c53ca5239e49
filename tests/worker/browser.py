"""A headless Chromium for the live page's tests; they are skipped, with the reason, if there is none."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PHONE = (390, 844)
DESKTOP = (1360, 900)


def missing() -> str | None:
    """Why no browser is available; None if one is."""
    for names in (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)):
        if not any(shutil.which(name) for name in names):
            return f"no {names[0]} on this machine (Debian: apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium is not installed; it is in the dev extra"
    return None


class Browser:
    """The actions of the tests."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def view(self, size: tuple[int, int], *, dark: bool = False, scale: float = 1.0) -> None:
        """With a window of that size, or as a phone; in the system's light or dark colors."""
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def text(self, css: str) -> str:
        """The visible text of the first match; empty if there is none."""
        found = f"document.querySelector({css!r})"
        return str(self.run(f"const found = {found}; return found?.checkVisibility() ? found.innerText : ''"))

    def check_fits(self, *, dark: bool) -> None:
        """Check that nothing is wider than the window, and that the text is brighter than the page in dark mode."""
        width, visible = self.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert width <= visible, "nothing to scroll sideways"
        page, text = self.run(
            "const style = getComputedStyle(document.body);"
            "return [style.backgroundColor, style.color].map(c => c.match(/\\d+/g).slice(0, 3)"
            ".reduce((sum, part) => sum + Number(part), 0))"
        )
        assert (page < text) is dark

    def rows(self, table: str) -> list[list[str]]:
        cells = "row => [...row.cells].map(cell => cell.innerText)"
        script = f"return [...document.querySelectorAll('#{table} tbody tr')].map({cells})"
        rows: list[list[str]] = self.run(script)
        return rows

    def complaints(self) -> list[str]:
        """The errors on the browser's console, including violations of the page's policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path, *, whole_page: bool = False) -> None:
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole_page})
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def open_browser() -> Iterator[Browser]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    )
    # Root does not have a sandbox; the page is our own.
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = _started(options)
    try:
        yield Browser(driver)
    finally:
        driver.quit()


def _started(options: Any) -> Any:
    """A driver with its browser. On a busy machine the browser may start too late for the driver; a browser
    that has not started within a few tries does not run here."""
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException

    for tries_left in (2, 1, 0):
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        try:
            return webdriver.Chrome(options=options, service=service)
        except WebDriverException as error:
            service.stop()
            if tries_left == 0:
                pytest.skip(f"Chromium does not start on this machine: {error.msg}")
