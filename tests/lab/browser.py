"""A real headless browser that looks at pages of ours from file://."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)
# Seconds; a busy machine is no error.
PATIENCE = 240


class Browser:
    """One Chromium for many pages; `requests` and `errors` are those of the page that is open."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        # A path of its own, so that nothing looks for a driver in the network.
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.driver.set_script_timeout(PATIENCE)
        self._requests: list[str] = []
        self._errors: list[str] = []

    def open(self, page: Path, fragment: str = "", *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Loads a file in a window of this size, as a visitor without a history."""
        self.size(width, height)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        # Another address of the same file would not load it again.
        self.driver.get("about:blank")
        self._read_logs()
        self._requests, self._errors = [], []
        self.driver.get(page.resolve().as_uri() + (f"#{fragment}" if fragment else ""))

    def size(self, width: int, height: int = 900) -> None:
        """The size of the page itself; a window cannot be as narrow as a phone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str, *values: Any) -> Any:
        """What a function body returns; awaited if it is a promise."""
        return self.driver.execute_script(f"return (async function () {{ {script} }}).apply(null, arguments)", *values)

    def wait(self, condition: str, *values: Any) -> Any:
        """Until an expression is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, PATIENCE).until(
            lambda driver: driver.execute_script(f"return {condition}", *values), message=condition
        )

    def find(self, selector: str) -> Any:
        from selenium.webdriver.common.by import By

        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def hover(self, x: float, y: float) -> None:
        """Moves the mouse to a place in the window."""
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        if whole:
            self.size(self.run("return innerWidth"), self.run("return document.documentElement.scrollHeight"))
        self.driver.save_screenshot(str(path))

    @property
    def requests(self) -> list[str]:
        """What the page asked for, itself and inline data excepted."""
        self._read_logs()
        return self._requests

    @property
    def errors(self) -> list[str]:
        """What went to the console as an error or a warning."""
        self._read_logs()
        return self._errors

    @property
    def scrolls_sideways(self) -> bool:
        return self.run("return document.scrollingElement.scrollWidth > innerWidth")

    def close(self) -> None:
        self.driver.quit()

    def _read_logs(self) -> None:
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                is_page = message["params"].get("type") == "Document" and url.startswith("file:")
                if not is_page and not url.startswith(("data:", "blob:", "about:")):
                    self._requests.append(url)
        self._errors += [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]


def start() -> Browser:
    """A browser, or a skip that says what is missing."""
    pytest.importorskip("selenium", reason="selenium is not installed (pip install selenium)")
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (apt-get install chromium chromium-driver)")
    return Browser()
