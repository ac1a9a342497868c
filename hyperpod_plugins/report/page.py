"""The page of `hyperpod report`: one HTML file that shows a `RunReport` and loads nothing.

Whatever a ledger says is data: it is embedded as JSON that holds no markup, the page's code writes it as text only,
and its Content-Security-Policy allows the two scripts of ours and no request.
"""

import base64
import hashlib
import html
import json
import os
import re
from importlib import resources
from typing import Any, Final

from hyperpod_plugins.report.page_data import page_data
from hyperpod_plugins.report.run_report import RunReport
from hyperpod_plugins.whole_file import write_whole_file

_CODE: Final = ("format.js", "view.js", "timeline.js", "charts.js", "tables.js", "page.js")
"""Order in which the page's own code is joined."""
_MARKUP: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def page_html(report: RunReport) -> str:
    """Return a page of HTML that shows `report` and needs no other file and no network.

    It stays below 2 MB for 10,000 steps, 100 incidents and 64 ranks; see `page_data` for what is left out.
    """
    charts = f"/*\n{_asset('uPlot.LICENSE.txt')}*/\n{_asset('uPlot.iife.min.js')}"
    code = '"use strict";\n{\n' + "\n".join(_asset(name) for name in _CODE) + "}\n"
    parts = {
        "policy": _content_security_policy(charts, code),
        "title": html.escape(_encodable(report.run_id[:100])),
        "style": _asset("uPlot.min.css") + _asset("page.css"),
        "data": embedded_json(page_data(report)),
        "charts": charts,
        "code": code,
    }
    # One pass: what has been filled in, and may come from a ledger, is not searched for placeholders again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def write_page(report: RunReport, path: str | os.PathLike[str]) -> None:
    """Write the page of `report` to `path`; readers see the old file or the whole new one.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole_file(path, page_html(report))


def embedded_json(data: Any) -> str:
    """Return `data` as JSON that may stand in a `<script>`: ASCII, without `<`, `>` and `&`.

    Raises:
        ValueError: `data` holds NaN or an infinity.
    """
    # ASCII only: U+2028 and U+2029 are escaped, too.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return re.sub("[<>&]", lambda found: _MARKUP[found[0]], text)


def _content_security_policy(*scripts: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _asset(name: str) -> str:
    return resources.files("hyperpod_plugins.report").joinpath("page_assets", name).read_text(encoding="utf-8")
