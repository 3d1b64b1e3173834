"""Reports about runs: one self-contained HTML file with charts, film strips and numbers."""

from typing import TYPE_CHECKING

from pirl.lazy import lazy_names

if TYPE_CHECKING:
    from pirl.report.comparison import PolicyResult, comparison_section, headline, read_results
    from pirl.report.curves import Panel, curves_section
    from pirl.report.film import Episode, episodes_section
    from pirl.report.page import Section, build_page
    from pirl.report.provenance import describe_machine, differing_settings, provenance_section
    from pirl.report.runs import Curve, Event, Run, read_run, seen_against

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "comparison": ("PolicyResult", "comparison_section", "headline", "read_results"),
        "curves": ("Panel", "curves_section"),
        "film": ("Episode", "episodes_section"),
        "page": ("Section", "build_page"),
        "provenance": ("describe_machine", "differing_settings", "provenance_section"),
        "runs": ("Curve", "Event", "Run", "read_run", "seen_against"),
    },
)
