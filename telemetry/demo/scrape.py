"""One reading of /metrics. Owns: asking a set of samples for sums, by the names of the metric catalogue."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "admitscope_"


class Scrape:
    """The samples of one exposition. Names are given without the `admitscope_` prefix; unknown names sum to 0."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` that have all of `labels`."""
        return sum(
            value
            for found, value in self._samples.get(PREFIX + name, ())
            if all(found.get(label) == wanted for label, wanted in labels.items())
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of `name` by the values of `label`, those above zero, largest first."""
        sums: dict[str, float] = {}
        for found, value in self._samples.get(PREFIX + name, ()):
            key = found.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return {key: value for key, value in sorted(sums.items(), key=lambda item: (-item[1], item[0])) if value > 0}
