"""Build the site from the notebooks: `python tools/docs.py [OUT]`, default OUT is _docs.

nbdev processes a staging copy (so nothing in the clone changes), Quarto renders it where it is installed and smalldocs
elsewhere, and then every link and anchor is checked: a broken one fails the build. The site asks for nothing off-site.
"""
import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from latex2mathml.converter import convert
from smalldocs.highlight import highlight

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"(?<![\w-])\d+[a-z]*_(?=[\w-]+\.(?:ipynb|html))")  # nbdev drops it from page names: 10_layers -> layers
MATHS = re.compile(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', re.S)
PROCESS = """
from nbdev.config import get_config
from nbdev.doclinks import _build_modidx
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs
if __name__ == '__main__':
    refresh_quarto_yml(); _build_modidx(); proc_nbs(n_workers=0)
"""


class BrokenSite(Exception):
    "The site could not be built or has a fault that a reader would meet."


def stage(root: Path, folder: Path) -> None:
    "Copy what the site is made of, so that building changes nothing in the clone."
    shutil.copytree(root / "nbs", folder / "nbs", ignore=shutil.ignore_patterns(".*", "__pycache__", "_*[!l]"))
    shutil.copytree(root / "k2eagle", folder / "k2eagle", ignore=shutil.ignore_patterns("__pycache__"))
    settings = (root / "settings.ini").read_text(encoding="utf-8")
    (folder / "settings.ini").write_text(settings + "\nrenderer = api_tables.TableRenderer\n", encoding="utf-8")
    reference = root / "outputs" / "reference"
    if reference.is_dir():
        shutil.copytree(reference, folder / "nbs" / "outputs" / "reference")
    fill_sidebar(folder / "nbs")
    for path in (folder / "nbs").rglob("*.ipynb"):
        edit_cells(path, markdown=lambda text: re.sub(r"\]\(((?:\.\./)*)\.\./outputs/", r"](\1outputs/", text), code=show_code)


def fill_sidebar(nbs: Path) -> None:
    "Put the notebooks that a chapter's pattern names into the sidebar; both renderers need them by name."
    path = nbs / "sidebar.yml"
    sidebar = yaml.safe_load(path.read_text(encoding="utf-8"))
    entries = sidebar["website"]["sidebar"]["contents"]
    for entry in entries:
        if "section" in entry:
            entry["contents"] = sorted(page.relative_to(nbs).as_posix() for page in nbs.glob(entry["contents"]))
    sidebar["website"]["sidebar"]["contents"] = [entry for entry in entries if entry.get("contents") != []]
    path.write_text(yaml.safe_dump(sidebar, sort_keys=False), encoding="utf-8")


def edit_cells(path: Path, markdown=str, code=str) -> None:
    "Rewrite the sources of one notebook's cells."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        change = {"markdown": markdown, "code": code}.get(cell["cell_type"], str)
        cell["source"] = change("".join(cell["source"]))
    path.write_text(json.dumps(notebook), encoding="utf-8")


def show_code(source: str) -> str:
    "Make a definition part of the page, folded below its documentation; leave imports out as nbdev does."
    if not re.match(r"#\s*\|\s*export\s*\n", source):
        return hold_back(source)
    names = defined_names(source)
    if not names:
        return source
    return f'#| exports\n#| code-fold: true\n#| code-summary: "Definition: {", ".join(names)}"\n' + source.partition("\n")[2]


def defined_names(source: str) -> list[str]:
    "Names that a cell defines at its top level."
    names = []
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(statement.name)
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def hold_back(source: str) -> str:
    "Mark an example or test that also imports: nbdev would run it for the site, though its output is there already."
    if re.search(r"^#\s*\|\s*(export|exec_doc|eval)", source, re.M) or "show_doc(" in source or source.startswith(("%", "!")):
        return source
    kinds = {type(statement) for statement in ast.parse(source).body}
    mixed = kinds & {ast.Import, ast.ImportFrom} and kinds - {ast.Import, ast.ImportFrom}
    return f"#| eval: false\n{source}" if mixed else source


def call(command: list, folder: Path) -> None:
    "Run one build step; its output is shown only when it fails."
    paths = [str(folder), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env.pop("IN_TEST", None)  # nbdev's mark of a notebook under test, under which it exports nothing
    done = subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise BrokenSite(f"{Path(str(command[0])).name} failed with exit status {done.returncode}:\n{done.stdout[-6000:]}")


def render_quarto(folder: Path) -> Path:
    "Render with Quarto, as nbdev does by itself."
    call([Path(sys.executable).with_name("nbdev_docs")], folder)
    return folder / "_docs"


def render_smalldocs(folder: Path) -> Path:
    "Render with smalldocs what nbdev prepared for Quarto."
    script = folder / "process.py"
    script.write_text(PROCESS, encoding="utf-8")
    call([sys.executable, script], folder)
    proc = folder / "_proc"
    drop_numbers(proc)
    write_source_pages(folder / "k2eagle", proc / "source")
    call([sys.executable, "-m", "smalldocs.cli", "render", "-q", str(proc)], folder)
    website = yaml.safe_load((folder / "nbs" / "nbdev.yml").read_text(encoding="utf-8"))["website"]
    for page in (proc / "_docs").rglob("*.html"):
        page.write_text(finish(page.read_text(encoding="utf-8"), page.relative_to(proc / "_docs"), website), encoding="utf-8")
    for style in (proc / "_docs").rglob("*.css"):
        style.write_text(without_web_fonts(style.read_text(encoding="utf-8")), encoding="utf-8")
    return proc / "_docs"


def drop_numbers(proc: Path) -> None:
    "Name pages as nbdev's own links expect them; smalldocs does not read `output-file`."
    for path in sorted(proc.rglob("*.ipynb")):
        edit_cells(path, markdown=lambda text: re.sub(r"\]\([^)\s]+\)", lambda link: NUMBER.sub("", link[0]), text))
        path.rename(path.with_name(NUMBER.sub("", path.name)))
    for path in proc.glob("*.yml"):
        path.write_text(NUMBER.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")


def write_source_pages(package: Path, out: Path) -> None:
    "One page per module with an anchor on every line, so that source links work offline and name this very version."
    out.mkdir()
    for module in sorted(package.rglob("[a-z]*.py")):
        lines = highlight(module.read_text(encoding="utf-8").rstrip(), "python").split("\n")
        body = "\n".join(f'<span class="k2-line" id="L{n}">{line}</span>' for n, line in enumerate(close_spans(lines), 1))
        inside = module.relative_to(package)
        page = f"{inside.parts[0]}/{module.stem}" if len(inside.parts) > 1 else module.stem
        note = f"Generated from the notebook behind [{module.stem}](../{page}.ipynb)."
        head = f"---\ntitle: k2eagle/{inside.as_posix()}\nsearch: false\ntoc: false\npage-layout: full\n---\n\n{note}\n\n"
        block = f'```{{=html}}\n<div class="sourceCode k2-source-page"><pre class="sourceCode python"><code>{body}</code></pre></div>\n```\n'
        (out / f"{module.stem}.qmd").write_text(head + block, encoding="utf-8")


def close_spans(lines: list[str]) -> list[str]:
    "Close a highlighted span at a line's end and open it again on the next (a docstring over several lines)."
    closed, carried = [], ""
    for line in lines:
        line = carried + line
        opened = [tag for tag in re.findall(r"<span[^>]*>|</span>", line)]
        carried = opened[-1] if opened and opened[-1] != "</span>" else ""
        closed.append(line + ("</span>" if carried else ""))
    return closed


def finish(page: str, name: Path, website: dict) -> str:
    "Make links relative and maths static."
    up = "../" * (len(name.parts) - 1) or "./"
    page = re.sub(rf'href="{re.escape(website["site-url"])}/?', f'href="{up}', page)
    page = re.sub(rf'href="{re.escape(website["repo-url"])}/blob/\w+/k2eagle/(?:\w+/)*(\w+)\.py', rf'href="{up}source/\1.html', page)
    page = re.sub(r'<(?:link|script)[^>]*katex[^>]*>(?:</script>)?', "", page)
    page = re.sub(r"<summary>Definition: ([^<]+)</summary>", definition_anchors(set(re.findall(r'\bid="([^"]+)"', page))), page)
    return MATHS.sub(mathml, page)


def definition_anchors(taken: set):
    "Give each folded definition the anchors that nbdev's links to helpers name, unless a heading has them."
    def marked(match: re.Match) -> str:
        anchors = [name.lower() for name in match[1].split(", ") if name.lower() not in taken]
        taken.update(anchors)
        return "".join(f'<span id="{name}"></span>' for name in anchors) + match[0]
    return marked


def mathml(match: re.Match) -> str:
    "Turn one formula into MathML, which browsers draw without scripts or fonts from elsewhere."
    formula = html.unescape(match[2])
    drawn = convert(formula, display="block" if match[1] == "display" else "inline")
    if "<mi>\\" in drawn or "<mi>&</mi>" in drawn:
        raise BrokenSite(f"no MathML for the formula {formula!r}: write it with commands that latex2mathml knows")
    return f'<span class="math {match[1]}">{drawn}</span>'


def without_web_fonts(style: str) -> str:
    "Drop imports of web fonts; their addresses hold `;`, so the whole url(...) is matched."
    return re.sub(r"@import\s*(?:url\([^)]*\)|\"[^\"]*//[^\"]*\"|'[^']*//[^']*')\s*;?", "", style)


class References(HTMLParser):
    "The ids of a page, what it links to and what it loads."

    def __init__(self):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.update(filter(None, (values.get("id"), values.get("name") if tag == "a" else None)))
        if tag == "a" and values.get("href") is not None:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "modulepreload"):
            self.loads.append(values.get("href", ""))
        elif tag in ("script", "img", "iframe", "source", "video") and values.get("src"):
            self.loads.append(values["src"])


def read_page(path: Path) -> References:
    "Parse one page."
    references = References()
    references.feed(path.read_text(encoding="utf-8"))
    return references


def faults(site: Path) -> list[str]:
    "Links and anchors that lead nowhere, and anything loaded from off-site, each as `page: fault`."
    pages = {path.relative_to(site).as_posix(): read_page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for name, page in pages.items():
        found += [f"{name}: broken link {link}" for link in dict.fromkeys(page.links) if not leads_somewhere(link, name, pages, site)]
        for load in dict.fromkeys(page.loads):
            if re.match(r"(?:https?:)?//", load):
                found.append(f"{name}: loads {load} from off-site")
            elif not load.startswith("data:") and not leads_somewhere(load, name, pages, site):
                found.append(f"{name}: missing file {load}")
    for path in sorted(site.rglob("*.css")):
        remote = re.findall(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")]+)", path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site).as_posix()}: loads {address} from off-site" for address in remote]
    return found


def leads_somewhere(link: str, name: str, pages: dict, site: Path) -> bool:
    "Is the target of a link on page `name` there, anchor included? Off-site links are not followed."
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = os.path.normpath(os.path.join(os.path.dirname(name), unquote(parts.path))) if parts.path else name
    if target not in pages and (site / target / "index.html").is_file():
        target = os.path.normpath(os.path.join(target, "index.html"))
    if not (site / target).exists() or target.startswith(".."):
        return False
    anchor = unquote(parts.fragment)
    return not anchor or target not in pages or anchor in pages[target].ids


def render(out: Path, root: Path = ROOT) -> Path:
    "Render the site into `out` without checking it."
    with tempfile.TemporaryDirectory(prefix="k2eagle-docs-") as name:
        folder = Path(name).resolve()
        stage(root, folder)
        site = (render_quarto if shutil.which("quarto") else render_smalldocs)(folder)
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(site, out)
    return out


def build(out: Path, root: Path = ROOT) -> list[str]:
    "Build the site into `out`; returns its pages, raises `BrokenSite` when something is wrong with it."
    found = faults(render(out, root))
    if found:
        raise BrokenSite(f"{len(found)} faults in {out.name}:\n  " + "\n  ".join(found))
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*.html"))


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "_docs").resolve()
    try:
        pages = build(target)
    except BrokenSite as error:
        sys.exit(f"docs: {error}")
    print(f"docs: {len(pages)} pages in {target.name}/, no broken link; open {target.name}/index.html or serve it: python -m http.server -d {target.name}")
