"""The chart of an ablation study."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from lagom.watch.interval_chart import Bar, interval_chart

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_begin_at_zero_and_intervals_lie_around_their_ends() -> None:
    bars = [Bar("layer fc1", 0.2, 0.1, 0.3), Bar("feature <age>", -0.1, -0.15, -0.05), Bar("one seed", 0.05)]
    chart = ElementTree.fromstring(interval_chart("Effects", bars, "difference"))
    ticks = {text.text: float(text.attrib["x"]) for text in chart.iter(f"{SVG}text") if _is_number(text.text)}
    zero = ticks["0"]
    scale = (ticks["0.2"] - zero) / 0.2
    first, second, third = list(chart.iter(f"{SVG}rect"))
    for rect, bar in ((first, bars[0]), (second, bars[1]), (third, bars[2])):
        left, width = float(rect.attrib["x"]), float(rect.attrib["width"])
        start, end = (left, left + width) if bar.value > 0 else (left + width, left)
        assert abs(start - zero) < 0.2
        assert abs(end - zero - bar.value * scale) < 0.3
    intervals = [line for line in chart.iter(f"{SVG}line") if line.attrib.get("stroke-width") == "1.4"]
    level = [line for line in intervals if line.attrib["y1"] == line.attrib["y2"]]
    found = [[(float(line.attrib[end]) - zero) / scale for end in ("x1", "x2")] for line in level]
    assert [[round(end, 2) for end in ends] for ends in found] == [[0.1, 0.3], [-0.15, -0.05]]
    assert "feature <age>" in [text.text for text in chart.iter(f"{SVG}text")]


def test_what_is_not_finite_is_left_out() -> None:
    assert interval_chart("Effects", [Bar("a", math.nan), Bar("b", math.inf)]) == ""
    chart = interval_chart("Effects", [Bar("a", math.nan), Bar("b", 1.0, -math.inf, math.inf)])
    assert chart.count("<rect") == 1
    assert not re.search("nan|inf", chart)


def _is_number(text: str | None) -> bool:
    return text is not None and re.fullmatch(r"-?[\d.]+", text) is not None
