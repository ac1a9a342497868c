"""The page as Chromium shows it: nothing is requested, nothing goes wrong, and the controls work."""

import math
import time
from dataclasses import replace

import pytest
from report.browser import CHROMIUM, Browser
from report.synthetic_report import synthetic_report

from hyperpod_plugins.report.page import write_page
from hyperpod_plugins.report.run_report import StepSeries, Verdict

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"),
]
SECTIONS = ["timeline", "recoveries", "categories", "curves", "nodes", "incidents", "ranks"]
HOSTILE = "</script><script>alert(1)</script><img src='http://example.org/x' onerror=alert(2)>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a report; when the test ends, nothing but the file has been loaded and nothing gone wrong."""

    def show(report, **options):
        path = tmp_path / "report.html"
        write_page(report, path)
        browser.open(path, **options)
        return browser

    yield show
    assert browser.requests == [(tmp_path / "report.html").as_uri()]
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.dataset.errors") is None


def text_of(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r})?.innerText ?? null")


def texts_of(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map((one) => one.textContent)")


def tiles_of(browser):
    names, values = texts_of(browser, ".tiles dt"), texts_of(browser, ".tiles dd.value")
    return dict(zip(names, values, strict=True))


def box_of(browser, selector):
    return browser.evaluate(
        f"(() => {{ const one = document.querySelector({selector!r}); one.scrollIntoView({{ block: 'center' }});"
        " const box = one.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )


def colours_of(browser, selector):
    """Return how many different colours are on a canvas."""
    return browser.evaluate(
        f"(() => {{ const canvas = document.querySelector({selector!r});"
        " const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        " return new Set(new Uint32Array(pixels.buffer)).size; })()"
    )


RUNS = {
    "usual": {},
    "no incidents": {"num_incidents": 0},
    "no steps": {"num_incidents": 0, "num_steps": 0},
    "large": {"num_ranks": 64, "num_steps": 10_000, "num_incidents": 100},
    "three restarts": {"num_incidents": 12, "num_restarts": 3},
    "no ledgers": {"ranks": (), "hosts": (), "categories": (), "num_incidents": 0, "steps": StepSeries()},
    "cut off, no loss": {"is_complete": False, "has_loss": False, "num_ranks": 1, "num_steps": 3, "num_incidents": 1},
}


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("run", RUNS)
def test_every_section_is_there_and_the_page_does_not_scroll_sideways(show, run, width):
    browser = show(synthetic_report(**RUNS[run]), width=width, dark=width == 360)
    assert browser.evaluate("[...document.querySelectorAll('section')].map((one) => one.id)") == SECTIONS
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.documentElement.dataset.theme") == ("dark" if width == 360 else "light")
    empty = "[...document.querySelectorAll('canvas')].filter((one) => one.width < 50 || one.height < 50).length"
    assert browser.evaluate(empty) == 0


def test_tiles_and_notices(show):
    report = synthetic_report(
        is_complete=False, problems=["rank 3: 12 lines"], verdict=Verdict(action="stop", why="The loss is NaN.")
    )
    headline = replace(
        report.headline, goodput=0.98765, wall_s=7512.0, failures_cost_s=0.4211, checkpoint_restart_cost_s=200.0
    )
    browser = show(replace(report, headline=headline))
    tiles = tiles_of(browser)
    assert tiles["Goodput"] == "98.8 %"
    assert tiles["Wall time"] == "2 h 5 min"
    assert tiles["Lost to failures"] == "0.42 s"
    assert tiles["With checkpoint-restart"] == "3 min 20 s"
    notices = " ".join(texts_of(browser, ".notice"))
    assert "cut off" in notices
    assert "rank 3: 12 lines" in notices
    assert "The loss is NaN." in notices


@pytest.mark.parametrize(
    ("action", "selector", "told"),
    [
        ("continue", ".note", "it has ended"),
        ("restart", ".notice", "To go on, start this run again."),
        ("stop", ".notice", "Do not start this run again as it is."),
    ],
)
def test_the_verdict_is_told_whatever_it_is(show, action, selector, told):
    verdict = Verdict(action=action, why="it has ended")
    browser = show(synthetic_report(num_incidents=0, is_complete=action == "continue", verdict=verdict))
    texts = " ".join(texts_of(browser, selector))
    assert told in texts
    assert "it has ended" in texts


