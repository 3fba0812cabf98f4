"""The dashboard in a browser."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headrace as hr
from headrace.cli.status_client import StatusClient, StatusSnapshot
from headrace.dashboard.history import Point
from headrace.dashboard.report import render_report
from headrace.dashboard.sampler import Sample
from headrace.dashboard.server import Dashboard
from headrace.dashboard.view import describe_snapshot, measure_snapshot
from headrace.service.messages import (
    ClientStatus,
    DispatcherStatus,
    IterationStatus,
    JobStatus,
    TaskStatus,
    WorkerStatus,
)
from tests.dashboard.pages import SECONDS
from tests.dashboard.test_server import JOB, address_of, reading

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.heavy]
MS = 1000 * SECONDS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("this test needs Chromium: install the package chromium")
    with sync_api.sync_playwright() as playwright:
        # Its sandbox needs privileges that containers lack; the pages are our own.
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; messages on its console, errors and dialogs fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(MS)
    opened.problems = []
    opened.requests = []
    opened.on("console", lambda message: opened.problems.append(message.text))
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("dialog", lambda dialog: opened.problems.append(f"dialog: {dialog.message}"))
    opened.on("request", lambda request: opened.requests.append(request.url))
    yield opened
    context.close()
    assert opened.problems == []


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[hr.service.LocalCluster, Dashboard]]:
    """A dispatcher with two worker processes and a job, and its dashboard."""
    with (
        hr.service.LocalCluster(num_workers=2) as cluster,
        reading(cluster.target, JOB),
        Dashboard(address_of(cluster.target)) as dashboard,
    ):
        yield cluster, dashboard


def table(page: Any, noun: str) -> Any:
    return page.get_by_role("table", name=noun, exact=True)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def open_dashboard(page: Any, url: str) -> None:
    page.goto(url)
    table(page, "jobs").get_by_text("DYNAMIC").wait_for()


def test_page_shows_jobs_workers_and_progress(page: Any, running: Any):
    _, dashboard = running
    open_dashboard(page, dashboard.url)
    assert page.get_by_role("button", name=JOB).inner_text() == JOB
    assert table(page, "workers").locator("tbody tr").count() == 2
    page.get_by_text("Epoch 0: ").wait_for()
    page.locator(".plan").get_by_text("batch", exact=True).wait_for()
    table(page, "tasks").locator("tbody tr").first.wait_for()
    page.get_by_role("status").filter(has_text="Live").wait_for()
    origin = dashboard.url.removesuffix("/")
    assert {url for url in page.requests if not url.startswith((origin, "data:"))} == set()


def test_tables_are_sorted_with_the_keyboard(page: Any, running: Any):
    _, dashboard = running
    open_dashboard(page, dashboard.url)
    header = table(page, "workers").get_by_role("columnheader", name="worker")
    assert header.get_attribute("aria-sort") == "ascending"
    # Tab reaches every control, in the order of the page, and the focus can be seen.
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.textContent.trim()")
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none", name
        reached.append(name)
        if header.get_by_role("button").evaluate("each => each === document.activeElement"):
            break
    assert reached[:3] == ["Skip to content", "Save report", "Theme: auto"]
    assert JOB in reached
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    addresses = table(page, "workers").locator("tbody th").all_inner_texts()
    assert addresses == sorted(addresses, reverse=True)
    # The focus stays while the table is updated.
    updates = page.evaluate("document.getElementById('target').textContent")
    wait_for(lambda: page.evaluate("document.getElementById('target').textContent") != updates)
    assert header.get_by_role("button").evaluate("each => each === document.activeElement")


def test_arrow_keys_show_earlier_values_of_a_chart(page: Any, running: Any):
    _, dashboard = running
    open_dashboard(page, dashboard.url)
    chart = page.get_by_role("img", name="Throughput")
    chart.focus()
    assert page.locator(".chart .cursor").count() == 0
    page.keyboard.press("ArrowLeft")
    assert page.locator(".chart .cursor").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".chart .cursor").count() == 0
    page.get_by_role("button", name="1 h", exact=True).click()
    page.get_by_text("1 h ago").first.wait_for()


def test_phone_has_no_horizontal_scroll(page: Any, running: Any):
    _, dashboard = running
    page.set_viewport_size({"width": 360, "height": 740})
    open_dashboard(page, dashboard.url)
    page.get_by_text("Epoch 0: ").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_hidden_tabs_do_not_use_the_connections_of_the_browser(page: Any, running: Any):
    _, dashboard = running
    # Browsers open six connections to a host, so the seventh tab would stay blank.
    tabs = [page.context.new_page() for _ in range(7)]
    for tab in tabs:
        tab.add_init_script(
            "let isHidden = false; window.setHidden = (value) => { isHidden = value;"
            " document.dispatchEvent(new Event('visibilitychange')); };"
            "Object.defineProperty(document, 'hidden', { get: () => isHidden });"
        )
        open_dashboard(tab, dashboard.url)
        tab.evaluate("setHidden(true)")
    first = tabs[0]
    before = first.locator("#target").inner_text()
    first.wait_for_timeout(2500)
    assert first.locator("#target").inner_text() == before
    first.evaluate("setHidden(false)")
    wait_for(lambda: first.locator("#target").inner_text() != before)
    first.get_by_role("status").filter(has_text="Live").wait_for()


def test_colors_follow_the_system_and_the_switch(page: Any, running: Any):
    _, dashboard = running
    page.emulate_media(color_scheme="dark")
    open_dashboard(page, dashboard.url)

    def is_dark() -> bool:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) < 200

    assert is_dark()
    page.get_by_role("button", name="Theme: auto").click()
    assert not is_dark()
    page.get_by_role("button", name="Theme: light").click()
    assert is_dark()
    page.emulate_media(color_scheme="light")
    assert is_dark()
    page.reload()
    page.get_by_role("button", name="Theme: dark").click()
    assert not is_dark()


def test_saved_report_opens_from_a_file_without_a_network(page: Any, running: Any, tmp_path: Path):
    _, dashboard = running
    open_dashboard(page, dashboard.url)
    with page.expect_download() as download:
        page.get_by_role("link", name="Save report").click()
    report = tmp_path / "report.html"
    download.value.save_as(report)
    page.requests.clear()
    page.goto(report.as_uri())
    page.get_by_text("Report of").wait_for()
    assert page.get_by_role("button", name=JOB).inner_text() == JOB
    assert table(page, "workers").locator("tbody tr").count() == 2
    assert page.locator(".chart .curve").count() > 0
    assert [url for url in page.requests if not url.startswith("data:")] == [report.as_uri()]


def test_page_is_updated_when_a_worker_is_killed_and_the_server_stops(page: Any):
    with hr.service.LocalCluster(num_workers=2) as cluster:
        dashboard = Dashboard(address_of(cluster.target))
        dashboard.start()
        try:
            with reading(cluster.target, JOB):
                open_dashboard(page, dashboard.url)
                cluster.kill_worker(0)
                table(page, "lost workers").locator("tbody tr").first.wait_for()
                wait_for(lambda: table(page, "workers").locator("tbody tr").count() == 1)
            cluster.stop()
            page.get_by_text("No reply from").wait_for()
            page.get_by_text("The page shows the last data").wait_for()
            assert page.get_by_role("button", name=JOB).is_visible()
        finally:
            dashboard.stop()
        page.get_by_text("The connection to the dashboard was lost at").wait_for()
        port = int(dashboard.url.rpartition(":")[2].strip("/"))
        # The browser reports each attempt to connect.
        page.problems.clear()
        with Dashboard(address_of(cluster.target), port=port):
            page.get_by_text("The connection to the dashboard").wait_for(state="detached")
        page.wait_for_timeout(100)
        page.problems[:] = [each for each in page.problems if "Failed to load" not in each]


def test_page_without_jobs_and_workers_says_how_to_start_them(page: Any):
    with (
        hr.service.DispatchServer(hr.service.DispatcherConfig(port=0)) as dispatcher,
        Dashboard(address_of(dispatcher.target)) as dashboard,
    ):
        page.goto(dashboard.url)
        address = address_of(dispatcher.target)
        page.get_by_text(f"headrace worker --dispatcher {address}").wait_for()
        page.get_by_text(f'ShardingPolicy.DYNAMIC, "{address}"').wait_for()


def many_workers_and_jobs() -> DispatcherStatus:
    workers = tuple(
        WorkerStatus(
            worker_id=f"w{number}",
            address=f"host-{number}:5050",
            seconds_since_heartbeat=0.1,
            tasks=200,
        )
        for number in range(1000)
    )
    tasks = tuple(
        TaskStatus(task_id=number, worker_address=each.address)
        for number, each in enumerate(workers)
    )
    clients = tuple(
        ClientStatus(client_id=f"host-{number}", seconds_since_heartbeat=0.1)
        for number in range(100)
    )
    epoch = IterationStatus(
        iteration_id=1,
        epoch=(0,),
        finished=False,
        elapsed_seconds=1.0,
        tasks=tasks,
        clients=clients,
    )
    jobs = tuple(
        JobStatus(job_id=number, name=f"job-{number}", dataset_id="1", processing_mode=1,
                  num_epochs=1, running_tasks=1000, clients=100, iterations=(epoch,))
        for number in range(200)
    )  # fmt: skip
    return DispatcherStatus(
        workers=workers, jobs=jobs, datasets=1, clients=20_000, wanted_workers=1200
    )


def test_page_of_many_workers_and_jobs_stays_small(page: Any, monkeypatch: pytest.MonkeyPatch):
    status = many_workers_and_jobs()
    monkeypatch.setattr(StatusClient, "fetch", lambda self: StatusSnapshot(status, 0.0))
    monkeypatch.setattr(StatusClient, "fetch_plan_steps", lambda self, name: ())
    assert len(msgspec.json.encode(describe_snapshot(StatusSnapshot(status, 0.0), None))) < 3e6
    with Dashboard("127.0.0.1:1") as dashboard:
        page.goto(dashboard.url)
        table(page, "workers").locator("tbody tr").first.wait_for()
        page.get_by_text("1,200 wanted").wait_for()
        nodes = page.evaluate("document.querySelectorAll('*').length")
        assert nodes < 2000
        page.get_by_role("button", name="Show all 200").click()
        page.get_by_role("button", name="job-150", exact=True).click()
        page.get_by_role("heading", name="Job job-150").wait_for()
        page.get_by_role("heading", name="Tasks: the 20 slowest of 1,000").wait_for()
        page.get_by_text("Workers, 1,000 tasks").wait_for()
        page.wait_for_timeout(1500)
        assert page.evaluate("document.querySelectorAll('*').length") < nodes + 200 * 30


def write_large_report(folder: Path, count: int) -> Path:
    """Write the report of a service with many workers, whose names are hostile."""
    workers = tuple(
        WorkerStatus(
            worker_id=f"w{number}",
            address=f"<img src=x onerror=alert({number})>:{number}",
            seconds_since_heartbeat=0.1,
            tasks=1,
            tags=("<script>alert(2)</script>",),
        )
        for number in range(count)
    )
    status = DispatcherStatus(workers=workers, jobs=(), datasets=0)
    view = describe_snapshot(StatusSnapshot(status, 0.0), None)
    values = measure_snapshot(view)
    data = {
        "time": 1e9,
        "address": "<b>host</b>:1",
        "problem": "",
        "unreachable_since": None,
        "view": view,
        "values": values,
    }
    sample = Sample(1, Point(1e9, values), msgspec.json.encode(data), 0)
    path = folder / "large.html"
    path.write_text(render_report(sample, b"[]", b"{}"), encoding="utf-8")
    return path


def test_long_tables_show_the_first_rows_until_asked_for_all(page: Any, tmp_path: Path):
    page.goto(write_large_report(tmp_path, 1000).as_uri())
    rows = table(page, "workers").locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 20
    page.get_by_label("Filter workers").fill("alert(77")
    wait_for(lambda: rows.count() == 11)
    page.get_by_label("Filter workers").fill("")
    page.get_by_role("button", name="Show all 1,000").click()
    assert rows.count() == 1000
    page.get_by_role("button", name="Show the first 20").click()
    assert rows.count() == 20


def test_hostile_names_are_shown_as_text(page: Any, tmp_path: Path):
    page.goto(write_large_report(tmp_path, 3).as_uri())
    first = table(page, "workers").locator("tbody th").first
    assert first.inner_text() == "<img src=x onerror=alert(0)>:0"
    assert page.locator("main img, main script, header b").count() == 0
    assert "<b>host</b>:1" in page.locator("#target").inner_text()


def test_update_of_a_thousand_workers_takes_little_time(page: Any, tmp_path: Path):
    page.goto(write_large_report(tmp_path, 1000).as_uri())
    page.get_by_role("button", name="Show all 1,000").click()
    # Nodes are reused: an update creates no rows.
    created = page.evaluate("""() => {
        const before = new Set(document.querySelectorAll("[aria-label=workers] tbody tr"));
        document.querySelector("[aria-label=workers] thead button").click();
        const after = [...document.querySelectorAll("[aria-label=workers] tbody tr")];
        return after.filter((row) => !before.has(row)).length;
    }""")
    assert created == 0
