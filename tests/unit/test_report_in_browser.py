"""The report in a real browser: it draws, complains of nothing, asks the network for nothing, and cuts no text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, colours_of_png, find_chromium, started
from tests.report_plans import large_plan, mixed_cluster, mixed_plan, search_record
from whale.planner.explain import explain
from whale.planner.report.page import report_page
from whale.planner.simulation.simulate import simulate

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium, chromium-browser or google-chrome here")

PICTURES = ("timeline", "memory", "map", "search")

TEXTS_THAT_MEET = """
(() => {
  const found = [];
  for (const picture of document.querySelectorAll("svg.picture")) {
    const frame = picture.getBoundingClientRect();
    const texts = [...picture.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    texts.forEach(([text, box], index) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
          || box.bottom > frame.bottom + 1) found.push(["cut", text]);
      for (const [other, next] of texts.slice(index + 1)) {
        const wide = Math.min(box.right, next.right) - Math.max(box.left, next.left);
        const tall = Math.min(box.bottom, next.bottom) - Math.max(box.top, next.top);
        if (wide > 1 && tall > 3) found.push(["meet", text, other]);
      }
    });
  }
  return found;
})()
"""
"""Texts of pictures that leave their picture, or that lie over each other by more than the space between lines."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with started(CHROMIUM, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = mixed_plan()
    assert plan.workload is not None
    file = tmp_path_factory.mktemp("report") / "report.html"
    text = report_page(
        plan,
        timeline=simulate(plan.workload),
        explanation=explain(plan.workload, plan.prediction),
        cluster=mixed_cluster(),
        record=search_record(plan),
    )
    file.write_text(text, encoding="utf-8")
    return file


def test_the_page_is_drawn_without_complaints_or_requests(browser: Browser, page: Path) -> None:
    browser.events.clear()
    browser.show(width=1200)
    browser.open(page)
    for picture in PICTURES:
        colours = colours_of_png(browser.screenshot(f"svg[aria-labelledby^='{picture}-']", 0.3))
        assert len(colours) > 20, picture
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate(TEXTS_THAT_MEET) == []


def test_dark_screens_get_a_dark_page_and_paper_a_light_one(browser: Browser, page: Path) -> None:
    browser.open(page)
    shown = []
    for dark, media in ((False, "screen"), (True, "screen"), (True, "print")):
        browser.show(width=1200, dark=dark, media=media)
        shown.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert shown == ["rgb(255, 255, 255)", "rgb(20, 23, 28)", "rgb(255, 255, 255)"]


def test_a_phone_scrolls_pictures_and_not_the_page(browser: Browser, page: Path) -> None:
    browser.show(width=390)
    browser.open(page)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser.evaluate("document.querySelector('.scroll').scrollWidth") > 390


@pytest.mark.parametrize("unlike", [False, True])
def test_many_devices_are_drawn_without_texts_that_meet(browser: Browser, tmp_path: Path, unlike: bool) -> None:
    plan = large_plan(128, stages=8, unlike=unlike)
    assert plan.workload is not None
    file = tmp_path / "large.html"
    file.write_text(report_page(plan, timeline=simulate(plan.workload)), encoding="utf-8")
    browser.show(width=1200)
    browser.open(file)
    assert browser.evaluate(TEXTS_THAT_MEET) == []
