"""Automatic bisect: name the first kernel, layer, host operation or buffer that is wrong."""

from llms.verify.localise.find import PATHS, BisectNotOffered, find
from llms.verify.localise.judge import Row
from llms.verify.localise.report import BisectReport
from llms.verify.localise.swap import Confirmation

__all__ = ["PATHS", "BisectNotOffered", "BisectReport", "Confirmation", "Row", "find"]
