"""Automatic bisect: name the first kernel, layer, host operation or buffer that is wrong."""

from .find import PATHS, BisectError, BisectReport, find
from .judge import Row
from .swap import Confirmation

__all__ = ["PATHS", "BisectError", "BisectReport", "Confirmation", "Row", "find"]
