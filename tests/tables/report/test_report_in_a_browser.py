"""The report in headless Chromium, opened from disk with the network off.

Skipped, with the reason, where there is no browser.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ssla

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None:
    pytest.skip("no chromium on the path: apt-get install chromium", allow_module_level=True)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
]
TIMEOUT = 120_000  # milliseconds, for the start and for each action: the machine may be busy


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=TIMEOUT)
        yield opened
        opened.close()


def fitted(classes):
    x = torch.randn(80, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = nn.Linear(2, 3 if classes else 1, dtype=torch.float64).eval()
    nn.init.constant_(net.weight, 0.1)
    nn.init.zeros_(net.bias)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long() if classes else x[:, 0] + 0.3 * x[:, 1] ** 2
    likelihood = ssla.likelihoods.Categorical() if classes else ssla.likelihoods.Gaussian(noise=0.4)
    return (
        ssla.fit(net, (x, y), likelihood=likelihood, prior=ssla.priors.Gaussian(precision=2.0)),
        x,
        y,
    )


@pytest.fixture(scope="module", params=[False, True], ids=["numbers", "classes"])
def model(request):
    return fitted(request.param)


@pytest.fixture(params=[400, 1280])
def page(request, browser, model, tmp_path):
    """The page of a model, which must not log an error or ask for anything but its own file."""
    post, x, y = model
    path = ssla.html_report(post, x, y).save(tmp_path / "report.html")
    scheme = "dark" if request.param == 400 else "light"
    context = browser.new_context(
        viewport={"width": request.param, "height": 800}, color_scheme=scheme, offline=True
    )
    context.set_default_timeout(TIMEOUT)
    opened, problems = context.new_page(), []
    opened.on(
        "console",
        lambda message: (
            problems.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "request",
        lambda asked: (
            problems.append(asked.url) if not asked.url.startswith(path.as_uri()) else None
        ),
    )
    opened.goto(path.as_uri())
    yield opened
    context.close()
    assert not problems


def test_the_page_fits_its_window(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("svg[role=img]").count() >= 3
    assert all(page.locator("svg[role=img]").nth(i).get_attribute("aria-label") for i in range(3))


def test_the_slider_draws_what_with_prior_gives(page, model):
    post, x, _ = model
    row = int(page.locator("#row-name").inner_text().removeprefix("Row ")) - 1
    page.locator("#prior").focus()
    for keys, factor in (
        (["Home"], 0.1),
        (["ArrowRight"], 0.3),
        (["End"], 10.0),
        (["ArrowLeft"], 3.0),
    ):
        for key in keys:
            page.keyboard.press(key)
        p = post.with_prior(ssla.priors.Gaussian(precision=2.0 * factor)).predict(x[row : row + 1])
        assert page.locator("#strength").inner_text() == f"{factor:g}"
        if p.kind == "class":
            drawn = [
                float(bar.get_attribute("data-probability"))
                for bar in page.locator("rect.bar").all()
            ]
            np.testing.assert_allclose(drawn, p.probs[0], atol=1e-5)
            left, right = (
                page.evaluate(f"document.querySelectorAll('rect.bar')[0].{part}.baseVal.value")
                for part in ("x", "width")
            )
            assert right >= 0 < left
            continue
        lower, upper = p.interval(0.95)[0].tolist()
        line = page.locator("#interval")
        assert float(line.get_attribute("data-lower")) == pytest.approx(lower, rel=1e-5)
        assert float(line.get_attribute("data-upper")) == pytest.approx(upper, rel=1e-5)
        text = page.locator("#numbers dl").first.inner_text().replace("−", "-")
        assert f"{float(f'{lower:.4g}'):g} to {float(f'{upper:.4g}'):g}" in text


def test_what_is_drawn_is_to_scale(page, model):
    """Lengths in the picture are proportional to the numbers, for all strengths of the prior."""
    if model[0].predict(model[1][:1]).kind == "class":
        drawn = (
            "[...document.querySelectorAll('rect.bar')].map(b => [Number(b.dataset.probability), "
            "b.width.baseVal.value])"
        )
    else:
        drawn = """(() => { const l = document.querySelector("#interval");
        return [[Number(l.dataset.lower), l.x1.baseVal.value], [Number(l.dataset.upper), l.x2.baseVal.value]]; })()"""
    page.locator("#prior").focus()
    points = []
    for key in ("Home", *["ArrowRight"] * 4):
        page.keyboard.press(key)
        points += page.evaluate(drawn)
    numbers, places = np.array(points).T
    slope, start = np.polyfit(numbers, places, 1)
    assert slope > 0
    assert np.ptp(numbers) * slope > 20
    np.testing.assert_allclose(places, start + slope * numbers, atol=0.02)
    first, last = np.array(points).reshape(5, -1)[[0, -1]]
    assert np.abs(first - last).max() > 0.2


def test_rows_are_sorted_searched_and_selected_by_keyboard(page, model):
    post, x, y = model
    header = page.locator("#table thead th[data-name=nll]")
    header.locator("button").focus()
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    worst = int((-post.predict(x).log_prob(y)).argmax()) + 1
    assert page.locator("#table tbody th").first.inner_text() == str(worst)
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    page.locator("#search").focus()
    page.keyboard.type("row = 17")
    assert page.locator("#found").inner_text() == "1 of 80 rows"
    page.keyboard.press("Control+A")
    page.keyboard.type("row < 4")
    assert page.locator("#table tbody tr").count() == 3
    page.locator("#table tbody button").first.focus()
    page.keyboard.press("ArrowDown")
    chosen = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    assert page.locator("#row-name").inner_text() == f"Row {chosen}"
    assert page.evaluate("document.activeElement.id") == "row-name"
    assert page.locator("#table tr.chosen button").get_attribute("aria-pressed") == "true"
    page.locator("#search").fill("nothing has this")
    assert page.locator("#found").inner_text() == "0 of 80 rows"


def test_pages_of_the_table_are_turned_by_keyboard(page):
    page.locator("#next").focus()
    page.keyboard.press("Enter")
    assert page.locator("#page").inner_text() == "Page 2 of 4"
    assert page.locator("#table tbody th").first.inner_text() == "26"
    assert page.locator("#previous").is_enabled()


@pytest.mark.parametrize("inputs", [25, 60])
def test_columns_are_all_visible_or_the_page_says_that_they_scroll(browser, inputs, tmp_path):
    x = torch.randn(40, inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = nn.Linear(inputs, 1, dtype=torch.float64).eval()
    prior = ssla.priors.Gaussian(precision=2.0)
    post = ssla.fit(net, (x, x[:, 0]), likelihood=ssla.likelihoods.Gaussian(noise=0.4), prior=prior)
    path = ssla.html_report(post, x, x[:, 0]).save(tmp_path / "report.html")
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT)
    page.goto(path.as_uri())
    hidden = page.locator("[aria-label='Table of columns']").evaluate(
        "e => e.scrollHeight > e.clientHeight + 1"
    )
    assert hidden == (
        "60 columns: the table scrolls." in page.locator("main, body").first.inner_text()
    )
    assert hidden == (inputs == 60)
    page.close()


def test_axe_has_no_serious_finding(page):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python"
    )
    found = axe.Axe().run(page).response["violations"]
    serious = [
        (f["id"], [node["html"][:120] for node in f["nodes"]][:3])
        for f in found
        if f["impact"] in ("serious", "critical")
    ]
    assert not serious


def test_a_report_of_many_rows_answers_at_once(browser, tmp_path):
    post, _, _ = fitted(False)
    x = torch.randn(100_000, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    path: Path = ssla.html_report(post, x, x[:, 0]).save(tmp_path / "report.html")
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT)
    page.goto(path.as_uri())
    assert "2,000 of them" in page.locator("header").inner_text()
    took = page.evaluate(
        """() => { const start = performance.now(), field = document.querySelector("#search");
        field.value = "doubt > 0.01"; field.dispatchEvent(new Event("input")); return performance.now() - start; }"""
    )
    assert took < 2000  # milliseconds; 5 are usual
    page.close()
