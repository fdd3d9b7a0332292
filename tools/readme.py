"Write README.md from nbs/index.ipynb; `--check` only compares and exits 1 when they differ."
import json
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = re.compile(r"^#\s*\|\s*(hide|include:\s*false)\b", re.M)
DIRECTIVE = re.compile(r"^#\s*\|.*\n?", re.M)
RELATIVE = re.compile(r"\]\((?![a-z]+:|#|/)([^)\s]+)\)")


def joined(value) -> str:
    "Text of a notebook field, which is a string or a list of lines."
    return "".join(value or "")


def output_text(output: dict) -> str:
    "What a reader of plain Markdown sees of one cell output; a chart is shown by a link to its file instead."
    data = output.get("data", {})
    if any(kind.startswith("image/") for kind in data):
        return ""
    if "text/markdown" in data:
        return joined(data["text/markdown"]).strip()
    text = joined(output.get("text") or data.get("text/plain")).strip()
    return f"```\n{text}\n```" if text else ""


def from_root(match: re.Match) -> str:
    "Turn a link that is relative to nbs/ into one that works from the repository root."
    return f"]({posixpath.normpath(posixpath.join('nbs', match[1]))})"


def cell_markdown(cell: dict) -> str:
    "Markdown for one cell; hidden cells and `#|` lines vanish."
    source = joined(cell["source"])
    if cell["cell_type"] == "markdown":
        return RELATIVE.sub(from_root, source)
    if cell["cell_type"] != "code" or HIDDEN.search(source):
        return ""
    shown = re.search(r"^#\s*\|\s*echo:\s*false", source, re.M) is None
    parts = [f"```python\n{DIRECTIVE.sub('', source).strip()}\n```"] if shown else []
    return "\n\n".join(parts + [text for output in cell["outputs"] if (text := output_text(output))])


def readme(root: Path = ROOT) -> str:
    "The whole README as the index notebook gives it."
    notebook = json.loads((root / "nbs" / "index.ipynb").read_text(encoding="utf-8"))
    parts = [part for cell in notebook["cells"] if (part := cell_markdown(cell).strip())]
    note = "<!-- Written by tools/readme.py from nbs/index.ipynb: edit that. -->"
    return "\n\n".join([note, *parts]) + "\n"


if __name__ == "__main__":
    path = ROOT / "README.md"
    if "--check" not in sys.argv:
        path.write_text(readme(), encoding="utf-8")
    elif path.read_text(encoding="utf-8") != readme():
        sys.exit("README.md differs from nbs/index.ipynb: run `python tools/readme.py` and commit the result")
