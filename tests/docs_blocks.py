"""The fenced blocks of README.md and docs/."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", "diff", "text", "yaml", ""}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """Of the fence that opens it."""
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(page, text):
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], textwrap.dedent(found[3]))
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page, (ROOT / page).read_text())]


def only(language):
    found = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", found, ids=map(str, found))


def one_block(page, quote):
    found = [block for block in BLOCKS if block.language == "python" and block.page == page and quote in block.text]
    assert len(found) == 1, f"{len(found)} blocks of Python in {page} have {quote!r}"
    return found[0]


def substituted(text, replaced):
    for old, new in replaced.items():
        assert text.count(old) == 1, f"not once in the block: {old!r}"
        text = text.replace(old, new)
    return text
