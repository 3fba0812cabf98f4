"""Take docs/images/dashboard-light.png and dashboard-dark.png: a dispatcher and a coordinator.

    python docs/screenshots.py [SECONDS]

Starts a data service and a cluster with parameter servers on this machine, lets them work for some
seconds (60 by default), and opens their dashboards in Chromium, which must be installed.
"""

from __future__ import annotations

import io
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import headrace as hr
from headrace.coordinator import ClusterCoordinator
from headrace.dashboard.server import Dashboard

IMAGES = Path(__file__).parent / "images"
WIDTH, COLORS = 1180, 256
MAX_BYTES = 150_000
DEADLINE_MS = 60_000


def read_image(number: int) -> Any:
    time.sleep(0.002)  # as if it read a file
    return np.full((16, 16, 3), number % 256, np.uint8)


def augment(image: Any) -> Any:
    time.sleep(0.0015)
    return image[::-1] / np.float32(255)


def input_pipeline(count: int) -> hr.Dataset[Any]:
    images = hr.Dataset.range(count).shuffle(10_000).map(read_image, num_parallel_calls=2)
    return images.map(augment).batch(32).prefetch(2)


def read(target: str, job: str, dataset: hr.Dataset[Any], seconds: float, end: Any) -> None:
    """Read a job, with a pause after each batch, until the event is set."""
    distribute = hr.service.distribute(
        hr.service.ShardingPolicy.DYNAMIC, service=target, job_name=job
    )
    with iter(dataset.apply(distribute)) as batches:
        while not end.wait(seconds):
            if next(batches, None) is None:
                return


def show_dispatcher(seconds: float, take: Callable[[str, str], None]) -> None:
    end = threading.Event()
    with hr.service.LocalCluster(num_workers=4) as cluster:
        readers = [
            threading.Thread(
                target=read, args=(cluster.target, job, input_pipeline(count), pause, end)
            )
            for job, count, pause in (("train", 200_000, 0.0), ("evaluate", 40_000, 0.5))
        ]
        with Dashboard(cluster.target.removeprefix("tcp://")) as dashboard:
            for reader in readers:
                reader.start()
            time.sleep(seconds / 2)
            cluster.kill_worker(3)
            time.sleep(seconds / 2)
            take(dashboard.url, "light")
        end.set()
        for reader in readers:
            reader.join()


def show_coordinator(seconds: float, take: Callable[[str, str], None]) -> None:
    with ExitStack() as stack:
        local = stack.enter_context(hr.distribute.LocalCluster(num_workers=3, num_ps=2))
        strategy = hr.distribute.ParameterServerStrategy(local.cluster_resolver, staleness=20)
        stack.callback(strategy.close)
        with strategy.scope():
            weights = hr.Variable(np.zeros(200_000, np.float32), name="weights")
            bias = hr.Variable(np.zeros(1_000, np.float32), name="bias")

        def train_step() -> None:
            time.sleep(0.05)
            weights.assign_add(np.ones(200_000, np.float32))
            bias.assign_add(np.ones(1_000, np.float32))

        coordinator = stack.enter_context(ClusterCoordinator(strategy))
        dashboard = stack.enter_context(Dashboard(coordinator.listen()))
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < seconds:
            for _ in range(12):
                coordinator.schedule(train_step)
            if elapsed > seconds / 2:
                local.kill("worker", 2)
            coordinator.join(60)
        for _ in range(600):
            coordinator.schedule(train_step)
        take(dashboard.url, "dark")
        coordinator.join(60)


def take_screenshot(browser: Browser, url: str, scheme: str) -> None:
    page = browser.new_page(
        viewport={"width": WIDTH, "height": 800},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page.goto(url)
    page.get_by_role("status").filter(has_text="Live").wait_for(timeout=DEADLINE_MS)
    page.locator(".tiles").wait_for(timeout=DEADLINE_MS)
    page.wait_for_timeout(3000)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    page.close()
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / f"dashboard-{scheme}.png"
    palette = picture.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {size} bytes")
    if size > MAX_BYTES:
        sys.exit(f"{path} has {size} bytes, more than {MAX_BYTES}; use fewer COLORS")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("the screenshots need Chromium: install the package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for show in (show_dispatcher, show_coordinator):
            show(seconds, lambda url, scheme: take_screenshot(browser, url, scheme))
        browser.close()


if __name__ == "__main__":
    main()
