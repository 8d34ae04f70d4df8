"""The page of a report in a real browser: from a file, without network, by click, key, address, mouse and phone."""

import pytest
from studies import full_study, loaded

from temper_lab.report.write import write_report

IS_DRAWN = "[...document.querySelectorAll('.plot')].every(plot => plot.offsetParent === null || plot.dataset.drawn)"
SHOWN = "[...document.querySelectorAll('[role=tabpanel]')].filter(panel => !panel.hidden).map(panel => panel.id).join()"
TABS = ("overview", "claims", "curves", "sweeps", "parameters", "cost", "significance", "about")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # Figures for papers are another test's matter.
        patch.setattr("temper_lab.report.plots_mpl.draw", lambda chart, folder: [])
        return write_report(loaded(full_study(noise=0.0003)), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def opened(report, browser):
    """The page on a desk, loaded once for the tests that only look at it."""
    browser.open(report.page, "significance")
    browser.wait(IS_DRAWN)
    return browser


def test_it_loads_from_a_file_without_error_or_request(opened):
    assert opened.run(f"return {SHOWN}") == "significance"
    assert opened.run("return scrollY") == 0
    for tab in TABS:
        opened.find(f"[data-tab={tab}]").click()
        assert opened.run(f"return {SHOWN}") == tab
        opened.wait(IS_DRAWN)
    assert opened.requests == []
    assert opened.errors == []


def test_tabs_by_key_and_by_address(opened):
    from selenium.webdriver.common.keys import Keys

    browser = opened
    browser.find("[data-tab=significance]").click()
    tab = browser.find("[role=tab][aria-selected=true]")
    for key, expected in ((Keys.ARROW_RIGHT, "about"), (Keys.ARROW_RIGHT, "overview"), (Keys.END, "about")):
        tab.send_keys(key)
        assert browser.run(f"return {SHOWN}") == expected
        assert browser.run("return location.hash") == f"#{expected}"
        tab = browser.driver.switch_to.active_element
        assert tab.get_attribute("data-tab") == expected
    browser.run("location.hash = '#curves/anything'")
    browser.wait(f"{SHOWN} === 'curves'")
    browser.run("location.hash = '#nothing-of-ours'")
    browser.wait(f"{SHOWN} === 'overview'")


def test_hovering_shows_the_value(opened):
    browser = opened
    browser.find("[data-tab=curves]").click()
    browser.wait(IS_DRAWN)
    place = browser.run(
        """
        const plot = document.querySelector('[data-chart=gaps] .plot');
        plot.scrollIntoView({ block: 'center' });
        const trace = plot.data.find(trace => trace.name === 'residual');
        const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect(), last = trace.x.length - 1;
        const x = xaxis.l2p(trace.x[last]) + xaxis._offset, y = yaxis.l2p(trace.y[last]) + yaxis._offset;
        return { x: box.left + x, y: box.top + y, value: trace.y[last] };
        """
    )
    browser.hover(place["x"] - 3, place["y"])
    browser.hover(place["x"], place["y"])
    browser.wait("document.querySelector('[data-chart=gaps] .hovertext') !== null")
    text = browser.run("return document.querySelector('[data-chart=gaps] .hovertext').textContent")
    assert "residual" in text
    assert f"{place['value']:.4f}" in text
    assert "3 seeds" in text


def test_methods_are_hidden_in_every_chart(opened):
    browser = opened
    browser.run("scrollTo(0, 0)")
    browser.find("[data-tab=curves]").click()
    browser.wait(IS_DRAWN)
    plot = "document.querySelector('[data-chart=curves] .plot')"
    visible = f"return {plot}.data.filter(trace => trace.visible).map(trace => trace.meta)"
    assert "mhc" in browser.run(visible)
    browser.find("#curves [data-method=mhc]").click()
    assert "mhc" not in browser.run(visible)
    assert browser.find("#curves [data-method=mhc]").get_attribute("aria-pressed") == "false"
    # A chart that is drawn later knows it too.
    browser.find("[data-tab=parameters]").click()
    browser.wait(IS_DRAWN)
    plot = "document.querySelector('#parameters [data-chart=pareto-bpb] .plot')"
    script = f"return {plot}.data.find(trace => trace.meta === 'mhc').visible"
    assert browser.run(script) is False
    browser.find("#parameters .legend .all").click()
    assert browser.run(script) is True


def test_tables_are_sorted_by_a_click(opened):
    browser = opened
    browser.find("[data-tab=overview]").click()
    cells = "return [...document.querySelectorAll('[data-table=main] tbody tr')].map(row => row.cells[6].dataset.sort)"
    head = browser.find("[data-table=main] th:nth-child(7) button")
    for sign in (1, -1):
        browser.run("arguments[0].click()", head)
        values = browser.run(cells)
        known = [float(value) for value in values if value is not None]
        assert known == sorted(known, key=lambda value: sign * value)
        # What is missing is last, whichever way.
        assert values[len(known) :] == [None] * (len(values) - len(known))
        assert len(known) < len(values)


def test_the_browser_refuses_what_would_leave_the_page(opened):
    script = "try { await fetch('https://example.invalid/'); return 'sent' } catch (error) { return String(error) }"
    assert "Failed to fetch" in opened.run(script)
    assert any("Content Security Policy" in error for error in opened.errors)


def test_dark_and_light(opened):
    browser = opened
    background = "return getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('#overview .plot')._fullLayout.font.color"
    browser.run("scrollTo(0, 0)")
    browser.find("[data-tab=overview]").click()
    browser.wait(IS_DRAWN)
    light = browser.run(background), browser.run(f"return {ink}")
    browser.find("#theme").click()
    dark = browser.run(background)
    assert dark != light[0]
    browser.wait(f"{ink} !== arguments[0]", light[1])
    browser.find("#theme").click()
    assert browser.run(background) == light[0]
    browser.run("localStorage.clear()")


def test_a_dark_phone_does_not_scroll_sideways(report, browser):
    browser.open(report.page, width=390, height=800, dark=True)
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 26)"
    for tab in TABS:
        browser.run("document.querySelector(`[data-tab=${arguments[0]}]`).click()", tab)
        browser.wait(IS_DRAWN)
        assert not browser.scrolls_sideways, tab
        ends = browser.run("return [...document.querySelectorAll('.plot')].map(p => p.getBoundingClientRect().right)")
        assert all(end <= 390 for end in ends)
        # Its heading comes into view, though the list of tabs is wider than the screen.
        assert browser.run("return document.querySelector('[aria-selected=true]').getBoundingClientRect().right") <= 390


def test_a_page_around_it_stays_where_it_is(report, browser, tmp_path):
    around = tmp_path / "around.html"
    space = '<p style="height: 3000px"></p>'
    around.write_text(f'{space}<iframe src="{report.page.resolve().as_uri()}" width="300"></iframe>{space}')
    # Returns when the embedded page has loaded, too.
    browser.open(around)
    assert browser.run("return scrollY") == 0
