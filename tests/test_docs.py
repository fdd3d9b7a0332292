"The site: every notebook has its page, API tables and source links are there, search finds, nothing is broken or off-site."
import json
import re
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import docs
import pytest
from conftest import ROOT

NOTEBOOKS = sorted(path.relative_to(ROOT / "nbs") for folder in ("", "runs", "tutorials") for path in (ROOT / "nbs" / folder).glob("*.ipynb"))
LIBRARY = [path for path in NOTEBOOKS if re.match(r"\d", path.name)]

# Types into the search box of a page in a frame, then writes into the title what came up and what the page loaded.
PROBE = """<iframe id="page" src="index.html" style="width:1400px;height:900px"></iframe><script>
page.onload = () => { const inside = page.contentDocument, box = inside.querySelector("input[type=search], .smalldocs-search input");
  const wait = ms => new Promise(done => setTimeout(done, ms));
  (async () => { box.focus(); await wait(600); box.value = "write_atomic"; box.dispatchEvent(new Event("input", {bubbles: true})); await wait(1500);
    document.body.innerHTML = "<pre>" + JSON.stringify({found: inside.body.innerText.split("write_atomic").length - 1,
      links: [...inside.querySelectorAll("a")].map(a => a.href).filter(href => href.includes("files.html")),
      loaded: page.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name)}) + "</pre>"; })(); };
</script>"""


def page_name(notebook) -> str:
    "Page of a notebook, which drops the number."
    return notebook.with_name(re.sub(r"^\d+[a-z]*_", "", notebook.name)).with_suffix(".html").as_posix()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The site as `make docs` renders it."
    return docs.render(tmp_path_factory.mktemp("site") / "_docs")


def test_no_link_anchor_or_file_is_missing_and_nothing_is_off_site(site):
    assert docs.faults(site) == []


def test_every_notebook_has_a_page(site):
    missing = [str(path) for path in NOTEBOOKS if not (site / page_name(path)).is_file()]
    assert not missing


def test_every_page_is_in_the_sidebar(site):
    linked = {link.removeprefix("./") for link in docs.read_page(site / "index.html").links}
    assert not {page_name(path) for path in NOTEBOOKS} - linked - {"index.html"}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_page_has_api_tables_and_source_links(site, path):
    name = re.sub(r"^\d+[a-z]*_", "", path.stem)
    page = (site / page_name(path)).read_text(encoding="utf-8")
    assert re.search(rf'href="\./source/{name}\.html#L\d+"[^>]*>source<', page), "no link to the source"
    assert re.search(r"<th[^>]*>meaning</th>", page), "no table of parameters"


def test_search_index_has_the_functions(site):
    text = (site / "search.json").read_text(encoding="utf-8")
    missing = [name for module in sorted((ROOT / "k2eagle").glob("[a-z]*.py")) for name in public_functions(module) if name not in text]
    assert not missing


def public_functions(module) -> list[str]:
    "Names of a module's public functions."
    return re.findall(r"^def ([a-z]\w*)\(", module.read_text(encoding="utf-8"), re.M)


def test_links_and_loads_are_checked(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#gone">x</a><a href="c.html">x</a><a href="#top">x</a><img src="no.png">', encoding="utf-8")
    (tmp_path / "b.html").write_text('<h1 id="here">x</h1><a href="a.html">x</a><script src="https://example.org/x.js"></script>', encoding="utf-8")
    (tmp_path / "s.css").write_text("@import url(//example.org/font;x.css);", encoding="utf-8")
    assert docs.faults(tmp_path) == [
        "a.html: broken link b.html#gone",
        "a.html: broken link c.html",
        "a.html: broken link #top",
        "a.html: missing file no.png",
        "b.html: loads https://example.org/x.js from off-site",
        "s.css: loads //example.org/font;x.css from off-site",
    ]


def test_formulas_become_mathml():
    page = r'<span class="math inline">\(\tau = 1 + \frac{a}{d}\)</span>'
    assert "<mfrac>" in docs.MATHS.sub(docs.mathml, page)
    with pytest.raises(docs.BrokenSite, match="unheard"):
        docs.MATHS.sub(docs.mathml, r'<span class="math inline">\(\unheard{x}\)</span>')


class Quiet(SimpleHTTPRequestHandler):
    "Serve the site without a log."

    def log_message(self, *_):
        pass


def test_search_works_in_a_browser_without_the_network(site, chromium, tmp_path):
    (site / "probe.html").write_text(PROBE, encoding="utf-8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}/"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
               "--disable-component-update", "--disable-sync", "--virtual-time-budget=9000", f"--user-data-dir={tmp_path / 'profile'}"]
    try:
        shown = subprocess.run([chromium, *options, "--dump-dom", f"{origin}probe.html"], capture_output=True, text=True, timeout=120)
    finally:
        server.shutdown()
        server.server_close()
        (site / "probe.html").unlink()
    result = re.search(r"<pre>(.*)</pre>", shown.stdout, re.S)
    assert result, shown.stdout[-2000:] + shown.stderr[-2000:]
    seen = json.loads(docs.html.unescape(result[1]))
    assert seen["loaded"] and all(name.startswith(origin) for name in seen["loaded"])
    assert seen["found"] and any("write_atomic" in link for link in seen["links"]), seen
