"""Every published figure is computed to the precision that its source shows."""

import pytest

from hyperpod_plugins.planning.published_figures import PublishedFigure, figure_lines, published_figures

FIGURES = published_figures()


@pytest.mark.parametrize("figure", FIGURES, ids=lambda each: f"{each.group}-{each.claim}-{each.inputs}")
def test_a_published_figure_is_computed_to_the_shown_precision(figure):
    assert figure.computed == figure.stated


def test_the_claims_are_all_there():
    """The table of claims, as its source has it; the money is 'about $25 M' there."""
    claims = [figure for figure in FIGURES if figure.group == "claims"]
    wanted = ["4.88 h", "0.0588 %/h", "0.0161 %/h", "132 days", "-32 %", "25.6 M$", "-84 %", "-84 %"]
    assert [figure.cells()[2] for figure in claims] == wanted
    assert len(FIGURES) == 84


@pytest.mark.parametrize(
    ("value", "stated", "agrees"),
    [
        (4.884, "4.88", True),
        (4.886, "4.88", False),
        (156.25, "156.3", True),
        (-0.839, "-84", False),
        (4882.8, "4,883", True),
    ],
)
def test_figures_are_compared_at_the_precision_of_the_source(value, stated, agrees):
    assert PublishedFigure(group="", claim="", inputs="", value=value, stated=stated).agrees == agrees


def test_a_figure_that_differs_is_marked():
    wrong = PublishedFigure(group="all", claim="a claim", inputs="some", value=1.26, stated="1.2", unit="h")
    assert figure_lines([wrong])[-1].split() == ["a", "claim", "some", "1.3", "h", "1.2", "h", "NO"]
