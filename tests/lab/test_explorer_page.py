"""The explorer in a real browser: its own forward pass against PyTorch's, and what people see and touch."""

import random

import pytest
import torch
from explorer_models import TEXT, saved, small_model, tokenizer_of

import temper
from temper_lab.explorer import Subject, build, embed, trace
from temper_lab.explorer.embed import GATES, MIXERS
from temper_lab.report.page import page

# Preset, N and overrides: every preset, other N, and every option that the page has to know.
CASES = [(name, 4, {}) for name in temper.PRESETS]
CASES += [("mhc", 1, {}), ("mhc", 3, {}), ("kromhc", 6, {}), ("temper-cp", 3, {}), ("temper-slim", 8, {})]
CASES += [("temper-tucker", 8, {}), ("hc", 3, {}), ("hc", 8, {})]
CASES += [("mhc", 4, {"method": "newton"}), ("mhc", 4, {"last": "columns", "iters": 3}), ("mhc", 4, {"tol": 0.02})]
CASES += [("mhc", 4, {"eps": 1e-3}), ("mhc", 4, {"eps": 1e-3, "tol": 0.01, "last": "columns"})]
CASES += [("mhc", 4, {"method": "newton", "last": "columns"})]
CASES += [("temper-cp", 4, {"gain": "rank-one", "pre_eps": 0.01, "norm_clamp": True, "norm_eps": 0.5})]
IDS = ["-".join([name, str(n), *map(str, options.items())]) for name, n, options in CASES]
# Deep enough for a composite that is a product of four.
DEEP = ("mhc", "hc", "temper-tucker")
OTHER = "It isn't 1234 people;  they've 7\n\nstates \U0001f44d\U0001f3fd \u6771\u4eac"


@pytest.fixture(scope="module")
def models(tmp_path_factory, corpus_texts):
    tokenizer = tokenizer_of(corpus_texts)
    folder = tmp_path_factory.mktemp("models")
    made = []
    for index, (name, num_streams, options) in enumerate(CASES):
        depth = 2 if name in DEEP and num_streams == 4 and not options else 1
        model = small_model(tokenizer, name, num_streams, depth=depth, **options)
        made.append((saved(model, tokenizer, folder / str(index)), model, tokenizer))
    return made


@pytest.fixture(scope="module")
def opened(browser, models, tmp_path_factory):
    """The page of all these models, from a file."""
    subjects = [Subject(path, title) for (path, _, _), title in zip(models, IDS, strict=True)]
    tab, _ = build(subjects, [TEXT, "the people"])
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    path.write_text(page("Routing", [tab]), encoding="utf-8")
    browser.open(path)
    return path


RUN = """
const [model, text] = arguments;
const { runner } = document.querySelector(".rx").explorer;
return new Promise((done) => {
  runner.run(model, text, {
    progress() {},
    failed: (error) => done({ error: String(error.message ?? error) }),
    done: (message) => done({ ...message, packed: Array.from(message.packed) }),
  });
});
"""
# What the page's worker would do, were it asked something else.
ASK = """
const source = document.getElementById("explorer-engine").textContent;
const [answer, given] = arguments;
const whole = `${source}\nonmessage = ({ data }) => postMessage((${answer})(data));`;
const worker = new Worker(URL.createObjectURL(new Blob([whole], { type: "text/javascript" })));
return new Promise((done) => {
  worker.onmessage = ({ data }) => done(data);
  worker.postMessage(given);
}).finally(() => worker.terminate());
"""


def read_in_page(browser, model, text):
    result = browser.run(RUN, model, text)
    assert "error" not in result, result
    return result


def settled(browser, model, text):
    """Waits until the page shows this text."""
    browser.wait("document.querySelector('.rx').dataset.ready === arguments[0]", f"{model}:{text}")


def choose(browser, part, value):
    script = """
    const chosen = document.querySelector(`[data-part=${arguments[0]}]`);
    chosen.value = arguments[1];
    chosen.dispatchEvent(new Event("change"));
    """
    browser.run(script, part, value)


