"""`hyperpod report`: its arguments, and what it writes."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.report.make_report import run_report
from hyperpod_plugins.report.measured_times import failure_trace_json, stage_times_json
from hyperpod_plugins.report.page import write_page
from hyperpod_plugins.report.perfetto_trace import perfetto_trace
from hyperpod_plugins.report.picture import draw_report
from hyperpod_plugins.report.run_report import RunReport
from hyperpod_plugins.report.text import headline_rows, markdown, verdict_line
from hyperpod_plugins.whole_file import write_whole_file

FORMATS = ("html", "md", "json", "png", "perfetto", "stage-times", "trace")
_ENDINGS = {"html": "html", "png": "png"}
"""Formats that are not printed, with the ending of their file."""


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hyperpod report`."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of the run's ledgers (HYPERPOD_EVENTS)")
    of_format = "a page, Markdown, JSON, a picture, for ui.perfetto.dev, or for options of `hyperpod plan`"
    parser.add_argument("--format", choices=FORMATS, default="html", help=of_format)
    of_output = "file to write, or - for standard output (default: that, but RUN/report.html and RUN/report.png)"
    parser.add_argument("--output", "-o", help=of_output, default=argparse.SUPPRESS)
    of_check = "exit with code 1 if the run should not be started again: it failed twice in a row in the same way"
    parser.add_argument("--check", action="store_true", help=of_check)


def report_text(arguments: argparse.Namespace) -> tuple[list[str], bool]:
    """Write the report, and return lines for standard output: the report, or the path and figures of a written one.

    Returns:
        The lines; and whether it is good: with `--check`, the verdict is not to stop.

    Raises:
        ConfigError: there are no ledgers, or the file cannot be written.
    """
    report = run_report(arguments.folder)
    return _lines(report, arguments), not (arguments.check and report.verdict.action == "stop")


def _lines(report: RunReport, arguments: argparse.Namespace) -> list[str]:
    ending = _ENDINGS.get(arguments.format, "")
    given: str = vars(arguments).get("output") or ("" if ending else "-")
    if ending and given == "-":
        raise ConfigError(f"{arguments.format} is not printed: give --output FILE, or another --format")
    path = Path(given) if given else Path(arguments.folder, f"report.{ending}")
    try:
        if arguments.format == "html":
            write_page(report, path)
        elif arguments.format == "png":
            draw_report(report, path)
        else:
            text = _texts[arguments.format](report)
            if given == "-":
                return text.rstrip("\n").split("\n")
            write_whole_file(path, text)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {path}: {error.strerror}. Give another --output."
        ) from error
    figures = [f"{name}: {value}" for name, value in headline_rows(report.headline)]
    return [*figures, f"verdict: {verdict_line(report.verdict)}", f"written to {path}"]


def _json(report: RunReport) -> str:
    return json.dumps(asdict(report), indent=1)


_texts: Mapping[str, Callable[[RunReport], str]] = {
    "md": markdown,
    "json": _json,
    "perfetto": perfetto_trace,
    "stage-times": stage_times_json,
    "trace": failure_trace_json,
}
