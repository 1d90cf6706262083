"""Remove from lowered programs what is named after Python code."""

import re


def without_names(text: str) -> str:
    """Number functions in the order in which they appear, and drop what else is named after Python code."""
    text = re.sub(r"module @\S+", "module", text)
    text = re.sub(r'jax\.result_info = "[^"]*"', "", text)
    numbers: dict[str, str] = {}

    def number(match: re.Match) -> str:
        return numbers.setdefault(match[0], f"@{len(numbers)}")

    return re.sub(r"(?<!custom_call )@[\w.$-]+", number, text)
