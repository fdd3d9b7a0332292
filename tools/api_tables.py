"""How nbdev shows a symbol on the site: signature, docstring, and its docments as a table.

nbdev 2.4.14 writes docments only as comments inside the signature. tools/docs.py names this renderer in the settings
of its staging copy, so neither the package nor a notebook session depends on it.
"""
import inspect
import operator
import re
from importlib import import_module

from fastcore.docments import docments
from nbdev.doclinks import NbdevLookup
from nbdev.showdoc import BasicMarkdownRenderer

EMPTY = inspect.Parameter.empty
WIDTH = 88  # characters of a signature on one line; longer ones get a line per parameter


def type_text(annotation) -> str:
    "Annotation as written, without module prefixes."
    if annotation is EMPTY:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def default_text(default) -> str:
    "Default as a reader would type it."
    if default is EMPTY:
        return ""
    text = getattr(default, "__name__", None) or repr(default)
    return "..." if text.startswith("<") else text


def table(header: list[str], rows: list[list[str]]) -> str:
    "Markdown table without the columns that are empty in every row."
    used = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    lines = [[header[i] for i in used], ["---"] * len(used), *[[row[i] for i in used] for row in rows]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    "Inline code, or nothing for an empty string."
    return f"`{text}`" if text else ""


def signature_of(symbol):
    "Signature without `self`, or None where Python knows none."
    try:
        signature = inspect.signature(symbol)
    except (TypeError, ValueError):
        return None
    return signature.replace(parameters=[p for n, p in signature.parameters.items() if n != "self"])


def signature_text(name: str, signature) -> str:
    "Call as one line, or a line per parameter when that is too long."
    shown = []
    for kind, parameter in ((p.kind, p) for p in signature.parameters.values()):
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        default = default_text(parameter.default)
        shown.append(stars + parameter.name + (f"={default}" if default else ""))
    line = f"{name}({', '.join(shown)})"
    return line if len(line) <= WIDTH else f"{name}(\n    " + ",\n    ".join(shown) + ",\n)"


def field_comments(symbol) -> dict[str, str]:
    "Comments on the fields of a class, which fastcore does not read from a named tuple."
    if not inspect.isclass(symbol):
        return {}
    try:
        lines = inspect.getsource(symbol).split("\n")
    except (OSError, TypeError):
        return {}
    return dict(found.groups() for line in lines if (found := re.match(r"    (\w+): [^#]*#\s*(.+?)\s*$", line)))


def parameter_table(symbol, signature) -> str:
    "Parameters and return value with type, default and docment."
    notes = {**field_comments(symbol), **{name: note for name, note in docments(symbol).items() if note}}
    rows = [[code(name), code(type_text(p.annotation)), code(default_text(p.default)), notes.get(name) or ""]
            for name, p in signature.parameters.items()]
    returned = type_text(signature.return_annotation)
    note = notes.get("return") or ""
    if not inspect.isclass(symbol) and (note or returned not in ("", "None")):
        rows.append(["**returns**", code(returned), "", note])
    return table(["", "type", "default", "meaning"], rows) if rows else ""


def method_table(cls) -> str:
    "Public methods and properties that the class itself defines, with the first line of each docstring."
    rows = []
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        summary = (inspect.getdoc(function) or "").split("\n")[0] if callable(function) else ""
        if name.startswith("_") or not callable(function) or not summary:
            continue
        plain = name if isinstance(member, property) else signature_text(name, signature_of(function))
        anchor = f"{cls.__qualname__}.{name}".lower()  # as nbdev names it in links to methods
        rows.append([f"<span id=\"{anchor}\"></span>{code(' '.join(plain.split()).replace('( ', '(').replace(', )', ')'))}", summary])
    return table(["method", "does"], rows) if rows else ""


def exported(symbol, source: str | None):
    "Exported twin of a symbol that the notebook defined: Python finds the text of a class, and so its comments, in a file only."
    module = re.search(r"/(\w+)\.py#", source or "")
    if module is None:
        return symbol
    return operator.attrgetter(symbol.__qualname__)(import_module(f"k2eagle.{module[1]}"))


class TableRenderer(BasicMarkdownRenderer):
    "Signature, docstring, table of docments, table of methods; with a link to the source."

    def __init__(self, symbol, name=None, title_level=3):  # the base class would evaluate annotations, as of modules imported late
        self.sym, self.nm, self.title_level = symbol, name or symbol.__qualname__, title_level
        module = getattr(symbol, "__module__", "__main__")
        self.fn = symbol.__qualname__ if module == "__main__" else f"{module}.{symbol.__qualname__}"

    def _repr_markdown_(self):
        source = NbdevLookup().code(self.fn)
        symbol = exported(self.sym, source)
        source = source and f"{source.partition('#')[0]}#L{inspect.getsourcelines(symbol)[1]}"  # nbdev leaves out the line
        signature = signature_of(symbol)
        parts = ["---", f"[source]({source}){{.k2-source}}" if source else "", f"{'#' * self.title_level} {self.nm}"]
        if signature is not None:
            parts.append(f"```python\n{signature_text(self.nm, signature)}\n```")
        parts.append(inspect.getdoc(symbol) or "")
        parts.append(parameter_table(symbol, signature) if signature is not None else "")
        parts.append(method_table(symbol) if inspect.isclass(symbol) else "")
        return "\n\n".join(part for part in parts if part)

    def __repr__(self):
        return self.fn
