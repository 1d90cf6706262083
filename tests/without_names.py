"""Remove names that come from Python code from lowered programs."""

import re


def without_names(text: str) -> str:
    """Replace function names by their order of appearance, and drop other names from Python."""
    text = re.sub(r"module @\S+", "module", text)
    text = re.sub(r'jax\.result_info = "[^"]*"', "", text)
    numbers: dict[str, str] = {}

    def number(match: re.Match) -> str:
        return numbers.setdefault(match[0], f"@{len(numbers)}")

    return re.sub(r"(?<!custom_call )@[\w.$-]+", number, text)
