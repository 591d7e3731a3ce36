"""Hold the twin against measurements: `python -m npu_twin.validate [--rows FILE] [--models FILE]`.

The built-in rows and models are judged by cross-validation: a parameter set that has not seen the size or the
model in question. Files of users are judged with the parameters as shipped; nothing is ever fitted on them.
"""
