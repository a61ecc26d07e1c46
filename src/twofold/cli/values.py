"""Values of command-line options that argparse has no type for."""

import argparse


def positive(text: str) -> int:
    """An integer above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer above 0, got '{text}'")
    return number