def click(browser, selector, index=0):
    """Clicks where nothing of the page lies above it."""
    element = browser.driver.find_elements("css selector", selector)[index]
    browser.run("arguments[0].scrollIntoView({ block: 'center' })", element)
    element.click()
    return element


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_the_page_computes_what_the_model_does(browser, opened, models, index):
    _, model, tokenizer = models[index]
    got = read_in_page(browser, index, OTHER)
    expected = trace(model, tokenizer, OTHER)
    assert got["ids"] == expected.ids
    assert got["pieces"] == expected.pieces
    assert not got["isCut"]
    packed = torch.tensor(got["packed"], dtype=torch.float64)
    assert (packed - expected.packed().double()).abs().max() <= 1e-5
    assert got["surprise"][0] is None
    assert got["surprise"][1:] == pytest.approx(expected.surprise[1:], abs=1e-4)


def test_the_mixers_and_gates_of_the_page_are_those_that_python_lets_in(browser, opened):
    mixers, gates = browser.run(ASK, "() => [Object.keys(MIXERS), Object.keys(GATES)]", None)
    assert [sorted(mixers), sorted(gates)] == [sorted(MIXERS), sorted(GATES)]


def strings():
    rng = random.Random(0)
    alphabet = [*"aAsStTdDlLvVeErRmM'\u2019 \t\n\r.,!-_<|>0123\u00e9\u0301\u00df\u017f\u0130\u212a", "\u00a0", "\u0085"]
    alphabet += [
        "\u2003",
        "\u2028",
        "\u3000",
        "\ufeff",
        "\u200b",
        "\u0663",
        "\u216b",
        "\u00bd",
        "\u6771",
        "\ud55c",
        "\u0634",
    ]
    alphabet += [
        "\U0001f44d",
        "\U0001f3fd",
        "\u200d",
        "\U0001d4d0",
        "\x00",
        "\x7f",
        "\u0378",
        "\U0010ffff",
        " the",
        "ing",
    ]
    yield from ("", " ", "  ", "\n", "\r\n\r\n", "  \t \n  x", "a  b", "a \n b", "\x00", "'s 'S 'LL 'Ve 're 'T 'd'm'x")
    yield from (
        "'\u017f",
        "don't DON'T we've I'd l'eau",
        "1 22 333 4444 55555",
        "3.14159, 1e-7",
        "<|bos|> a<|bos|>b",
        "?!...\n\n",
    )
    yield from (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467",
        "e\u0301 vs \u00e9; Z\u0338\u0351a",
        "\u0661\u0662\u0663 \u2167 \u00bd",
    )
    yield from (
        "\ufeffbom \ufffe \uffff",
        "\u2028\u2029\x85\x0b\x0c \xa0x",
        "\u6f22\u5b57\u304b\u306a \ud55c\uad6d\uc5b4",
        "the people of this union " * 9,
    )
    yield from ("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40))) for _ in range(600))


def test_tokens_are_those_of_the_tokenizer(browser, opened, models):
    tokenizer = models[0][2]
    texts = list(strings())
    made = embed.describe_tokenizer(tokenizer)
    encode = "({ made, texts }) => texts.map((text) => new Tokenizer(made).encode(text).ids)"
    for text, ids in zip(texts, browser.run(ASK, encode, {"made": made, "texts": texts}), strict=True):
        assert ids == tokenizer.encode(text, bos=True), ascii(text)


def test_a_text_longer_than_the_context_is_cut_and_says_so(browser, opened, models):
    _, model, tokenizer = models[5]
    text = TEXT * 5
    got, expected = read_in_page(browser, 5, text), trace(model, tokenizer, text)
    assert got["isCut"]
    assert expected.is_cut
    assert got["ids"] == expected.ids
    assert len(got["ids"]) == model.config.context


def test_the_page_loads_from_a_file_without_a_word_or_a_request(browser, opened):
    browser.open(opened)
    settled(browser, 0, TEXT)
    assert browser.errors == []
    assert browser.requests == []


def shown(browser):
    return browser.run("return [...document.querySelectorAll('[data-part=cards] .rx-map')].map((map) => map.innerHTML)")


def tip(browser, selector):
    """What the tooltip says when the mouse is over the first element of a selector."""
    place = """
    const cell = document.querySelector(arguments[0]);
    cell.scrollIntoView({ block: "center", inline: "center" });
    // The scroll event, which hides tooltips, comes with the next frame.
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    const { left, top, width, height } = cell.getBoundingClientRect();
    return [left + width / 2, top + height / 2];
    """
    browser.hover(1, 1)
    browser.hover(*browser.run(place, selector))
    browser.wait("!document.querySelector('.rx-tip').hidden")
    return browser.find(".rx-tip").text


def digits(value):
    """A number as the page writes it, with five digits: half a unit of the last is at most this share of it."""
    return pytest.approx(value, rel=5.1e-5)


def number(text):
    return float(text.split("=")[1].split("\n")[0])


def test_clicking_a_token_and_a_site_changes_the_maps(browser, opened, models):
    from selenium.webdriver.common.keys import Keys

    index = IDS.index("mhc-4")
    choose(browser, "model", str(index))
    settled(browser, index, TEXT)
    expected = trace(models[index][1], models[index][2], TEXT)
    assert browser.run("return document.querySelectorAll('.rx-chip').length") == len(expected.ids)
    seen = set()
    for token, site, name in ((3, 0, "attention 0"), (7, 3, "mlp 1")):
        click(browser, ".rx-chip", token)
        assert expected.pieces[token].strip() in browser.find("[data-part=depthTitle]").text
        seen.add(str(shown(browser)))
        report, card = expected.sites[site], f"[data-part=cards] > :nth-child({site + 1})"
        # Row 2 is the destination, column 1 the source.
        for part, child, value in (
            ("res", 10, report.routing.res[token, 2, 1]),
            ("composite", 10, report.composite[token, 2, 1]),
            ("pre", 2, report.routing.pre[token, 1]),
            ("post", 3, report.routing.post[token, 2]),
        ):
            said = tip(browser, f"{card} .rx-{part} > :nth-child({child})")
            assert number(said) == digits(value.item())
            assert said.startswith(part)
            assert name in said
    assert len(seen) == 2
    # The keyboard goes to the next token, and the next cell.
    click(browser, ".rx-chip", 7).send_keys(Keys.ARROW_RIGHT)
    assert browser.run("return document.querySelector('.rx').explorer.state.token") == 8
    cell = browser.find("[data-part=cards] .rx-res > i")
    cell.send_keys(Keys.ARROW_DOWN)
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    said = browser.find(".rx-tip").text
    assert said.startswith("res[1, 1] = ")
    assert number(said) == digits(expected.sites[0].routing.res[8, 1, 1].item())
    # A site, then all tokens.
    before = browser.find("[data-part=along]").get_attribute("innerHTML")
    click(browser, "[data-part=sites] button", 3)
    assert browser.find("[data-part=along]").get_attribute("innerHTML") != before
    said = tip(browser, f"[data-part=along] .rx-map > :nth-child({len(expected.ids) + 5})")
    assert number(said) == digits(expected.sites[3].routing.pre[4, 1].item())
    assert "mlp 1" in said
    click(browser, "[data-part=all]")
    assert number(tip(browser, "[data-part=cards] .rx-res > :nth-child(10)")) == digits(
        expected.sites[0].routing.res[:, 2, 1].double().mean().item()
    )


def test_gains_errors_and_similarity_are_those_of_the_observer(browser, opened, models):
    for name in ("mhc-4", "hc-4", "kromhc-4"):
        index = IDS.index(name)
        choose(browser, "model", str(index))
        settled(browser, index, TEXT)
        sites = trace(models[index][1], models[index][2], TEXT).sites
        script = (
            "const { reading } = document.querySelector('.rx').explorer.state; return reading.numbers(...arguments)"
        )
        for token in (4, -1):
            for site, report in enumerate(sites):
                got = browser.run(script, site, token)
                for key, mine in (
                    ("forward", report.forward_gain),
                    ("backward", report.backward_gain),
                    ("compositeForward", report.composite_forward_gain),
                    ("compositeBackward", report.composite_backward_gain),
                    ("similarity", report.stream_similarity),
                ):
                    assert got[key] == pytest.approx((mine[token] if token >= 0 else mine.mean()).item(), rel=1e-5)
                for key, mine in (("rowError", report.row_error), ("columnError", report.column_error)):
                    assert got[key] == pytest.approx(
                        (mine[token] if token >= 0 else mine.max()).item(), rel=1e-5, abs=1e-9
                    )


def test_typing_shows_the_tokens_and_the_routing_of_the_model(browser, opened, models):
    from selenium.webdriver.common.keys import Keys

    index = IDS.index("temper-tucker-4")
    choose(browser, "model", str(index))
    settled(browser, index, TEXT)
    box = browser.find("[data-part=own]")
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys("we've 12 laws")
    settled(browser, index, "we've 12 laws")
    expected = trace(models[index][1], models[index][2], "we've 12 laws")
    chips = browser.run("return [...document.querySelectorAll('.rx-chip')].map((chip) => chip.textContent)")
    assert chips == [piece.replace(" ", "\u00b7") for piece in expected.pieces]
    click(browser, ".rx-chip", 2)
    assert number(tip(browser, "[data-part=cards] .rx-pre > :nth-child(4)")) == pytest.approx(
        expected.sites[0].routing.pre[2, 3].item(), abs=1e-5
    )
    assert f"{expected.surprise[2]:.2f} bits" in tip(browser, ".rx-chip:nth-child(3)")
    assert "Computed in this page" in browser.find("[data-part=status]").text
    # Another model reads the same text; the residual one has nothing to route.
    choose(browser, "model", "0")
    settled(browser, 0, "we've 12 laws")
    assert browser.find("[data-part=plain]").is_displayed()
    assert not browser.find("[data-part=routing]").is_displayed()
    assert browser.errors == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_has_no_sideways_scroll_and_the_dark_is_dark(browser, opened, dark):
    browser.open(opened, width=390, height=844, dark=dark)
    for name in ("mhc-4", "temper-slim-8", "residual-4"):
        choose(browser, "model", str(IDS.index(name)))
        settled(browser, IDS.index(name), TEXT)
        assert not browser.scrolls_sideways
    # Of a cell near 0, which is nearly the colour of the card.
    choose(browser, "model", str(IDS.index("mhc-4")))
    settled(browser, IDS.index("mhc-4"), TEXT)
    lightness = """
    const cells = [...document.querySelectorAll(".rx-res > i")].map((cell) => getComputedStyle(cell).backgroundColor);
    const all = cells.map((colour) => Number(colour.match(/oklab\\(([\\d.]+)/)[1]));
    return [Math.min(...all), Math.max(...all)];
    """
    low, high = browser.run(lightness)
    assert (low < 0.4) if dark else (high > 0.85)
    # Negative values have a colour of their own, positive ones another.
    choose(browser, "model", str(IDS.index("hc-4")))
    settled(browser, IDS.index("hc-4"), TEXT)
    colours = browser.run(
        "return ['.rx-res > .rx-neg', '.rx-res > .rx-pos'].map((name) => "
        "getComputedStyle(document.querySelector(name)).backgroundColor)"
    )
    assert colours[0] != colours[1]
    assert browser.errors == []


def test_short_weights_are_near_and_a_model_that_does_not_fit_says_what_to_do(browser, models, tmp_path):
    indices = [IDS.index(name) for name in ("kromhc-4", "mhc-4")]
    subjects = [Subject(models[index][0], IDS[index]) for index in indices]
    tab, _ = build(subjects, [TEXT], live_megabytes=0.4)
    (tmp_path / "small.html").write_text(page("Routing", [tab]), encoding="utf-8")
    browser.open(tmp_path / "small.html")
    settled(browser, 0, TEXT)
    script = (
        "return document.querySelector('.rx').explorer.data.models.map(({ live }) => live && live.table[0].rows > 0)"
    )
    assert browser.run(script) == [True, None]
    _, model, tokenizer = models[indices[0]]
    got, expected = read_in_page(browser, 0, OTHER), trace(model, tokenizer, OTHER)
    difference = (torch.tensor(got["packed"], dtype=torch.float64) - expected.packed().double()).abs().max()
    assert 1e-7 < difference <= 1e-3
    choose(browser, "model", "1")
    settled(browser, 1, TEXT)
    why = browser.find("[data-part=why]")
    assert why.is_displayed()
    assert f"temper inspect --run {models[indices[1]][0]}" in why.text
    assert browser.find("[data-part=own]").get_attribute("readonly")
    assert browser.errors == []
