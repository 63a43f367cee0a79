"""A real headless Chromium, for what a page does and how it looks."""

import os
import shutil
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Every text against what lies behind it, by WCAG 2: pairs of text and contrast below what it needs.
_LOW_CONTRAST = """
const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = numbers(getComputedStyle(e).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const style = getComputedStyle(element);
  if (!own || !element.getClientRects().length || element.closest("script, style")) continue;
  const text = element instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [light(numbers(text)), light(behind(element))].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  const large = parseFloat(style.fontSize) >= 24;
  if (contrast < (large ? 3 : 4.5)) found.push([element.textContent.trim(), contrast, text]);
}
return [document.querySelectorAll("body *").length, found];
"""


class Browser:
    """A page in Chromium."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, page, width=1280, dark=False, media=""):
        """Loads a file at a width, in a colour scheme, on a screen or on paper."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._cdp("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(page.resolve().as_uri())

    def _cdp(self, command, arguments):
        self.driver.execute_cdp_cmd(command, arguments)

    def run(self, script):
        """The value that some JavaScript returns."""
        return self.driver.execute_script(script)

    def find(self, selector):
        """The first element of a CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        """All its elements."""
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def complaints(self):
        """What the console says, errors of the network among it."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def fetched(self):
        """What the page loaded beside itself."""
        return list(self.run("return performance.getEntriesByType('resource').map((e) => e.name)"))

    def overflow(self):
        """By how many pixels the page is wider than the window."""
        return int(self.run("return document.documentElement.scrollWidth - innerWidth"))

    def low_contrast(self):
        """How many elements were looked at, and texts that can hardly be read."""
        looked_at, found = self.run(_LOW_CONTRAST)
        return looked_at, found


@contextmanager
def started():
    """Starts Chromium; skips without it, but where HEADPRUNE_BROWSER says that it must be there."""
    chromium = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        why = "needs chromium and chromedriver (Debian: chromium and chromium-driver)"
        if os.environ.get("HEADPRUNE_BROWSER") == "required":
            pytest.fail(why)
        pytest.skip(why)
    options = webdriver.ChromeOptions()
    for flag in _FLAGS:
        options.add_argument(flag)
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