@pytest.mark.parametrize(
    ("is_measured", "told"), [(True, "No rank held the others back."), (False, "Waits were not measured")]
)
def test_no_stragglers_are_none_only_if_waits_were_measured(show, is_measured, told):
    browser = show(synthetic_report(num_incidents=0, are_waits_measured=is_measured))
    assert told in text_of(browser, "#nodes")


def test_a_complete_run_has_no_notices(show):
    browser = show(synthetic_report(num_incidents=0))
    assert texts_of(browser, ".notice") == []
    assert tiles_of(browser)["MTBF"].startswith("> ")


def test_a_text_of_a_ledger_is_shown_and_not_run(show):
    report = synthetic_report(num_incidents=1, run_id=HOSTILE, problems=[HOSTILE])
    incidents = [replace(one, cause=HOSTILE, host=HOSTILE, kind=HOSTILE) for one in report.incidents]
    browser = show(replace(report, incidents=incidents))
    assert HOSTILE in text_of(browser, "h1")
    assert HOSTILE in text_of(browser, "#incidents tbody")
    assert browser.evaluate("document.images.length") == 0


def test_long_texts_do_not_make_the_page_wider(show):
    long = "W" * 450
    report = synthetic_report(run_id=long, problems=[long], verdict=Verdict(action="stop", why=long))
    browser = show(
        replace(
            report,
            headline=replace(report.headline, checkpoint_restart_assumes=long),
            categories=[replace(one, label=long) for one in report.categories],
            incidents=[replace(one, cause=long, host=long, kind=long, level=long) for one in report.incidents],
            stragglers=[replace(one, host=long, phase=long) for one in report.stragglers],
        ),
        width=360,
    )
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360


def test_what_is_no_number_is_shown_as_a_dash(show):
    report = synthetic_report(num_incidents=2, num_steps=50)
    steps = replace(report.steps, loss=[math.nan] * 50, duration_s=[math.inf] * 50)
    incidents = [replace(one, at_s=math.nan, total_s=math.nan, detect_s=-math.inf) for one in report.incidents]
    headline = replace(report.headline, goodput=math.nan, failures_cost_s=math.inf)
    browser = show(replace(report, steps=steps, incidents=incidents, headline=headline, began_at_s=math.nan))
    assert tiles_of(browser)["Goodput"] == "\N{EN DASH}"
    assert "NaN" not in text_of(browser, "body")
    assert "Infinity" not in text_of(browser, "body")


def test_dragging_zooms_and_the_button_resets(show):
    browser = show(synthetic_report(), height=1000)
    left, top, width, _ = box_of(browser, ".timeline canvas")
    disabled = "document.querySelector('#timeline button').disabled"
    assert browser.evaluate(disabled)
    browser.mouse("mousePressed", left + width / 2, top + 100, buttons=1)
    browser.mouse("mouseMoved", left + width * 0.7, top + 100, button="left", buttons=1)
    browser.mouse("mouseReleased", left + width * 0.7, top + 100)
    browser.wait_for(f"!{disabled}")
    assert " to 0:0" in text_of(browser, "#timeline .controls .note")
    browser.evaluate("document.querySelector('#timeline button').click()")
    assert browser.evaluate(disabled)


def test_dragging_in_a_curve_zooms_the_timeline(show):
    browser = show(synthetic_report(), height=1000)
    left, top, width, height = box_of(browser, ".figures .u-over")
    browser.mouse("mouseMoved", left + width * 0.2, top + height / 2)
    browser.mouse("mousePressed", left + width * 0.2, top + height / 2, buttons=1)
    browser.mouse("mouseMoved", left + width * 0.6, top + height / 2, button="left", buttons=1)
    browser.mouse("mouseReleased", left + width * 0.6, top + height / 2)
    browser.wait_for("!document.querySelector('#timeline button').disabled")


