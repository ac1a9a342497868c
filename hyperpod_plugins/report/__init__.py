"""What a run's ledgers say: figures, stragglers, and the page of `hyperpod report`."""

from hyperpod_plugins.report.make_report import run_report
from hyperpod_plugins.report.page import page_html, write_page
from hyperpod_plugins.report.run_report import RunReport

__all__ = ["RunReport", "page_html", "run_report", "write_page"]
