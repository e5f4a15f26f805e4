"""The map of the rooms and a table of the modules of each, from the import rules and the sources.

What a module is stands in its first line, and nowhere else. Must not import a room.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.test_imports import ARROWS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "syncer"
DOCSTRING = re.compile(r'\A(?:#[^\n]*\n|\s)*"""(.*?)(?:"""|\n\n)', re.DOTALL)
WHOLE = re.compile(r'\A(?:#[^\n]*\n|\s)*"""(.*?)"""', re.DOTALL)
COMMENT = re.compile(r"\A(?:/\*|//)\s*(.*?)(?:\*/|\n\s*\*?\s*\n|\n(?!//| \*|   ))", re.DOTALL)


def description(path: Path, whole: bool = False) -> str:
    """The first paragraph of a module's docstring, or of a C file's first comment, as one line;
    with `whole` all of a docstring."""
    form = COMMENT if path.suffix in (".c", ".h") else WHOLE if whole else DOCSTRING
    found = form.match(path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path.relative_to(ROOT)} does not begin by saying what it is")
    words = re.sub(r"\s*\n\s*(?:\*|//)?\s*", " ", found[1]).strip()
    return words.replace("|", "\\|")


def first_sentence(path: Path) -> str:
    """Of the first paragraph: up to a full stop that ends a sentence."""
    return re.split(r"(?<=\.)\s", description(path), maxsplit=1)[0].removesuffix(".")


def must_not(path: Path) -> str:
    """What a module says that it must not do, or nothing."""
    found = re.search(r"\b[Mm]ust not ([^.;]*)", description(path, whole=True))
    return re.split(r": |, and ", found[1])[0] if found else ""


def rooms() -> list[str]:
    """Every room, above those it may import."""
    def height(room: str) -> int:
        return 1 + max((height(below) for below in ARROWS[room]), default=0)

    return sorted(ARROWS, key=lambda room: (-height(room), room))


def place(room: str) -> Path:
    """The folder or the file of a room."""
    candidates = [PACKAGE / room, PACKAGE / f"{room}.py", PACKAGE / f"{room}.pyx"]
    return next(path for path in candidates if path.exists())


def room_map() -> str:
    """Who may import whom: every arrow points down the list."""
    order = rooms()
    width = max(map(len, order))
    lines = [f"{'demo, cli':<{width}} -> everything"]
    for room in order:
        below = " ".join(sorted(ARROWS[room], key=order.index))
        lines.append(f"{room:<{width}} -> {below or 'nothing'}")
    return "\n".join(["```", *lines, "```"]) + "\n"


def room_table() -> str:
    """One row per room: what it says of itself."""
    rows = ["| room | what it is | must not |", "|---|---|---|"]
    for room in ["demo", "cli", *rooms()]:
        at = place(room)
        head = at / "__init__.py" if at.is_dir() else at
        name = at.relative_to(ROOT).as_posix()
        rows.append(f"| [`{name}`](../{name}) | {first_sentence(head).split('; must not')[0]} | "
                    f"{must_not(head)} |")
    return "\n".join(rows) + "\n"


def module_tables() -> str:
    """Every module of every room, by folder."""
    parts = []
    folders = [path for path in sorted([PACKAGE, *PACKAGE.rglob("*/")])
               if path.name != "__pycache__" and any(path.glob("*.py"))]
    for folder in [*folders, ROOT / "csrc"]:
        files = [path for path in sorted(folder.iterdir())
                 if path.suffix in ((".c", ".h") if folder.name == "csrc" else (".py", ".pyx"))
                 and path.name not in ("__init__.py", "__main__.py")]
        if folder.name == "csrc":
            head = "C11, linked into `syncer/kernels/_native.pyx` and into the harness."
        else:
            head = description(folder / "__init__.py")
        rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in files]
        parts += [f"## `{folder.relative_to(ROOT).as_posix()}`", "", head, "",
                  "| module | what it is |", "|---|---|", *rows, ""]
    return "\n".join(parts).rstrip("\n") + "\n"
