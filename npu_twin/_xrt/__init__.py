"""Implementation of ``npu_twin.pyxrt``, one file per group of classes. Import ``npu_twin.pyxrt`` instead."""
