"""The report in a real browser: Debian's chromium and chromium-driver."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium on this machine: apt-get install chromium chromium-driver"
)

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(reported: Path) -> str:
    return (reported / "report.html").as_uri()


@pytest.fixture
def page(browser, address: str) -> Any:
    emulate(browser, width=1280, scheme="light")
    browser.get(address)
    return browser


def emulate(browser, *, width: int, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def column(page, number: int) -> list[str]:
    rows = "return [...document.querySelectorAll('#results tbody tr')].map(row => row.cells[arguments[0]].textContent)"
    return page.execute_script(rows, number)


def header(page, number: int) -> Any:
    return page.find_elements("css selector", "#results thead th")[number]


def test_the_page_loads_without_a_word_in_the_console(page):
    assert "DePRL" in page.title
    assert page.get_log("browser") == []
    requests = page.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(name.startswith("data:") for name in requests)


def test_every_picture_is_there(page):
    boxes = page.execute_script("""
        return [...document.querySelectorAll('.picture')].map(picture => {
            const svg = picture.querySelector('svg'), box = svg.getBoundingClientRect();
            const marks = svg.querySelectorAll('path, image').length;
            return [picture.getAttribute('aria-label'), box.width, box.height, marks];
        })""")
    assert len(boxes) == 13
    for label, width, height, marks in boxes:
        assert label
        assert min(width, height) > 100, label
        assert marks > 3, label


def test_a_click_on_a_header_sorts_and_another_turns_the_order_round(page):
    assert column(page, 0) == ["DePRL", "Local", "Ditto", "majority floor"]
    assert header(page, 1).get_attribute("aria-sort") == "descending"
    header(page, 1).find_element("tag name", "button").click()
    assert column(page, 0) == ["majority floor", "Ditto", "Local", "DePRL"]
    assert header(page, 1).get_attribute("aria-sort") == "ascending"
    header(page, 0).find_element("tag name", "button").click()
    assert column(page, 0) == ["DePRL", "Ditto", "Local", "majority floor"]
    assert header(page, 1).get_attribute("aria-sort") is None


def test_sorting_works_with_the_keyboard_and_puts_what_has_no_value_last(page):
    from selenium.webdriver.common.keys import Keys

    button = header(page, 3).find_element("tag name", "button")
    for _ in range(2):
        button.send_keys(Keys.ENTER)
        assert column(page, 0)[-1] == "majority floor"
    assert header(page, 3).get_attribute("aria-sort") == "ascending"


def test_hovering_and_the_arrow_keys_show_values(page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    tip = page.find_element("id", "tip")
    assert not tip.is_displayed()
    picture = page.find_element("css selector", ".picture")
    picture.send_keys(Keys.ARROW_RIGHT)
    assert tip.text.startswith("DePRL · round 1 · ")
    picture.send_keys(Keys.ARROW_RIGHT)
    assert tip.text.startswith("DePRL · round 2 · ")
    picture.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    cells = page.find_element("css selector", ".picture[aria-label^='data: cosines']")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", cells)
    ActionChains(page).move_to_element(cells).perform()
    assert tip.text.startswith("workers ")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_no_wider_than_the_screen(page, width: int):
    emulate(page, width=width, scheme="light")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width


def test_many_columns_fit_a_usual_screen_and_scroll_on_a_small_one(page):
    add = """
        for (const row of document.querySelectorAll('#results tr'))
            for (const text of ['dirichlet:0.1', 'random:0.25', 'workers', '1, 2, 3, 4']) {
                const cell = row.insertBefore(row.cells[1].cloneNode(true), row.cells[1]);
                cell.className = '';
                cell.textContent = text;
            }
        const box = document.querySelector('.scroll');
        return [box.scrollWidth, box.clientWidth, box.querySelectorAll('thead th').length];"""
    needed, there, columns = page.execute_script(add)
    assert needed <= there and columns == 13
    emulate(page, width=390, scheme="light")
    box = page.find_element("css selector", ".scroll")
    page.execute_script("arguments[0].scrollLeft = 9999", box)
    last = page.find_element("css selector", "#results tr:nth-child(2) td:last-child")
    assert last.location["x"] + last.size["width"] <= 390, "it has come into view"


@pytest.mark.parametrize("width", [390, 1280])
def test_words_in_pictures_are_large_enough_to_read(page, width: int):
    emulate(page, width=width, scheme="light")
    sizes = page.execute_script("""
        return [...document.querySelectorAll('.picture svg')].map(svg => {
            const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
            const words = [...svg.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize));
            return scale * Math.min(...words);
        })""")
    assert len(sizes) == 13 and min(sizes) > 8


def test_text_keeps_its_contrast_in_light_and_dark(page):
    contrast = """
        const light = name => {
            const probe = document.createElement('i');
            probe.style.color = `var(--${name})`;
            document.body.append(probe);
            const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map(part => part / 255)
                .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
            probe.remove();
            return .2126 * r + .7152 * g + .0722 * b;
        };
        const [a, b] = [light(arguments[0]), light('paper')];
        return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);"""
    papers = set()
    for scheme in ("light", "dark"):
        emulate(page, width=1280, scheme=scheme)
        papers.add(page.execute_script("return getComputedStyle(document.body).backgroundColor"))
        for name, least in {"ink": 7, "faint": 4.5, "accent": 4.5, **{f"c{i}": 3 for i in range(8)}}.items():
            assert page.execute_script(contrast, name) >= least, (scheme, name)
    assert len(papers) == 2


def test_what_is_folded_is_printed(page, address: str):
    folded = "return document.querySelectorAll('details:not([open])').length"
    assert page.execute_script(folded) > 0
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert page.execute_script(folded) == 0
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert page.execute_script(folded) > 0


def test_links_lead_to_the_files(page, address: str):
    links = page.execute_script("return [...document.querySelectorAll('a')].map(a => a.href)")
    folder = address.removesuffix("report.html")
    assert links
    assert all(link.startswith(folder) and Path(link.removeprefix("file://")).is_file() for link in links)


def test_a_table_is_shaded_at_its_edge_while_there_is_more_of_it(page):
    def edge() -> object:
        image = Image.open(io.BytesIO(page.find_element("css selector", ".scroll").screenshot_as_png)).convert("RGB")
        return image.getpixel((image.width - 2, 4))

    white = (255, 255, 255)
    assert edge() == white
    emulate(page, width=500, scheme="light")
    assert edge() != white
    page.execute_script("const box = document.querySelector('.scroll'); box.scrollLeft = box.scrollWidth")
    assert edge() == white
