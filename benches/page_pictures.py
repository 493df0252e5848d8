#!/usr/bin/env python3
"""Photographs the planner's page in headless Chromium: wide and light, wide and dark, and a phone in the dark.

    cargo build --release && benches/page_pictures.py target/release/foretell docs/images

It writes `planner.png`, `planner-dark.png` and `planner-phone.png`. Each shows a configuration whose search has ended.
"""

import argparse
import base64
import json
import pathlib
import subprocess
import time

from page_speed import Browser

PATIENCE = 120.0
PICTURES = {
    "planner": {"width": 1280, "height": 1750, "scale": 1, "scheme": "light", "at": "model=llama3-8b&topology=8xh100&price=2.50USD"},
    "planner-dark": {
        "width": 1280, "height": 1750, "scale": 1, "scheme": "dark",
        "at": "model=llama3-8b&topology=4xh100&method=lora&sequence=4096&lengths=mean%3D512%2Cp95%3D1536&batching=group",
    },
    "planner-phone": {"width": 390, "height": 1900, "scale": 1, "scheme": "dark", "at": "model=qwen3-8b&topology=2xrtx-4090&method=qlora"},
}


def wait(browser, condition):
    end = time.monotonic() + PATIENCE
    while not browser.evaluate(condition):
        assert time.monotonic() < end, f"{condition}: {browser.evaluate('document.body.innerText')}"
        time.sleep(0.05)


def photograph(browser, url, path, width, height, scale, scheme, at):
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
    browser.call("Emulation.setDeviceMetricsOverride", **metrics)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=f"{url}#{at}")
    wait(browser, "document.getElementById('state')?.textContent.startsWith('The search is over')")
    wait(browser, "/steps;/.test(document.getElementById('facts').textContent)")
    wait(browser, "document.querySelector('#if-curve svg') !== null && document.querySelector('.old') === null")
    path.write_bytes(base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    server = subprocess.Popen([options.program, "serve", "--json"], stdout=subprocess.PIPE, text=True)
    text = ""
    while not text.rstrip().endswith("}"):
        text += server.stdout.readline()
    browser = Browser()
    try:
        for name, picture in PICTURES.items():
            photograph(browser, json.loads(text)["url"], options.folder / f"{name}.png", **picture)
    finally:
        browser.close()
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
