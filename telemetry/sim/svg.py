"""SVG. Owns: how charts of the simulator look, and drawing them without a browser and without a network.

Charts are Vega-Lite by altair; `vl-convert-python` has renderer and fonts' measures in its wheel. Equal data, equal
file. Both packages are the extra `plot`, imported where a chart is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from telemetry.settings import UsageError

#: Okabe and Ito's palette: told apart with any kind of colour vision, in light and dark.
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#808080")
WIDTH: Final = 460
HEIGHT: Final = 240
_GREY: Final = "#808080"

Row = dict[str, float | int | str | bool | None]


def data(rows: Sequence[Row]) -> Any:
    """Rows inside the chart itself: nothing is loaded when it is drawn."""
    import altair

    return altair.Data(values=list(rows))  # type: ignore[no-untyped-call]  # the library leaves it without annotations


def drawn(chart: Any) -> str:
    """The SVG document of an altair chart, on no background, with grey words: it stands on light and on dark."""
    import vl_convert

    styled = chart.configure(background="transparent", font="system-ui, sans-serif")
    styled = styled.configure_view(stroke=None)
    styled = styled.configure_axis(
        gridColor=_GREY, gridOpacity=0.25, domainColor=_GREY, tickColor=_GREY, labelColor=_GREY, titleColor=_GREY
    )
    styled = styled.configure_legend(labelColor=_GREY, titleColor=_GREY)
    styled = styled.configure_title(color=_GREY, anchor="start", fontSize=14, fontWeight="normal")
    styled = styled.configure_range(category=list(COLOURS))
    document: str = vl_convert.vegalite_to_svg(styled.to_dict())
    return document if document.endswith("\n") else document + "\n"


def write(file: Path, chart: Any) -> Path:
    """Draw into `file`, whose folder is made. Raises UsageError when it cannot be written."""
    document = drawn(chart)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(document, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--plot {file}: {error.strerror}") from error
    return file
