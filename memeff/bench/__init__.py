"""Measure the time and memory of attention beside what a user would pick instead.

`python -m memeff.bench --help` describes the command line. The names below serve notebooks and
scripts.
"""

from memeff.bench.calls import Run
from memeff.bench.cases import MODES, TITLES, Case, Row
from memeff.bench.device import machine
from memeff.bench.formatting import human, markdown, tokens
from memeff.bench.implementations import STANDARD, why_not
from memeff.bench.memory import memory_table, temp_bytes
from memeff.bench.plots import chart, figure
from memeff.bench.speed import measure, speed_table
from memeff.bench.tables import memory_markdown, speed_markdown

__all__ = [
    "MODES",
    "STANDARD",
    "TITLES",
    "Case",
    "Row",
    "Run",
    "chart",
    "figure",
    "human",
    "machine",
    "markdown",
    "measure",
    "memory_markdown",
    "memory_table",
    "speed_markdown",
    "speed_table",
    "temp_bytes",
    "tokens",
    "why_not",
]