def test_keys_zoom_and_hovering_says_what_a_rank_did(show):
    browser = show(synthetic_report(), height=1000)
    browser.evaluate("document.querySelector('.timeline canvas').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="+", text="+" if kind == "keyDown" else "")
    browser.wait_for("!document.querySelector('#timeline button').disabled")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="0", text="0")
    browser.wait_for("document.querySelector('#timeline button').disabled")
    left, top, _, _ = box_of(browser, ".timeline canvas")
    browser.mouse("mouseMoved", left + 60, top + 70)
    browser.wait_for("document.querySelector('.tooltip').style.display === 'block'")
    assert "Rank 0" in text_of(browser, ".tooltip")
    assert "Setup, 20.0 s" in text_of(browser, ".tooltip")


def test_incidents_can_be_sorted_and_filtered(show):
    report = synthetic_report(num_incidents=20, num_steps=400)
    browser = show(report)
    heads = texts_of(browser, "#incidents thead th")
    total = heads.index("Total")
    click = f"document.querySelectorAll('#incidents thead button')[{total}].click()"
    browser.evaluate(click)
    shown = [int(one) for one in texts_of(browser, "#incidents tbody th")]
    assert shown == sorted(shown, key=lambda number: -report.incidents[number - 1].total_s)
    sorting = f"document.querySelectorAll('#incidents thead th')[{total}].getAttribute('aria-sort')"
    assert browser.evaluate(sorting) == "descending"
    browser.evaluate(click)
    assert browser.evaluate(sorting) == "ascending"
    browser.evaluate(
        "(() => { const input = document.querySelector('#incidents input');"
        " input.value = 'nodes joined'; input.dispatchEvent(new Event('input')); })()"
    )
    left = browser.evaluate("[...document.querySelectorAll('#incidents tbody tr')].filter((one) => !one.hidden).length")
    assert left == sum("nodes joined" in one.cause for one in report.incidents) > 0


def test_the_number_of_an_incident_shows_it_in_the_timeline(show):
    browser = show(synthetic_report(), height=1000)
    browser.evaluate("document.querySelector('#incidents tbody .show').click()")
    browser.wait_for("!document.querySelector('#timeline button').disabled")
    assert text_of(browser, "#timeline .controls .note").startswith("0:01:0")


def test_tables_and_charts_have_names(show):
    browser = show(synthetic_report())
    assert browser.evaluate("document.querySelectorAll('.scroller thead th:not([scope=col])').length") == 0
    assert browser.evaluate("document.querySelectorAll('[role=img]:not([aria-label])').length") == 0
    assert browser.evaluate("[...document.querySelectorAll('canvas')].every((one) => one.closest('[role=img]'))")
    assert browser.evaluate("document.documentElement.lang") == "en"


def test_the_toggle_changes_all_colours(show):
    browser = show(synthetic_report())
    light = browser.screenshot()
    browser.evaluate("document.querySelector('.toggle').click()")
    browser.settle()
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.screenshot() != light
    assert colours_of(browser, ".timeline canvas") > 5


def test_recoveries_as_shares(show):
    browser = show(synthetic_report(num_incidents=100, num_steps=1_000))
    browser.evaluate("document.querySelector('#recoveries button').click()")
    browser.wait_for("document.querySelector('#recoveries canvas')?.width > 50")
    browser.settle()
    assert colours_of(browser, "#recoveries canvas") > 4


def test_paper_is_light_and_the_page_is_itself_again_afterwards(show):
    browser = show(synthetic_report(), dark=True)
    browser.evaluate("void dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("document.documentElement.dataset.theme") == "light"
    widths = browser.evaluate("[...document.querySelectorAll('canvas')].map((one) => one.clientWidth)")
    assert 300 < max(widths) <= 703  # A4 without its margins
    browser.evaluate("void dispatchEvent(new Event('afterprint'))")
    assert browser.pdf().startswith(b"%PDF")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate("document.documentElement.dataset.print") is None


def test_a_large_page_zooms_without_delay(show):
    browser = show(synthetic_report(num_ranks=64, num_steps=10_000, num_incidents=100))
    browser.evaluate("document.querySelector('.timeline canvas').focus()")
    began_at_s = time.monotonic()
    for key in "++-0":
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        browser.settle()
    assert time.monotonic() - began_at_s < 20  # a quarter of a second where nothing else runs
